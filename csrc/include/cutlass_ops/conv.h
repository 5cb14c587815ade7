// Convolutions of int8 with scales that are known beforehand, or with one for all of x, on a GPU.
// As ops.h has it, every call returns at once, works on the stream and device it is given,
// allocates nothing and never synchronises.
//
//   acc[pixel, n] = bias[n] + sum over the taps inside of x of (x - x_zero_point) * w
//   y = clamp(rint(fl32(float(acc) * m[n])) + y_zero_point)
//   m[n] = fl32(fl32(x_scale * w_scale[n]) / y_scale)
//
// acc is int32 and wraps. Where x is floats, they are quantised first, as quantize_activations
// does, with one scale and zero point; acc has no bias, and y is of 16 bits:
//
//   y = clamp(float(acc) * (x_scale * w_scale[n]) + bias[n])
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cutlass_ops/ops.h"

namespace cutlass_ops {

enum class ConvOutput : int8_t { kInt8 = 0, kUInt8, kInt32, kFloat16, kBFloat16 };  // kInt32: acc
constexpr bool is_float(ConvOutput type) {
  return type == ConvOutput::kFloat16 || type == ConvOutput::kBFloat16;
}
enum class ConvOrder : int8_t { kByChannels = 0, kByTaps, kFlat };

// An int8 weight in natural order, with the sums that compensate zero points of x. The zero points
// of a weight are subtracted from its codes beforehand.
struct ConvWeight {
  int n = 0;         // output channels
  int channels = 0;  // of one of the convolution's groups
  int height = 1, width = 1;
  // Padded with zeros, from an address that is a multiple of 16 bytes:
  //   kByChannels  [n][height][width][stored_channels(channels)]
  //   kByTaps      [height][ceil(width / 4)][n][4 taps], of depthwise convolutions
  //   kFlat        [n][stored_channels(height * width * channels)], of few channels
  ConvOrder order = ConvOrder::kByChannels;
  int8_t const* codes = nullptr;
  int32_t const* sums = nullptr;  // [n]: of a channel's codes; read where x has a zero point
  void const* scales = nullptr;   // of scale_type, in the order of packed weights (group_row)
  DataType scale_type = DataType::kFloat32;
};

constexpr int kConvVector = 16;  // bytes that kernels load at a time
constexpr int stored_channels(int channels) {
  return (channels + kConvVector - 1) / kConvVector * kConvVector;
}

// A product [batch, channels] x [n, channels]^T is a convolution with 1 x 1 taps of an image of one
// row.
struct ConvProblem {
  ConvWeight weight;
  void const* x = nullptr;  // int8 or uint8 [batch][height][width][channels], or floats of x_type
  bool x_unsigned = false;
  // The type of floats, of which x_scale and x_zero_point are found. There is one group, out_type
  // is a float, and of each 16 channels of the weight's codes channel c is at
  // activation_position(c).
  DataType x_type = DataType::kNone;
  bool x_symmetric = true;  // their zero point is 0
  int batch = 0, height = 1, width = 1, channels = 0;
  int stride[2] = {1, 1}, padding[2] = {0, 0}, dilation[2] = {1, 1};  // along height and width
  int groups = 1;
  void const* bias = nullptr;  // [n]: int32, or of bias_type and then rounded to steps of x_scale *
                               // w_scale; or null
  bool bias_int32 = false;
  DataType bias_type = DataType::kNone;
  float x_scale = 1.0f, y_scale = 1.0f;
  int x_zero_point = 0, y_zero_point = 0;
  Activation activation = Activation::kNone;  // none, relu, relu6 or clamp
  float clamp_low = 0.0f, clamp_high = 0.0f;
  void* out = nullptr;  // [batch][out_height()][out_width()][n]
  ConvOutput out_type = ConvOutput::kInt8;

  int out_height() const { return out_extent(height, weight.height, 0); }
  int out_width() const { return out_extent(width, weight.width, 1); }
  int64_t pixels() const { return int64_t(batch) * out_height() * out_width(); }
  bool padded() const { return padding[0] > 0 || padding[1] > 0; }

 private:
  int out_extent(int size, int taps, int axis) const {
    return (size + 2 * padding[axis] - dilation[axis] * (taps - 1) - 1) / stride[axis] + 1;
  }
};

constexpr int64_t kMostConvPixels = int64_t(1) << 30;  // of the result
constexpr int kMostConvExtent = 1 << 24;               // of any size, stride, padding or dilation

// How a convolution is launched.
struct ConvPlan {
  char const* kernel = nullptr;  // a file of csrc/kernels
  int block_m = 0, block_n = 0;  // pixels and output channels of a tile
  int cluster_size = 1;
  int slices = 1;  // of the channels, by the CTAs of a cluster
  int ctas_per_sm = 1;
  int stages = 0;
  int grid = 0;
  // x is first copied (floats: as codes) to the workspace, with so many channels a pixel (of the
  // result, with those of all its taps, if the weight is flat); 0: it is not.
  int copied_channels = 0;
  size_t workspace = 0;
  int64_t predicted_clocks = 0;  // 0: not predicted
  bool windows = false;  // x is loaded as the windows of patches of the result, not tap by tap
  bool overlaps = true;  // CTAs may start while the previous kernel in the stream still runs
  bool turns = false;    // each warpgroup multiplies a tile in turn, or a part of every one
};

// The order of codes that the kernels read: by taps if each output channel has one input channel,
// flat if a tap has so few channels that most of a vector would be padding.
constexpr ConvOrder conv_order(int n, int channels, int taps, int groups) {
  if (channels == 1 && n == groups && n % 4 == 0) return ConvOrder::kByTaps;
  return groups == 1 && taps > 1 && channels <= kConvVector / 2 ? ConvOrder::kFlat
                                                                : ConvOrder::kByChannels;
}

// Choose a kernel. Needs no GPU: `device` may describe one that is not there.
Status plan_conv_int8(ConvProblem const& problem, Device const& device, ConvPlan* plan);
// All plans that implement the problem, the chosen one first. The results have the same bits.
Status plans_conv_int8(ConvProblem const& problem, Device const& device,
                       std::vector<ConvPlan>* plans);
// `plan` is one of those for this problem, for the current device or one that is older.
Status conv_int8(ConvProblem const& problem, ConvPlan const& plan, Workspace workspace,
                 Stream stream);

}  // namespace cutlass_ops
