// What conv_int8_wgmma.cu does with the sums of a tile.
#pragma once

#include "kernels/conv_int8_wgmma_load.cuh"

namespace cutlass_ops {
namespace {

// 16 rows of a warp whose outputs are bytes in whole vectors.
template <class C>
__device__ __forceinline__ void store_vectors(uint32_t (&sums)[C::kSums],
                                              ChannelVectors const* vectors, Params const& p,
                                              Tile<C> const& tile, RowPixels<C> const& rows) {
  int const t = threadIdx.x % 4, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4,
            n = tile.first_n + t * 8;
  int const pixels[2] = {rows(p, row), rows(p, row + 8)};
  uint8_t* const out = static_cast<uint8_t*>(p.problem.out) + n;
  uint32_t const shared = cute::cast_smem_ptr_to_uint(vectors + t * 2);
#pragma unroll
  for (int j = 0; j < C::kBlockN / 8; j += 4) {
    uint32_t pairs[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t v[4];
      load_shared(shared + (j + i) * 8 * int(sizeof(ChannelVectors)), v);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t const* const own = sums + (j + i) * 4 + half * 2;
        pairs[half][i] = requantize_two(p, int(own[0] + v[1]), int(own[1] + v[3]),
                                        __uint_as_float(v[0]), __uint_as_float(v[2]));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint2 const bytes = exchange_pairs(pairs[half], t);
      if (pixels[half] >= 0 && n + j * 8 < tile.end_n) {
        *reinterpret_cast<uint2*>(out + int64_t(pixels[half]) * p.problem.weight.n + j * 8) = bytes;
      }
    }
  }
}

// 16 rows of a warp whose outputs are 16-bit floats, of which there are whole vectors.
template <class C>
__device__ __forceinline__ void store_floats(uint32_t (&sums)[C::kSums],
                                             ChannelVectors const* vectors, Params const& p,
                                             Tile<C> const& tile, RowPixels<C> const& rows) {
  int const t = threadIdx.x % 4, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  int const own_n = tile.first_n + t * 2, stored_n = tile.first_n + t * 8;
  int const pixels[2] = {rows(p, row), rows(p, row + 8)};
  ConvProblem const& problem = p.problem;
  bool const bfloat16 = problem.out_type == ConvOutput::kBFloat16;
  uint16_t* const out = static_cast<uint16_t*>(problem.out) + stored_n;
  uint32_t const shared = cute::cast_smem_ptr_to_uint(vectors + t * 2);
#pragma unroll
  for (int j = 0; j < C::kBlockN / 8; j += 4) {
    uint32_t words[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t v[4];
      load_shared(shared + (j + i) * 8 * int(sizeof(ChannelVectors)), v);
      int const n = own_n + (j + i) * 8;
      float bias[2] = {};
      if (problem.bias && n < tile.end_n)
        bias[0] = load_float(problem.bias, problem.bias_type, n),
        bias[1] = load_float(problem.bias, problem.bias_type, n + 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t const* const own = sums + (j + i) * 4 + half * 2;
        float y[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float const sum = __int2float_rn(int(own[k] + v[2 * k + 1]));
          y[k] = clamp_keeping_nan(fmaf(sum, __uint_as_float(v[2 * k]), bias[k]), p.low, p.high);
        }
        words[half][i] = to_half_bits(y[0], y[1], bfloat16);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 const eight = exchange_words(words[half], t);
      if (pixels[half] >= 0 && stored_n + j * 8 < tile.end_n) {
        *reinterpret_cast<uint4*>(out + int64_t(pixels[half]) * problem.weight.n + j * 8) = eight;
      }
    }
  }
}

// 16 rows of a warp with any outputs, through shared memory, which needs few registers. A lane has
// four channels of row lane / 2, which is `pixel`.
template <class C>
__device__ __forceinline__ void store_any(uint32_t (&sums)[C::kSums], ChannelVectors const* vectors,
                                          int* staging, Params const& p, Tile<C> const& tile,
                                          int pixel) {
  int const lane = threadIdx.x % 32, own = lane % 2 * 4;
  int64_t const line = int64_t(pixel) * p.problem.weight.n;
#pragma unroll
  for (int j = 0; j < C::kBlockN / 8; ++j) {
    int* const staged = staging + j % 2 * (C::Tile::kStagedInts / 2);
    int const channel = j * 8 + own, n = tile.first_n + channel;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<uint2*>(staged + (lane / 4 + half * 8) * 8 + lane % 4 * 2) =
          make_uint2(sums[j * 4 + half * 2], sums[j * 4 + half * 2 + 1]);
    }
    __syncwarp();  // the other half has been read, too
    if (pixel < 0 || n >= tile.end_n) continue;
    int4 const found = *reinterpret_cast<int4 const*>(staged + lane * 4);
    int const acc[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (n + i >= tile.end_n) break;
      ChannelVectors const v = vectors[channel + i];
      store_output(p, line + n + i, wrapping_add(acc[i], v.bias), v.factor);
    }
  }
}

// `band`: of 64 pixels of the tile.
template <class C>
__device__ __forceinline__ void store(uint32_t (&sums)[C::kSums], ChannelVectors const* vectors,
                                      int* staging, Params const& p, Tile<C> const& tile,
                                      int band) {
  int const warp = threadIdx.x / 32;
  RowPixels<C> const rows(p, tile.first_row + band * 64);
  int const row = warp % 4 * 16 + int(threadIdx.x) % 32 / 2, pixel = rows(p, row);
  if (!C::kUnsigned && p.x_range) {
    store_floats<C>(sums, vectors, p, tile, rows);
  } else if (p.whole_vectors) {
    store_vectors<C>(sums, vectors, p, tile, rows);
  } else {
    store_any<C>(sums, vectors, staging + warp * C::Tile::kStagedInts, p, tile, pixel);
  }
}

}  // namespace
}  // namespace cutlass_ops
