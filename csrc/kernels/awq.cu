// AWQ weights as AutoAWQ stores them, not reordered: W transposed, [K][N], eight columns a word along N.
//
//   dequantise   a thread takes a word of eight codes to one 16-byte store, and keeps its columns' scales and zero points for the rows of a
//                group that it walks along: only codes are read once a store
//   multiply     up to 16 tokens, as they are: a block takes 64 columns of W and all of K, each of its warps an equal run; sums meet in shared
//                memory in the order of K. A lane takes the words of 8 columns (an octet) in rows 2t, 2t+1, 2t+8, 2t+9 of 16: two PRMT put two rows'
//                nibbles side by side, and then they are what Int4Half decodes, one fragment of mma.sync for two columns of each of the 8 octets.
//                Scales are applied to fp32 sums, once a group
//
// (code - zero) is exact in fp16 and bf16, and the product with the scale is rounded once. It is an FMA with +0, so that zero times a
// negative scale is +0, as the kernels have it that people use today.
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "kernels/kernels.h"

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

// kRows rows of K a thread: all in one group where a group has a multiple of them.
template <class T, int kRows>
__global__ void __launch_bounds__(kThreads) dequantize_awq_rows(__grid_constant__ DequantizeParams const p) {
  wait_for_predecessor();
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
      scales = __ldg(reinterpret_cast<uint4 const*>(static_cast<T const*>(w.scales) + int64_t(group) * w.n) + word);
    }
    uint32_t values[4];
    convert(codes[r], values, T());
    uint32_t const scale[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Pair<T> integer = __hsub2(reinterpret_cast<Pair<T> const&>(values[i]), reinterpret_cast<Pair<T> const&>(zeros[i]));
      Pair<T> value = __hfma2(integer, reinterpret_cast<Pair<T> const&>(scale[i]), reinterpret_cast<Pair<T> const&>(nothing));
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
  return int64_t(w.k) * (w.n / 8) < (1 << 20) ? launch_rows<T, 2>(w, out, stream) : launch_rows<T, 8>(w, out, stream);
}

// ---- multiply

template <class Element_, int kTokenBlocks_>
struct GemmConfig {
  using Element = Element_;
  static constexpr Operand kOperand = std::is_same_v<Element, __half> ? Operand::kHalf : Operand::kBFloat16;
  static constexpr int kTokenBlocks = kTokenBlocks_;
  static constexpr int kTokens = 8 * kTokenBlocks;
  static constexpr int kWarps = kTokenBlocks == 1 ? 16 : 8;  // the sums of sixteen tokens want more registers a thread
  static constexpr int kColumns = 64;
  static constexpr int kAhead = 64 / kWarps;  // runs of 16 rows whose words are on their way
  static constexpr int kSharedBytes = kWarps * kTokens * kColumns * int(sizeof(float));
};

struct GemmParams {
  AwqWeight weight;
  uint16_t const* x;
  int64_t x_stride;
  void* out;
  int m;
  int words;       // of a row
  int group_runs;  // of 16 rows, in a group
};

// Column of an octet that stands in nibble i.
__device__ __forceinline__ constexpr int column_of(int nibble) { return nibble % 4 * 2 + nibble / 4; }

// What a lane needs of a group: per nibble, the zero point as the decoder wants it, and the scale.
template <class C>
struct Group {
  uint32_t zeros[8];
  uint4 scales;

  __device__ __forceinline__ void load(GemmParams const& p, int group, int octet) {
    using decode::both_halves;
    uint32_t word = __ldg(p.weight.zeros + int64_t(group) * p.words + octet);
    scales = __ldg(reinterpret_cast<uint4 const*>(static_cast<uint16_t const*>(p.weight.scales) + int64_t(group) * p.weight.n) +
                   octet);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t zero = word >> 4 * i & 15;
      if (C::kOperand == Operand::kHalf) {
        zeros[i] = i % 2 == 0 ? both_halves(0x6400u + zero) : both_halves(0xd400u + 16 * zero);  // 1024 + z; -(64 + z)
      } else {
        zeros[i] = both_halves(0x4300u + zero);  // 128 + z
      }
    }
  }

  __device__ __forceinline__ float scale(int nibble) const {
    int column = column_of(nibble);
    uint32_t const words[4] = {scales.x, scales.y, scales.z, scales.w};
    uint32_t word = words[column / 2];
    if (C::kOperand == Operand::kBFloat16) return __uint_as_float(column % 2 ? word & 0xffff0000u : word << 16);
    float2 pair = __half22float2(reinterpret_cast<__half2 const&>(word));
    return column % 2 ? pair.y : pair.x;
  }
};

// Operand A of nibbles i and i + 1 (i even): `low` holds rows 2t and 2t+1 of their half word in its two halves, `high` rows 2t+8 and 2t+9.
template <class C>
__device__ __forceinline__ void decode_pair(uint32_t low, uint32_t high, uint32_t const* zeros, uint32_t (&a)[4]) {
  using namespace decode;
  using namespace decode::detail;
  if constexpr (C::kOperand == Operand::kHalf) {
    __half2 sixteenth = as_half2(Int4Half::kSixteenth);
    a[0] = as_bits(__hsub2(as_half2(and_xor(low, 0x000f000fu, 0x64006400u)), as_half2(zeros[0])));
    a[1] = as_bits(__hfma2(as_half2(and_xor(low, 0x00f000f0u, 0x64006400u)), sixteenth, as_half2(zeros[1])));
    a[2] = as_bits(__hsub2(as_half2(and_xor(high, 0x000f000fu, 0x64006400u)), as_half2(zeros[0])));
    a[3] = as_bits(__hfma2(as_half2(and_xor(high, 0x00f000f0u, 0x64006400u)), sixteenth, as_half2(zeros[1])));
  } else {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      uint32_t bits = and_xor((r < 2 ? low : high) >> r % 2 * 4, 0x000f000fu, 0x43004300u);
      a[r] = as_bits(__hsub2(as_bfloat162(bits), as_bfloat162(zeros[r % 2])));
    }
  }
}

template <class C>
__global__ void __launch_bounds__(32 * C::kWarps) awq_gemm(__grid_constant__ GemmParams const p) {
  extern __shared__ __align__(16) float sums_of_warps[];  // [warp][token][column]
  AwqWeight const& w = p.weight;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int octet = blockIdx.x * (C::kColumns / 8) + g;
  bool there = octet < p.words;  // the last block's octets may reach beyond N
  octet = there ? octet : p.words - 1;
  int all = w.k / 16, run = all * warp / C::kWarps, end = all * (warp + 1) / C::kWarps;
  uint32_t const* from = w.codes + (int64_t(run) * 16 + 2 * t) * p.words + octet;
  uint32_t ahead[C::kAhead][4];
  auto load = [&](uint32_t (&to)[4], int runs_ahead) {
    uint32_t const* at = from + int64_t(runs_ahead) * 16 * p.words;
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = __ldcs(at + (i % 2 + i / 2 * 8) * p.words);
  };
#pragma unroll
  for (int i = 0; i < C::kAhead; ++i)
    if (run + i < end) load(ahead[i], i);
  wait_for_predecessor();

  float sums[4][C::kTokenBlocks][4] = {}, products[4][C::kTokenBlocks][4] = {};
  Group<C> group;
  int now = -1;
  auto promote = [&] {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair)
#pragma unroll
      for (int tb = 0; tb < C::kTokenBlocks; ++tb)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sums[pair][tb][e] = fmaf(products[pair][tb][e], group.scale(2 * pair + e / 2), sums[pair][tb][e]);
          products[pair][tb][e] = 0.0f;
        }
  };
  for (; run < end; run += C::kAhead) {
#pragma unroll
    for (int i = 0; i < C::kAhead; ++i) {
      if (run + i >= end) break;
      if (int next = (run + i) / p.group_runs; next != now) {
        if (now >= 0) promote();
        group.load(p, now = next, octet);
      }
      uint32_t b[C::kTokenBlocks][2] = {};
#pragma unroll
      for (int tb = 0; tb < C::kTokenBlocks; ++tb) {
        int token = tb * 8 + g;
        if (token >= p.m) continue;
        uint16_t const* x = p.x + token * p.x_stride + (run + i) * 16 + 2 * t;
        b[tb][0] = x[0] | uint32_t(x[1]) << 16, b[tb][1] = x[8] | uint32_t(x[9]) << 16;
      }
      uint32_t const words[4] = {ahead[i][0], ahead[i][1], ahead[i][2], ahead[i][3]};
      if (run + i + C::kAhead < end) load(ahead[i], i + C::kAhead);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t const selector = pair < 2 ? 0x5410u : 0x7632u;
        uint32_t low = __byte_perm(words[0], words[1], selector) >> pair % 2 * 8, a[4];
        uint32_t high = __byte_perm(words[2], words[3], selector) >> pair % 2 * 8;
        decode_pair<C>(low, high, group.zeros + 2 * pair, a);
#pragma unroll
        for (int tb = 0; tb < C::kTokenBlocks; ++tb) {
          float (&d)[4] = products[pair][tb];
          multiply_add<C::kOperand>(d, a, b[tb][0], b[tb][1], d[0], d[1], d[2], d[3]);
        }
      }
    }
    from += int64_t(C::kAhead) * 16 * p.words;
  }
  if (now >= 0) promote();

#pragma unroll
  for (int pair = 0; pair < 4; ++pair)
#pragma unroll
    for (int tb = 0; tb < C::kTokenBlocks; ++tb)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int token = tb * 8 + 2 * t + e % 2, column = g * 8 + column_of(2 * pair + e / 2);
        sums_of_warps[(warp * C::kTokens + token) * C::kColumns + column] = sums[pair][tb][e];
      }
  __syncthreads();
  for (int i = threadIdx.x; i < p.m * C::kColumns; i += 32 * C::kWarps) {
    int token = i / C::kColumns, n = blockIdx.x * C::kColumns + i % C::kColumns;
    if (n >= w.n) continue;
    float total = 0.0f;
#pragma unroll
    for (int other = 0; other < C::kWarps; ++other) total += sums_of_warps[other * C::kTokens * C::kColumns + i];
    if (!isfinite(total)) total = NAN;
    int64_t index = int64_t(token) * w.n + n;
    if constexpr (C::kOperand == Operand::kHalf) {
      static_cast<__half*>(p.out)[index] = __float2half_rn(total);
    } else {
      static_cast<__nv_bfloat16*>(p.out)[index] = __float2bfloat16_rn(total);
    }
  }
}

template <class Element, int kTokenBlocks>
Status launch_gemm(GemmParams const& p, Stream stream) {
  using C = GemmConfig<Element, kTokenBlocks>;
  dim3 grid((p.weight.n + C::kColumns - 1) / C::kColumns);
  return launch(awq_gemm<C>, grid, 32 * C::kWarps, C::kSharedBytes, stream, p);
}

}  // namespace

Status launch_awq_gemm(AwqWeight const& w, void const* x, int64_t x_stride, int m, void* out, Stream stream) {
  GemmParams p{w, static_cast<uint16_t const*>(x), x_stride, out, m, w.n / 8, w.k / w.groups / 16};
  if (w.type == DataType::kFloat16) return m <= 8 ? launch_gemm<__half, 1>(p, stream) : launch_gemm<__half, 2>(p, stream);
  return m <= 8 ? launch_gemm<__nv_bfloat16, 1>(p, stream) : launch_gemm<__nv_bfloat16, 2>(p, stream);
}

Status launch_dequantize_awq(AwqWeight const& weight, void* out, Stream stream) {
  return weight.type == DataType::kFloat16 ? launch_type<__half>(weight, out, stream)
                                           : launch_type<__nv_bfloat16>(weight, out, stream);
}

}  // namespace cutlass_ops
