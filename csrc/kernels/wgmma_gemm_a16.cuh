// fp16 or bf16 activations x int4 or int8 weights on Hopper's wgmma: W4A16 and W8A16 at prefill,
// sm_90a. The tile, its loads and its stores are device/hopper_gemm.cuh. Per 128 columns of K a
// warpgroup's turn is:
//
//   decode   the stage's weights, which were loaded while the previous MMAs ran, to code minus zero
//            point, exact in fp16 and, in units of 1/64, in bf16
//   multiply fp32 sums of exact products
//   promote  sum = fma(the 128 columns' sum, weight scale, sum): the scale never rounds a weight,
//            and costs one FFMA an output
//
// 208 rows of x are multiplied and promoted in halves, which share the weights and a set of
// registers for products.
//
// Groups are of 128 or more, without offsets; wgmma_fold16 takes all formats, and rounds
// weights to x's type.
//
// wgmma_gemm_a16.cu has the instances for a weight, wgmma_gemm_a16_grouped.cu those for experts.
#pragma once

#include "device/hopper_gemm.cuh"
#include "dispatch/ctas.h"
#include "formats/decode.cuh"
#include "formats/formats.h"

// for other GPUs the kernels have no bodies, which read the members of Config
#pragma nv_diag_suppress 177

namespace cutlass_ops {
namespace {

using hopper::StoredScales;

// Scale: the type of the weight's scales where it is a constant, which four warpgroups need for
// lack of registers (docs/tuning-notes.md); void where it is known at run time. kGrouped: rows of x
// and weights are experts'.
template <class Element_, class Format, int kBlockM, bool kZeros, class Scale = void,
          int kWarpgroups = 2, bool kGrouped_ = false>
struct Config : hopper::TileConfig<Format::kBits, kBlockM, 2, true, false, false, kZeros,
                                   wgmma_gemm_a16_tile(Format::kBits, kBlockM, kWarpgroups).stages,
                                   kWarpgroups, false, kGrouped_> {
  using Work = std::conditional_t<kGrouped_, hopper::GroupedWork<kBlockM>, hopper::StreamKWork>;
  using Params = std::conditional_t<kGrouped_, hopper::GroupedParams, hopper::Params>;
  static constexpr bool kShortTiles = !kGrouped_, kImages = !kGrouped_;
  static constexpr bool kSplitsRows = kWarpgroups == 2 && !kGrouped_;
  using Element = Element_;
  using Decode = typename Format::template Decoder<Element>;
  // Parts of the rows of x that are multiplied one after the other: two where two sets of sums of
  // all rows would not fit in registers.
  static constexpr int kHalves = kBlockM > 160 ? 2 : 1;
  // Whether all weights are decoded behind products: the second half of a stage's columns behind
  // those of the first, and the next stage's first half behind the last. With one part of the rows
  // of x only the tiles named here take less time so (docs/tuning-notes.md).
  static constexpr bool kDecodesBehind =
      kHalves == 2 || kBlockM == 144 ||
      ByWidth<bool>(kBlockM == 96 || (kBlockM == 128 && kWarpgroups == 2), false)[Format::kBits];
  static_assert(kHalves == 1 || kWarpgroups == 2);
  // The number of steps for a stage's columns: the weights of a step are decoded while the previous
  // step is multiplied. One step where that was slower: with few rows of x the MMAs are too short
  // for it, unless codes of 8 bits take longer to decode, and with many the other warpgroup's MMAs
  // hide the decoding. Four steps where registers are scarce.
  static constexpr int kSteps =
      kWarpgroups == 4                                                       ? 4
      : kDecodesBehind || ByWidth<bool>(false, kBlockM <= 64)[Format::kBits] ? 2
                                                                             : 1;
  // Whether the warpgroups start a stage's MMAs in turn. Otherwise both promote and decode at the
  // same time, and the tensor cores idle. 160 rows of x and 8 bits take more clocks in turn, but
  // less time, because they take less power.
  static constexpr bool kInTurn = (kSteps == 1 || kDecodesBehind) && kBlockM >= 96;
  // Whether scales become floats before the loads of the next weights are issued. Loads in flight
  // together share a scoreboard, so that the promotion waited for these weights. Four warpgroups
  // are slower so.
  static constexpr bool kScalesFirst = kWarpgroups == 2;
  static constexpr int kKSlices = kKPerTile / 16 / kSteps;  // of 16 columns, in a step
  static_assert(Config::kCta.shared_bytes <=
                    wgmma_gemm_a16_tile(Format::kBits, kBlockM, kWarpgroups).shared_bytes,
                "its tile promises less shared memory");

  static __device__ void consume(uint8_t* stages, float* staging,
                                 hopper::Barriers<Config>& barriers, CUtensorMap const& out_map,
                                 Params const& p, hopper::ThreadCoord<Config> const& coord);
};

// A warpgroup's weights of a stage, as stored in shared memory, and the zero points of a thread's
// rows g and g + 8.
template <class C>
struct StoredWeights {
  static constexpr int kLoads = C::kBits / 2;  // of 16 bytes
  uint32_t words[4 * kLoads];
  int8_t zeros[2] = {};

  __device__ __forceinline__ void load(uint8_t const* stage, hopper::ThreadCoord<C> const& coord) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      uint4 q = reinterpret_cast<uint4 const*>(stage + coord.units)[i * 32];
      words[4 * i] = q.x, words[4 * i + 1] = q.y, words[4 * i + 2] = q.z, words[4 * i + 3] = q.w;
    }
    if (C::kZeros) {
      char2 z = *reinterpret_cast<char2 const*>(stage + coord.zeros);
      zeros[0] = z.x, zeros[1] = z.y;
    }
  }

  // A step's operands, of 16 columns each.
  __device__ __forceinline__ void decode(int step, uint32_t (&a)[C::kKSlices][4]) const {
#pragma unroll
    for (int i = 0; i < C::kKSlices; ++i) {
      uint32_t const* from = words + (step * C::kKSlices + i) * C::Decode::kWords;
      if constexpr (C::kZeros) {
        C::Decode::fragment(from, C::Decode::zero_constants(zeros[0], zeros[1]), a[i]);
      } else {
        C::Decode::fragment(from, a[i]);
      }
    }
  }
};

template <class Element, class Format, int kBlockM, bool kZeros, class Scale, int kWarpgroups,
          bool kGrouped>
__device__ __forceinline__ void
Config<Element, Format, kBlockM, kZeros, Scale, kWarpgroups, kGrouped>::consume(
    uint8_t* stages, float* staging, hopper::Barriers<Config>& barriers, CUtensorMap const& out_map,
    Params const& p, hopper::ThreadCoord<Config> const& coord) {
  using C = Config;
  DataType const scale_type = std::is_void_v<Scale>           ? p.weight.scale_type
                              : std::is_same_v<Scale, float>  ? DataType::kFloat32
                              : std::is_same_v<Scale, __half> ? DataType::kFloat16
                                                              : DataType::kBFloat16;
  constexpr int kTurnBarrier = C::kWarpgroups + 2;  // and the next: each warpgroup's turn
  if (C::kInTurn && coord.warpgroup == 1) cutlass::arch::NamedBarrier::arrive(256, kTurnBarrier);
  hopper::Ring<C::kStages> ring;
  int const total = C::Work::count(p);
  for (int index = blockIdx.x / C::kCluster; index < total; index += p.clusters) {
    typename C::Work const work = hopper::next_tile<C>(index, p, barriers, ring);
    int row0 = hopper::first_feature<C>(work.pair, coord.rank, p),
        m0 = hopper::first_x_row<C>(work, coord.rank, p);
    if (work.empty()) break;
    int count = work.end_k(p) - work.first_k(p);
    [[maybe_unused]] auto row_scales = hopper::row_scales_of<C>(p, coord, work);
    float sums[C::kSums] = {};
    hopper::with_rows_of<C>(work, [&](auto taken) {
      constexpr int kRows = taken(), kColumns = kRows / C::kHalves, kProducts = kColumns / 2;
      float products[kProducts];
      StoredWeights<C> weights;
      uint32_t a[C::kSteps > 1 ? 2 : 1][C::kKSlices][4];
      uint8_t const* base = stages + ring.stage * C::kStageBytes;
      TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
      weights.load(base, coord);
      StoredScales next_scales(base + coord.scales, scale_type);
      if (C::kSteps > 1) weights.decode(0, a[0]);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        int const stage = ring.stage;
        base = stages + stage * C::kStageBytes;
        uint64_t x_rows = uniform_operand_descriptor(base + C::kActivations);
        if (C::kSteps == 1) weights.decode(0, a[0]);
        ring.advance();
        uint8_t const* next_base = stages + ring.stage * C::kStageBytes;
        auto load_next = [&] {
          if (i + 1 < count) {
            TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
            weights.load(next_base, coord);
          }
        };
        if constexpr (C::kDecodesBehind) {
          auto const fence_operands = [&](int step) {
#pragma unroll
            for (int k_slice = 0; k_slice < C::kKSlices; ++k_slice)
              fence_registers(a[step][k_slice]);
          };
          auto const multiply = [&](int step, int half) {
            fence_operands(step);
            fence_registers(products);
            cute::warpgroup_arrive();
#pragma unroll
            for (int k_slice = 0; k_slice < C::kKSlices; ++k_slice) {
              constexpr int kInPanel = C::kPanelColumns / 16;
              int const column = step * C::kKSlices + k_slice, x_row = half * kColumns;
              wgmma_float<Element, kColumns>(
                  a[step][k_slice],
                  x_rows + (column / kInPanel * C::kPanelBytes + x_row * C::kSwizzleBytes) / 16 +
                      column % kInPanel * 2,
                  products, step > 0 || k_slice > 0);
            }
            cute::warpgroup_commit_batch();
            fence_registers(products);
          };
          float scale[2];
          // The second step's weights are decoded behind the first half's first products, the next
          // stage's first behind the second half's last: between a half's products and its next
          // turn a warpgroup only promotes. (Other tiles have a separate loop: if they shared this
          // code, the compiler would schedule short groups and 32 rows of x differently.)
#pragma unroll
          for (int half = 0; half < C::kHalves; ++half) {
            cutlass::arch::NamedBarrier::sync(256, kTurnBarrier + coord.warpgroup);
            multiply(0, half);
            if (half == 0) weights.decode(1, a[1]);
            multiply(1, half);
            cutlass::arch::NamedBarrier::arrive(256, kTurnBarrier + 1 - coord.warpgroup);
            if (half == 0) {
              StoredScales(base + coord.scales, scale_type).values(scale_type, scale);
              load_next();
            }
            bool const last = half == C::kHalves - 1;
            if (last && i + 1 < count) {
              cute::warpgroup_wait<1>();
              fence_operands(0);
              weights.decode(0, a[0]);
            }
            cute::warpgroup_wait<0>();
            fence_registers(products);
            if (last) {
              fence_operands(1);
              if (coord.lane < C::kCluster)
                ClusterBarrier::arrive(&barriers.empty[stage], coord.lane, true);
            }
#pragma unroll
            for (int j = 0; j < kProducts; ++j) {
              float& sum = sums[half * kProducts + j];
              sum = fmaf(products[j], scale[j % 4 / 2], sum);
            }
          }
        } else {
#pragma unroll
          for (int step = 0; step < C::kSteps; ++step) {
#pragma unroll
            for (int k_slice = 0; k_slice < C::kKSlices; ++k_slice)
              fence_registers(a[step % 2][k_slice]);
            fence_registers(products);
            if (C::kInTurn) cutlass::arch::NamedBarrier::sync(256, kTurnBarrier + coord.warpgroup);
            cute::warpgroup_arrive();
#pragma unroll
            for (int k_slice = 0; k_slice < C::kKSlices; ++k_slice) {
              constexpr int kInPanel = C::kPanelColumns / 16;
              int const column = step * C::kKSlices + k_slice;
              wgmma_float<Element, kRows>(
                  a[step % 2][k_slice],
                  x_rows + column / kInPanel * (C::kPanelBytes / 16) + column % kInPanel * 2,
                  products, step > 0 || k_slice > 0);
            }
            cute::warpgroup_commit_batch();
            if (C::kInTurn)
              cutlass::arch::NamedBarrier::arrive(256, kTurnBarrier + 1 - coord.warpgroup);
            fence_registers(products);
            StoredScales const scales = next_scales;
            float scale[2];
            if (C::kScalesFirst) scales.values(scale_type, scale);
            if (step > 0) {  // the registers that are decoded to next are free
              cute::warpgroup_wait<1>();
#pragma unroll
              for (int k_slice = 0; k_slice < C::kKSlices; ++k_slice)
                fence_registers(a[(step + 1) % 2][k_slice]);
            }
            if (step + 1 < C::kSteps) {
              weights.decode(step + 1, a[(step + 1) % 2]);
              if (step + 2 == C::kSteps) load_next();
            } else {
              if (C::kSteps == 1) load_next();
              if (i + 1 < count) {
                next_scales.load(next_base + coord.scales, scale_type);
                if (C::kSteps > 1) weights.decode(0, a[0]);
              }
            }
            if (step + 1 < C::kSteps) continue;
            cute::warpgroup_wait<0>();
            fence_registers(products);
            if (coord.lane < C::kCluster)
              ClusterBarrier::arrive(&barriers.empty[stage], coord.lane, true);
            if (!C::kScalesFirst) scales.values(scale_type, scale);
#pragma unroll
            for (int j = 0; j < kProducts; ++j)
              sums[j] = fmaf(products[j], scale[j % 4 / 2], sums[j]);
          }
        }
      }
    });
    decode::remove_unit<Decode>(sums);
    if constexpr (C::kGrouped) {
      row_scales.apply(sums, p, coord, work);
      hopper::store_group<C>(sums, staging, out_map, p, coord, work, row0);
    } else {
      hopper::store<C>(sums, staging, out_map, p, coord, index, row0, m0);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    wgmma_gemm_a16(__grid_constant__ CUtensorMap const map,
                   __grid_constant__ CUtensorMap const out_map,
                   __grid_constant__ typename C::Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t stages[];
  hopper::run<C>(stages, map, out_map, p);
#endif
}

}  // namespace
}  // namespace cutlass_ops
