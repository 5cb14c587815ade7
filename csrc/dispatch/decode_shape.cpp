#include "dispatch/decode_shape.h"

#include <algorithm>
#include <cmath>

#include "dispatch/grouped.h"
#include "dispatch/problem.h"

namespace cutlass_ops {

DecodeMemory decode_memory(GemmProblem const& p, DecodeShape const& shape) {
  DecodeMemory memory;
  PackedWeight const& w = p.weight;
  bool int8 = multiplies_int8(p);
  int const bits = code_bits(w), columns = decode_piece_columns(bits);
  int const rows = w.group_size > 0 && w.group_size < columns ? columns / w.group_size : 1;
  memory.zeros = kRowsPerPanel * columns * bits / 8 + rows * kRowsPerPanel * bytes_of(w.scale_type);
  memory.offsets = memory.zeros + (w.zeros ? rows * kRowsPerPanel : 0);
  memory.stage = memory.offsets + (w.offsets ? rows * kRowsPerPanel * bytes_of(w.offset_type) : 0);
  int step = w.group_size > 0 && w.group_size <= 64 ? w.group_size : columns,
      steps = shape.slice * kKPerTile / step;
  memory.x_row = shape.slice * kKPerTile * 2 + 16;
  memory.x = shape.warps * shape.stages * memory.stage;
  memory.sums =
      memory.x +
      p.m * std::max(memory.x_row, shape.cluster > 1 ? shape.row_panels * kRowsPerPanel * 4 : 0);
  memory.scales = memory.sums + (table_bytes(w) ? 0 : steps * 8 * 4);
  memory.parts = memory.scales + (int8 ? steps * 8 * 4 : 0);
  memory.slots = memory.parts + (shape.row_panels * 4 + 15) / 16 * 16;
  memory.table = memory.slots + (shape.row_panels - 1) * p.m * kSlotFloats * 4;
  memory.total = memory.table + table_bytes(w);
  return memory;
}

namespace {

// Clusters that run at a time, a CTA on each SM: GPCs with an odd number of SMs leave one SM in
// eleven unused by clusters of 4 and 8.
int cluster_places(Device const& device, int cluster) {
  return std::max(
      1, (cluster <= 2 ? device.multiprocessors : device.multiprocessors * 10 / 11) / cluster);
}

}  // namespace

// The shape of least time, from what was measured on an H200: an SM takes 18 bytes of weights a
// clock, 15 of a code book's, and 13 of x; a row panel's sums of a row of x cost 30 clocks at the
// end, a cluster's exchange of sums 900, each tile of K of a CTA without a cluster 60 where there
// is no code book, and a CTA that leaves no room for one of the next launch 3000.
DecodeShape decode_shape(GemmProblem const& p, Device const& device) {
  constexpr int kStaticBytes = 1024;
  constexpr int kSmallPart = 32;  // tiles of a row panel
  constexpr int kLongSlice = 64;  // whose x takes longer to quantise than a ring to fill
  bool const table = table_bytes(p.weight) > 0, int8 = multiplies_int8(p);
  int const bits = code_bits(p.weight);
  int row_panels = int(padded_rows(p.weight.n) / kRowsPerPanel),
      tiles = int(padded_k(p.weight.k) / kKPerTile);
  DecodeShape best;
  double least = 0;
  for (int cluster = 1; cluster <= 8 && cluster <= tiles; cluster *= 2) {
    DecodeShape shape;
    shape.cluster = cluster;
    shape.clusters = cluster_places(device, cluster);
    shape.row_panels = (row_panels + shape.clusters - 1) / shape.clusters;
    shape.slice = (tiles + cluster - 1) / cluster;
    shape.stages = decode_stages(table);
    auto fits = [&](int warps, int bytes) {
      shape.warps = warps;
      return decode_memory(p, shape).total <= bytes;
    };
    int const all = device.shared_memory - kStaticBytes,
              half = device.shared_memory / 2 - 2 * kStaticBytes;
    bool small = shape.row_panels * shape.slice <= kSmallPart && fits(8, half);
    if (shape.row_panels > 0xffff || (!small && !fits(decode_warps(table), all) && !fits(8, all)))
      continue;
    double weights = double(shape.row_panels) * shape.slice * k_tile_bytes(bits),
           x = double(p.m) * shape.slice * kKPerTile * 2;
    bool two_per_sm = fits(shape.warps, half);
    if (int8 && !two_per_sm && shape.slice >= kLongSlice) {
      shape.stages += decode_more_stages(bits);
      if (!fits(shape.warps, all)) shape.stages = decode_stages(table);
    }
    double time = weights / (table ? 15 : 18) + x / 13 + 30.0 * shape.row_panels * p.m;
    if (cluster > 1) {
      time += 900;
    } else if (!table) {
      time += 60.0 * shape.slice;
    }
    if (!two_per_sm) time += 3000;
    if (best.cluster && time >= least) continue;
    best = shape, least = time;
  }
  return best;
}

namespace {

// The layout of a stage, and the number of stages; false if too few fit.
struct StageSizes {
  int x_bytes, weight_extra;  // of a stage; behind the group vectors
  int most_bytes;             // shared memory of a CTA, but for a code book's table
  int table_bytes;
  int least_stages;
  int least_bytes = 0;
  int block_m = WgmmaDecodeShape::kBlockM;
};
int tile_groups(PackedWeight const& w) {
  return has_short_groups(w) ? kKPerTile / w.group_size : 1;
}
bool lay_out_stages(PackedWeight const& w, StageSizes const& sizes, int tiles,
                    WgmmaDecodeShape* shape) {
  int const rows = tile_groups(w) * shape->most_row_panels * kRowsPerPanel;
  shape->scales = shape->most_row_panels * k_tile_bytes(code_bits(w));
  shape->offsets = shape->scales + rows * bytes_of(w.scale_type);
  shape->zeros = shape->offsets + (w.offsets ? rows * bytes_of(w.offset_type) : 0);
  shape->x_row_scales = shape->zeros + (w.zeros ? rows : 0);
  shape->weight_bytes = (shape->x_row_scales + sizes.weight_extra + 127) / 128 * 128;
  int const stage = sizes.x_bytes + shape->weight_bytes;
  shape->stages = std::min({tiles, WgmmaDecodeShape::kMostStages, sizes.most_bytes / stage});
  // A stage always belongs to the same set: a set does not see a stage's phases in between.
  if (shape->stages < tiles) shape->stages -= shape->stages % shape->sets;
  shape->weights = shape->stages * sizes.x_bytes;
  shape->shared_bytes = std::max(
      {shape->stages * stage, sizes.least_bytes,
       shape->sets * shape->most_row_panels * kRowsPerPanel * sizes.block_m * int(sizeof(float))});
  if (shape->stages < std::min(tiles, sizes.least_stages) || shape->shared_bytes > sizes.most_bytes)
    return false;
  shape->table = shape->shared_bytes;
  shape->shared_bytes += sizes.table_bytes;
  return true;
}

}  // namespace

WgmmaDecodeShape wgmma_decode_shape(GemmProblem const& p, Device const& device, bool quantizes,
                                    bool one_cta, bool folds, int slices, int block_m) {
  WgmmaDecodeShape best;
  PackedWeight const& w = p.weight;
  bool const int8 = multiplies_int8(p) && !folds, x_row_zeros = int8 && activations_have_zeros(p);
  int const groups = WgmmaDecodeShape::warpgroups(one_cta),
            most = WgmmaDecodeShape::most_row_panels_of(one_cta, x_row_zeros, block_m),
            unit = WgmmaDecodeShape::unit(one_cta);
  int const all_units = int(padded_rows(w.n) / unit), all_tiles = int(padded_k(w.k) / kKPerTile);
  // Two CTAs per SM, this launch's and the next one's: the next launch's weights are in flight
  // before this launch ends. Or one CTA with as many bytes in flight as two would have.
  int const table = table_bytes(w);
  StageSizes const sizes{
      int8 && !quantizes ? block_m * kKPerTile + (x_row_zeros ? 8 * kKPerTile : 0)
                         : block_m * kKPerTile * 2,
      (int8 ? block_m * 4 : 0) + (x_row_zeros ? block_m : 0),
      (one_cta ? device.shared_memory - 1024 : device.shared_memory / 2 - 2048) - table,
      table,
      one_cta ? groups
      : table ? 2
              : 3,
      0,
      block_m};
  int64_t least = 0;
  for (int log = 0, c = 1; log < 4 && c <= all_tiles; ++log, c *= 2) {
    if (slices && c != slices) continue;
    int const places = cluster_places(device, c);
    int const units = (all_units + places - 1) / places, needed = (all_units + units - 1) / units;
    int const tiles = (all_tiles + c - 1) / c, of_row_panel = kRowsPerPanel / unit;
    // A cluster that does not begin at a row panel has a part of one more panel.
    int const row_panels = units % of_row_panel == 0 && all_units % needed == 0
                               ? units / of_row_panel
                               : (units + 2 * of_row_panel - 2) / of_row_panel;
    if (row_panels > groups * most) continue;
    // From what was measured on an H200: a K tile of weights counts 2, 16 rows of x of a tile 1;
    // to quantise them, 3 with 2 for 4 bits.
    int const tile_time =
        quantizes ? row_panels * code_bits(w) / 2 + 3 : 2 * row_panels + block_m / 16;
    int64_t const time = int64_t(tile_time) * tiles + (c > 1 ? 2 + 4 * log : 0);
    if (best.cluster && time >= least) continue;
    WgmmaDecodeShape shape;
    shape.cluster = c;
    shape.most_row_panels = row_panels;
    shape.clusters = needed;
    shape.sets = !slices && row_panels <= most && tiles >= groups ? groups : 1;
    if (!lay_out_stages(w, sizes, tiles, &shape)) continue;
    least = time;
    best = shape;
  }
  return best;
}

bool decodes_exactly(GroupedGemm const& p) {
  PackedWeight const& w = p.weight;
  return p.x_codes != ActQuant::kNone || (kGroupedDecodeIsExact[code_bits(w)] &&
                                          multiplies_exactly(w) && has_own_scales(w, p.x_type));
}

WgmmaDecodeShape grouped_decode_shape(GroupedGemm const& p, Device const& device, double row_tiles,
                                      int most_tiles) {
  constexpr int kGroups = WgmmaDecodeShape::warpgroups(false),
                kMost = WgmmaDecodeShape::most_row_panels_of(false, false);
  constexpr int kStartCost = 12;  // of a CTA, in the unit below
  WgmmaDecodeShape best;
  PackedWeight const& w = p.weight;
  int const all_row_panels = p.groups.row_panels, all_tiles = int(padded_k(w.k) / kKPerTile);
  int const table = table_bytes(w);
  bool const int8 = p.x_codes != ActQuant::kNone;
  StageSizes sizes{WgmmaDecodeShape::kBlockM * kKPerTile * (int8 ? 1 : 2),
                   int8 ? WgmmaDecodeShape::kBlockM * 4 * tile_groups(w) : 0,
                   device.shared_memory / 2 - 2048 - table,
                   table,
                   table ? 2 : 3,
                   kFoundTilesBytes};
  double least = 0;
  for (int log = 0, c = 1; log < 4 && c <= all_tiles; ++log, c *= 2) {
    int const tiles = (all_tiles + c - 1) / c;
    for (int most = kGroups * kMost; most > 0; --most) {
      int const needed = (all_row_panels + most - 1) / most;
      // a smaller one needs as many
      if (most > all_row_panels || (all_row_panels + needed - 1) / needed < most) continue;
      WgmmaDecodeShape shape;
      shape.cluster = c, shape.clusters = needed, shape.most_row_panels = most;
      shape.sets = shape.most_row_panels <= kMost && tiles >= kGroups ? kGroups : 1;
      // As in wgmma_decode_shape. Two CTAs share an SM. A CTA alone on an SM would take some 0.6 of
      // the time, but where the launch before leaves some SMs first, two may share one. The number
      // of waves is rounded up, unless there are many.
      double const cta =
          (2.0 * shape.most_row_panels + 1) * tiles + kStartCost + (c > 1 ? 2 + 4 * log : 0);
      double const waves = row_tiles * needed / (2 * cluster_places(device, c));
      double const time = cta * (waves <= 0.5 ? 0.75 : waves <= 2 ? std::ceil(waves) : waves + 0.5);
      if (best.cluster && time >= least) continue;
      if (!lay_out_stages(w, sizes, tiles, &shape)) continue;
      least = time, best = shape;
    }
  }
  // Or all CTAs that run at a time have equal shares of all row panels, in turns of up to `most`
  // row panels of two tiles, each of which reads their x.
  sizes.x_bytes *= 2, sizes.weight_extra *= 2;
  int const ctas = 2 * device.multiprocessors;
  auto const share = [&](double tiles) { return std::ceil(tiles * all_row_panels / ctas); };
  bool const has_registers = has_narrow_scales(w, p.x_type) && !w.offsets && !p.groups.bias;
  if (!has_registers ||
      (share(most_tiles) - 1) / all_row_panels + 2 > WgmmaDecodeShape::kMostDealtTiles)
    return best;
  for (int most : {kGroups, kGroups * WgmmaDecodeShape::kMostDealtPanels}) {
    WgmmaDecodeShape shape;
    shape.cluster = 1, shape.clusters = ctas, shape.most_row_panels = most, shape.dealt = true;
    double const row_panels = share(row_tiles), turns = std::ceil(row_panels / most);
    if (row_panels < kGroups) break;  // a warpgroup would have nothing to do
    double const time = (2 * row_panels + turns) * all_tiles + kStartCost;
    if (best.cluster && time >= least) continue;
    // the ring continues from turn to turn
    if (!lay_out_stages(w, sizes, WgmmaDecodeShape::kMostStages, &shape)) continue;
    least = time, best = shape;
  }
  return best;
}

}  // namespace cutlass_ops
