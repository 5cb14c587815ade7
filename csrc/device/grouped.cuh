// Products whose rows of x and weights are experts': rows sorted by expert, each expert's from a multiple of 16 on ("slots"),
// and tiles of these, which a kernel before has written (kernels/route.cu). How many there are is known on the GPU alone.
#pragma once

#include "cutlass_ops/layout.h"
#include "device/epilogue.cuh"
#include "dispatch/grouped.h"

namespace cutlass_ops {

// Tile `index` of `height` rows: none, if it is beyond the last.
struct GroupTile {
  int expert = 0, first_row = 0, rows = 0;

  GroupTile() = default;
  __device__ __forceinline__ GroupTile(Groups const& groups, int index, int height) {
    if (index >= __ldg(groups.count)) return;
    int4 const stored = __ldg(reinterpret_cast<int4 const*>(groups.tiles) + index);
    int const before = (index - stored.w) * height;
    expert = stored.x, first_row = stored.y + before, rows = min(height, stored.z - before);
  }
};

// Four sums of neighbouring features from n on, of gate or of all features, and of up, to outputs of a row of the tile.
__device__ __forceinline__ void finish_group(float (&v)[4], float const (&other)[4], int token, int n, GroupTile const& tile,
                                             Groups const& groups, EpilogueParams const& p) {
  if (token >= tile.rows || n >= p.n) return;
  float up[4] = {other[0], other[1], other[2], other[3]};
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = nan_unless_finite(v[i]), up[i] = nan_unless_finite(up[i]);
  if (groups.bias) {
    int64_t const row = int64_t(tile.expert) * groups.row_panels * kRowsPerPanel + n;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (n + i >= p.n) continue;
      v[i] += load_float(groups.bias, groups.bias_type, row + i);
      if (groups.gated) up[i] += load_float(groups.bias, groups.bias_type, row + i + groups.row_panels / 2 * kRowsPerPanel);
    }
  }
  activate(v, groups);
  if (groups.gated) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= up[i];
  }
  store_finished(v, tile.first_row + token, n, p);
}

}  // namespace cutlass_ops
