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
  uint4 const* const own_vectors = reinterpret_cast<uint4 const*>(vectors) + t;
#pragma unroll
  for (int j = 0; j < C::kBlockN / 8; j += 4) {
    uint32_t pairs[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 const four = own_vectors[(j + i) * 4];
      uint32_t const v[4] = {four.x, four.y, four.z, four.w};
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

// 16 rows of a warp whose outputs are 16-bit floats, of which there are whole vectors. They pass
// through shared memory as 8 x 8 matrices, so that neighbouring lanes store a line: shuffles, which
// are faster for bytes, take twice as many instructions here. Lines are permuted so that eight
// lanes meet all banks.
template <class C, class Element>
__device__ __forceinline__ void store_floats(uint32_t (&sums)[C::kSums],
                                             ChannelVectors const* vectors, float const* biases,
                                             int* staging, Params const& p, Tile<C> const& tile,
                                             RowPixels<C> const& rows) {
  int const lane = threadIdx.x % 32, line = lane / 4, chunk = lane % 4,
            row = threadIdx.x % 128 / 32 * 16 + line, n = tile.first_n + chunk * 8;
  // The matrices of rows 0 to 7, which have 8 channels each, then those of rows 8 to 15.
  uint32_t const lines = cute::cast_smem_ptr_to_uint(staging),
                 stored = lines + (lane ^ lane / 8 * 2) * 16,
                 loaded = lines + (chunk * 8 + (line ^ chunk * 2)) * 16;
  int const pixels[2] = {rows(p, row), rows(p, row + 8)};
  uint16_t* const out = static_cast<uint16_t*>(p.problem.out) + n;
  uint4 const* const own_vectors = reinterpret_cast<uint4 const*>(vectors) + lane % 4;
  float2 const* const own_biases = reinterpret_cast<float2 const*>(biases) + lane % 4;
  // Rounding keeps the order of numbers, so that bounds may be rounded and applied afterwards.
  uint32_t const low = pack_pair<Element>(p.low, p.low), high = pack_pair<Element>(p.high, p.high);
  auto const bounded = [&](uint32_t pair) {
    return Columns<Element>::word_of(
        __hmin2_nan(__hmax2_nan(Columns<Element>::pair_of(pair), Columns<Element>::pair_of(low)),
                    Columns<Element>::pair_of(high)));
  };
#pragma unroll
  for (int j = 0; j < C::kBlockN / 8; j += 4) {
    uint32_t words[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 const four = own_vectors[(j + i) * 4];
      uint32_t const v[4] = {four.x, four.y, four.z, four.w};
      float2 const bias = own_biases[(j + i) * 4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t const* const own = sums + (j + i) * 4 + half * 2;
        words[half][i] = bounded(pack_pair<Element>(
            fmaf(__int2float_rn(int(own[0] + v[1])), __uint_as_float(v[0]), bias.x),
            fmaf(__int2float_rn(int(own[1] + v[3])), __uint_as_float(v[2]), bias.y)));
      }
    }
    __syncwarp();  // the last ones have been read
#pragma unroll
    for (int half = 0; half < 2; ++half) store_matrices(stored + half * 512, words[half]);
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t v[4];
      load_shared(loaded + half * 512, v);
      if (pixels[half] >= 0 && n + j * 8 < tile.end_n)
        *reinterpret_cast<uint4*>(out + int64_t(pixels[half]) * p.problem.weight.n + j * 8) =
            make_uint4(v[0], v[1], v[2], v[3]);
    }
  }
}

// 16 rows of a warp with any outputs, through shared memory, which needs few registers. A lane has
// four channels of row lane / 2.
template <class C>
__device__ __forceinline__ void store_any(uint32_t (&sums)[C::kSums], ChannelVectors const* vectors,
                                          int* staging, Params const& p, Tile<C> const& tile,
                                          RowPixels<C> const& rows) {
  int const lane = threadIdx.x % 32, own = lane % 2 * 4,
            pixel = rows(p, threadIdx.x % 128 / 32 * 16 + lane / 2);
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
                                      float const* biases, int* staging, Params const& p,
                                      Tile<C> const& tile, int band) {
  RowPixels<C> const rows(p, tile.first_row + band * 64);
  staging += threadIdx.x / 32 * C::Tile::kStagedInts;
  if (!C::kUnsigned && p.x_range) {
    if (p.problem.out_type == ConvOutput::kFloat16) {
      store_floats<C, __half>(sums, vectors, biases, staging, p, tile, rows);
    } else {
      store_floats<C, __nv_bfloat16>(sums, vectors, biases, staging, p, tile, rows);
    }
  } else if (p.whole_vectors) {
    store_vectors<C>(sums, vectors, p, tile, rows);
  } else {
    store_any<C>(sums, vectors, staging, p, tile, rows);
  }
}

}  // namespace
}  // namespace cutlass_ops
