// How wgmma_decode.cu cuts a product over the GPU: clusters of blocks that share K. Host code, for the dispatch table and the launcher.
#pragma once

#include <algorithm>

#include "cutlass_ops/layout.h"
#include "decode_shape.h"
#include "dispatch.h"

namespace cutlass_ops {

struct WgmmaDecodeShape {
  static constexpr int kTokens = 16;
  static constexpr int kMostStages = 16;
  // `alone`: a block has a multiprocessor for itself.
  static constexpr int warpgroups(bool alone) { return alone ? 4 : 3; }
  // Slabs of a warpgroup: its sums stay in registers, beside those of weights where tokens have zero points.
  static constexpr int most_slabs_of(bool alone, bool token_zeros) { return alone || token_zeros ? 2 : 3; }
  // Output features that clusters are given whole.
  static constexpr int unit(bool alone) { return alone ? kRowsPerSlab / 2 : kRowsPerSlab; }

  int cluster = 0;       // blocks that share K; 0: none fits
  int clusters = 0;      // of which each has whole units
  int most_slabs = 0;    // of a cluster, wholly or in part
  int sets = 1;          // of warpgroups that take turns at tiles of K; with one, they share the slabs
  int stages = 0;        // tiles of K in a block's ring: x of all stages, then their weights
  int weights = 0;       // where these begin
  int weight_bytes = 0;  // of a stage
  int scales = 0;        // where in those begin scales, and zero points
  int zeros = 0;
  int token_scales = 0;  // of int8 x, likewise, and then zero points
  int scale_bytes = 2;   // of one
  int table = 0;         // of a code book's values: behind the stages
  int shared_bytes = 0;

  // `quantizes`: the blocks quantise x themselves.
  WgmmaDecodeShape(GemmProblem const& p, Device const& device, bool quantizes, bool alone) {
    PackedWeight const& w = p.weight;
    bool const int8 = multiplies_int8(p), token_zeros = activations_have_zeros(p);
    int const x_bytes = int8 && !quantizes ? kTokens * kKPerTile + (token_zeros ? 8 * kKPerTile : 0) : kTokens * kKPerTile * 2;
    int const groups = warpgroups(alone), most = most_slabs_of(alone, token_zeros), unit = WgmmaDecodeShape::unit(alone);
    int const all_units = int(padded_rows(w.n) / unit), all_tiles = int(padded_k(w.k) / kKPerTile);
    // Two blocks a multiprocessor, this launch's and the next one's: its weights are on their way before this one ends. Or one that has as many on their way
    // as two would have.
    int const table_bytes = w.book ? kBookTableBytes : 0,
              most_bytes = (alone ? device.shared_memory - 1024 : device.shared_memory / 2 - 2048) - table_bytes;
    scale_bytes = w.scale_type == DataType::kFloat32 ? 4 : 2;
    int64_t least = 0;
    for (int log = 0, c = 1; log < 4 && c <= all_tiles; ++log, c *= 2) {
      int const places = cluster_places(device, c);
      int const units = (all_units + places - 1) / places, needed = (all_units + units - 1) / units;
      int const tiles = (all_tiles + c - 1) / c, of_slab = kRowsPerSlab / unit;
      // Where clusters do not begin with slabs they have a part of one more.
      int const slabs = units % of_slab == 0 && all_units % needed == 0 ? units / of_slab : (units + 2 * of_slab - 2) / of_slab;
      if (slabs > groups * most) continue;
      // From what was measured on an H200: a chunk of weights counts 2, x of a tile 1; to quantise it, 3 beside 2 for 4 bits.
      int const tile_time = quantizes ? slabs * w.bits / 2 + 3 : 2 * slabs + 1;
      int64_t const time = int64_t(tile_time) * tiles + (c > 1 ? 2 + 4 * log : 0);
      if (cluster && time >= least) continue;
      WgmmaDecodeShape shape = *this;
      shape.cluster = c;
      shape.most_slabs = slabs;
      shape.clusters = needed;
      shape.sets = slabs <= most && tiles >= groups ? groups : 1;
      shape.scales = slabs * chunk_bytes(w.bits);
      shape.zeros = shape.scales + slabs * kRowsPerSlab * scale_bytes * (w.group_size == 64 ? 2 : 1);
      shape.token_scales = shape.zeros + (w.zeros ? slabs * kRowsPerSlab : 0);
      shape.weight_bytes = (shape.token_scales + (int8 ? kTokens * 4 : 0) + (token_zeros ? kTokens : 0) + 127) / 128 * 128;
      shape.stages = std::min({tiles, kMostStages, most_bytes / (x_bytes + shape.weight_bytes)});
      // A stage is always the same set's: a set cannot know of a stage's turns in between.
      if (shape.stages < tiles) shape.stages -= shape.stages % shape.sets;
      shape.weights = shape.stages * x_bytes;
      shape.shared_bytes =
          std::max(shape.stages * (x_bytes + shape.weight_bytes), shape.sets * slabs * kRowsPerSlab * kTokens * 4);
      if (shape.stages < std::min(tiles, alone ? groups : w.book ? 2 : 3) || shape.shared_bytes > most_bytes) continue;
      shape.table = shape.shared_bytes;
      shape.shared_bytes += table_bytes;
      least = time;
      *this = shape;
    }
  }
};

}  // namespace cutlass_ops
