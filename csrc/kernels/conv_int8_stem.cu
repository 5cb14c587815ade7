// Static int8 convolutions of images with few channels, which first layers of networks have, by
// mma.sync. sm_80 and later.
//
// Under a line of the kernel, all taps of a place are neighbouring bytes of x: with three channels
// and steps of two pixels,
//
//     bytes of a line of x    rgb rgb rgb rgb rgb rgb rgb rgb
//     place 0                 [taps         ]
//     place 1                         [taps         ]
//
// so K is taken line by line, in slices of 32 bytes; weights are zeros behind the last tap. A CTA
// copies the pixels under its tile to shared memory, with the zero point of x for missing ones, and
// there a lane reads the words of a slice from wherever a place begins. For places that do not
// begin with a word, there are copies that are moved by so many bytes.
//
// A warp multiplies 32 places by 64 output channels at a time, whose weights lie in shared memory
// as fragments of mma.sync.
#include <cute/arch/mma_sm80.hpp>

#include <type_traits>

#include "device/launch.cuh"
#include "device/requantize.cuh"

namespace cutlass_ops {
namespace {

constexpr int kThreads = ConvStemTile::kThreads, kBlockN = ConvStemTile::kBlockN,
              kFragments = kBlockN / 8;
constexpr int kQuads = kFragments / 2;  // vectors of a lane that hold the weights of a slice,
                                        // two fragments each

struct Params : ConvParams {
  ConvStemTile tile;
  int n_tiles, column_tiles, line_tiles;
};

// The position of a CTA's tile.
struct Position {
  int first_n, column, line, image, columns, lines;

  __device__ __forceinline__ explicit Position(Params const& p) {
    int rest = int(blockIdx.x);
    first_n = rest % p.n_tiles * kBlockN, rest /= p.n_tiles;
    column = rest % p.column_tiles * p.tile.columns, rest /= p.column_tiles;
    line = rest % p.line_tiles * p.tile.lines, image = rest / p.line_tiles;
    columns = min(p.tile.columns, p.out_width - column),
    lines = min(p.tile.lines, p.out_height - line);
  }
};

// [lines of taps][slices][kQuads][32 lanes]: of fragments 2 q and 2 q + 1, each lane's bytes 0 to
// 15 and 16 to 31.
__device__ __forceinline__ void copy_weights(Params const& p, Position const& position,
                                             uint32_t* to) {
  ConvWeight const& w = p.problem.weight;
  int const line_bytes = w.width * w.channels, stored = stored_channels(w.height * line_bytes);
#pragma unroll 4
  for (int i = int(threadIdx.x); i < w.height * p.tile.slices * kQuads * 128; i += kThreads) {
    int const part = i % 4, lane = i / 4 % 32, quad = i / 128 % kQuads, slice = i / (kQuads * 128);
    int const line = slice / p.tile.slices,
              n = position.first_n + (quad * 2 + part / 2) * 8 + lane / 4;
    int const first = (slice - line * p.tile.slices) * 32 + part % 2 * 16 + lane % 4 * 4;
    int8_t const* const codes = w.codes + int64_t(n) * stored + line * line_bytes + first;
    uint32_t word = 0;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte)
      if (n < w.n && first + byte < line_bytes)
        word |= uint32_t(uint8_t(__ldg(codes + byte))) << byte * 8;
    to[i] = word;
  }
}

// [copies][lines of x][pitch].
__device__ __forceinline__ void copy_pixels(Params const& p, Position const& position,
                                            uint32_t* to) {
  ConvProblem const& problem = p.problem;
  int const first_y = position.line * problem.stride[0] - problem.padding[0],
            bytes = problem.width * problem.channels;
  int const first = (position.column * problem.stride[1] - problem.padding[1]) * problem.channels;
  int const words = p.tile.pitch / 4, count = p.tile.rows(problem) * words;
  auto const* const x =
      static_cast<uint8_t const*>(problem.x) + int64_t(problem.height) * position.image * bytes;
#pragma unroll 4
  for (int i = int(threadIdx.x); i < count; i += kThreads) {
    int const row = i / words, y = first_y + row, offset = first + (i - row * words) * 4;
    bool const inside = unsigned(y) < unsigned(problem.height);
    uint8_t const* const pixels = x + int64_t(y) * bytes + offset;
    uint32_t word = 0;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      bool const there = inside && unsigned(offset + byte) < unsigned(bytes);
      word |= uint32_t(there ? __ldg(pixels + byte) : uint8_t(problem.x_zero_point)) << byte * 8;
    }
    to[i] = word;
  }
  __syncthreads();
  for (int copy = 1; copy < p.tile.copies; ++copy) {
    for (int i = int(threadIdx.x); i < count; i += kThreads)
      to[copy * count + i] =
          __funnelshift_r(to[i], i + 1 < count ? to[i + 1] : 0, copy * (32 / p.tile.copies));
  }
}

template <class X>
__device__ __forceinline__ void multiply(int (&sums)[4], uint32_t const (&x)[4], uint32_t w0,
                                         uint32_t w1) {
  using Mma = std::conditional_t<std::is_same_v<X, uint8_t>, cute::SM80_16x8x32_S32U8S8S32_TN,
                                 cute::SM80_16x8x32_S32S8S8S32_TN>;
  auto* const to = reinterpret_cast<uint32_t*>(sums);
  Mma::fma(to[0], to[1], to[2], to[3], x[0], x[1], x[2], x[3], w0, w1, to[0], to[1], to[2], to[3]);
}

// A row of a fragment's accumulators: of a place, two channels of each fragment.
__device__ __forceinline__ void store_row(Params const& p, int (&sums)[kFragments][4], int half,
                                          ChannelVectors const* vectors, int64_t pixel, bool there,
                                          int first_n) {
  int const t = int(threadIdx.x) % 4, channels = p.problem.weight.n - first_n;
  int64_t const index = pixel * p.problem.weight.n + first_n;
  vectors += t * 2;
  if (p.whole_vectors) {
    uint8_t* const out = static_cast<uint8_t*>(p.problem.out) + index + t * 8;
#pragma unroll
    for (int j = 0; j < kFragments; j += 4) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint4 const v = *reinterpret_cast<uint4 const*>(vectors + (j + i) * 8);  // of two channels
        int const* const own = sums[j + i] + half * 2;
        pairs[i] = requantize_two(p, wrapping_add(own[0], int(v.y)), wrapping_add(own[1], int(v.w)),
                                  __uint_as_float(v.x), __uint_as_float(v.z));
      }
      uint2 const bytes = exchange_pairs(pairs, t);
      if (there && j * 8 + t * 8 < channels) *reinterpret_cast<uint2*>(out + j * 8) = bytes;
    }
  } else if (there) {
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        int const channel = j * 8 + t * 2 + c;
        ChannelVectors const v = vectors[j * 8 + c];
        if (channel < channels)
          store_output(p, index + channel, wrapping_add(sums[j][half * 2 + c], v.bias), v.factor);
      }
    }
  }
}

template <class X>
__global__ void __launch_bounds__(kThreads, 4) conv_int8_stem(__grid_constant__ Params const p) {
  extern __shared__ uint4 shared[];
  pdl_wait_and_launch_dependents();
  ConvProblem const& problem = p.problem;
  ConvWeight const& w = problem.weight;
  Position const position(p);
  uint4* const weights = shared;
  auto* const vectors =
      reinterpret_cast<ChannelVectors*>(weights + w.height * p.tile.slices * kQuads * 32);
  auto* const x = reinterpret_cast<uint32_t*>(vectors + kBlockN);
  copy_weights(p, position, reinterpret_cast<uint32_t*>(weights));
  for (int i = int(threadIdx.x); i < kBlockN; i += kThreads) {
    int const n = min(position.first_n + i, w.n - 1);
    float const scale = row_scale(w, n);
    vectors[i] = {requantize_factor(problem, scale), compensated_bias(problem, n, scale)};
  }
  copy_pixels(p, position, x);
  __syncthreads();

  int const lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4,
            count = position.lines * position.columns;
  int const words = p.tile.pitch / 4, copy_words = p.tile.rows(problem) * words,
            step = problem.stride[1] * problem.channels;
  // The line of place m is m * reciprocal / 2^20: exact, as m is below 2^10 and columns
  // are at most 2^7.
  static_assert(ConvStemTile::kMostLines * ConvStemTile::kMostColumns <= 1 << 10 &&
                ConvStemTile::kMostColumns <= 1 << 7);
  int const reciprocal = ((1 << 20) + position.columns - 1) / position.columns;
  for (int first = int(threadIdx.x) / 32 * 32; first < count; first += kThreads) {
    int from[4];  // the first word of the lane's places: rows g and g + 8 of two fragments
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const m = min(first + i * 8 + g, count - 1), line = m * reciprocal >> 20;
      int const bytes = (m - line * position.columns) * step;
      from[i] = bytes % 4 * p.tile.copies / 4 * copy_words + line * problem.stride[0] * words +
                bytes / 4 + t;
    }
    int sums[2][kFragments][4] = {};
    uint4 const* slice_weights = weights + lane;
#pragma unroll 1
    for (int i = 0; i < w.height; ++i) {
#pragma unroll 1
      for (int slice = 0; slice < p.tile.slices; ++slice, slice_weights += kQuads * 32) {
        uint32_t const* const line = x + i * problem.dilation[0] * words + slice * 8;
        uint32_t pixels[2][4];
#pragma unroll
        for (int f = 0; f < 2; ++f) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            pixels[f][half] = line[from[f * 2 + half]],
            pixels[f][2 + half] = line[from[f * 2 + half] + 4];
        }
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          uint4 const v = slice_weights[q * 32];
#pragma unroll
          for (int f = 0; f < 2; ++f) {
            multiply<X>(sums[f][q * 2], pixels[f], v.x, v.y);
            multiply<X>(sums[f][q * 2 + 1], pixels[f], v.z, v.w);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const m = min(first + i * 8 + g, count - 1), line = m * reciprocal >> 20,
                column = m - line * position.columns;
      int64_t const pixel =
          (int64_t(position.image) * p.out_height + position.line + line) * p.out_width +
          position.column + column;
      store_row(p, sums[i / 2], i % 2, vectors, pixel, first + i * 8 + g < count, position.first_n);
    }
  }
}

}  // namespace

Status launch_conv_int8_stem(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  ConvProblem const& problem = params.problem;
  Params p{params, ConvStemTile(problem)};
  p.n_tiles = int(ceil_div(problem.weight.n, kBlockN));
  p.column_tiles = int(ceil_div(params.out_width, p.tile.columns)),
  p.line_tiles = int(ceil_div(params.out_height, p.tile.lines));
  auto* const kernel = problem.x_unsigned ? conv_int8_stem<uint8_t> : conv_int8_stem<int8_t>;
  return launch(kernel, dim3(unsigned(plan.grid)), kThreads, int(p.tile.shared_bytes(problem)),
                stream, p);
}

}  // namespace cutlass_ops
