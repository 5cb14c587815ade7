// Depthwise convolutions of floats, sm_80 and later: each of the convolution's groups has
// one input channel.
//
// A thread computes four neighbouring places of a line of the result, of eight neighbouring output
// channels, in fp32. A CTA has a tile of some rows and columns of places and some vectors of eight
// channels. The pixels under the tile are copied to shared memory, with zeros for missing ones, so
// that each is read from global memory once for all taps:
//
//        columns of x                    a thread's places under a line of taps
//     +---------------------+
//     | pixels under the    |            x0 x1 x2 x3 x4 x5
//     |  +---------------+  |            w0 w1 w2
//     |  | places        |  |               w0 w1 w2
//     |  +---------------+  |                  w0 w1 w2
//     +---------------------+                     w0 w1 w2
//
// Strips, kernels of 3 x 3 taps and x of 16 bits: a thread has two places of some lines, of four
// channels, and shared memory nothing. A line of x is read once for all lines of the result that it
// is under: their sums are in registers until the last of their lines of x, and the next lines of x
// are on their way meanwhile.
//
// Where stride and dilation along the width are 1, a pixel is read from shared memory once for all
// taps of a line. Where far more pixels lie under the tile than its taps read (large dilations and
// strides), or more than shared memory holds, threads read global memory instead.
#include <algorithm>
#include <limits>

#include "cutlass/fast_math.h"
#include "device/epilogue.cuh"
#include "device/image_tiles.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "dispatch/launchers.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 128, kMostThreadsZ = 64;
constexpr int kChannels = kTapVector, kPlaces = 4;  // of a thread
constexpr int kSharedBytes = 48 * 1024;  // what a CTA has without asking: four or more fit in an SM
                                         // of sm_80 and Hopper
constexpr int kVectorBytes = sizeof(uint4);  // shared memory is counted in these

enum class Source {
  kGlobal,
  kShared,     // pixels are copied to shared memory
  kUnitSteps,  // the same, and stride and dilation along the width are 1
};

// The tile of a CTA. Rows and columns without `in_` refer to the result.
struct DepthwiseTile {
  int vectors, rows, strips;  // threads: of eight channels, of places, of four columns
  int channel_tiles, row_tiles, column_tiles;
  int in_rows, in_columns, row_pitch;  // in shared memory; from a row to the next, in 16 bytes
  bool shared;

  int columns() const { return strips * kPlaces; }
};

struct Params {
  ImageTiles image;  // axes: width, height, depth
  EpilogueParams epilogue;
  void const* x;         // [pixels][channels]
  float const* weights;  // [taps][vectors * 8]
  int channels, multiplier, vectors;
  bool whole_vectors;  // eight output channels have eight input channels, which start on 16 bytes
  DepthwiseTile tile;
  int row_step, column_step;  // from one pixel that a thread copies to the next
  cutlass::FastDivmod channel_tiles, column_tiles, row_tiles, depth;
};

// Vectors of shared memory that eight channels take.
template <class T>
constexpr int kWords = kChannels * int(sizeof(T)) / kVectorBytes;

template <class T>
__device__ __forceinline__ void to_floats(uint4 const (&from)[kWords<T>], float (&to)[kChannels]) {
#pragma unroll
  for (int i = 0; i < kWords<T>; ++i) {
    uint32_t const words[4] = {from[i].x, from[i].y, from[i].z, from[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (std::is_same_v<T, float>) {
        to[4 * i + j] = __uint_as_float(words[j]);
      } else {
        to[2 * j] = unpack_half<T>(words[j], 0), to[2 * j + 1] = unpack_half<T>(words[j], 1);
      }
    }
  }
}

// The input channels of eight output channels, the first of which is n, at a pixel.
template <class T>
__device__ __forceinline__ void load_channels(Params const& p, T const* pixel, int n,
                                              uint4 (&to)[kWords<T>]) {
  if (p.whole_vectors) {
#pragma unroll
    for (int i = 0; i < kWords<T>; ++i)
      to[i] = __ldg(reinterpret_cast<uint4 const*>(pixel + n) + i);
    return;
  }
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  uint32_t words[4 * kWords<T>] = {};
  int channel = n / p.multiplier, rest = n - channel * p.multiplier;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    uint32_t const bits =
        channel < p.channels ? __ldg(reinterpret_cast<Bits const*>(pixel) + channel) : 0;
    words[c * int(sizeof(T)) / 4] |= bits << c * sizeof(T) % 4 * 8;
    if (++rest == p.multiplier) ++channel, rest = 0;
  }
#pragma unroll
  for (int i = 0; i < kWords<T>; ++i)
    to[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
}

// The position of a CTA's tile, and this thread's share of it.
struct Thread {
  int image, depth, row, column;  // the first place
  int vector;                     // of the result's channels
  int first[3];  // the pixel under the tile's first place and first tap: width, height, depth

  __device__ __forceinline__ explicit Thread(Params const& p) {
    int channel_tile, column_tile, row_tile, rest = int(blockIdx.x);
    p.channel_tiles(rest, channel_tile, rest);
    p.column_tiles(rest, column_tile, rest);
    p.row_tiles(rest, row_tile, rest);
    p.depth(image, depth, rest);
    row = row_tile * p.tile.rows, column = column_tile * p.tile.strips * kPlaces;
    first[0] = column * p.image.stride[0] - p.image.padding[0];
    first[1] = row * p.image.stride[1] - p.image.padding[1];
    first[2] = depth * p.image.stride[2] - p.image.padding[2];
    row += int(threadIdx.y), column += int(threadIdx.z) * kPlaces;
    vector = channel_tile * p.tile.vectors + int(threadIdx.x);
  }

  // The number of a pixel; -1 where there is none.
  __device__ __forceinline__ int pixel(ImageTiles const& of, int x, int y, int z) const {
    bool const inside = unsigned(x) < unsigned(of.size[0]) && unsigned(y) < unsigned(of.size[1]) &&
                        unsigned(z) < unsigned(of.size[2]);
    return inside ? ((image * of.size[2] + z) * of.size[1] + y) * of.size[0] + x : -1;
  }
};

// Shared memory: [depth taps][in_rows][row_pitch], of which a row holds
// [in_columns][words][vectors], then the weights, [taps][2 words][vectors]. Threads that read it at
// once have neighbouring vectors.
template <class T>
__device__ __forceinline__ void copy_tile(Params const& p, Thread const& thread, uint4* shared) {
  DepthwiseTile const& tile = p.tile;
  ImageTiles const& image = p.image;
  int const i = int(threadIdx.y) + tile.rows * int(threadIdx.z), v = int(threadIdx.x);
  int const first_row = i / tile.in_columns, first_column = i - first_row * tile.in_columns;
  bool const there = thread.vector < p.vectors;
  int const n = there ? thread.vector * kChannels : 0, bytes = p.channels * int(sizeof(T));
  uint4* line = shared + v;
  for (int k = 0; k < image.taps[2]; ++k, line += tile.in_rows * tile.row_pitch) {
    int const z = thread.first[2] + k * image.dilation[2];
    bool const plane_there = there && unsigned(z) < unsigned(image.size[2]);
    int64_t const plane =
        plane_there ? (int64_t(thread.image) * image.size[2] + z) * image.size[1] * image.size[0]
                    : 0;
    char const* const from = static_cast<char const*>(p.x) + plane * bytes;
    int row = first_row, column = first_column;
    while (row < tile.in_rows) {
      int const y = thread.first[1] + row, x = thread.first[0] + column;
      bool const inside = plane_there && unsigned(y) < unsigned(image.size[1]) &&
                          unsigned(x) < unsigned(image.size[0]);
      T const* const pixel =
          reinterpret_cast<T const*>(from + int64_t(inside ? y * image.size[0] + x : 0) * bytes);
      uint4* const to = line + row * tile.row_pitch + column * kWords<T> * tile.vectors;
      if (p.whole_vectors) {
#pragma unroll
        for (int w = 0; w < kWords<T>; ++w)
          copy_async_16_or_zero(to + w * tile.vectors, pixel + n + w * (kChannels / kWords<T>),
                                inside);
      } else {
        uint4 words[kWords<T>] = {};
        if (inside) load_channels(p, pixel, n, words);
#pragma unroll
        for (int w = 0; w < kWords<T>; ++w) to[w * tile.vectors] = words[w];
      }
      row += p.row_step, column += p.column_step;
      if (column >= tile.in_columns) ++row, column -= tile.in_columns;
    }
  }
  int const words = 2 * image.taps[0] * image.taps[1] * image.taps[2];
  for (int w = i; w < words; w += tile.rows * tile.strips)
    copy_async_16_or_zero(line + w * tile.vectors,
                          p.weights + int64_t(w / 2) * p.vectors * kChannels + n + w % 2 * 4,
                          there);
  commit_copies();
  wait_copies<0>();
}

// kWidth: taps of a line, known beforehand with unit steps alone, or 0.
template <class T, Source kSource, int kWidth>
__global__ void __launch_bounds__(kThreads, 4) conv_depthwise(__grid_constant__ Params const p) {
  constexpr bool kInShared = kSource != Source::kGlobal, kUnitSteps = kSource == Source::kUnitSteps;
  extern __shared__ uint4 shared[];
  pdl_wait_and_launch_dependents();
  DepthwiseTile const& tile = p.tile;
  ImageTiles const& image = p.image;
  Thread const thread(p);
  if constexpr (kInShared) {
    copy_tile<T>(p, thread, shared);
    __syncthreads();
  }
  if (thread.vector >= p.vectors || thread.row >= image.out[1] || thread.column >= image.out[0])
    return;

  // From the tile's first pixel to the thread's.
  int const right = int(threadIdx.z) * kPlaces * image.stride[0],
            down = int(threadIdx.y) * image.stride[1];
  uint4 const* const own =
      shared + down * tile.row_pitch + right * kWords<T> * tile.vectors + threadIdx.x;
  // 16 bytes of a tap's weights, from one to the next.
  int const weight_step = kInShared ? tile.vectors : 1;
  float4 const* weights = kInShared
                              ? reinterpret_cast<float4 const*>(
                                    shared + image.taps[2] * tile.in_rows * tile.row_pitch) +
                                    threadIdx.x
                              : reinterpret_cast<float4 const*>(p.weights) + 2 * thread.vector;
  float sums[kPlaces][kChannels] = {};
  for (int k = 0; k < image.taps[2]; ++k) {
    for (int i = 0; i < image.taps[1]; ++i) {
      uint4 const* const line = own + (k * tile.in_rows + i * image.dilation[1]) * tile.row_pitch;
      // The channels of a pixel of the line of taps, counted from the thread's first pixel.
      auto const load = [&](int column, float (&to)[kChannels]) {
        uint4 words[kWords<T>] = {};
        if constexpr (kInShared) {
#pragma unroll
          for (int w = 0; w < kWords<T>; ++w)
            words[w] = line[(column * kWords<T> + w) * tile.vectors];
        } else {
          int const pixel = thread.pixel(image, thread.first[0] + right + column,
                                         thread.first[1] + down + i * image.dilation[1],
                                         thread.first[2] + k * image.dilation[2]);
          if (pixel >= 0)
            load_channels(p, static_cast<T const*>(p.x) + int64_t(pixel) * p.channels,
                          thread.vector * kChannels, words);
        }
        to_floats<T>(words, to);
      };
      // Pixels under a tap; with unit steps, place q of the tap `left` has the one at q + left.
      float window[kPlaces][kChannels];
      if constexpr (kUnitSteps) {
#pragma unroll
        for (int q = 0; q < kPlaces - 1; ++q) load(q, window[q]);
      }
      int const width = kWidth ? kWidth : image.taps[0];
#pragma unroll(kWidth ? kWidth : 1)
      for (int first = 0; first < width; first += kPlaces) {
#pragma unroll
        for (int left = 0; left < kPlaces; ++left) {
          int const j = first + left;
          if (j >= width) break;
          if constexpr (kUnitSteps) {
            load(j + kPlaces - 1, window[(left + kPlaces - 1) % kPlaces]);
          } else {
#pragma unroll
            for (int q = 0; q < kPlaces; ++q)
              load(q * image.stride[0] + j * image.dilation[0], window[q]);
          }
          float4 const low = kInShared ? weights[0] : __ldg(weights);
          float4 const high = kInShared ? weights[weight_step] : __ldg(weights + 1);
          weights += 2 * (kInShared ? weight_step : p.vectors);
          float const tap[kChannels] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
          for (int q = 0; q < kPlaces; ++q) {
#pragma unroll
            for (int c = 0; c < kChannels; ++c)
              sums[q][c] =
                  fmaf(window[kUnitSteps ? (left + q) % kPlaces : q][c], tap[c], sums[q][c]);
          }
        }
      }
    }
  }

  // Loaded once for all places, without a branch between two loads.
  float bias[kChannels];
  auto const load_bias = [&](DataType type) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c)
      bias[c] =
          load_float(p.epilogue.bias, type, min(thread.vector * kChannels + c, p.epilogue.n - 1));
  };
  if (p.epilogue.bias) {
    if (p.epilogue.bias_type == DataType::kFloat16) {
      load_bias(DataType::kFloat16);
    } else if (p.epilogue.bias_type == DataType::kBFloat16) {
      load_bias(DataType::kBFloat16);
    } else {
      load_bias(DataType::kFloat32);
    }
  }
  int const place =
      ((thread.image * image.out[2] + thread.depth) * image.out[1] + thread.row) * image.out[0] +
      thread.column;
#pragma unroll
  for (int q = 0; q < kPlaces; ++q) {
    if (thread.column + q >= image.out[0]) return;
#pragma unroll
    for (float& sum : sums[q]) sum = nan_unless_finite(sum);
    if (p.epilogue.bias) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) sums[q][c] += bias[c];
    }
    finish_biased(sums[q], place + q, thread.vector * kChannels, p.epilogue);
    store_finished(sums[q], place + q, thread.vector * kChannels, p.epilogue);
  }
}

// ---- strips

struct StripParams {
  ImageTiles image;  // axes: width, height, depth
  EpilogueParams epilogue;
  void const* x;         // [pixels][channels]
  float const* weights;  // [taps][weight_pitch]
  int channels, weight_pitch, images;
  int vectors, segments, strips;  // of channels; of a line's places; of an image's lines
  int lines;                      // of a strip
};

constexpr int kStripChannels = 4, kStripPlaces = 2;  // of a thread, in a line

// kStride along both axes.
template <class T, int kStride>
struct Strip {
  static constexpr int kSize = 3, kChannels = kStripChannels, kPlaces = kStripPlaces;
  static constexpr int kColumns = (kPlaces - 1) * kStride + kSize;
  // Lines of the result whose sums are in registers at once, and lines of x in flight.
  static constexpr int kSets = (kSize + kStride - 1) / kStride, kAhead = kStride == 1 ? 3 : 2;
  static_assert(kSets * kStride % kAhead == 0);

  char const* line;  // of x: the strip's channels of the pixel under its first place and tap
  int64_t pitch;     // from a line to the next
  unsigned pixel_bytes, inside;  // inside: a bit for each column
  int y, height;

  __device__ __forceinline__ void load(uint2 (&pixels)[kColumns]) {
    unsigned const there = unsigned(y) < unsigned(height) ? inside : 0;
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
      pixels[k] =
          there >> k & 1 ? __ldg(reinterpret_cast<uint2 const*>(line + k * pixel_bytes)) : uint2{};
    ++y, line += pitch;
    asm("" : "+l"(line));  // one addition, and not as many as there were lines
  }

  static __device__ __forceinline__ void run(StripParams const& p) {
    unsigned const index = blockIdx.x * unsigned(kThreads) + threadIdx.x;
    unsigned const segment = index / unsigned(p.vectors), strip = segment / unsigned(p.segments);
    int const image = int(strip / unsigned(p.strips));
    if (image >= p.images) return;
    ImageTiles const& sizes = p.image;
    int const n = int(index - segment * p.vectors) * kChannels,
              column = int(segment - strip * p.segments) * kPlaces;
    int const first = int(strip - image * unsigned(p.strips)) * p.lines,
              count = min(p.lines, sizes.out[1] - first);
    int const x = column * kStride - sizes.padding[0];
    Strip from;
    from.y = first * kStride - sizes.padding[1];
    // Lines behind the strip's last tap are not loaded ahead.
    from.height = min(sizes.size[1], max(from.y + (count - 1) * kStride + kSize, 0));
    from.pixel_bytes = p.channels * unsigned(sizeof(T)),
    from.pitch = int64_t(sizes.size[0]) * from.pixel_bytes;
    from.line = static_cast<char const*>(p.x) +
                (int64_t(image) * sizes.size[1] + from.y) * from.pitch +
                int64_t(x) * from.pixel_bytes + n * int(sizeof(T));
    from.inside = 0;
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
      from.inside |= unsigned(unsigned(x + k) < unsigned(sizes.size[0])) << k;
    uint2 ahead[kAhead][kColumns];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) from.load(ahead[i]);
    float taps[kSize][kSize][kChannels], bias[kChannels] = {};
#pragma unroll
    for (int i = 0; i < kSize * kSize; ++i) {
      float4 const v =
          __ldg(reinterpret_cast<float4 const*>(p.weights + int64_t(i) * p.weight_pitch + n));
      float (&tap)[kChannels] = taps[i / kSize][i % kSize];
      tap[0] = v.x, tap[1] = v.y, tap[2] = v.z, tap[3] = v.w;
    }
    if (p.epilogue.bias) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
        bias[c] = load_float(p.epilogue.bias, p.epilogue.bias_type, n + c);
    }
    // Line `step` begins in its step, in sums[step % kSets], and ends kSets - 1 steps later.
    float sums[kSets][kPlaces][kChannels];
    int place = (image * sizes.out[1] + first) * sizes.out[0] + column;
#pragma unroll 1
    for (int begin = 0; begin - (kSets - 1) < count; begin += kSets) {
#pragma unroll
      for (int phase = 0; phase < kSets; ++phase) {
        int const ended = begin + phase - (kSets - 1);
        if (ended >= count) break;
#pragma unroll
        for (int q = 0; q < kPlaces; ++q) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) sums[phase][q][c] = 0;
        }
#pragma unroll
        for (int s = 0; s < kStride; ++s) {
          uint2(&pixels)[kColumns] = ahead[(phase * kStride + s) % kAhead];
          float values[kColumns][kChannels];
#pragma unroll
          for (int k = 0; k < kColumns; ++k) {
#pragma unroll
            for (int c = 0; c < kChannels; ++c)
              values[k][c] = unpack_half<T>(c < 2 ? pixels[k].x : pixels[k].y, c % 2);
          }
          from.load(pixels);
#pragma unroll
          for (int k = 0; s + k * kStride < kSize; ++k) {
            float (&sum)[kPlaces][kChannels] = sums[(phase - k + kSets) % kSets];
#pragma unroll
            for (int j = 0; j < kSize; ++j) {
#pragma unroll
              for (int q = 0; q < kPlaces; ++q) {
#pragma unroll
                for (int c = 0; c < kChannels; ++c)
                  sum[q][c] =
                      fmaf(values[q * kStride + j][c], taps[s + k * kStride][j][c], sum[q][c]);
              }
            }
          }
        }
        if (ended < 0) continue;
        float (&sum)[kPlaces][kChannels] = sums[(phase + 1) % kSets];
#pragma unroll
        for (int q = 0; q < kPlaces; ++q) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) sum[q][c] = nan_unless_finite(sum[q][c]) + bias[c];
        }
        // The choice is made once for all places.
        visit_activation(p.epilogue.activation, p.epilogue.bounds, [&](auto const& function) {
#pragma unroll
          for (int q = 0; q < kPlaces; ++q) {
#pragma unroll
            for (float& v : sum[q]) v = function(v);
          }
        });
#pragma unroll
        for (int q = 0; q < kPlaces; ++q) {
          if (column + q >= sizes.out[0]) break;
          finish_activated(sum[q], place + q, n, p.epilogue);
          store_finished(sum[q], place + q, n, p.epilogue);
        }
        place += sizes.out[0];
      }
    }
  }
};

constexpr int kStripCtas = 3;  // of an SM
template <class T, int kStride>
__global__ void __launch_bounds__(kThreads, kStripCtas)
    conv_depthwise_strips(__grid_constant__ StripParams const p) {
  pdl_wait_and_launch_dependents();
  Strip<T, kStride>::run(p);
}

bool fits_strips(Params const& p) {
  ImageTiles const& image = p.image;
  auto const along = [&](int axis, int taps) {
    return image.taps[axis] == taps && image.dilation[axis] == 1;
  };
  bool const plane = along(2, 1) && image.stride[2] == 1 && image.padding[2] == 0;
  bool const steps = image.stride[0] == image.stride[1] && image.stride[0] <= 2;
  return along(0, 3) && along(1, 3) && plane && steps && p.multiplier == 1 &&
         p.channels % kStripChannels == 0 && reinterpret_cast<uintptr_t>(p.x) % sizeof(uint2) == 0;
}

// Lines of a strip. Longer strips read fewer lines of x twice; shorter ones give work to more SMs.
template <class T>
Status launch_strips(Params const& all, int planes, Stream stream) {
  ImageTiles const& image = all.image;
  StripParams p{image, all.epilogue, all.x, all.weights, all.channels, all.vectors * kChannels,
                planes};
  p.vectors = all.channels / kStripChannels, p.segments = int(ceil_div(image.out[0], kStripPlaces));
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  auto const ctas = [&](int lines) {
    return ceil_div(planes * ceil_div(image.out[1], lines) * p.segments * p.vectors,
                    int64_t(kThreads));
  };
  // Instructions for a line of x, for a line of the result, and for the start of a strip: estimates
  // that are not fitted.
  constexpr int kRead = 30, kLine = 200, kBegin = 300;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int strips = 1; strips <= image.out[1]; ++strips) {
    int const lines = int(ceil_div(image.out[1], strips));
    int64_t const waves = ceil_div(ctas(lines), int64_t(device.multiprocessors) * kStripCtas);
    int64_t const read = int64_t(lines - 1) * image.stride[1] + image.taps[1];
    int64_t const instructions = waves * (read * kRead + lines * kLine + kBegin);
    if (instructions < least)
      least = instructions, p.lines = lines, p.strips = int(ceil_div(image.out[1], lines));
  }
  auto const kernel =
      image.stride[0] == 1 ? conv_depthwise_strips<T, 1> : conv_depthwise_strips<T, 2>;
  return launch(kernel, dim3(unsigned(ctas(p.lines))), kThreads, 0, stream, p);
}

// ---- the choice of a tile

// The tile that takes the least time by its copies and products, if shared memory holds it.
// `words`: of eight channels.
DepthwiseTile choose_tile(ImageTiles const& image, int vectors, int words, int planes,
                          int multiprocessors) {
  // In eighths of an SM's clocks, from instruction rates and not fitted: multiplying a vector,
  // copying a vector, each line of memory that is copied, and the start and end of a CTA that other
  // CTAs do not hide.
  constexpr int kMultiply = 1, kCopy = 4, kLine = 12, kCta = 3200;
  int64_t const taps = int64_t(image.taps[0]) * image.taps[1] * image.taps[2];
  int64_t const span_x = int64_t(image.taps[0] - 1) * image.dilation[0];
  int64_t const span_y = int64_t(image.taps[1] - 1) * image.dilation[1];
  int const strips = int(ceil_div(image.out[0], kPlaces));
  DepthwiseTile best{};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int most = 8; most >= 2; most /= 2) {
    DepthwiseTile tile{};
    tile.channel_tiles = int(ceil_div(vectors, most)),
    tile.vectors = int(ceil_div(vectors, tile.channel_tiles));
    for (int rows = std::min(image.out[1], kThreads / tile.vectors); rows >= 1;
         rows = std::min<int>(rows - 1, int(ceil_div(image.out[1], tile.row_tiles + 1)))) {
      int const room = std::min(kThreads / tile.vectors / rows, kMostThreadsZ);
      tile.rows = rows, tile.row_tiles = int(ceil_div(image.out[1], rows));
      tile.column_tiles = int(ceil_div(strips, room)),
      tile.strips = int(ceil_div(strips, tile.column_tiles));
      int64_t const in_rows = int64_t(rows - 1) * image.stride[1] + span_y + 1;
      int64_t const in_columns = int64_t(tile.columns() - 1) * image.stride[0] + span_x + 1;
      // Rows of threads read rows of x at once: the pitch places their vectors in different banks.
      int64_t pitch = in_columns * words * tile.vectors;
      for (int more = 0; more < 8; ++more)
        if ((pitch + more) * image.stride[1] % 8 == tile.vectors % 8) {
          pitch += more;
          break;
        }
      int64_t const places = int64_t(rows) * tile.columns();
      int64_t const ctas =
          int64_t(tile.channel_tiles) * tile.row_tiles * tile.column_tiles * planes;
      // so that the product does not overflow
      bool const fits =
          std::max(in_rows, pitch) < kSharedBytes &&
          (image.taps[2] * in_rows * pitch + 2 * taps * tile.vectors) * kVectorBytes <=
              kSharedBytes;
      for (bool shared : {true, false}) {
        if (shared && !fits) continue;
        int64_t const pixels = shared ? image.taps[2] * in_rows * in_columns : places * taps;
        int64_t const copies =
            (pixels * words + 2 * taps) * tile.vectors * kCopy + (pixels + places) * kLine;
        int64_t const clocks = ceil_div(ctas, multiprocessors) *
                               (copies + places * taps * tile.vectors * kMultiply + kCta);
        if (clocks >= least) continue;
        least = clocks, best = tile, best.shared = shared;
        if (shared)
          best.in_rows = int(in_rows), best.in_columns = int(in_columns),
          best.row_pitch = int(pitch);
      }
    }
  }
  return best;
}

template <class T>
auto choose_kernel(ImageTiles const& image, bool shared) {
  if (!shared) return conv_depthwise<T, Source::kGlobal, 0>;
  if (image.stride[0] != 1 || image.dilation[0] != 1) return conv_depthwise<T, Source::kShared, 0>;
  switch (image.taps[0]) {
    case 3:
      return conv_depthwise<T, Source::kUnitSteps, 3>;
    case 5:
      return conv_depthwise<T, Source::kUnitSteps, 5>;
    case 7:
      return conv_depthwise<T, Source::kUnitSteps, 7>;
    default:
      return conv_depthwise<T, Source::kUnitSteps, 0>;
  }
}

template <class T>
Status launch_typed(Params& p, int planes, Stream stream) {
  if constexpr (sizeof(T) == 2) {
    if (fits_strips(p)) return launch_strips<T>(p, planes, stream);
  }
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  ImageTiles const& image = p.image;
  p.whole_vectors = p.multiplier == 1 && p.channels % kChannels == 0 &&
                    reinterpret_cast<uintptr_t>(p.x) % kVectorBytes == 0;
  DepthwiseTile const& tile = p.tile =
      choose_tile(image, p.vectors, kWords<T>, planes, device.multiprocessors);
  p.channel_tiles = tile.channel_tiles, p.column_tiles = tile.column_tiles;
  p.row_tiles = tile.row_tiles, p.depth = image.out[2];
  int const taps = image.taps[0] * image.taps[1] * image.taps[2], threads = tile.rows * tile.strips;
  int bytes = 0;
  if (tile.shared) {
    p.row_step = threads / tile.in_columns, p.column_step = threads % tile.in_columns;
    bytes =
        (image.taps[2] * tile.in_rows * tile.row_pitch + 2 * taps * tile.vectors) * kVectorBytes;
  }
  int64_t const ctas = int64_t(tile.channel_tiles) * tile.column_tiles * tile.row_tiles * planes;
  if (ctas > std::numeric_limits<int32_t>::max())
    return {Status::kUnsupported, "the depthwise convolution has " + std::to_string(ctas) +
                                      " tiles; 2^31 - 1 are supported"};
  return launch(choose_kernel<T>(image, tile.shared), dim3(unsigned(ctas)),
                dim3(tile.vectors, tile.rows, tile.strips), bytes, stream, p);
}

}  // namespace

Status launch_conv_depthwise(GemmProblem const& problem, float const* weights, Stream stream) {
  Params p{ImageTiles(problem), EpilogueParams(problem), problem.x, weights, int(problem.x_stride)};
  p.multiplier = problem.weight.n / p.channels,
  p.vectors = int(ceil_div(problem.weight.n, kChannels));
  int const planes = problem.image.batch * p.image.out[2];
  switch (problem.x_type) {
    case DataType::kFloat16:
      return launch_typed<__half>(p, planes, stream);
    case DataType::kBFloat16:
      return launch_typed<__nv_bfloat16>(p, planes, stream);
    default:
      return launch_typed<float>(p, planes, stream);
  }
}

}  // namespace cutlass_ops
