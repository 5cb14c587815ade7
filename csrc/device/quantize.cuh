// From floats to int8 codes: a lane loads kLaneColumns columns of a row, lanes find the range of a
// block or a row, a Quantizer makes the codes. Shared by the quantising kernel and by kernels that
// quantise x themselves, so that all make the same codes.
#pragma once

#include <type_traits>

#include "cutlass_ops/layout.h"
#include "device/scalar.cuh"

namespace cutlass_ops {

constexpr int kLaneColumns = 16;
constexpr float kTiny = 0x1p-100f;  // a range below this is a range of zero

// The range of a run of values: [low, high] around zero, or, symmetric, [0, high] of the absolute
// values.
template <bool kSymmetric>
struct Range {
  float low, high;

  __device__ __forceinline__ void add(float v) {
    high = max_or_nan(high, kSymmetric ? fabsf(v) : v);
    if (!kSymmetric) low = min_or_nan(low, v);
  }
  __device__ __forceinline__ void add(Range const& other) {
    high = max_or_nan(high, other.high);
    if (!kSymmetric) low = min_or_nan(low, other.low);
  }
  // Combines the ranges of the `lanes` lanes (a power of two) around this one.
  __device__ __forceinline__ void share(int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      Range other{kSymmetric ? 0.0f : __shfl_xor_sync(~0u, low, distance),
                  __shfl_xor_sync(~0u, high, distance)};
      add(other);
    }
  }
};

// The range of all x, as find_range() leaves it: the bits of -low and high.
template <bool kSymmetric>
__device__ __forceinline__ Range<kSymmetric> given_range(uint32_t const* range) {
  return {kSymmetric ? 0.0f : -__uint_as_float(__ldcg(range)), __uint_as_float(__ldcg(range + 1))};
}

// The range of a lane's values.
template <bool kSymmetric, int kCount>
__device__ __forceinline__ Range<kSymmetric> range_of(float const (&v)[kCount]) {
  Range<kSymmetric> parts[kCount / 2];
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    float a = v[2 * i], b = v[2 * i + 1];
    parts[i] = kSymmetric ? Range<kSymmetric>{0.0f, max_or_nan(fabsf(a), fabsf(b))}
                          : Range<kSymmetric>{min_or_nan(a, b), max_or_nan(a, b)};
  }
#pragma unroll
  for (int half = kCount / 4; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) parts[i].add(parts[i + half]);
  if (!kSymmetric) parts[0].add(Range<kSymmetric>{0.0f, 0.0f});
  return parts[0];
}

// a / b as IEEE has it, for a and b in 2^-100 .. 2^100: a reciprocal that is nearly right, a Newton
// step, and two compensations of the quotient by its remainder, which is exact. __fdiv_rn does the
// same, and calls a function for the other cases, at the cost of registers and branches.
__device__ __forceinline__ float quotient(float a, float b) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  y = __fmaf_rn(y, __fmaf_rn(-b, y, 1.0f), y);
  float q = __fmul_rn(a, y);
  q = __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
  return __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
}

template <bool kSymmetric>
struct Quantizer {
  float scale, reciprocal, zero = 0.0f;

  __device__ __forceinline__ explicit Quantizer(Range<kSymmetric> const& range) {
    float span = kSymmetric ? range.high : __fsub_rn(range.high, range.low);
    constexpr float kLevels = kSymmetric ? 127.0f : 255.0f;
    // Where the divisor is constant, the product with its reciprocal takes one compensation (tried
    // for every fp32).
    float quotients[2] = {__fmul_rn(span, 1.0f / kLevels),
                          __fmul_rn(quotient(kLevels, __fmul_rn(span, 0x1p-13f)), 0x1p-13f)};
    quotients[0] = __fmaf_rn(__fmaf_rn(-kLevels, quotients[0], span), 1.0f / kLevels, quotients[0]);
    bool const finite =
        span < __int_as_float(0x7f800000);  // not if it is NaN; and high - low may overflow
                                            // although both are finite
    bool const regular = finite && span >= kTiny;
    scale = regular ? quotients[0] : finite ? 1.0f : __int_as_float(0x7fffffff);
    reciprocal = regular ? quotients[1] : 0.0f;
    if (!kSymmetric)
      zero =
          regular
              ? fminf(fmaxf(rintf(__fsub_rn(-128.0f, __fmul_rn(range.low, reciprocal))), -128.0f),
                      127.0f)
              : 0.0f;
  }

  // rint(v * reciprocal) in the lowest bits: adding 1.5 * 2^23 rounds half to even and leaves
  // the integer there.
  static constexpr float kMagic = 12582912.0f;
  __device__ __forceinline__ uint32_t rounded(float v) const {
    return __float_as_uint(__fadd_rn(__fmul_rn(v, reciprocal), kMagic));
  }

  // the bits of kMagic
  __device__ __forceinline__ int shift() const { return int(zero) - 0x4b400000; }

  // The code of v minus the zero point. A symmetric code needs no clamp: |v| * (127 / amax) is at
  // most 127 and a few units in its last place. In a block with NaN or infinity the code may be
  // anything: the scale is NaN.
  __device__ __forceinline__ float value(float v) const {
    float q = __fadd_rn(__uint_as_float(rounded(v)), -kMagic);
    return kSymmetric ? q : fminf(fmaxf(q + zero, -128.0f), 127.0f) - zero;
  }

  // The codes of a.x, b.x, a.y, b.y from the lowest byte on; symmetric, if `swapped`, of b.x, a.x,
  // b.y, a.y.
  __device__ __forceinline__ uint32_t codes(float2 a, float2 b, bool swapped = false) const {
    uint32_t q[4] = {rounded(a.x), rounded(b.x), rounded(a.y), rounded(b.y)}, word;
    if (kSymmetric) {
      word = __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040),
                         swapped ? 0x4501 : 0x5410);
    } else {
      asm("{ .reg .b32 upper;\n"
          "cvt.pack.sat.s8.s32.b32 upper, %4, %3, 0;\n"
          "cvt.pack.sat.s8.s32.b32 %0, %2, %1, upper; }"
          : "=r"(word)
          : "r"(int(q[0]) + shift()), "r"(int(q[1]) + shift()), "r"(int(q[2]) + shift()),
            "r"(int(q[3]) + shift()));
    }
    return reciprocal == 0.0f ? 0 : word;
  }
};

// 16 neighbouring columns. T is __half or __nv_bfloat16, or float for a type that is known at run
// time; results are rounded to that type. (Rounding a sum or product of 16-bit floats to fp32 first
// would change nothing: fp32 has twice their digits and two.)
template <class T>
struct Columns {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  uint32_t words[8];  // i: the pair of columns 2i and 2i + 1

  __device__ __forceinline__ static Pair pair_of(uint32_t word) {
    return reinterpret_cast<Pair const&>(word);
  }
  __device__ __forceinline__ static uint32_t word_of(Pair pair) {
    return reinterpret_cast<uint32_t const&>(pair);
  }
  __device__ __forceinline__ float2 pair(int i) const {
    if constexpr (std::is_same_v<T, __half>) return __half22float2(pair_of(words[i]));
    return make_float2(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u));
  }
  __device__ __forceinline__ void set(int i, float2 v, DataType) {
    if constexpr (std::is_same_v<T, __half>) {
      words[i] = word_of(__float22half2_rn(v));
    } else {
      words[i] = word_of(__float22bfloat162_rn(v));
    }
  }
  __device__ __forceinline__ void add(Columns const& other, DataType) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      words[i] = word_of(__hadd2_rn(pair_of(words[i]), pair_of(other.words[i])));
  }
  __device__ __forceinline__ void multiply(Columns const& other, DataType) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      words[i] = word_of(__hmul2_rn(pair_of(words[i]), pair_of(other.words[i])));
  }
};
template <>
struct Columns<float> {
  float values[kLaneColumns];

  __device__ __forceinline__ float2 pair(int i) const {
    return make_float2(values[2 * i], values[2 * i + 1]);
  }
  __device__ __forceinline__ static float rounded(float v, DataType type) {
    if (type == DataType::kFloat16) v = __half2float(__float2half_rn(v));
    if (type == DataType::kBFloat16) v = __bfloat162float(__float2bfloat16_rn(v));
    return v;
  }
  __device__ __forceinline__ void set(int i, float2 v, DataType type) {
    values[2 * i] = rounded(v.x, type), values[2 * i + 1] = rounded(v.y, type);
  }
  __device__ __forceinline__ void add(Columns const& other, DataType type) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i)
      values[i] = rounded(__fadd_rn(values[i], other.values[i]), type);
  }
  __device__ __forceinline__ void multiply(Columns const& other, DataType type) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i)
      values[i] = rounded(__fmul_rn(values[i], other.values[i]), type);
  }
};

// The range of a run of columns while lanes exchange theirs: two values in a word. NaN goes
// through.
template <class T, bool kSymmetric>
struct Span {
  using Pair = typename Columns<T>::Pair;
  Pair pair{};  // symmetric: two maxima of absolute values; otherwise high and -low

  __device__ __forceinline__ void add(Columns<T> const& c) {
    if (kSymmetric) {
#pragma unroll
      for (uint32_t word : c.words) pair = __hmax2_nan(pair, __habs2(c.pair_of(word)));
      return;
    }
    Pair high = c.pair_of(c.words[0]), low = high;
#pragma unroll
    for (int i = 1; i < 8; ++i)
      high = __hmax2_nan(high, c.pair_of(c.words[i])),
      low = __hmin2_nan(low, c.pair_of(c.words[i]));
    low = __hneg2(low);
    pair = __hmax2_nan(pair, __hmax2_nan(Pair(high.x, low.x), Pair(high.y, low.y)));
  }
  __device__ __forceinline__ void add(Span other) { pair = __hmax2_nan(pair, other.pair); }
  __device__ __forceinline__ Span of_lane(int distance) const {
    return {__shfl_xor_sync(~0u, pair, distance)};
  }
  __device__ __forceinline__ Range<kSymmetric> range() const {
    float2 v = make_float2(float(pair.x), float(pair.y));
    return kSymmetric ? Range<kSymmetric>{0.0f, max_or_nan(v.x, v.y)}
                      : Range<kSymmetric>{-v.y, v.x};
  }
};
template <bool kSymmetric>
struct Span<float, kSymmetric> {
  Range<kSymmetric> all{};

  __device__ __forceinline__ void add(Columns<float> const& c) {
#pragma unroll
    for (float v : c.values) all.add(v);
  }
  __device__ __forceinline__ void add(Span const& other) { all.add(other.all); }
  __device__ __forceinline__ Span of_lane(int distance) const {
    return {{kSymmetric ? 0.0f : __shfl_xor_sync(~0u, all.low, distance),
             __shfl_xor_sync(~0u, all.high, distance)}};
  }
  __device__ __forceinline__ Range<kSymmetric> range() const { return all; }
};

// The codes of 16 columns in kernel order: 0, 8, 1, 9, ..., 7, 15. `swapped`: columns 8 to 15 come
// first in c.
template <class T, bool kSymmetric>
__device__ __forceinline__ uint4 codes_of(Columns<T> const& c,
                                          Quantizer<kSymmetric> const& quantizer,
                                          bool swapped = false) {
  static_assert(activation_position(0) == 0 && activation_position(8) == 1 &&
                activation_position(1) == 2 && activation_position(15) == 15);
  return make_uint4(quantizer.codes(c.pair(0), c.pair(4), swapped),
                    quantizer.codes(c.pair(1), c.pair(5), swapped),
                    quantizer.codes(c.pair(2), c.pair(6), swapped),
                    quantizer.codes(c.pair(3), c.pair(7), swapped));
}

// The sum of 16 codes.
__device__ __forceinline__ int sum_of_codes(uint4 codes) {
  int const ones = 0x01010101;
  return __dp4a(
      int(codes.x), ones,
      __dp4a(int(codes.y), ones, __dp4a(int(codes.z), ones, __dp4a(int(codes.w), ones, 0))));
}

// Rows of floats whose columns may be gathered.
struct FloatRows {
  void const* x;
  DataType x_type;
  int64_t x_stride;
  int k;
  int32_t const* perm;
  bool vector_loads;  // rows start on 16 bytes, K is a multiple of kLaneColumns, and no permutation

  __host__ __device__ FloatRows(void const* x_, DataType type, int64_t stride, int k_,
                                int32_t const* perm_)
      : x(x_),
        x_type(type),
        x_stride(stride),
        k(k_),
        perm(perm_),
        vector_loads(!perm && reinterpret_cast<uintptr_t>(x) % 16 == 0 &&
                     stride * bytes_of(type) % 16 == 0 && k % kLaneColumns == 0) {}
};

// A pair of fp16 or bf16.
__device__ __forceinline__ float2 floats_of(uint32_t word, DataType type) {
  return type == DataType::kFloat16
             ? __half22float2(reinterpret_cast<__half2 const&>(word))
             : make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

// Eight pairs of fp16 or bf16.
__device__ __forceinline__ void to_floats(uint32_t const (&words)[8], DataType type,
                                          float (&v)[kLaneColumns]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float2 pair = floats_of(words[i], type);
    v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
  }
}

// Columns from K on are zeros.
__device__ __forceinline__ void load_columns(FloatRows const& q, int64_t row, int column,
                                             float (&v)[kLaneColumns]) {
  int64_t start = row * q.x_stride;
  if (!q.vector_loads) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      int k = column + i;
      v[i] = k < q.k ? load_float(q.x, q.x_type, start + (q.perm ? q.perm[k] : k)) : 0.0f;
    }
  } else if (q.x_type == DataType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 4) {
      float4 four = column < q.k ? *reinterpret_cast<float4 const*>(static_cast<float const*>(q.x) +
                                                                    start + column + i)
                                 : float4{};
      v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
    }
  } else {
    uint4 const* source =
        reinterpret_cast<uint4 const*>(static_cast<uint16_t const*>(q.x) + start + column);
    uint4 halves[2] = {};
    if (column < q.k) halves[0] = source[0], halves[1] = source[1];
    uint32_t const words[8] = {halves[0].x, halves[0].y, halves[0].z, halves[0].w,
                               halves[1].x, halves[1].y, halves[1].z, halves[1].w};
    to_floats(words, q.x_type, v);
  }
}

}  // namespace cutlass_ops
