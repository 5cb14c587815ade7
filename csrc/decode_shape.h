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
  int warps = 0;     // of a block
  int stages = 0;    // of each warp's ring
};

// Of a block, at most: or 8, where those need too much memory, or leave no room for the next launch's block beside a small part of a product.
constexpr int decode_warps(int tokens, bool book) { return (tokens == 8) == book ? 12 : 8; }
constexpr int decode_stages(int tokens, bool book) { return tokens == 8 && !book ? 3 : 2; }  // of each warp's ring
// What is added to them, all or nothing, beside int8 activations where a block leaves no room for one of the next launch: weights are on their way while a
// long x is quantised. 8-bit ones take long enough without.
constexpr int decode_more_stages(int tokens, int bits) { return tokens == 8 && bits == 4 ? 2 : 0; }
// Of a token in a slot, the sums of a slab: four more keep lanes on different banks.
constexpr int kSlotFloats = kRowsPerSlab + 4;

constexpr int kBookTableBytes = 32 * 1024;  // decode.cuh

// Where the parts of a block's shared memory begin. The warps' rings are its first.
struct DecodeMemory {
  int stage;           // bytes of a stage of a warp's ring
  int zeros, offsets;  // where in a stage those vectors begin, behind codes and scales
  int token;           // bytes of a token's row of x: 16 more than a multiple of 128, so that eight tokens meet every bank
  int x;               // and, when x has been used, what other blocks send
  int sums, scales, parts, slots;
  int table, total;  // of a code book's values; all

  DecodeMemory(GemmProblem const& p, DecodeShape const& shape) {
    PackedWeight const& w = p.weight;
    auto size = [](DataType type) { return type == DataType::kFloat32 ? 4 : 2; };
    bool int8 = multiplies_int8(p);
    int columns = 512 / w.bits, rows = w.group_size > 0 && w.group_size < columns ? columns / w.group_size : 1;
    zeros = 4096 + rows * kRowsPerSlab * size(w.scale_type);
    offsets = zeros + (w.zeros ? rows * kRowsPerSlab : 0);
    stage = offsets + (w.offsets ? rows * kRowsPerSlab * size(w.offset_type) : 0);
    int step = w.group_size == 32 || w.group_size == 64 ? w.group_size : columns, steps = shape.slice * kKPerTile / step;
    token = shape.slice * kKPerTile * 2 + 16;
    x = shape.warps * shape.stages * stage;
    sums = x + p.m * std::max(token, shape.cluster > 1 ? shape.slabs * kRowsPerSlab * 4 : 0);
    scales = sums + (w.book ? 0 : steps * (p.m <= 8 ? 8 : 16) * 4);
    parts = scales + (int8 ? steps * (p.m <= 8 ? 8 : 16) * 4 : 0);
    slots = parts + (shape.slabs * 4 + 15) / 16 * 16;
    table = slots + (shape.slabs - 1) * p.m * kSlotFloats * 4;
    total = table + (w.book ? kBookTableBytes : 0);
  }
};

// Clusters that run at a time, a block on each multiprocessor: GPCs of an odd number of these leave one in eleven out of clusters of 4 and 8.
inline int cluster_places(Device const& device, int cluster) {
  return std::max(1, (cluster <= 2 ? device.multiprocessors : device.multiprocessors * 10 / 11) / cluster);
}

// The shape of least time, from what was measured on an H200: a multiprocessor takes 18 bytes of weights a clock, 15 of a code book's, and 13 of x, 26 of 9
// to 16 tokens beside a book; a slab's sums of a token cost 30 clocks at the end, a cluster's exchange of sums 900, each tile of K of a block alone
// 60 where there is no book, and a block that leaves no room for one of the next launch 3000.
inline DecodeShape decode_shape(GemmProblem const& p, Device const& device, int tokens) {
  constexpr int kStaticBytes = 1024;
  constexpr int kSmallPart = 32;  // tiles of a slab
  constexpr int kLongSlice = 64;  // whose x takes longer to quantise than a ring to fill
  bool const book = p.weight.book, int8 = multiplies_int8(p);
  int slabs = int(padded_rows(p.weight.n) / kRowsPerSlab), tiles = int(padded_k(p.weight.k) / kKPerTile);
  DecodeShape best;
  double least = 0;
  for (int cluster = 1; cluster <= 8 && cluster <= tiles; cluster *= 2) {
    DecodeShape shape;
    shape.cluster = cluster;
    shape.clusters = cluster_places(device, cluster);
    shape.slabs = (slabs + shape.clusters - 1) / shape.clusters;
    shape.slice = (tiles + cluster - 1) / cluster;
    shape.stages = decode_stages(tokens, book);
    auto fits = [&](int warps, int bytes) {
      shape.warps = warps;
      return DecodeMemory(p, shape).total <= bytes;
    };
    int const all = device.shared_memory - kStaticBytes, half = device.shared_memory / 2 - 2 * kStaticBytes;
    bool small = tokens == 8 && shape.slabs * shape.slice <= kSmallPart && fits(8, half);
    if (shape.slabs > 0xffff || (!small && !fits(decode_warps(tokens, book), all) && !fits(8, all))) continue;
    double weights = double(shape.slabs) * shape.slice * chunk_bytes(p.weight.bits),
           x = double(p.m) * shape.slice * kKPerTile * 2;
    bool beside = tokens == 8 && fits(shape.warps, half);
    if (int8 && !beside && shape.slice >= kLongSlice) {
      shape.stages += decode_more_stages(tokens, p.weight.bits);
      if (!fits(shape.warps, all)) shape.stages = decode_stages(tokens, book);
    }
    double time = weights / (book ? 15 : 18) + x / (book && tokens > 8 ? 26 : 13) + 30.0 * shape.slabs * p.m;
    if (cluster > 1) {
      time += 900;
    } else if (!book) {
      time += 60.0 * shape.slice;
    }
    if (!beside) time += 3000;
    if (best.cluster && time >= least) continue;
    best = shape, least = time;
  }
  return best;
}

}  // namespace cutlass_ops
