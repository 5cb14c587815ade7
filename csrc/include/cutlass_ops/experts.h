// Mixture of experts on a GPU: rows of x sorted by expert, and products of these with weights
// that are packed as one. As in ops.h, every call returns at once, works on the stream and
// device it is given, allocates nothing and never synchronises: it can be captured, and
// replayed with other routings.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cutlass_ops/ops.h"

namespace cutlass_ops {

// Weights of experts, packed one after another: `stack` has experts * padded_rows(n) rows
// and no act order.
struct PackedExperts {
  PackedWeight stack;
  int experts = 0;
  int n = 0;                      // output features of one expert
  int32_t const* perm = nullptr;  // [experts][k]: each expert's act order, or null
  void const* bias = nullptr;     // [experts][padded_rows(n)] of bias_type, or null
  DataType bias_type = DataType::kNone;
};

// The experts of positions, which are pairs of a token and one of its experts, flattened.
struct RouteProblem {
  void const* ids = nullptr;  // [tokens * top]
  bool wide_ids = false;      // int64, otherwise int32
  int tokens = 0, top = 0;
  int experts = 0;
  int32_t const* expert_map = nullptr;  // [map_size]: the expert of an id, or -1;
                                        // null: ids are experts
  int map_size = 0;

  constexpr int positions() const { return tokens * top; }
};

constexpr int kMostExperts = 8192;  // whose counts a CTA of route() holds
constexpr int kMostPositions = 1 << 28;

// The results of route(). Positions of ids that belong to no expert come last in `order`.
struct Routing {
  int32_t* offsets = nullptr;  // [experts + 1]: the positions of expert e are order[offsets[e]] to
                               // order[offsets[e + 1] - 1]
  int32_t* order = nullptr;    // [positions], sorted stably by expert
};

Status route(RouteProblem const& problem, Routing const& routing, Stream stream);

// y[t] = sum over j of topk_weights[t, j] * down_e(act(gate_e x[t]) * (up_e x[t])), e = ids[t, j],
// in fp32 and in the order of j, rounded once. Weights are rounded to x's type where experts have
// few rows on average, in groups shorter than 128, with offsets or code books; so are values of
// quantised activations there, and those with zero points. Outputs of experts that have many rows
// are rounded to it. Kernels that are not Hopper's round no weights.
struct MoeProblem {
  RouteProblem route;
  void const* x = nullptr;  // [tokens][hidden] of x_type, rows x_stride elements apart
  DataType x_type = DataType::kBFloat16;
  int64_t x_stride = 0;
  PackedExperts gate_up;  // 2 * intermediate features, eight of gate's before eight of up's;
                          // intermediate is a multiple of 8
  PackedExperts down;
  ActQuant act_quant = ActQuant::kNone;
  bool act_symmetric = true;
  Activation activation = Activation::kSilu;
  float clamp_low = 0.0f, clamp_high = 0.0f;  // or the factor and the limit of clamped_swiglu
  void const* topk_weights = nullptr;         // [tokens * top] of weight_type
  DataType weight_type = DataType::kFloat32;
  void* out = nullptr;   // [tokens][hidden] of x_type
  int architecture = 0;  // as in GemmProblem
};

// How the products of experts are launched: a tile has at most block_m rows of one expert, and each
// product has a separate block_m.
struct MoePlan {
  char const* kernel = nullptr;  // of gate and up
  bool routes = true;            // positions are sorted by expert first; otherwise CTAs find
                                 // theirs from the ids
  int slots = 0;         // rows of x sorted by expert, each expert's padded to 16; or all positions
  bool int8 = false;     // products are of int8 codes, not of their values as 16-bit floats
  bool gathers = false;  // rows of x are copied to their slots, not read by their numbers
  bool portable = false;  // kernels are those of sm_80 and later
  Plan gate_up, down;
  size_t workspace = 0;
};

Status plan_moe(MoeProblem const& problem, Device const& device, MoePlan* plan);
// `plan` is what plan_moe() chose for this problem on the current device.
Status mixed_moe(MoeProblem const& problem, MoePlan const& plan, Workspace workspace,
                 Stream stream);

}  // namespace cutlass_ops
