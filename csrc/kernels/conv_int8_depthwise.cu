// Depthwise static int8 convolutions, sm_80 and later; and the copies of x that other kernels read.
//
// A thread has four channels of four neighbouring pixels of a line. Four pixels of x are four
// words, of four channels each; transposed, they are four words of a channel's pixels. Of two such
// neighbours a byte permutation takes the four taps of any pixel, which one dp4a multiplies by the
// weights. Where there is no pixel, codes are the zero point of x, so that what it adds to the sums
// is the same for every pixel.
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
  pdl_wait();
  ConvProblem const& problem = p.problem;
  ConvWeight const& w = problem.weight;
  unsigned const index = blockIdx.x * unsigned(kThreads) + threadIdx.x;
  unsigned const place = index / unsigned(p.quads);
  int const n = int(index - place * p.quads) * kChannels;
  int const row = int(place / unsigned(p.segments));
  int const column = int(place - row * unsigned(p.segments)) * kPixels;
  int const image = row / p.out_height;
  if (image >= problem.batch) return;
  int const first_y = (row - image * p.out_height) * problem.stride[0] - problem.padding[0];
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
    // By channel, four taps of the first pixel, from tap `first` on; if kUnitSteps, also the pixels
    // of x that they are.
    auto const load_four = [&](int first, uint32_t (&by_channel)[4], int q) {
      uint32_t by_tap[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        // What stands behind the last tap is multiplied by zeros.
        if constexpr (kUnitSteps) {
          by_tap[k] = first + k < w.width + kPixels - 1 ? load(first_x + first + k) : 0;
        } else {
          int const tap = first + k;
          by_tap[k] = tap < w.width ? load(first_x + q * problem.stride[1] + tap * problem.dilation[1]) : 0;
        }
      }
      transpose(by_tap, by_channel);
    };
    uint32_t four[4], next[4];
    if constexpr (kUnitSteps) load_four(0, next, 0);
    for (int j = 0; j < words; ++j) {
      uint4 const v = __ldg(weights + int64_t(i * words + j) * p.quads);
      uint32_t const taps[kChannels] = {v.x, v.y, v.z, v.w};
      if constexpr (kUnitSteps) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) four[c] = next[c];
        load_four(j * 4 + 4, next, 0);
      }
#pragma unroll
      for (int q = 0; q < kPixels; ++q) {
        if constexpr (!kUnitSteps) load_four(j * 4, four, q);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          uint32_t const pixels = kUnitSteps ? __byte_perm(four[c], next[c], 0x3210 + 0x1111 * q) : four[c];
          sums[q][c] = dot<kUnsigned>(pixels, taps[c], sums[q][c]);
        }
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
    int64_t const at = (int64_t(row) * p.out_width + column + q) * w.n + n;
    int acc[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) acc[c] = wrapping_add(sums[q][c], biases[c]);
    if (problem.out_type == ConvOutput::kInt32) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) static_cast<int*>(problem.out)[at + c] = acc[c];
    } else {
      uint32_t y[kChannels];
#pragma unroll
      for (int c = 0; c < kChannels; ++c) y[c] = uint32_t(requantize(p, acc[c], factors[c]));
      *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(problem.out) + at) =
          __byte_perm(__byte_perm(y[0], y[1], 0x0040), __byte_perm(y[2], y[3], 0x0040), 0x5410);
    }
  }
}

// ---- copy: a thread has 16 channels of a pixel

struct CopyParams {
  uint8_t const* x;
  int batch, height, width, channels;
  int padding[2];
  unsigned padded_height, padded_width, vectors;  // of the copy; vectors of its pixels
  uint32_t outside;                               // four zero points of x
  bool whole_vectors;                             // of x
};

__global__ void __launch_bounds__(kThreads) copy_image(__grid_constant__ CopyParams const p, uint4* out) {
  pdl_wait();
  unsigned const index = blockIdx.x * unsigned(kThreads) + threadIdx.x;
  unsigned const pixel = index / p.vectors, first = (index - pixel * p.vectors) * kConvVector;
  unsigned const line = pixel / p.padded_width, image = line / p.padded_height;
  if (image >= unsigned(p.batch)) return;
  int const x = int(pixel - line * p.padded_width) - p.padding[1];
  int const y = int(line - image * p.padded_height) - p.padding[0];
  bool const inside = unsigned(x) < unsigned(p.width) && unsigned(y) < unsigned(p.height);
  uint8_t const* const from = p.x + ((int64_t(image) * p.height + y) * p.width + x) * p.channels + first;
  uint4 v = make_uint4(p.outside, p.outside, p.outside, p.outside);
  if (inside && p.whole_vectors) {
    v = __ldg(reinterpret_cast<uint4 const*>(from));
  } else if (inside) {
    uint32_t words[4] = {};
#pragma unroll
    for (int byte = 0; byte < kConvVector; ++byte)
      if (int(first) + byte < p.channels) words[byte / 4] |= uint32_t(from[byte]) << byte % 4 * 8;
    v = make_uint4(words[0], words[1], words[2], words[3]);
  }
  out[index] = v;
}

// ---- gather: a thread has 16 bytes of a pixel of the result

struct GatherParams {
  ConvProblem problem;
  int out_height, out_width;
  int pixels, vectors, line;  // vectors of a pixel; bytes of a line of taps
};

__global__ void __launch_bounds__(kThreads) gather_taps(__grid_constant__ GatherParams const g, uint4* out) {
  pdl_wait();
  ConvProblem const& p = g.problem;
  int64_t const index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  int const pixel = int(index / g.vectors), vector = int(index - int64_t(pixel) * g.vectors);
  if (pixel >= g.pixels) return;
  int const row = pixel / g.out_width, image = row / g.out_height;
  int const first_x = (pixel - row * g.out_width) * p.stride[1] - p.padding[1];
  int const first_y = (row - image * g.out_height) * p.stride[0] - p.padding[0];
  uint8_t const* const x = static_cast<uint8_t const*>(p.x) + int64_t(image) * p.height * p.width * p.channels;
  int i = vector * kConvVector / g.line, rest = vector * kConvVector - i * g.line;
  int j = rest / p.channels, channel = rest - j * p.channels;
  uint32_t words[4] = {};
#pragma unroll
  for (int byte = 0; byte < kConvVector; ++byte) {
    int const at_y = first_y + i * p.dilation[0], at_x = first_x + j * p.dilation[1];
    bool const inside = i < p.weight.height && unsigned(at_y) < unsigned(p.height) && unsigned(at_x) < unsigned(p.width);
    uint32_t const code = inside ? x[(int64_t(at_y) * p.width + at_x) * p.channels + channel] : p.x_zero_point & 0xff;
    words[byte / 4] |= code << byte % 4 * 8;
    if (++channel == p.channels) {
      channel = 0;
      if (++j == p.weight.width) j = 0, ++i;
    }
  }
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

Status launch_copy_image(ConvProblem const& problem, bool pads, void* out, int out_channels, Stream stream) {
  ConvProblem const& q = problem;
  CopyParams p = {static_cast<uint8_t const*>(q.x), q.batch, q.height, q.width, q.channels, {0, 0}};
  if (pads) p.padding[0] = q.padding[0], p.padding[1] = q.padding[1];
  p.padded_height = unsigned(q.height + 2 * p.padding[0]), p.padded_width = unsigned(q.width + 2 * p.padding[1]);
  p.vectors = unsigned(out_channels / kConvVector), p.outside = uint32_t(q.x_zero_point & 0xff) * 0x01010101u;
  p.whole_vectors = q.channels % kConvVector == 0 && reinterpret_cast<uintptr_t>(q.x) % kConvVector == 0;
  int64_t const threads = int64_t(q.batch) * p.padded_height * p.padded_width * p.vectors;
  return launch(copy_image, dim3(unsigned(ceil_div(threads, int64_t(kThreads)))), kThreads, 0, stream, p,
                static_cast<uint4*>(out));
}

Status launch_gather_taps(ConvProblem const& problem, void* out, int out_channels, Stream stream) {
  GatherParams const p{problem,
                       problem.out_height(),
                       problem.out_width(),
                       int(problem.pixels()),
                       out_channels / kConvVector,
                       problem.weight.width * problem.channels};
  auto const threads = int64_t(p.pixels) * p.vectors;
  return launch(gather_taps, dim3(unsigned(ceil_div(threads, int64_t(kThreads)))), kThreads, 0, stream, p,
                static_cast<uint4*>(out));
}

}  // namespace cutlass_ops
