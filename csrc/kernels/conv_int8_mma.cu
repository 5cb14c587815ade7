// Static int8 convolutions of any geometry, as implicit GEMMs by mma.sync: 64 pixels of the result
// x 64 output channels, sm_80 and later.
//
// K is taken 32 channels at a time. A thread gathers 16 channels of a pixel under a tap, and 16 of
// a weight, while the last 32 are multiplied; where there is no pixel, codes are the zero point of
// x, so that what it adds to the sums is the same for every pixel.
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/requantize.cuh"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 128, kTile = kConvMmaTile,
              kLine = 48;  // bytes from row to row: the eight rows of a fragment lie in all banks

struct Params : ConvParams {
  int n_tiles, group_tiles;  // of all output channels; of a group of the convolution
  int vectors;               // of 16 channels, of a tap
  bool whole_vectors_of_x;   // they can be loaded at once
};

template <bool kUnsigned>
__device__ __forceinline__ void multiply(int (&d)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
  using Mma = std::conditional_t<kUnsigned, cute::SM80_16x8x32_S32U8S8S32_TN, cute::SM80_16x8x32_S32S8S8S32_TN>;
  auto* const sums = reinterpret_cast<uint32_t*>(d);
  Mma::fma(sums[0], sums[1], sums[2], sums[3], a[0], a[1], a[2], a[3], b[0], b[1], sums[0], sums[1], sums[2], sums[3]);
}

// What a thread gathers: vectors of a row of each operand.
struct Gather {
  Params const& p;
  uint8_t const* image = nullptr;  // null behind the last pixel
  int8_t const* weight = nullptr;  // null behind the last channel
  int x, y, group;

  __device__ __forceinline__ Gather(Params const& params, int pixel, int n, int end_n, int g)
      : p(params), x(0), y(0), group(g) {
    ConvProblem const& problem = p.problem;
    ConvWeight const& w = problem.weight;
    if (pixel < p.pixels) {
      int const row = pixel / p.out_width, index = row / p.out_height;
      x = (pixel - row * p.out_width) * problem.stride[1] - problem.padding[1];
      y = (row - index * p.out_height) * problem.stride[0] - problem.padding[0];
      image = static_cast<uint8_t const*>(problem.x) + int64_t(index) * problem.height * problem.width * problem.channels;
    }
    if (n < end_n) weight = w.codes + int64_t(n) * w.height * w.width * p.vectors * kConvVector;
  }

  __device__ __forceinline__ uint4 load_x(int vector) const {
    ConvProblem const& problem = p.problem;
    ConvWeight const& w = problem.weight;
    int const tap = vector / p.vectors, channel = (vector - tap * p.vectors) * kConvVector;
    if (!image || tap >= w.height * w.width) return make_uint4(0, 0, 0, 0);
    int const i = tap / w.width, row = y + i * problem.dilation[0], column = x + (tap - i * w.width) * problem.dilation[1];
    if (unsigned(row) >= unsigned(problem.height) || unsigned(column) >= unsigned(problem.width)) {
      uint32_t const zeros = uint32_t(problem.x_zero_point & 0xff) * 0x01010101u;
      return make_uint4(zeros, zeros, zeros, zeros);
    }
    uint8_t const* const from =
        image + (int64_t(row) * problem.width + column) * problem.channels + group * w.channels + channel;
    if (p.whole_vectors_of_x) return *reinterpret_cast<uint4 const*>(from);
    uint32_t words[4] = {};
#pragma unroll
    for (int byte = 0; byte < kConvVector; ++byte)
      if (channel + byte < w.channels) words[byte / 4] |= uint32_t(from[byte]) << byte % 4 * 8;
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  __device__ __forceinline__ uint4 load_weight(int vector) const {
    if (!weight || vector >= p.problem.weight.height * p.problem.weight.width * p.vectors) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<uint4 const*>(weight + int64_t(vector) * kConvVector);
  }
};

template <bool kUnsigned>
__global__ void __launch_bounds__(kThreads) conv_int8_mma(__grid_constant__ Params const p) {
  __shared__ __align__(16) uint8_t pixels[kTile * kLine], weights[kTile * kLine];
  pdl_wait();
  int const tile = blockIdx.x / p.n_tiles, column = blockIdx.x - tile * p.n_tiles, group = column / p.group_tiles;
  int const channels = p.problem.weight.n / p.problem.groups, end_n = (group + 1) * channels;
  int const first_pixel = tile * kTile, first_n = group * channels + (column - group * p.group_tiles) * kTile;
  int const row = threadIdx.x / 2, part = threadIdx.x % 2;
  Gather const gather(p, first_pixel + row, first_n + row, end_n, group);
  int const lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  int const warp_row = warp % 2 * 32, warp_column = warp / 2 * 32;
  int sums[2][4][4] = {};
  auto const word = [&](uint8_t const* operand, int r, int c) {
    return *reinterpret_cast<uint32_t const*>(operand + r * kLine + c * 4);
  };
  int const steps = (p.problem.weight.height * p.problem.weight.width * p.vectors + 1) / 2;
  uint4 x = gather.load_x(part), w = gather.load_weight(part);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    __syncthreads();
    *reinterpret_cast<uint4*>(pixels + row * kLine + part * kConvVector) = x;
    *reinterpret_cast<uint4*>(weights + row * kLine + part * kConvVector) = w;
    __syncthreads();
    if (step + 1 < steps) x = gather.load_x((step + 1) * 2 + part), w = gather.load_weight((step + 1) * 2 + part);
    uint32_t a[2][4], b[4][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) a[i][k] = word(pixels, warp_row + i * 16 + g + k % 2 * 8, t + k / 2 * 4);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      b[j][0] = word(weights, warp_column + j * 8 + g, t), b[j][1] = word(weights, warp_column + j * 8 + g, t + 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) multiply<kUnsigned>(sums[i][j], a[i], b[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int const n = first_n + warp_column + j * 8 + t * 2 + e;
      if (n >= end_n) continue;
      float const scale = row_scale(p.problem.weight, n), factor = requantize_factor(p.problem, scale);
      int const bias = compensated_bias(p.problem, n, scale);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const pixel = first_pixel + warp_row + i * 8 + g;
        if (pixel >= p.pixels) continue;
        int const acc = wrapping_add(sums[i / 2][j][i % 2 * 2 + e], bias);
        store_output(p, int64_t(pixel) * p.problem.weight.n + n, acc, factor);
      }
    }
  }
}

}  // namespace

Status launch_conv_int8_mma(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  ConvWeight const& w = params.problem.weight;
  Params p;
  static_cast<ConvParams&>(p) = params;
  p.group_tiles = int(ceil_div(w.n / params.problem.groups, kTile)), p.n_tiles = params.problem.groups * p.group_tiles;
  p.vectors = stored_channels(w.channels) / kConvVector;
  p.whole_vectors_of_x = w.channels % kConvVector == 0 && reinterpret_cast<uintptr_t>(params.problem.x) % kConvVector == 0;
  return launch(params.problem.x_unsigned ? conv_int8_mma<true> : conv_int8_mma<false>, dim3(unsigned(plan.grid)), kThreads, 0,
                stream, p);
}

}  // namespace cutlass_ops
