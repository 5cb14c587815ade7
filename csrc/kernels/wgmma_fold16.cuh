// 16-bit activations x weights of any format on Hopper's wgmma (sm_90a): y = x W^T with W's values
// folded into operand A.
//
// A weight is decoded to its value, scale * (code - zero point) + offset or scale * codebook[code],
// and rounded once to the type of x. Nothing is left to do between products: one set of fp32 sums
// over all of K, which leaves registers for 256 rows of x a tile. csrc/formats/ says what a code
// means. Clusters, order of tiles, split K and the epilogue are device/hopper_gemm.cuh's.
//
//              BLOCK_M rows of x ->
//            +---------------------+
//   W rows 0 | warpgroup 1: 64     |  CTA 0 of the cluster
//         64 | warpgroup 2: 64     |
//            +---------------------+
//        128 | ...                 |  CTA 1
//
//   A        codes, shared memory -> registers -> 16-bit values
//   B        x, K-major in shared memory, 128-byte swizzle; each CTA loads half, by TMA multicast
//   panel    64 columns of x; a ring of them
//   K tile   128 columns of codes with their scales, offsets and zero points; another ring
//   step     64 columns: decoded while the step before is multiplied
//
// Each format has its instances in a separate file, wgmma_fold16_<format>.cu.
#pragma once

#include "device/fold.cuh"
#include "device/hopper_gemm.cuh"
#include "dispatch/ctas.h"

// for other GPUs the kernels have no bodies, which read the members of Config
#pragma nv_diag_suppress 177

namespace cutlass_ops {
namespace {

// Zero points and offsets are tested for at run time, once a step. kGrouped: rows of x and weights
// belong to experts.
template <class Element_, class Format_, bool kNarrow_, int kBlockM_, bool kGrouped_ = false>
struct Config : Fold<Element_, Format_, kNarrow_, AffineTerm::kAny> {
  using Fold = cutlass_ops::Fold<Element_, Format_, kNarrow_, AffineTerm::kAny>;
  using Element = Element_;
  using Format = Format_;
  using Work = std::conditional_t<kGrouped_, hopper::GroupedWork<kBlockM_>, hopper::Work>;
  using Params = std::conditional_t<kGrouped_, hopper::GroupedParams, hopper::Params>;
  static constexpr bool kGrouped = kGrouped_;
  static constexpr bool kCodebook = Format::kTableBytes > 0;
  static constexpr int kWindowTiles = 0;
  // With few rows of x MMAs are short and do not hide the latency of decoding: as many warps hide
  // it as the registers allow.
  static constexpr int kBits = Format::kBits, kBlockM = kBlockM_, kCluster = 2;
  static constexpr Fold16Cta kCta{kBits, kBlockM, Format::kTableBytes, kNarrow_, kGrouped};
  static constexpr int kWarpgroups = kCta.warpgroups;
  static constexpr int kRows = kCta.rows, kThreads = wgmma_threads(kWarpgroups);
  // The warpgroups issue MMAs in turn, so that the others decode meanwhile. Four warpgroups drift
  // apart without that, and with short sums they would wait for one another's epilogues.
  static constexpr bool kTakesTurns = kWarpgroups < 4;
  // Few rows of x are bound by instruction issue: weights without zero points and offsets have a
  // separate loop that does not test for them. (Each loop adds as much to the compile time.)
  static constexpr bool kPlainLoop =
      kBlockM <= 64 && kNarrow_ && Fold::kAffineTerm != AffineTerm::kNone;
  // Whether there is a loop for groups of 16 with narrow scales. (Wide ones have one loop.)
  static constexpr bool kHasGroupsOf16 =
      kNarrow_ && !(kGrouped && kBlockM == kHeightWithoutGroupsOf16);
  // Registers of a thread in the loading warpgroup, and in the others.
  static constexpr int kLoadingRegisters = kWarpgroups == 4 ? 32 : 40;
  static constexpr int kRegisters = kWarpgroups == 4 ? 112 : kWarpgroups == 3 ? 152 : 232;
  static constexpr int kSums = kBlockM / 2;  // registers of a thread
  // MMAs of 16 columns in a step
  static constexpr int kKSlices = Fold::kGroups * Fold::kGroupKSlices;
  static constexpr int kSteps = kKPerTile / 16 / kKSlices;  // of a K tile

  static constexpr int kStoreRows = kCta.store_rows, kStoreStride = kCta.store_stride;
  static constexpr int kLineRows = kCta.line_rows, kLineBytes = kCta.line_bytes;
  static constexpr int kXBoxRows = kGrouped ? kSlotRows : kBlockM % kLineRows ? 16 : kLineRows;
  static constexpr int kStoreBytes = kCta.store_bytes;

  // The layout of a K tile.
  static constexpr int kCodeBytes = kCta.code_bytes, kValueBytes = kCta.value_bytes;
  static constexpr int kWeights = 0, kScales = kCodeBytes, kOffsets = kScales + kRows * kValueBytes;
  static constexpr int kZeroPoints = kOffsets + kRows * kValueBytes;
  static constexpr int kGroupBytes = kCta.group_bytes, kChunkBytes = kCta.chunk_bytes;
  // With groups of 16 columns a tile has twice as many groups, which have scales alone, or also
  // offsets (fits_fold16).
  static constexpr int kGroupOf16Bytes = kGroupBytes / 2;
  static constexpr bool kOffsetsOf16 = kCta.offsets_of_16;
  static constexpr int kChunks = kCta.stages, kTiles = kCta.tiles;
  static constexpr int kPanelSteps = kCta.panel_steps, kStepBytes = kCta.step_bytes;
  static constexpr int kPanelBytes = kCta.panel_bytes, kPanels = kCta.panels,
                       kFirstChunk = kCta.first_chunk, kTable = kCta.table, kStaging = kCta.staging;
  static constexpr int kBarrierBytes = kCta.barrier_bytes, kSharedBytes = kCta.shared_bytes;
  static_assert(kSteps * Fold::kGroups == kKPerTile / 32, "a chunk has vectors of every group");
  static_assert(kPanels >= 3 && kSharedBytes <= kHopperSharedBytes,
                "more shared memory than a CTA may have");
  // The number of tiles along M that are computed together: few wide ones, since a row of x has
  // four times the bytes of a row of int4 weights.
  static constexpr int kBand = kBlockM >= 160 ? 4 : 16;
  static constexpr int kXRowFactors = 0;
  static constexpr bool kPrepareScales = false;
  // Whether each CTA of a cluster copies half of rows by index, and sends them to the other. Tiles
  // of few rows wait for memory, and the way through the other CTA is longer.
  static constexpr bool kSharesRows = kGrouped && kBlockM > 32;
  static constexpr int kLeastRows = kGrouped ? least_taken_rows(kBlockM) : kBlockM;
  static constexpr bool kShortTiles = true, kSplitsRows = false;
};

template <class C>
struct Barriers : hopper::StoredTiles<C::kTiles>,
                  hopper::HalfBarriers<C::kGrouped ? C::kPanels : 0> {
  uint64_t full_panels[C::kPanels], empty_panels[C::kPanels], full_chunks[C::kChunks],
      empty_chunks[C::kChunks];
};

// A tile's row panels that this CTA copies. The last pair may reach beyond N.
template <class C>
struct TilePanels {
  int first, count;  // first: of all weights'

  __device__ __forceinline__ TilePanels(typename C::Work const& work, typename C::Params const& p,
                                        int rank) {
    first = (work.pair * C::kCluster + rank) * C::kWarpgroups;
    count = max(0, min(C::kWarpgroups, hopper::rows_of_weight<C>(p) / kRowsPerPanel - first));
    if constexpr (C::kGrouped) first += work.expert * p.groups.row_panels;
  }
};

// One warp copies codes. Codes, scales, offsets and zero points do not depend on the previous
// kernel: their copies start at once.
template <class C>
__device__ __forceinline__ void produce_codes(uint8_t* shared, Barriers<C>& barriers,
                                              typename C::Params const& p, int rank) {
  constexpr int kChunk = k_tile_bytes(C::kBits);
  PackedWeight const& w = p.weight;
  int const row_bytes =
      p.tile_groups * (p.scale_bytes + (!C::kCodebook && w.offsets ? p.offset_bytes : 0) +
                       (!C::kCodebook && w.zeros ? 1 : 0));
  bool const leader = cute::elect_one_sync();
  hopper::Ring<C::kChunks> ring;
  hopper::ClusterTiles<C> tiles(p);
  int64_t const panel_bytes = int64_t(p.k_tiles) * kChunk;
  while (tiles.more()) {
    typename C::Work const work = tiles.next(p, C::kBand);
    TilePanels<C> const panels(work, p, rank);
    int const bytes = panels.count * (kChunk + kRowsPerPanel * row_bytes);
    int const start = work.first_k(p), end = work.end_k(p);
    uint8_t const* from = w.codes + panels.first * panel_bytes + int64_t(start) * kChunk;
#pragma unroll 1
    for (int k = start; k < end; ++k, ring.advance(), from += kChunk) {
      uint64_t* const full = &barriers.full_chunks[ring.stage];
      ClusterBarrier::wait(&barriers.empty_chunks[ring.stage], ring.phase ^ 1);
      if (!leader) continue;
      if constexpr (C::kGrouped) {
        if (k == start) barriers.tiles[ring.stage] = work.stored();
      }
      TransactionBarrier::arrive_and_expect_tx(full, bytes);
      uint8_t* const chunk = shared + C::kFirstChunk + ring.stage * C::kChunkBytes;
#pragma unroll
      for (int i = 0; i < C::kWarpgroups; ++i) {
        if (i < panels.count)
          bulk_copy(from + i * panel_bytes, full, chunk + i * kChunk, kChunk, work.reads_once(p));
      }
    }
  }
}

// Sends this CTA's half of the rows that are read through an index to the other CTA, a K tile at a
// time.
template <class C>
class PanelSender {
  hopper::Ring<C::kPanels> ring_;
  int half_bytes_ = 0;  // of the next K tile, if there is one

 public:
  __device__ __forceinline__ void send(uint8_t* shared, Barriers<C>& barriers, int rank,
                                       bool leader) {
    if (half_bytes_ == 0) return;
#pragma unroll
    for (int i = 0; i < C::kSteps; i += C::kPanelSteps, ring_.advance()) {
      ClusterBarrier::wait(&barriers.half[ring_.stage], ring_.phase);
      if (leader)
        hopper::send_panels<C::kPanelSteps, C::kStepBytes>(
            shared + ring_.stage * C::kPanelBytes + rank * half_bytes_,
            &barriers.full_panels[ring_.stage], rank, half_bytes_);
    }
  }
  __device__ __forceinline__ void next(typename C::Work const& work) {
    half_bytes_ = hopper::taken_rows<C>(work) / C::kCluster * 128;
  }
};

// Another warp copies scales, offsets and zero points. A single warp would take as long to copy
// codes and groups of 32 as the products with 32 rows of x take.
template <class C>
__device__ __forceinline__ void produce_groups(uint8_t* shared, Barriers<C>& barriers,
                                               typename C::Params const& p, int rank) {
  using Copy = cute::SM90_BULK_COPY_G2S;
  PackedWeight const& w = p.weight;
  bool const leader = cute::elect_one_sync(), offsets = !C::kCodebook && w.offsets,
             zeros = !C::kCodebook && w.zeros;
  hopper::Ring<C::kChunks> ring;
  int const next_group = p.tile_groups == 8 ? C::kGroupOf16Bytes : C::kGroupBytes;
  hopper::ClusterTiles<C> tiles(p);
  [[maybe_unused]] PanelSender<C> sender;
  bool const sends = C::kSharesRows && hopper::by_index<C>(p);
  while (tiles.more()) {
    typename C::Work const work = tiles.next(p, C::kBand);
    TilePanels<C> const panels(work, p, rank);
    int const rows = panels.count * kRowsPerPanel, end = work.end_k(p);
    int k = work.first_k(p), group = k / p.group_tiles,
        until_next = (group + 1) * p.group_tiles - k;
    int64_t vector = int64_t(group * p.tile_groups) * p.n_pad + panels.first * kRowsPerPanel;
#pragma unroll 1
    for (; k < end; ++k, ring.advance()) {
      uint64_t* const full = &barriers.full_chunks[ring.stage];
      ClusterBarrier::wait(&barriers.empty_chunks[ring.stage], ring.phase ^ 1);
      bool const ends = --until_next == 0;
      if (leader && rows > 0) {
        uint8_t* to = shared + C::kFirstChunk + ring.stage * C::kChunkBytes;
        int64_t from = vector;
#pragma unroll 1
        for (int i = 0; i < p.tile_groups; ++i, from += p.n_pad, to += next_group) {
          Copy::copy(static_cast<uint8_t const*>(w.scales) + from * p.scale_bytes, full,
                     to + C::kScales, rows * p.scale_bytes);
          if (offsets)
            Copy::copy(static_cast<uint8_t const*>(w.offsets) + from * p.offset_bytes, full,
                       to + C::kOffsets, rows * p.offset_bytes);
          if (zeros) Copy::copy(w.zeros + from, full, to + C::kZeroPoints, rows);
        }
      }
      // This warp arrives even if the CTA has no weights in the tile: no other warp may use the
      // stage twice before it.
      if (leader) ClusterBarrier::arrive(full);
      if (ends) until_next = p.group_tiles, vector += int64_t(p.tile_groups) * p.n_pad;
      if constexpr (C::kGrouped) {
        if (sends) sender.send(shared, barriers, rank, leader), sender.next(work);
      }
    }
  }
  if constexpr (C::kGrouped) sender.send(shared, barriers, rank, leader);
}

// A third warp copies x: this CTA's half of the tile's rows, for both CTAs.
template <class C>
__device__ __forceinline__ void produce_panels(uint8_t* shared, Barriers<C>& barriers,
                                               typename C::Params const& p, CUtensorMap const& map,
                                               int rank) {
  constexpr uint16_t kEveryBlock = (1 << C::kCluster) - 1;
  int const half = p.half_x_rows;
  pdl_wait_and_launch_dependents();
  bool const leader = cute::elect_one_sync();
  hopper::Ring<C::kPanels> ring;
  hopper::ClusterTiles<C> tiles(p);
  while (tiles.more()) {
    typename C::Work const work = tiles.next(p, C::kBand);
    int const end = work.end_k(p) * C::kSteps, m0 = hopper::first_x_row<C>(work, rank, p);
    int const step_bytes = half * 128;  // that this CTA copies
    if constexpr (!C::kGrouped)
      hopper::prefetch_residual<C>(p, (work.pair * C::kCluster + rank) * C::kRows, m0);
    hopper::XRows<C::kKSlices * 16, !C::kGrouped> x_rows(p.image, m0 + rank * half,
                                                         work.first_k(p));
#pragma unroll 1
    for (int step = work.first_k(p) * C::kSteps; step < end;
         step += C::kPanelSteps, ring.advance()) {
      uint64_t* full = &barriers.full_panels[ring.stage];
      ClusterBarrier::wait(&barriers.empty_panels[ring.stage], ring.phase ^ 1);
      if (leader)
        TransactionBarrier::arrive_and_expect_tx(full, C::kCluster * C::kPanelSteps * step_bytes);
#pragma unroll
      for (int i = 0; i < C::kPanelSteps; ++i)
        x_rows.copy_next(
            leader, map, full, kEveryBlock,
            shared + ring.stage * C::kPanelBytes + i * C::kStepBytes + rank * step_bytes,
            (step + i) * C::kKSlices * 16, p.weight.k, step_bytes);
    }
  }
  hopper::wait_until_read(barriers.empty_panels, ring);
}

// produce_panels() for rows that are read through an index, by one of kIndexWarps warps.
template <class C>
__device__ __forceinline__ void produce_panels_by_index(uint8_t* shared, Barriers<C>& barriers,
                                                        typename C::Params const& p, int rank,
                                                        int warp) {
  uint32_t const first = cute::cast_smem_ptr_to_uint(shared);
  bool const leader = cute::elect_one_sync() && warp == 0;
  hopper::Ring<C::kPanels> ring;
  hopper::ClusterTiles<C> tiles(p);
  while (tiles.more()) {
    typename C::Work const work = tiles.next(p, C::kBand);
    int const end = work.end_k(p) * C::kSteps;
    hopper::with_rows_of<C>(work, [&](auto taken) {
      constexpr int kOwn = C::kSharesRows ? taken() / C::kCluster : taken();
      int const begin = C::kSharesRows ? rank * kOwn : 0;
      hopper::RowsByIndex<kOwn, C::kPanelSteps, C::kStepBytes, hopper::kIndexWarps> const rows(
          p.groups, p.rows, warp, [&](int row) { return hopper::slot_of_row(work, begin + row); });
#pragma unroll 1
      for (int step = work.first_k(p) * C::kSteps; step < end;
           step += C::kPanelSteps, ring.advance()) {
        uint64_t* const full = &barriers.full_panels[ring.stage];
        ClusterBarrier::wait(&barriers.empty_panels[ring.stage], ring.phase ^ 1);
        if (leader)  // the other CTA's half
          TransactionBarrier::arrive_and_expect_tx(
              full, C::kSharesRows ? C::kPanelSteps * kOwn * 128 : 0);
        rows.template copy<false>(p.rows, step * 128,
                                  first + ring.stage * C::kPanelBytes + begin * 128, full,
                                  &barriers.half[ring.stage]);
      }
    });
  }
  hopper::wait_until_read(barriers.empty_panels, ring);
}

// Rows of x that no copy writes are set to zero once: products with zeros take less power, and so
// less time, than with stale data.
template <class C>
__device__ __forceinline__ void clear_missing_rows(uint8_t* shared, typename C::Params const& p) {
  int const loaded = C::kCluster * p.half_x_rows * 128;
  if (loaded == C::kStepBytes) return;
  constexpr int kMultiplying = C::kThreads - 128;
  for (int step = 0; step < C::kPanels * C::kPanelSteps; ++step) {
    for (int byte = loaded + (threadIdx.x - 128) * 16; byte < C::kStepBytes;
         byte += kMultiplying * 16)
      *reinterpret_cast<uint4*>(shared + step * C::kStepBytes + byte) = uint4{};
  }
  cutlass::arch::fence_view_async_shared();
  cutlass::arch::NamedBarrier::sync(kMultiplying, C::kWarpgroups + 1);
}

// kPlain: weights are known to have neither zero points nor offsets. kOf16: narrow scales are of
// groups of 16 columns.
template <class C, bool kPlain, bool kOf16>
__device__ __forceinline__ void consume(uint8_t* shared, Barriers<C>& barriers,
                                        CUtensorMap const& out_map, typename C::Params const& p,
                                        hopper::ThreadCoord<C> const& coord) {
  if constexpr (C::kCodebook) {
    C::Unscaled::fill_table(shared + C::kTable, p.weight.codebook, threadIdx.x - 128,
                            C::kThreads - 128);
    cutlass::arch::NamedBarrier::sync(C::kThreads - 128, C::kWarpgroups + 1);
  }
  uint32_t const first = cute::cast_smem_ptr_to_uint(shared),
                 table = first + C::kTable + coord.lane * 4;
  // as the scales of hopper::ThreadCoord
  uint32_t const offsets = C::kOffsets + (coord.zeros - C::kZeroPoints) * p.offset_bytes;
  int const clusters = gridDim.x / C::kCluster, total = C::Work::count(p);
  // Whether scales and offsets, where they are not narrow, are fp32.
  bool const floats = p.weight.scale_type == DataType::kFloat32 && !p.weight.zeros &&
                      (!p.weight.offsets || p.weight.offset_type == DataType::kFloat32);
  // From the scales of 16 columns to those of the next 16, from the groups of a step's first 32
  // columns to those of its second, and from a step's to the next step's.
  int const tile_groups = kOf16 ? 8 : p.tile_groups;
  uint32_t const next_slice = tile_groups == 8 ? C::kGroupOf16Bytes : 0;
  uint32_t const next_group = tile_groups >= 4 ? C::kGroupBytes : 0;
  int const next_step = tile_groups >= 4   ? 2 * C::kGroupBytes
                        : tile_groups == 2 ? C::kGroupBytes
                                           : 0;
  auto* staging = reinterpret_cast<float*>(shared + C::kStaging);
  hopper::Ring<C::kPanels> panels;
  hopper::Ring<C::kChunks> chunks;
  int last_panel = 0;
  constexpr int kTurnBarrier = C::kWarpgroups + 2;  // and one for each warpgroup
  int const turn = kTurnBarrier + coord.warpgroup,
            next_turn = kTurnBarrier + (coord.warpgroup + 1) % C::kWarpgroups;
  if (C::kTakesTurns && coord.warpgroup == C::kWarpgroups - 1)
    cutlass::arch::NamedBarrier::arrive(256, kTurnBarrier);
  auto const next_tile = [&](int index) {
    if constexpr (C::kGrouped) {
      TransactionBarrier::wait(&barriers.full_chunks[chunks.stage], chunks.phase);
      return typename C::Work(barriers.tiles[chunks.stage]);
    } else {
      return typename C::Work(index, p, C::kBand);
    }
  };
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work const work = next_tile(index);
    int const row0 = (work.pair * C::kCluster + coord.rank) * C::kRows;
    int const m0 = hopper::first_x_row<C>(work, coord.rank, p);
    int const count = work.end_k(p) - work.first_k(p);
    [[maybe_unused]] auto row_scales = hopper::row_scales_of<C>(p, coord, work);
    float sums[C::kSums] = {};
    uint32_t a[2][C::kGroups][C::kGroupKSlices][4];
    StoredCodes<typename C::Fold> codes;
    StoredGroup<typename C::Fold> vectors[C::kGroups];
    // of the second 16 columns: in groups of 16 and, where scales are wide, in any
    RowPair<typename C::Fold> second_scales[C::kGroups];
    RowPair<typename C::Fold> second_offsets[C::kOffsetsOf16 ? C::kGroups : 1];
    auto load = [&](int step) {
      if (step == 0) TransactionBarrier::wait(&barriers.full_chunks[chunks.stage], chunks.phase);
      uint32_t const chunk = first + C::kFirstChunk + chunks.stage * C::kChunkBytes;
      codes.load(chunk + coord.units, step);
      auto const group = [&](int i) { return chunk + step * next_step + i * next_group; };
      if constexpr (!C::kNarrow) {
        if (__builtin_expect(floats, true)) {
          int const offset_bytes = p.weight.offsets ? sizeof(float) : 0;
#pragma unroll
          for (int i = 0; i < C::kGroups; ++i) {
            vectors[i].scales.template load<true>(group(i) + coord.scales, sizeof(float));
            second_scales[i].template load<true>(group(i) + next_slice + coord.scales,
                                                 sizeof(float));
            vectors[i].offsets.template load<false>(group(i) + offsets, offset_bytes);
            if constexpr (C::kOffsetsOf16)
              second_offsets[i].template load<false>(group(i) + next_slice + offsets, offset_bytes);
          }
          return;
        }
      }
      if constexpr (!C::kNarrow || kOf16) {
#pragma unroll
        for (int i = 0; i < C::kGroups; ++i) {
          second_scales[i].template load<true>(group(i) + next_slice + coord.scales, p.scale_bytes);
          if constexpr (C::kOffsetsOf16)
            second_offsets[i].template load<false>(group(i) + next_slice + offsets,
                                                   p.weight.offsets ? p.offset_bytes : 0);
        }
      }
#pragma unroll
      for (int i = 0; i < C::kGroups; ++i)
        vectors[i].template load<kPlain>(
            {group(i) + coord.scales, group(i) + offsets, group(i) + coord.zeros}, p);
    };
    // One branch around all of a step's decoding instead of selects inside: the compiler then
    // schedules each variant as one block. The likely case of wide scales is one block too, since
    // jumps cost more than the instructions between them (docs/tuning-notes.md).
    bool const plain = kPlain || (!p.weight.zeros && !p.weight.offsets);
    auto decode = [&](uint32_t (&operands)[C::kGroups][C::kGroupKSlices][4], int step) {
      auto const decode_slices = [&](auto are_floats) {
#pragma unroll
        for (int i = 0; i < C::kGroups; ++i) {
          auto const words = codes.group(i, step);
          vectors[i].template decode_with<kPlain, are_floats(), 0, 1>(
              vectors[i].scales, vectors[i].offsets, words, table, p, operands[i]);
          vectors[i].template decode_with<kPlain, are_floats(), 1, 1>(
              second_scales[i], C::kOffsetsOf16 ? second_offsets[i] : vectors[i].offsets, words,
              table, p, operands[i]);
        }
      };
      auto const decode_narrow = [&](auto is_plain) {
#pragma unroll
        for (int i = 0; i < C::kGroups; ++i)
          vectors[i].template decode<is_plain()>(codes.group(i, step), table, p, operands[i]);
      };
      if constexpr (!C::kNarrow) {
        if (__builtin_expect(floats, true)) {
          decode_slices(std::true_type());
        } else {
          decode_slices(std::false_type());
        }
      } else if constexpr (kOf16) {
        decode_slices(std::false_type());
      } else if (plain) {
        decode_narrow(std::true_type());
      } else {
        decode_narrow(std::false_type());
      }
    };
    auto fence = [&](uint32_t (&operands)[C::kGroups][C::kGroupKSlices][4]) {
#pragma unroll
      for (int k_slice = 0; k_slice < C::kKSlices; ++k_slice)
        fence_registers(operands[k_slice / C::kGroupKSlices][k_slice % C::kGroupKSlices]);
    };
    auto release = [&](int panel) {
      if (coord.lane < C::kCluster)
        ClusterBarrier::arrive(&barriers.empty_panels[panel], coord.lane, true);
    };
    load(0);
    decode(a[0], 0);
    load(1);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) {
        constexpr bool kWholeTile = C::kPanelSteps == C::kSteps;  // a panel is
        bool const begins = !kWholeTile || step == 0, ends = !kWholeTile || step + 1 == C::kSteps;
        uint64_t const x_rows = uniform_operand_descriptor(shared + panels.stage * C::kPanelBytes) +
                                (kWholeTile ? step * C::kStepBytes / 16 : 0);
        if (begins) TransactionBarrier::wait(&barriers.full_panels[panels.stage], panels.phase);
        fence(a[step]);
        fence_registers(sums);
        hopper::with_rows_of<C>(work, [&](auto taken) {
          if (C::kTakesTurns) cutlass::arch::NamedBarrier::sync(256, turn);
          cute::warpgroup_arrive();
#pragma unroll
          for (int k_slice = 0; k_slice < C::kKSlices; ++k_slice)
            wgmma_float<typename C::Element, taken()>(
                a[step][k_slice / C::kGroupKSlices][k_slice % C::kGroupKSlices],
                x_rows + k_slice * 2, sums, true);
          cute::warpgroup_commit_batch();
          if (C::kTakesTurns) cutlass::arch::NamedBarrier::arrive(256, next_turn);
        });
        fence_registers(sums);
        cute::warpgroup_wait<1>();  // the step before is done
        fence(a[1 - step]);
        if (begins && i + step > 0) release(last_panel);
        if (ends) last_panel = panels.stage, panels.advance();
        bool const more = i + 1 < count;
        if (step == 0 || more) decode(a[1 - step], 1 - step);
        if (step == 0) {
          // All of the K tile is in registers. One arrival a warp: those of its lanes
          // would be serialised.
          __syncwarp();
          if (coord.lane == 0) ClusterBarrier::arrive(&barriers.empty_chunks[chunks.stage]);
          chunks.advance();
        }
        // After the decoding, which needs the registers: the wait for MMAs hides the latency.
        if (more) load(step);
      }
    }
    cute::warpgroup_wait<0>();
    fence(a[C::kSteps - 1]);
    fence_registers(sums);
    release(last_panel);
    decode::remove_unit<C>(sums);
    if constexpr (C::kGrouped) {
      row_scales.apply(sums, p, coord, work);
      hopper::store_group<C>(sums, staging, out_map, p, coord, work, row0);
    } else {
      hopper::scale_x_rows<C>(sums, p, coord, m0);
      hopper::store<C>(sums, staging, out_map, p, coord, index, row0, m0);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    wgmma_fold16(__grid_constant__ CUtensorMap const map,
                 __grid_constant__ CUtensorMap const out_map,
                 __grid_constant__ typename C::Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  static_assert(sizeof(Barriers<C>) <= C::kBarrierBytes);
  auto& barriers = *reinterpret_cast<Barriers<C>*>(shared + C::kSharedBytes - C::kBarrierBytes);
  int const rank = int(cute::block_rank_in_cluster()), warpgroup = threadIdx.x / 128;
  bool const index = hopper::by_index<C>(p);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kPanels; ++i) {
      TransactionBarrier::init(&barriers.full_panels[i], index ? 1 + 32 * hopper::kIndexWarps : 1);
      if constexpr (C::kGrouped) ClusterBarrier::init(&barriers.half[i], 32 * hopper::kIndexWarps);
      ClusterBarrier::init(&barriers.empty_panels[i], C::kCluster * C::kWarpgroups * 4);
    }
    for (int i = 0; i < C::kChunks; ++i) {
      TransactionBarrier::init(&barriers.full_chunks[i], 2);  // of both warps that copy weights
      ClusterBarrier::init(&barriers.empty_chunks[i], C::kWarpgroups * 4);
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
  if (index) pdl_wait();  // the previous kernel writes the tiles
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<C::kLoadingRegisters>();
    int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform, as in hopper::run
    if (warp == 0) produce_codes<C>(shared, barriers, p, rank);
    if (warp == 2) produce_groups<C>(shared, barriers, p, rank);
    if (warp == 1 && !index) produce_panels<C>(shared, barriers, p, map, rank);
    if constexpr (C::kGrouped) {
      if (index && warp % 2 == 1) produce_panels_by_index<C>(shared, barriers, p, rank, warp / 2);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::kRegisters>();
    clear_missing_rows<C>(shared, p);
    pdl_wait_and_launch_dependents();
    hopper::ThreadCoord<C> const coord(p, rank, warpgroup - 1);
    constexpr bool kNoTerms = C::kAffineTerm == AffineTerm::kNone;
    if (C::kHasGroupsOf16 && p.tile_groups == 8) {
      consume<C, true, C::kHasGroupsOf16>(shared, barriers, out_map, p, coord);
    } else if (C::kPlainLoop && !p.weight.zeros && !p.weight.offsets) {
      consume<C, true, false>(shared, barriers, out_map, p, coord);
    } else {
      consume<C, kNoTerms, false>(shared, barriers, out_map, p, coord);
    }
    cute::tma_store_wait<0>();
  }
  // A CTA must not exit before its neighbour's last arrivals and copies.
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
#endif
}

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                     Stream stream) {
  constexpr auto kConfig = hopper::LaunchConfig::of<C>();
  CUtensorMap map;
  Status status = hopper::encode_x(problem, kConfig.half_x_rows(problem.m), &map);
  return status.ok() ? hopper::launch_persistent(kConfig, wgmma_fold16<C>, problem, plan,
                                                 splitk_workspace, map, stream)
                     : status;
}

template <class Element, class Format, int kBlockM>
Status launch_format(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                     Stream stream) {
  return has_narrow_scales(problem.weight, problem.x_type)
             ? launch_config<Config<Element, Format, true, kBlockM>>(problem, plan,
                                                                     splitk_workspace, stream)
             : launch_config<Config<Element, Format, false, kBlockM>>(problem, plan,
                                                                      splitk_workspace, stream);
}

template <class Element, class Format, int kBlockM>
Status launch_groups(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  if (has_narrow_scales(problem.weight, problem.x_type)) {
    using C = Config<Element, Format, true, kBlockM, true>;
    if (!C::kHasGroupsOf16 && problem.weight.group_size == 16)
      return unsupported("wgmma_fold16 has no tiles of these rows for groups of 16");
    return hopper::launch_grouped(hopper::LaunchConfig::of<C>(), wgmma_fold16<C>, problem, plan,
                                  stream);
  }
  using C = Config<Element, Format, false, kBlockM, true>;
  return hopper::launch_grouped(hopper::LaunchConfig::of<C>(), wgmma_fold16<C>, problem, plan,
                                stream);
}

template <class Element, class Format>
Status launch_tile(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                   Stream stream) {
  return launch_height<32, 64, 128, 160, 208, 256>(plan, plan.block_m, [&](auto height) {
    return launch_format<Element, Format, height()>(problem, plan, splitk_workspace, stream);
  });
}

template <class Element, class Format>
Status launch_group_tile(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  return launch_height<32, 64, 96, 144>(plan, plan.block_m, [&](auto height) {
    return launch_groups<Element, Format, height()>(problem, plan, stream);
  });
}

}  // namespace

template <class Format>
Status launch_wgmma_fold16(GemmProblem const& problem, Plan const& plan, float* splitk_workspace,
                           Stream stream) {
  return problem.x_type == DataType::kFloat16
             ? launch_tile<__half, Format>(problem, plan, splitk_workspace, stream)
             : launch_tile<__nv_bfloat16, Format>(problem, plan, splitk_workspace, stream);
}

template <class Format>
Status launch_grouped_fold16(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  return problem.x_type == DataType::kFloat16
             ? launch_group_tile<__half, Format>(problem, plan, stream)
             : launch_group_tile<__nv_bfloat16, Format>(problem, plan, stream);
}

}  // namespace cutlass_ops
