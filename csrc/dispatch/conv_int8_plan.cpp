#include <algorithm>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "dispatch/checks.h"
#include "dispatch/conv_int8.h"
#include "dispatch/conv_int8_plan.h"
#include "dispatch/problem.h"

namespace cutlass_ops {

// The problem that the kernels compute from a copy of x. If the weight is flat, a pixel of the copy
// has the channels of all taps of one pixel of the result.
ConvProblem multiplied(ConvProblem const& p) {
  if (quantizes_x(p)) {  // to whole vectors of a pixel's channels
    ConvProblem codes = p;
    codes.x = nullptr;
    codes.channels = codes.weight.channels = stored_channels(p.channels);
    return codes;
  }
  if (p.weight.order != ConvOrder::kFlat) return p;
  ConvProblem flat = p;
  ConvWeight& w = flat.weight;
  w.channels = stored_channels(w.height * w.width * w.channels), w.height = w.width = 1;
  w.order = ConvOrder::kByChannels;
  flat.x = nullptr;
  flat.batch = 1, flat.height = 1, flat.width = int(p.pixels()), flat.channels = w.channels;
  for (int axis : {0, 1}) flat.stride[axis] = flat.dilation[axis] = 1, flat.padding[axis] = 0;
  return flat;
}

namespace {

// A convolution whose pixels are the rows of a matrix.
bool is_product(ConvProblem const& p) {
  bool const steps = p.stride[0] > 1 || p.stride[1] > 1;
  return p.weight.height == 1 && p.weight.width == 1 && p.groups == 1 && !steps && !p.padded();
}

// TMA's im2col mode takes strides of up to 8, corners in 8 bits, and boxes that begin with a whole
// vector of channels. Other boxes are an illegal instruction.
bool fits_tma(ConvProblem const& p) {
  if (p.groups > 1 && p.weight.channels % kConvVector) return false;
  for (int axis : {0, 1}) {
    int const span = p.dilation[axis] * ((axis ? p.weight.width : p.weight.height) - 1);
    if (p.stride[axis] > 8 || p.padding[axis] > 127 || span > 255 || p.padding[axis] - span < -128)
      return false;
  }
  return true;
}

// Pixels of the result in tiles: all, or those of patches of conv_int8_wgmma.
int64_t rows_of(ConvProblem const& p, ConvWgmmaTile const& tile) {
  constexpr int kPatch = ConvWindow::kPatch;
  return tile.windows ? p.batch * ceil_div(p.out_height(), kPatch) *
                            ceil_div(p.out_width(), kPatch) * kPatch * kPatch
                      : p.pixels();
}

constexpr int kLeastStages = 3;  // of conv_int8_wgmma

// Whether there are windows that fit into shared memory with some stages, and into a TMA box.
bool fits_windows(ConvProblem const& p, ConvWgmmaTile const& tile) {
  constexpr int kMostBox = 256;
  if (p.stride[0] > 1 || p.stride[1] > 1 || p.weight.height * p.weight.width == 1) return false;
  ConvWindow const window(p);
  return std::max(window.width, window.height) <= kMostBox &&
         tile.stages(1, window) >= kLeastStages && rows_of(p, tile) <= kMostConvPixels;
}

// The offset in the workspace of the copy of x with more channels.
int copied_channels(ConvProblem const& p, int vector) {
  return p.channels % vector || !aligned(p.x, vector) ? stored_channels(p.channels) : 0;
}

// Tiles of a cluster along the pixels, and along the output channels of all groups.
int64_t pixel_tiles(ConvProblem const& p, ConvWgmmaTile const& tile) {
  return ceil_div(rows_of(p, tile), ConvWgmmaTile::kBlockM * tile.cluster_size);
}
int64_t channel_tiles(ConvProblem const& p, ConvWgmmaTile const& tile) {
  return p.groups * ceil_div(p.weight.n / p.groups, tile.block_n);
}

ConvPlan plan_wgmma(ConvProblem const& p, Device const& device, ConvWgmmaTile const& tile,
                    int slices) {
  ConvWeight const& w = p.weight;
  int const cluster_size = tile.cluster_size * slices;
  int64_t const n_tiles = channel_tiles(p, tile), clusters = pixel_tiles(p, tile) * n_tiles;
  int64_t const of_sm = ceil_div(clusters * cluster_size, device.multiprocessors);
  ConvPlan plan;
  plan.kernel = kWgmma;
  plan.block_m = ConvWgmmaTile::kBlockM, plan.block_n = tile.block_n;
  plan.cluster_size = cluster_size, plan.slices = slices, plan.windows = tile.windows;
  plan.turns = tile.turns;
  // With few tiles, or large windows, a CTA can use all of an SM's shared memory.
  ConvWindow const window(p);
  plan.ctas_per_sm = int(std::min<int64_t>(tile.ctas_per_sm(), of_sm));
  if (tile.stages(plan.ctas_per_sm, window) < kLeastStages) plan.ctas_per_sm = 1;
  plan.stages = tile.stages(plan.ctas_per_sm, window);
  int64_t const at_once =
      std::clamp<int64_t>(device.multiprocessors * plan.ctas_per_sm / cluster_size, 1, clusters);
  plan.grid = int(at_once) * cluster_size;
  plan.copied_channels = copied_channels(p, kConvVector);

  // As SMs become free one by one, both CTAs of an SM may be CTAs with more tiles than others. Such
  // launches must not overlap (docs/tuning-notes.md).
  int64_t const of_cta = ceil_div(clusters, at_once);
  plan.overlaps = plan.ctas_per_sm * of_cta <= of_sm;

  // Clocks of an SM. It multiplies 4096 pairs of codes a clock, and its shared memory moves 128
  // bytes a clock: TMA writes pixels and weights, unless a window has the pixels of all taps;
  // wgmma reads the pixels, and the weights once for each warpgroup. Channels that the last tile
  // lacks are filled with zeros, 8 bytes a clock. The other constants are fitted to every plan of
  // 36 layers on an H100 (docs/tuning-notes.md): kBegin, the begin and the end of a tile, which
  // only another CTA of the SM hides; kStore, a stored line of 32 channels; kChannels, channels
  // other than those of the CTA's last tile; kLaunch and kClusters, a launch without and with
  // clusters; kSlice, the sums of a slice; kAlone, the least time of a tap of a block where an SM
  // has one CTA.
  constexpr int kPairs = 4096, kMovedBytes = 128, kBegin = 3900, kStore = 450, kChannels = 400,
                kLaunch = 1100, kClusters = 2000, kSlice = 1000, kAlone = 380, kFilledBytes = 8;
  int64_t const taps = int64_t(w.height) * w.width;
  int64_t const blocks = ceil_div(ceil_div(w.channels, ConvWgmmaTile::kBlockK), slices);
  int64_t const channels = std::min<int64_t>(w.channels, blocks * ConvWgmmaTile::kBlockK);
  int64_t const multiply =
      taps * ceil_div(channels, 32) * 32 * ConvWgmmaTile::kBlockM * tile.block_n / kPairs;
  int64_t const written = tile.windows ? 0 : std::min<int64_t>(p.pixels(), ConvWgmmaTile::kBlockM);
  int64_t const alone = plan.ctas_per_sm == 1 ? kAlone : 0;
  int64_t const group_tiles = n_tiles / p.groups;
  int64_t const filled = (group_tiles * tile.block_n - w.n / p.groups) * ConvWgmmaTile::kBlockK /
                         kFilledBytes / group_tiles;
  if (tile.turns) {
    // While a warpgroup stores a tile, the other multiplies the next one, if that takes so long. An
    // SM receives 64 bytes a clock from L2. The other constants are fitted to 35 layers on an H200.
    constexpr int kReceivedBytes = 64, kTurnLaunch = 3000, kTurnBegin = 2000, kTurnStore = 960;
    double const slower = tile.windows ? 1.2 : 1.14;  // than the bounds
    int64_t const received =
        taps * blocks * ConvWgmmaTile::kBlockK * (written + tile.block_n) / kReceivedBytes;
    int64_t const main =
        std::max(int64_t(slower * double(std::max(multiply, received))), taps * blocks * alone) +
        taps * blocks * filled;
    int64_t const store = kTurnBegin + kTurnStore * tile.block_n / 32;
    plan.predicted_clocks =
        kTurnLaunch + main + (of_sm - 1) * std::max(main, (main + store) / 2) + store;
    return plan;
  }
  int64_t const lines =
      written + ConvWgmmaTile::kBlockM + (1 + ConvWgmmaTile::kWarpgroups) * int64_t(tile.block_n);
  int64_t const block = std::max(lines * ConvWgmmaTile::kBlockK / kMovedBytes, alone) + filled;
  int64_t const end =
      kBegin + kStore * tile.block_n / 32 + (at_once % n_tiles == 0 ? 0 : kChannels);
  plan.predicted_clocks = of_sm * std::max(multiply, taps * blocks * block) +
                          ceil_div(of_sm, plan.ctas_per_sm) * end + kLaunch +
                          (cluster_size > 1 ? kClusters : 0) + (slices - 1) * kSlice;
  return plan;
}

// The fastest plan that takes the channels of a tile in slices, if there is one: each tile has a
// cluster, whose first CTA receives the other slices' sums in place of its stages.
bool plan_slices(ConvProblem const& p, Device const& device, ConvWgmmaTile const& tile,
                 ConvPlan* best) {
  best->kernel = nullptr;
  ConvWindow const window(p);
  int64_t const blocks = ceil_div(p.weight.channels, ConvWgmmaTile::kBlockK);
  for (int slices = 2; slices <= std::min<int64_t>(ConvWgmmaTile::kMostSlices, blocks); ++slices) {
    ConvPlan const plan = plan_wgmma(p, device, tile, slices);
    int const received = (slices - 1) * ConvWgmmaTile::slice_bytes(tile.block_n);
    // All clusters run at once. A cluster lies in one part of the GPU (a GPC), so that not all SMs
    // are taken: 80 clusters of three, on 132 SMs with two CTAs each, had two turns.
    bool const fits = plan.grid == pixel_tiles(p, tile) * channel_tiles(p, tile) * slices &&
                      plan.grid * 8 <= device.multiprocessors * tile.ctas_per_sm() * 7 &&
                      received <= tile.window_bytes(window) + plan.stages * tile.stage_bytes();
    if (fits && (!best->kernel || plan.predicted_clocks < best->predicted_clocks)) *best = plan;
  }
  return best->kernel;
}

// The rows of the result that are stored by TMA.
bool fits_collective(ConvProblem const& p) {
  return is_product(p) && p.out_type != ConvOutput::kInt32 && p.weight.n % kConvVector == 0 &&
         aligned(p.out, kConvVector);
}

ConvPlan plan_collective(ConvProblem const& p, Device const& device,
                         GemmCollectiveTile const& tile) {
  ConvPlan plan;
  plan.kernel = kCollective;
  plan.block_m = tile.block_m, plan.block_n = tile.block_n, plan.cluster_size = tile.cluster_size;
  int64_t const clusters = ceil_div(p.pixels(), int64_t(tile.block_m) * tile.cluster_size) *
                           ceil_div(p.weight.n, tile.block_n);
  plan.grid =
      int(std::min<int64_t>(clusters, std::max(device.multiprocessors / tile.cluster_size, 1))) *
      tile.cluster_size;
  plan.copied_channels = copied_channels(p, kConvVector);
  int64_t const waves = ceil_div(clusters * tile.cluster_size, device.multiprocessors);
  // TMA writes zeros for missing rows at 28 bytes a clock, fitted as the tile's constants are.
  int64_t const missing = std::max<int64_t>(tile.block_m - p.pixels(), 0) * tile.block_k / 28;
  plan.predicted_clocks =
      tile.launch +
      waves * (ceil_div(p.weight.channels, tile.block_k) * (tile.k_tile + missing) + tile.tile);
  return plan;
}

// Vectors of x, which a tap's channels begin with; and masks of the iterators, which have a bit for
// each tap along an axis.
bool has_vectors(ConvProblem const& p) {
  ConvWeight const& w = p.weight;
  return (p.groups == 1 || w.channels % kConvVector == 0) &&
         std::max(w.height, w.width) <= kMostImplicitTaps;
}

// CUTLASS's iterators multiply coordinates and strides in 32 bits: those of a tile's images and
// output channels, which begin with the tile's. `channels` is the number of a pixel in memory.
bool fits_implicit(ConvProblem const& p, int channels) {
  constexpr int kTile = kConvImplicitTiles[0].block_m;
  int64_t const most = std::numeric_limits<int32_t>::max(), line = int64_t(p.width) * channels;
  int64_t const row =
      int64_t(p.weight.height) * p.weight.width * stored_channels(p.weight.channels);
  int64_t const images =
      std::min<int64_t>(p.batch, (kTile - 1) / (int64_t(p.out_height()) * p.out_width()) + 2);
  return row <= most / kTile && (p.width + 2 * int64_t(p.padding[1])) <= most / channels &&
         line <= most / (p.height + 2 * int64_t(p.padding[0])) && line * p.height <= most / images;
}

ConvPlan plan_implicit(ConvProblem const& p, Device const& device, ConvImplicitTile const& tile) {
  // Rates of an SM from the figures of an A100, not measured on one: pairs of codes that it
  // multiplies a clock, bytes that it moves to and from shared memory, and clocks of the begin and
  // end of a tile.
  constexpr int kPairs = 2048, kBytes = 128, kTile = 2000;
  constexpr int kBlockK = ConvImplicitTile::kBlockK;
  ConvPlan plan;
  plan.kernel = kImplicit;
  plan.block_m = tile.block_m, plan.block_n = tile.block_n, plan.stages = tile.stages;
  if (!tile.bytewise) plan.copied_channels = copied_channels(p, kConvVector);
  ConvWeight const& w = p.weight;
  int64_t const tiles =
      ceil_div(p.pixels(), tile.block_m) * p.groups * ceil_div(w.n / p.groups, tile.block_n);
  int64_t const multiply = int64_t(tile.block_m) * tile.block_n * kBlockK / kPairs;
  int64_t const move =
      int64_t(tile.block_m + tile.block_n + tile.warps() * 2 * tile.warp) * kBlockK / kBytes;
  int64_t const k_tiles = int64_t(w.height) * w.width * ceil_div(w.channels, kBlockK);
  plan.grid = int(tiles);
  plan.predicted_clocks =
      ceil_div(tiles, device.multiprocessors) * (k_tiles * std::max(multiply, move) + kTile);
  return plan;
}

// Plans from this one on, sorted by predicted time.
void sort_from(size_t first, std::vector<ConvPlan>* plans) {
  auto const sooner = [](ConvPlan const& a, ConvPlan const& b) {
    return a.predicted_clocks < b.predicted_clocks;
  };
  std::stable_sort(plans->begin() + std::ptrdiff_t(first), plans->end(), sooner);
}

// Plans for the tiles of one kernel, sorted by predicted time.
template <class Tiles, class MakePlan>
void append(std::vector<ConvPlan>* plans, Tiles const& tiles, MakePlan const& make_plan) {
  size_t const first = plans->size();
  std::transform(std::begin(tiles), std::end(tiles), std::back_inserter(*plans), make_plan);
  sort_from(first, plans);
}

ConvPlan plan_stem(ConvProblem const& p, ConvStemTile const& tile) {
  ConvPlan plan;
  plan.kernel = kStem;
  plan.block_m = tile.columns * tile.lines, plan.block_n = ConvStemTile::kBlockN;
  plan.grid = int(tile.ctas(p));
  return plan;
}

// The number of CTAs for strips of this many lines.
int64_t depthwise_ctas(ConvProblem const& p, int lines) {
  int64_t const strips =
      p.batch * ceil_div(p.out_height(), lines) * ceil_div(p.out_width(), kDepthwisePixels);
  return ceil_div(strips * (p.weight.n / kDepthwiseChannels), kDepthwiseThreads);
}

// Lines of a strip. Longer strips read fewer lines of x twice; with shorter ones more SMs are busy,
// and for longer.
int depthwise_lines(ConvProblem const& p, Device const& device) {
  auto const* const strips =
      std::find_if(std::begin(kDepthwiseStrips), std::end(kDepthwiseStrips),
                   [&](DepthwiseStrips const& known) { return known.fits(p); });
  if (strips == std::end(kDepthwiseStrips)) return 1;
  // Instructions of a thread, counted: for a line of x, for an output, for four taps of an output,
  // and for the prologue.
  constexpr int kLine = 50, kOutput = 9, kBegin = 400, kMostStrips = 256;
  int const taps = strips->size * int(ceil_div(strips->size, 4));
  int const fewest = strips->rolls() ? 1 : int(ceil_div(p.out_height(), strips->sets()));
  int lines = 0;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int count = fewest; count <= std::min(p.out_height(), std::max(fewest, kMostStrips));
       ++count) {
    int const each = int(ceil_div(p.out_height(), count));
    int64_t const waves =
        ceil_div(depthwise_ctas(p, each), int64_t(device.multiprocessors) * strips->ctas_per_sm());
    int64_t const read = int64_t(each - 1) * strips->stride + strips->size,
                  outputs = int64_t(each) * kDepthwisePixels;
    int64_t const instructions =
        waves * (read * kLine + outputs * kDepthwiseChannels * (kOutput + taps) + kBegin);
    if (instructions < least) least = instructions, lines = each;
  }
  return lines;
}

ConvPlan plan_depthwise(ConvProblem const& p, Device const& device) {
  int const lines = depthwise_lines(p, device);
  ConvPlan plan;
  plan.kernel = kDepthwise;
  plan.block_m = lines * kDepthwisePixels, plan.block_n = kDepthwiseChannels;
  plan.copied_channels = copied_channels(p, kDepthwiseChannels);
  plan.grid = int(depthwise_ctas(p, lines));
  return plan;
}

}  // namespace

Status plans_conv_int8(ConvProblem const& p, Device const& device, std::vector<ConvPlan>* plans) {
  if (!plans) return invalid("plans is a null pointer");
  if (Status status = check_conv(p); !status.ok()) return {status.code, status.text + shape(p)};
  if (Status status = check_device(device); !status.ok()) return status;
  if (device.architecture < 80) {
    return unsupported("the GPU has compute capability " +
                       std::to_string(device.architecture / 10) + "." +
                       std::to_string(device.architecture % 10) + "; 8.0 and later are supported");
  }
  plans->clear();
  bool const flat = p.weight.order == ConvOrder::kFlat, floats = quantizes_x(p);
  if (floats && (p.weight.order != ConvOrder::kByChannels || p.weight.n % 8 != 0 ||
                 !aligned(p.out, kConvVector)))
    return unsupported(
        "floats are multiplied by weights of more than 8 channels and of n % 8 = 0, "
        "to results at a multiple of 16 bytes" +
        shape(p));
  if (p.weight.order == ConvOrder::kByTaps) {
    plans->push_back(plan_depthwise(p, device));
  } else {
    ConvProblem const product = multiplied(p);
    ConvStemTile const stem(p);
    if (stem.fits(p)) plans->push_back(plan_stem(p, stem));
    double const vectors = double(product.batch) * product.height * product.width *
                           (stored_channels(product.channels) / kConvVector);
    bool const copies = vectors <= std::numeric_limits<int32_t>::max(),
               whole = has_vectors(product);
    int const channels = whole ? stored_channels(product.channels) : product.channels;
    size_t const first = plans->size();
    if (device.architecture == 90 && fits_tma(product) && copies) {
      for (ConvWgmmaTile const& tile : kConvWgmmaTiles) {
        if (tile.windows && !fits_windows(product, tile)) continue;
        ConvPlan plan;
        if (!tile.slices) plans->push_back(plan_wgmma(product, device, tile, 1));
        if (tile.slices && plan_slices(product, device, tile, &plan)) plans->push_back(plan);
      }
    }
    if (device.architecture == 90 && fits_collective(product) && copies && !floats)
      append(plans, kGemmCollectiveTiles,
             [&](auto const& tile) { return plan_collective(product, device, tile); });
    sort_from(first, plans);
    if (fits_implicit(product, channels) && !floats) {
      if (whole)
        append(plans, kConvImplicitTiles,
               [&](auto const& tile) { return plan_implicit(product, device, tile); });
      if (!whole) plans->push_back(plan_implicit(product, device, kConvBytewiseTile));
    }
    if (plans->empty() && floats)
      return unsupported("floats are convolved on sm_90, with geometries that TMA takes" +
                         shape(p));
    if (plans->empty())
      return unsupported("a tile reads more than 2^31 bytes of x or of the weight" + shape(p));
  }
  for (ConvPlan& plan : *plans) {
    ConvProblem const product = multiplied(p);
    if (flat && plan.kernel != kStem) plan.copied_channels = product.channels;
    if (floats) plan.copied_channels = product.channels;
    plan.workspace =
        (floats ? kRangeBytes : 0) +
        size_t(int64_t(product.batch) * product.height * product.width) * plan.copied_channels;
  }
  return {};
}

Status plan_conv_int8(ConvProblem const& problem, Device const& device, ConvPlan* plan) {
  if (!plan) return invalid("plan is a null pointer");
  std::vector<ConvPlan> plans;
  Status status = plans_conv_int8(problem, device, &plans);
  if (status.ok()) *plan = plans.front();
  return status;
}

}  // namespace cutlass_ops
