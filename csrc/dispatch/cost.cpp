#include "dispatch/cost.h"

#include <algorithm>

#include "dispatch/problem.h"

namespace cutlass_ops {
namespace {

int64_t tile_count(GemmProblem const& problem, Tile const& tile) {
  return ceil_div(problem.weight.n, tile.block_n) * std::max<int64_t>(1, ceil_div(problem.m, tile.block_m));
}

int tile_cost(GemmProblem const& problem, Candidate const& candidate) {
  TileCost const& cost = candidate.cost;
  if (cost.whole_rows > 0 && sums_whole_rows(problem)) return cost.whole_rows;
  bool const row_scales = !activations_have_blocks(problem) && (candidate.corrects || !activations_have_zeros(problem));
  return cost.row_scales > 0 && row_scales ? cost.row_scales : cost.k4096;
}

// The stream-K tail: slices of K of the tiles that whole waves of clusters leave over, so that more of them share the end. Where a last slice for each tile
// is one too many, a cluster takes those of several, and all others are so much longer: not in wgmma_fold16, nor for int8 activations, where that was measured
// to lose 2 % (of 512, 1024 and 8192 rows x 8192 x 28672), nor of more than eight, which lost 1 %. Tiles that fill no wave are slice_count's; reduce_splits
// takes 2.5 us, and 2 a million sums.
Cut stream_k_tail(GemmProblem const& problem, Device const& device, KernelSpec const& spec, Candidate const& candidate) {
  constexpr int kMostSlices = 16;  // a lane of a warp waits for each
  Tile const& tile = candidate.tile;
  int const cost = tile_cost(problem, candidate), end = candidate.cost.end;
  int64_t const k = k_tiles(problem.weight), clusters = std::max(1, device.multiprocessors / tile.cluster_size);
  int64_t const tiles = tile_count(problem, tile), rest = tiles % clusters, whole = cost * k + end * 32;
  Cut best{0, 1, ceil_div(tiles, clusters) * whole};
  if (tiles < clusters) {
    int const slices = slice_count(problem, device, spec, tile);
    if (slices > 1)
      best.time = ceil_div(k, slices) * cost + (25 + 2 * end + int64_t(slices) * problem.m * problem.weight.n / 50000) * 32;
    return best;
  }
  if (rest == 0) return best;
  int const most_gathered = spec.gathers ? 8 : 1;
  for (int64_t slices = 2; slices <= kMostSlices && rest * (slices - 1) < clusters; ++slices) {
    CutTiles const cut{int(rest), int(slices), int(clusters), int(k)};
    if (cut.gathered > most_gathered || k - cut.dealt * (slices - 1) / cut.pieces < 2) continue;
    // Tenths of a microsecond on an H200: to leave partial sums in the workspace and add them up.
    int64_t const exchange = 25 + 2 * end + 8 * (slices - 1) * tile.block_m / 128;
    int64_t const time = tiles / clusters * whole + ceil_div(cut.dealt, cut.pieces) * cost + exchange * 32;
    if (time < best.time) best = {rest, int(slices), time};
  }
  return best;
}

// Whether clusters add up the two slices of each tile's K themselves where the tiles fill no wave. It was measured to be faster than reduce_splits for many
// sums of long slices: floats x int8 8192 x 28672 at M = 128 take 97.5 us, 99.7 by reduce_splits.
bool adds_two_slices(GemmProblem const& problem, int slices) {
  PackedWeight const& w = problem.weight;
  return slices == 2 && !multiplies_int8(problem) && w.bits == 8 && w.k >= 16384 && int64_t(problem.m) * w.n >= 1 << 20;
}

}  // namespace

// Of weights at least eight tiles of K by 128 features each (two tiles in clusters). The count depends on shapes and the device alone, so a result's bits do
// too.
int slice_count(GemmProblem const& problem, Device const& device, KernelSpec const& spec, Tile const& tile) {
  if (spec.decodes) return 1;
  int64_t const wanted =
      int64_t(device.multiprocessors) * tile.min_ctas_per_sm / (tile_count(problem, tile) * tile.cluster_size);
  // A cluster's CTAs fill an SM each: fewer tiles of K are enough for them.
  int const least = tile.cluster_size > 1 ? 2 : 1024 / tile.block_n;
  int64_t const most = std::max<int64_t>(1, k_tiles(problem.weight) / least);
  return int(std::clamp<int64_t>(wanted, 1, std::min<int64_t>(most, 16)));
}

int64_t predicted_time(GemmProblem const& problem, Device const& device, KernelSpec const& spec, Candidate const& candidate) {
  if (!problem.batch_invariant) return stream_k_tail(problem, device, spec, candidate).time;
  int64_t const clusters = std::max(1, device.multiprocessors * candidate.tile.min_ctas_per_sm / candidate.tile.cluster_size);
  return ceil_div(tile_count(problem, candidate.tile), clusters) * tile_cost(problem, candidate);
}

Cut cut_of(GemmProblem const& problem, Device const& device, KernelSpec const& spec, Candidate const& candidate) {
  int const slices = slice_count(problem, device, spec, candidate.tile);
  if (!spec.cost || problem.batch_invariant) return {0, slices, 0};
  if (slices == 1) return stream_k_tail(problem, device, spec, candidate);
  return {adds_two_slices(problem, slices) ? tile_count(problem, candidate.tile) : 0, slices, 0};
}

}  // namespace cutlass_ops
