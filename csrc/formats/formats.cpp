#include "formats/formats.h"

namespace cutlass_ops {
namespace {

template <class F>
constexpr FormatInfo kInfo = {F::kCodes,   F::kBits,  F::kIntegers, F::kZerosFitInt8,
                              F::kDecodes, F::kExact, F::kCodebook, F::kTableBytes};

}  // namespace

FormatInfo const* find_format(Format format) {
  FormatInfo const* found = nullptr;
  for_each_format([&](auto f) {
    if (format == f.kFormat) found = &kInfo<decltype(f)>;
  });
  return found;
}

FormatInfo const& info(Format format) {
  return *visit(format, [](auto f) { return &kInfo<decltype(f)>; });
}

}  // namespace cutlass_ops
