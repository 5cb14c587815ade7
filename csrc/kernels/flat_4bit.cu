// Floats <-> 4-bit codes of a code book in flat blocks, as bitsandbytes stores them: both only move
// memory, 2.6 bytes an element for fp16.
//
//   dequantise   a thread takes 4 bytes of codes to one 16-byte store; values from a table in
//                shared memory, one copy a lane
//   quantise     a thread takes 8 elements to one 4-byte store; lanes that share a block share
//                their largest value by shuffles, and where a block is longer than the 256 elements
//                of a warp's turn, the warp keeps all of it in registers
//
// A code is the number of limits ("cuts") below v = x / absmax. Instead of 15 comparisons: v picks
// one of 65 ranges of width 1/32, in which lies at most one cut, and a table has that cut and the
// codes on either side of it. The range comes from the bits of a float: fma(v, 32, 49152 + 32) is
// in [32768, 65536), where the unit in the last place is 2^-8, so its bits from 8 on hold
// floor(32 * v + 32), and stand where the address of a 256-byte row (32 lanes x 8 bytes) wants
// them. Near a range's ends the rounding of that sum (at most 2^-14 of v) may choose the neighbour,
// so a cut counts as inside if it is within a little more than the range. Code books with two cuts
// in a range are searched cut by cut.
#include <cute/arch/util.hpp>

#include "device/launch.cuh"
#include "device/scalar.cuh"
#include "dispatch/launchers.h"
#include "formats/decode.cuh"

namespace cutlass_ops {
namespace {

constexpr int kThreads = 256;

// ---- dequantise

// One launch covers all with `rounds` vectors of 16 bytes a thread.
template <class T>
struct DequantizeTurn {
  static constexpr int kElements = 16 / int(sizeof(T));  // of a thread's store
  static constexpr int kRounds = 4;
};

__device__ __forceinline__ float block_absmax(FlatProblem const& p, float const* nested_values,
                                              int64_t block) {
  if (!p.nested_codes) return __ldg(p.absmax + block);
  return __fadd_rn(
      __fmul_rn(nested_values[__ldg(p.nested_codes + block)], __ldg(p.nested_absmax + block / 256)),
      __ldg(p.nested_offset));
}

// kElements codes, the first in the highest nibble of byte 0.
template <int kElements>
__device__ __forceinline__ uint32_t load_codes(uint8_t const* packed, int64_t element) {
  if constexpr (kElements == 8) {
    uint32_t word;
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(packed + element / 2));
    return word;
  } else {
    uint16_t word;
    asm("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(word) : "l"(packed + element / 2));
    return word;
  }
}

template <class T>
__device__ __forceinline__ void store_values(T* to, float const (&v)[8]) {
  __stcs(reinterpret_cast<uint4*>(to),
         make_uint4(pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]), pack_pair<T>(v[4], v[5]),
                    pack_pair<T>(v[6], v[7])));
}
__device__ __forceinline__ void store_values(float* to, float const (&v)[4]) {
  __stcs(reinterpret_cast<float4*>(to), make_float4(v[0], v[1], v[2], v[3]));
}
__device__ __forceinline__ void store_one(__half* to, float v) { *to = __float2half_rn(v); }
__device__ __forceinline__ void store_one(__nv_bfloat16* to, float v) {
  *to = __float2bfloat16_rn(v);
}
__device__ __forceinline__ void store_one(float* to, float v) { *to = v; }

template <class T>
__global__ void __launch_bounds__(kThreads, 8)
    dequantize_flat(__grid_constant__ FlatProblem const p, int log_block, int rounds) {
  using Turn = DequantizeTurn<T>;
  constexpr int kElements = Turn::kElements;
  __shared__ __align__(128) float book[16 * 32];
  __shared__ float nested_values[256];
  pdl_wait_and_launch_dependents();
  for (int i = threadIdx.x; i < 16 * 32; i += kThreads) book[i] = p.book[i / 32];
  if (p.nested_codes) nested_values[threadIdx.x] = p.nested_book[threadIdx.x];
  __syncthreads();
  auto value = [&](uint32_t code_at_7) {  // the code in bits 7..10
    return *reinterpret_cast<float const*>(reinterpret_cast<uint8_t const*>(book) +
                                           ((code_at_7 & 0x780u) | threadIdx.x % 32 * 4));
  };
  T* out = static_cast<T*>(p.floats);
  int64_t begin = int64_t(blockIdx.x) * kThreads * rounds;
  uint32_t codes[Turn::kRounds];
  float absmax[Turn::kRounds];
#pragma unroll
  for (int r = 0; r < Turn::kRounds; ++r) {
    int64_t element = (begin + r * kThreads + threadIdx.x) * kElements;
    if (r >= rounds || element >= p.count) break;
    if (element + kElements <= p.count) {
      codes[r] = load_codes<kElements>(p.packed, element);
    } else {
      codes[r] = 0;
      for (int i = 0; 2 * i < int(p.count - element); ++i)
        codes[r] |= uint32_t(p.packed[element / 2 + i]) << 8 * i;
    }
    absmax[r] = block_absmax(p, nested_values, element >> log_block);
  }
#pragma unroll
  for (int r = 0; r < Turn::kRounds; ++r) {
    int64_t element = (begin + r * kThreads + threadIdx.x) * kElements;
    if (r >= rounds || element >= p.count) break;
    float v[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      // Element i's nibble begins at bit 8 * (i / 2) + 4 * (i even).
      int bit = i / 2 * 8 + (i % 2 == 0 ? 4 : 0);
      v[i] = __fmul_rn(value(bit < 7 ? codes[r] << (7 - bit) : codes[r] >> (bit - 7)), absmax[r]);
    }
    if (element + kElements <= p.count) {
      store_values(out + element, v);
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        if (element + i < p.count) store_one(out + element + i, v[i]);
    }
  }
}

// ---- quantise

constexpr int kRanges = 128;  // 65, and one that NaN ends up in, the last
constexpr int kTableBytes = kRanges * 32 * 8;

// Blocks that share an SM; for GPUs before sm_90 ptxas wants a few more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kMinCtasPerSm = 3;
#else
constexpr int kMinCtasPerSm = 4;
#endif

struct Range {
  float tail_split;
  uint32_t codes;  // bytes: of v not above the cut, and above it; the same with the
                   // sign of magnitudes
};

// The ranges, from the cuts. False if two cuts are in one of this thread's.
template <bool kMagnitudes>
__device__ __forceinline__ bool make_table(FlatProblem const& p, uint8_t* table) {
  constexpr int kCuts = kMagnitudes ? 7 : 15;
  float cuts[kCuts];
#pragma unroll
  for (int i = 0; i < kCuts; ++i) cuts[i] = __ldg(p.cuts + i);
  uint64_t first_codes = 0, last_codes = 0;
#pragma unroll
  for (int i = 0; i <= kCuts; ++i)
    (i < 8 ? first_codes : last_codes) |= uint64_t(__ldg(p.codes + i)) << i % 8 * 8;
  auto code = [&](int i) {
    return uint32_t((i < 8 ? first_codes : last_codes) >> i % 8 * 8) & 0xffu;
  };
  bool good = true;
  for (int i = threadIdx.x; i < kRanges * 2; i += kThreads) {  // two threads a range, 16 lanes each
    int index = i / 2, below = 0, inside = 0;
    float low = float(index - 32) / 32 - 1e-4f, high = float(index - 31) / 32 + 1e-4f,
          tail_split = INFINITY;
#pragma unroll
    for (int c = kCuts - 1; c >= 0; --c) {
      bool is_below = cuts[c] < low, is_inside = !is_below && cuts[c] <= high;
      below += is_below, inside += is_inside;
      if (is_inside) tail_split = cuts[c];
    }
    good &= inside <= 1;
    if (index > 65) below = inside = 0;  // NaN is above no cut
    uint32_t choice = code(below) | code(below + (inside > 0)) << 8;
    choice |= (choice | 0x0808u) << 16;
    uint4 twice =
        make_uint4(__float_as_uint(tail_split), choice, __float_as_uint(tail_split), choice);
    uint4* row = reinterpret_cast<uint4*>(table + i * 128);
#pragma unroll
    for (int j = 0; j < 8; ++j) row[(j + threadIdx.x) % 8] = twice;
  }
  return good;
}

// The value in a word, or in its lower (`half` 0) or upper half.
template <class T>
__device__ __forceinline__ float number(uint32_t word, int half) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(word);
  } else {
    return unpack_half<T>(word, half);
  }
}

// The larger of the bits of magnitudes; 16-bit types in both halves.
template <class T>
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  return sizeof(T) == 4 ? max(a, b) : __vmaxu2(a, b);
}

// Eight elements as they are stored.
template <class T>
struct Eight {
  static constexpr int kWords = 2 * int(sizeof(T));
  uint32_t words[kWords];

  __device__ __forceinline__ void load(T const* from) {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      // Not __ldcs(): evict-first loads are slower (docs/tuning-notes.md).
      uint4 v = reinterpret_cast<uint4 const*>(from)[i];
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  }

  __device__ __forceinline__ float value(int i) const {
    return sizeof(T) == 4 ? number<T>(words[i], 0) : number<T>(words[i / 2], i % 2);
  }

  // The bits of the largest magnitude, compared as integers: NaN is larger than all. For 16-bit
  // types two magnitudes, one of each half of the words.
  __device__ __forceinline__ uint32_t largest() const {
    uint32_t most = 0;
#pragma unroll
    for (uint32_t word : words)
      most = larger<T>(most, word & (sizeof(T) == 4 ? 0x7fffffffu : 0x7fff7fffu));
    return most;
  }
};

// The code of v by all cuts in turn.
__device__ __noinline__ uint32_t search(float const* cuts, uint8_t const* codes, float v) {
  int below = 0;
#pragma unroll 1
  for (int i = 0; i < 15; ++i) below += v > cuts[i];
  return codes[below];
}

// 1 / absmax as __frcp_rn rounds it; 0 for infinity, NaN for NaN, any number for 0.
template <class T>
__device__ __forceinline__ float reciprocal_of(float absmax) {
  if constexpr (std::is_same_v<T, __half>) {
    // One Newton step from the approximation rounds correctly away from the ends of fp32's range:
    // equal to __frcp_rn for all fp16 numbers except zero (tested).
    float a, approximate;
    asm("max.NaN.f32 %0, %1, 0f33800000;" : "=f"(a) : "f"(absmax));  // 2^-24, fp16's least
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(approximate) : "f"(a));
    // inf: 0 + 0 * min(NaN, 1)
    return fmaf(approximate, fminf(fmaf(-a, approximate, 1.0f), 1.0f), approximate);
  } else {
    return isnan(absmax) ? absmax : __frcp_rn(fmaxf(absmax, 1e-38f));
  }
}

// A warp's work on kBlocks blocks of kChunks x 256 elements.
template <class T, int kChunks, int kBlocks, bool kMagnitudes>
struct Turn {
  static constexpr int64_t kSpan = 256 * kChunks * kBlocks;
  using Eights = Eight<T>[kBlocks][kChunks];
  // two blocks' largest values in one word
  static constexpr bool kPairs = sizeof(T) == 2 && kBlocks % 2 == 0;
  static constexpr int kMaxima = kPairs ? kBlocks / 2 : kBlocks;
  static_assert(kBlocks == 1 || kChunks == 1);

  FlatProblem const& p;
  T const* x;
  uint32_t lane_bytes;  // of the table's rows
  float row_bias;
  T const* tail;
  int lanes, log_block;

  // kAll: all elements are there.
  template <bool kAll>
  __device__ __forceinline__ void load(Eights& eights, int64_t begin) const {
    begin += threadIdx.x % 32 * 8;
#pragma unroll
    for (int i = 0; i < kBlocks * kChunks; ++i) {
      Eight<T>& eight = eights[i / kChunks][i % kChunks];
      if (kAll || begin + i * 256 + 8 <= p.count) {
        eight.load(x + begin + i * 256);
      } else {
#pragma unroll
        for (int word = 0; word < Eight<T>::kWords; ++word)
          eight.words[word] =
              begin + i * 256 < p.count ? reinterpret_cast<uint32_t const*>(tail)[word] : 0;
      }
    }
  }

  // kFast: all elements are there, and the table serves.
  template <bool kFast>
  __device__ __forceinline__ void run(Eights const& eights, int64_t begin, bool searched) const {
    int lane = threadIdx.x % 32;
    begin += lane * 8;
    uint32_t largest[kMaxima] = {};
#pragma unroll
    for (int i = 0; i < kMaxima; ++i) {
      if constexpr (kPairs) {
        uint32_t const first = eights[2 * i][0].largest(), second = eights[2 * i + 1][0].largest();
        largest[i] =
            __vmaxu2(__byte_perm(first, second, 0x5410u), __byte_perm(first, second, 0x7632u));
      } else {
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
          largest[i] = larger<T>(largest[i], eights[i][c].largest());
        if (sizeof(T) == 2) largest[i] = __vmaxu2(largest[i], __byte_perm(largest[i], 0u, 0x1032u));
      }
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      if (distance >= lanes) break;
#pragma unroll
      for (uint32_t& most : largest) most = larger<T>(most, __shfl_xor_sync(~0u, most, distance));
    }
    auto absmax_of = [&](uint32_t word, int b) { return number<T>(word, kPairs ? b % 2 : 0); };
    // Each of the lanes that share blocks stores the largest value of a different block, so one
    // store suffices.
    if (int const place = lane & (lanes - 1); place < kBlocks) {
      uint32_t mine = largest[0];
#pragma unroll
      for (int i = 1; i < kMaxima; ++i)
        if (place / (kBlocks / kMaxima) == i) mine = largest[i];
      int64_t const block_begin = begin + place * (256 - 8);
      if (kFast || block_begin < p.count)
        p.absmax[block_begin >> log_block] = place % 2 ? absmax_of(mine, 1) : absmax_of(mine, 0);
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float const reciprocal = reciprocal_of<T>(absmax_of(largest[b * kMaxima / kBlocks], b));
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        Eight<T> const& eight = eights[b][c];
        int64_t element = begin + (b * kChunks + c) * 256;
        uint32_t packed =
            kFast || !searched ? look_up(eight, reciprocal) : search_all(eight, reciprocal);
        if (kFast || element + 8 <= p.count) {
          __stcs(reinterpret_cast<uint32_t*>(p.packed + element / 2), packed);
        } else if (element < p.count) {
#pragma unroll 1
          for (int j = 0; element + 2 * j < p.count; ++j)
            p.packed[element / 2 + j] = uint8_t(packed >> 8 * j);
        }
      }
    }
  }

  __device__ __forceinline__ uint32_t look_up(Eight<T> const& eight, float reciprocal) const {
    uint32_t nibbles[2] = {};  // bytes: codes of the even and of the odd elements
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float scaled = __fmul_rn(eight.value(i), reciprocal),
            key = kMagnitudes ? fabsf(scaled) : scaled;
      uint32_t address =
          decode::and_or(__float_as_uint(fmaf(key, 32.0f, row_bias)), 0x7f00u, lane_bytes);
      uint2 range;
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(range.x), "=r"(range.y)
                   : "r"(address));
      // The byte of range.y that becomes byte i / 2: 0 or 1, and 2 or 3 for negative numbers.
      uint32_t const step = 1u << i / 2 * 4, keep = 0x3210u - step * uint32_t(i / 2) + step * 4;
      uint32_t selector = key > __uint_as_float(range.x) ? keep + step : keep;
      if (kMagnitudes && scaled < 0.0f) selector += 2 * step;
      nibbles[i % 2] = __byte_perm(nibbles[i % 2], range.y, selector);
    }
    return nibbles[0] * 16 + nibbles[1];
  }

  __device__ __forceinline__ uint32_t search_all(Eight<T> const& eight, float reciprocal) const {
    uint32_t packed = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      packed |= search(p.cuts, p.codes, __fmul_rn(eight.value(i), reciprocal))
                << (i / 2 * 8 + (i % 2 == 0 ? 4 : 0));
    return packed;
  }
};

// Independent blocks of a warp at a time, and whether it loads the next turn's elements before it
// processes this turn's, as registers allow.
template <class T>
constexpr int blocks_at_once(int chunks) {
  return sizeof(T) == 2 && chunks == 1 ? 2 : 1;
}
template <class T>
constexpr bool looks_ahead(int chunks) {
  return blocks_at_once<T>(chunks) * chunks * Eight<T>::kWords <= 8;
}

// kChunks: chunks of 256 elements in a block (1 where blocks have 256 or fewer). A warp has kBlocks
// independent blocks at a time.
template <class T, int kChunks, bool kMagnitudes>
__global__ void __launch_bounds__(kThreads, kChunks == 16  ? 1
                                            : kChunks == 8 ? 2
                                            : kChunks == 4 ? 3
                                                           : kMinCtasPerSm)
    quantize_flat(__grid_constant__ FlatProblem const p, int lanes, int log_block) {
  constexpr int kBlocks = blocks_at_once<T>(kChunks);
  constexpr bool kAhead = looks_ahead<T>(kChunks);
  extern __shared__ __align__(256) uint8_t table[];
  pdl_wait_and_launch_dependents();
  bool good = make_table<kMagnitudes>(p, table);
  T const* x = static_cast<T const*>(p.floats);
  __shared__ __align__(16) T tail[8];  // the last elements, fewer than eight, and zeros
  if (threadIdx.x < 8) {
    int64_t element = p.count / 8 * 8 + threadIdx.x;
    tail[threadIdx.x] = element < p.count ? x[element] : T(0.0f);
  }
  bool searched = !__syncthreads_and(good);
  using Turn = Turn<T, kChunks, kBlocks, kMagnitudes>;
  constexpr int64_t kSpan = Turn::kSpan;
  // the grid has at most four blocks a SM
  int const step = int(gridDim.x) * int(kThreads / 32 * kSpan);
  int64_t begin = (int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32) * kSpan;
  // Rows are counted from the beginning of shared memory, in which the table follows a
  // few hundred bytes.
  uint32_t const table_begin = cute::cast_smem_ptr_to_uint(table);
  Turn const turn{p,     x,        threadIdx.x % 32 * 8, 49184.0f + float(table_begin / 256), tail,
                  lanes, log_block};
  bool const fast = kMagnitudes || !searched;
  typename Turn::Eights now;
  if constexpr (kAhead) {
    typename Turn::Eights next;
    if (fast && begin + kSpan <= p.count) turn.template load<true>(next, begin);
    for (; fast && begin + kSpan <= p.count; begin += step) {
#pragma unroll
      for (int i = 0; i < kBlocks * kChunks; ++i)
        now[i / kChunks][i % kChunks] = next[i / kChunks][i % kChunks];
      if (begin + step + kSpan <= p.count) turn.template load<true>(next, begin + step);
      turn.template run<true>(now, begin, false);
    }
  } else {
    for (; fast && begin + kSpan <= p.count; begin += step) {
      turn.template load<true>(now, begin);
      turn.template run<true>(now, begin, false);
    }
  }
  for (; begin < p.count; begin += step) {
    turn.template load<false>(now, begin);
    turn.template run<false>(now, begin, searched);
  }
}

template <class T>
Status launch_dequantize_type(FlatProblem const& p, int multiprocessors, Stream stream) {
  using Turn = DequantizeTurn<T>;
  int64_t turns = ceil_div(p.count, Turn::kElements), most = int64_t(multiprocessors) * 8;
  int rounds = turns > most * kThreads ? Turn::kRounds : 1;
  int64_t blocks = ceil_div(turns, int64_t(kThreads) * rounds);
  return launch(dequantize_flat<T>, dim3(unsigned(blocks)), kThreads, 0, stream, p,
                log2_of(p.blocksize), rounds);
}

template <class T, int kChunks>
Status launch_quantize_chunks(FlatProblem const& p, int multiprocessors, Stream stream) {
  constexpr int kBlocks = blocks_at_once<T>(kChunks);
  int64_t blocks = ceil_div(p.count, int64_t(kThreads) * 8 * kChunks * kBlocks),
          most = int64_t(multiprocessors) * 4;
  dim3 grid(unsigned(blocks < most ? blocks : most));
  int lanes = p.blocksize < 256 ? p.blocksize / 8 : 32;
  return p.magnitudes ? launch(quantize_flat<T, kChunks, true>, grid, kThreads, kTableBytes, stream,
                               p, lanes, log2_of(p.blocksize))
                      : launch(quantize_flat<T, kChunks, false>, grid, kThreads, kTableBytes,
                               stream, p, lanes, log2_of(p.blocksize));
}

template <class T>
Status launch_quantize_type(FlatProblem const& p, int multiprocessors, Stream stream) {
  switch (p.blocksize) {
    case 512:
      return launch_quantize_chunks<T, 2>(p, multiprocessors, stream);
    case 1024:
      return launch_quantize_chunks<T, 4>(p, multiprocessors, stream);
    case 2048:
      return launch_quantize_chunks<T, 8>(p, multiprocessors, stream);
    case 4096:
      return launch_quantize_chunks<T, 16>(p, multiprocessors, stream);
    default:
      return launch_quantize_chunks<T, 1>(p, multiprocessors, stream);
  }
}

}  // namespace

Status launch_dequantize_flat(FlatProblem const& problem, Stream stream) {
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  switch (problem.type) {
    case DataType::kFloat16:
      return launch_dequantize_type<__half>(problem, device.multiprocessors, stream);
    case DataType::kBFloat16:
      return launch_dequantize_type<__nv_bfloat16>(problem, device.multiprocessors, stream);
    default:
      return launch_dequantize_type<float>(problem, device.multiprocessors, stream);
  }
}

Status launch_quantize_flat(FlatProblem const& problem, Stream stream) {
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  switch (problem.type) {
    case DataType::kFloat16:
      return launch_quantize_type<__half>(problem, device.multiprocessors, stream);
    case DataType::kBFloat16:
      return launch_quantize_type<__nv_bfloat16>(problem, device.multiprocessors, stream);
    default:
      return launch_quantize_type<float>(problem, device.multiprocessors, stream);
  }
}

}  // namespace cutlass_ops
