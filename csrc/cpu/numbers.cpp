#include "cpu/cpu_kernels.h"

namespace cutlass_ops {

namespace {

float half_value(uint16_t bits) {
  uint32_t const sign = uint32_t(bits >> 15) << 31, exponent = bits >> 10 & 31,
                 mantissa = bits & 1023;
  uint32_t const normal = (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13;
  return as_float(sign | (exponent == 0 ? as_bits(float(mantissa) * 0x1p-24f) : normal));
}

uint16_t load_half(void const* data, int64_t index) {
  uint16_t bits;
  std::memcpy(&bits, static_cast<char const*>(data) + 2 * index, sizeof bits);
  return bits;
}

}  // namespace

float load_float(void const* data, DataType type, int64_t index) {
  float value;
  load_row(data, type, index, 1, &value);
  return value;
}

void load_row(void const* data, DataType type, int64_t index, int count, float* out) {
  if (type == DataType::kFloat32) {
    std::memcpy(out, static_cast<char const*>(data) + 4 * index, size_t(count) * sizeof(float));
  } else if (type == DataType::kBFloat16) {
    for (int i = 0; i < count; ++i) out[i] = as_float(uint32_t(load_half(data, index + i)) << 16);
  } else {
    for (int i = 0; i < count; ++i) out[i] = half_value(load_half(data, index + i));
  }
}

void store_float(void* data, DataType type, int64_t index, float value) {
  if (type == DataType::kFloat32)
    return void(std::memcpy(static_cast<char*>(data) + 4 * index, &value, sizeof value));
  uint32_t const bits = as_bits(value), sign = bits >> 31, magnitude = bits & 0x7fffffff;
  uint16_t half;
  if (type == DataType::kBFloat16) {
    half = magnitude > 0x7f800000 ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  } else {
    uint32_t rounded;
    if (magnitude > 0x7f800000) {
      rounded = 0x7e00;
    } else if (magnitude >= as_bits(65520.0f)) {
      rounded = 0x7c00;
    } else if (magnitude < as_bits(0x1p-14f)) {
      // The last place of 0.5 in fp32 equals that of fp16's smallest values, so the addition
      // rounds.
      rounded = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
    } else {
      rounded = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    }
    half = uint16_t(sign << 15 | rounded);
  }
  std::memcpy(static_cast<char*>(data) + 2 * index, &half, sizeof half);
}

}  // namespace cutlass_ops
