// Kernels for any CPU, with which the others are compared: a tile's codes are unpacked to bytes in
// the order of lane_column.
#include <algorithm>

#include "cpu/half_nibbles.h"
#include "cpu/quantize_block.h"
#include "formats/width.h"

namespace cutlass_ops {
namespace {

constexpr int kRowsOfTile = 8;  // of x that a tile is unpacked for

using Tile = int8_t[kRowsPerPanel][kKPerTile];  // centred codes, [group_row(row)][place]

template <int kBits>
void unpack_tile(uint8_t const* chunk, Tile& tile) {
  constexpr int kUnits = kKPerTile * kBits * kRowsPerBlock / 8 / kUnitBytes;
  for (int unit = 0; unit < kRowsPerPanel / kRowsPerBlock * kUnits; ++unit) {
    int const i = unit / kUnits, first = unit % kUnits * (kKPerTile / kUnits);
    for (int lane = 0; lane < 32; ++lane) {
      int const g = lane / 4, t = lane % 4;
      for (int byte = 0; byte < kLaneBytes; ++byte, ++chunk) {
        int const word = byte / 4, element = byte % 4;
        int const j = first % kLaneColumns / 16 + word / words_of_16_k(kBits);
        int const place =
            first / kLaneColumns * kLaneColumns + 32 * (t / 2) + 8 * element + 4 * (t % 2) + j;
        int8_t (*const rows)[kKPerTile] = tile + 8 * g + 2 * i + word % words_of_16_k(kBits);
        for (int row = 0; row < byte_rows(kBits); ++row)  // the code's sign is extended
          rows[row][place] = int8_t(int8_t(*chunk << (8 - kBits - kBits * row)) >> (8 - kBits));
      }
    }
  }
}

void unpack_tile(int bits, uint8_t const* chunk, Tile& tile) {
  with_nibbles_or_bytes(bits,
                        [&](auto width) { unpack_tile<decltype(width)::kBits>(chunk, tile); });
}

// Lanes to the sums of runs; 64 columns are two of 32, or four of 16. A lane is 4 * (t % 2) + j.
template <class Sum>
void reduce(Sum const (&lanes)[kLanes], int run, Sum (&sums)[kMostRuns]) {
  if (run == 16) {
    for (int j = 0; j < 4; ++j) sums[j] = lanes[j] + lanes[4 + j];
    return;
  }
  sums[0] = (lanes[0] + lanes[1]) + (lanes[4] + lanes[5]);
  sums[1] = (lanes[2] + lanes[3]) + (lanes[6] + lanes[7]);
  if (run >= kLaneColumns) sums[0] += sums[1];
}

// Writes the sums of a panel in group_row order to a row of the result, plus the bias. Sums that
// are not finite become NaN.
void store_panel(CpuProduct const& product, int panel, int row, float const* total) {
  int const n = product.weight.n, first = panel * kRowsPerPanel;
  int64_t const start = int64_t(row) * n + first;
  for (int i = 0; i < kRowsPerPanel && first + i < n; ++i) {
    float value = total[group_row(i)];
    if (!(value - value == 0.0f)) value = as_float(0x7fc00000);
    if (product.bias) value += product.bias[first + i];
    store_float(product.out, product.out_type, start + i, value);
  }
}

// x is floats (X is float) or centred integers.
template <class X, class Sum, class Wide>
void multiply_rows(CpuProduct const& p, X const* x, int panel, int m, int rows) {
  constexpr bool kFloats = sizeof(X) == 4;
  PackedWeight const& w = p.weight;
  int64_t const n_pad = p.vector_stride;
  int const bits = info(w.format).bits;
  uint8_t const* const chunks =
      w.codes + int64_t(panel - p.first_panel) * p.tiles * k_tile_bytes(bits);
  int const run = p.run(), span = std::max(run, kLaneColumns), middle = 1 << (bits - 1);
  Tile tile;
  float total[kRowsOfTile][kRowsPerPanel] = {}, offsets[kRowsOfTile][kRowsPerPanel] = {};
  Wide pending[kRowsOfTile][kRowsPerPanel] = {};  // sums of a scale block's runs
  for (int begin = 0; begin < p.tiles * kKPerTile && begin / p.block < p.blocks; begin += span) {
    if (begin % kKPerTile == 0) {
      unpack_tile(bits, chunks + begin / kKPerTile * int64_t(k_tile_bytes(bits)), tile);
    }
    for (int row = 0; row < kRowsPerPanel; ++row) {
      X values[kKPerTile];
      for (int place = 0; place < span; ++place) {
        int const code = tile[row][begin % kKPerTile + place];
        int const block = run < kLaneColumns
                              ? std::min(begin / run + run_of(place % 4, run), p.blocks - 1)
                              : begin / p.block;
        if (kFloats && p.codebook) {
          values[place] = X(p.codebook[code + middle]);
        } else {
          values[place] =
              X(code - (w.zeros
                            ? w.zeros[block / p.group_blocks * n_pad + panel * kRowsPerPanel + row]
                            : 0));
        }
      }
      for (int r = 0; r < rows; ++r) {
        X const* const factors = x + (m + r) * p.x_stride + begin;
        Sum lanes[kLanes] = {}, sums[kMostRuns];
        for (int place = 0; place < span; place += kLanes) {
          for (int lane = 0; lane < kLanes; ++lane)
            lanes[lane] += Sum(factors[place + lane]) * Sum(values[place + lane]);
        }
        reduce(lanes, run, sums);
        for (int part = 0; part < span / run; ++part) {
          int const end = begin + (part + 1) * run, block = (end - 1) / p.block;
          if (block >= p.blocks) break;
          pending[r][row] += sums[part];
          if (end % p.block != 0 && end != p.tiles * kKPerTile) continue;
          int64_t const x_block = int64_t(m + r) * p.blocks + block;
          int64_t const vector = block / p.group_blocks * n_pad + panel * kRowsPerPanel + row;
          float const scale = load_float(w.scales, w.scale_type, vector);
          total[r][row] += float(pending[r][row]) * (kFloats ? scale : p.scales[x_block] * scale);
          if (w.offsets)
            offsets[r][row] += p.offset_x[x_block] * load_float(w.offsets, w.offset_type, vector);
          pending[r][row] = 0;
        }
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    if (w.offsets) {
      for (int row = 0; row < kRowsPerPanel; ++row) total[r][row] += offsets[r][row];
    }
    store_panel(p, panel, m + r, total[r]);
  }
}

void multiply(CpuProduct const& p, int panel, int first, int count) {
  for (int m = first; m < first + count; m += kRowsOfTile) {
    int const rows = std::min(kRowsOfTile, first + count - m);
    if (p.has_floats) {
      multiply_rows<float, float, float>(p, p.x, panel, m, rows);
    } else {
      multiply_rows<int16_t, int32_t, int64_t>(p, p.centred, panel, m, rows);
    }
  }
}

void dequantize(CpuProduct const& p, int panel, int rows, void* out, DataType type) {
  PackedWeight const& w = p.weight;
  int const bits = info(w.format).bits, middle = 1 << (bits - 1);
  uint8_t const* const tiles =
      w.codes + int64_t(panel - p.first_panel) * p.tiles * k_tile_bytes(bits);
  Tile tile;
  for (int begin = 0; begin < w.k; begin += kKPerTile) {
    unpack_tile(bits, tiles + begin / kKPerTile * int64_t(k_tile_bytes(bits)), tile);
    for (int place = 0; place < kKPerTile; ++place) {
      int const column =
          begin + place / kLaneColumns * kLaneColumns + lane_column(place % kLaneColumns);
      if (column >= w.k) continue;
      for (int i = 0; i < rows; ++i) {
        int const row = group_row(i), code = tile[row][place];
        int64_t const vector = column / p.block * p.vector_stride + panel * kRowsPerPanel + row;
        float value =
            p.codebook ? p.codebook[code + middle] : float(code - (w.zeros ? w.zeros[vector] : 0));
        value *= load_float(w.scales, w.scale_type, vector);
        if (w.offsets) value += load_float(w.offsets, w.offset_type, vector);
        store_float(out, type, int64_t(i) * w.k + column, value);
      }
    }
  }
}

CpuKernels::IntegerOrder integer_order(CpuProduct const&) {
  return {kLaneColumns, kLaneColumns, true, lane_column};
}

}  // namespace

CpuKernels const kScalarKernels = {"scalar",   integer_order,  multiply,
                                   dequantize, quantize_block, expand_half_nibbles};

}  // namespace cutlass_ops
