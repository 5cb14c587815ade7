// A few tokens x int4 or int8 weights, as while a model decodes: W4A16, W8A16, W4A8 and W8A8 for up to 16 tokens, sm_90 and later.
//
// The time is that of reading the weights once, so everything else is arranged around their stream:
//
//   cluster   whole slabs of 64 output features; its blocks share K in equal slices, so that a block's x is small and stays in shared memory
//   warp      an equal run of its block's pieces (64 features x 128 columns at 4 bits, 64 at 8), which follow one another in memory. Every
//             lane copies its own 16-byte pieces to a ring of stages of its warp's (cp.async) and reads them back: no barrier. The first stages
//             are asked for before the kernel waits for its predecessor, and the next launch's blocks before this one ends
//   multiply  mma.sync m16n8k16, weights as operand A, x by ldmatrix as operand B
//   promote   sum = fma(step's sum, weight scale, sum), as in mma_gemm_a16.cu
//   end       sums of warps that share a slab go to the shared memory of the cluster's block that ends with those features, and are added
//             there, always in the order of K: no scratch memory, no atomics
//
// Codes become fp16 by bit operations alone: subnormal numbers (decode.cuh) with an excess that the sums' start takes away. That takes the sums of
// x over a step, as zero points and offsets do; the tensor cores make them once a block.
//
// int8 activations take the same way. Blocks quantise x themselves while they bring it into shared memory, with the quantiser's arithmetic
// (quantize.cuh), and keep the codes minus their zero point as fp16, which holds them exactly; products and their sums over a step are integers
// below 2^24, exact in fp32.
#include <cute/arch/cluster_sm90.hpp>

#include "cutlass_ops/layout.h"
#include "decode_shape.h"
#include "device/decode.cuh"
#include "device/epilogue.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/quantize.cuh"
#include "device/tile.cuh"
#include "kernels/kernels.h"

namespace cutlass_ops {
namespace {

constexpr int kWarps = kDecodeWarps, kThreads = 32 * kWarps;
constexpr int kRowBlocks = kRowsPerSlab / 16;

// kTokens: 8 or 16. kShortGroups: groups of 32 or 64, steps of 32 columns; without it a step is a piece. kInt8: activations are integers with scales.
template <class Element_, int kBits_, int kTokens_, bool kShortGroups_, bool kInt8_>
struct Config {
  using Element = Element_;
  static constexpr Operand kOperand = std::is_same_v<Element, __half> ? Operand::kHalf : Operand::kBFloat16;
  static constexpr int kBits = kBits_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kTokenBlocks = kTokens / 8;
  static constexpr bool kShortGroups = kShortGroups_;
  static constexpr bool kInt8 = kInt8_;
  static constexpr int kStages = decode_stages(kTokens);
  // Two blocks a multiprocessor, of this launch and the next, where 128 registers a thread are enough.
  static constexpr int kResident = kTokens == 8 && !kShortGroups && !kInt8 ? 2 : 1;

  static constexpr int kPieceColumns = 512 / kBits;
  static constexpr int kTilePieces = kKPerTile / kPieceColumns;
  static constexpr int kRowBlockBytes = chunk_bytes(kBits) / kRowBlocks;
  static constexpr int kStepColumns = kShortGroups ? 32 : kPieceColumns;
  static constexpr int kScales = 2 * kRowBlocks * kUnitBytes;  // of a stage: behind the codes
};

// What decoders leave to the caller.
template <class Decode, class = void>
struct Excess {
  static constexpr float kExcess = 0.0f, kUnit = 1.0f, kUpper = 1.0f;
};
template <class Decode>
struct Excess<Decode, std::enable_if_t<(Decode::kExcess > 0)>> {
  static constexpr float kExcess = Decode::kExcess, kUnit = Decode::kUnit, kUpper = Decode::kUpper;
};
template <int kBits, class Element>
using Decoder = std::conditional_t<std::is_same_v<Element, __half>,
                                   std::conditional_t<kBits == 4, decode::Int4Subnormal, decode::Int8Subnormal>,
                                   decode::ToFloat<kBits, Element>>;

enum class Source { kFloats, kBlocks, kTokens, kCodes };

// Every block of a cluster ends with an equal share of each slab's features; what the cluster's warps have of them lies in its slots:
// [rank][slot][token][features], floats.
struct SlotPlace {
  int features, token_stride, slot_stride, rank_stride;
  SlotPlace(DecodeShape const& shape, int m)
      : features(kRowsPerSlab / shape.cluster),
        token_stride(features + 4),
        slot_stride(slot_floats(features, m)),
        rank_stride(slot_stride * (shape.slabs + kWarps - 1)) {}
};

struct Params {
  PackedWeight weight;
  FloatRows x;
  QuantizedActivations quantized;
  Source source;
  bool symmetric;
  EpilogueParams epilogue;
  VectorRows weight_rows;
  int k_tiles, n_pad, slabs, cluster, clusters, log_cluster;
  int block;  // columns that share an activation scale
  int log_scale_bytes, log_offset_bytes;
  DecodeMemory memory;
  SlotPlace place;
  uint32_t token_reciprocal;  // ceil(2^32 / m), or 0 if m is 1
  bool plain_epilogue;        // sums become outputs of type Element, and no more
  bool async_x, step_sums;    // x can be copied as it is; the sums of x over a step are needed
};

__device__ __forceinline__ void copy_weights(void* shared, void const* source) {
  uint32_t to = cute::cast_smem_ptr_to_uint(shared);
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(source) : "memory");
}

// A block's part of the product: slabs of output features x tiles of K.
struct Part {
  int first_slab, slabs, first_tile, tiles;

  __device__ __forceinline__ Part(Params const& p, int cluster_index, int rank) {
    first_slab = p.slabs * cluster_index / p.clusters;
    slabs = p.slabs * (cluster_index + 1) / p.clusters - first_slab;
    first_tile = p.k_tiles * rank / p.cluster;
    tiles = p.k_tiles * (rank + 1) / p.cluster - first_tile;
  }
};

// The warps that share a slab are neighbours. Warp w's part of slab j is in slot j + w: along the run of all pieces j or w grows.
template <class C>
struct Slots {
  int pieces, slab_pieces;
  __device__ __forceinline__ explicit Slots(Part const& part)
      : pieces(part.slabs * part.tiles * C::kTilePieces), slab_pieces(part.tiles * C::kTilePieces) {}
  __device__ __forceinline__ int begin(int warp) const { return pieces * warp / kWarps; }
  // Not of an empty block, of which there are some where the slabs are fewer than the clusters.
  __device__ __forceinline__ int warp_of(int piece) const { return ((piece + 1) * kWarps - 1) / pieces; }
};

// Where a warp is among its pieces.
struct Cursor {
  int slab;   // of the block's
  int piece;  // of the slab's
};

// Brings pieces to the warp's ring.
template <class C>
struct Feed {
  uint8_t const* codes;
  uint8_t* ring;
  Cursor at;
  int left, slab_pieces, first_tile, first_slab;
  int stage = 0;  // to fill next, and the oldest that is full

  __device__ __forceinline__ Feed(Params const& p, Part const& part, Slots<C> const& slots, int begin, int end, uint8_t* ring_)
      : ring(ring_),
        at{begin / slots.slab_pieces, begin % slots.slab_pieces},
        left(end - begin),
        slab_pieces(slots.slab_pieces),
        first_tile(part.first_tile),
        first_slab(part.first_slab) {
    find(p);
  }

  // The codes of the piece at `at`.
  __device__ __forceinline__ void find(Params const& p) {
    codes = p.weight.codes +
            (int64_t(first_slab + at.slab) * p.k_tiles + first_tile + at.piece / C::kTilePieces) * chunk_bytes(C::kBits) +
            at.piece % C::kTilePieces * (2 * kUnitBytes) + threadIdx.x % 32 * kLaneBytes;
  }

  // The rows of a group vector that belong to a piece, by 16 bytes a lane. A vector has less than 2^32 bytes (decode_shape).
  __device__ __forceinline__ void vector(Params const& p, uint8_t* to, void const* from, int row, int rows,
                                         int log_bytes) const {
    int log_pieces = 2 + log_bytes, slab_begin = (first_slab + at.slab) * kRowsPerSlab;
    auto copy = [&](int i) {
      uint32_t index = uint32_t((row + (i >> log_pieces)) * p.n_pad + slab_begin);
      copy_async_16(to + i * 16,
                    static_cast<uint8_t const*>(from) + ((index << log_bytes) + uint32_t(i & ((1 << log_pieces) - 1)) * 16));
    };
    int i = threadIdx.x % 32;
    if constexpr (C::kShortGroups) {
      if (i < rows << log_pieces) copy(i);
      if (i + 32 < rows << log_pieces) copy(i + 32);
    } else if (i < 4 << log_bytes) {
      copy_async_16(to + i * 16, static_cast<uint8_t const*>(from) +
                                     ((uint32_t(row * p.n_pad + slab_begin) << log_bytes) + uint32_t(i) * 16));
    }
  }

  // Ask for the next piece, if there is one: half of its codes at a time (two calls), then the rest.
  __device__ __forceinline__ void copy_codes(Params const& p, int half) const {
    if (left <= 0) return;
    uint8_t* to = ring + stage * p.memory.stage + half * kUnitBytes + threadIdx.x % 32 * kLaneBytes;
#pragma unroll
    for (int rb = 0; rb < kRowBlocks; ++rb)
      copy_weights(to + rb * 2 * kUnitBytes, codes + rb * C::kRowBlockBytes + half * kUnitBytes);
  }
  __device__ __forceinline__ void copy_rest(Params const& p) {
    if (left > 0) {
      --left;
      uint8_t* to = ring + stage * p.memory.stage;
      PackedWeight const& w = p.weight;
      int row = p.weight_rows.first(first_tile + at.piece / C::kTilePieces), rows = 1;
      if constexpr (C::kShortGroups) {
        rows = p.weight_rows.count / C::kTilePieces;
        row += at.piece % C::kTilePieces * rows;
      }
      vector(p, to + C::kScales, w.scales, row, rows, p.log_scale_bytes);
      if (w.zeros) vector(p, to + p.memory.zeros, w.zeros, row, rows, 0);
      if (w.offsets) vector(p, to + p.memory.offsets, w.offsets, row, rows, p.log_offset_bytes);
      if (C::kTilePieces == 1) {
        codes += chunk_bytes(C::kBits);
      } else {
        codes += at.piece % 2 == 0 ? 2 * kUnitBytes : chunk_bytes(C::kBits) - 2 * kUnitBytes;
      }
      if (++at.piece == slab_pieces) {
        at.piece = 0, ++at.slab;
        find(p);
      }
    }
    commit_copies();
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }
};

// ---- x into shared memory: rows of Element, a token each

// The block's slice of x by runs of 512 columns, a warp's work at a time, 16 a lane. Made before the kernel waits.
struct Runs {
  int columns, runs, turn;
  uint32_t reciprocal, row_reciprocal;
  __device__ __forceinline__ Runs(Params const& p, Part const& part, int cluster_index)
      : columns(part.tiles * kKPerTile),
        runs((columns + 511) / 512),
        turn(p.epilogue.m * (columns / 8) * cluster_index / p.clusters),
        reciprocal(~0u / uint32_t(runs) + 1),
        row_reciprocal(~0u / uint32_t(columns / 8) + 1) {}
};

// work(token, column, inside, load(token, column)) for every 16 columns; `column` counts from the slice's first. Whole warps, so that lanes can share a
// block of columns; kBatch loads are under way at a time.
template <class C, int kBatch, class Load, class Work>
__device__ __forceinline__ void for_columns(Params const& p, Runs const& runs, Load load, Work work) {
  int count = p.epilogue.m * runs.runs;
#pragma unroll 1
  for (int first = threadIdx.x / 32; first < count; first += kBatch * kWarps) {
    decltype(load(0, 0)) loaded[kBatch] = {};
    int token[kBatch], column[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      int i = first + j * kWarps;
      token[j] = runs.runs == 1 ? i : int(__umulhi(uint32_t(i), runs.reciprocal));
      column[j] = (i - token[j] * runs.runs) * 512 + threadIdx.x % 32 * kLaneColumns;
      if (i < count && column[j] < runs.columns) loaded[j] = load(token[j], column[j]);
    }
#pragma unroll 1
    for (int j = 0; j < kBatch; ++j) {
      if (first + j * kWarps < count) work(token[0], column[0], column[0] < runs.columns, loaded[0]);
#pragma unroll
      for (int i = 0; i + 1 < kBatch; ++i) token[i] = token[i + 1], column[i] = column[i + 1], loaded[i] = loaded[i + 1];
    }
  }
}

// 16 columns as they are, if they are 16-bit floats and can be loaded at once, or as floats.
struct Raw {
  uint4 v[2];
};
struct Columns {
  float v[kLaneColumns];
};

constexpr int kBatch = 2;

// work(token, column, inside, float[16]) for x as floats.
template <class C, class Work>
__device__ __forceinline__ void for_floats(Params const& p, Runs const& runs, int first, Work work) {
  if (p.x.vector_loads && p.x.x_type != DataType::kFloat32) {
    for_columns<C, kBatch>(
        p, runs,
        [&](int token, int column) {
          uint4 const* source =
              reinterpret_cast<uint4 const*>(static_cast<uint16_t const*>(p.x.x) + token * p.x.x_stride + first + column);
          Raw raw = {};
          if (first + column < p.x.k) raw.v[0] = source[0], raw.v[1] = source[1];
          return raw;
        },
        [&](int token, int column, bool inside, Raw const& raw) {
          float v[kLaneColumns];
          uint32_t const words[8] = {raw.v[0].x, raw.v[0].y, raw.v[0].z, raw.v[0].w,
                                     raw.v[1].x, raw.v[1].y, raw.v[1].z, raw.v[1].w};
          to_floats(words, p.x.x_type, v);
          work(token, column, inside, v);
        });
  } else {
    for_columns<C, 1>(
        p, runs,
        [&](int token, int column) {
          Columns columns;
          load_columns(p.x, token, first + column, columns.v);
          return columns;
        },
        [&](int token, int column, bool inside, Columns& columns) { work(token, column, inside, columns.v); });
  }
}

template <class Element>
__device__ __forceinline__ uint32_t pair_bits(float low, float high) {
  if constexpr (std::is_same_v<Element, __half>) {
    __half2 v = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t const&>(v);
  } else {
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t const&>(v);
  }
}

// 16 integers and their scale.
template <class C>
__device__ __forceinline__ void stage_codes(uint8_t* shared, Params const& p, int token, int column,
                                            float const (&v)[kLaneColumns], float scale) {
  uint32_t words[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) words[i] = pair_bits<__half>(v[2 * i], v[2 * i + 1]);
  uint4* to = reinterpret_cast<uint4*>(shared + p.memory.x + token * p.memory.token + column * 2);
  to[0] = make_uint4(words[0], words[1], words[2], words[3]);
  to[1] = make_uint4(words[4], words[5], words[6], words[7]);
  if (column % C::kStepColumns == 0)
    reinterpret_cast<float*>(shared + p.memory.scales)[column / C::kStepColumns * C::kTokens + token] = scale;
}

template <bool kSymmetric>
__device__ __forceinline__ void quantize(Quantizer<kSymmetric> const& quantizer, float (&v)[kLaneColumns]) {
#pragma unroll
  for (float& x : v) x = float(int8_t(quantizer.code(x))) - quantizer.zero;
}

// Largest absolute values by integer comparison: NaN is larger than all.
__device__ __forceinline__ uint32_t ordered(float v) { return __float_as_uint(fabsf(v)); }

template <class C, bool kSymmetric>
__device__ __forceinline__ void stage_quantized(uint8_t* shared, Params const& p, int first, Runs const& runs,
                                                uint32_t (&ranges)[2][C::kTokens]) {
  if (p.source == Source::kTokens) {
    for_floats<C>(p, runs, first, [&](int token, int, bool, float const(&v)[kLaneColumns]) {
      Range<kSymmetric> range{};
#pragma unroll
      for (float x : v) range.add(x);
      range.share(32);
      if (threadIdx.x % 32 == 0) {
        atomicMax(&ranges[1][token], ordered(range.high));
        if (!kSymmetric) atomicMax(&ranges[0][token], ordered(range.low));
      }
    });
    // The row's range is that of all slices.
    cute::cluster_arrive();
    cute::cluster_wait();
  }
  for_floats<C>(p, runs, first, [&](int token, int column, bool inside, float (&v)[kLaneColumns]) {
    Range<kSymmetric> range{};
    if (p.source == Source::kTokens) {
      uint32_t low = 0, high = 0;
      for (int rank = 0; rank < p.cluster; ++rank) {
        auto remote = [&](uint32_t const& here) {
          uint32_t value, address = cute::set_block_rank(cute::cast_smem_ptr_to_uint(&here), rank);
          asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
          return value;
        };
        high = max(high, remote(ranges[1][token]));
        if (!kSymmetric) low = max(low, remote(ranges[0][token]));
      }
      range = Range<kSymmetric>{-__uint_as_float(low), __uint_as_float(high)};
    } else {
#pragma unroll
      for (float x : v) range.add(x);
      range.share(p.block / kLaneColumns);
    }
    Quantizer<kSymmetric> quantizer(range);
    quantize(quantizer, v);
    if (inside) stage_codes<C>(shared, p, token, column, v, quantizer.scale);
  });
}

template <class C>
__device__ __forceinline__ void stage_tokens(uint8_t* shared, Params const& p, Part const& part, Runs const& runs,
                                             uint32_t (&ranges)[2][C::kTokens]) {
  int first = part.first_tile * kKPerTile, m = p.epilogue.m;
  if constexpr (!C::kInt8) {
    uint16_t const* x = static_cast<uint16_t const*>(p.x.x);
    if (p.async_x) {
      // All blocks want the same few lines at the same time: each begins elsewhere.
      int row = runs.columns / 8, count = m * row, at = runs.turn + threadIdx.x;
#pragma unroll 4
      for (int i = threadIdx.x; i < count; i += kThreads, at += kThreads) {
        if (at >= count) at -= count;
        int token = m == 1 ? 0 : int(__umulhi(uint32_t(at), runs.row_reciprocal)), k = (at - token * row) * 8;
        copy_async_16_or_zero(shared + p.memory.x + token * p.memory.token + k * 2, x + token * p.x.x_stride + first + k,
                              first + k < p.x.k);
      }
      commit_copies();
      wait_copies<0>();
      return;
    }
    for (int token = 0; token < m; ++token, x += p.x.x_stride) {
#pragma unroll 4
      for (int k = threadIdx.x; k < runs.columns; k += kThreads) {
        bool inside = first + k < p.x.k;
        int column = inside && p.x.perm ? __ldg(p.x.perm + first + k) : first + k;
        *reinterpret_cast<uint16_t*>(shared + p.memory.x + token * p.memory.token + k * 2) = inside ? x[column] : uint16_t(0);
      }
    }
  } else if (p.source != Source::kCodes) {
    if (p.symmetric) {
      stage_quantized<C, true>(shared, p, first, runs, ranges);
    } else {
      stage_quantized<C, false>(shared, p, first, runs, ranges);
    }
  } else {
    QuantizedActivations const& q = p.quantized;
    auto load = [&](int token, int column) {
      return *reinterpret_cast<uint4 const*>(q.codes + int64_t(token) * p.k_tiles * kKPerTile + first + column);
    };
    for_columns<C, kBatch>(p, runs, load, [&](int token, int column, bool inside, uint4 const& codes) {
      if (!inside) return;
      int64_t index = (q.block == -1 ? 0 : int64_t((first + column) / q.block) * q.stride) + token;
      int zero = q.zeros ? q.zeros[index] : 0;
      uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
      float v[kLaneColumns];
#pragma unroll
      for (int k = 0; k < kLaneColumns; ++k) {
        int position = activation_position(k);
        v[k] = float(int(int8_t(words[position / 4] >> position % 4 * 8)) - zero);
      }
      stage_codes<C>(shared, p, token, column, v, q.scales[index]);
    });
  }
}

// Operand B of eight tokens and 32 columns. Tokens that are not there repeat the last: their sums are not stored.
template <class C>
__device__ __forceinline__ uint32_t token_row(uint8_t const* shared, Params const& p, int token_block) {
  int lane = threadIdx.x % 32, token = min(token_block * 8 + lane % 8, p.epilogue.m - 1);
  return cute::cast_smem_ptr_to_uint(shared + p.memory.x + token * p.memory.token + lane / 8 * 16);
}
__device__ __forceinline__ void load_operand_b(uint32_t row, uint32_t (&b)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(row)
               : "memory");
}

// The sums of x over each step, in units of what decoders make.
template <class C>
__device__ __forceinline__ void sum_steps(uint8_t* shared, Params const& p, int steps) {
  using E = Excess<Decoder<C::kBits, typename C::Element>>;
  constexpr uint32_t kOne = C::kOperand == Operand::kHalf ? 0x3c003c00u : 0x3f803f80u;
  uint32_t const ones[4] = {kOne, kOne, kOne, kOne};
  for (int i = threadIdx.x / 32; i < steps * C::kTokenBlocks; i += kWarps) {
    int tb = i % C::kTokenBlocks, step = i / C::kTokenBlocks;
    uint32_t row = token_row<C>(shared, p, tb) + step * C::kStepColumns * 2;
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int pair = 0; pair < C::kStepColumns / 32; ++pair) {
      uint32_t b[4];
      load_operand_b(row + pair * 64, b);
      multiply_add<C::kOperand>(even, ones, b[0], b[1], even[0], even[1], even[2], even[3]);
      multiply_add<C::kOperand>(odd, ones, b[2], b[3], odd[0], odd[1], odd[2], odd[3]);
    }
    if (threadIdx.x % 32 < 4)
      reinterpret_cast<float2*>(shared + p.memory.sums)[(step * C::kTokens + tb * 8) / 2 + threadIdx.x % 4] =
          make_float2((even[0] + odd[0]) * E::kUnit, (even[1] + odd[1]) * E::kUnit);
  }
}

// ---- the main loop

// 4 or 8 neighbouring values of a group vector, as floats.
template <int kCount>
__device__ __forceinline__ void load_vector(uint8_t const* vector, DataType type, int index, float (&out)[kCount]) {
  if (type == DataType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      float4 v = *reinterpret_cast<float4 const*>(vector + (index + i) * 4);
      out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
    }
    return;
  }
  uint32_t words[kCount / 2];
  if constexpr (kCount == 8) {
    uint4 v = *reinterpret_cast<uint4 const*>(vector + index * 2);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else {
    uint2 v = *reinterpret_cast<uint2 const*>(vector + index * 2);
    words[0] = v.x, words[1] = v.y;
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    if (type == DataType::kFloat16) {
      float2 pair = __half22float2(reinterpret_cast<__half2 const&>(words[i]));
      out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
    } else {
      out[2 * i] = __uint_as_float(words[i] << 16), out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
}

template <class C>
using Sums = float[C::kTokenBlocks][kRowBlocks][4];

// The oldest piece of the ring; `column` is its first, counted from the slice's. What is read is at once asked for anew.
template <class C>
__device__ __forceinline__ void multiply_piece(uint8_t const* shared, Params const& p, int column, Sums<C>& sums,
                                               Feed<C>& feed) {
  using Decode = Decoder<C::kBits, typename C::Element>;
  using E = Excess<Decode>;
  constexpr int kUnitColumns = C::kPieceColumns / 2;
  constexpr int kUnitPieces = kUnitColumns / 16;  // of 16 columns
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint8_t const* stage = feed.ring + feed.stage * p.memory.stage;
  uint32_t x[C::kTokenBlocks];
#pragma unroll
  for (int tb = 0; tb < C::kTokenBlocks; ++tb) x[tb] = token_row<C>(shared, p, tb) + column * 2;

  float products[C::kTokenBlocks][kRowBlocks][4];
  uint32_t b[C::kTokenBlocks][4];
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
    uint4 codes[kRowBlocks];
#pragma unroll
    for (int rb = 0; rb < kRowBlocks; ++rb)
      codes[rb] = *reinterpret_cast<uint4 const*>(stage + (rb * 2 + unit) * kUnitBytes + lane * kLaneBytes);
    feed.copy_codes(p, unit);
#pragma unroll
    for (int piece = 0; piece < kUnitPieces; ++piece) {
      int const at = unit * kUnitPieces + piece;  // of the piece's 16 columns
      int const step = at * 16 / C::kStepColumns;
      bool const first = at * 16 % C::kStepColumns == 0, last = (at + 1) * 16 % C::kStepColumns == 0;
      int const index = (column / C::kStepColumns + step) * C::kTokens + 2 * t;
      float const* step_sums = reinterpret_cast<float const*>(shared + p.memory.sums) + index;
      if (at % 2 == 0) {
#pragma unroll
        for (int tb = 0; tb < C::kTokenBlocks; ++tb) {
          load_operand_b(x[tb] + at / 2 * 64, b[tb]);
        }
      }
#pragma unroll
      for (int rb = 0; rb < kRowBlocks; ++rb) {
        uint32_t words[4] = {codes[rb].x, codes[rb].y, codes[rb].z, codes[rb].w};
        asm volatile("" : "+r"(words[piece * Decode::kWords]));  // not decoded before its turn: registers
        uint32_t a[4];
        Decode::fragment(words + piece * Decode::kWords, a);
#pragma unroll
        for (int tb = 0; tb < C::kTokenBlocks; ++tb) {
          float (&d)[4] = products[tb][rb];
          if (first) {
            float2 start = E::kExcess > 0 ? *reinterpret_cast<float2 const*>(step_sums + tb * 8) : float2{};
            float low = -E::kExcess * start.x, high = -E::kExcess * start.y;
            multiply_add<C::kOperand>(d, a, b[tb][0], b[tb][1], low, high, E::kUpper * low, E::kUpper * high);
          } else {
            multiply_add<C::kOperand>(d, a, b[tb][at % 2 * 2], b[tb][at % 2 * 2 + 1], d[0], d[1], d[2], d[3]);
          }
        }
      }
      if (!last) continue;
      int row = (C::kShortGroups ? step * p.weight_rows.count / 4 : 0) * kRowsPerSlab + g * 8;
      if (p.weight.zeros) {
        uint32_t zeros[kRowBlocks / 2];
#pragma unroll
        for (int i = 0; i < kRowBlocks / 2; ++i) zeros[i] = reinterpret_cast<uint32_t const*>(stage + p.memory.zeros + row)[i];
#pragma unroll
        for (int tb = 0; tb < C::kTokenBlocks; ++tb) {
          float2 sum = *reinterpret_cast<float2 const*>(step_sums + tb * 8);
#pragma unroll
          for (int rb = 0; rb < kRowBlocks; ++rb)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float zero = float(int8_t(zeros[rb / 2] >> (rb % 2 * 16 + e / 2 * 8))) * (e / 2 ? E::kUpper : 1.0f);
              products[tb][rb][e] = fmaf(-zero, e % 2 ? sum.y : sum.x, products[tb][rb][e]);
            }
        }
      }
      float scales[2 * kRowBlocks];
      load_vector(stage + C::kScales, p.weight.scale_type, row, scales);
      float const* step_scales = reinterpret_cast<float const*>(shared + p.memory.scales) + index;
#pragma unroll
      for (int tb = 0; tb < C::kTokenBlocks; ++tb) {
        float2 token_scale = C::kInt8 ? *reinterpret_cast<float2 const*>(step_scales + tb * 8) : make_float2(1.0f, 1.0f);
#pragma unroll
        for (int rb = 0; rb < kRowBlocks; ++rb)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float scale = scales[2 * rb + e / 2];
            if (C::kInt8) scale *= e % 2 ? token_scale.y : token_scale.x;
            sums[tb][rb][e] = fmaf(products[tb][rb][e], scale, sums[tb][rb][e]);
          }
      }
      if (p.weight.offsets) {
        float offsets[2 * kRowBlocks];
        load_vector(stage + p.memory.offsets, p.weight.offset_type, row, offsets);
#pragma unroll
        for (int tb = 0; tb < C::kTokenBlocks; ++tb) {
          float2 sum = *reinterpret_cast<float2 const*>(step_sums + tb * 8);
          if (C::kInt8) {
            float2 token_scale = *reinterpret_cast<float2 const*>(step_scales + tb * 8);
            sum.x *= token_scale.x, sum.y *= token_scale.y;
          }
#pragma unroll
          for (int rb = 0; rb < kRowBlocks; ++rb)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              sums[tb][rb][e] =
                  fmaf(offsets[2 * rb + e / 2] * (e / 2 ? E::kUpper : 1.0f), e % 2 ? sum.y : sum.x, sums[tb][rb][e]);
        }
      }
    }
  }
  __syncwarp();  // all lanes have read the vectors
  // What the next copies need is not computed before the products are: registers.
  asm volatile("" : "+r"(feed.at.piece), "+r"(feed.at.slab), "+r"(feed.stage), "+r"(feed.left));
  feed.copy_rest(p);
}

// A warp's sums of a slab to their slot in the blocks that end with them.
template <class C>
__device__ __forceinline__ void store_slot(float const* slots, Params const& p, int rank, int slot, Sums<C>& sums) {
  using E = Excess<Decoder<C::kBits, typename C::Element>>;
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint32_t here = cute::cast_smem_ptr_to_uint(slots + rank * p.place.rank_stride + slot * p.place.slot_stride +
                                              2 * t * p.place.token_stride);
#pragma unroll
  for (int eight = 0; eight < 2 * kRowBlocks; ++eight) {
    int row = eight * 8 + g;
    uint32_t to = cute::set_block_rank(here, (eight << p.log_cluster) / (2 * kRowBlocks)) + (row & (p.place.features - 1)) * 4;
#pragma unroll
    for (int tb = 0; tb < C::kTokenBlocks; ++tb)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& sum = sums[tb][eight / 2][eight % 2 * 2 + e];
        float value = sum * (1.0f / (E::kUnit * (eight % 2 ? E::kUpper : 1.0f)));
        if (tb * 8 + 2 * t + e < p.epilogue.m)
          asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to + (tb * 8 + e) * p.place.token_stride * 4), "f"(value)
                       : "memory");
        sum = 0.0f;
      }
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, C::kResident) decode_gemm(__grid_constant__ Params const p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint32_t ranges[2][C::kTokens];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  int warp = threadIdx.x / 32, rank = blockIdx.x & (p.cluster - 1), m = p.epilogue.m;
  Part part(p, blockIdx.x >> p.log_cluster, rank);
  Slots<C> slots(part);
  int begin = slots.begin(warp), end = slots.begin(warp + 1);
  Feed<C> feed(p, part, slots, begin, end, shared + warp * (C::kStages * p.memory.stage));
  Cursor at = feed.at;
#pragma unroll
  for (int i = 0; i < C::kStages; ++i) {
    feed.copy_codes(p, 0);
    feed.copy_codes(p, 1);
    feed.copy_rest(p);
  }
  // Everything else that does not depend on x. Of each slab and rank the slots that hold a part: the first, and how many.
  uint32_t* parts = reinterpret_cast<uint32_t*>(shared + p.memory.parts);
  for (int i = threadIdx.x; i < part.slabs << p.log_cluster; i += kThreads) {
    int slab = i >> p.log_cluster;
    Slots<C> theirs(Part(p, blockIdx.x >> p.log_cluster, i & (p.cluster - 1)));
    int first = theirs.warp_of(slab * theirs.slab_pieces), last = theirs.warp_of((slab + 1) * theirs.slab_pieces - 1);
    parts[i] = uint32_t(slab + first) | uint32_t(last - first + 1) << 16;
  }
  Runs runs(p, part, blockIdx.x >> p.log_cluster);
  if (C::kInt8 && threadIdx.x < 2 * C::kTokens) ranges[threadIdx.x / C::kTokens][threadIdx.x % C::kTokens] = 0;
  cute::cluster_arrive_relaxed();  // when all have arrived, their shared memory can be written
  if (C::kInt8) __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (C::kInt8) cute::cluster_wait();
  stage_tokens<C>(shared, p, part, runs, ranges);
  __syncthreads();
  if (p.step_sums) {
    sum_steps<C>(shared, p, runs.columns / C::kStepColumns);
    __syncthreads();
  }
  if (!C::kInt8) cute::cluster_wait();

  float* all_slots = reinterpret_cast<float*>(shared + p.memory.slots);
  Sums<C> sums = {};
  for (int i = begin; i < end; ++i) {
    wait_copies<C::kStages - 1>();
    __syncwarp();
    multiply_piece<C>(shared, p, at.piece * C::kPieceColumns, sums, feed);
    if (++at.piece == slots.slab_pieces && i + 1 < end) {
      store_slot<C>(all_slots, p, rank, at.slab + warp, sums);
      ++at.slab, at.piece = 0;
    }
  }
  store_slot<C>(all_slots, p, rank, at.slab + warp, sums);
  cute::cluster_arrive();
  cute::cluster_wait();

  // A thread ends with four neighbouring features of a token.
  int const log_quads = 4 - p.log_cluster;
#pragma unroll 1
  for (int item = thread_again(); item < part.slabs * m << log_quads; item += kThreads) {
    int quad = item & ((1 << log_quads) - 1),
        slab = int(__umulhi(uint32_t(item >> log_quads), p.token_reciprocal)) + (m == 1 ? item >> log_quads : 0);
    int token = (item >> log_quads) - slab * m;
    float v[4] = {};
    for (int r = 0; r < p.cluster; ++r) {
      uint32_t theirs = parts[(slab << p.log_cluster) + r];
      float const* from = all_slots + r * p.place.rank_stride + int(theirs & 0xffff) * p.place.slot_stride +
                          token * p.place.token_stride + quad * 4;
#pragma unroll 4
      for (int count = theirs >> 16; count > 0; --count, from += p.place.slot_stride) {
        float4 a = *reinterpret_cast<float4 const*>(from);
        v[0] += a.x, v[1] += a.y, v[2] += a.z, v[3] += a.w;
      }
    }
    int n = (part.first_slab + slab) * kRowsPerSlab + rank * p.place.features + quad * 4;
    if (n < p.epilogue.n) {
      if (p.plain_epilogue) {
        uint32_t low = pair_bits<typename C::Element>(nan_unless_finite(v[0]), nan_unless_finite(v[1]));
        uint32_t high = pair_bits<typename C::Element>(nan_unless_finite(v[2]), nan_unless_finite(v[3]));
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.epilogue.out) + int64_t(token) * p.epilogue.n + n) =
            make_uint2(low, high);
      } else {
        store_outputs(v, token, n, p.epilogue);
      }
    }
  }
#endif
}

template <class C>
Status launch_config(GemmProblem const& problem, DecodeShape const& shape, Stream stream) {
  PackedWeight const& w = problem.weight;
  DecodeMemory memory(problem, shape, C::kTokens);
  EpilogueParams epilogue(problem);
  bool plain = !problem.bias && !problem.residual && problem.activation == Activation::kNone && !problem.saturate &&
               epilogue.vector_store &&
               problem.out_type == (std::is_same_v<typename C::Element, __half> ? DataType::kFloat16 : DataType::kBFloat16);
  bool async_x = reinterpret_cast<uintptr_t>(problem.x) % 16 == 0 && problem.x_stride % 8 == 0 && w.k % 8 == 0 && !w.perm;
  Source source = !C::kInt8                               ? Source::kFloats
                  : problem.quantized.codes               ? Source::kCodes
                  : problem.act_quant == ActQuant::kToken ? Source::kTokens
                                                          : Source::kBlocks;
  int log_cluster = 0;
  while (1 << log_cluster < shape.cluster) ++log_cluster;
  Params p{w,
           FloatRows(problem.x, problem.x_type, problem.x_stride, w.k, w.perm),
           problem.quantized,
           source,
           problem.act_symmetric,
           epilogue,
           VectorRows(w.group_size),
           int(padded_k(w.k) / kKPerTile),
           int(padded_rows(w.n)),
           int(padded_rows(w.n)) / kRowsPerSlab,
           shape.cluster,
           shape.clusters,
           log_cluster,
           activation_block(w.group_size),
           log2_size_of(w.scale_type),
           log2_size_of(w.offset_type),
           memory,
           SlotPlace(shape, problem.m),
           problem.m > 1 ? ~0u / uint32_t(problem.m) + 1 : 0,
           plain,
           async_x,
           Excess<Decoder<C::kBits, typename C::Element>>::kExcess > 0 || w.zeros || w.offsets};
  return launch_clusters(decode_gemm<C>, dim3(shape.clusters * shape.cluster), shape.cluster, kThreads, memory.total, stream,
                         p);
}

template <class Element, int kBits, int kTokens, bool kInt8>
Status launch_element(GemmProblem const& problem, DecodeShape const& shape, Stream stream) {
  bool short_groups = problem.weight.group_size == 32 || problem.weight.group_size == 64;
  return short_groups ? launch_config<Config<Element, kBits, kTokens, true, kInt8>>(problem, shape, stream)
                      : launch_config<Config<Element, kBits, kTokens, false, kInt8>>(problem, shape, stream);
}

}  // namespace

template <int kBits, int kTokens, bool kInt8>
Status launch_decode_gemm(GemmProblem const& problem, Plan const&, float*, Stream stream) {
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  DecodeShape shape = decode_shape(problem, device, kTokens);
  if constexpr (kInt8) {
    return launch_element<__half, kBits, kTokens, true>(problem, shape, stream);
  } else {
    return problem.x_type == DataType::kFloat16 ? launch_element<__half, kBits, kTokens, false>(problem, shape, stream)
                                                : launch_element<__nv_bfloat16, kBits, kTokens, false>(problem, shape, stream);
  }
}

template Status launch_decode_gemm<4, 8, false>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_decode_gemm<8, 8, false>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_decode_gemm<4, 8, true>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_decode_gemm<8, 8, true>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_decode_gemm<4, 16, false>(GemmProblem const&, Plan const&, float*, Stream);

}  // namespace cutlass_ops
