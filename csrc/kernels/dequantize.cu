// Packed codes -> floats [N][K], for inspection, and for operators that need the matrix itself.
//
// A warp takes 16 rows x 256 columns (128 at 8 bits), and issues the loads of all their codes at
// once; where that would leave SMs without warps, it takes a quarter of those columns. A lane's
// record holds pairs of columns of two rows; the four lanes of those rows exchange words, so that
// each has eight neighbours of a row for a 16-byte store, and together whole lines. The arithmetic
// is the reference's: (q - z) * s, c * s + o or value(q) * s, each operation rounded to fp32 by
// itself, then one rounding to the output's type.
#include "device/launch.cuh"
#include "device/tile_copies.cuh"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"
#include "formats/decode.cuh"
#include "formats/formats.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 256;
constexpr int kUnits = 4;  // a warp, at most

struct Params {
  DequantizeProblem problem;
  VectorRows rows;  // of the group vectors
  int log_group;    // of the columns a row covers in a tile of K
  int k_tiles;
  int n_pad;           // of the whole weight, as group vectors have it
  int units;           // of a warp
  int columns;         // warps side by side
  bool vector_stores;  // rows of the output start on 16 bytes, and columns keep their order
  int tap_columns;     // of a tap in the weight; 0: the output has all columns
  int out_columns;     // of a tap in the output
};

// The 16-byte record of a lane, in words that each hold pairs of two times eight neighbouring
// columns, becomes the lane's share of four records: word t has pair t of its eight columns. `t`:
// the lane's place among the four.
__device__ __forceinline__ void trade_words(uint32_t (&words)[4], int t) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    bool upper = t & distance;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      uint32_t received = __shfl_xor_sync(~0u, upper ? words[i] : words[i + distance], distance);
      words[i] = upper ? received : words[i];
      words[i + distance] = upper ? words[i + distance] : received;
    }
  }
}

// Eight neighbours; index is a multiple of 8.
__device__ __forceinline__ void store_eight(void* out, DataType type, int64_t index,
                                            float const (&v)[8]) {
  if (type == DataType::kFloat32) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(out) + index);
    __stcs(to, make_float4(v[0], v[1], v[2], v[3]));
    __stcs(to + 1, make_float4(v[4], v[5], v[6], v[7]));
    return;
  }
  uint32_t words[4];
  if (type == DataType::kFloat16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack_pair<__half>(v[2 * i], v[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack_pair<__nv_bfloat16>(v[2 * i], v[2 * i + 1]);
  }
  __stcs(reinterpret_cast<uint4*>(static_cast<uint16_t*>(out) + index),
         make_uint4(words[0], words[1], words[2], words[3]));
}

// The scale and offset of a row's codes in a group.
struct Factors {
  float scale, offset;
  int zero;

  __device__ __forceinline__ Factors(Params const& p, int n, int k) {
    PackedWeight const& w = p.problem.weight;
    int group = p.rows.first(k / kKPerTile) + (k % kKPerTile >> p.log_group);
    int64_t index =
        int64_t(group) * p.n_pad + n / kRowsPerPanel * kRowsPerPanel + group_row(n % kRowsPerPanel);
    scale = load_float(w.scales, w.scale_type, index);
    offset = w.offsets ? load_float(w.offsets, w.offset_type, index) : 0.0f;
    zero = w.zeros ? w.zeros[index] : 0;
  }
};

// Eight codes of a row, centred, from column k on, that go to `row`, where the row begins in the
// output, plus `to`; `count` of them are wanted.
template <class Format>
__device__ __forceinline__ void finish(Params const& p, float const* book, Factors const& factors,
                                       int64_t row, int k, int to, int count,
                                       int const (&codes)[8]) {
  PackedWeight const& w = p.problem.weight;
  float v[8];
#pragma unroll
  for (int e = 0; e < 8; ++e)
    v[e] = __fmul_rn(Format::value(codes[e], factors.zero, book), factors.scale);
  if (Format::kTableBytes == 0 && w.offsets) {
#pragma unroll
    for (float& x : v) x = __fadd_rn(x, factors.offset);
  }
  if (p.vector_stores) {
    store_eight(p.problem.out, p.problem.out_type, row + to, v);
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (e < count)
        store_float(p.problem.out, p.problem.out_type, row + (w.perm ? w.perm[k + e] : to + e),
                    v[e]);
  }
}

template <class Format>
__global__ void __launch_bounds__(kThreads, 4) dequantize_units(__grid_constant__ Params const p) {
  // of 16 rows
  constexpr int kBits = Format::kBits, kTileUnits = kBits / 2,
                kUnitColumns = kKPerTile / kTileUnits, kWords = words_of_16_k(kBits);
  __shared__ float book[16];
  PackedWeight const& w = p.problem.weight;
  int warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, g = threadIdx.x % 32 / 4,
      t = threadIdx.x % 4;
  int row0 = warp / p.columns * kRowsPerBlock, first = warp % p.columns * p.units;  // unit along K
  uint8_t const* from = w.codes + int64_t(row0 / kRowsPerPanel) * p.k_tiles * k_tile_bytes(kBits) +
                        row0 % kRowsPerPanel / kRowsPerBlock * kTileUnits * kUnitBytes +
                        threadIdx.x % 32 * kLaneBytes;
  uint4 records[kUnits];
  bool there = row0 < w.n;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    int unit = first + i;
    if (there && i < p.units && unit < p.k_tiles * kTileUnits)
      records[i] = __ldcs(
          reinterpret_cast<uint4 const*>(from + int64_t(unit / kTileUnits) * k_tile_bytes(kBits) +
                                         unit % kTileUnits * kUnitBytes));
  }
  if (Format::kTableBytes > 0) {
    // by the centred code's four bits
    if (threadIdx.x < 16) book[threadIdx.x] = w.codebook[threadIdx.x ^ 8];
    __syncthreads();
  }
  pdl_wait_and_launch_dependents();
  if (!there) return;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    int column = (first + i) * kUnitColumns;
    if (i >= p.units || column >= w.k) break;
    uint4 const& q = records[i];
    // Words for eight columns each: of two rows, or, at 4 bits, of both rows and 32
    // columns further, at 2 bits 64 and 96, too.
    uint32_t const stored[4] = {q.x, q.y, q.z, q.w};
    uint32_t const a[2] = {stored[0], stored[kWords]}, b[2] = {stored[3 - kWords], stored[3]};
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      words[j] = decode::permute_bytes(a[j / 2], b[j / 2], j % 2 ? 0x7531u : 0x6420u);
    trade_words(words, t);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // row g or g + 8
      int n = row0 + g + 8 * half;
      if (n >= w.n) break;
      int64_t row = int64_t(n) * p.out_columns;
      Factors factors(p, n, column + 8 * t);
#pragma unroll
      for (int further = 0; further < 8 / kBits; ++further) {
        // of 2-bit codes the third and fourth are in the upper bits of nibbles
        int low_shift = further % 2 * 16 + further / 2 * 2 + half * (kWords == 2 ? 16 : 4),
            codes[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          int shift = low_shift + e % 2 * 8;
          codes[e] = int(words[e / 2] << (32 - kBits - shift)) >> (32 - kBits);
        }
        int k = column + further * 32 + 8 * t;
        if (further && p.log_group <= (further == 2 ? 6 : 5)) factors = Factors(p, n, k);
        if (k >= w.k) continue;
        int to = k, count = w.k - k;
        if (p.tap_columns) {
          int const tap = k / p.tap_columns, channel = k - tap * p.tap_columns;
          to = tap * p.problem.tap_channels + channel, count = p.problem.tap_channels - channel;
        }
        if (count > 0) finish<Format>(p, book, factors, row, k, to, count, codes);
      }
    }
  }
}

}  // namespace

Status launch_dequantize(DequantizeProblem const& problem, Stream stream) {
  PackedWeight const& whole = problem.weight;
  int const n_pad = int(padded_rows(whole.n)), k_tiles = int(padded_k(whole.k) / kKPerTile),
            first = problem.first_row;
  DequantizeProblem panel = problem;
  PackedWeight& w = panel.weight;  // the rows that are wanted
  w.codes += int64_t(first / kRowsPerPanel) * k_tiles * k_tile_bytes(code_bits(w));
  w.scales = static_cast<uint8_t const*>(w.scales) + int64_t(first) * bytes_of(w.scale_type);
  if (w.zeros) w.zeros += first;
  if (w.offsets)
    w.offsets = static_cast<uint8_t const*>(w.offsets) + int64_t(first) * bytes_of(w.offset_type);
  w.n = problem.rows < 0 ? whole.n - first : problem.rows;
  int const tap_columns = problem.tap_channels ? int(padded_k(problem.tap_channels)) : 0;
  int const out_columns = tap_columns ? w.k / tap_columns * problem.tap_channels : w.k;
  bool aligned = reinterpret_cast<uintptr_t>(problem.out) % 16 == 0 &&
                 (tap_columns ? problem.tap_channels : w.k) % 8 == 0;
  VectorRows rows(w.group_size);
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  int64_t const row_blocks = padded_rows(w.n) / kRowsPerBlock;
  int const all_units = k_tiles * code_bits(w) / 2;
  // Four warps an SM and scheduler hide the latency of scales, which a unit waits for.
  bool const few = row_blocks * all_units < int64_t(kUnits) * 16 * device.multiprocessors;
  int const units = few ? 1 : kUnits, columns = int(ceil_div(all_units, units));
  Params p{panel,
           rows,
           rows.count == 8   ? 4
           : rows.count == 4 ? 5
           : rows.count == 2 ? 6
                             : 7,
           k_tiles,
           n_pad,
           units,
           columns,
           aligned && !w.perm,
           tap_columns,
           out_columns};
  dim3 grid(unsigned(ceil_div(columns * row_blocks, kThreads / 32)));
  return visit(w.format, [&](auto format) {
    return launch(dequantize_units<decltype(format)>, grid, kThreads, 0, stream, p);
  });
}

}  // namespace cutlass_ops
