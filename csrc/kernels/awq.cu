// AWQ weights as AutoAWQ stores them, not reordered: W transposed, [K][N], eight
// columns a word along N.
//
//   dequantise   a thread takes a word of eight codes to one 16-byte store, and keeps its columns'
//                scales and zero points for the rows of a group that it walks along: only codes are
//                read once a store
//   multiply     tiles of 8, 16 or 32 rows of x. Blocks of a cluster share 256 columns and cut K
//                into equal runs, and so do a block's warps. A warp copies 32 rows of its columns
//                and of x at a time to a separate ring in shared memory; no barrier. Two rows'
//                nibbles side by side, which one PRMT makes, are fp16's subnormal numbers as they
//                are: an AND a register of mma.sync's operand A. Zero points are taken away from
//                the sums, times the sum of x, which an MMA with ones makes, and then scales are
//                applied, once a group, in fp32. A block's warps add their sums in its shared
//                memory, and a cluster's blocks in that of the one that ends with those columns:
//                in the order of K
//
// To dequantise, (code - zero) is exact in fp16 and bf16, and the product with the scale is
// rounded once. It is an FMA with +0, so that zero times a negative scale is +0, as in vLLM's and
// AutoAWQ's kernels.
#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "device/convert.cuh"
#include "device/hopper.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/scalar.cuh"
#include "dispatch/launchers.h"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 256;

template <class T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

// The eight codes of a word, columns in order.
__device__ __forceinline__ void convert(uint32_t word, uint32_t (&out)[4], __half) {
  decode::to_half<decode::NibblesHalf<false, true>>(word, out);
}
__device__ __forceinline__ void convert(uint32_t word, uint32_t (&out)[4], __nv_bfloat16) {
  decode::to_bfloat16<decode::NibblesBfloat16<false, true>>(word, out);
}

struct DequantizeParams {
  AwqWeight weight;
  void* out;
  int words;       // of a row
  int group_rows;  // rows of a group
  int row_tiles;   // of kRows rows
};

// Each thread has kRows rows of K; they are in one group where a group has a multiple of kRows
// rows.
template <class T, int kRows>
__global__ void __launch_bounds__(kThreads)
    dequantize_awq_rows(__grid_constant__ DequantizeParams const p) {
  pdl_wait_and_launch_dependents();
  AwqWeight const& w = p.weight;
  int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  int word = int(index % p.words), first = int(index / p.words) * kRows;
  if (first >= w.k) return;
  uint32_t codes[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (first + r < w.k) codes[r] = __ldcs(w.codes + int64_t(first + r) * p.words + word);
  uint32_t const nothing = 0;
  int now = -1;
  uint32_t zeros[4];
  uint4 scales = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r >= w.k) break;
    if (int group = (first + r) / p.group_rows; group != now) {
      now = group;
      convert(__ldg(w.zeros + int64_t(group) * p.words + word), zeros, T());
      scales = __ldg(
          reinterpret_cast<uint4 const*>(static_cast<T const*>(w.scales) + int64_t(group) * w.n) +
          word);
    }
    uint32_t values[4];
    convert(codes[r], values, T());
    uint32_t const scale[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Pair<T> integer = __hsub2(reinterpret_cast<Pair<T> const&>(values[i]),
                                reinterpret_cast<Pair<T> const&>(zeros[i]));
      Pair<T> value = __hfma2(integer, reinterpret_cast<Pair<T> const&>(scale[i]),
                              reinterpret_cast<Pair<T> const&>(nothing));
      values[i] = reinterpret_cast<uint32_t const&>(value);
    }
    __stcs(reinterpret_cast<uint4*>(static_cast<T*>(p.out) + int64_t(first + r) * w.n) + word,
           make_uint4(values[0], values[1], values[2], values[3]));
  }
}

template <class T, int kRows>
Status launch_rows(AwqWeight const& w, void* out, Stream stream) {
  DequantizeParams p{w, out, w.n / 8, w.k / w.groups, (w.k + kRows - 1) / kRows};
  int64_t blocks = (int64_t(p.words) * p.row_tiles + kThreads - 1) / kThreads;
  return launch(dequantize_awq_rows<T, kRows>, dim3(unsigned(blocks)), kThreads, 0, stream, p);
}

template <class T>
Status launch_type(AwqWeight const& w, void* out, Stream stream) {
  // Small weights: more threads rather than more work for each.
  return int64_t(w.k) * (w.n / 8) < (1 << 20) ? launch_rows<T, 2>(w, out, stream)
                                              : launch_rows<T, 8>(w, out, stream);
}

// ---- multiply

// kMBlocks: blocks of 8 rows of x, 1, 2 or 4. With more rows of x a warp has fewer columns, because
// its sums fill its registers.
template <class Element_, int kMBlocks_, int kOctets_ = 4 / kMBlocks_, int kWarps_ = 4,
          int kStages_ = 3, int kMinCtasPerSm_ = 2>
struct GemmConfig {
  using Element = Element_;
  static constexpr Operand kOperand =
      std::is_same_v<Element, __half> ? Operand::kHalf : Operand::kBFloat16;
  static constexpr int kMBlocks = kMBlocks_;
  static constexpr int kBlockM = 8 * kMBlocks;
  static constexpr int kOctets = kOctets_;  // of columns, a lane
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps;
  static constexpr int kWarpsN = 4 / kOctets, kWarpsK = kWarps / kWarpsN;
  static constexpr int kMinCtasPerSm = kMinCtasPerSm_;
  static constexpr int kStages = kStages_;
  static constexpr int kWeightBytes = 1024 * kOctets;  // of a warp's stage: 32 rows of its columns
  // and those columns of x, 16 bytes a lane
  static constexpr int kStageBytes = kWeightBytes + 512 * kMBlocks;
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  // fp16: codes are subnormal numbers, in bits 0 to 3 or 4 to 7.
  static constexpr bool kSubnormal = kOperand == Operand::kHalf;
  // of products
  static constexpr float unit(int nibble) {
    return !kSubnormal ? 1.0f : nibble % 2 ? 0x1p-20f : 0x1p-24f;
  }
  static constexpr uint32_t kOne = kSubnormal ? 0x3c003c00u : 0x3f803f80u;
  static_assert(kWarps % kWarpsN == 0);
};

constexpr int kStepRows = 32, kStripWords = 32, kStripChunks = 8, kChunkColumns = 32,
              kChunkQuads = kChunkColumns / 4;
// Floats between rows of x in 32 columns of a block's sums: the four added ones avoid bank
// conflicts.
constexpr int kChunkXRowFloats = kChunkColumns + 4;

struct GemmParams {
  AwqWeight weight;
  uint16_t const* x;
  int64_t x_stride;
  void* out;
  int m;
  int words;        // of a row
  int steps;        // of 32 rows
  int group_steps;  // of a group
  int cluster;
  bool wide_words;  // rows begin on 16 bytes
};

// The column of eight that nibble i holds.
__device__ __forceinline__ constexpr int column_of(int nibble) {
  return nibble % 4 * 2 + nibble / 4;
}

__device__ __forceinline__ void copy_weights(void* shared, void const* source) {
  uint32_t to = cute::cast_smem_ptr_to_uint(shared);
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(source)
               : "memory");
}
__device__ __forceinline__ void copy_x(void* shared, void const* source) {
  uint32_t to = cute::cast_smem_ptr_to_uint(shared);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(source) : "memory");
}
__device__ __forceinline__ void copy_word(void* shared, void const* source) {
  uint32_t to = cute::cast_smem_ptr_to_uint(shared);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(source) : "memory");
}

// A lane's scales and zero points of a group, as stored.
template <class C>
struct Group {
  uint4 scales[C::kOctets];
  uint32_t zeros[C::kOctets];

  __device__ __forceinline__ void load(GemmParams const& p, int group, int first_octet) {
#pragma unroll
    for (int o = 0; o < C::kOctets; ++o) {
      int octet = min(first_octet + o, p.words - 1);
      zeros[o] = __ldg(p.weight.zeros + int64_t(group) * p.words + octet);
      scales[o] =
          __ldg(reinterpret_cast<uint4 const*>(p.weight.scales) + int64_t(group) * p.words + octet);
    }
  }

  // The scale of nibble i of octet o.
  __device__ __forceinline__ float scale(int o, int i) const {
    int column = column_of(i);
    uint32_t const words[4] = {scales[o].x, scales[o].y, scales[o].z, scales[o].w};
    return unpack_half<typename C::Element>(words[column / 2], column % 2);
  }
  // In units of the products: zero points become subnormal fp16 numbers in the same way as codes.
  __device__ __forceinline__ float zero(int o, int i) const {
    // of nibbles i % 4 and i % 4 + 4
    uint32_t const pair = zeros[o] >> i % 4 / 2 * 8 & (i % 2 ? 0x00f000f0u : 0x000f000fu);
    float2 const values = __half22float2(reinterpret_cast<__half2 const&>(pair));
    return (i < 4 ? values.x : values.y) * (C::kSubnormal ? 1.0f : i % 2 ? 0x1p20f : 0x1p24f);
  }
};

// Operand A of nibbles 2 * pair and 2 * pair + 1 of four rows' words.
template <class C>
__device__ __forceinline__ void decode_pair(uint32_t row0, uint32_t row1, uint32_t row2,
                                            uint32_t row3, int pair, uint32_t (&a)[4]) {
  using namespace decode;
  using namespace decode::detail;
  uint32_t const selector = 0x4400u + 0x1111u * uint32_t(pair);
  uint32_t const low = __byte_perm(row0, row1, selector), high = __byte_perm(row2, row3, selector);
  if constexpr (C::kSubnormal) {
    a[0] = low & 0x000f000fu, a[1] = low & 0x00f000f0u, a[2] = high & 0x000f000fu,
    a[3] = high & 0x00f000f0u;
  } else {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      uint32_t bits = and_xor((r < 2 ? low : high) >> r % 2 * 4, 0x000f000fu, 0x43004300u);
      a[r] = as_bits(__hsub2(as_bfloat162(bits), as_bfloat162(0x43004300u)));
    }
  }
}

// The sums of kOctets * 4 pairs of nibbles and kMBlocks * 8 rows of x.
template <class C>
using GemmSums = float[C::kOctets][4][C::kMBlocks][4];

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinCtasPerSm)
    awq_gemm(__grid_constant__ GemmParams const p) {
  extern __shared__ __align__(128) uint8_t shared[];
  pdl_launch_dependents();
  AwqWeight const& w = p.weight;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int const warp_n = warp % C::kWarpsN, warp_k = warp / C::kWarpsN;
  int const strip = blockIdx.x / p.cluster, rank = blockIdx.x - strip * p.cluster;
  int const parts = p.cluster * C::kWarpsK, part = rank * C::kWarpsK + warp_k;
  int step = int(int64_t(p.steps) * part / parts);
  int const end = int(int64_t(p.steps) * (part + 1) / parts);
  int const first_word = strip * kStripWords + warp_n * 8 * C::kOctets;  // of the warp
  int const first_x_row = blockIdx.y * C::kBlockM, x_rows = min(p.m - first_x_row, C::kBlockM);

  // Sixteen bytes a lane, in memory order, so that eight lanes load whole lines. Row 8 t + i of a
  // stage is for the lanes t of an MMA's operand; the XOR of 32 t keeps their reads of row i off
  // each other's banks.
  uint8_t* const ring = shared + warp * (C::kStages * C::kStageBytes);
  // sixteens of a row; rows that a warp copies at once
  constexpr int kRowChunks = 2 * C::kOctets, kCopyRows = 32 / kRowChunks;
  int const first_chunk_word = lane % kRowChunks * 4, copy_row = lane / kRowChunks;
  uint32_t const* from =
      w.codes + (int64_t(step) * kStepRows + copy_row) * p.words + first_word + first_chunk_word;
  int const words_left = p.words - first_word - first_chunk_word;
  auto copy_codes = [&](int stage) {
    uint8_t* to = ring + stage * C::kStageBytes;
    if (p.wide_words) {
#pragma unroll
      for (int j = 0; j < kRowChunks; ++j)
        if (words_left > 0)
          copy_weights(to + ((j * 512 + lane * 16) ^ (j * kCopyRows + copy_row) / 8 * 32),
                       from + int64_t(j * kCopyRows) * p.words);
    } else {
#pragma unroll 1
      for (int j = 0; j < kRowChunks; ++j)
#pragma unroll 1
        for (int word = 0; word < min(words_left, 4); ++word)
          copy_word(to + ((j * 512 + lane * 16) ^ (j * kCopyRows + copy_row) / 8 * 32) + word * 4,
                    from + int64_t(j * kCopyRows) * p.words + word);
    }
    from += int64_t(kStepRows) * p.words;
  };
#pragma unroll 1
  for (int s = 0; s < C::kStages; ++s) {
    if (step + s < end) copy_codes(s);
    commit_copies();
  }
  int const first_octet = first_word + g * C::kOctets;
  int group_index = step / p.group_steps, group_left = (group_index + 1) * p.group_steps - step;
  Group<C> group;
  if (step < end) group.load(p, group_index, first_octet);
  // Every rank finishes an equal share, or nearly, of the 8 chunks of 32 columns.
  auto first_chunk = [&](int r) { return kStripChunks * r / p.cluster; };
  int const chunks = first_chunk(rank + 1) - first_chunk(rank);
#if __CUDA_ARCH__ >= 900
  __shared__ uint64_t sums_there;
  if (threadIdx.x == 0) {
    TransactionBarrier::init(&sums_there, 1);
    cutlass::arch::fence_barrier_init();
    TransactionBarrier::arrive_and_expect_tx(
        &sums_there, uint32_t(p.cluster * chunks * x_rows * kChunkColumns * 4));
  }
  __syncthreads();
  cute::cluster_arrive_relaxed();  // when all have arrived, their shared memory can be written
#endif
  pdl_wait();

  // Missing rows of x repeat the last row: their sums are not stored.
  uint16_t const* x[C::kMBlocks];
#pragma unroll
  for (int tb = 0; tb < C::kMBlocks; ++tb)
    x[tb] = p.x + (first_x_row + min(tb * 8 + g, x_rows - 1)) * p.x_stride +
            int64_t(step) * kStepRows + 8 * t;
  uint8_t* const own_x = ring + C::kWeightBytes + lane * 16;
  auto copy_x_rows = [&](int stage) {
#pragma unroll
    for (int tb = 0; tb < C::kMBlocks; ++tb) {
      copy_x(own_x + stage * C::kStageBytes + tb * 512, x[tb]);
      x[tb] += kStepRows;
    }
  };
#pragma unroll 1
  for (int s = 0; s < C::kStages; ++s) {
    if (step + s < end) copy_x_rows(s);
    commit_copies();
  }

  GemmSums<C> sums = {}, products = {};
  float x_sums[C::kMBlocks][4] = {};
  auto promote = [&] {
#pragma unroll
    for (int o = 0; o < C::kOctets; ++o)
#pragma unroll
      for (int nibble = 0; nibble < 8; ++nibble) {
        float const zero = -group.zero(o, nibble), scale = group.scale(o, nibble);
#pragma unroll
        for (int tb = 0; tb < C::kMBlocks; ++tb)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& product = products[o][nibble / 2][tb][nibble % 2 * 2 + e];
            float& sum = sums[o][nibble / 2][tb][nibble % 2 * 2 + e];
            sum = fmaf(fmaf(zero, x_sums[tb][e], product), scale, sum);
            product = 0.0f;
          }
      }
#pragma unroll
    for (int tb = 0; tb < C::kMBlocks; ++tb)
#pragma unroll
      for (int e = 0; e < 4; ++e) x_sums[tb][e] = 0.0f;
  };
  uint32_t const ones[4] = {C::kOne, C::kOne, C::kOne, C::kOne};
  int const read = (t * (256 * C::kOctets) + g * (4 * C::kOctets)) ^ t * 32;  // of row 8 t
  int stage = 0;
#pragma unroll 1
  for (; step < end; ++step) {
    wait_copies<C::kStages - 1>();
    __syncwarp();
    uint4 now[C::kMBlocks];
#pragma unroll
    for (int tb = 0; tb < C::kMBlocks; ++tb)
      now[tb] = *reinterpret_cast<uint4 const*>(own_x + stage * C::kStageBytes + tb * 512);
    uint8_t const* codes = ring + stage * C::kStageBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4][C::kOctets];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint8_t const* row = codes + (read ^ (half * 4 + i) * (32 * C::kOctets));
        if constexpr (C::kOctets == 4) {
          uint4 v = *reinterpret_cast<uint4 const*>(row);
          words[i][0] = v.x, words[i][1] = v.y, words[i][2] = v.z, words[i][3] = v.w;
        } else if constexpr (C::kOctets == 2) {
          uint2 v = *reinterpret_cast<uint2 const*>(row);
          words[i][0] = v.x, words[i][1] = v.y;
        } else {
          words[i][0] = *reinterpret_cast<uint32_t const*>(row);
        }
      }
      uint32_t b0[C::kMBlocks], b1[C::kMBlocks];
#pragma unroll
      for (int tb = 0; tb < C::kMBlocks; ++tb) {
        b0[tb] = half ? now[tb].z : now[tb].x, b1[tb] = half ? now[tb].w : now[tb].y;
        float (&d)[4] = x_sums[tb];
        multiply_add<C::kOperand>(d, ones, b0[tb], b1[tb], d[0], d[1], d[2], d[3]);
      }
#pragma unroll
      for (int o = 0; o < C::kOctets; ++o)
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          uint32_t a[4];
          decode_pair<C>(words[0][o], words[1][o], words[2][o], words[3][o], pair, a);
#pragma unroll
          for (int tb = 0; tb < C::kMBlocks; ++tb) {
            float (&d)[4] = products[o][pair][tb];
            multiply_add<C::kOperand>(d, a, b0[tb], b1[tb], d[0], d[1], d[2], d[3]);
          }
        }
    }
    __syncwarp();  // all lanes have read the stage
    if (step + C::kStages < end) {
      copy_codes(stage);
      copy_x_rows(stage);
    }
    commit_copies();
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
    // Long groups are split into several sums: codes are not centred, so sums over many rows would
    // lose the precision of the difference between codes and zero points.
    if (--group_left % 8 == 0 || step + 1 == end) {
      promote();
      if (group_left == 0 && step + 1 < end) {
        group_left = p.group_steps;
        group.load(p, ++group_index, first_octet);
      }
    }
  }

  // The warps' sums are exchanged in the memory of their rings: [split-K
  // slice][chunk][x_row][columns].
  __syncthreads();
  float* const own = reinterpret_cast<float*>(shared);
  int const all = kStripChunks * x_rows * kChunkXRowFloats;
  {
    float* to = own + warp_k * all;
    int const column = (warp_n * 8 + g) * C::kOctets * 8;
#pragma unroll
    for (int tb = 0; tb < C::kMBlocks; ++tb)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const x_row = tb * 8 + 2 * t + e;
        if (x_row >= x_rows) continue;
#pragma unroll
        for (int o = 0; o < C::kOctets; ++o) {
          auto const value = [&](int pair, int odd) {
            return sums[o][pair][tb][2 * odd + e] * (1.0f / C::unit(odd));
          };
          float4* destination = reinterpret_cast<float4*>(
              to + ((column + o * 8) / kChunkColumns * x_rows + x_row) * kChunkXRowFloats +
              (column + o * 8) % kChunkColumns);
          destination[0] = make_float4(value(0, 0), value(2, 0), value(0, 1), value(2, 1));
          destination[1] = make_float4(value(1, 0), value(3, 0), value(1, 1), value(3, 1));
        }
      }
  }
  __syncthreads();
  // The sum of `count` parts, `stride` floats apart, in the order of K.
  auto add_up = [](float const* from, int count, int stride) {
    float4 sum = *reinterpret_cast<float4 const*>(from);
#pragma unroll 4
    for (int i = 1; i < count; ++i) {
      float4 v = *reinterpret_cast<float4 const*>(from + i * stride);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    return sum;
  };
#if __CUDA_ARCH__ >= 900
  // Send the sums to the blocks that finish them. A warp's stores are adjacent in memory: storing
  // sums in the order of the MMA registers, in sixteens, took twice as long. [rank][chunk of the
  // receiver][x_row][columns]
  float* const received = reinterpret_cast<float*>(shared + C::kRingBytes);
  cute::cluster_wait();
  for (int chunk = warp; chunk < kStripChunks; chunk += C::kWarps) {
    int const to = ((chunk + 1) * p.cluster - 1) / kStripChunks, first = first_chunk(to),
              count = first_chunk(to + 1) - first;
    float const* from = own + chunk * x_rows * kChunkXRowFloats;
    float* there = received + (rank * count + chunk - first) * x_rows * kChunkColumns;
    for (int i = lane; i < x_rows * kChunkQuads; i += 32)
      store_remote(
          there + i * 4,
          add_up(from + i / kChunkQuads * kChunkXRowFloats + i % kChunkQuads * 4, C::kWarpsK, all),
          &sums_there, to);
  }
  TransactionBarrier::wait(&sums_there, 0);
  constexpr int kXRowFloats = kChunkColumns;
  int const received_parts = p.cluster;
#else
  float const* const received = own;
  constexpr int kXRowFloats = kChunkXRowFloats;
  int const received_parts = C::kWarpsK;
#endif

  for (int i = threadIdx.x; i < chunks * x_rows * kChunkQuads; i += C::kThreads) {
    int const row = i / kChunkQuads, quad = i % kChunkQuads, chunk = row / x_rows,
              x_row = row - chunk * x_rows;
    int const n = (strip * kStripChunks + first_chunk(rank) + chunk) * kChunkColumns + quad * 4;
    float4 const sum = add_up(received + row * kXRowFloats + quad * 4, received_parts,
                              chunks * x_rows * kXRowFloats);
    if (n >= w.n) continue;
    float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (float& value : v) value = isfinite(value) ? value : NAN;
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + int64_t(first_x_row + x_row) * w.n +
                              n) = make_uint2(pack_pair<typename C::Element>(v[0], v[1]),
                                              pack_pair<typename C::Element>(v[2], v[3]));
  }
}

int strip_count(GemmParams const& p) { return (p.words + kStripWords - 1) / kStripWords; }
template <class C>
int tile_count(GemmParams const& p) {
  return (p.m + C::kBlockM - 1) / C::kBlockM;
}
template <class C>
int shared_bytes(GemmParams const& p, int cluster) {
  int const chunks = (kStripChunks + cluster - 1) / cluster;
  return C::kRingBytes +
         chunks * cluster * std::min(p.m, C::kBlockM) * kChunkColumns * int(sizeof(float));
}

template <class C>
Status launch_gemm_config(GemmParams p, int cluster, Stream stream) {
  p.cluster = cluster;
  dim3 const grid(unsigned(strip_count(p) * cluster), unsigned(tile_count<C>(p)));
  return launch_shape(awq_gemm<C>, {grid, C::kThreads, cluster, shared_bytes<C>(p, cluster)},
                      stream, p);
}

// The number of blocks, at least two, that share K so that the waves of clusters take the least
// time. Only the driver knows how many clusters a GPU runs at once: it is queried once for each
// kind of grid.
template <class C>
Status choose_cluster(GemmParams const& p, int* cluster) {
  static std::mutex mutex;
  static std::map<std::array<int, 3>, int> chosen;
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess)
    return cuda_error("cudaGetDevice", error);
  int const clusters = strip_count(p) * tile_count<C>(p);
  std::lock_guard<std::mutex> lock(mutex);
  int& known = chosen[{device, clusters, std::min(p.m, C::kBlockM)}];
  float least = 0.0f;
  for (int size = 2; known == 0 && size <= kStripChunks; ++size) {
    int const bytes = shared_bytes<C>(p, size);
    if (Status status = allow_shared_memory(reinterpret_cast<void const*>(awq_gemm<C>), bytes);
        !status.ok())
      return status;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(clusters * size));
    config.blockDim = C::kThreads;
    config.dynamicSmemBytes = size_t(bytes);
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = unsigned(size),
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int at_once = 0;
    if (cudaError_t error = cudaOccupancyMaxActiveClusters(&at_once, awq_gemm<C>, &config);
        error != cudaSuccess)
      return cuda_error("cudaOccupancyMaxActiveClusters", error);
    if (at_once == 0) continue;
    float const time = float((clusters + at_once - 1) / at_once) / float(size);
    if (*cluster == 0 || time < least) *cluster = size, least = time;
  }
  if (known == 0) known = std::max(*cluster, 1);
  *cluster = known;
  return {};
}

template <class Element, int kMBlocks>
Status launch_gemm(GemmParams const& p, Stream stream) {
  using C = GemmConfig<Element, kMBlocks>;
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  int cluster = device.architecture < 90 ? 1 : 0;
  if (cluster == 0)
    if (Status status = choose_cluster<C>(p, &cluster); !status.ok()) return status;
  return launch_gemm_config<C>(p, cluster, stream);
}

template <class Element>
Status launch_gemm_type(GemmParams const& p, Stream stream) {
  return p.m <= 8    ? launch_gemm<Element, 1>(p, stream)
         : p.m <= 16 ? launch_gemm<Element, 2>(p, stream)
                     : launch_gemm<Element, 4>(p, stream);
}

}  // namespace

Status launch_awq_gemm(AwqWeight const& w, void const* x, int64_t x_stride, int m, void* out,
                       Stream stream) {
  GemmParams p{w,
               static_cast<uint16_t const*>(x),
               x_stride,
               out,
               m,
               w.n / 8,
               w.k / kStepRows,
               w.k / w.groups / kStepRows,
               1,
               w.n % 32 == 0};
  return w.type == DataType::kFloat16 ? launch_gemm_type<__half>(p, stream)
                                      : launch_gemm_type<__nv_bfloat16>(p, stream);
}

Status launch_dequantize_awq(AwqWeight const& weight, void* out, Stream stream) {
  return weight.type == DataType::kFloat16 ? launch_type<__half>(weight, out, stream)
                                           : launch_type<__nv_bfloat16>(weight, out, stream);
}

}  // namespace cutlass_ops
