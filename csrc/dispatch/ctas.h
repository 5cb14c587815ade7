// A CTA of each kernel, as its Config and the plan read it: threads, and where the parts of its
// shared memory begin, in bytes. Host code.
#pragma once

#include "cutlass_ops/layout.h"
#include "dispatch/launchers.h"

namespace cutlass_ops {

// ---- mma_gemm_a16, mma_gemm_a8

// Output features, threads, and the distance between rows of x among the sums, which are stored
// through shared memory: the padding avoids bank conflicts of the transposing writes.
constexpr int kMmaRows = 128, kMmaThreads = 128, kMmaSumStride = kMmaRows + 4;
constexpr int mma_sum_bytes(int block_m) { return block_m * kMmaSumStride * int(sizeof(float)); }

struct MmaA16Cta {
  int bits, block_m;
  bool general;     // steps of 32 columns, and offsets
  int table_bytes;  // of the format's look-up table, with which there are neither zero points nor
                    // offsets
  int stages;

  int groups = general ? 4 : 1;  // in a tile of K, at most
  // Offsets in a stage: weights, then
  int activations = kMmaRows / kRowsPerPanel * k_tile_bytes(bits);
  int scales = activations + block_m * kKPerTile * 2;
  int zeros = scales + groups * kMmaRows * 4;
  int offsets = zeros + (table_bytes ? 0 : groups * kMmaRows);
  int stage_bytes = offsets + (general && !table_bytes ? groups * kMmaRows * 4 : 0);

  int table = stages * stage_bytes > mma_sum_bytes(block_m) ? stages* stage_bytes
                                                            : mma_sum_bytes(block_m);
  int shared_bytes = table + table_bytes;

  constexpr MmaA16Cta(int bits_, int block_m_, bool general_, int table_bytes_, int stages_)
      : bits(bits_),
        block_m(block_m_),
        general(general_),
        table_bytes(table_bytes_),
        stages(stages_) {}
};

struct MmaA8Cta {
  int bits, block_m;
  bool has_zeros;  // room for zero points
  bool general;    // several steps in a tile of K, and offsets
  int stages;

  int steps = general ? 4 : 1;  // in a tile of K, at most
  // Offsets in a stage: weights, then
  int activations = kMmaRows / kRowsPerPanel * k_tile_bytes(bits);
  int activation_scales = activations + block_m * kKPerTile;
  int scales = activation_scales + steps * block_m * 4;
  int zeros = scales + steps * kMmaRows * 4;
  int activation_zeros = zeros + (has_zeros ? steps * kMmaRows : 0);
  int offsets = activation_zeros + (has_zeros ? steps * block_m : 0);
  // ldmatrix rows and their swizzle need every stage to start on 128 bytes.
  int stage_bytes = (offsets + (general ? steps * kMmaRows * 4 : 0) + 127) / 128 * 128;

  int shared_bytes = stages * stage_bytes > mma_sum_bytes(block_m) ? stages* stage_bytes
                                                                   : mma_sum_bytes(block_m);

  constexpr MmaA8Cta(int bits_, int block_m_, bool has_zeros_, bool general_, int stages_)
      : bits(bits_), block_m(block_m_), has_zeros(has_zeros_), general(general_), stages(stages_) {}
};

// ---- book_gemm_a16

struct CodebookA16Cta {
  static constexpr int kBlockM = 4;  // rows of x, which take two columns of operand B each
  int table_bytes;

  int warps = 8, threads = 32 * warps;
  int tiles_at_once = 8;  // of x
  int x_bytes = 1024;     // of 32 columns
  // The table starts on a multiple of its size, which dynamic shared memory does not; x follows it.
  int shared_bytes = table_bytes - 1024 + table_bytes + tiles_at_once * kKPerTile / 32 * x_bytes;

  constexpr explicit CodebookA16Cta(int table_bytes_) : table_bytes(table_bytes_) {}
};

// ---- wgmma_gemm_a8, wgmma_gemm_a16: hopper::TileConfig

// Warpgroups that load: three more quantise 16-bit x.
constexpr int loading_warpgroups(bool quantizes) { return quantizes ? 4 : 1; }
// Threads of the warpgroups that multiply, and of those that load.
constexpr int wgmma_threads(int warpgroups, bool quantizes = false) {
  return 128 * (warpgroups + loading_warpgroups(quantizes));
}

struct WgmmaCta {
  int bits, block_m;
  int x_bytes;         // of an element of x
  bool load_scales;    // every stage brings the weights' scales
  bool load_x_scales;  // and those of the rows of x
  bool x_has_zeros;
  bool has_zeros;  // the weights have zero points
  int stages, warpgroups;
  bool quantizes;  // x arrives as 16-bit floats, which the CTA quantises in their place
  int groups;      // of columns in a K tile, each with vectors of the weights

  bool load_x_zeros = x_has_zeros && load_x_scales;  // with each stage
  // Offsets in a stage: activations, then
  int weights = block_m * kKPerTile * (quantizes ? 2 : x_bytes);
  int x_scales = weights + warpgroups * k_tile_bytes(bits);
  int x_zeros = x_scales + (load_x_scales && !quantizes ? block_m * 4 : 0);
  // what prepare_x_rows() makes of both
  int x_factors = x_zeros + (load_x_zeros ? block_m : 0);
  int scales = x_factors + (load_x_scales ? block_m * 4 : 0) + (load_x_zeros ? block_m * 4 : 0);
  int zeros = scales + (load_scales ? groups * kRowsPerPanel * warpgroups * 4 : 0);
  // the swizzle repeats every 1024
  int stage_bytes =
      (zeros + (has_zeros ? groups * kRowsPerPanel * warpgroups : 0) + 1023) / 1024 * 1024;

  // Rows of x that a warpgroup stores through shared memory at a time, as floats and as lines of
  // 16-bit outputs. Stages of more than 176 rows of x leave little room, least with two-byte
  // elements.
  bool large = block_m > 176 && x_bytes == 2;
  int store_rows = large || quantizes ? 16 : block_m % 32 ? block_m / 2 : 32;
  int line_rows = block_m <= 176 ? block_m
                  : x_bytes == 2 ? ByWidth<int>(112, 64)[bits]
                                 : ByWidth<int>(block_m, block_m / 2)[bits];
  // The distance between rows of x, in floats; it avoids bank conflicts of the transposing writes.
  int store_stride = kRowsPerPanel + 4;
  int line_bytes = kRowsPerPanel * 2;
  int staged_floats = store_stride * 4 * store_rows, staged_lines = line_bytes * line_rows;
  int store_bytes = warpgroups * (staged_floats > staged_lines ? staged_floats : staged_lines);
  // Behind the staged outputs: zero points of x, 16 times where they are an operand (with group
  // scales), for each warpgroup, then scales of x, which are applied at the end, for each.
  // compute-sanitizer takes an operand with repeated rows for twice as long, so as much memory
  // follows the last one.
  int end_scales = x_bytes == 1 && !load_x_scales ? block_m : 0;
  int end_zeros = x_has_zeros ? end_scales * (load_scales ? 16 : 1) : 0;  // bytes
  int end_scale_bytes = warpgroups * end_scales * 4;
  int end_bytes =
      warpgroups * end_zeros + (end_scale_bytes > end_zeros ? end_scale_bytes : end_zeros);
  int shared_bytes = stages * stage_bytes + store_bytes + end_bytes + 256;

  constexpr WgmmaCta(int bits_, int block_m_, int x_bytes_, bool load_scales_, bool load_x_scales_,
                     bool x_has_zeros_, bool has_zeros_, int stages_, int warpgroups_,
                     bool quantizes_ = false, int groups_ = 1)
      : bits(bits_),
        block_m(block_m_),
        x_bytes(x_bytes_),
        load_scales(load_scales_),
        load_x_scales(load_x_scales_),
        x_has_zeros(x_has_zeros_),
        has_zeros(has_zeros_),
        stages(stages_),
        warpgroups(warpgroups_),
        quantizes(quantizes_),
        groups(groups_) {}
};

// ---- wgmma_fold16

struct Fold16Cta {
  int bits, block_m;
  int table_bytes;
  bool narrow;   // scales and offsets are of x's type
  bool grouped;  // rows of x and weights are experts'

  int stages = wgmma_fold16_tile(block_m, bits).stages;  // of weights
  int warpgroups = wgmma_fold16_tile(block_m, bits, narrow).block_n / (2 * kRowsPerPanel);
  int rows = kRowsPerPanel * warpgroups;

  // Outputs are stored through shared memory, line_rows rows of x at a time, each part after the
  // previous one has been stored; fp32 outputs store_rows at a time. Tiles of experts are stored in
  // one part: their main loops are often short.
  int store_rows = 16, store_stride = kRowsPerPanel + 4;
  int line_rows = grouped ? block_m : table_bytes || block_m < 64 ? 32 : 64;
  int line_bytes = kRowsPerPanel * 2;
  int lines = line_rows * line_bytes, floats = store_stride * 4 * store_rows;
  int store_bytes = warpgroups * (lines > floats ? lines : floats);

  // A K tile: codes, then for each group of 32 columns scales, offsets and zero points.
  int code_bytes = warpgroups * k_tile_bytes(bits), value_bytes = narrow ? 2 : 4;
  // Those of code books have scales alone, two where groups have 16 columns. Codes of 2 bits leave
  // room for two wide scales and offsets.
  bool offsets_of_16 = bits == 2 && !narrow;
  int group_bytes = table_bytes     ? rows * 2 * value_bytes
                    : offsets_of_16 ? rows * 4 * value_bytes
                                    : rows * (2 * value_bytes + 1);
  int chunk_bytes = code_bytes + kKPerTile / 32 * group_bytes;

  // Behind 16 pairs of barriers, for experts a tile for each chunk that may begin one, and a third
  // barrier for each panel of x.
  int pairs = 16, tiles = grouped ? stages : 0;
  int barrier_bytes = pairs * (grouped ? 24 : 16) + tiles * 16;
  // Panels of x: as many as shared memory and barriers allow. Each has 64 columns; or the 128 of a
  // K tile, since tiles of few rows are bound by the issue of instructions, and half as many waits
  // are fewer.
  int panel_steps = block_m <= 64 ? 2 : 1;
  int most_bytes = kHopperSharedBytes, step_bytes = block_m * 128,
      panel_bytes = step_bytes * panel_steps;
  int panels_that_fit =
      (most_bytes - barrier_bytes - store_bytes - table_bytes - stages * chunk_bytes - 1023) /
      panel_bytes;
  int most_panels = pairs - stages;
  int panels = panels_that_fit < most_panels ? panels_that_fit : most_panels;

  int first_chunk = panels * panel_bytes;
  int table = first_chunk + stages * chunk_bytes;
  int staging = (table + table_bytes + 1023) / 1024 * 1024;
  int shared_bytes = staging + store_bytes + barrier_bytes;

  constexpr Fold16Cta(int bits_, int block_m_, int table_bytes_, bool narrow_, bool grouped_)
      : bits(bits_),
        block_m(block_m_),
        table_bytes(table_bytes_),
        narrow(narrow_),
        grouped(grouped_) {}
};

}  // namespace cutlass_ops
