// Products of experts in plain data: for dispatch/, kernels/ and experts.cpp.
#pragma once

#include "cutlass_ops/experts.h"
#include "formats/width.h"

namespace cutlass_ops {

// A tile of rows as it is stored; the tiles of an expert follow each other.
struct alignas(16) StoredTile {
  int expert;
  int first_row, rows;  // the expert's slots
  int first_tile;       // the expert's
};

constexpr int kSlotRows = 16;  // an expert's slots begin at a multiple

// BLOCK_M of the kernels for more rows of an expert than the decode kernels' 16: for 16-bit x, and
// for int8 x. Only wgmma_fold16 has tiles of 32 rows.
constexpr int kGroupedHeights[] = {32, 64, 96, 144}, kGroupedInt8Heights[] = {64, 96, 144, 176};
constexpr int kLeastExactHeight = 64;  // of wgmma_gemm_a16
// For this height wgmma_fold16 has no registers left if groups of 16 have scales of x's type.
constexpr int kHeightWithoutGroupsOf16 = 96;
// The MMAs of a tile take as many rows as there are, in these steps down to the least. (More steps
// of high tiles, and steps in those of 32 rows, gain nothing.)
constexpr int row_step(int height) { return height > 96 ? 32 : 16; }
constexpr int least_taken_rows(int height) {
  return height > 96 ? 80 : height > 64 ? 48 : height > 32 ? 16 : height;
}

// The most positions, and experts, for which the decode kernels find their tiles from the ids;
// positions are then the slots.
constexpr int kMostFoundPositions = 256, kMostFoundExperts = 1024;
// Shared memory for that: counts of each expert's positions, a byte for each warp of them.
constexpr int kFoundTilesBytes = kMostFoundExperts * (kMostFoundPositions / 32);

// A table of tiles on the GPU.
struct TileTable {
  StoredTile* tiles = nullptr;
  int* count = nullptr;
  int height = 1;  // rows of a tile
};

// The addresses of the tables of slots on the GPU; null: slots are positions.
struct RowSlots {
  TileTable tables[2];         // of gate and up, and of down, where its tiles have another height
  int* used = nullptr;         // slots
  int* position = nullptr;     // of a slot; -1: of none
  int* of_position = nullptr;  // the slot of a position; -1: no expert
  int chunks = 1;              // of positions: CTAs of `assign_slots`
  int* counts = nullptr;       // [chunks][experts + 1] of positions, where there are several
  int* arrived = nullptr;      // that `assign_slots` sets to 0: of GroupedGemm
  int arrived_count = 0;
};

// Copies rows of 16-bit floats, or of pairs of codes, to their slots.
struct GatherProblem {
  void const* x = nullptr;
  int64_t x_stride = 0;
  float const* scales = nullptr;     // [blocks][scale_stride], or null
  int blocks = 0, scale_stride = 0;  // and [blocks][out_scale_stride]
  bool in_slots = false;          // they are in slots already, and their columns alone are gathered
  int32_t const* perm = nullptr;  // [experts][k], or null
  int k = 0;
  void* out = nullptr;
  int64_t out_stride = 0;
  float* out_scales = nullptr;
  int out_scale_stride = 0;
};

// The experts' rows and tiles of a product.
struct Groups {
  StoredTile const* tiles = nullptr;  // null: slots are positions, and tiles are found from `route`
  int const* count = nullptr;         // of tiles
  RouteProblem route;
  int const* positions = nullptr;  // of slots; null: slots are positions, or x is in slots
  int top = 0;                     // a slot's row of x is its position / top; 0: x is in slots
  int row_panels = 0;              // of one expert, of 64 features
  // Whether an expert's features are gate's and up's, eight and eight: then the output is
  // activation(gate) * up.
  bool gated = false;
  Activation activation = Activation::kNone;
  // Whether a kernel of the layer comes between the product and those that wrote ids and tiles. It
  // has waited for these before it lets the product start, which then reads ids and tiles at once.
  bool written = false;
  ActivationBounds bounds{Activation::kNone, 0.0f, 0.0f};
  void const* bias = nullptr;  // [experts][64 * row panels] of bias_type
  DataType bias_type = DataType::kNone;
};

// A product of experts' rows and weights.
struct GroupedGemm {
  PackedWeight weight;  // of all experts, one after another
  int experts = 0;
  void const* x = nullptr;  // [x_rows][weight.k] of x_type, rows x_stride elements apart
  DataType x_type = DataType::kFloat16;
  int64_t x_stride = 0;
  ActQuant x_codes = ActQuant::kNone;  // otherwise x is codes instead, [x_rows][padded_k(weight.k)]
  float const* x_scales = nullptr;  // [x_rows], of blocks [k tiles][x_rows]: of codes, or of their
                                    // values as floats; or null
  int x_rows = 0, rows = 0;         // of x, or those that its scales have place for, and of
                                    // slots: multiples of 16
  void* out = nullptr;              // [rows][n] of out_type
  DataType out_type = DataType::kFloat16;
  int n = 0;
  Groups groups;
  // Where K is cut: a tile's sums of each slice, [CTAs along x][slices][block_m][block_n], and how
  // many of its slices have arrived, [CTAs along x], 0 before.
  float* slices = nullptr;
  int* arrived = nullptr;
};

// The product's rows of all experts and the features of one as those of a matrix.
inline GemmProblem rows_of_all(GroupedGemm const& gemm) {
  GemmProblem rows;
  rows.m = gemm.rows, rows.weight = gemm.weight, rows.weight.n = gemm.n;
  rows.out = gemm.out, rows.out_type = gemm.out_type;
  return rows;
}

// Whether wgmma_decode takes experts of few rows, whose products are exact; otherwise
// wgmma_decode_fold16 does. With 8 bits and 16-bit x wgmma_decode would spill registers.
constexpr ByWidth<bool> kGroupedDecodeIsExact(true, false);
bool decodes_exactly(GroupedGemm const& problem);

// The shape in which clusters of either kernel share tiles of experts' rows; cluster is 0 if none
// fits. `tiles`: the expected number, and the largest possible one.
WgmmaDecodeShape grouped_decode_shape(GroupedGemm const& problem, Device const& device,
                                      double tiles, int most_tiles);

}  // namespace cutlass_ops
