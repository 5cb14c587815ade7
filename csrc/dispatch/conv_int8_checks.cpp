#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>

#include "dispatch/checks.h"
#include "dispatch/conv_int8.h"
#include "dispatch/conv_int8_plan.h"
#include "dispatch/problem.h"

namespace cutlass_ops {

std::string shape(ConvProblem const& p) {
  ConvWeight const& w = p.weight;
  auto const text = [](std::initializer_list<int> numbers) {
    std::string all;
    for (int number : numbers) all += (all.empty() ? "[" : ", ") + std::to_string(number);
    return all + "]";
  };
  return " [x=" + text({p.batch, p.height, p.width, p.channels}) +
         ", weight=" + text({w.n, w.height, w.width, w.channels}) +
         ", stride=" + text({p.stride[0], p.stride[1]}) +
         ", padding=" + text({p.padding[0], p.padding[1]}) +
         ", dilation=" + text({p.dilation[0], p.dilation[1]}) +
         ", groups=" + std::to_string(p.groups) + "]";
}

namespace {

struct Named {
  char const* name;
  int64_t value, least, most;
};

Status check_ranges(std::initializer_list<Named> numbers) {
  for (Named const& v : numbers) {
    if (v.value < v.least || v.value > v.most) {
      return invalid(std::string(v.name) + " is " + std::to_string(v.value) + "; an integer from " +
                     std::to_string(v.least) + " to " + std::to_string(v.most) + " is expected");
    }
  }
  return {};
}

// What floats need, and what else there is for codes alone.
Status check_floats(ConvProblem const& p) {
  if (!quantizes_x(p)) {
    if (is_float(p.out_type)) return invalid("out_type is a float, but x is codes");
    return {};
  }
  if (!is_float(p.x_type)) return invalid("x_type is not a float type");
  if (!is_float(p.out_type)) return invalid("x is floats, but out_type is not fp16 or bf16");
  if (p.groups > 1)
    return unsupported("groups is " + std::to_string(p.groups) + "; floats are taken in one group");
  if (p.bias && p.bias_int32) return invalid("the bias is int32, but x is floats");
  if (p.x_unsigned || p.x_zero_point || p.y_zero_point)
    return invalid("x is floats; zero points and x_unsigned are of codes");
  int64_t const k = int64_t(p.weight.height) * p.weight.width * p.weight.channels,
                most = most_summed_codes(!p.x_symmetric);
  if (k > most)
    return unsupported("a row of the weight has " + std::to_string(k) +
                       " codes, whose int32 sums may overflow; at most " + std::to_string(most) +
                       " are supported");
  return {};
}

Status check_numbers(ConvProblem const& p) {
  if (Status status = check_floats(p); !status.ok()) return status;
  auto const scale = [](char const* name, float value) {
    return std::isfinite(value) && value > 0
               ? Status()
               : invalid(std::string(name) + " is " + std::to_string(value) +
                         "; a positive number is expected");
  };
  if (Status status = scale("x_scale", p.x_scale); !status.ok()) return status;
  if (Status status = scale("y_scale", p.y_scale); !status.ok()) return status;
  int const x_low = p.x_unsigned ? 0 : -128, y_low = p.out_type == ConvOutput::kInt8 ? -128 : 0;
  Status status = check_ranges({{"x_zero_point", p.x_zero_point, x_low, x_low + 255},
                                {"y_zero_point", p.y_zero_point, y_low,
                                 p.out_type == ConvOutput::kInt32 ? 0 : y_low + 255}});
  if (!status.ok()) return status;
  if (status = check_activation(p.activation, p.clamp_low, p.clamp_high); !status.ok())
    return status;
  ActivationInfo const& activation = *find_activation(p.activation);
  if (!activation.clamps)
    return unsupported("activation is " + std::string(activation.name) + "; static int8 takes " +
                       activation_names(true));
  if (p.activation != Activation::kNone && p.out_type == ConvOutput::kInt32)
    return invalid("there is an activation, but the result is the int32 sums themselves");
  if (!is_float(p.weight.scale_type)) return invalid("scale_type is not a float type");
  if (p.bias && !p.bias_int32 && !is_float(p.bias_type))
    return invalid("bias_type is neither int32 nor a float type");
  return {};
}

Status check_memory(ConvProblem const& p) {
  ConvWeight const& w = p.weight;
  int const bias_bytes = p.bias_int32 || p.bias_type == DataType::kFloat32 ? 4 : 2;
  return check_addresses(
      {{"x", p.x, quantizes_x(p) ? bytes_of(p.x_type) : 1},
       {"the weight's codes", w.codes, kConvVector},
       {"the weight's sums", w.sums, int(sizeof(int32_t)), has_zero_point(p)},
       {"the weight's scales", w.scales, w.scale_type == DataType::kFloat32 ? 4 : 2},
       {"bias", p.bias, bias_bytes, false}});
}

}  // namespace

Status check_conv(ConvProblem const& p) {
  ConvWeight const& w = p.weight;
  Status status = check_ranges({{"n", w.n, 1, kMostConvExtent},
                                {"the weight's channels", w.channels, 1, kMostConvExtent},
                                {"the weight's height", w.height, 1, kMostConvExtent},
                                {"the weight's width", w.width, 1, kMostConvExtent},
                                {"batch", p.batch, 1, kMostConvExtent},
                                {"height", p.height, 1, kMostConvExtent},
                                {"width", p.width, 1, kMostConvExtent},
                                {"the stride along height", p.stride[0], 1, kMostConvExtent},
                                {"the stride along width", p.stride[1], 1, kMostConvExtent},
                                {"the padding along height", p.padding[0], 0, kMostConvExtent},
                                {"the padding along width", p.padding[1], 0, kMostConvExtent},
                                {"the dilation along height", p.dilation[0], 1, kMostConvExtent},
                                {"the dilation along width", p.dilation[1], 1, kMostConvExtent},
                                {"groups", p.groups, 1, w.n}});
  if (!status.ok()) return status;
  if (w.n % p.groups || int64_t(w.channels) * p.groups != p.channels) {
    return invalid("groups is " + std::to_string(p.groups) + " and x has " +
                   std::to_string(p.channels) +
                   " channels; a divisor of n = " + std::to_string(w.n) + ", and " +
                   std::to_string(w.channels) + " channels a group, are expected");
  }
  int64_t const taps = int64_t(w.height) * w.width;
  for (int axis : {0, 1}) {
    int64_t const size = axis ? p.width : p.height, count = axis ? w.width : w.height;
    int64_t const padded = size + 2 * int64_t(p.padding[axis]),
                  span = int64_t(p.dilation[axis]) * (count - 1) + 1;
    if (span > padded || span > kMostConvExtent) {
      return invalid("the kernel takes " + std::to_string(span) + " pixels along " +
                     (axis ? "width" : "height") + "; x has " + std::to_string(padded) +
                     " with padding, and at most " + std::to_string(kMostConvExtent) +
                     " are supported");
    }
  }
  int64_t const most = std::numeric_limits<int32_t>::max();
  if (taps * stored_channels(w.channels) > most)
    return unsupported("a row of the weight has more than 2^31 bytes");
  if (int64_t(p.out_height()) * p.out_width() > kMostConvPixels / p.batch)
    return unsupported("the result has more than " + std::to_string(kMostConvPixels) + " pixels");
  // The largest numbers that any kernel counts: 16-byte vectors of x that are copied, CTAs of
  // conv_int8_depthwise, and tiles of the smallest size.
  int64_t const pixels = int64_t(p.height) * p.width,
                pieces = stored_channels(p.channels) / kConvVector;
  int64_t const tiles = ceil_div(p.pixels(), kDepthwisePixels) * ceil_div(w.n, kDepthwiseChannels) /
                        kDepthwiseThreads;
  if (pixels > most / p.batch / pieces || tiles > most ||
      (p.pixels() / kLeastConvTile + 1) * (w.n + p.groups) > most)
    return unsupported("the convolution has more than 2^31 tiles, or x more than 2^35 bytes");
  // Threads of conv_int8_depthwise, and 16-byte vectors of gathered taps.
  int64_t const flat_vectors =
      stored_channels(int(std::min(taps * w.channels, int64_t(1) << 20))) / kConvVector;
  int64_t const segments =
      int64_t(p.batch) * p.out_height() * ceil_div(p.out_width(), kDepthwisePixels);
  if ((w.order == ConvOrder::kByTaps && segments > most / ceil_div(w.n, kDepthwiseChannels)) ||
      (w.order == ConvOrder::kFlat && p.pixels() > most / flat_vectors))
    return unsupported("the convolution has more than 2^31 vectors of outputs or of gathered taps");
  if (w.order != conv_order(w.n, w.channels, int(taps), p.groups))
    return invalid("the weight's codes are not in conv_order()");
  status = check_numbers(p);
  return status.ok() ? check_memory(p) : status;
}

}  // namespace cutlass_ops
