#include "dispatch/kernel_limits.h"

#include <cstdint>
#include <string>

#include "dispatch/checks.h"
#include "dispatch/launch_shape.h"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"
#include "formats/formats.h"

namespace cutlass_ops {
namespace {

// Code for sm_90a runs on Hopper only.
Field needs_hopper(GemmProblem const& problem, Device const& device,
                   int shared_memory = kHopperSharedBytes) {
  int const architecture = problem.architecture ? problem.architecture : device.architecture;
  if (architecture < 90 || device.architecture > 90) return Field::kArchitecture;
  return device.shared_memory < shared_memory ? Field::kSharedMemory : Field::kNone;
}
// PTX runs the portable kernels on later GPUs.
Field needs_ampere(GemmProblem const& problem, Device const& device) {
  if ((problem.architecture ? problem.architecture : device.architecture) < 80)
    return Field::kArchitecture;
  return device.shared_memory < kPortableSharedBytes ? Field::kSharedMemory : Field::kNone;
}
Field needs_few_rows(GemmProblem const& problem, int most) {
  if (is_image(problem)) return Field::kImage;
  if (problem.m > most) return Field::kRows;
  // The order of sums of decode kernels depends on M.
  return problem.batch_invariant ? Field::kBatchInvariant : Field::kNone;
}
Field needs_16_bit_x(GemmProblem const& problem) {
  if (multiplies_int8(problem)) return Field::kInt8X;
  return problem.x_type == DataType::kFloat32 ? Field::kFp32X : Field::kNone;
}
// The pixels of an image must be ones that TMA's im2col mode collects.
Field needs_tma_rows(GemmProblem const& problem) {
  return is_image(problem) && im2col_rank(problem.image) == 0 ? Field::kImageGeometry
                                                              : Field::kNone;
}
Field needs_int8_x(GemmProblem const& problem) {
  return multiplies_int8(problem) ? Field::kNone : Field::k16BitX;
}
// The first reason that is not kNone.
template <class... More>
Field first_of(Field field, More... more) {
  if constexpr (sizeof...(more) == 0) {
    return field;
  } else {
    return field != Field::kNone ? field : first_of(more...);
  }
}
// Two k-slices of 16 columns have the same scales.
Field needs_groups_of_32(PackedWeight const& w) {
  return w.group_size == 16 ? Field::kGroups : Field::kNone;
}
// Groups of 128 columns or more that are promoted by scales only.
Field needs_long_groups(PackedWeight const& w) {
  return has_short_groups(w) ? Field::kGroups : w.offsets ? Field::kOffsets : Field::kNone;
}
// Integers of a width that exact kernels have instances for.
Field needs_exact_integers(PackedWeight const& w) {
  return has_exact_kernels(w) ? Field::kNone : Field::kFormat;
}
// What decode_gemm and wgmma_decode take: with int8 x integers alone, and not of every width.
Field needs_decoded_codes(GemmProblem const& problem) {
  PackedWeight const& w = problem.weight;
  if (has_codebook(w)) return Field::kNone;
  if (!has_decode_kernels(w)) return Field::kFormat;
  return multiplies_int8(problem) ? needs_exact_integers(w) : Field::kNone;
}

}  // namespace

Field mma_gemm_a16_can(GemmProblem const& problem, Device const& device) {
  return first_of(needs_ampere(problem, device), needs_16_bit_x(problem));
}
// A stage has no room for the scales of blocks of 16 columns of pixels.
Field mma_gemm_a8_can(GemmProblem const& problem, Device const& device) {
  bool const blocks = is_image(problem) && problem.act_quant == ActQuant::kBlock;
  return first_of(needs_ampere(problem, device), needs_int8_x(problem),
                  blocks ? needs_groups_of_32(problem.weight) : Field::kNone);
}
Field book_gemm_a16_can(GemmProblem const& problem, Device const& device) {
  if (Field field = first_of(needs_few_rows(problem, 4), needs_ampere(problem, device),
                             needs_groups_of_32(problem.weight));
      field != Field::kNone)
    return field;
  return has_codebook(problem.weight) ? needs_16_bit_x(problem) : Field::kNoCodebook;
}
Field wgmma_gemm_a8_can(GemmProblem const& problem, Device const& device) {
  PackedWeight const& w = problem.weight;
  return first_of(
      needs_tma_rows(problem), needs_hopper(problem, device), needs_int8_x(problem),
      needs_long_groups(w), needs_exact_integers(w),
      is_image(problem) && activations_have_zeros(problem) ? Field::kXZeros : Field::kNone,
      zeros_fit_int8(w) || compensates_weight_zeros(problem) ? Field::kNone : Field::kWeightZeros);
}
Field wgmma_gemm_a16_can(GemmProblem const& problem, Device const& device) {
  PackedWeight const& w = problem.weight;
  return first_of(needs_tma_rows(problem), needs_hopper(problem, device), needs_16_bit_x(problem),
                  needs_long_groups(w), needs_exact_integers(w));
}
Field wgmma_fold16_can(GemmProblem const& problem, Device const& device) {
  return first_of(needs_tma_rows(problem), needs_hopper(problem, device),
                  fits_fold16(problem.weight) ? Field::kNone : Field::kGroups,
                  may_round(problem) ? Field::kNone : Field::kResult);
}
bool decode_gemm_has_groups(GemmProblem const& problem) {
  PackedWeight const& w = problem.weight;
  return w.group_size != 16 || (has_integer_codes(w) && !multiplies_int8(problem));
}
Field decode_gemm_can(GemmProblem const& problem, Device const& device) {
  PackedWeight const& w = problem.weight;
  if (Field field = needs_few_rows(problem, kMostDecodeGemmRows); field != Field::kNone)
    return field;
  int64_t const groups = w.group_size == -1 ? 1 : padded_k(w.k) / w.group_size + 1;
  return first_of(
      needs_hopper(problem, device, kPortableSharedBytes), needs_decoded_codes(problem),
      decode_gemm_has_groups(problem) ? Field::kNone : Field::kGroups,
      groups * padded_rows(w.n) < int64_t(1) << 29 ? Field::kNone : Field::kGroupVectors);
}
Field wgmma_decode_can(GemmProblem const& problem, Device const& device) {
  PackedWeight const& w = problem.weight;
  bool const own_scales = has_own_scales(w, problem.x_type);
  bool const more_rows = !multiplies_int8(problem) && !has_codebook(w) && own_scales;
  if (Field field = needs_few_rows(problem, more_rows ? kMostFloatDecodeRows : kMostDecodeRows);
      field != Field::kNone)
    return field;
  if (Field field = needs_hopper(problem, device); field != Field::kNone) return field;
  if (Field field = needs_decoded_codes(problem); field != Field::kNone) return field;
  if (has_codebook(w)) {
    if (w.group_size == 16 || w.group_size == 32) return Field::kGroups;
    if (!own_scales && w.scale_type != DataType::kFloat32) return Field::kScaleType;
    return is_irregular(problem) ? Field::kXLayout : Field::kNone;
  }
  if (Field field = needs_long_groups(w); field != Field::kNone) return field;
  if (multiplies_int8(problem)) return zeros_fit_int8(w) ? Field::kNone : Field::kWeightZeros;
  return !own_scales ? Field::kScaleType : is_irregular(problem) ? Field::kXLayout : Field::kNone;
}
Field wgmma_decode_fold16_can(GemmProblem const& problem, Device const& device) {
  bool const more_rows =
      !multiplies_int8(problem) && has_narrow_scales(problem.weight, problem.x_type);
  return first_of(needs_few_rows(problem, more_rows ? kMostFloatDecodeRows : kMostDecodeRows),
                  needs_hopper(problem, device),
                  may_round(problem) ? Field::kNone : Field::kResult);
}

std::string forbidden_by(KernelSpec const& spec, GemmProblem const& problem, Device const& device) {
  PackedWeight const& w = problem.weight;
  int const architecture = problem.architecture ? problem.architecture : device.architecture;
  switch (spec.can_implement(problem, device)) {
    case Field::kNone:
      return "";
    case Field::kArchitecture:
      return "architecture " + std::to_string(architecture);
    case Field::kSharedMemory:
      return std::to_string(device.shared_memory) + " bytes of shared memory";
    case Field::kRows:
      return std::to_string(problem.m) + " rows of x";
    case Field::kBatchInvariant:
      return "batch_invariant";
    case Field::kInt8X:
      return "int8 x";
    case Field::kFp32X:
      return "fp32 x";
    case Field::k16BitX:
      return "16-bit x";
    case Field::kXLayout:
      return w.perm ? "act order" : "rows of x that do not start on 16 bytes";
    case Field::kImage:
      return "an image";
    case Field::kXZeros:
      return "zero points of an image's pixels";
    case Field::kImageGeometry:
      return "strides, padding or dilation of the image beyond those of TMA's im2col mode";
    case Field::kGroups:
      return "groups of " + std::to_string(w.group_size);
    case Field::kGroupVectors:
      return "scales of 2^29 groups";
    case Field::kFormat:
      return info(w.format).codes;
    case Field::kNoCodebook:
      return "a weight without a code book";
    case Field::kScaleType:
      return "scales that are not of x's type";
    case Field::kWeightZeros:
      return "8-bit zero points";
    case Field::kOffsets:
      return "offsets";
    case Field::kResult:
      return problem.exact ? "exact" : "a result that is not of x's 16-bit type";
  }
  return "";
}

}  // namespace cutlass_ops
