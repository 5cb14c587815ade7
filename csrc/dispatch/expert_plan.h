// The workspace of a layer of experts, for dispatch/ and host/experts.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cutlass_ops/experts.h"

namespace cutlass_ops {

// Places in the workspace, in bytes from its start.
struct MoeLayout {
  size_t x = 0, x_values = 0, x_scales = 0, hidden = 0, hidden_gathered = 0, hidden_values = 0,
         outputs = 0, slices = 0, arrived = 0, total = 0;
  int64_t hidden_stride = 0;  // of rows, in elements
};

MoeLayout lay_out(MoeProblem const& p, MoePlan const& plan);

// The rows of a quantised tensor, with their scales and zero points.
struct QuantizedBytes {
  size_t values, scales, zeros;
  size_t total() const { return values + scales + zeros; }
};
QuantizedBytes quantized_bytes(int rows, int k, int group_size);

// Scales of a row of x that the product applies: for int8 codes all block scales, or one; 16-bit
// values of codes include their block scales.
int scale_blocks(MoeProblem const& p, MoePlan const& plan, PackedWeight const& w);

// Whether the tiles of down have another table than those of gate and up.
bool has_two_tables(MoePlan const& plan);
int stored_tiles(RouteProblem const& r, MoePlan const& plan);
// Parts of the positions whose CTAs assign slots.
int route_chunks(RouteProblem const& r);
// The room for scales of so many rows.
int rounded_rows(int rows);
// The counters of both products, where a portable kernel cuts K.
int arrivals(MoePlan const& plan);

Status check_route(RouteProblem const& r);

}  // namespace cutlass_ops
