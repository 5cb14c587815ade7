#include "cutlass_ops/weight.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/pack.h"
#include "dispatch/checks.h"
#include "dispatch/problem.h"

namespace cutlass_ops {
namespace {

int64_t groups_of(CanonicalWeight const& w) {
  return w.group_size > 0 ? ceil_div(w.k, w.group_size) : 1;
}

// Where the parts start in the buffer, and its end.
struct Places {
  size_t codes = 0, scales, zeros, offsets, codebook, end;

  explicit Places(CanonicalWeight const& w) {
    size_t const values = size_t(groups_of(w) * padded_rows(w.n));
    scales = align_256(size_t(packed_bytes(w.n, w.k, info(w.format).bits)));
    zeros = scales + align_256(values * size_t(bytes_of(w.scale_type)));
    offsets = zeros + (w.zeros ? align_256(values) : 0);
    codebook = offsets + (w.offsets ? align_256(values * size_t(bytes_of(w.offset_type))) : 0);
    end = codebook + (w.codebook ? 16 * sizeof(float) : 0);
  }
};

// f(each value) of [n][groups] to [groups][n_pad], each row panel's rows in the order of
// group_row(); padding is 0.
template <class T, class F>
void place(T const* from, CanonicalWeight const& w, void* to, F const& f) {
  int64_t const groups = groups_of(w), n_pad = padded_rows(w.n);
  auto* const placed = static_cast<T*>(to);
  std::fill_n(placed, groups * n_pad, T(0));
  for (int64_t row = 0; row < w.n; ++row) {
    int64_t const position = row / kRowsPerPanel * kRowsPerPanel + group_row(int(row));
    for (int64_t group = 0; group < groups; ++group)
      placed[group * n_pad + position] = f(from[row * groups + group]);
  }
}

void place_floats(void const* from, DataType type, CanonicalWeight const& w, void* to) {
  auto const same = [](auto value) { return value; };
  if (type == DataType::kFloat32) return place(static_cast<float const*>(from), w, to, same);
  place(static_cast<uint16_t const*>(from), w, to, same);
}

// Checks what check_weight() checks of a packed weight.
Status check(CanonicalWeight const& weight, void const* buffer) {
  Status const status = check_addresses(
      {{"buffer", buffer, 16}, {"codes", weight.codes, 1}, {"scales", weight.scales, 1}});
  if (!status.ok()) return status;
  PackedWeight packed;
  packed.n = weight.n, packed.k = weight.k, packed.format = weight.format;
  packed.group_size = weight.group_size;
  packed.scale_type = weight.scale_type, packed.offset_type = weight.offset_type;
  packed.codes = static_cast<uint8_t const*>(buffer), packed.scales = buffer;
  if (weight.zeros) packed.zeros = static_cast<int8_t const*>(buffer);
  if (weight.offsets) packed.offsets = buffer;
  if (weight.codebook) packed.codebook = static_cast<float const*>(buffer);
  return check_weight(packed);
}

}  // namespace

size_t weight_bytes(CanonicalWeight const& weight) {
  bool const sized = weight.n > 0 && weight.k > 0 && is_group_size(weight.group_size);
  return sized && find_format(weight.format) ? Places(weight).end : 0;
}

PackedWeight make_weight(CanonicalWeight const& weight, void const* buffer) {
  Places const places(weight);
  auto const* const bytes = static_cast<uint8_t const*>(buffer);
  PackedWeight w;
  w.n = weight.n, w.k = weight.k, w.format = weight.format, w.group_size = weight.group_size;
  w.scale_type = weight.scale_type, w.offset_type = weight.offset_type;
  w.codes = bytes + places.codes, w.scales = bytes + places.scales;
  if (weight.zeros) w.zeros = reinterpret_cast<int8_t const*>(bytes + places.zeros);
  if (weight.offsets) w.offsets = bytes + places.offsets;
  if (weight.codebook) w.codebook = reinterpret_cast<float const*>(bytes + places.codebook);
  return w;
}

Status pack_weight(CanonicalWeight const& weight, void* buffer, int threads) {
  if (Status status = check(weight, buffer); !status.ok()) return status;
  int const bits = info(weight.format).bits, midpoint = 1 << (bits - 1);
  int64_t const groups = groups_of(weight), values = weight.n * groups;
  for (int64_t i = 0; weight.zeros && i < values; ++i) {
    if (weight.zeros[i] >> bits)
      return {Status::kInvalid,
              "zeros[" + std::to_string(i / groups) + ", " + std::to_string(i % groups) + "] is " +
                  std::to_string(weight.zeros[i]) + "; accepted with bits = " +
                  std::to_string(bits) + ": 0 to " + std::to_string(2 * midpoint - 1)};
  }
  Places const places(weight);
  auto* const bytes = static_cast<uint8_t*>(buffer);
  try {
    pack(weight.codes, bytes, weight.n, weight.k, bits, threads);
  } catch (std::invalid_argument const& error) {
    return {Status::kInvalid, error.what()};
  }
  place_floats(weight.scales, weight.scale_type, weight, bytes + places.scales);
  if (weight.zeros)
    place(weight.zeros, weight, bytes + places.zeros,
          [=](uint8_t zero) { return uint8_t(zero - midpoint); });
  if (weight.offsets)
    place_floats(weight.offsets, weight.offset_type, weight, bytes + places.offsets);
  if (weight.codebook) std::memcpy(bytes + places.codebook, weight.codebook, 16 * sizeof(float));
  return {};
}

}  // namespace cutlass_ops
