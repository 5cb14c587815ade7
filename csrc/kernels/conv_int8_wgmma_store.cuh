// What conv_int8_wgmma.cu does with the sums of a tile.
#pragma once

#include "kernels/conv_int8_wgmma_load.cuh"

namespace cutlass_ops {
namespace {

// Puts the zero point of x back into the sums of 16 rows of a warp for taps outside of x. `number`
// is the border class of row lane / 2.
template <class C>
__device__ __forceinline__ void add_cut_taps(uint32_t (&sums)[C::kSums], Params const& p,
                                             Tile<C> const& tile, int number) {
  // Loads of a half: there are registers for them.
  constexpr int kAtOnce = C::kBlockN == 64 && !C::kTurns ? 8 : 4;
  int const lane = threadIdx.x % 32, channel = tile.first_n + lane % 4 * 2;
  int const group_n = tile.end_n - p.group_channels;
  int const* cut[2];
  bool cuts[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const own = __shfl_sync(~0u, number, lane / 4 * 2 + half * 16);
    cuts[half] = own != 0;
    cut[half] = p.problem.weight.cut_sums + cut_sums_at(p, own, tile.group) + channel - group_n;
  }
#pragma unroll
  for (int j = 0; j < C::kBlockN / 8; j += kAtOnce) {
    int2 outside[2][kAtOnce];
#pragma unroll
    for (int i = 0; i < 2 * kAtOnce; ++i) {
      int const half = i / kAtOnce, step = (j + i % kAtOnce) * 8;
      int2& v = outside[half][i % kAtOnce] = make_int2(0, 0);
      // volatile: loaded ahead, they would take the registers of the sums
      if (cuts[half] && channel + step < tile.end_n)
        asm volatile("ld.global.nc.v2.s32 {%0, %1}, [%2];"
                     : "=r"(v.x), "=r"(v.y)
                     : "l"(cut[half] + step));
    }
#pragma unroll
    for (int i = 0; i < 2 * kAtOnce; ++i) {
      int2 const v = outside[i / kAtOnce][i % kAtOnce];
      uint32_t* const two = sums + (j + i % kAtOnce) * 4 + i / kAtOnce * 2;
      two[0] += uint32_t(wrapping_multiply(p.problem.x_zero_point, v.x));
      two[1] += uint32_t(wrapping_multiply(p.problem.x_zero_point, v.y));
    }
  }
}

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
  if (p.cuts_taps) {
    int const number = pixel >= 0 ? rows.border(p, row) : 0;
    if (__any_sync(~0u, number)) add_cut_taps<C>(sums, p, tile, number);
  }
  if (p.whole_vectors) {
    store_vectors<C>(sums, vectors, p, tile, rows);
  } else {
    store_any<C>(sums, vectors, staging + warp * C::Tile::kStagedInts, p, tile, pixel);
  }
}

}  // namespace
}  // namespace cutlass_ops
