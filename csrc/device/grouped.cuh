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
    // No __ldg(): the compiler may move one before pdl_wait(), and the kernel before writes these.
    if (index >= *groups.count) return;
    int4 const stored = reinterpret_cast<int4 const*>(groups.tiles)[index];
    int const before = (index - stored.w) * height;
    expert = stored.x, first_row = stored.y + before, rows = min(height, stored.z - before);
  }
};

// The row of x of an expert's slot.
__device__ __forceinline__ int row_of_slot(Groups const& groups, int slot) {
  return groups.positions ? groups.positions[slot] / groups.top : slot;
}

// x whose rows are found by their numbers, in pieces of 16 bytes.
struct RowPieces {
  uint8_t const* x;
  int stride;  // pieces from a row to the next
  int bytes;   // of a row; zeros follow

  explicit RowPieces(GroupedGemm const& gemm) {
    int const element = gemm.x_codes == ActQuant::kNone ? 2 : 1;
    x = static_cast<uint8_t const*>(gemm.x), stride = int(gemm.x_stride * element / 16);
    bytes = int(element == 2 ? gemm.weight.k * 2 : padded_k(gemm.weight.k));
  }
  RowPieces() = default;
};

// A thread's sums of a tile, those of gate's row g and up's row g + 8 two by two: activation(gate) * up takes gate's place. Each
// choice is made once for all of them.
template <int kSums>
__device__ __forceinline__ void gate(float (&sums)[kSums], Groups const& groups) {
  auto const each = [&](auto activation) {
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      sums[i] = activation(sums[i]) * sums[i + 2];
      sums[i + 1] = activation(sums[i + 1]) * sums[i + 3];
    }
  };
  switch (groups.activation) {
    case Activation::kNone:
      return each([](float x) { return x; });
    case Activation::kRelu:
    case Activation::kRelu6:
    case Activation::kClamp:
      return each([&](float x) { return clamp_keeping_nan(x, groups.low, groups.high); });
    case Activation::kGelu:
      return each([](float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); });
    case Activation::kSilu:
      return each([](float x) { return __fdividef(x, 1.0f + __expf(-x)); });
  }
}

// Four sums of neighbouring features from n on to outputs of a row of the tile.
__device__ __forceinline__ void finish_group(float (&v)[4], int x_row, int n, GroupTile const& tile, Groups const& groups,
                                             EpilogueParams const& p) {
  if (x_row >= tile.rows || n >= p.n) return;
#pragma unroll
  for (float& x : v) x = nan_unless_finite(x);
  if (groups.bias) {
    int64_t const row = int64_t(tile.expert) * groups.row_panels * kRowsPerPanel + n;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] += load_float(groups.bias, groups.bias_type, row + i);
  }
  store_finished(v, tile.first_row + x_row, n, p);
}

// A warp's sums of 16 rows of an expert from `row` on, gate's and up's of eight features, and eight rows of x from `first` of the
// tile's on, in the order of wgmma's accumulators, to 16-bit outputs. `row_scales`: of the rows of x, or null.
__device__ __forceinline__ void finish_gated(float (&v)[4], float const* row_scales, int first, int row, GroupTile const& tile,
                                             Groups const& groups, EpilogueParams const& p) {
  int const lane = threadIdx.x % 32;
  if (row_scales) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const x_row = first + lane % 4 * 2 + i;
      float const scale = x_row < tile.rows ? row_scales[row_of_slot(groups, tile.first_row + x_row)] : 0.0f;
      v[i] *= scale, v[2 + i] *= scale;
    }
  }
#pragma unroll
  for (float& x : v) x = nan_unless_finite(x);
  if (groups.bias) {
    int64_t const at = int64_t(tile.expert) * groups.row_panels * kRowsPerPanel + row + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float const bias = load_float(groups.bias, groups.bias_type, at + h * 8);
      v[2 * h] += bias, v[2 * h + 1] += bias;
    }
  }
  gate(v, groups);
  // From two rows of x of a feature to two features of a row of x.
  uint32_t pair = to_half_bits(v[0], v[1], p.out_type == DataType::kBFloat16);
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(pair) : "r"(pair));
  int const x_row = first + lane / 4, n = row / 2 + lane % 4 * 2;
  if (x_row < tile.rows && n < p.n)
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + int64_t(tile.first_row + x_row) * p.n + n) = pair;
}

}  // namespace cutlass_ops
