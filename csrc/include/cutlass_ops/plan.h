// The launch of a product as plain data: computed by plan(), executed by mixed_gemm().
#pragma once

#include <cstddef>

namespace cutlass_ops {

struct KernelSpec;  // csrc/dispatch/spec.h

// Where the parts of a call's workspace begin, in bytes.
struct WorkspaceLayout {
  size_t codes = 0, scales = 0, zeros = 0, range = 0, upcast = 0, zero_values = 0, zero_scales = 0,
         colsums = 0, gate_sums = 0, splitk_workspace = 0;
  int stride = 0;        // QuantizedActivations::stride
  int rows = 0;          // QuantizedActivations::rows
  int block = 0;         // QuantizedActivations::block; 0: nothing is quantised before the product
  bool ranges = false;   // all of x has one scale, whose range is found before the product
  bool upcasts = false;  // x is made rows of 16-bit floats that a tensor map describes
  bool compensates = false;  // zero points of x, or of W, become operands of a product
                             // (zero_compensation.h)
  bool sums = false;         // the weight's column sums are computed: it has none
  bool gates = false;        // the kernel stores fp32 sums [m][n] at gate_sums, or slices of them
                             // for splitk_reduce, and gate_sums.cu makes outputs of both
};

// The stream-K tail of a product: how clusters share the tiles that remain after full waves over
// the GPU. The K of each tile is split into `parts` slices, and each slice but the last has a
// separate cluster. Where fewer clusters remain than tiles, each computes the last slices of
// `tiles_per_cluster` tiles, one after another, and these slices are shorter in proportion.
struct StreamKTail {
  // Starting another last slice costs a cluster as much time as so many K tiles
  // (docs/tuning-notes.md).
  static constexpr int kStartTiles = 6;

  int parts = 1, tiles_per_cluster = 1;
  int last = 0;                                    // clusters that compute last slices
  int share_numerator = 0, share_denominator = 1;  // slice i of K begins with K tile
                                                   // share_numerator * i / share_denominator

  constexpr StreamKTail() = default;
  constexpr StreamKTail(int tiles, int count, int clusters, int k_tiles)
      : parts(count),
        tiles_per_cluster(
            tiles * count <= clusters ? 1 : (tiles - 1) / (clusters - tiles * (count - 1)) + 1),
        last((tiles - 1) / tiles_per_cluster + 1),
        share_numerator((k_tiles + (tiles_per_cluster > 1 ? kStartTiles : 0)) * tiles_per_cluster),
        share_denominator(tiles_per_cluster * (count - 1) + 1) {}
  // Tiles whose slices splitk_reduce adds; one slice: no split.
  constexpr StreamKTail(int tiles, int count, int k_tiles)
      : parts(count),
        tiles_per_cluster(1),
        last(tiles),
        share_numerator(k_tiles),
        share_denominator(count) {}
};

// How decode_gemm divides a product: clusters of CTAs that split K.
struct DecodeShape {
  int cluster = 0;     // CTAs that split K; 0: none fits
  int clusters = 0;    // of which each has whole row panels of 64 features
  int row_panels = 0;  // row panels of a cluster, at most
  int slice = 0;       // K tiles of a CTA, at most
  int warps = 0;       // of a CTA
  int stages = 0;      // of each warp's ring
};

// Where the parts of a decode_gemm CTA's shared memory begin. The warps' rings come first.
struct DecodeMemory {
  int stage = 0;               // bytes of a stage of a warp's ring
  int zeros = 0, offsets = 0;  // where in a stage those vectors begin, behind codes and scales
  int x_row = 0;               // bytes of a row of x: 16 more than a multiple of 128, so that eight
                               // rows meet every bank
  int x = 0;                   // and, once x has been read, the sums that other CTAs send
  int sums = 0, scales = 0, parts = 0, slots = 0;
  int table = 0, total = 0;  // of a code book's values; all
};

// How wgmma_decode divides a product.
struct WgmmaDecodeShape {
  static constexpr int kBlockM = 16, kMoreRows = 32;  // of x: rows of a tile, and of a larger one
  static constexpr int kMostStages = 16;
  // `one_cta`: one CTA per SM.
  static constexpr int warpgroups(bool one_cta) { return one_cta ? 4 : 3; }
  // And a warp that loads.
  static constexpr int threads(bool one_cta) { return 128 * warpgroups(one_cta) + 32; }
  // Row panels of a warpgroup: its sums stay in registers, together with those of weights where x
  // has zero points.
  static constexpr int most_row_panels_of(bool one_cta, bool x_row_zeros, int block_m = kBlockM) {
    if (block_m == kMoreRows) return 1;
    return one_cta || x_row_zeros ? 2 : 3;
  }
  static constexpr int kMostDealtTiles = 8;   // whose row panels a CTA has parts of
  static constexpr int kMostDealtPanels = 2;  // of a warpgroup at a time
  // Output features that are never divided between clusters.
  static constexpr int unit(bool one_cta) { return one_cta ? 32 : 64; }

  int cluster = 0;          // CTAs that split K; 0: none fits
  int clusters = 0;         // of which each has whole units
  int most_row_panels = 0;  // of a cluster, wholly or in part
  bool dealt = false;       // of experts: so many CTAs run at a time, and take equal parts of all
                            // tiles' row panels
  int sets = 1;  // of warpgroups that take turns at tiles of K; with one, they share the row panels
  int stages = 0;        // tiles of K in a CTA's ring: x of all stages, then their weights
  int weights = 0;       // where these begin
  int weight_bytes = 0;  // of a stage
  int scales = 0;        // where in those begin scales, offsets and zero points
  int offsets = 0;
  int zeros = 0;
  int x_row_scales = 0;  // of int8 x, followed by its zero points
  int table = 0;         // of a code book's values: behind the stages
  int shared_bytes = 0;
};

// The complete launch of a product: mixed_gemm() recomputes none of it.
struct Plan {
  KernelSpec const* spec = nullptr;
  char const* kernel = nullptr;  // the kernel's name, and in csrc/kernels its file's
  char const* why = nullptr;     // the reason for it

  int block_n = 0, block_m = 0;  // output features x rows of x that a cluster (or a CTA, without
                                 // clusters) computes at a time
  int grid_x = 0, grid_y = 1;    // CTAs
  int cluster_size = 1;          // CTAs
  int ctas_along_m = 1;          // of a cluster; the others are along N
  int threads = 0;               // of a CTA
  int shared_bytes = 0;          // dynamic shared memory of a CTA
  int stages = 0;                // tiles of K, of weights, that are in flight
  int slices = 1;                // of K: of all tiles (split-K), or of the stream-K tail's
  int tail_tiles = 0;  // the last tiles of y, if only their K is split and the kernel adds
                       // the slices itself
  StreamKTail tail;

  bool rounds = false;       // weights, and values of quantised activations, are rounded to 16 bits
  bool quantizes = false;    // the kernel quantises floats itself
  bool compensates = false;  // it compensates zero points of x, or of W, for many blocks,
                             // or a row, at once
  bool gates = false;        // of a gated weight: the kernel stores the outputs itself, where it
                             // stores no slices of K
  bool one_cta_per_sm = false;          // wgmma_decode: and all of its shared memory
  bool quantizer_starts_early = false;  // the kernel after the quantiser may start before what ran
                                        // before it has ended
  bool quantizer_spreads = true;  // few CTAs of the quantiser take shared memory that they do not
                                  // use, to spread over the GPU

  DecodeShape decode;             // decode_gemm's
  DecodeMemory decode_memory;     // decode_gemm's
  WgmmaDecodeShape wgmma_decode;  // wgmma_decode's

  WorkspaceLayout layout;
  size_t workspace = 0;  // bytes
};

}  // namespace cutlass_ops
