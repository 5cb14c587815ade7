// Operand A of 16-bit MMAs with each weight as its value, in units of Fold::kUnit: scale * (code -
// zero point) + offset, or scale * codebook[code], rounded once to the type of x. csrc/formats/
// defines the meaning of codes; this file has the position of codes, scales, offsets and zero
// points in shared memory, and their conversion to fragments.
#pragma once

#include <type_traits>

#include "device/hopper.cuh"
#include "device/scalar.cuh"
#include "formats/decode.cuh"

namespace cutlass_ops {

// Whether a decoder's bits() are numbers, linear in codes.
template <class Decoder, class = void>
struct HasBitsUnit : std::false_type {};
template <class Decoder>
struct HasBitsUnit<Decoder, std::void_t<decltype(Decoder::bits_unit(0))>> : std::true_type {};

// Whether weights have zero points or offsets; kAny: tested at run time.
enum class AffineTerm { kNone, kZeros, kOffsets, kAny };

// kNarrow: scales and offsets are of x's type and applied in it by one operation, which rounds
// once; otherwise they are of any type, and the arithmetic is fp32. Code books and floats have
// neither zero points nor offsets.
//
// Where the bits of a code are a number (Decoder::bits_unit), one FMA makes a value of them: bits *
// (scale * kUnit / bits' unit) - bias * scale * kUnit. With scales of x's type, and nothing else,
// factor and addend are exact, so that the value is rounded once. The unit of bits is as small as
// 2^-133: kUnit keeps the factor finite for scales below 2^35, and values normal numbers for scales
// from 2^-86 on.
template <class Element_, class Format_, bool kNarrow_, AffineTerm kAffineTerm_>
struct Fold {
  using Element = Element_;
  using Format = Format_;
  using Unscaled = typename Format::template Unscaled<Element>;
  using Decoder = typename Unscaled::Decoder;
  static constexpr bool kNarrow = kNarrow_;
  static constexpr bool kHasBitsUnit = HasBitsUnit<Decoder>::value;
  static constexpr AffineTerm kAffineTerm = Format::kIntegers ? kAffineTerm_ : AffineTerm::kNone;
  static constexpr bool kZeros =
      kAffineTerm == AffineTerm::kZeros || kAffineTerm == AffineTerm::kAny;
  static constexpr bool kOffsets =
      kAffineTerm == AffineTerm::kOffsets || kAffineTerm == AffineTerm::kAny;
  // The unit of values, and of the sums of their products.
  static constexpr float kUnit = kHasBitsUnit && !(kNarrow && (kAffineTerm == AffineTerm::kZeros ||
                                                               kAffineTerm == AffineTerm::kOffsets))
                                     ? 0x1p-40f
                                     : Decoder::kUnit;
  static constexpr int kGroups = 2;        // in a step of 64 columns: of 32, the shortest
  static constexpr int kGroupKSlices = 2;  // MMAs of 16 columns in a group
  // Loads of 16 bytes of codes, of a thread in a step of 64 columns. Codes of two steps may be in
  // the same nibbles.
  static constexpr int kLoads = words_of_16_k(Format::kBits);
  static constexpr bool kStepsShareNibbles = nibble_columns(Format::kBits) == 2;
  static constexpr int kCodeStepBytes = kStepsShareNibbles ? 0 : kLoads * kUnitBytes;
  static constexpr int kGroupWords = kGroupKSlices * Unscaled::kWords;
};

struct GroupAddress {
  uint32_t scales, offsets, zeros;
};

// A row's scale and offset, applied to pairs of values of codes.
template <class F, bool kOffsets>
struct RowScale {
  uint32_t scale, offset;  // of F::Element, twice; or the bits of floats

  // From values of codes to bits of codes: `factor` and `addend` of the scale, both in F::kUnit.
  __device__ __forceinline__ void to_bits(float factor, float addend) {
    float const s = __uint_as_float(scale);
    if constexpr (kOffsets)
      offset = __float_as_uint(F::kOffsets ? fmaf(__uint_as_float(offset), F::kUnit, addend * s)
                                           : addend * s);
    scale = __float_as_uint(factor * s);
  }

  __device__ __forceinline__ uint32_t operator()(uint32_t v) const {
    using Element = typename F::Element;
    if constexpr (!F::kNarrow) {
      float const s = __uint_as_float(scale), o = __uint_as_float(offset);
      float const low = unpack_half<Element>(v, 0), high = unpack_half<Element>(v, 1);
      return !kOffsets ? pack_pair<Element>(__fmul_rn(low, s), __fmul_rn(high, s))
                       : pack_pair<Element>(__fmaf_rn(low, s, o), __fmaf_rn(high, s, o));
    } else if constexpr (std::is_same_v<Element, __half>) {
      using namespace decode::detail;
      return as_bits(!kOffsets ? __hmul2_rn(as_half2(v), as_half2(scale))
                               : __hfma2(as_half2(v), as_half2(scale), as_half2(offset)));
    } else {
      using namespace decode::detail;
      return as_bits(!kOffsets
                         ? __hmul2_rn(as_bfloat162(v), as_bfloat162(scale))
                         : __hfma2(as_bfloat162(v), as_bfloat162(scale), as_bfloat162(offset)));
    }
  }
};

// Scales or offsets of a thread's rows g and g + 8 in a group, which are adjacent.
template <class F>
struct RowPair {
  uint32_t words[F::kNarrow ? 1 : 2] = {};

  // `bytes`: the size of a value; 0 if there is none. The loads are predicated, since branches
  // would prevent the compiler from scheduling across them. kPresent: there is a value.
  template <bool kPresent>
  __device__ __forceinline__ void load(uint32_t from, int bytes) {
    if constexpr (F::kNarrow && kPresent) {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(from));
      return;
    }
    asm volatile(
        "{\n"
        " .reg .pred narrow;\n"
        " setp.eq.b32 narrow, %2, 2;\n"
        " @narrow ld.shared.u32 %0, [%1];\n"
        "}"
        : "+r"(words[0])
        : "r"(from), "r"(bytes));
    if constexpr (!F::kNarrow) {
      asm volatile(
          "{\n"
          " .reg .pred wide;\n"
          " setp.eq.b32 wide, %3, 4;\n"
          " @wide ld.shared.v2.u32 {%0, %1}, [%2];\n"
          "}"
          : "+r"(words[0]), "+r"(words[1])
          : "r"(from), "r"(bytes));
    }
  }
  // A pair of bf16 times two constants of eight significant bits.
  __device__ __forceinline__ RowPair times(float of_g, float of_g8) const {
    using namespace decode;
    using namespace decode::detail;
    if (of_g == 1.0f && of_g8 == 1.0f) return *this;
    RowPair product;
    product.words[0] = as_bits(__hmul2_rn(
        as_bfloat162(words[0]), as_bfloat162(bfloat16_bits(of_g) | bfloat16_bits(of_g8) << 16)));
    return product;
  }
  // In the form of RowScale.
  __device__ __forceinline__ void values(DataType type, uint32_t& g, uint32_t& g8) const {
    using namespace decode::detail;
    if constexpr (F::kNarrow && std::is_same_v<typename F::Element, __half>) {
      g = as_bits(__low2half2(as_half2(words[0]))), g8 = as_bits(__high2half2(as_half2(words[0])));
    } else if constexpr (F::kNarrow) {
      g = as_bits(__low2bfloat162(as_bfloat162(words[0]))),
      g8 = as_bits(__high2bfloat162(as_bfloat162(words[0])));
    } else {
      bool const is_float = type == DataType::kFloat32, is_half = type == DataType::kFloat16;
      uint32_t const half[2] = {__float_as_uint(unpack_half<__half>(words[0], 0)),
                                __float_as_uint(unpack_half<__half>(words[0], 1))};
      g = is_float ? words[0] : is_half ? half[0] : words[0] << 16;
      g8 = is_float ? words[1] : is_half ? half[1] : words[0] & 0xffff0000u;
    }
  }
};

// A thread's codes of a step, as stored in shared memory. `units`: the address of its first 16
// bytes of the K tile.
template <class F>
struct StoredCodes {
  uint32_t words[4 * F::kLoads];

  __device__ __forceinline__ void load(uint32_t units, int step) {
#pragma unroll
    for (int i = 0; i < F::kLoads; ++i) load_part(units, step, i);
  }
  __device__ __forceinline__ void load_part(uint32_t units, int step, int i) {
    load_shared(units + step * F::kCodeStepBytes + i * kUnitBytes,
                reinterpret_cast<uint32_t (&)[4]>(words[4 * i]));
  }

  // The words of a group of 32 columns of the step. Those of a nibble's second column are shifted
  // here, where decoders that shift, too, do both at once.
  struct Group {
    uint32_t words[F::kGroupWords];
    __device__ __forceinline__ operator uint32_t const*() const { return words; }
  };
  __device__ __forceinline__ auto group(int i, int step) const {
    if constexpr (F::kStepsShareNibbles) {
      Group shifted;
#pragma unroll
      for (int j = 0; j < F::kGroupWords; ++j)
        shifted.words[j] = words[i * F::kGroupWords + j] >> 2 * step;
      return shifted;
    } else {
      return words + i * F::kGroupWords;
    }
  }
};

// The scales, offsets and zero points of a group, as stored in shared memory.
template <class F>
struct StoredGroup {
  RowPair<F> scales, offsets;
  uint32_t zeros = 0;

  // kPlain: the caller knows that the weight has neither zero points nor offsets.
  template <bool kPlain = false, class Params>
  __device__ __forceinline__ void load(GroupAddress from, Params const& p) {
    scales.template load<true>(from.scales, p.scale_bytes);
    if constexpr (kPlain) return;
    if constexpr (F::kOffsets)
      offsets.template load<F::kAffineTerm != AffineTerm::kAny>(
          from.offsets,
          F::kAffineTerm == AffineTerm::kOffsets || p.weight.offsets ? p.offset_bytes : 0);
    if constexpr (F::kAffineTerm == AffineTerm::kZeros) {
      asm volatile("ld.shared.u16 %0, [%1];" : "=r"(zeros) : "r"(from.zeros));
    } else if constexpr (F::kZeros) {
      asm volatile(
          "{\n"
          " .reg .pred present;\n"
          " setp.ne.b32 present, %2, 0;\n"
          " @present ld.shared.u16 %0, [%1];\n"
          "}"
          : "+r"(zeros)
          : "r"(from.zeros), "r"(int(p.weight.zeros != nullptr)));
    }
  }

  // Operand A of the group's k-slices, or of kSlices from kFirst on, where it is one of 16 columns.
  template <bool kPlain = false, int kFirst = 0, int kSlices = F::kGroupKSlices, class Params>
  __device__ __forceinline__ void decode(uint32_t const* codes, uint32_t table, Params const& p,
                                         uint32_t (&a)[F::kGroupKSlices][4]) const {
    decode_with<kPlain, false, kFirst, kSlices>(scales, offsets, codes, table, p, a);
  }

  // decode() with scales and offsets that the caller passes. kFloats: scales, and offsets if there
  // are any, are fp32, and there are no zero points.
  template <bool kPlain, bool kFloats, int kFirst, int kSlices, class Params>
  __device__ __forceinline__ void decode_with(RowPair<F> const& own_scales,
                                              RowPair<F> const& own_offsets, uint32_t const* codes,
                                              uint32_t table, Params const& p,
                                              uint32_t (&a)[F::kGroupKSlices][4]) const {
    using Decoder = typename F::Decoder;
    constexpr bool kScalesAlone = kPlain || F::kAffineTerm == AffineTerm::kNone;
    constexpr bool kZeros = F::kZeros && !kScalesAlone && !kFloats;
    DataType const scale_type = kFloats ? DataType::kFloat32 : p.weight.scale_type,
                   offset_type = kFloats ? DataType::kFloat32 : p.weight.offset_type;
    auto const apply = [&](auto const& g, auto const& g8, auto const& to_numbers) {
#pragma unroll
      for (int k_slice = kFirst; k_slice < kFirst + kSlices; ++k_slice) {
        to_numbers(codes + k_slice * F::Unscaled::kWords, a[k_slice]);
#pragma unroll
        for (int r = 0; r < 4; ++r) a[k_slice][r] = r % 2 ? g8(a[k_slice][r]) : g(a[k_slice][r]);
      }
    };
    if constexpr (F::kHasBitsUnit && (!F::kNarrow || kScalesAlone)) {
      constexpr float kOfG = F::kUnit / Decoder::bits_unit(0),
                      kOfG8 = F::kUnit / Decoder::bits_unit(1),
                      kMinusBias = -Decoder::kBias * F::kUnit;
      RowScale<F, Decoder::kBias != 0 || (F::kOffsets && !kScalesAlone)> g, g8;
      if constexpr (F::kNarrow) {
        own_scales.times(kOfG, kOfG8).values(scale_type, g.scale, g8.scale);
        if constexpr (Decoder::kBias != 0)
          own_scales.times(kMinusBias, kMinusBias).values(scale_type, g.offset, g8.offset);
      } else {
        own_scales.values(scale_type, g.scale, g8.scale);
        own_offsets.values(offset_type, g.offset, g8.offset);
        g.to_bits(kOfG, kZeros ? kMinusBias - F::kUnit * int8_t(zeros) : kMinusBias);
        g8.to_bits(kOfG8, kZeros ? kMinusBias - F::kUnit * int8_t(zeros >> 8) : kMinusBias);
      }
      apply(g, g8, [](uint32_t const* words, uint32_t (&out)[4]) { Decoder::bits(words, out); });
    } else {
      auto const unscaled = [&] {
        if constexpr (kZeros) {
          return typename F::Unscaled(zeros);
        } else {
          return typename F::Unscaled();
        }
      }();
      RowScale<F, F::kOffsets && !kScalesAlone> g, g8;
      if constexpr (F::kNarrow && F::kUnit != 1.0f) {
        constexpr float kOfScale = F::kUnit / Decoder::kUnit;
        own_scales.times(kOfScale, kOfScale).values(scale_type, g.scale, g8.scale);
        own_offsets.times(F::kUnit, F::kUnit).values(offset_type, g.offset, g8.offset);
      } else {
        own_scales.values(scale_type, g.scale, g8.scale);
        own_offsets.values(offset_type, g.offset, g8.offset);
      }
      apply(g, g8, [&](uint32_t const* words, uint32_t (&out)[4]) {
        unscaled.fragment(words, table, out);
      });
    }
  }
};

}  // namespace cutlass_ops
