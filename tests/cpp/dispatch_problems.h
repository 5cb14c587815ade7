// Devices, and problems whose memory nothing reads, for the tests of the dispatch.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/ops.h"
#include "dispatch/problem.h"
#include "dispatch/spec.h"

namespace cutlass_ops {

alignas(256) inline uint8_t some_bytes[32];  // what non-null pointers point to;
                                             // nothing here reads it
inline uint8_t& some_byte = some_bytes[0];
alignas(16) inline float some_book[16];

inline void look_up(PackedWeight& w) { w.format = Format::kCodebook, w.codebook = some_book; }

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": A100, RTX 3090,
// RTX 4090, H200, B200, RTX 5090. Memory bandwidth, which matters on Hopper only, is that of H200.
inline Device const kDevices[] = {{80, 108, 166912},       {86, 82, 101376},   {89, 128, 101376},
                                  {90, 132, 232448, 4916}, {100, 148, 232448}, {120, 170, 101376}};
inline Device const kHopper = kDevices[3];
inline Device const kH100 = {90, 132, 232448, 3352};

inline Format integers(int bits) {
  return bits == 2 ? Format::kInt2 : bits == 4 ? Format::kInt4 : Format::kInt8;
}

inline GemmProblem problem(int m, int n, int k, int bits = 4, int group_size = 128) {
  GemmProblem p;
  p.m = m;
  p.weight.n = n;
  p.weight.k = k;
  p.weight.format = integers(bits);
  p.weight.group_size = group_size;
  p.weight.codes = &some_byte, p.weight.scales = &some_byte;
  p.x = &some_byte, p.x_stride = k;
  return p;
}

inline GemmProblem quantized_on_the_way(GemmProblem p, ActQuant act_quant, bool symmetric) {
  p.act_quant = act_quant;
  p.act_symmetric = symmetric;
  return p;
}

inline GemmProblem already_quantized(GemmProblem p, int block) {
  p.quantized.codes = reinterpret_cast<int8_t*>(&some_byte), p.quantized.scales = some_book;
  p.quantized.block = block;
  p.quantized.stride = (p.m + 15) / 16 * 16;
  return p;
}

// The plan of a problem that has one.
inline Plan planned(GemmProblem const& p, Device const& device = kHopper) {
  Plan chosen;
  Status const status = plan(p, device, &chosen);
  EXPECT_TRUE(status.ok()) << status.text;
  return chosen;
}

// The plan of a kernel with BLOCK_N = 48 whose split-K slices are added by splitk_reduce.
inline Plan laid_out(GemmProblem const& p, int slices, bool upcasts = false,
                     bool compensates = false) {
  Plan chosen;
  chosen.slices = slices;
  chosen.block_m = 48;
  chosen.compensates = compensates;
  lay_out_workspace(p, upcasts, &chosen);
  return chosen;
}

struct Named {
  std::string name;
  GemmProblem problem;
  bool int8;
};

// Every kind of activation that is supported with a weight.
inline std::vector<Named> inputs(GemmProblem const& p) {
  std::vector<Named> all;
  for (DataType type : {DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32}) {
    GemmProblem typed = p;
    typed.x_type = type;
    std::string name = "x_type " + std::to_string(int(type));
    if (type != DataType::kFloat32) all.push_back({name, typed, false});
    for (bool symmetric : {true, false}) {
      all.push_back(
          {name + " token", quantized_on_the_way(typed, ActQuant::kToken, symmetric), true});
      all.push_back(
          {name + " block", quantized_on_the_way(typed, ActQuant::kBlock, symmetric), true});
      if (symmetric) continue;
      all.push_back(all.back());
      all.back().name += ", sums of codes", all.back().problem.weight.sums = &some_byte;
    }
  }
  if (p.weight.format == Format::kInt4) {
    GemmProblem book = p;
    book.x_type = DataType::kFloat16;
    look_up(book.weight);
    all.push_back({"code book", book, false});
  } else {
    GemmProblem zeros = quantized_on_the_way(p, ActQuant::kBlock, true);
    zeros.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte);
    all.push_back({"zero points", zeros, true});
  }
  all.push_back({"codes, token", already_quantized(p, -1), true});
  all.push_back(
      {"codes, block", already_quantized(p, activation_block(p.weight.group_size)), true});
  return all;
}

// The names of a plan's launches by value: equal literals may have several addresses.
inline std::vector<std::string> names(Plan const& plan) {
  std::vector<char const*> const order = launches(plan);
  return {order.begin(), order.end()};
}

}  // namespace cutlass_ops
