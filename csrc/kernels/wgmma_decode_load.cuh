// How wgmma_decode and wgmma_decode_fold16 (wgmma_decode.cuh) fill a stage: copies, and x that
// becomes codes or their values there.
#pragma once

#include "kernels/wgmma_decode_config.cuh"

namespace cutlass_ops {
namespace {

template <class C>
__device__ __forceinline__ void copy_weights(uint8_t* to, uint64_t* full, Maps const& maps,
                                             Params const& p, Part const& part, int tile,
                                             [[maybe_unused]] SlotTile const* tiles = nullptr) {
  using Copy = cute::SM90_TMA_LOAD_3D;
  constexpr auto kKeep = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  PackedWeight const& w = p.weight;
  int const features = p.shape.most_row_panels * kRowsPerPanel, group = p.weight_rows.first(tile);
  bool const zeros = C::kZeros && w.zeros, offsets = C::kOffsets && w.offsets;
  if constexpr (C::kGrouped) {
    int const bytes = p.scale_bytes + (offsets ? p.offset_bytes : 0) + (zeros ? 1 : 0);
    if (p.shape.dealt) {  // the number of row panels varies, which a map's box cannot
      TransactionBarrier::arrive_and_expect_tx(
          full, part.row_panels * (C::kChunk + p.weight_rows.count * kRowsPerPanel * bytes));
      int row_panel = tiles[part.tile].expert * p.groups.row_panels + part.first_row_panel,
          count = min(part.in_first, part.row_panels);
#pragma unroll 1
      for (int first = 0; first < part.row_panels; first += count) {
        if (first > 0)
          row_panel = tiles[part.tile + 1].expert * p.groups.row_panels,
          count = part.row_panels - first;
        uint8_t const* codes = w.codes + (int64_t(row_panel) * p.k_tiles + tile) * C::kChunk;
#pragma unroll 1
        for (int i = first; i < first + count; ++i, codes += int64_t(p.k_tiles) * C::kChunk)
          bulk_copy(codes, full, to + i * C::kChunk, C::kChunk, true);
        int const rows = count * kRowsPerPanel;
#pragma unroll 1
        for (int i = 0; i < p.weight_rows.count; ++i) {
          int64_t const from = int64_t(group + i) * p.n_pad + row_panel * kRowsPerPanel;
          auto const copy = [&](void const* vectors, int offset, int size) {
            int const row = i * features + first * kRowsPerPanel;
            cute::SM90_BULK_COPY_G2S::copy(static_cast<uint8_t const*>(vectors) + from * size, full,
                                           to + offset + row * size, rows * size);
          };
          copy(w.scales, p.shape.scales, p.scale_bytes);
          if (offsets) copy(w.offsets, p.shape.offsets, p.offset_bytes);
          if (zeros) copy(w.zeros, p.shape.zeros, 1);
        }
      }
      return;
    }
    int const row_panel = tiles[part.tile].expert * p.groups.row_panels + part.first_row_panel;
    TransactionBarrier::arrive_and_expect_tx(
        full, p.shape.most_row_panels * C::kChunk + p.weight_rows.count * features * bytes);
    Copy::copy(&maps.codes, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST), to, 0,
               tile * (C::kChunk / kCodeRun), row_panel);
    Copy::copy(&maps.scales, full, kKeep, to + p.shape.scales, 0, row_panel, group);
    if (offsets) Copy::copy(&maps.offsets, full, kKeep, to + p.shape.offsets, 0, row_panel, group);
    if (zeros) Copy::copy(&maps.zeros, full, kKeep, to + p.shape.zeros, 0, row_panel, group);
  } else {
    // Each copy takes some twenty nanoseconds, so there are few: each covers as many row panels as
    // any cluster has, and all groups of the tile. on average: units are whole blocks of 16 rows
    constexpr int kRowBytes = C::kChunk / kRowsPerPanel;
    int const code_bytes =
        C::kOneCta ? (part.end - part.begin) * kRowBytes : p.shape.most_row_panels * C::kChunk;
    int const row_bytes = p.scale_bytes + (offsets ? p.offset_bytes : 0) + (zeros ? 1 : 0);
    TransactionBarrier::arrive_and_expect_tx(
        full, (C::kBlockM > WgmmaDecodeShape::kBlockM ? p.x_bytes : C::kXRowBytes) + code_bytes +
                  (C::kFolds || C::kCodebook ? p.weight_rows.count : 1) * features * row_bytes);
    if constexpr (C::kOneCta) {
      uint8_t const* codes =
          w.codes + (int64_t(part.first_row_panel) * p.k_tiles + tile) * C::kChunk;
#pragma unroll 1
      for (int first = 0; first < part.end;
           first += kRowsPerPanel, codes += int64_t(p.k_tiles) * C::kChunk) {
        int const begin = first == 0 ? part.begin : 0, end = min(kRowsPerPanel, part.end - first);
        bulk_copy(codes + begin * kRowBytes, full, to + (first + begin) * kRowBytes,
                  (end - begin) * kRowBytes, true);
      }
    } else {
      Copy::copy(&maps.codes, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST), to, 0,
                 tile * (C::kChunk / kCodeRun), part.first_row_panel);
    }
    Copy::copy(&maps.scales, full, kKeep, to + p.shape.scales, 0, part.first_row_panel, group);
    if (offsets)
      Copy::copy(&maps.offsets, full, kKeep, to + p.shape.offsets, 0, part.first_row_panel, group);
    if (zeros)
      Copy::copy(&maps.zeros, full, kKeep, to + p.shape.zeros, 0, part.first_row_panel, group);
  }
}

template <class C>
__device__ __forceinline__ void copy_x_rows(uint8_t* to, uint8_t* to_scales, uint64_t* full,
                                            CUtensorMap const& map, Params const& p, int tile) {
#pragma unroll
  for (int panel = 0; panel < C::kXBytes / C::kPanelBytes; ++panel)
    cute::SM90_TMA_LOAD_2D::copy(&map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST),
                                 to + panel * C::kPanelBytes,
                                 tile * kKPerTile + panel * (kKPerTile / 2), 0);
  if (C::kInt8 && !C::kQuantizes) {
    int64_t const first = int64_t(tile) * p.x_row_stride;
    cute::SM90_BULK_COPY_G2S::copy(p.x_row_scales + first, full, to_scales, C::kXRowScaleBytes);
    if (C::kXRowZeros)
      cute::SM90_BULK_COPY_G2S::copy(p.x_row_zeros + first, full, to_scales + C::kXRowScaleBytes,
                                     C::kXRowZeroBytes);
  }
}

// A block's tiles of K, those of one part of its row panels after another.
struct Step {
  Part part;
  int i = 0;  // of the part's tiles of K
  bool exists;

  __device__ __forceinline__ Step(Params const& p, Dealt const& dealt) : part(p, dealt) {
    exists = part.take(p, dealt);
  }
  __device__ __forceinline__ void advance(Params const& p, Dealt const& dealt) {
    if (++i == part.tiles) i = 0, exists = part.take(p, dealt);
  }
};

// For experts, by a warp, whose lanes copy rows of x.
template <class C>
__device__ __forceinline__ void produce_groups(uint8_t* shared, Barriers& barriers,
                                               Maps const& maps, Params const& p,
                                               Dealt const& dealt, SlotTile const* tiles) {
  bool const leader = cute::elect_one_sync();
  auto const weights = [&](Step const& step, int stage) {
    if (leader)
      copy_weights<C>(shared + p.shape.weights + stage * p.shape.weight_bytes,
                      &barriers.full[stage], maps, p, step.part, step.part.first_tile + step.i,
                      tiles);
  };
  int filled = 0;
  for (Step step(p, dealt); step.exists && filled < p.shape.stages; step.advance(p, dealt))
    weights(step, filled++);
  pdl_wait();
  Step step(p, dealt);
  // Rows of two tiles, sixteen of each. Where int8 x has scales of blocks: the row of x of this
  // lane's row, or -1.
  bool const scales = C::kInt8 && p.x_row_stride > 0;
  int const lane = threadIdx.x % 32;
  int x_row = -1, tile = 0, of_tiles = 0;
  auto const rows_of = [&] {
    Part const& part = step.part;
    tile = part.tile, of_tiles = part.row_panels > part.in_first ? 2 : 1;
    auto const slot_of = [&](int row) {
      if (row >= of_tiles * kSlotRows) return -1;
      SlotTile const& tile = tiles[part.tile + row / kSlotRows];
      return row % kSlotRows < tile.rows ? tile.slots[row % kSlotRows] : -1;
    };
    if (scales) {
      int const slot = slot_of(lane);
      x_row = slot >= 0 ? row_of_slot(p.groups, slot) : -1;
    }
    return hopper::RowsByIndex<2 * kSlotRows, C::kXBytes / C::kPanelBytes, C::kPanelBytes, 1,
                               C::kXBytes>(p.groups, p.rows, 0, slot_of);
  };
  auto rows = rows_of();
  auto const x_rows = [&](int stage) {
    if (step.part.tile != tile || (step.part.row_panels > step.part.in_first) != (of_tiles > 1))
      rows = rows_of();
    // Other rows of the stage keep what they have: their sums are not stored.
    int const k_tile = step.part.first_tile + step.i;
    uint32_t const to = cute::cast_smem_ptr_to_uint(shared);
    if (x_row >= 0) {
      int const blocks = p.weight_rows.count;
      uint32_t to_scale = to + p.shape.weights + stage * p.shape.weight_bytes +
                          p.shape.x_row_scales +
                          (lane / kSlotRows * blocks * kSlotRows + lane % kSlotRows) * 4;
      float const* scale = p.x_row_scales + int64_t(k_tile) * blocks * p.x_row_stride + x_row;
#pragma unroll 1
      for (int i = 0; i < blocks; ++i, to_scale += C::kBlockM * 4, scale += p.x_row_stride)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to_scale), "l"(scale)
                     : "memory");
    }
    rows.template copy<true>(p.rows, k_tile * kKPerTile * int(sizeof(typename C::Element)),
                             to + stage * p.x_bytes, &barriers.full[stage]);
  };
  for (int i = 0; i < filled; ++i, step.advance(p, dealt)) x_rows(i);
  // With row panels in even shares the next launch's CTAs find room only as these end, and then
  // should request weights at once.
  bool launched = p.shape.dealt;
  if (launched) pdl_launch_dependents();
  int const early = C::kEarlyBytes / p.shape.weight_bytes;
  int stage = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (; step.exists; step.advance(p, dealt)) {
    if (!launched && step.i + early >= step.part.tiles) pdl_launch_dependents(), launched = true;
    ClusterBarrier::wait(&barriers.empty[stage], phase);
    weights(step, stage);
    x_rows(stage);
    if (++stage == p.shape.stages) stage = 0, phase ^= 1;
  }
  if (!launched) pdl_launch_dependents();
}

// x of a tile of K, by one thread.
template <class C>
__device__ __forceinline__ void request_x(uint8_t* shared, Barriers& barriers, Maps const& maps,
                                          Params const& p, Part const& part, int i, int stage) {
  uint64_t* const there = C::kQuantizes ? &barriers.raw[stage] : &barriers.full[stage];
  if (C::kQuantizes) TransactionBarrier::arrive_and_expect_tx(there, C::kXBytes);
  copy_x_rows<C>(shared + stage * C::kXStride,
                 shared + p.shape.weights + stage * p.shape.weight_bytes + p.shape.x_row_scales,
                 there, maps.x_rows, p, part.first_tile + i);
}

// x of the first stages, by one thread that does not request their weights: x, which is last to be
// there, would come later behind these copies.
template <class C>
__device__ __forceinline__ void request_first_x(uint8_t* shared, Barriers& barriers,
                                                Maps const& maps, Params const& p,
                                                Part const& part) {
  int const ahead = min(part.tiles, p.shape.stages);
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) request_x<C>(shared, barriers, maps, p, part, i, i);
}

// The rest, by one thread.
template <class C>
__device__ __forceinline__ void produce(uint8_t* shared, Barriers& barriers, Maps const& maps,
                                        Params const& p, Part const& part) {
  uint8_t* const first_weights = shared + p.shape.weights;
  auto weights = [&](int i, int stage) {
    copy_weights<C>(first_weights + stage * p.shape.weight_bytes, &barriers.full[stage], maps, p,
                    part, part.first_tile + i);
  };
  int const ahead = min(part.tiles, p.shape.stages);
  for (int i = 0; i < ahead; ++i) weights(i, i);
  pdl_wait();
  int stage = 0;
  uint32_t phase = 0;
  int const last = max(ahead, part.tiles - C::kEarlyBytes / p.shape.weight_bytes);
#pragma unroll 1
  for (int i = ahead; i < part.tiles; ++i) {
    if (i == last) pdl_launch_dependents();
    ClusterBarrier::wait(&barriers.empty[stage], phase);
    weights(i, stage);
    request_x<C>(shared, barriers, maps, p, part, i, stage);
    if (++stage == p.shape.stages) stage = 0, phase ^= 1;
  }
  if (last >= part.tiles) pdl_launch_dependents();
}

// Ones behind the codes of a stage, 8 bytes a thread.
__device__ __forceinline__ void store_ones(uint32_t to) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %1};" ::"r"(to + thread_again() % 128 * 8),
               "r"(0x01010101)
               : "memory");
}

// 16 columns to the values of their codes, rounded to 16 bits. `lanes`: that share a block.
template <bool kSymmetric, class Element>
__device__ __forceinline__ void to_values_of_codes(Columns<Element>& c, int lanes) {
  Span<Element, kSymmetric> span;
  span.add(c);
  for (int distance = 1; distance < lanes; distance *= 2) span.add(span.of_lane(distance));
  Quantizer<kSymmetric> const quantizer(span.range());
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float2 const v = c.pair(i);
    c.words[i] = pack_pair<Element>(quantizer.scale * quantizer.value(v.x),
                                    quantizer.scale * quantizer.value(v.y));
  }
}

// The codes of a thread's columns, their scale and zero point into the stage.
template <class C, class Element>
__device__ __forceinline__ void store_codes(Columns<Element> const& c, uint32_t x, uint32_t row,
                                            int piece, int swizzle, int x_row, int stage,
                                            Params const& p) {
  constexpr int kPieces = kKPerTile / kLaneColumns;
  Span<Element, !C::kXRowZeros> span;
  span.add(c);
#pragma unroll
  for (int distance = 1; distance < kPieces; distance *= 2) span.add(span.of_lane(distance));
  cutlass::arch::NamedBarrier::sync(128, 2 + thread_again() / 128);  // all have read
  Quantizer<!C::kXRowZeros> quantizer(span.range());
  uint4 const v = codes_of(c, quantizer);
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(row + ((piece ^ swizzle) << 4)),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
  uint32_t const scales = x + p.shape.weights + stage * p.shape.weight_bytes + p.shape.x_row_scales;
  if (piece == 0)
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(scales + x_row * 4), "f"(quantizer.scale)
                 : "memory");
  if constexpr (C::kXRowZeros) {
    if (piece == 0)
      asm volatile("st.shared.s8 [%0], %1;" ::"r"(scales + C::kXRowScaleBytes + x_row),
                   "r"(int(quantizer.zero))
                   : "memory");
    store_ones(x + stage * C::kXStride + C::kPanelBytes);
  }
}

// x of a stage to codes, or their values, in its place, by a warpgroup: a thread has 16 columns of
// a row, eight threads share a tile. Addresses are recomputed each time, because the products need
// the registers.
template <class C>
__device__ __forceinline__ void quantize(uint32_t x, int stage, uint32_t phase, uint64_t* full,
                                         Params const& p) {
  using Element = typename C::Element;
  constexpr int kPieces = kKPerTile / kLaneColumns;
  int const thread = thread_again(), x_row = thread % 128 / kPieces, piece = thread % kPieces,
            swizzle = x_row & 7;
  uint32_t const row = x + stage * C::kXStride + x_row * 128,
                 from = row + piece / 4 * C::kPanelBytes;
  TransactionBarrier::wait(full + 2 * Barriers::kStages + stage, phase);
  Columns<Element> c;
  uint32_t address[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    address[half] = from + (((piece % 4 * 2 + half) ^ swizzle) << 4);
    uint32_t v[4];
    load_shared(address[half], v);
#pragma unroll
    for (int r = 0; r < 4; ++r) c.words[4 * half + r] = v[r];
  }
  if constexpr (C::kFolds) {
    if (p.symmetric) {
      to_values_of_codes<true>(c, p.block_lanes);
    } else {
      to_values_of_codes<false>(c, p.block_lanes);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t const* v = c.words + 4 * half;
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address[half]), "r"(v[0]),
                   "r"(v[1]), "r"(v[2]), "r"(v[3])
                   : "memory");
    }
  } else {
    store_codes<C>(c, x, row, piece, swizzle, x_row, stage, p);
  }
  cutlass::arch::fence_view_async_shared();
  ClusterBarrier::arrive(full + stage);
}

}  // namespace
}  // namespace cutlass_ops
