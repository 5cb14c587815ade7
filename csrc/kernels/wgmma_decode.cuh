// Up to 16 rows of x times weights of any format on Hopper's wgmma, while a batch decodes, sm_90a.
//
//   cluster   up to nine row panels of 64 output features; its CTAs share K in equal slices
//   stage     a tile of K, 128 columns: the panels' codes and group vectors by bulk copies, x by
//             its tensor map once for all of them. One warp issues the copies; those of weights
//             before the kernel waits for its predecessor. Two CTAs fit on an SM, so that the next
//             launch's first stages arrive while this one ends. With large 8-bit weights, or
//             `one_cta`, one does, with the stages of two: the bytes in flight on all SMs then
//             cover the time from one launch's last product to the next one's first. K is left
//             whole there, and clusters get halves of panels, for equal shares
//   quantise  x that is to be int8 becomes codes, or the values of codes, in its stage, every third
//             tile by one of the warpgroups that multiply
//   multiply  a warpgroup a panel at a time, weights through registers as operand A: a panel's
//             decoding in one hides behind products in the others. Three warpgroups, four of a CTA
//             that is alone, share the panels, or, where these are few, take turns at tiles
//   end       sums leave registers for the CTA of the cluster that ends with those features, by
//             st.async, and are added in a fixed order
//
// Experts' rows come in tiles of 16 of an expert. A cluster has a tile's row panels or, where these
// are `dealt`, each of the CTAs that run at a time an equal part of all tiles' row panels: it takes
// them in turns, without draining its stages between, and ends with each in registers.
//
// Two kernels differ in what they multiply:
//
//   wgmma_decode         codes minus zero points, exactly; after a tile, or with int8 x a group of
//                        32 or 64 columns, sum = fma(its sum, weight scale, sum), as in
//                        wgmma_gemm_a16.cu. Zero points of int8 x are compensated by sums of the
//                        tile's weights, which eight more columns of operand B, of ones, make
//   wgmma_decode_fold16  the weights' values, rounded to the 16 bits of x (device/fold.cuh): one
//                        set of sums over all of K
#pragma once

#include "kernels/wgmma_decode_config.cuh"
#include "kernels/wgmma_decode_load.cuh"

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
  int const next_group =
      p.weight_rows.count > 1 ? p.shape.most_row_panels * kRowsPerPanel * C::kScaleBytes : 0;
  uint32_t words[C::kWords];
  StoredScales<typename C::Scale> stored, next_stored;
  auto load = [&](int step) {  // of all row panels' steps
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
  load(0);
  next_stored.load(address.scales);
#pragma unroll
  for (int row_panel = 0; row_panel < kRowPanels; ++row_panel) {
    float products[C::kColumns / 2];
    decode::RowConstants zero = {};
    if (C::kZeros) {
      uint32_t two = 0;
      asm volatile("ld.shared.u16 %0, [%1];"
                   : "=r"(two)
                   : "r"(address.zeros + row_panel * kRowsPerPanel));
      if constexpr (C::kZeros) zero = C::Decode::zero_constants(int8_t(two), int8_t(two >> 8));
    }
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      uint32_t a[C::kPieces][4];
#pragma unroll
      for (int j = 0; j < C::kPieces; ++j) {
        if constexpr (C::kCodebook) {
          uint32_t pairs[4];
          C::Decode::look_up(words[j], table, pairs);
          C::Decode::combine(pairs, a[j]);
        } else if constexpr (C::kZeros) {
          C::Decode::fragment(words + j * C::Decode::kWords, zero, a[j]);
        } else {
          C::Decode::fragment(words + j * C::Decode::kWords, a[j]);
        }
        fence_registers(a[j]);
      }
      fence_registers(products);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < C::kPieces; ++j)
        wgmma_float<typename C::Element, C::kBlockM>(
            a[j],
            columns_from<C>(x, x_of<C>(row_panel, in_first) + step * (C::kPanelBytes / 16) + j * 2),
            products, step % C::kGroupSteps > 0 || j > 0);
      cute::warpgroup_commit_batch();
      fence_registers(products);
      int const next = row_panel * C::kSteps + step + 1;
      if (next < kRowPanels * C::kSteps) load(next);
      if (step % C::kGroupSteps == 0) {
        stored = next_stored;
        int const next_row_panel = step + C::kGroupSteps < C::kSteps ? row_panel : row_panel + 1;
        if (next_row_panel < kRowPanels)
          next_stored.load(address.scales + next_row_panel * kRowsPerPanel * C::kScaleBytes +
                           (next_row_panel == row_panel ? next_group : 0));
      }
      cute::warpgroup_wait<0>();
#pragma unroll
      for (int j = 0; j < C::kPieces; ++j) fence_registers(a[j]);
      fence_registers(products);
      if ((step + 1) % C::kGroupSteps) continue;
      if (step + 1 == C::kSteps && row_panel + 1 == kRowPanels && releases)
        ClusterBarrier::arrive(empty);
      float2 const scale = stored.values();
#pragma unroll
      for (int e = 0; e < C::kSums; ++e)
        sums[row_panel][e] = fmaf(products[e], e % 4 < 2 ? scale.x : scale.y, sums[row_panel][e]);
    }
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
    if (part < Fold::kLoads)
      codes.load_part(address.units + row_panel * C::kChunk + step * C::kStepBytes, part);
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
    uint32_t const* const words = codes.words + group % Fold::kGroups * Fold::kGroupWords;
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

// The sums of a piece in the order of wgmma's accumulators, of rows g, g + 8 and rows of x 2t,
// 2t + 1: the four lanes of neighbouring rows exchange theirs, until each has four neighbouring
// features of a row of x.
struct FeaturesOfRow {
  int x_row, feature;  // from the piece's first
  float sums[4];

  __device__ __forceinline__ FeaturesOfRow(float (&v)[4], int m_block) {
    int const lane = threadIdx.x % 32, i = lane / 4 % 4;
    bool const high = i & 2, odd = i & 1;
    float w[2][2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float mine = high ? v[2 + c] : v[c], theirs = __shfl_xor_sync(~0u, high ? v[c] : v[2 + c], 8);
      w[0][c] = high ? theirs : mine, w[1][c] = high ? mine : theirs;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float mine = odd ? w[h][1] : w[h][0],
            theirs = __shfl_xor_sync(~0u, odd ? w[h][0] : w[h][1], 4);
      sums[2 * h] = odd ? theirs : mine, sums[2 * h + 1] = odd ? mine : theirs;
    }
    x_row = m_block * 8 + lane % 4 * 2 + odd;
    feature = i / 2 * 8 + lane / 16 * 4;
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (float& sum : sums) sum *= factor;
  }
};

// Stores the outputs of a piece: 16 features from n on and eight rows of x of an expert's tile.
__device__ __forceinline__ void finish_piece(float (&v)[4], int n, int m_block,
                                             SlotTile const& tile, Params const& p) {
  if (tile.rows <= m_block * 8) return;
  if (p.groups.gated) {
    finish_gated(v, end_scales(p), m_block * 8, n, tile, p.groups, p.epilogue);
  } else {
    FeaturesOfRow features(v, m_block);
    if (end_scales(p) && features.x_row < tile.rows)
      features.scale(p.x_row_scales[row_of_slot(p.groups, tile.slots[features.x_row])]);
    finish_group(features.sums, features.x_row, n + features.feature, tile, p.groups, p.epilogue);
  }
}

// Stores a piece without gate and bias straight from the lanes that have the sums: while other
// warps wait for weights, scattered stores cost less than the exchange between lanes that would
// coalesce them.
__device__ __forceinline__ void store_piece(float const* v, int n, int m_block,
                                            SlotTile const& tile, Params const& p) {
  int const lane = threadIdx.x % 32;
  if (tile.rows <= m_block * 8) return;
  n += lane / 4;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    int const x_row = m_block * 8 + lane % 4 * 2 + c;
    if (x_row >= tile.rows) continue;
    int const slot = tile.slots[x_row];
    float const scale = end_scales(p) ? p.x_row_scales[row_of_slot(p.groups, slot)] : 1.0f;
    float* const out = static_cast<float*>(p.epilogue.out) + int64_t(slot) * p.epilogue.n + n;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (n + 8 * h < p.epilogue.n) out[8 * h] = nan_unless_finite(v[2 * h + c] * scale);
  }
}

// A warp's position in the ring of stages.
struct RingPosition {
  int stage;
  uint32_t phase;

  __device__ __forceinline__ void advance(WgmmaDecodeShape const& shape) {
    stage += shape.sets;
    if (stage >= shape.stages) stage -= shape.stages, phase ^= 1;
  }
};

// A warpgroup's kRowPanels row panels, from `first` of the block's: their sums over the block's
// tiles, and those to the blocks that end with them, or, where row panels are dealt, to outputs.
template <class C, int kRowPanels>
__device__ __forceinline__ void consume(uint8_t* shared, Barriers& barriers, Params const& p,
                                        Part const& part, int warp, int first, RingPosition& ring,
                                        SlotTile const* tiles) {
  int const lane = threadIdx.x % 32, block = warp % 4, set = p.shape.sets > 1 ? warp / 4 : 0;
  float sums[kRowPanels][C::kSums] = {};
  // How many of these row panels are in the part's first tile: of three, for which there would be
  // too few registers, all.
  static_assert(WgmmaDecodeShape::kMostDealtPanels == 2);
  int const in_first = kRowPanels > 2 ? kRowPanels : part.in_first - first;
  // Pinned in registers, as in hopper_gemm.cuh.
  uint32_t row = first * kRowsPerPanel + lane / 4 * 8 + block * 2;  // in the order of group vectors
  uint32_t x_at = cute::cast_smem_ptr_to_uint(shared), base = x_at + p.shape.weights,
           weight_bytes = p.shape.weight_bytes;
  StageAddress address{base + first * C::kChunk + block * (C::kChunk / 4) + lane * kLaneBytes,
                       base + p.shape.scales + row * p.scale_bytes,
                       0,
                       base + p.shape.zeros + row,
                       base + p.shape.x_row_scales + lane % 4 * 8,
                       base + p.shape.x_row_scales + C::kXRowScaleBytes + lane % 4 * 2};
  uint64_t* full = barriers.full;
  asm volatile("" : "+r"(x_at), "+r"(address.units), "+r"(address.scales));
  if (!C::kFolds) asm volatile("" : "+l"(full));
  if (C::kFolds && (C::kZeros || C::kOffsets)) asm volatile("" : "+r"(row));
  if (C::kInt8 && !C::kGrouped) asm volatile("" : "+r"(address.x_rows));
  if (C::kXRowZeros) asm volatile("" : "+r"(address.x_row_zeros));
  int& stage = ring.stage;
  uint32_t& phase = ring.phase;
  int to_quantize = warp / 4 + C::kWarpgroups;
#pragma unroll 1
  for (int i = set; i < part.tiles; i += p.shape.sets) {
    if constexpr (C::kQuantizes) {
      // This warpgroup quantises every third tile, some time before it is multiplied: in another
      // stage than this one, if there are enough stages.
      int const ahead = p.shape.sets == 1                 ? 1
                        : p.shape.stages > C::kWarpgroups ? C::kWarpgroups
                                                          : 0;
      if (i + ahead == to_quantize) {
        bool const wraps = stage + ahead >= p.shape.stages;
        if (to_quantize < part.tiles)
          quantize<C>(x_at, stage + ahead - (wraps ? p.shape.stages : 0), phase ^ uint32_t(wraps),
                      full, p);
        // (Where a cluster has fewer row panels than warpgroups and these form one set, only
        // warpgroups with a panel quantise.)
        to_quantize += C::kMostRowPanels < C::kWarpgroups && p.shape.sets == 1
                           ? min(C::kWarpgroups, part.row_panels)
                           : C::kWarpgroups;
      }
    }
    uint32_t const offset = stage * weight_bytes;
    int const x_stride = C::kGrouped ? p.x_bytes : C::kXStride;
    uint64_t const x = uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 |
                       __shfl_sync(~0u, (x_at + stage * x_stride) >> 4 & 0x3fff, 0);
    TransactionBarrier::wait(full + stage, phase);
    StageAddress here{
        address.units + offset, address.scales + offset, 0,
        address.zeros + offset, address.x_rows + offset, address.x_row_zeros + offset};
    if (C::kFolds) {  // from the scales': registers
      here.offsets =
          here.scales + (p.shape.offsets - p.shape.scales) + row * (p.offset_bytes - p.scale_bytes);
      here.zeros = here.scales + (p.shape.zeros - p.shape.scales) - row * (p.scale_bytes - 1);
    }
    // int8: if another tile follows in that stage. (Without the branch the compiler needs more
    // registers than there are.)
    bool const releases = C::kInt8 && !C::kGrouped ? i + p.shape.stages < part.tiles : lane == 0;
    uint64_t* const empty = full + Barriers::kStages + stage;
    uint32_t const table = x_at + p.shape.table + lane * 4;
    if constexpr (C::kFolds) {
      if (p.weight_rows.count == 8) {
        multiply_values<C, kRowPanels, true>(x, in_first, here, table, p, releases, empty, sums);
      } else {
        multiply_values<C, kRowPanels, false>(x, in_first, here, table, p, releases, empty, sums);
      }
    } else if constexpr (!C::kInt8) {
      multiply_codes<C, kRowPanels>(x, in_first, here, table, p, releases, empty, sums);
    } else if constexpr (!C::kShortGroups) {
      multiply_int8<C, kRowPanels, 1>(x, in_first, here, p, releases, empty, sums);
    } else if (p.weight_rows.count == 2) {
      multiply_int8<C, kRowPanels, 2>(x, in_first, here, p, releases, empty, sums);
    } else {
      multiply_int8<C, kRowPanels, 4>(x, in_first, here, p, releases, empty, sums);
    }
    ring.advance(p.shape);
  }
  // For dealt row panels: the feature that a warp's sums begin with, and the tile of their rows.
  auto const first_feature = [&](int row_panel) {
    int const from = row_panel < in_first ? part.first_row_panel + first : -in_first;
    return (from + row_panel) * kRowsPerPanel + block * 16;
  };
  auto const tile_of = [&](int row_panel) -> SlotTile const& {
    return tiles[part.tile + (row_panel >= in_first)];
  };
  if (C::kDeals && p.shape.dealt && !p.groups.gated) {
#pragma unroll
    for (int i = 0; i < kRowPanels * C::kMBlocks; ++i) {
      int const row_panel = i / C::kMBlocks;
      store_piece(&sums[row_panel][i % C::kMBlocks * 4], first_feature(row_panel), i % C::kMBlocks,
                  tile_of(row_panel), p);
    }
    return;
  }
  if (C::kDeals && p.shape.dealt) {
    // Not unrolled: finish_piece is long.
#pragma unroll 1
    for (int i = 0; i < kRowPanels * C::kMBlocks; ++i) {
      float v[4] = {};
#pragma unroll
      for (int j = 0; j < kRowPanels * C::kMBlocks * 4; ++j)
        if (j / 4 == i) v[j % 4] = sums[j / 4 / C::kMBlocks][j % (4 * C::kMBlocks)];
      finish_piece(v, first_feature(i / C::kMBlocks), i % C::kMBlocks, tile_of(i / C::kMBlocks), p);
    }
    return;
  }
  cute::cluster_arrive_relaxed();  // all blocks have read their stages: sums overwrite them
  cute::cluster_wait();
  // [rank and set][row panel][piece][lane], a piece being 16 features of 8 rows of x.
  float4* received = reinterpret_cast<float4*>(shared);
  int const log_pieces = C::kLogPieces - p.log_cluster, from = part.rank * p.shape.sets + set;
#pragma unroll
  for (int row_panel = 0; row_panel < kRowPanels; ++row_panel)
#pragma unroll
    for (int tb = 0; tb < C::kMBlocks; ++tb) {
      int piece = block * C::kMBlocks + tb, to = piece >> log_pieces;
      float const* v = &sums[row_panel][tb * 4];
      int index =
          ((from * part.row_panels + first + row_panel) << log_pieces) + piece - (to << log_pieces);
      if (p.shape.cluster == 1) {
        received[index * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
      } else {
        store_remote(received + index * 32 + lane, make_float4(v[0], v[1], v[2], v[3]),
                     &barriers.sums, to);
      }
    }
}

__device__ __forceinline__ void finish(float (&v)[4], int n, int m_block, float const* row_scales,
                                       EpilogueParams const& p) {
  FeaturesOfRow features(v, m_block);
  if (row_scales && features.x_row < p.m) features.scale(row_scales[features.x_row]);
  n += features.feature;
  if (features.x_row >= p.m || n >= p.n) return;
  store_outputs(features.sums, features.x_row, n, p);
}

// A thread's part of either kernel.
template <class C>
__device__ __forceinline__ void decode_rows(Maps const& maps, Params const& p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ Barriers barriers;
  __shared__ SlotTile tiles[WgmmaDecodeShape::kMostDealtTiles];  // of experts
  __shared__ Dealt dealt;
  int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  auto const init_barriers = [&](int row_panels) {
    for (int i = 0; i < p.shape.stages; ++i) {
      TransactionBarrier::init(&barriers.full[i], C::kQuantizes ? 1 + 128
                                                  : C::kGrouped ? 1 + 32
                                                                : 1);
      TransactionBarrier::init(&barriers.raw[i], 1);
      ClusterBarrier::init(
          &barriers.empty[i],
          C::kReaders * (p.shape.sets > 1             ? 1
                         : C::kDeals && p.shape.dealt ? C::kWarpgroups
                                                      : min(C::kWarpgroups, row_panels)));
    }
    TransactionBarrier::init(&barriers.sums, 1);
    cutlass::arch::fence_barrier_init();
    TransactionBarrier::arrive_and_expect_tx(
        &barriers.sums, p.shape.sets * row_panels * kRowsPerPanel * C::kBlockM * 4);
  };
  Part part = [&] {
    if constexpr (C::kGrouped) {
      // A cluster's number of row panels does not depend on its tile.
      if (threadIdx.x == 32 * C::kWarps)
        init_barriers(p.units.count((blockIdx.x >> p.log_cluster) % p.shape.clusters));
      uint2* const counts = reinterpret_cast<uint2*>(shared);
      if (!p.groups.tiles) FoundTiles::clear(counts, p.groups.route.experts, C::kThreads);
      if (!p.groups.written) pdl_wait();
      auto const share_of = [&](int count) {
        Dealt const mine(p, count);
        if (threadIdx.x == 0) dealt = mine;
        return make_int2(mine.first_tile, mine.tiles(p.groups.row_panels));
      };
      if (p.groups.tiles) {
        int2 const share = share_of(*p.groups.count);
        for (int i = warp; i < share.y; i += C::kWarps + 1) tiles[i].load(p.groups, share.x + i);
      } else {
        __syncthreads();
        FoundTiles::store(p.groups.route, counts, tiles, share_of);
        cutlass::arch::fence_view_async_shared();  // before copies to the same memory
      }
      __syncthreads();
      return Part(p, dealt);
    } else {
      return Part(p, WgmmaDecodeShape::unit(C::kOneCta));
    }
  }();
  if constexpr (C::kGrouped) {
    // the grid covers the largest possible number of tiles
    if (!part.take(p, dealt)) return pdl_wait();
  } else if (threadIdx.x == 32 * C::kWarps) {
    init_barriers(part.row_panels);
  }
  if constexpr (C::kCodebook)
    C::Table::fill_table(shared + p.shape.table, p.weight.codebook, threadIdx.x, C::kThreads);
  if constexpr (C::kXRowZeros && !C::kQuantizes) {
    if (threadIdx.x < 128)
      for (int i = 0; i < p.shape.stages; ++i)
        store_ones(cute::cast_smem_ptr_to_uint(shared) + i * C::kXStride + C::kXBytes);
    cutlass::arch::fence_view_async_shared();
  }
  __syncthreads();
  if (warp == C::kWarps) {
    if constexpr (C::kGrouped) {
      produce_groups<C>(shared, barriers, maps, p, dealt, tiles);
    } else {
      if (cute::elect_one_sync()) produce<C>(shared, barriers, maps, p, part);
    }
    __syncwarp();
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
    return;
  }
  pdl_wait();
  if constexpr (C::kQuantizes) {
    if (warp / 4 < part.tiles)
      quantize<C>(cute::cast_smem_ptr_to_uint(shared), warp / 4, 0, barriers.full, p);
  }
  RingPosition ring{p.shape.sets > 1 ? warp / 4 : 0, 0};
  bool more = false;
  do {
    int first = 0, count = part.row_panels;
    if (p.shape.sets == 1) {
      int base = part.row_panels / C::kWarpgroups, rest = part.row_panels % C::kWarpgroups,
          group = warp / 4;
      first = group * base + min(group, rest), count = base + (group < rest);
    }
    switch (count) {
      case 0:
        if (C::kDeals && p.shape.dealt) {  // a stage is free when all warpgroups have arrived
          for (int i = 0; i < part.tiles; ++i, ring.advance(p.shape)) {
            TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
            if (threadIdx.x % 32 == 0) ClusterBarrier::arrive(&barriers.empty[ring.stage]);
          }
        } else {
          cute::cluster_arrive_relaxed();
          cute::cluster_wait();
        }
        break;
      case 1:
        consume<C, 1>(shared, barriers, p, part, warp, first, ring, tiles);
        break;
      case 2:
        consume<C, 2>(shared, barriers, p, part, warp, first, ring, tiles);
        break;
      case 3:
        if constexpr (C::kMostRowPanels >= 3)
          consume<C, 3>(shared, barriers, p, part, warp, first, ring, tiles);
        break;
    }
    if constexpr (C::kDeals) more = p.shape.dealt && part.take(p, dealt);
  } while (more);
  if (C::kDeals && p.shape.dealt) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
    return;
  }
  if (p.shape.cluster == 1) {
    cutlass::arch::NamedBarrier::sync(32 * C::kWarps, 1);
  } else {
    TransactionBarrier::wait(&barriers.sums, 0);
  }
  int const log_pieces = C::kLogPieces - p.log_cluster, pieces = part.row_panels << log_pieces;
  auto const total = [&](int i, float (&v)[4]) {
    float4 const* from = reinterpret_cast<float4 const*>(shared) + i * 32 + threadIdx.x % 32;
#pragma unroll 2
    for (int r = 0; r < p.shape.sets << p.log_cluster; ++r, from += pieces * 32) {
      float4 theirs = *from;
      v[0] += theirs.x, v[1] += theirs.y, v[2] += theirs.z, v[3] += theirs.w;
    }
  };
  for (int i = warp; i < pieces; i += C::kWarps) {
    int const row_panel = i >> log_pieces,
              piece = (part.rank << log_pieces) + i - (row_panel << log_pieces);
    int const row = row_panel * kRowsPerPanel + piece / C::kMBlocks * 16,
              x_rows = piece % C::kMBlocks;
    if constexpr (C::kOneCta) {
      if (row < part.begin || row >= part.end) continue;
    }
    float v[4] = {};
    total(i, v);
    int const n = part.first_row_panel * kRowsPerPanel + row;
    if constexpr (C::kGrouped) {
      finish_piece(v, n, x_rows, tiles[part.tile], p);
    } else {
      bool const scales = C::kFolds || ends_with_x_row_scales<C>(p);
      finish(v, n, x_rows, scales ? p.x_row_scales : nullptr, p.epilogue);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads + (C::kOneCta ? 64 : 0), C::kOneCta ? 1 : 2)
    wgmma_decode(__grid_constant__ Maps const maps, __grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  decode_rows<C>(maps, p);
#endif
}

template <class C>
__global__ void __launch_bounds__(C::kThreads + (C::kOneCta ? 64 : 0), C::kOneCta ? 1 : 2)
    wgmma_decode_fold16(__grid_constant__ Maps const maps, __grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  decode_rows<C>(maps, p);
#endif
}

inline int offset_bytes(PackedWeight const& w) { return w.offsets ? bytes_of(w.offset_type) : 0; }

// What a launch reads of a kernel's Config: the code that fills in its parameters is compiled once.
struct DecodeLaunch {
  int chunk;  // bytes of the codes of a panel's tile of K
  bool int8_x, one_cta;

  template <class C>
  static constexpr DecodeLaunch of() {
    return {C::kChunk, std::is_same_v<typename C::Element, int8_t>, C::kOneCta};
  }
};

// The maps of a weight's codes and group vectors, in boxes of as many row panels as
// any cluster has.
inline Status encode_weights(DecodeLaunch const& c, PackedWeight const& w,
                             WgmmaDecodeShape const& shape, Maps* maps) {
  int64_t const k_pad = padded_k(w.k), n_pad = padded_rows(w.n);
  cuuint64_t const row_panels = n_pad / kRowsPerPanel,
                   runs = k_pad / kKPerTile * (c.chunk / kCodeRun),
                   groups = w.group_size == -1 ? 1 : (k_pad + w.group_size - 1) / w.group_size;
  cuuint32_t const row_panel_box = shape.most_row_panels, chunk_runs = c.chunk / kCodeRun,
                   group_box = VectorRows(w.group_size).count;
  Status status = hopper::encode<3>(
      CU_TENSOR_MAP_DATA_TYPE_UINT64, w.codes, {kCodeRun / 8, runs, row_panels},
      {kCodeRun, runs * kCodeRun}, {kCodeRun / 8, chunk_runs, row_panel_box},
      CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &maps->codes);
  // Maps of vectors with `bytes` for each row and group.
  auto const encode_vectors = [&](void const* vectors, int bytes, CUtensorMap* map) {
    if (!vectors || !status.ok()) return;
    CUtensorMapDataType const type = bytes == 4   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                  : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    status = hopper::encode<3>(type, vectors, {kRowsPerPanel, row_panels, groups},
                               {cuuint64_t(kRowsPerPanel * bytes), cuuint64_t(n_pad) * bytes},
                               {kRowsPerPanel, row_panel_box, group_box},
                               CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, map);
  };
  encode_vectors(w.scales, bytes_of(w.scale_type), &maps->scales);
  encode_vectors(w.offsets, offset_bytes(w), &maps->offsets);
  encode_vectors(w.zeros, 1, &maps->zeros);
  return status;
}

inline Status launch_rows(DecodeLaunch const& c, void (*kernel)(Maps, Params),
                          GemmProblem const& problem, Plan const& plan, Stream stream) {
  PackedWeight const& w = problem.weight;
  WgmmaDecodeShape const& shape = plan.wgmma_decode;
  Maps maps;
  QuantizedActivations const& q = problem.quantized;
  int64_t const k_pad = padded_k(w.k);
  constexpr int kRows = WgmmaDecodeShape::kBlockM;
  Status status = c.int8_x ? hopper::encode_x_rows(q.codes, 1, problem.m, int(k_pad), k_pad, kRows,
                                                   &maps.x_rows)
                           : hopper::encode_x_rows(problem.x, 2, problem.m, w.k,
                                                   problem.x_stride * 2, kRows, &maps.x_rows);
  if (!status.ok()) return status;
  int const k_tiles = int(k_pad / kKPerTile), n_pad = int(padded_rows(w.n));
  status = encode_weights(c, w, shape, &maps);
  if (!status.ok()) return status;
  Params p{w,
           q.scales,
           q.zeros,
           q.block == -1 ? 0 : q.stride,
           problem.act_symmetric,
           activation_block(w.group_size) / kLaneColumns,
           bytes_of(w.scale_type),
           offset_bytes(w),
           EpilogueParams(problem),
           VectorRows(w.group_size),
           shape,
           EvenPartition(n_pad / WgmmaDecodeShape::unit(c.one_cta), shape.clusters),
           EvenPartition(k_tiles, shape.cluster),
           k_tiles,
           n_pad,
           log2_of(shape.cluster),
           {},
           {}};
  return launch_plan(kernel, plan, WgmmaDecodeShape::threads(c.one_cta), shape.shared_bytes, stream,
                     maps, p);
}

// For experts: a cluster has a tile of rows and a share of its expert's features.
inline Status launch_groups_of_rows(DecodeLaunch const& c, void (*kernel)(Maps, Params),
                                    GroupedGemm const& problem, Plan const& plan, Stream stream) {
  PackedWeight const& w = problem.weight;
  WgmmaDecodeShape const& shape = plan.wgmma_decode;
  Groups const& groups = problem.groups;
  Maps maps = {};
  int const k_tiles = int(padded_k(w.k) / kKPerTile);
  Status status = encode_weights(c, w, shape, &maps);
  if (!status.ok()) return status;
  Params const p{w,
                 problem.x_scales,
                 nullptr,
                 problem.x_codes == ActQuant::kBlock ? problem.x_rows : 0,
                 true,
                 0,
                 bytes_of(w.scale_type),
                 offset_bytes(w),
                 EpilogueParams(rows_of_all(problem)),
                 VectorRows(w.group_size),
                 shape,
                 EvenPartition(groups.row_panels, shape.clusters),
                 EvenPartition(k_tiles, shape.cluster),
                 k_tiles,
                 int(padded_rows(w.n)),
                 log2_of(shape.cluster),
                 groups,
                 RowPieces(problem),
                 shape.weights / shape.stages};
  return launch_plan(kernel, plan, WgmmaDecodeShape::threads(c.one_cta), shape.shared_bytes, stream,
                     maps, p);
}

template <class C>
auto kernel_of() -> void (*)(Maps, Params) {
  if constexpr (C::kFolds) {
    return wgmma_decode_fold16<C>;
  } else {
    return wgmma_decode<C>;
  }
}

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, Stream stream) {
  return launch_rows(DecodeLaunch::of<C>(), kernel_of<C>(), problem, plan, stream);
}

template <class C>
Status launch_grouped_config(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  return launch_groups_of_rows(DecodeLaunch::of<C>(), kernel_of<C>(), problem, plan, stream);
}

}  // namespace
}  // namespace cutlass_ops
