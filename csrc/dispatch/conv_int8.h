// The kernels of static int8 convolutions: arguments and launchers.
#pragma once

#include "cutlass_ops/conv.h"

namespace cutlass_ops {

// A convolution as kernels see it. Bounds of integers are before the zero point of y is added.
struct ConvParams {
  ConvProblem problem;
  int out_height = 0, out_width = 0;
  int pixels = 0;  // of the result
  float low = 0, high = 0;
  // Each bound, and the zero point of y, in both halves of 32 bits.
  unsigned low_twice = 0, high_twice = 0, zero_twice = 0;
  bool whole_vectors = false;         // outputs are no int32, and 8 neighbours are stored at once
  uint32_t const* x_range = nullptr;  // where x was floats, their range (device/quantize.cuh)
  // Whether there are taps outside of x, and they count as a zero point that may not be 0.
  bool fills_padding = false;
};

// The pixels of x under all taps of a patch of 8 x 8 pixels of the result, for a convolution whose
// strides are 1.
struct ConvWindow {
  static constexpr int kPatch = 8, kBuffers = 2;  // each has the windows of a tile's patches

  int width = 0, height = 0;
  ConvWindow() = default;
  explicit ConvWindow(ConvProblem const& p)
      : width(kPatch + (p.weight.width - 1) * p.dilation[1]),
        height(kPatch + (p.weight.height - 1) * p.dilation[0]) {}
  constexpr int pixels() const { return width * height; }
  // Bytes of a window, rounded up to whole atoms of the swizzle.
  constexpr int bytes() const { return (pixels() * 128 + 1023) / 1024 * 1024; }
};

// conv_int8_wgmma.cu: Hopper (sm_90a alone), 128 pixels x 64, 128 or 160 channels.
struct ConvWgmmaTile {
  static constexpr int kWarpgroups = 2, kBlockM = 128;  // that multiply; pixels
  static constexpr int kBlockK = 128;  // bytes of one tap: a line of the 128-byte swizzle
  static constexpr int kMostStages = 8;
  static constexpr int kStagedInts = 2 * 16 * 8;
  static constexpr int kBarrierBytes =
      (3 * (kMostStages + ConvWindow::kBuffers) + 1 + kWarpgroups) * 8;
  static constexpr int kMostSlices = 4;
  static constexpr int kPatches = kBlockM / (ConvWindow::kPatch * ConvWindow::kPatch);  // of a tile

  int block_n, cluster_size;  // CTAs of a cluster share weights
  bool windows;
  bool slices;  // a cluster's CTAs take a slice of the channels of one tile each
  bool turns;   // the warpgroups multiply tiles in turn, or each half of the pixels of every tile
  // Warpgroups that multiply a tile.
  constexpr int sharing() const { return turns ? 1 : kWarpgroups; }
  // A warp loads and others fill the padding: those of a warpgroup that gives registers to the two
  // that multiply, or one.
  constexpr bool moves_registers() const { return block_n / sharing() > 64; }
  constexpr int filling_warps() const { return moves_registers() ? 3 : 1; }
  constexpr int threads() const { return kWarpgroups * 128 + 32 * (1 + filling_warps()); }
  constexpr int ctas_per_sm() const { return moves_registers() ? 1 : 2; }
  constexpr int pixel_bytes() const { return windows ? 0 : kBlockM * kBlockK; }  // of a stage
  constexpr int stage_bytes() const { return pixel_bytes() + block_n * kBlockK; }
  constexpr int window_bytes(ConvWindow const& window) const {
    return windows ? ConvWindow::kBuffers * kPatches * window.bytes() : 0;
  }
  // Sets of channels' vectors: of each tile that is multiplied at a time.
  constexpr int vector_sets() const { return kWarpgroups / sharing(); }
  // Factors, integer biases and float biases of the tiles' channels; a buffer for stores of each
  // warp; and barriers.
  constexpr int other_bytes() const {
    return vector_sets() * block_n * 12 + 4 * kWarpgroups * kStagedInts * 4 + kBarrierBytes;
  }
  // The sums of a tile.
  static constexpr int slice_bytes(int block_n) { return kBlockM * block_n * 4; }
  constexpr int shared_bytes(int stages, ConvWindow const& window) const {
    return window_bytes(window) + stages * stage_bytes() + other_bytes();
  }
  // Stages of a CTA where an SM holds `ctas`. A CTA takes 1 KB for the system.
  constexpr int stages(int ctas, ConvWindow const& window) const {
    int const fits = (228 * 1024 / ctas - 1024 - shared_bytes(0, window)) / stage_bytes();
    return fits < kMostStages ? fits : kMostStages;
  }
};
constexpr ConvWgmmaTile kConvWgmmaTiles[] = {
    {64, 1, false, false, false}, {64, 1, false, false, true},   {128, 1, false, false, false},
    {128, 1, false, false, true}, {160, 2, false, false, false}, {64, 1, false, true, false},
    {64, 1, true, false, true},   {160, 2, true, false, false},  {64, 1, true, true, false}};
Status launch_conv_int8_wgmma(ConvParams const& params, ConvPlan const& plan, Stream stream);

// gemm_int8_collective.cu: Hopper (sm_90a alone), products with rows of whole vectors of bytes.
struct GemmCollectiveTile {
  int block_m, block_n, block_k, cluster_size;  // a cluster has tiles of neighbouring rows
  bool cooperative;  // two warpgroups multiply a tile; or each one in turn
  // Clocks of a launch, of a K tile, and of the begin and end of a tile, fitted on an H100
  // (docs/tuning-notes.md).
  int launch, k_tile, tile;
};
constexpr GemmCollectiveTile kGemmCollectiveTiles[] = {{128, 256, 128, 2, true, 2600, 950, 8800},
                                                       {128, 128, 128, 2, false, 8800, 460, 3300},
                                                       {64, 64, 256, 1, false, 2800, 620, 1800}};
Status launch_gemm_int8_collective(ConvParams const& params, ConvPlan const& plan, Stream stream);

// conv_int8_implicit_gemm.cu: any geometry and channels, sm_80 and later.
struct ConvImplicitTile {
  static constexpr int kBlockK = 64;  // channels of one tap

  int block_m, block_n, warp;  // a warp multiplies warp x warp of them
  int stages;
  bool bytewise;  // x is loaded a byte at a time
  constexpr int warps() const { return block_m / warp * (block_n / warp); }
};
constexpr ConvImplicitTile kConvImplicitTiles[] = {
    {256, 128, 64, 3, false}, {128, 128, 64, 4, false}, {64, 64, 32, 6, false}};
constexpr ConvImplicitTile kConvBytewiseTile = {64, 64, 32, 2, true};
constexpr int kMostImplicitTaps = 32;  // along an axis, unless x is loaded bytewise
constexpr int kLeastConvTile = 64;     // pixels or channels of any kernel's
Status launch_conv_int8_implicit_gemm(ConvParams const& params, ConvPlan const& plan,
                                      Stream stream);

// conv_int8_stem.cu: flat weights whose taps of a line are neighbours in x, sm_80 and later. The
// tile of a CTA, in one image.
struct ConvStemTile {
  static constexpr int kThreads = 128, kBlockN = 64;
  static constexpr int kMostColumns = 128, kMostLines = 8;
  // where more lines fit; and of one line
  static constexpr int64_t kSharedBytes = 48 * 1024, kMostSharedBytes = 96 * 1024;

  int columns, lines;  // of the result
  int slices;          // of 32 bytes, of a line of taps
  int copies;          // of x, each moved by 4 / copies bytes
  int pitch;           // bytes of a line of x; 0 if they are too many

  explicit ConvStemTile(ConvProblem const& p) {
    int const width = p.out_width(), column_tiles = (width + kMostColumns - 1) / kMostColumns;
    columns = (width + column_tiles - 1) / column_tiles;
    slices = (p.weight.width * p.weight.channels + 31) / 32;
    int64_t const step = int64_t(p.stride[1]) * p.channels;
    copies = step % 4 == 0 ? 1 : step % 2 == 0 ? 2 : 4;
    int64_t const bytes = ((columns - 1) * step + 32 * int64_t(slices) + 3) / 4 * 4;
    pitch = bytes <= kMostSharedBytes ? int(bytes) : 0;
    lines = p.out_height() < kMostLines ? p.out_height() : kMostLines;
    while (lines > 1 && shared_bytes(p) > kSharedBytes) --lines;
  }
  // Lines of x under the tile.
  constexpr int rows(ConvProblem const& p) const {
    return (lines - 1) * p.stride[0] + (p.weight.height - 1) * p.dilation[0] + 1;
  }
  int64_t shared_bytes(ConvProblem const& p) const {
    return int64_t(p.weight.height) * slices * 32 * kBlockN + 8 * kBlockN +
           int64_t(rows(p)) * pitch * copies;
  }
  int64_t ctas(ConvProblem const& p) const {
    auto const tiles = [](int64_t count, int of) { return (count + of - 1) / of; };
    return tiles(p.out_width(), columns) * tiles(p.out_height(), lines) * p.batch *
           tiles(p.weight.n, kBlockN);
  }
  bool fits(ConvProblem const& p) const {
    bool const in_memory = pitch > 0 && shared_bytes(p) <= kMostSharedBytes;
    return p.weight.order == ConvOrder::kFlat && p.dilation[1] == 1 && in_memory &&
           ctas(p) <= INT32_MAX;
  }
};
Status launch_conv_int8_stem(ConvParams const& params, ConvPlan const& plan, Stream stream);

// conv_int8_depthwise.cu: weights whose codes are ordered by taps, sm_80 and later. A thread
// computes kDepthwiseChannels channels of a strip, which is some lines of kDepthwisePixels pixels.
constexpr int kDepthwiseThreads = 128, kDepthwisePixels = 4, kDepthwiseChannels = 4;
struct DepthwiseStrips {
  int size, stride;  // of the kernel, along both axes
  // Kernels of 3 x 3 reuse the registers of a line's sums when the line is stored, so that a strip
  // has any number of lines. Strips of larger kernels have at most sets() lines, with separate
  // registers.
  constexpr bool rolls() const { return size == 3; }
  constexpr int sets() const { return rolls() ? (size + stride - 1) / stride : 4; }
  static constexpr int ctas_per_sm() { return 4; }
  bool fits(ConvProblem const& p) const {
    ConvWeight const& w = p.weight;
    bool const steps =
        p.stride[0] == stride && p.stride[1] == stride && p.dilation[0] == 1 && p.dilation[1] == 1;
    return w.height == size && w.width == size && steps;
  }
};
// The kernel sizes and strides that have an instance. With others a strip has one line.
constexpr DepthwiseStrips kDepthwiseStrips[] = {{3, 1}, {3, 2}, {5, 1}, {5, 2}, {7, 1}, {7, 2}};
Status launch_conv_int8_depthwise(ConvParams const& params, ConvPlan const& plan, Stream stream);

// Copies x for other kernels (in conv_int8_depthwise.cu): a pixel has out_channels, a multiple of
// 16, of which those beyond x's are zeros.
Status launch_copy_image(ConvProblem const& problem, void* out, int out_channels, Stream stream);

// Gathers x for other kernels (in conv_int8_depthwise.cu): out [pixels of the result][out_channels]
// has the channels of all taps of a pixel. Taps outside of the image and channels behind the last
// tap have the zero point of x.
Status launch_gather_taps(ConvProblem const& problem, void* out, int out_channels, Stream stream);

}  // namespace cutlass_ops
