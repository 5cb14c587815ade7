// Static int8 convolutions of which each output channel has an input channel of its own, sm_80 and later. And the copy that gives x as many channels as other
// kernels want.
//
// A thread has four channels of four neighbouring pixels of a line. Four taps of a line of the kernel are four words of x, of four channels each; transposed,
// they are four words of a channel's taps, which one dp4a each multiplies by the weights. Where there is no pixel, codes are the zero point of x, so that what
// it adds to the sums is the same for every pixel.
#include "device/launch.cuh"
#include "device/requantize.cuh"

namespace cutlass_ops {
namespace {

constexpr int kThreads = kDepthwiseThreads, kPixels = kDepthwisePixels, kChannels = kDepthwiseChannels;

struct Params : ConvParams {
  int quads, segments;  // of channels; of a line's pixels
};

template <bool kUnsigned>
__device__ __forceinline__ int dot(uint32_t x, uint32_t w, int sum) {
  if constexpr (kUnsigned) {
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(x), "r"(w));
    return sum;
  } else {
    return __dp4a(int(x), int(w), sum);
  }
}

// Bytes of a 4 x 4 matrix.
__device__ __forceinline__ void transpose(uint32_t const (&in)[4], uint32_t (&out)[4]) {
  uint32_t const low[2] = {__byte_perm(in[0], in[1], 0x5140), __byte_perm(in[2], in[3], 0x5140)};
  uint32_t const high[2] = {__byte_perm(in[0], in[1], 0x7362), __byte_perm(in[2], in[3], 0x7362)};
  out[0] = __byte_perm(low[0], low[1], 0x5410), out[1] = __byte_perm(low[0], low[1], 0x7632);
  out[2] = __byte_perm(high[0], high[1], 0x5410), out[3] = __byte_perm(high[0], high[1], 0x7632);
}

// kUnitSteps: stride and dilation along a line are 1, so that neighbouring pixels share words of x.
template <bool kUnsigned, bool kUnitSteps>
__global__ void __launch_bounds__(kThreads) conv_int8_depthwise(__grid_constant__ Params const p) {
  wait_for_predecessor();
  ConvProblem const& problem = p.problem;
  ConvWeight const& w = problem.weight;
  int64_t const index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  int64_t const place = index / p.quads;
  int const n = int(index - place * p.quads) * kChannels;
  int64_t const row = place / p.segments;
  int const column = int(place - row * p.segments) * kPixels;
  int const image = int(row / p.out_height);
  if (image >= problem.batch) return;
  int const first_y = int(row - int64_t(image) * p.out_height) * problem.stride[0] - problem.padding[0];
  int const first_x = column * problem.stride[1] - problem.padding[1];
  uint32_t const zeros = uint32_t(problem.x_zero_point & 0xff) * 0x01010101u;
  uint8_t const* const x = static_cast<uint8_t const*>(problem.x) + n;
  uint4 const* const weights = reinterpret_cast<uint4 const*>(w.codes) + n / kChannels;
  int const words = (w.width + 3) / 4;  // of a line of taps

  int sums[kPixels][kChannels] = {};
  for (int i = 0; i < w.height; ++i) {
    int const y = first_y + i * problem.dilation[0];
    bool const inside = unsigned(y) < unsigned(problem.height);
    uint8_t const* const line = x + (int64_t(image) * problem.height + y) * problem.width * problem.channels;
    auto const load = [&](int at) {
      return inside && unsigned(at) < unsigned(problem.width)
                 ? __ldg(reinterpret_cast<uint32_t const*>(line + int64_t(at) * problem.channels))
                 : zeros;
    };
    for (int j = 0; j < words; ++j) {
      uint4 const v = __ldg(weights + int64_t(i * words + j) * p.quads);
      uint32_t const taps[kChannels] = {v.x, v.y, v.z, v.w};
      uint32_t shared[kUnitSteps ? kPixels + 3 : 1];
      if constexpr (kUnitSteps) {
        // What stands behind the last tap is multiplied by zeros.
#pragma unroll
        for (int k = 0; k < kPixels + 3; ++k) shared[k] = j * 4 + k < w.width + kPixels - 1 ? load(first_x + j * 4 + k) : 0;
      }
#pragma unroll
      for (int q = 0; q < kPixels; ++q) {
        uint32_t by_tap[4], by_channel[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if constexpr (kUnitSteps) {
            by_tap[k] = shared[q + k];
          } else {
            int const tap = j * 4 + k;
            by_tap[k] = tap < w.width ? load(first_x + q * problem.stride[1] + tap * problem.dilation[1]) : 0;
          }
        }
        transpose(by_tap, by_channel);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) sums[q][c] = dot<kUnsigned>(by_channel[c], taps[c], sums[q][c]);
      }
    }
  }

  float factors[kChannels];
  int biases[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    float const scale = row_scale(w, n + c);
    factors[c] = requantize_factor(problem, scale), biases[c] = compensated_bias(problem, n + c, scale);
  }
#pragma unroll
  for (int q = 0; q < kPixels; ++q) {
    if (column + q >= p.out_width) break;
    int64_t const at = (row * p.out_width + column + q) * w.n + n;
    int acc[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) acc[c] = wrapping_add(sums[q][c], biases[c]);
    if (problem.out_type == ConvOutput::kInt32) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) static_cast<int*>(problem.out)[at + c] = acc[c];
    } else {
      uint32_t bytes = 0;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) bytes |= uint32_t(requantize(p, acc[c], factors[c]) & 0xff) << c * 8;
      *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(problem.out) + at) = bytes;
    }
  }
}

// ---- copy: a thread has 16 channels of a pixel

__global__ void __launch_bounds__(kThreads)
    copy_channels(uint8_t const* x, int64_t pixels, int channels, uint4* out, int out_vectors) {
  wait_for_predecessor();
  int64_t const index = int64_t(blockIdx.x) * kThreads + threadIdx.x, pixel = index / out_vectors;
  if (pixel >= pixels) return;
  int const first = int(index - pixel * out_vectors) * kConvVector;
  uint8_t const* const from = x + pixel * channels + first;
  uint32_t words[4] = {};
#pragma unroll
  for (int byte = 0; byte < kConvVector; ++byte)
    if (first + byte < channels) words[byte / 4] |= uint32_t(from[byte]) << byte % 4 * 8;
  out[index] = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace

Status launch_conv_int8_depthwise(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  Params p;
  static_cast<ConvParams&>(p) = params;
  p.quads = params.problem.weight.n / kChannels, p.segments = int(ceil_div(params.out_width, kPixels));
  bool const steps = params.problem.stride[1] == 1 && params.problem.dilation[1] == 1;
  auto* const kernel = params.problem.x_unsigned
                           ? (steps ? conv_int8_depthwise<true, true> : conv_int8_depthwise<true, false>)
                           : (steps ? conv_int8_depthwise<false, true> : conv_int8_depthwise<false, false>);
  return launch(kernel, dim3(unsigned(plan.grid)), kThreads, 0, stream, p);
}

Status launch_copy_channels(void const* x, int64_t pixels, int channels, void* out, int out_channels, Stream stream) {
  int const vectors = out_channels / kConvVector;
  return launch(copy_channels, dim3(unsigned(ceil_div(pixels * vectors, kThreads))), kThreads, 0, stream,
                static_cast<uint8_t const*>(x), pixels, channels, static_cast<uint4*>(out), vectors);
}

}  // namespace cutlass_ops
