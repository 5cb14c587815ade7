// How decode_gemm.cu cuts a product over the GPU: clusters of blocks that share K. Host code, for the dispatch table and the launcher.
#pragma once

#include <algorithm>

#include "cutlass_ops/layout.h"
#include "dispatch.h"

namespace cutlass_ops {

struct DecodeShape {
  int cluster = 0;   // blocks that share K; 0: none fits
  int clusters = 0;  // of which each has whole slabs
  int slabs = 0;     // of a cluster, at most
  int slice = 0;     // tiles of K of a block, at most
};

constexpr int kDecodeWarps = 8;
constexpr int decode_stages(int tokens) { return tokens == 8 ? 3 : 2; }  // of each warp's ring

// Floats of a slot: the sums of `features` outputs of m tokens. Four more a token and slots of 4 mod 32 keep lanes on different banks.
constexpr int slot_floats(int features, int m) { return ((features + 4) * m + 27) / 32 * 32 + 4; }

// Where the parts of a block's shared memory begin.
struct DecodeMemory {
  int stage;           // bytes of a stage of a warp's ring
  int zeros, offsets;  // where in a stage those vectors begin, behind codes and scales
  int token;           // bytes of a token's row of x: 16 more than a multiple of 128, so that eight tokens meet every bank
  int x, sums, scales, parts, slots, total;

  DecodeMemory(GemmProblem const& p, DecodeShape const& shape, int tokens) {
    PackedWeight const& w = p.weight;
    auto size = [](DataType type) { return type == DataType::kFloat32 ? 4 : 2; };
    bool int8 = p.act_quant != ActQuant::kNone || p.quantized.codes;
    int columns = 512 / w.bits, rows = w.group_size > 0 && w.group_size < columns ? columns / w.group_size : 1;
    zeros = 4096 + rows * kRowsPerSlab * size(w.scale_type);
    offsets = zeros + (w.zeros ? rows * kRowsPerSlab : 0);
    stage = offsets + (w.offsets ? rows * kRowsPerSlab * size(w.offset_type) : 0);
    int step = w.group_size == 32 || w.group_size == 64 ? 32 : columns, steps = shape.slice * kKPerTile / step;
    token = shape.slice * kKPerTile * 2 + 16;
    x = kDecodeWarps * decode_stages(tokens) * stage;
    sums = x + p.m * token;
    scales = sums + steps * tokens * 4;
    parts = scales + (int8 ? steps * tokens * 4 : 0);
    slots = parts + (shape.slabs * shape.cluster * 4 + 15) / 16 * 16;
    total = slots + (shape.slabs + kDecodeWarps - 1) * shape.cluster * slot_floats(kRowsPerSlab / shape.cluster, p.m) * 4;
  }
};

// The shape of least time, from what was measured on an H200: a multiprocessor takes 18 bytes a clock of weights and x together, and a cluster's
// exchange of sums 900 clocks. GPCs of an odd number of multiprocessors leave one in eleven out of clusters of 4 and 8.
inline DecodeShape decode_shape(GemmProblem const& p, Device const& device, int tokens) {
  constexpr int kStaticBytes = 1024;
  int slabs = int(padded_rows(p.weight.n) / kRowsPerSlab), tiles = int(padded_k(p.weight.k) / kKPerTile);
  DecodeShape best;
  double least = 0;
  for (int cluster = 1; cluster <= 8 && cluster <= tiles; cluster *= 2) {
    DecodeShape shape;
    shape.cluster = cluster;
    shape.clusters = std::max(1, (cluster <= 2 ? device.multiprocessors : device.multiprocessors * 10 / 11) / cluster);
    shape.slabs = (slabs + shape.clusters - 1) / shape.clusters;
    shape.slice = (tiles + cluster - 1) / cluster;
    if (shape.slabs > 0xffff - kDecodeWarps || DecodeMemory(p, shape, tokens).total > device.shared_memory - kStaticBytes)
      continue;
    double bytes = double(shape.slabs) * shape.slice * chunk_bytes(p.weight.bits) + double(p.m) * shape.slice * kKPerTile * 2;
    double time = bytes / 18 + (cluster > 1 ? 900 : 0);
    if (best.cluster && time >= least) continue;
    best = shape, least = time;
  }
  return best;
}

}  // namespace cutlass_ops
