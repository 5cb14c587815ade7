// Grid, threads and shared memory of each kernel: KernelSpec::shape. What a kernel's Config takes
// of shared memory is computed here once more, for builds without CUDA, and the launchers assert
// that both agree.
#pragma once

#include "cutlass_ops/layout.h"
#include "dispatch/decode_shape.h"
#include "dispatch/spec.h"
#include "kernels/kernels.h"

namespace cutlass_ops {

// ---- shared memory of a CTA, in bytes

// `table`: bytes of the look-up table of a format, whose weights then have neither zero points nor
// offsets.
constexpr int mma_gemm_a16_shared_bytes(int bits, int block_m, bool general, int table,
                                        int stages) {
  constexpr int kRows = 128;
  int const groups = general ? 4 : 1, sums = block_m * (kRows + 4) * 4;
  int const stage = 2 * k_tile_bytes(bits) + block_m * kKPerTile * 2 + groups * kRows * 4 +
                    (table ? 0 : groups * kRows) + (general && !table ? groups * kRows * 4 : 0);
  return (stages * stage > sums ? stages * stage : sums) + table;
}

// `zeros`: room for zero points; `general`: several groups in a tile of K, and offsets.
constexpr int mma_gemm_a8_shared_bytes(int bits, int block_m, bool zeros, bool general,
                                       int stages) {
  constexpr int kRows = 128;
  int const groups = general ? 4 : 1, sums = block_m * (kRows + 4) * 4;
  int const vectors = groups * (block_m * 4 + kRows * 4 + (zeros ? kRows + block_m : 0) +
                                (general ? kRows * 4 : 0));
  int const stage = (2 * k_tile_bytes(bits) + block_m * kKPerTile + vectors + 127) / 128 * 128;
  return stages * stage > sums ? stages * stage : sums;
}

constexpr int book_gemm_a16_shared_bytes(int block_m, int table) {
  return 2 * table - 1024 + (block_m == 4 ? 8 * 32 * 32 : 16 * 32 * 2 * block_m) * kKPerTile / 32;
}

// hopper::TileConfig's, of the kernels that have it.
struct WgmmaStage {
  int bits, block_m, x_bytes;  // x_bytes: of an element of x
  bool scales;                 // every stage brings the weights' scales
  bool x_scales;               // and those of the rows of x
  bool x_zeros;                // x has zero points
  bool zeros;                  // the weights have
  int stages, warpgroups;
};
constexpr int wgmma_gemm_shared_bytes(WgmmaStage const& s) {
  int const n = kRowsPerPanel * s.warpgroups, m = s.block_m;
  bool const zeros_in_stage = s.x_zeros && s.x_scales;
  int const stage = m * kKPerTile * s.x_bytes + s.warpgroups * k_tile_bytes(s.bits) +
                    (s.x_scales ? m * 8 : 0) + (zeros_in_stage ? m * 5 : 0) +
                    (s.scales ? n * 4 : 0) + (s.zeros ? n : 0);
  // Results leave through shared memory, as floats or as lines of 16-bit outputs.
  bool const many = m > 176 && s.x_bytes == 2;
  int const floats = (kRowsPerPanel + 4) * 4 * (many ? 16 : m % 32 ? m / 2 : 32);
  int const lines = kRowsPerPanel * 2 * wgmma_gemm_line_rows(s.bits, m, s.x_bytes);
  int const store = s.warpgroups * (floats > lines ? floats : lines);
  int const end_scales = s.x_bytes == 1 && !s.x_scales ? m : 0,
            end_zeros = s.x_zeros ? end_scales * (s.scales ? 16 : 1) : 0;
  int const end_scale_bytes = s.warpgroups * end_scales * 4;
  int const end =
      s.warpgroups * end_zeros + (end_scale_bytes > end_zeros ? end_scale_bytes : end_zeros);
  return s.stages * ((stage + 1023) / 1024 * 1024) + store + end + 256;
}

// `narrow`: scales and offsets are of x's type.
constexpr int wgmma_fold16_shared_bytes(int bits, int block_m, int table, bool narrow) {
  Tile const at = wgmma_fold16_tile(block_m, bits);
  int const warpgroups = at.block_n / 128, n = kRowsPerPanel * warpgroups, value = narrow ? 2 : 4;
  int const lines = (table || block_m < 64 ? 32 : 64) * kRowsPerPanel * 2,
            floats = (kRowsPerPanel + 4) * 4 * 16;
  int const store = warpgroups * (lines > floats ? lines : floats);
  // Four groups of 32 columns, each with its vectors, and the codes.
  int const chunk = warpgroups * k_tile_bytes(bits) + 4 * (table ? n * value : n * (2 * value + 1));
  int const panel = block_m * 128,
            fit = (at.shared_bytes - 256 - store - table - at.stages * chunk - 1023) / panel;
  int const panels = fit < 16 - at.stages ? fit : 16 - at.stages;
  return (panels * panel + at.stages * chunk + table + 1023) / 1024 * 1024 + store + 256;
}

// ---- KernelSpec::shape

bool shape_mma_gemm_a16(GemmProblem const& problem, Device const& device,
                        Candidate const& candidate, Plan* plan);
bool shape_mma_gemm_a8(GemmProblem const& problem, Device const& device, Candidate const& candidate,
                       Plan* plan);
bool shape_book_gemm_a16(GemmProblem const& problem, Device const& device,
                         Candidate const& candidate, Plan* plan);
bool shape_wgmma_gemm_a8(GemmProblem const& problem, Device const& device,
                         Candidate const& candidate, Plan* plan);
bool shape_wgmma_gemm_a16(GemmProblem const& problem, Device const& device,
                          Candidate const& candidate, Plan* plan);
bool shape_wgmma_fold16(GemmProblem const& problem, Device const& device,
                        Candidate const& candidate, Plan* plan);
bool shape_decode_gemm(GemmProblem const& problem, Device const& device, Candidate const& candidate,
                       Plan* plan);
bool shape_wgmma_decode(GemmProblem const& problem, Device const& device,
                        Candidate const& candidate, Plan* plan);
bool shape_wgmma_decode_fold16(GemmProblem const& problem, Device const& device,
                               Candidate const& candidate, Plan* plan);

}  // namespace cutlass_ops
