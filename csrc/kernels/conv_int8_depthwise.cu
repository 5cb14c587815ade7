// Depthwise static int8 convolutions, sm_80 and later; and the copies of x that other kernels read.
//
// A thread has four channels of four neighbouring pixels of some lines of the result, a
// strip. A pixel of x is a word of four channels. Byte permutations make of two neighbouring
// pixels a channel's pair, and of two pairs the four pixels of a channel that one dp4a
// multiplies by four taps:
//
//     pixels of a channel     x0 x1 x2 x3 x4 x5
//     place 0                 w0 w1 w2  0              these four by the taps
//     place 1                  0 w0 w1 w2              by the taps a byte later
//     place 2                       w0 w1 w2  0        the four from x2 on
//     place 3                        0 w0 w1 w2
//
// A line of x is read and permuted once for all lines of the strip that it is under: their sums are
// in registers until the last of their lines of x, and the next lines of x are on their way
// meanwhile. That is so for the square kernels of kDepthwiseStrips. With any other a strip is one
// line, and each place reads its own pixels.
//
// Where there is no pixel, codes are the zero point of x, so that what it adds to the sums is the
// same for every place.
#include <iterator>

#include "device/launch.cuh"
#include "device/requantize.cuh"

namespace cutlass_ops {
namespace {

constexpr int kThreads = kDepthwiseThreads, kPixels = kDepthwisePixels,
              kChannels = kDepthwiseChannels;

struct Params : ConvParams {
  int quads, segments, strips;  // of channels; of a line's pixels; of an image's lines
  int lines;                    // of a strip
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

// The work of a thread.
struct Strip {
  int n, image, first, count, column;  // lines and pixels of the result
  int64_t place, pitch;                // of the first output; from a line to the next
  float factors[kChannels];
  int biases[kChannels];

  __device__ __forceinline__ explicit Strip(Params const& p) {
    unsigned const index = blockIdx.x * unsigned(kThreads) + threadIdx.x;
    unsigned const segment = index / unsigned(p.quads), strip = segment / unsigned(p.segments);
    n = int(index - segment * p.quads) * kChannels;
    column = int(segment - strip * p.segments) * kPixels;
    image = int(strip / unsigned(p.strips));
    first = int(strip - image * unsigned(p.strips)) * p.lines;
    count = min(p.lines, p.out_height - first);
    pitch = int64_t(p.out_width) * p.problem.weight.n;
    place =
        (int64_t(image) * p.out_height + first) * pitch + int64_t(column) * p.problem.weight.n + n;
  }

  __device__ __forceinline__ void load_channels(Params const& p) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      float const scale = row_scale(p.problem.weight, n + c);
      factors[c] = requantize_factor(p.problem, scale),
      biases[c] = compensated_bias(p.problem, n + c, scale);
    }
  }

  __device__ __forceinline__ void begin_line(int (&sums)[kPixels][kChannels]) const {
#pragma unroll
    for (int q = 0; q < kPixels; ++q) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) sums[q][c] = biases[c];
    }
  }

  // A line, whose first output is at `index`.
  __device__ __forceinline__ void store_line(Params const& p, int64_t index,
                                             int const (&sums)[kPixels][kChannels]) const {
    unsigned const channels = unsigned(p.problem.weight.n);
    int const pixels = p.out_width - column;
    if (p.problem.out_type == ConvOutput::kInt32) {
      int* const out = static_cast<int*>(p.problem.out) + index;
#pragma unroll
      for (int q = 0; q < kPixels; ++q) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c)
          if (q < pixels) out[q * channels + c] = sums[q][c];
      }
    } else {
      uint8_t* const out = static_cast<uint8_t*>(p.problem.out) + index;
#pragma unroll
      for (int q = 0; q < kPixels; ++q) {
        uint32_t y[kChannels];
#pragma unroll
        for (int c = 0; c < kChannels; ++c) y[c] = uint32_t(requantize(p, sums[q][c], factors[c]));
        uint32_t const bytes =
            __byte_perm(__byte_perm(y[0], y[1], 0x0040), __byte_perm(y[2], y[3], 0x0040), 0x5410);
        if (q < pixels) *reinterpret_cast<uint32_t*>(out + q * channels) = bytes;
      }
    }
  }
};

// The lines of x under a strip, one after another: the pixels of the strip's channels from the
// strip's first tap on.
struct Lines {
  uint8_t const* line;
  int64_t pitch;
  int y, x, height, width, channels;
  uint32_t outside;

  __device__ __forceinline__ Lines(Params const& p, Strip const& strip) {
    ConvProblem const& problem = p.problem;
    y = strip.first * problem.stride[0] - problem.padding[0],
    x = strip.column * problem.stride[1] - problem.padding[1];
    height = problem.height, width = problem.width, channels = problem.channels;
    pitch = int64_t(width) * channels;
    outside = uint32_t(problem.x_zero_point & 0xff) * 0x01010101u;
    line = static_cast<uint8_t const*>(problem.x) + (int64_t(strip.image) * height + y) * pitch +
           int64_t(x) * channels + strip.n;
  }
  __device__ __forceinline__ uint32_t load(int column) const {
    return unsigned(y) < unsigned(height) && unsigned(x + column) < unsigned(width)
               ? __ldg(reinterpret_cast<uint32_t const*>(line + int64_t(column) * channels))
               : outside;
  }
  __device__ __forceinline__ void advance(int lines) { y += lines, line += lines * pitch; }
};

// kSize x kSize taps; kStride along both axes.
template <bool kUnsigned, int kSize, int kStride>
struct Square {
  static constexpr int kWords = (kSize + 3) / 4;  // of four taps of a line
  static constexpr int kColumns = (kPixels - 1) * kStride + kSize, kPairs = (kColumns + 1) / 2;
  // Each begins with a pair of pixels. With kStride 1 neighbouring places share a pair: the taps of
  // the second place are shifted by a byte, for which the words have room.
  static constexpr int kFours = (kStride == 1 ? kPixels / 2 : kPixels) + 2 * (kWords - 1);
  static_assert(kSize % 4 != 0 && kStride <= 2);
  static constexpr DepthwiseStrips kStrips = {kSize, kStride};
  // Lines of the result whose sums are in registers at once, and lines of x in flight.
  static constexpr bool kRolls = kStrips.rolls();
  static constexpr int kSets = kStrips.sets(), kAhead = kRolls ? (kStride == 1 ? 3 : 2) : 1;
  static_assert(!kRolls || kSets * kStride % kAhead == 0);

  using Taps = uint32_t[kWords][kChannels];
  using Fours = uint32_t[kFours][kChannels];

  // `inside`: a bit for each column. Most lines take the first branch, which has
  // fewer instructions.
  static __device__ __forceinline__ void load(Lines& lines, unsigned inside,
                                              uint32_t (&pixels)[kColumns]) {
    auto const pixel = [&](int k) {
      return __ldg(reinterpret_cast<uint32_t const*>(lines.line + unsigned(k * lines.channels)));
    };
    unsigned const there = unsigned(lines.y) < unsigned(lines.height) ? inside : 0;
    if (there == (1u << kColumns) - 1) {
#pragma unroll
      for (int k = 0; k < kColumns; ++k) pixels[k] = pixel(k);
    } else {
#pragma unroll
      for (int k = 0; k < kColumns; ++k) pixels[k] = there >> k & 1 ? pixel(k) : lines.outside;
    }
    lines.advance(1);
    asm("" : "+l"(lines.line));  // one addition, and not as many as there were lines
  }

  static __device__ __forceinline__ void permute(uint32_t const (&pixels)[kColumns], Fours& fours) {
    uint32_t pairs[kPairs][2];  // of two channels each; what stands behind the last pixel is
                                // multiplied by zeros
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      uint32_t const first = pixels[2 * k],
                     second = pixels[2 * k + 1 < kColumns ? 2 * k + 1 : 2 * k];
      pairs[k][0] = __byte_perm(first, second, 0x5140),
      pairs[k][1] = __byte_perm(first, second, 0x7362);
    }
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      int const next = k + 1 < kPairs ? k + 1 : k;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        fours[k][c] = __byte_perm(pairs[k][c / 2], pairs[next][c / 2], c % 2 ? 0x7632 : 0x5410);
        // Before the branch of the next load, which reuses the registers of these pixels; after it,
        // copying them would wait for that load.
        asm volatile("" : "+r"(fours[k][c]));
      }
    }
  }

  // A line of the kernel.
  static __device__ __forceinline__ void multiply(Fours const& fours, Taps const& taps,
                                                  int (&sums)[kPixels][kChannels]) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        uint32_t const later = __funnelshift_l(j ? taps[j - 1][c] : 0, taps[j][c], 8);
#pragma unroll
        for (int q = 0; q < kPixels; ++q) {
          uint32_t const four = fours[(kStride == 1 ? q / 2 : q) + 2 * j][c];
          sums[q][c] = dot<kUnsigned>(four, kStride == 1 && q % 2 ? later : taps[j][c], sums[q][c]);
        }
      }
    }
  }

  static __device__ __forceinline__ void load_taps(uint4 const* from, int step, Taps& taps) {
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      uint4 const v = from[j * step];
      taps[j][0] = v.x, taps[j][1] = v.y, taps[j][2] = v.z, taps[j][3] = v.w;
    }
  }

  static __device__ __forceinline__ void run(Params const& p, Strip& strip) {
    Lines lines(p, strip);
    // Lines behind the strip's last tap are not loaded ahead.
    lines.height = min(lines.height, max(lines.y + (strip.count - 1) * kStride + kSize, 0));
    unsigned inside = 0;
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
      inside |= unsigned(unsigned(lines.x + k) < unsigned(lines.width)) << k;
    uint32_t ahead[kAhead][kColumns];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(lines, inside, ahead[i]);
    strip.load_channels(p);
    uint4 const* const weights =
        reinterpret_cast<uint4 const*>(p.problem.weight.codes) + strip.n / kChannels;
    if constexpr (kRolls) {
      Taps taps[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) load_taps(weights + i * kWords * p.quads, p.quads, taps[i]);
      // Line `step` begins in its step, in sums[step % kSets], and ends kSets - 1 steps later.
      int sums[kSets][kPixels][kChannels];
      int64_t index = strip.place;
#pragma unroll 1
      for (int first = 0; first - (kSets - 1) < strip.count; first += kSets) {
#pragma unroll
        for (int phase = 0; phase < kSets; ++phase) {
          int const ended = first + phase - (kSets - 1);
          if (ended >= strip.count) break;
          strip.begin_line(sums[phase]);
#pragma unroll
          for (int s = 0; s < kStride; ++s) {
            uint32_t (&pixels)[kColumns] = ahead[(phase * kStride + s) % kAhead];
            Fours fours;
            permute(pixels, fours);
            load(lines, inside, pixels);
#pragma unroll
            for (int k = 0; s + k * kStride < kSize; ++k)
              multiply(fours, taps[s + k * kStride], sums[(phase - k + kSets) % kSets]);
          }
          if (ended >= 0)
            strip.store_line(p, index, sums[(phase + 1) % kSets]), index += strip.pitch;
        }
      }
    } else {
      __shared__ uint4 shared[kSize * kWords * kThreads];  // each thread reads its own
#pragma unroll 1
      for (int i = 0; i < kSize * kWords; ++i)
        shared[i * kThreads + threadIdx.x] = __ldg(weights + i * p.quads);
      int sums[kSets][kPixels][kChannels];
#pragma unroll
      for (int line = 0; line < kSets; ++line) strip.begin_line(sums[line]);
#pragma unroll 1
      for (int step = 0; step < (strip.count - 1) * kStride + kSize; ++step) {
        Fours fours;
        permute(ahead[0], fours);
        load(lines, inside, ahead[0]);
#pragma unroll
        for (int line = 0; line < kSets; ++line) {
          int const i = step - line * kStride;  // the line of the kernel
          if (unsigned(i) >= unsigned(kSize)) continue;
          Taps taps;
          load_taps(shared + i * kWords * kThreads + threadIdx.x, kThreads, taps);
          multiply(fours, taps, sums[line]);
        }
      }
#pragma unroll
      for (int line = 0; line < kSets; ++line)
        if (line < strip.count) strip.store_line(p, strip.place + line * strip.pitch, sums[line]);
    }
  }
};

// Any kernel, strides and dilations; strips of a line.
template <bool kUnsigned>
struct AnyKernel {
  static __device__ __forceinline__ void run(Params const& p, Strip& strip) {
    strip.load_channels(p);
    ConvProblem const& problem = p.problem;
    ConvWeight const& w = problem.weight;
    Lines lines(p, strip);
    uint4 const* weights = reinterpret_cast<uint4 const*>(w.codes) + strip.n / kChannels;
    int sums[kPixels][kChannels];
    strip.begin_line(sums);
    for (int i = 0; i < w.height; ++i, lines.advance(problem.dilation[0])) {
      for (int j = 0; j < w.width; j += 4, weights += p.quads) {
        uint4 const v = __ldg(weights);
        uint32_t const taps[kChannels] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int q = 0; q < kPixels; ++q) {
          uint32_t pixels[4];
#pragma unroll
          for (int k = 0; k < 4; ++k)  // what stands behind the last tap is multiplied by zeros
            pixels[k] = j + k < w.width
                            ? lines.load(q * problem.stride[1] + (j + k) * problem.dilation[1])
                            : 0;
          uint32_t const low[2] = {__byte_perm(pixels[0], pixels[1], 0x5140),
                                   __byte_perm(pixels[2], pixels[3], 0x5140)};
          uint32_t const high[2] = {__byte_perm(pixels[0], pixels[1], 0x7362),
                                    __byte_perm(pixels[2], pixels[3], 0x7362)};
          sums[q][0] = dot<kUnsigned>(__byte_perm(low[0], low[1], 0x5410), taps[0], sums[q][0]);
          sums[q][1] = dot<kUnsigned>(__byte_perm(low[0], low[1], 0x7632), taps[1], sums[q][1]);
          sums[q][2] = dot<kUnsigned>(__byte_perm(high[0], high[1], 0x5410), taps[2], sums[q][2]);
          sums[q][3] = dot<kUnsigned>(__byte_perm(high[0], high[1], 0x7632), taps[3], sums[q][3]);
        }
      }
    }
    strip.store_line(p, strip.place, sums);
  }
};

template <class Kernel, int kCtas>
__global__ void __launch_bounds__(kThreads, kCtas)
    conv_int8_depthwise(__grid_constant__ Params const p) {
  pdl_wait_and_launch_dependents();
  Strip strip(p);
  if (strip.image < p.problem.batch) Kernel::run(p, strip);
}

// ---- copy: a thread has 16 channels of a pixel

struct CopyParams {
  uint8_t const* x;
  int64_t pixels;
  int channels;
  unsigned vectors;  // of a pixel of the copy
  bool words;        // x is loaded in words of 4 bytes, or in bytes
};

__global__ void __launch_bounds__(kThreads)
    copy_image(__grid_constant__ CopyParams const p, uint4* out) {
  pdl_wait_and_launch_dependents();
  unsigned const index = blockIdx.x * unsigned(kThreads) + threadIdx.x;
  unsigned const pixel = index / p.vectors, first = (index - pixel * p.vectors) * kConvVector;
  if (pixel >= p.pixels) return;
  uint8_t const* const from = p.x + int64_t(pixel) * p.channels + first;
  uint32_t words[4] = {};
#pragma unroll
  for (int byte = 0; byte < kConvVector; byte += 4) {
    if (p.words && int(first) + byte < p.channels)
      words[byte / 4] = __ldg(reinterpret_cast<uint32_t const*>(from + byte));
  }
#pragma unroll
  for (int byte = 0; byte < kConvVector; ++byte) {
    if (!p.words && int(first) + byte < p.channels)
      words[byte / 4] |= uint32_t(from[byte]) << byte % 4 * 8;
  }
  out[index] = make_uint4(words[0], words[1], words[2], words[3]);
}

// ---- gather: a thread has 16 bytes of a pixel of the result

struct GatherParams {
  ConvProblem problem;
  int out_height, out_width;
  int pixels, vectors, line;  // vectors of a pixel; bytes of a line of taps
};

__global__ void __launch_bounds__(kThreads)
    gather_taps(__grid_constant__ GatherParams const g, uint4* out) {
  pdl_wait_and_launch_dependents();
  ConvProblem const& p = g.problem;
  int64_t const index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  int const pixel = int(index / g.vectors), vector = int(index - int64_t(pixel) * g.vectors);
  if (pixel >= g.pixels) return;
  int const row = pixel / g.out_width, image = row / g.out_height;
  int const first_x = (pixel - row * g.out_width) * p.stride[1] - p.padding[1];
  int const first_y = (row - image * g.out_height) * p.stride[0] - p.padding[0];
  uint8_t const* const x =
      static_cast<uint8_t const*>(p.x) + int64_t(image) * p.height * p.width * p.channels;
  int i = vector * kConvVector / g.line, rest = vector * kConvVector - i * g.line;
  int j = rest / p.channels, channel = rest - j * p.channels;
  uint32_t words[4] = {};
#pragma unroll
  for (int byte = 0; byte < kConvVector; ++byte) {
    int const at_y = first_y + i * p.dilation[0], at_x = first_x + j * p.dilation[1];
    bool const inside = i < p.weight.height && unsigned(at_y) < unsigned(p.height) &&
                        unsigned(at_x) < unsigned(p.width);
    uint32_t const code =
        inside ? x[(int64_t(at_y) * p.width + at_x) * p.channels + channel] : p.x_zero_point & 0xff;
    words[byte / 4] |= code << byte % 4 * 8;
    if (++channel == p.channels) {
      channel = 0;
      if (++j == p.weight.width) j = 0, ++i;
    }
  }
  out[index] = make_uint4(words[0], words[1], words[2], words[3]);
}

template <bool kUnsigned, int kIndex = 0>
Status launch_depthwise(Params const& p, ConvPlan const& plan, Stream stream) {
  if constexpr (kIndex < int(std::size(kDepthwiseStrips))) {
    constexpr DepthwiseStrips kStrips = kDepthwiseStrips[kIndex];
    if (!kStrips.fits(p.problem)) return launch_depthwise<kUnsigned, kIndex + 1>(p, plan, stream);
    return launch(
        conv_int8_depthwise<Square<kUnsigned, kStrips.size, kStrips.stride>, kStrips.ctas_per_sm()>,
        dim3(unsigned(plan.grid)), kThreads, 0, stream, p);
  } else {
    return launch(conv_int8_depthwise<AnyKernel<kUnsigned>, 1>, dim3(unsigned(plan.grid)), kThreads,
                  0, stream, p);
  }
}

}  // namespace

Status launch_conv_int8_depthwise(ConvParams const& params, ConvPlan const& plan, Stream stream) {
  Params p;
  static_cast<ConvParams&>(p) = params;
  p.quads = params.problem.weight.n / kChannels,
  p.segments = int(ceil_div(params.out_width, kPixels));
  p.lines = plan.block_m / kPixels, p.strips = int(ceil_div(params.out_height, p.lines));
  return params.problem.x_unsigned ? launch_depthwise<true>(p, plan, stream)
                                   : launch_depthwise<false>(p, plan, stream);
}

Status launch_copy_image(ConvProblem const& problem, void* out, int out_channels, Stream stream) {
  ConvProblem const& q = problem;
  CopyParams const p = {static_cast<uint8_t const*>(q.x), int64_t(q.batch) * q.height * q.width,
                        q.channels, unsigned(out_channels / kConvVector),
                        q.channels % 4 == 0 && reinterpret_cast<uintptr_t>(q.x) % 4 == 0};
  int64_t const threads = p.pixels * p.vectors;
  return launch(copy_image, dim3(unsigned(ceil_div(threads, int64_t(kThreads)))), kThreads, 0,
                stream, p, static_cast<uint4*>(out));
}

Status launch_gather_taps(ConvProblem const& problem, void* out, int out_channels, Stream stream) {
  GatherParams const p{problem,
                       problem.out_height(),
                       problem.out_width(),
                       int(problem.pixels()),
                       out_channels / kConvVector,
                       problem.weight.width * problem.channels};
  auto const threads = int64_t(p.pixels) * p.vectors;
  return launch(gather_taps, dim3(unsigned(ceil_div(threads, int64_t(kThreads)))), kThreads, 0,
                stream, p, static_cast<uint4*>(out));
}

}  // namespace cutlass_ops
