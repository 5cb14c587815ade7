// A packed weight -> its zero-point terms: PackedWeight::sums, sum_scales and total_colsum
// (zero_compensation.h). A CTA takes a row panel, a set of four warps of it every few sixteens of K
// tiles, and a warp 16 rows. The terms are kept as fp32 numbers in the place of their fp16 parts
// until the scale of the row is known, so that the weight is read once. Where the zero points of
// the weight are compensated, the terms are those times their scales, and no codes are read.
#include <cuda_fp16.h>

#include <algorithm>

#include "cutlass_ops/zero_compensation.h"
#include "device/launch.cuh"
#include "device/scalar.cuh"
#include "dispatch/launchers.h"
#include "formats/decode.cuh"
#include "formats/formats.h"

namespace cutlass_ops {
namespace {

constexpr int kSetThreads = 128, kMostSets = 4;

struct Params {
  PackedWeight weight;
  uint8_t* sums;
  void* sum_scales;
  float* total_colsum;
  int tiles, windows, group_tiles, n_pad;  // group_tiles: tiles of K that share a scale
  bool follows;  // nothing that ran before the kernel before is still running
};

// Minus the sums of a tile's 128 weights of rows g and g + 8, times 16 where the decoder's codes
// are; the same in the four lanes of a row.
template <class Format, bool kZeros>
__device__ __forceinline__ void sum_tile(Params const& p, int row_panel, int tile,
                                         float (&sums)[2]) {
  using Decode = typename Format::template Int8Decoder<kZeros>;
  constexpr int kBits = Format::kBits;
  int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  int64_t const row =
      int64_t(tile / p.group_tiles) * p.n_pad + row_panel * kRowsPerPanel + lane / 4 * 8 + warp * 2;
  uint8_t const* from = p.weight.codes +
                        (int64_t(row_panel) * p.tiles + tile) * k_tile_bytes(kBits) +
                        warp * (kBits / 2) * kUnitBytes;
  int totals[2] = {};
#pragma unroll
  for (int unit = 0; unit < kBits / 2; ++unit) {
    uint4 const v = *reinterpret_cast<uint4 const*>(from + unit * kUnitBytes + lane * kLaneBytes);
    uint32_t const words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int piece = 0; piece < 4 / Decode::kWords; ++piece) {
      uint32_t a[4];
      uint32_t const* of_piece = words + piece * Decode::kWords;
      if constexpr (kZeros) {
        auto const zeros = Decode::zero_constants(p.weight.zeros[row], p.weight.zeros[row + 1]);
        Decode::fragment(of_piece, zeros, a);
      } else {
        Decode::fragment(of_piece, a);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) totals[i % 2] = __dp4a(int(a[i]), int(0xffffffff), totals[i % 2]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    totals[h] += __shfl_xor_sync(0xffffffffu, totals[h], 1);
    totals[h] += __shfl_xor_sync(0xffffffffu, totals[h], 2);
    sums[h] = float(totals[h]) * load_float(p.weight.scales, p.weight.scale_type, row + h);
  }
}

// 2^exponent for exponents -126 .. 127.
__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(uint32_t(exponent + 127) << 23);
}

// A lane's part of wgmma fragments of 16 tiles of K: tiles 2t, 2t + 1, 2t + 8 and 2t + 9 and rows g
// and g + 8, with the largest magnitudes and totals of these rows.
struct Terms {
  float values[2][4] = {}, most[2] = {};
  double total[2] = {};
};

template <class Format, bool kZeros>
__device__ __forceinline__ void add_sums(Params const& p, int row_panel, int sixteen,
                                         Terms& terms) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    int const tile = sixteen * 16 + i;
    float sums[2];
    sum_tile<Format, kZeros>(p, row_panel, min(tile, p.tiles - 1), sums);
    if (tile >= p.tiles) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      terms.most[h] = fmaxf(terms.most[h], fabsf(sums[h])), terms.total[h] -= sums[h];
      if (i % 8 / 2 == threadIdx.x % 4) terms.values[h][i / 8 * 2 + i % 2] = sums[h];
    }
  }
}

// Minus zero points times scales, in the same order; totals are unused. All loads of a thread are
// in flight at once.
template <class Format, class Scale>
__device__ __forceinline__ void add_zeros(Params const& p, int row_panel, int sixteen,
                                          Terms& terms) {
  constexpr float kCodes = Format::template Int8Decoder<false>::kScale;
  int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, t = lane % 4;
  char2 zeros[4];
  Scale scales[4][2];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    int const tile = min(sixteen * 16 + e / 2 * 8 + 2 * t + e % 2, p.tiles - 1);
    int64_t const row = int64_t(tile / p.group_tiles) * p.n_pad + row_panel * kRowsPerPanel +
                        lane / 4 * 8 + warp * 2;
    zeros[e] = *reinterpret_cast<char2 const*>(p.weight.zeros + row);
#pragma unroll
    for (int h = 0; h < 2; ++h) scales[e][h] = static_cast<Scale const*>(p.weight.scales)[row + h];
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (sixteen * 16 + e / 2 * 8 + 2 * t + e % 2 >= p.tiles) continue;
    terms.values[0][e] = -kCodes * zeros[e].x * float(scales[e][0]);
    terms.values[1][e] = -kCodes * zeros[e].y * float(scales[e][1]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float most = 0.0f;
#pragma unroll
    for (float v : terms.values[h]) most = fmaxf(most, fabsf(v));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    terms.most[h] = fmaxf(terms.most[h], fmaxf(most, __shfl_xor_sync(~0u, most, 2)));
  }
}

// kOf: sums of codes, or zero points of the weight.
enum class Of { kCodes, kZeros };

template <class Format, bool kZeros, Of kOf>
__global__ void __launch_bounds__(kSetThreads* kMostSets)
    weight_colsum_kernel(__grid_constant__ Params const p) {
  constexpr int kBits = Format::kBits, kSixteens = compensation_window(kBits) / 16;
  __shared__ float largest[kMostSets][kRowsPerPanel];
  __shared__ double totals[kMostSets][kRowsPerPanel];
  int const row_panel = blockIdx.x, set = threadIdx.x / kSetThreads,
            sets = blockDim.x / kSetThreads;
  int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, t = lane % 4,
            first_row = lane / 4 * 8 + warp * 2;
  uint8_t* const out = p.sums + int64_t(row_panel) * p.windows * k_tile_bytes(kBits) +
                       warp * (kBits / 2) * kUnitBytes + lane * kLaneBytes;
  auto const place = [&](int sixteen) {
    return out + int64_t(sixteen / kSixteens) * k_tile_bytes(kBits) +
           sixteen % kSixteens * 2 * kUnitBytes;
  };
  pdl_launch_dependents();
  if (!p.follows) pdl_wait();
  Terms terms;
  for (int sixteen = set; sixteen < p.windows * kSixteens; sixteen += sets) {
    if constexpr (kOf == Of::kCodes) {
      add_sums<Format, kZeros>(p, row_panel, sixteen, terms);
    } else if (p.weight.scale_type == DataType::kFloat16) {
      add_zeros<Format, __half>(p, row_panel, sixteen, terms);
    } else if (p.weight.scale_type == DataType::kBFloat16) {
      add_zeros<Format, __nv_bfloat16>(p, row_panel, sixteen, terms);
    } else {
      add_zeros<Format, float>(p, row_panel, sixteen, terms);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float (&v)[4] = terms.values[h];
      *reinterpret_cast<float4*>(place(sixteen) + h * kUnitBytes) =
          make_float4(v[0], v[1], v[2], v[3]);
      v[0] = v[1] = v[2] = v[3] = 0.0f;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (t == 0)
      largest[set][first_row + h] = terms.most[h], totals[set][first_row + h] = terms.total[h];
  }
  __syncthreads();
  // Powers of two in scale_type that bring sums below 2^14 (2^16 with the largest fp16 scales).
  float inverse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float row_most = largest[0][first_row + h];
    double row_total = totals[0][first_row + h];
    for (int i = 1; i < sets; ++i)
      row_most = fmaxf(row_most, largest[i][first_row + h]), row_total += totals[i][first_row + h];
    bool const half = p.weight.scale_type == DataType::kFloat16;
    int const wanted = int(__float_as_uint(row_most) >> 23) - 127 - 13;
    int const exponent = min(max(wanted, half ? -24 : -126), half ? 15 : 126);
    inverse[h] = power_of_two(-exponent);
    int const position = row_panel * kRowsPerPanel + first_row + h;
    if (set != 0 || t != 0) continue;
    store_float(p.sum_scales, p.weight.scale_type, position, power_of_two(exponent));
    p.total_colsum[position] = float(row_total / Format::template Int8Decoder<kZeros>::kScale);
  }
  for (int sixteen = set; sixteen < p.windows * kSixteens; sixteen += sets) {
    uint8_t* const to = place(sixteen);
    float values[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float4 const v = *reinterpret_cast<float4 const*>(to + h * kUnitBytes);
      values[h][0] = v.x * inverse[h], values[h][1] = v.y * inverse[h];
      values[h][2] = v.z * inverse[h], values[h][3] = v.w * inverse[h];
    }
    uint32_t parts[2][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float const low = values[r % 2][r / 2 * 2], high = values[r % 2][r / 2 * 2 + 1];
      __half2 const first = __floats2half2_rn(low, high);
      __half2 const second =
          __floats2half2_rn(low - __low2float(first), high - __high2float(first));
      parts[0][r] = reinterpret_cast<uint32_t const&>(first),
      parts[1][r] = reinterpret_cast<uint32_t const&>(second);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      *reinterpret_cast<uint4*>(to + part * kUnitBytes) =
          make_uint4(parts[part][0], parts[part][1], parts[part][2], parts[part][3]);
    }
  }
  pdl_wait();  // or the product might start before the kernel before this one has ended
}

}  // namespace

Status launch_weight_colsum(PackedWeight const& weight, bool of_zeros, bool follows, void* colsums,
                            Stream stream) {
  int const tiles = int(padded_k(weight.k) / kKPerTile), n_pad = int(padded_rows(weight.n));
  int const bits = info(weight.format).bits, windows = compensation_windows(tiles, bits);
  PackedWeight placed = weight;
  place_colsums(&placed, colsums);
  Params const p{weight,
                 const_cast<uint8_t*>(placed.sums),
                 const_cast<void*>(placed.sum_scales),
                 const_cast<float*>(placed.total_colsum),
                 tiles,
                 windows,
                 weight.group_size == -1 ? tiles : weight.group_size / kKPerTile,
                 n_pad,
                 follows};
  auto const kernel = visit_exact(weight.format, [&](auto format) {
    using Format = decltype(format);
    if (of_zeros) return weight_colsum_kernel<Format, true, Of::kZeros>;
    if constexpr (Format::kZerosFitInt8) {
      if (weight.zeros) return weight_colsum_kernel<Format, true, Of::kCodes>;
    }
    return weight_colsum_kernel<Format, false, Of::kCodes>;
  });
  int const sets = std::min(windows * compensation_window(bits) / 16, kMostSets);
  return launch(kernel, dim3(unsigned(n_pad / kRowsPerPanel)), kSetThreads * sets, 0, stream, p);
}

}  // namespace cutlass_ops
