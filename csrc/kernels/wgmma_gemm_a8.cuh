// int8 activations x int4 or int8 weights on Hopper's wgmma: W8A8 and W4A8 at prefill, sm_90a.
// The tile, its loads and its stores are device/hopper_gemm.cuh. Per 128 columns of K a
// warpgroup's turn is:
//
//   decode   the stage's weights, which were loaded during the promotion of the previous sums
//   multiply exact int32 sums of 128 columns, which never leave registers
//   promote  sum = fma(float(I), scale of x * weight scale, sum), once a scale block. A pixel of
//            an image with one scale is promoted once a tap, where weights have one scale a row
//   azp      with zero points za of the activations: I -= za * colsum(codes). Where a block of x
//            has a zero point, the sums of a stage start from this value instead of zero; where a
//            whole row has one, a product of 32 more columns takes less time. In every stage,
//            since with outliers nearly all codes are the zero point, and fp32 sums that still
//            hold it round away what is left. Where results are rounded to 16 bits, 16 or 32 K
//            tiles are compensated at once instead, in a stage that follows them
//            (zero_compensation.h), and zero points of whole rows once at the end of K
//
// wgmma_gemm_a8.cu has the instances for a weight, wgmma_gemm_a8_grouped.cu those for experts.
#pragma once

#include "kernels/wgmma_gemm_a8_promotion.cuh"

namespace cutlass_ops {
namespace {

template <class Format, int kBlockM, Promotion kPromotion, bool kZeros, bool kAsymmetric,
          int kWarpgroups, bool kCompensates, bool kGrouped, bool kQuantizes, int kGroups>
__device__ __forceinline__ void
Config<Format, kBlockM, kPromotion, kZeros, kAsymmetric, kWarpgroups, kCompensates, kGrouped,
       kQuantizes, kGroups>::consume(uint8_t* stages, float* staging,
                                     hopper::Barriers<Config>& barriers, CUtensorMap const& out_map,
                                     Params const& p, hopper::ThreadCoord<Config> const& coord) {
  using C = Config;
  constexpr bool kBlock = kPromotion == Promotion::kBlock, kTap = kPromotion == Promotion::kTap;
  constexpr bool kChannel = kPromotion == Promotion::kChannel;
  constexpr bool kLongSums = kTap || kChannel;  // int32 sums of several tiles of K, and a row's
                                                // scale at the end
  int clusters = gridDim.x / C::kCluster, total = C::Work::count(p);
  int const t = coord.lane % 4;
  // Provably uniform over the lanes, and not recomputed in every turn.
  uint32_t const first_stage =
      C::kPrepareScales ? __shfl_sync(~0u, cute::cast_smem_ptr_to_uint(stages), 0) : 0;
  hopper::Ring<C::kStages> ring;
  for (int index = blockIdx.x / C::kCluster; index < total; index += clusters) {
    typename C::Work const work = hopper::next_tile<C>(index, p, barriers, ring);
    int row0 = hopper::first_feature<C>(work.pair, coord.rank, p),
        m0 = hopper::first_x_row<C>(work, coord.rank, p);
    int count = work.end_k(p) - work.first_k(p);
    uint32_t totals[kChannel ? C::kSums : 1] = {};
    float sums[kChannel ? 1 : C::kSums] = {};
    uint32_t total_colsum[2] = {};  // of the weights of rows g and g + 8 over all of K; this lane's
                                    // part until the end
    RawWeights<C> raw;
    // With one scale a row of x and one a row of the weight, both are applied last; their loads are
    // in flight until then.
    float end_scale[(C::kEndScales + 127) / 128 + 1];
    uint32_t end_zero[(C::kEndScales + 127) / 128 + 1];
#pragma unroll
    for (int i = 0; i * 128 < C::kEndScales; ++i) {
      // All pixels of an image have one.
      int x_row = C::kImages && p.image.columns ? 0 : m0 + coord.warp * 32 + coord.lane + i * 128;
      if constexpr (kGrouped) {
        x_row = row_of_slot(p.groups, min(x_row, work.end_x_row - 1));
      } else {
        x_row = min(x_row, p.x.stride - 1);
      }
      end_scale[i] = __ldg(p.x.scales + x_row);
      if (kAsymmetric) end_zero[i] = uint32_t(uint8_t(__ldg(p.x.zeros + x_row))) * 0x01010101;
    }
    [[maybe_unused]] hopper::StoredScales row_scales;
    if constexpr (kLongSums) {
      int const position =
          row0 + coord.warpgroup * kRowsPerPanel + coord.lane / 4 * 8 + coord.warp * 2;
      int first = 0;  // of the expert's
      if constexpr (kGrouped) first = work.expert * hopper::rows_of_weight<C>(p);
      row_scales.load(static_cast<uint8_t const*>(p.weight.scales) +
                          (first + min(position, hopper::rows_of_weight<C>(p) - 2)) * p.scale_bytes,
                      p.weight.scale_type);
    }
    uint8_t* const ends = reinterpret_cast<uint8_t*>(staging) + C::kStoreBytes;
    uint8_t* const end_zeros = ends + coord.warpgroup * C::kEndZeros;
    auto* end_scales = reinterpret_cast<float*>(ends + C::kWarpgroups * C::kEndZeros) +
                       coord.warpgroup * C::kEndScales;
    if constexpr (C::kMultipliesZeroPoints) {
#pragma unroll
      for (int i = 0; i * 128 < C::kEndScales; ++i) {
        int x_row = coord.warp * 32 + coord.lane + i * 128;
        if (x_row < C::kBlockM) {
          reinterpret_cast<uint4*>(end_zeros)[x_row] =
              make_uint4(end_zero[i], end_zero[i], end_zero[i], end_zero[i]);
        }
      }
      cutlass::arch::fence_view_async_shared();
      cutlass::arch::NamedBarrier::sync(128, 1 + coord.warpgroup);
    }
    [[maybe_unused]] auto zeros_address = [&](uint8_t const* stage) {
      return cute::cast_smem_ptr_to_uint(stage) + coord.x_row_factors + C::kBlockM * 4;
    };
    hopper::with_rows_of<C>(work, [&](auto taken) {
      constexpr int kRows = taken();
      uint32_t integers[kRows / 2];
      if constexpr (kLongSums) {
        // If the first product started from zeros itself, the sums of 256 rows of x would stay live
        // between tiles and not fit in registers.
#pragma unroll
        for (uint32_t& sum : integers) sum = 0;
      }
      TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
      raw.load(stages + ring.stage * C::kStageBytes, p, coord);
      uint32_t a[4][4];
      float codes[2];
      if constexpr (C::kStartsFromZeroPoints) {
        ClusterBarrier::wait(&barriers.prepared[ring.stage], ring.phase);
        uint32_t zeros = zeros_address(stages + ring.stage * C::kStageBytes);
#pragma unroll
        for (int j = 0; j < C::kBlockM / 16; ++j) load_zeros<C>(j, zeros, integers);
        decode_weights<C>(raw, a);
        code_colsum(a, codes);
        start_sums<C>(codes, integers);
      }
      [[maybe_unused]] int const tap_tiles = p.image.columns / kKPerTile;
      [[maybe_unused]] int rest_of_tap = kTap ? tap_tiles - work.first_k(p) % tap_tiles : 0;
      // Alternates between tiles up to the next compensation and the compensation. Provably the
      // same in all lanes.
      int i = 0;
      [[maybe_unused]] int compensation = 0, window = 0;
      if constexpr (C::kCompensatesByWindow) {
        hopper::WindowPosition<C::kWindowTiles> const first(work.first_k(p), p);
        window = __shfl_sync(~0u, first.window, 0),
        compensation = __shfl_sync(~0u, first.compensation - work.first_k(p), 0);
      }
      do {
        int const until = C::kCompensatesByWindow ? min(count, compensation) : count;
        for (; i < until; ++i) {
          uint8_t const* stage = stages + ring.stage * C::kStageBytes;
          if constexpr (!C::kStartsFromZeroPoints) decode_weights<C>(raw, a);
          float scale[2];
          if (!C::kPrepareScales && kGroups == 1)
            scale[0] = raw.scale[0] * C::kUnit, scale[1] = raw.scale[1] * C::kUnit;
          [[maybe_unused]] auto const load_scale = [&](int group) {
            raw.load_scales(stage, group, p, coord, scale);
            scale[0] *= C::kUnit, scale[1] *= C::kUnit;
          };
          uint64_t x_rows =
              operand_descriptor((C::kPrepareScales ? first_stage + ring.stage * C::kStageBytes
                                                    : cute::cast_smem_ptr_to_uint(stage)) +
                                 C::kActivations);
          [[maybe_unused]] ZeroPointProduct<C> zero_point_product;
          if constexpr (C::kMultipliesZeroPoints) zero_point_product.add(a);
          if constexpr (C::kQuantizes)
            ClusterBarrier::wait(&barriers.prepared[ring.stage], ring.phase);
          auto const multiply = [&](int group) {
            constexpr int kSlices = 4 / kGroups;
#pragma unroll
            for (int k_slice = 0; k_slice < 4; ++k_slice) fence_registers(a[k_slice]);
            fence_registers(integers);
            cute::warpgroup_arrive();
#pragma unroll
            for (int i = 0; i < kSlices; ++i) {
              int const k_slice = group * kSlices + i;
              wgmma_int8<kRows>(a[k_slice], x_rows + k_slice * 2, integers,
                                C::kStartsFromZeroPoints || kLongSums || i > 0);
            }
            cute::warpgroup_commit_batch();
            fence_registers(integers);
          };
          if constexpr (kGroups > 1) {
            static_assert(kPromotion == Promotion::kToken && !kAsymmetric);
#pragma unroll
            for (int group = 0; group + 1 < kGroups; ++group) {
              multiply(group);
              load_scale(group);
              cute::warpgroup_wait<0>();
              fence_registers(integers);
#pragma unroll
              for (int j = 0; j < kRows / 8; ++j) promote<C>(j, nullptr, integers, scale, sums);
            }
          }
          multiply(kGroups - 1);
          if constexpr (kGroups > 1) load_scale(kGroups - 1);
          // While the products run.
          if constexpr (kAsymmetric && kChannel) add_weights(a, total_colsum);
          if constexpr (C::kMultipliesZeroPoints) zero_point_product.spread();
          if (C::kLoadXRowScales && !C::kStartsFromZeroPoints && !C::kQuantizes)
            ClusterBarrier::wait(&barriers.prepared[ring.stage], ring.phase);
          if constexpr (C::kPrepareScales) {
            raw.load_prepared_scales(stage, coord);
            scale[0] = raw.scale[0], scale[1] = raw.scale[1];
          }
          if constexpr (C::kMultipliesZeroPoints) {
            fence_registers(zero_point_product.operand);
            cute::warpgroup_arrive();
            wgmma_int8<C::kBlockM>(zero_point_product.operand, repeated_descriptor(end_zeros),
                                   integers, true);
            cute::warpgroup_commit_batch();
            fence_registers(integers);
          }
          if constexpr (C::kConvertsScalesEarly) asm volatile("" : "+f"(scale[0]), "+f"(scale[1]));
          uint64_t* empty = &barriers.empty[ring.stage];
          ring.advance();
          uint8_t const* next = stages + ring.stage * C::kStageBytes;
          if (i + 1 < count) {
            TransactionBarrier::wait(&barriers.full[ring.stage], ring.phase);
            raw.load_vectors(next, p, coord);
            if (C::kStartsFromZeroPoints)
              ClusterBarrier::wait(&barriers.prepared[ring.stage], ring.phase);
          }
          uint32_t factors = cute::cast_smem_ptr_to_uint(stage) + coord.x_row_factors;
          XRowFactors<C> x_row_scales(factors);
          cute::warpgroup_wait<0>();
          fence_registers(integers);
          if constexpr (C::kMultipliesZeroPoints) zero_point_product.subtract(end_zeros, integers);
          if constexpr (C::kStartsFromZeroPoints) {
            // The zero points of 16 rows are loaded kLate steps after their integers were consumed,
            // and the next weights and their sums in between: loads need registers, and time.
            constexpr int kSixteens = C::kBlockM / 16, kLate = 2;
            constexpr int kWeightsAt = kBlockM == 176  ? 4
                                       : kBlockM == 32 ? 0
                                                       : 2,
                          kCodesAt = kBlockM == 64 ? 3 : kSixteens * 2 / 3;
            float bias[2] = {scale[0] * -kBias, scale[1] * -kBias};
            uint32_t zeros = zeros_address(i + 1 < count ? next : stage);
#pragma unroll
            for (int j = 0; j < kSixteens + kLate; ++j) {
              if (j < kSixteens) {
                x_row_scales.load(j + x_row_scales.kAhead);
#pragma unroll
                for (int k_slice = 0; k_slice < RawWeights<C>::kLoads; ++k_slice) {
                  if (j == kWeightsAt + k_slice / 2 && i + 1 < count)
                    raw.load_piece(next, coord, k_slice);
                }
                promote_biased<C>(j, x_row_scales.sixteens[j], scale, bias, integers, sums);
              }
              if (j >= kLate) load_zeros<C>(j - kLate, zeros, integers);
              if (j == kCodesAt) {
                decode_weights<C>(raw, a);
                code_colsum(a, codes);
              }
            }
            start_sums<C>(codes, integers);
          } else {
            // groups of eight rows of x between two loads of weights
            constexpr int kLoads = RawWeights<C>::kLoads, kEvery = kRows / 8 < 2 * kLoads ? 1 : 2;
            bool promotes = !kLongSums;
            if constexpr (kTap) {
              promotes = --rest_of_tap == 0 || i + 1 == count;
              if (promotes) rest_of_tap = tap_tiles;
            }
#pragma unroll
            for (int j = 0; j < std::max(kRows / 8, kLoads); ++j) {
              if (!kTap && j % 2 == 0) x_row_scales.load(j / 2 + x_row_scales.kAhead);
              // The next weights, 16 bytes at a time: before the products end no register is free,
              // and for 8-bit weights there is none at all.
              if (j % kEvery == kEvery - 1 && j / kEvery < kLoads && i + 1 < count)
                raw.load_piece(next, coord, j / kEvery);
              if constexpr (!kLongSums) {
                if (j < kRows / 8)
                  promote<C>(j, x_row_scales.sixteens[j / 2] + j % 2 * 2, integers, scale, sums);
              }
            }
            if (kTap && promotes) {
#pragma unroll
              for (int j = 0; j < C::kBlockM / 8; ++j) {
                if (j % 2 == 0) x_row_scales.load(j / 2 + x_row_scales.kAhead);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                  float& sum = sums[4 * j + e];
                  sum = fmaf(float(int(integers[4 * j + e])),
                             x_row_scales.sixteens[j / 2][j % 2 * 2 + e % 2], sum);
                  integers[4 * j + e] = 0;
                }
              }
            }
          }
          if (C::kMeetAtEnd) __syncwarp();
          if (coord.lane < C::kCluster) ClusterBarrier::arrive(empty, coord.lane, true);
        }
        if constexpr (C::kCompensatesByWindow) {
          if (i < count) {
            compensate<C>(window, raw, stages, ring, barriers, p, coord, i + 1 == count, integers,
                          sums);
            ++i, ++window;
            compensation = min(compensation + C::kWindowTiles + 1, p.k_tiles - 1 - work.first_k(p));
          }
        }
      } while (C::kCompensatesByWindow && i < count);
      if constexpr (kChannel) {
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) totals[i] = integers[i];
      }
    });
    if (C::kPinsStore) asm volatile("" : "+r"(row0), "+r"(m0));
    if constexpr (kBlock) {
      if constexpr (kGrouped) {
        hopper::store_group<C>(sums, staging, out_map, p, coord, work, row0);
      } else {
        hopper::store<C>(sums, staging, out_map, p, coord, index, row0, m0);
      }
    } else {
      if constexpr (kCompensates) {
        // Only the first split-K slice compensates.
        if (work.first_k(p) == 0) compensate_rows<C>(sums, end_scales, p, coord, row0, m0);
      }
#pragma unroll
      for (int i = 0; i * 128 < C::kEndScales; ++i) {
        int x_row = coord.warp * 32 + coord.lane + i * 128;
        if (x_row >= C::kBlockM) continue;
        end_scales[x_row] = end_scale[i];
        if (kAsymmetric && kChannel) end_zeros[x_row] = uint8_t(end_zero[i]);
      }
      float row_scale[2];
      if constexpr (kLongSums) {
        row_scales.values(p.weight.scale_type, row_scale);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          row_scale[h] *= C::kUnit;
          if (kAsymmetric && kChannel) total_colsum[h] = sum_of_row(total_colsum[h]);
        }
      }
      cutlass::arch::NamedBarrier::sync(128, 1 + coord.warpgroup);
      float outputs[kChannel ? C::kSums : 1];
#pragma unroll
      for (int i = 0; i < C::kSums; ++i) {
        int x_row = i / 4 * 8 + 2 * t + i % 2, h = i % 4 / 2;
        if constexpr (kChannel) {
          // In int32: differences that fit are exact, even if the sums wrapped.
          uint32_t zero_point_product =
              kAsymmetric ? total_colsum[h] * uint32_t(int(int8_t(end_zeros[x_row]))) : 0;
          outputs[i] =
              float(int(totals[i] - zero_point_product)) * row_scale[h] * end_scales[x_row];
        } else {
          sums[i] *= kTap ? row_scale[h] : end_scales[x_row];
        }
      }
      if constexpr (kChannel && kGrouped) {
        hopper::store_group<C>(outputs, staging, out_map, p, coord, work, row0);
      } else if constexpr (kChannel) {
        hopper::store<C>(outputs, staging, out_map, p, coord, index, row0, m0);
      } else if constexpr (kGrouped) {
        hopper::store_group<C>(sums, staging, out_map, p, coord, work, row0);
      } else {
        hopper::store<C>(sums, staging, out_map, p, coord, index, row0, m0);
      }
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    wgmma_gemm_a8(__grid_constant__ CUtensorMap const map,
                  __grid_constant__ CUtensorMap const out_map,
                  __grid_constant__ typename C::Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t stages[];
  hopper::run<C>(stages, map, out_map, p);
#endif
}

}  // namespace
}  // namespace cutlass_ops
