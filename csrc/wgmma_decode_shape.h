// How wgmma_decode.cu cuts a product over the GPU: clusters of blocks that share K. Host code, for the dispatch table and the launcher.
#pragma once

#include <algorithm>

#include "cutlass_ops/layout.h"
#include "decode_shape.h"
#include "dispatch.h"

namespace cutlass_ops {

struct WgmmaDecodeShape {
  static constexpr int kTokens = 16, kWarpgroups = 3;
  static constexpr int kMostSlabs = 3;  // of a warpgroup: its sums stay in registers
  static constexpr int kMostStages = 16;

  int cluster = 0;       // blocks that share K; 0: none fits
  int clusters = 0;      // of which each has whole slabs
  int most_slabs = 0;    // of a cluster
  int sets = 1;          // of warpgroups that take turns at tiles of K; with one, they share the slabs
  int stages = 0;        // tiles of K in a block's ring: x of all stages, then their weights
  int weights = 0;       // where these begin
  int weight_bytes = 0;  // of a stage
  int scales = 0;        // where in those begin scales, and zero points
  int zeros = 0;
  int token_scales = 0;  // of int8 x, likewise
  int scale_bytes = 2;   // of one
  int table = 0;         // of a code book's values: behind the stages
  int shared_bytes = 0;

  // `quantizes`: the blocks quantise x themselves.
  WgmmaDecodeShape(GemmProblem const& p, Device const& device, bool quantizes) {
    PackedWeight const& w = p.weight;
    bool const int8 = multiplies_int8(p);
    int const x_bytes = kTokens * kKPerTile * (int8 && !quantizes ? 1 : 2);  // of a stage
    int const all_slabs = int(padded_rows(w.n) / kRowsPerSlab), all_tiles = int(padded_k(w.k) / kKPerTile);
    // Two blocks a multiprocessor, this launch's and the next one's: its weights are on their way before this one ends.
    int const table_bytes = w.book ? kBookTableBytes : 0, most_bytes = device.shared_memory / 2 - 2048 - table_bytes;
    scale_bytes = w.scale_type == DataType::kFloat32 ? 4 : 2;
    int64_t least = 0;
    for (int log = 0, c = 1; log < 4 && c <= all_tiles; ++log, c *= 2) {
      int const places = cluster_places(device, c);
      int const slabs = (all_slabs + places - 1) / places, tiles = (all_tiles + c - 1) / c;
      if (slabs > kWarpgroups * kMostSlabs) continue;
      // From what was measured on an H200: a chunk of weights counts 2, x of a tile 1; to quantise it, 3 beside 2 for 4 bits.
      int const tile_time = quantizes ? slabs * w.bits / 2 + 3 : 2 * slabs + 1;
      int64_t const time = int64_t(tile_time) * tiles + (c > 1 ? 2 + 4 * log : 0);
      if (cluster && time >= least) continue;
      WgmmaDecodeShape shape = *this;
      shape.cluster = c;
      shape.most_slabs = slabs;
      shape.clusters = (all_slabs + slabs - 1) / slabs;
      shape.sets = slabs <= kMostSlabs && tiles >= kWarpgroups ? kWarpgroups : 1;
      shape.scales = slabs * chunk_bytes(w.bits);
      shape.zeros = shape.scales + slabs * kRowsPerSlab * scale_bytes * (w.group_size == 64 ? 2 : 1);
      shape.token_scales = shape.zeros + (w.zeros ? slabs * kRowsPerSlab : 0);
      shape.weight_bytes = (shape.token_scales + (int8 ? kTokens * 4 : 0) + 127) / 128 * 128;
      shape.stages = std::min({tiles, kMostStages, most_bytes / (x_bytes + shape.weight_bytes)});
      // A stage is always the same set's: a set cannot know of a stage's turns in between.
      if (shape.stages < tiles) shape.stages -= shape.stages % shape.sets;
      shape.weights = shape.stages * x_bytes;
      shape.shared_bytes =
          std::max(shape.stages * (x_bytes + shape.weight_bytes), shape.sets * slabs * kRowsPerSlab * kTokens * 4);
      if (shape.stages < std::min(tiles, w.book ? 2 : 3) || shape.shared_bytes > most_bytes) continue;
      shape.table = shape.shared_bytes;
      shape.shared_bytes += table_bytes;
      least = time;
      *this = shape;
    }
  }
};

}  // namespace cutlass_ops
