#include "dispatch/cost.h"

#include <algorithm>
#include <cstdlib>

#include "dispatch/decode_shape.h"
#include "dispatch/problem.h"

namespace cutlass_ops {
namespace {

int64_t tile_count(GemmProblem const& problem, Tile const& tile) {
  return ceil_div(problem.weight.n, tile.block_n) *
         std::max<int64_t>(1, ceil_div(problem.m, tile.block_m));
}

// The unit of KernelSpec::cost is a whole part both of PredictedTime's, which is 3.125 ns, and of a
// nanosecond.
constexpr int kUnitsPerNanosecond = 8, kUnitsOfPredictedTime = 25;

int64_t time_of(PredictedTime const& time, int cost, int end) {
  return time.k_tiles * cost + time.ends * end + time.constant;
}

// Tenths of a microsecond to add up the slices of all sums, fitted on an H200 to 4096 x 4096, 4096
// x 14336, 11008 x 4096 and 14336 x 4096 at M = 17 to 400: by splitk_reduce, and by the cluster
// that has the first slice of a tile, one after the other.
int64_t splitk_reduce_time(GemmProblem const& problem, int64_t slices) {
  return 25 + slices * problem.m * problem.weight.n / 50000;
}
int64_t exchange_time(Tile const& tile, int64_t slices) {
  return (slices - 1) * (800 + 7 * cta_block_m(tile)) / 100;
}

// The stream-K tail: the tiles left after full waves of clusters are split along K, so that more
// clusters share them. If there are fewer clusters than last slices, a cluster takes the last
// slices of several tiles, at most eight, and the other slices are longer in proportion.
// wgmma_fold16 has no clusters of that kind, and products of int8 activations are slower with them
// (docs/tuning-notes.md). Tiles that fill no wave have the slices of slice_count: the clusters add
// them where that is predicted to be faster than splitk_reduce.
TailSplit stream_k_tail(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                        Candidate const& candidate) {
  constexpr int kMostSlices = 16;  // a lane of a warp waits for each
  Tile const& tile = candidate.tile;
  TileCost const& costs = candidate.costs[card_of(device)];
  int const cost = costs.*cost_kind(problem, device, candidate), end = costs.end;
  int64_t const k = k_tiles(problem.weight),
                clusters = std::max(1, device.multiprocessors / tile.cluster_size);
  int64_t const tiles = tile_count(problem, tile), rest = tiles % clusters,
                waves = ceil_div(tiles, clusters);
  TailSplit best{0, 1, {waves * k, waves * 32, 0}};
  if (tiles < clusters) {
    int const slices = slice_count(problem, device, spec, tile);
    if (slices == 1) return best;
    // The tile is chosen by the time that splitk_reduce takes.
    int64_t const by_reduce = splitk_reduce_time(problem, slices);
    return {exchange_time(tile, slices) < by_reduce ? tiles : 0,
            slices,
            {ceil_div(k, slices), 64, by_reduce * 32}};
  }
  if (rest == 0) return best;
  int64_t least = time_of(best.time, cost, end);
  int const most_tiles_per_cluster = spec.combines_slices ? 8 : 1;
  for (int64_t slices = 2; slices <= kMostSlices && rest * (slices - 1) < clusters; ++slices) {
    StreamKTail const tail_split{int(rest), int(slices), int(clusters), int(k)};
    if (tail_split.tiles_per_cluster > most_tiles_per_cluster ||
        k - tail_split.share_numerator * (slices - 1) / tail_split.share_denominator < 2)
      continue;
    // Tenths of a microsecond on an H200: to store partial sums in the workspace and add them.
    int64_t const exchange = 25 + 8 * (slices - 1) * cta_block_m(tile) / 128,
                  whole = tiles / clusters;
    PredictedTime const time{
        whole * k + ceil_div(tail_split.share_numerator, tail_split.share_denominator),
        (whole + 2) * 32, exchange * 32};
    if (time_of(time, cost, end) < least)
      best = {rest, int(slices), time}, least = time_of(time, cost, end);
  }
  return best;
}

// 32nds of tenths of a microsecond that the call's quantiser takes before the product, which reads
// x and writes its codes.
int64_t quantizer_time(GemmProblem const& problem, Device const& device,
                       Candidate const& candidate) {
  if (!quantizes_x(problem) || candidate.quantizes) return 0;
  int64_t const bytes = stored_rows(problem) * padded_k(stored_columns(problem)) * 3;
  return 32 * (10 + bytes / (100 * int64_t(bandwidth_of(device))));
}

}  // namespace

// A slice has at least eight K tiles of 128 features (two in clusters). The count depends on shapes
// and the device alone, so a result's bits do too.
int slice_count(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                Tile const& tile) {
  if (spec.decodes) return 1;
  int64_t const wanted = int64_t(device.multiprocessors) * tile.min_ctas_per_sm /
                         (tile_count(problem, tile) * tile.cluster_size);
  // Each CTA of a cluster fills an SM, so fewer K tiles are enough.
  int const least = tile.cluster_size > 1 ? 2 : 1024 / tile.block_n;
  int64_t const tiles = k_tiles(problem.weight), most = std::max<int64_t>(1, tiles / least);
  int const slices = int(std::clamp<int64_t>(wanted, 1, std::min<int64_t>(most, 16)));
  if (!problem.batch_invariant || !spec.few_rows) return slices;
  // The kernel for few rows has clusters of 1, 2, 4 or 8 CTAs, with equal slices of K.
  int cluster = 8;
  while (cluster > slices || tiles % cluster) cluster /= 2;
  return cluster;
}

int card_of(Device const& device) {
  auto const distance = [&](int card) {
    return std::abs(kCards[card].memory_bandwidth - device.memory_bandwidth);
  };
  int nearest = 0;
  for (int card = 1; card < kCardCount; ++card)
    if (distance(card) < distance(nearest)) nearest = card;
  return nearest;
}

int bandwidth_of(Device const& device) { return kCards[card_of(device)].memory_bandwidth; }

int TileCost::* cost_kind(GemmProblem const& problem, Device const& device,
                          Candidate const& candidate) {
  TileCost const& cost = candidate.costs[card_of(device)];
  if (cost.wide > 0 && !has_narrow_scales(problem.weight, problem.x_type)) return &TileCost::wide;
  bool const long_sums = sums_whole_rows(problem) || sums_whole_taps(problem);
  if (cost.whole_rows > 0 && long_sums) return &TileCost::whole_rows;
  bool const row_scales = !activations_have_blocks(problem) &&
                          (candidate.compensates || !activations_have_zeros(problem));
  return cost.row_scales > 0 && row_scales ? &TileCost::row_scales : &TileCost::k4096;
}

int64_t predicted_time(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                       Candidate const& candidate) {
  if (is_mostly_empty(candidate.tile, problem.m)) return -1;
  // Tiles that quantise x are chosen only where they fill a wave. With fewer tiles, the split-K
  // slices would differ from the slices after the quantiser, the order of the sums with them, and
  // the time was longer as often as not.
  if (candidate.quantizes &&
      tile_count(problem, candidate.tile) < device.multiprocessors / candidate.tile.cluster_size)
    return -1;
  TileCost const& costs = candidate.costs[card_of(device)];
  int const cost = costs.*cost_kind(problem, device, candidate);
  int64_t time = quantizer_time(problem, device, candidate);
  if (!problem.batch_invariant) {
    time += time_of(stream_k_tail(problem, device, spec, candidate).time, cost, costs.end);
  } else {
    int64_t const clusters = std::max(
        1, device.multiprocessors * candidate.tile.min_ctas_per_sm / candidate.tile.cluster_size);
    time +=
        ceil_div(tile_count(problem, candidate.tile), clusters) * k_tiles(problem.weight) * cost;
  }
  return kUnitsOfPredictedTime * time;
}

DecodeKind decode_kind(GemmProblem const& problem, bool rounds) {
  PackedWeight const& w = problem.weight;
  // Kernels that round weights apply scales of another type in fp32. That takes longer than looking
  // codes up.
  if (table_bytes(w) && (!rounds || has_narrow_scales(w, problem.x_type)))
    return DecodeKind::kCodebook;
  bool const rounded = has_short_groups(w) || w.offsets || !has_decode_kernels(w) ||
                       (rounds && !has_exact_kernels(w));
  if (!multiplies_int8(problem)) {
    if (has_narrow_scales(w, problem.x_type))
      return rounded ? DecodeKind::kFloatsRounded : DecodeKind::kFloats;
    return rounded ? DecodeKind::kFloatsRoundedWide : DecodeKind::kFloatsWide;
  }
  bool const int8 = has_int8_products(w);
  if (activations_have_blocks(problem))
    return int8 ? DecodeKind::kBlock : DecodeKind::kBlockRounded;
  return int8 ? DecodeKind::kToken : DecodeKind::kTokenRounded;
}

DecodeTerms decode_terms(GemmProblem const& problem, Device const& device, Plan const& shaped) {
  int64_t const tiles = k_tiles(problem.weight),
                row_panels = padded_rows(problem.weight.n) / kRowsPerPanel;
  int64_t const tiles_of_cta = ceil_div(tiles, shaped.cluster_size);
  double of_cta = double(shaped.decode.row_panels) * tiles_of_cta;
  if (shaped.decode.cluster == 0) {
    int const unit = WgmmaDecodeShape::unit(shaped.one_cta_per_sm);
    int64_t const units =
        ceil_div(padded_rows(problem.weight.n) / unit, shaped.wgmma_decode.clusters);
    of_cta = double(units * unit) / kRowsPerPanel * tiles_of_cta;
  }
  return {of_cta, double(tiles * row_panels) / device.multiprocessors,
          double(problem.m) * tiles_of_cta / 32, problem.m};
}

int64_t decode_time_in(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                       Candidate const& candidate, int slices) {
  DecodeCost const& cost =
      candidate.decode_costs[card_of(device)][width_index(code_bits(problem.weight))]
                            [int(decode_kind(problem, spec.rounds))];
  if (cost.start == 0 && cost.chunk == 0 && cost.share == 0) return -1;
  Plan shaped;
  shaped.slices = slices, shaped.one_cta_per_sm = candidate.tile.min_ctas_per_sm == 1;
  if (!spec.shape(problem, device, candidate, &shaped)) return -1;
  DecodeTerms const t = decode_terms(problem, device, shaped);
  return int64_t(kUnitsPerNanosecond * (cost.start + cost.chunk * t.chunks + cost.share * t.share +
                                        cost.x * t.x + double(cost.row) * t.rows));
}

int64_t decode_time(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                    Candidate const& candidate) {
  return decode_time_in(problem, device, spec, candidate, 1);
}

TailSplit tail_split_of(GemmProblem const& problem, Device const& device, KernelSpec const& spec,
                        Candidate const& candidate) {
  if (!spec.cost || spec.decodes || problem.batch_invariant)
    return {0, slice_count(problem, device, spec, candidate.tile), {}};
  return stream_k_tail(problem, device, spec, candidate);
}

}  // namespace cutlass_ops
