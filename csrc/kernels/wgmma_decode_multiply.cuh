// Products of a tile of K in wgmma_decode: of codes with 16-bit x and with int8 x, and of values.
#pragma once

#include "kernels/wgmma_decode_config.cuh"

namespace cutlass_ops {
namespace {

// The scales of a thread's two rows, as stored in shared memory.
template <class Scale>
struct StoredScales {
  uint32_t words[sizeof(Scale) / 2];

  __device__ __forceinline__ void load(uint32_t from) {
    if constexpr (sizeof(Scale) == 4) {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from));
    } else {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(from));
    }
  }
  __device__ __forceinline__ float2 values() const {
    if constexpr (sizeof(Scale) == 4)
      return make_float2(__uint_as_float(words[0]), __uint_as_float(words[1]));
    else if constexpr (std::is_same_v<Scale, __half>)
      return __half22float2(reinterpret_cast<__half2 const&>(words[0]));
    else
      return make_float2(__uint_as_float(words[0] << 16), __uint_as_float(words[0] & 0xffff0000u));
  }
};

// The position of a thread's part of a stage, in its warpgroup's first row panel.
struct StageAddress {
  uint32_t units, scales, offsets, zeros, x_rows, x_row_zeros;
};

// Whether int8 x has one scale a row, and not one a row and tile.
template <class C>
__device__ __forceinline__ bool ends_with_x_row_scales(Params const& p) {
  return C::kInt8 && !C::kQuantizes && p.x_row_stride == 0;
}

// The scales of experts' rows of x that are applied to sums, or null: of codes with one scale a
// row, and of their values.
__device__ __forceinline__ float const* end_scales(Params const& p) {
  return p.x_row_stride == 0 ? p.x_row_scales : nullptr;
}

// The descriptor of x from the columns on that are `by` * 16 bytes further in shared memory. For
// experts without the carry to its upper half, which takes one of four instructions of an MMA.
// (Matrices were not timed.)
template <class C>
__device__ __forceinline__ uint64_t columns_from(uint64_t x, uint32_t by) {
  if constexpr (C::kGrouped) return (x >> 32) << 32 | uint32_t(uint32_t(x) + by);
  return x + by;
}

// How many 16 bytes further in shared memory a row panel's x is: those of the next tile, for row
// panels from `in_first` on.
template <class C>
__device__ __forceinline__ uint32_t x_of(int row_panel, int in_first) {
  return C::kDeals && row_panel >= in_first ? C::kXBytes / 16 : 0;
}

// A tile's products of codes with 16-bit x and their promotion. `releases`: whether this lane
// arrives at the barrier of stages that were read.
template <class C, int kRowPanels>
__device__ __forceinline__ void multiply_codes(uint64_t x, int in_first,
                                               StageAddress const& address, uint32_t table,
                                               Params const& p, bool releases, uint64_t* empty,
                                               float (&sums)[kRowPanels][C::kSums]) {
  // Whether 32 columns are decoded while the 32 before are multiplied. With 32 rows of x, with code
  // books and for experts that takes 1 to 5 % longer than 64 at a time; codes of 8 bits, which wait
  // for memory, have no registers for it (docs/tuning-notes.md).
  constexpr bool kAhead = C::kBlockM == WgmmaDecodeShape::kBlockM && !C::kGrouped &&
                          !C::kCodebook && ByWidth<bool>(true, false)[C::kBits];
  constexpr int kStepParts = kAhead ? 2 : 1;  // and sets of operands
  constexpr int kPieces = C::kPieces / kStepParts, kGroupParts = C::kGroupSteps * kStepParts,
                kParts = C::kSteps * kStepParts;  // of a row panel
  int const next_group =
      p.weight_rows.count > 1 ? p.shape.most_row_panels * kRowsPerPanel * C::kScaleBytes : 0;
  uint32_t words[C::kWords], operands[kStepParts][kPieces][4];
  float products[C::kColumns / 2];
  decode::RowConstants zero = {};
  StoredScales<typename C::Scale> scales;
  auto const load = [&](int step) {  // of all row panels' steps
#pragma unroll
    for (int j = 0; j < C::kWords / 4; ++j) {
      uint32_t v[4];
      load_shared(address.units + step / C::kSteps * C::kChunk + step % C::kSteps * C::kStepBytes +
                      j * kUnitBytes,
                  v);
#pragma unroll
      for (int r = 0; r < 4; ++r) words[4 * j + r] = v[r];
    }
  };
  auto const fence = [](uint32_t (&a)[kPieces][4]) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) fence_registers(a[j]);
  };
  auto const decode = [&](int i) {  // of all row panels' parts
    int const row_panel = i / kParts, step = i % kParts / kStepParts;
    if constexpr (C::kZeros) {
      if (i % kParts == 0) {
        uint32_t two;
        asm volatile("ld.shared.u16 %0, [%1];"
                     : "=r"(two)
                     : "r"(address.zeros + row_panel * kRowsPerPanel));
        zero = C::Decode::zero_constants(int8_t(two), int8_t(two >> 8));
      }
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      uint32_t (&a)[4] = operands[i % kStepParts][j];
      int const word = (i % kStepParts * kPieces + j) * C::Decode::kWords;
      if constexpr (C::kCodebook) {
        uint32_t pairs[4];
        C::Decode::look_up(words[word], table, pairs);
        C::Decode::combine(pairs, a);
      } else {
        uint32_t const* codes = words + word;
        uint32_t const second = words[word] >> 2 * step;  // of a nibble's second column
        if (C::kStepsShareNibbles) codes = &second;
        if constexpr (C::kZeros) {
          C::Decode::fragment(codes, zero, a);
        } else {
          C::Decode::fragment(codes, a);
        }
      }
      fence_registers(a);
    }
  };
  load(0);
  decode(0);
#pragma unroll
  for (int i = 0; i < kRowPanels * kParts; ++i) {
    int const row_panel = i / kParts, part = i % kParts, step = part / kStepParts;
    bool const first = part % kGroupParts == 0, last = (part + 1) % kGroupParts == 0,
               more = i + 1 < kRowPanels * kParts;
    fence_registers(products);
    cute::warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
      wgmma_float<typename C::Element, C::kBlockM>(
          operands[i % kStepParts][j],
          columns_from<C>(x, x_of<C>(row_panel, in_first) + step * (C::kPanelBytes / 16) +
                                 (part % kStepParts * kPieces + j) * 2),
          products, !first || j > 0);
    cute::warpgroup_commit_batch();
    fence_registers(products);
    if (more && (i + 1) % kStepParts == 0) load((i + 1) / kStepParts);
    if (first)
      scales.load(address.scales + row_panel * kRowsPerPanel * C::kScaleBytes +
                  (step > 0 ? next_group : 0));
    if constexpr (kAhead) {
      cute::warpgroup_wait<1>();
      fence(operands[(i + 1) % kStepParts]);
      if (more) decode(i + 1);
      if (!last) continue;
    }
    cute::warpgroup_wait<0>();
    fence(operands[i % kStepParts]);
    fence_registers(products);
    if (!more && releases) ClusterBarrier::arrive(empty);
    if (last) {
      float2 const scale = scales.values();
#pragma unroll
      for (int e = 0; e < C::kSums; ++e)
        sums[row_panel][e] = fmaf(products[e], e % 4 < 2 ? scale.x : scale.y, sums[row_panel][e]);
    }
    if (!kAhead && more) decode(i + 1);
  }
}

// A tile's products of codes with int8 x and their promotion, in kGroups groups: where there are
// registers, a group's products are promoted while the next one's are made.
template <class C, int kRowPanels, int kGroups>
__device__ __forceinline__ void multiply_int8(uint64_t x, int in_first, StageAddress const& address,
                                              Params const& p, bool releases, uint64_t* empty,
                                              float (&sums)[kRowPanels][C::kSums]) {
  constexpr int kPieces = C::kPieces / kGroups,  // MMAs of 32 columns in a group
      kSets = kGroups > 1 && kRowPanels < (C::kZeros ? 2 : 3) ? 2 : 1;  // of registers
  int const rows = p.shape.most_row_panels * kRowsPerPanel;  // from a group's scales to the next's
  uint32_t words[C::kWords], a[kSets][kPieces][4], products[kSets][C::kColumns / 2];
  StoredScales<typename C::Scale> stored[kSets];
  auto const load = [&](int row_panel) {
#pragma unroll
    for (int j = 0; j < C::kWords / 4; ++j) {
      uint32_t v[4];
      load_shared(address.units + row_panel * C::kChunk + j * kUnitBytes, v);
#pragma unroll
      for (int r = 0; r < 4; ++r) words[4 * j + r] = v[r];
    }
  };
  auto const multiply = [&](int row_panel, int group) {
    int const set = group % kSets;
    stored[set].load(address.scales + (row_panel * kRowsPerPanel + group * rows) * C::kScaleBytes);
    decode::RowConstants zero = {};
    if constexpr (C::kZeros) {
      uint32_t two;
      asm volatile("ld.shared.u16 %0, [%1];"
                   : "=r"(two)
                   : "r"(address.zeros + row_panel * kRowsPerPanel + group * rows));
      zero = C::Decode::zero_constants(int8_t(two), int8_t(two >> 8));
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      uint32_t const* const codes = words + (group * kPieces + j) * C::Decode::kWords;
      if constexpr (C::kZeros) {
        C::Decode::fragment(codes, zero, a[set][j]);
      } else {
        C::Decode::fragment(codes, a[set][j]);
      }
      fence_registers(a[set][j]);
    }
    fence_registers(products[set]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
      wgmma_int8<C::kColumns>(
          a[set][j], columns_from<C>(x, x_of<C>(row_panel, in_first) + (group * kPieces + j) * 2),
          products[set], j > 0);
    cute::warpgroup_commit_batch();
    fence_registers(products[set]);
  };
  load(0);
#pragma unroll
  for (int row_panel = 0; row_panel < kRowPanels; ++row_panel) {
    if (kSets > 1) multiply(row_panel, 0);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      bool const last = group + 1 == kGroups;
      int const set = group % kSets;
      if (kSets == 1) multiply(row_panel, group);
      if (kSets > 1 && !last) multiply(row_panel, group + 1);
      float x_row_scales[C::kMBlocks][2];  // read again for every row panel: registers
      int const of_group = group + (x_of<C>(row_panel, in_first) ? kGroups : 0);
      int x_row_zeros[C::kMBlocks][2];
#pragma unroll
      for (int tb = 0; tb < C::kMBlocks; ++tb) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(x_row_scales[tb][0]), "=f"(x_row_scales[tb][1])
                     : "r"(address.x_rows + of_group * C::kBlockM * 4 + tb * 32));
        if constexpr (C::kXRowZeros) {
          uint32_t zeros_of_two;
          asm volatile("ld.shared.u16 %0, [%1];"
                       : "=r"(zeros_of_two)
                       : "r"(address.x_row_zeros + tb * 8));
          x_row_zeros[tb][0] = int8_t(zeros_of_two), x_row_zeros[tb][1] = int8_t(zeros_of_two >> 8);
        }
      }
      if (kSets == 1 || last) {
        cute::warpgroup_wait<0>();
      } else {
        cute::warpgroup_wait<1>();
      }
#pragma unroll
      for (int j = 0; j < kPieces; ++j) fence_registers(a[set][j]);
      fence_registers(products[set]);
      // once the operands' registers are free
      if (last && row_panel + 1 < kRowPanels) load(row_panel + 1);
      if (last && row_panel + 1 == kRowPanels && releases) ClusterBarrier::arrive(empty);
      float2 scale = stored[set].values();
      scale.x *= 1.0f / C::Decode::kScale, scale.y *= 1.0f / C::Decode::kScale;
      auto const promote = [&](auto const& scaled) {
#pragma unroll
        for (int e = 0; e < C::kSums; ++e) {
          int sum = int(products[set][e]);
          if constexpr (C::kXRowZeros)
            sum -= x_row_zeros[e / 4][e % 2] * int(products[set][C::kSums + e % 4 / 2 * 2]);
          sums[row_panel][e] =
              scaled(float(sum), e % 4 < 2 ? scale.x : scale.y, e, sums[row_panel][e]);
        }
      };
      // With one scale a row of x, it is applied last. Block scales are applied in the order of
      // wgmma_gemm_a8's large tiles: a batch-invariant product has its bits.
      if (ends_with_x_row_scales<C>(p)) {
        promote([&](float integer, float row_scale, int, float sum) {
          return fmaf(integer, row_scale, sum);
        });
      } else {
        promote([&](float integer, float row_scale, int e, float sum) {
          float const x_row_scale = x_row_scales[e / 4][e % 2];
          return C::kZeros ? fmaf(integer, row_scale * x_row_scale, sum)
                           : fmaf(integer * row_scale, x_row_scale, sum);
        });
      }
    }
  }
}

// A tile's products of values, 32 columns at a time: more operands would need more registers than
// two CTAs per SM leave. kGroupsOf16: 32 columns have the scales of two groups.
template <class C, int kRowPanels, bool kGroupsOf16>
__device__ __forceinline__ void multiply_values(uint64_t x, int in_first,
                                                StageAddress const& address, uint32_t table,
                                                Params const& p, bool releases, uint64_t* empty,
                                                float (&sums)[kRowPanels][C::kSums]) {
  using Fold = typename C::Fold;
  constexpr int kGroups = C::kSteps * Fold::kGroups;  // of 32 columns
  // From what belongs to a group of 32, 64 or 128 columns to what belongs to the next.
  int rows = p.shape.most_row_panels * kRowsPerPanel;
  int const shift = p.weight_rows.count == 4 ? 0 : p.weight_rows.count == 2 ? 1 : 2;
  // Keeps its multiples out of registers between tiles.
  if (kGroupsOf16) asm volatile("" : "+r"(rows));
  constexpr int kBuffers =
      C::kOneCta ? 2 : 1;  // of operands: one is decoded while the other is multiplied, where
                           // there are registers
  uint32_t operands[kBuffers][Fold::kGroupKSlices][4];
  constexpr int kVectors = kGroupsOf16 ? 2 : 1;
  StoredCodes<Fold> codes;
  StoredGroup<Fold> vectors[kVectors];
  auto fence = [](uint32_t (&a)[Fold::kGroupKSlices][4]) {
#pragma unroll
    for (int j = 0; j < Fold::kGroupKSlices; ++j) fence_registers(a[j]);
  };
  auto load = [&](int i) {  // of all row panels' groups
    int const row_panel = i / kGroups, group = i % kGroups, step = group / Fold::kGroups,
              part = group % Fold::kGroups;
    if (part < Fold::kLoads) codes.load_part(address.units + row_panel * C::kChunk, step, part);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      uint32_t const row =
          row_panel * kRowsPerPanel + (kGroupsOf16 ? kVectors * group + j : group >> shift) * rows;
      vectors[j].load({address.scales + row * p.scale_bytes, address.offsets + row * p.offset_bytes,
                       address.zeros + row},
                      p);
    }
  };
  load(0);
#pragma unroll
  for (int i = 0; i < kRowPanels * kGroups; ++i) {
    int const row_panel = i / kGroups, group = i % kGroups;
    uint32_t (&a)[Fold::kGroupKSlices][4] = operands[i % kBuffers];
    auto const words = codes.group(group % Fold::kGroups, group / Fold::kGroups);
    if constexpr (kGroupsOf16) {
      vectors[0].template decode<false, 0, 1>(words, table, p, a);
      vectors[1].template decode<false, 1, 1>(words, table, p, a);
    } else {
      vectors[0].decode(words, table, p, a);
    }
    fence(a);
    fence_registers(sums[row_panel]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < Fold::kGroupKSlices; ++j)
      wgmma_float<typename C::Element, C::kBlockM>(
          a[j],
          columns_from<C>(x, x_of<C>(row_panel, in_first) + group / 2 * (C::kPanelBytes / 16) +
                                 group % 2 * 4 + j * 2),
          sums[row_panel], true);
    cute::warpgroup_commit_batch();
    fence_registers(sums[row_panel]);
    bool const more = i + 1 < kRowPanels * kGroups;
    if (Fold::kNarrow && more) load(i + 1);
    cute::warpgroup_wait<kBuffers - 1>();
    fence(operands[(i + 1) % kBuffers]);
    if (kBuffers == 1) fence_registers(sums[row_panel]);
    if (!Fold::kNarrow && more) load(i + 1);  // once the operands' registers are free
  }
  cute::warpgroup_wait<0>();
#pragma unroll
  for (int row_panel = 0; row_panel < kRowPanels; ++row_panel) fence_registers(sums[row_panel]);
#pragma unroll
  for (int i = 0; i < kBuffers; ++i) fence(operands[i]);
  if (releases) ClusterBarrier::arrive(empty);
}

}  // namespace
}  // namespace cutlass_ops
