#include "dispatch/launch_shape.h"

#include <algorithm>

#include "cutlass_ops/zero_compensation.h"
#include "dispatch/cost.h"
#include "dispatch/ctas.h"
#include "dispatch/decode_shape.h"
#include "dispatch/problem.h"

namespace cutlass_ops {
namespace {

// Tiles of one CTA each, and slices of K along y.
void portable_grid(GemmProblem const& problem, Tile const& tile, Plan* plan) {
  plan->grid_x = int(ceil_div(problem.weight.n, tile.block_n) * ceil_div(problem.m, tile.block_m));
  plan->grid_y = plan->slices;
}

// Persistent clusters that walk over whole tiles and slices of K. `tiles_of_k`: with the
// compensations between them.
void persistent_grid(GemmProblem const& problem, Device const& device, Candidate const& candidate,
                     int tiles_of_k, Plan* plan) {
  Tile const& tile = candidate.tile;
  int const tiles =
      int(ceil_div(problem.weight.n, tile.block_n) * ceil_div(problem.m, tile.block_m));
  int const clusters = device.multiprocessors / tile.cluster_size;
  bool const split = plan->slices > 1 && plan->tail_tiles == 0;
  plan->tail = plan->tail_tiles ? StreamKTail(plan->tail_tiles, plan->slices, clusters, tiles_of_k)
                                : StreamKTail(split ? tiles : 0, plan->slices, tiles_of_k);
  int const tail_split = split ? tiles : plan->tail_tiles;
  int const work = tiles - tail_split + tail_split * (plan->tail.parts - 1) + plan->tail.last;
  plan->grid_x = std::min(work, clusters) * tile.cluster_size;
  plan->cluster_size = tile.cluster_size;
  plan->threads = wgmma_threads(warpgroups(tile), plan->quantizes);
}

}  // namespace

bool shape_mma_gemm_a16(GemmProblem const& problem, Device const& device,
                        Candidate const& candidate, Plan* plan) {
  PackedWeight const& w = problem.weight;
  Tile const& tile = candidate.tile;
  int const bits = code_bits(w), table = table_bytes(w);
  bool const general = !has_integer_codes(w) || w.offsets || has_short_groups(w);
  auto const bytes = [&](int stages) {
    return MmaA16Cta{bits, tile.block_m, general, table, stages}.shared_bytes;
  };
  plan->stages = mma_gemm_a16_stages(bits, tile.block_m, general, table);
  // Two CTAs per SM are worth more than a third stage. The third stage is used where both fit
  // (sm_90), or where two CTAs do not fit anyway (sm_86, sm_89, sm_120).
  if (mma_gemm_a16_may_have_two_stages(bits, tile.block_m, general) &&
      device.shared_memory >= 2 * bytes(2) && device.shared_memory < 2 * bytes(tile.stages)) {
    plan->stages = 2;
  }
  plan->shared_bytes = bytes(plan->stages);
  plan->threads = kMmaThreads;
  portable_grid(problem, tile, plan);
  return true;
}

bool shape_mma_gemm_a8(GemmProblem const& problem, Device const& device, Candidate const& candidate,
                       Plan* plan) {
  PackedWeight const& w = problem.weight;
  Tile const& tile = candidate.tile;
  bool const general = has_short_groups(w) || w.offsets || !zeros_fit_int8(w);
  bool const zeros = general || w.zeros || activations_have_zeros(problem);
  // No more CTAs on an SM than the grid is made for: CTAs that start while the previous kernel
  // still runs would crowd on the first SMs that it leaves.
  int const crowded = device.shared_memory / ((zeros ? 2 : tile.min_ctas_per_sm) + 1);
  plan->stages = tile.stages;
  plan->shared_bytes = std::max(
      crowded, MmaA8Cta{code_bits(w), tile.block_m, zeros, general, tile.stages}.shared_bytes);
  plan->threads = kMmaThreads;
  portable_grid(problem, tile, plan);
  return true;
}

bool shape_book_gemm_a16(GemmProblem const& problem, Device const&, Candidate const& candidate,
                         Plan* plan) {
  plan->stages = candidate.tile.stages;
  CodebookA16Cta const cta{table_bytes(problem.weight)};
  plan->shared_bytes = cta.shared_bytes;
  plan->threads = cta.threads;
  portable_grid(problem, candidate.tile, plan);
  return true;
}

bool shape_wgmma_gemm_a8(GemmProblem const& problem, Device const& device,
                         Candidate const& candidate, Plan* plan) {
  PackedWeight const& w = problem.weight;
  Tile const& tile = candidate.tile;
  bool const blocks = activations_have_blocks(problem),
             zeros = activations_have_zeros(problem) && !candidate.compensates;
  plan->stages = tile.stages;
  int const bits = code_bits(w);
  WgmmaCta const cta{bits,
                     cta_block_m(tile),
                     1,
                     plan->quantizes || (!sums_whole_rows(problem) && !sums_whole_taps(problem)),
                     blocks || plan->quantizes,
                     zeros,
                     w.zeros && !compensates_weight_zeros(problem),
                     tile.stages,
                     warpgroups(tile),
                     plan->quantizes};
  plan->shared_bytes = cta.shared_bytes;
  int tiles = int(k_tiles(w));
  if (candidate.compensates && blocks) tiles += compensation_windows(tiles, bits);
  persistent_grid(problem, device, candidate, tiles, plan);
  return true;
}

bool shape_wgmma_gemm_a16(GemmProblem const& problem, Device const& device,
                          Candidate const& candidate, Plan* plan) {
  PackedWeight const& w = problem.weight;
  Tile const& tile = candidate.tile;
  plan->stages = tile.stages;
  WgmmaCta const cta{code_bits(w), cta_block_m(tile), 2, true, false, false, w.zeros != nullptr,
                     tile.stages,  warpgroups(tile)};
  plan->shared_bytes = cta.shared_bytes;
  persistent_grid(problem, device, candidate, int(k_tiles(w)), plan);
  return true;
}

bool shape_wgmma_fold16(GemmProblem const& problem, Device const& device,
                        Candidate const& candidate, Plan* plan) {
  PackedWeight const& w = problem.weight;
  Fold16Cta const cta{code_bits(w), candidate.tile.block_m, table_bytes(w),
                      has_narrow_scales(w, problem.x_type), false};
  plan->stages = cta.stages;
  plan->shared_bytes = cta.shared_bytes;
  persistent_grid(problem, device, candidate, int(k_tiles(w)), plan);
  return true;
}

namespace {

// Shared memory that a launch of few rows requests. Where it is long, half of an SM's: the previous
// launch leaves SMs one by one, and two CTAs of this one would crowd on the first. Where it is
// short, the next launch's first stages arrive before it ends (docs/tuning-notes.md).
int without_crowding(GemmProblem const& problem, Device const& device, int bytes) {
  constexpr int64_t kLongNanoseconds = 10000;
  int64_t const codes = padded_size(problem.weight) * code_bits(problem.weight) / 8;
  bool const is_long = codes >= kLongNanoseconds * bandwidth_of(device);
  return is_long ? std::max(bytes, device.shared_memory / 2) : bytes;
}

}  // namespace

bool shape_decode_gemm(GemmProblem const& problem, Device const& device, Candidate const&,
                       Plan* plan) {
  DecodeShape const shape = decode_shape(problem, device);
  if (shape.cluster == 0) return false;
  plan->decode = shape;
  plan->decode_memory = decode_memory(problem, shape);
  plan->grid_x = shape.clusters * shape.cluster;
  plan->cluster_size = shape.cluster;
  plan->threads = 32 * shape.warps;
  plan->stages = shape.stages;
  plan->shared_bytes = without_crowding(problem, device, plan->decode_memory.total);
  return true;
}

namespace {

bool shape_decode(GemmProblem const& problem, Device const& device, Candidate const& candidate,
                  bool folds, Plan* plan) {
  bool const one_cta = candidate.tile.min_ctas_per_sm == 1;
  WgmmaDecodeShape const shape =
      wgmma_decode_shape(problem, device, candidate.quantizes, one_cta, folds,
                         problem.batch_invariant ? plan->slices : 0, candidate.tile.block_m);
  if (shape.cluster == 0) return false;
  plan->slices = 1;  // of those whose sums leave a kernel
  plan->wgmma_decode = shape;
  plan->grid_x = shape.clusters * shape.cluster;
  plan->cluster_size = shape.cluster;
  plan->threads = WgmmaDecodeShape::threads(one_cta);
  plan->stages = shape.stages;
  plan->shared_bytes = without_crowding(problem, device, shape.shared_bytes);
  return true;
}

}  // namespace

bool shape_wgmma_decode(GemmProblem const& problem, Device const& device,
                        Candidate const& candidate, Plan* plan) {
  return shape_decode(problem, device, candidate, false, plan);
}
bool shape_wgmma_decode_fold16(GemmProblem const& problem, Device const& device,
                               Candidate const& candidate, Plan* plan) {
  return shape_decode(problem, device, candidate, true, plan);
}

}  // namespace cutlass_ops
