#include "dispatch/checks.h"

#include <limits>

#include "dispatch/problem.h"
#include "formats/width.h"

namespace cutlass_ops {
namespace {

// Checks the number of columns of x that share a scale.
Status check_block(int block) {
  if (block == -1 || block == 16 || block == 32 || block == 64 || block == 128) return {};
  return unsupported("block is " + std::to_string(block) +
                     "; supported are 16, 32, 64, 128 and -1");
}

}  // namespace

bool is_float(DataType type) {
  return type == DataType::kFloat32 || type == DataType::kFloat16 || type == DataType::kBFloat16;
}

Status unsupported(std::string text) { return {Status::kUnsupported, std::move(text)}; }
Status invalid(std::string text) { return {Status::kInvalid, std::move(text)}; }

Status check_plain_rows(PackedWeight const& w, char const* operation) {
  if (!w.gated) return {};
  return unsupported("the weight is gated; " + std::string(operation) + " takes plain weights");
}

Status check_addresses(std::initializer_list<Address> addresses) {
  for (Address const& a : addresses) {
    if (!a.pointer && a.required) return invalid(std::string(a.name) + " is a null pointer");
    if (reinterpret_cast<uintptr_t>(a.pointer) % a.alignment) {
      return invalid(std::string(a.name) + " starts at an address that is no multiple of " +
                     std::to_string(a.alignment) + " bytes");
    }
  }
  return {};
}

Status check_stride(char const* name, int64_t stride, int64_t columns, int64_t rows) {
  if (rows <= 1 || stride >= columns) return {};
  return invalid(std::string(name) + " is " + std::to_string(stride) + "; at least " +
                 std::to_string(columns) + ", the elements of a row, is expected for " +
                 std::to_string(rows) + " rows");
}

std::string activation_names(bool clamps_only, bool of_experts) {
  std::string names;
  for (ActivationInfo const& info : kActivations)
    if ((info.clamps || !clamps_only) && (of_experts || !info.of_gate_and_up))
      names += (names.empty() ? "" : ", ") + std::string(info.name);
  return names;
}

Status check_activation(Activation activation, float clamp_low, float clamp_high, bool of_experts) {
  ActivationInfo const* const info = find_activation(activation);
  if (!info || (info->of_gate_and_up && !of_experts))
    return invalid("activation is " + (info ? info->name : std::to_string(int(activation))) +
                   "; supported are " + activation_names(false, of_experts));
  if (activation == Activation::kClampedSwiglu && !(std::isfinite(clamp_low) && clamp_high > 0))
    return invalid("clamp_low is " + std::to_string(clamp_low) + " and clamp_high " +
                   std::to_string(clamp_high) +
                   "; clamped_swiglu takes a finite factor and a limit above 0");
  if (activation == Activation::kClamp && !(clamp_low <= clamp_high))
    return invalid("clamp_low is " + std::to_string(clamp_low) + " and clamp_high " +
                   std::to_string(clamp_high) + "; the first must be at most the second");
  return {};
}

Status check_act_quant(ActQuant act_quant, bool of_image) {
  switch (act_quant) {
    case ActQuant::kNone:
    case ActQuant::kToken:
    case ActQuant::kBlock:
      return {};
    case ActQuant::kTensor:
      if (of_image) return {};
  }
  return invalid("act_quant is " + std::to_string(int(act_quant)) +
                 "; supported are none, token and block" + (of_image ? ", and tensor" : ""));
}

Status check_weight(PackedWeight const& w) {
  FormatInfo const* const format = find_format(w.format);
  if (!format) return unsupported("there is no format " + std::to_string(int(w.format)));
  if (w.n < 1 || w.k < 1) {
    return invalid("the weight's shape is [" + std::to_string(w.n) + ", " + std::to_string(w.k) +
                   "]; both must be at least 1");
  }
  if (w.gated && w.n % 16 != 0) {
    return invalid("n is " + std::to_string(w.n) +
                   "; a gated weight has a multiple of 16 rows, eight of gate's and eight of up's");
  }
  if (!is_group_size(w.group_size)) {
    return unsupported("group_size is " + std::to_string(w.group_size) +
                       "; supported are 16, 32, 64, multiples of 128, and -1");
  }
  if (!is_float(w.scale_type)) return invalid("scale_type is not a float type");
  if (w.offsets && !is_float(w.offset_type)) return invalid("offset_type is not a float type");
  if (w.zeros && w.offsets)
    return invalid("the weight has zeros and offsets; at most one is supported");
  if (!format->integers && (w.zeros || w.offsets)) {
    return unsupported("the weight has " + std::string(format->codes) + " and " +
                       (w.zeros ? "zeros" : "offsets") + "; only integers have either");
  }
  if (w.codebook && !format->codebook) {
    return unsupported("the weight has codebook and " + std::string(format->codes) +
                       "; codebook is for Format::kCodebook");
  }
  return check_addresses({{"codes", w.codes, kLoadBytes},
                          {"scales", w.scales, kLoadBytes},
                          {"zeros", w.zeros, kLoadBytes, false},
                          {"offsets", w.offsets, kLoadBytes, false},
                          {"perm", w.perm, kLoadBytes, false},
                          {"codebook", w.codebook, kLoadBytes, format->codebook},
                          {"sums", w.sums, kLoadBytes, false}});
}

// Checks the sizes of an image and of the result, which the caller allocated. `tap_columns`:
// columns of the weight for each tap.
static Status check_sizes(GemmProblem const& problem, int64_t tap_columns) {
  ImageRows const& image = problem.image;
  int64_t places = image.batch, taps = 1;
  for (int axis = 0; axis < 3; ++axis) {
    int64_t const span = int64_t(image.dilation[axis]) * (image.taps[axis] - 1) + 1;
    int64_t const room = image.size[axis] + 2 * int64_t(image.padding[axis]) - span;
    bool const valid = image.size[axis] > 0 && image.taps[axis] > 0 && image.stride[axis] > 0 &&
                       image.dilation[axis] > 0 && image.padding[axis] >= 0 && room >= 0;
    if (!valid || image.out[axis] != room / image.stride[axis] + 1) {
      return invalid("the image has size " + std::to_string(image.size[axis]) + ", " +
                     std::to_string(image.taps[axis]) + " taps, stride " +
                     std::to_string(image.stride[axis]) + ", padding " +
                     std::to_string(image.padding[axis]) + ", dilation " +
                     std::to_string(image.dilation[axis]) + " and a result of " +
                     std::to_string(image.out[axis]) + " along axis " + std::to_string(axis));
    }
    places *= image.out[axis], taps *= image.taps[axis];
  }
  if (places != problem.m || taps * tap_columns != problem.weight.k) {
    return invalid("the image has " + std::to_string(places) + " places of a kernel of " +
                   std::to_string(taps) + " taps and " + std::to_string(image.channels) +
                   " channels; m is " + std::to_string(problem.m) + " and k " +
                   std::to_string(problem.weight.k));
  }
  return {};
}

// Checks an image as the x of a product.
static Status check_image(GemmProblem const& problem) {
  ImageRows const& image = problem.image;
  if (Status status = check_plain_rows(problem.weight, "a product of an image"); !status.ok())
    return status;
  // A weight of one tap is a plain matrix.
  bool const whole = padded_k(problem.weight.k) == padded_k(image.channels);
  if (Status status = check_sizes(problem, whole ? problem.weight.k : padded_k(image.channels));
      !status.ok())
    return status;
  if (problem.quantized.codes)
    return unsupported("the image is quantised already; one of floats is expected");
  if (problem.weight.perm)
    return unsupported("the image's weight has an act order; it has one for matrices alone");
  if (!multiplies_int8(problem) && is_irregular(problem)) {
    return unsupported("the image's pixels do not start on 16 bytes, or x_stride is " +
                       std::to_string(problem.x_stride) + "; at least channels = " +
                       std::to_string(image.channels) + " and a multiple of 8 is supported");
  }
  if (stored_rows(problem) > kMaxM) {
    return unsupported("the image has " + std::to_string(stored_rows(problem)) +
                       " pixels; at most " + std::to_string(kMaxM) + " are supported");
  }
  return {};
}

Status check_product(GemmProblem const& problem) {
  PackedWeight const& w = problem.weight;
  if (Status status = check_weight(w); !status.ok()) return status;
  if (problem.m < 0 || problem.m > kMaxM) {
    return invalid("m is " + std::to_string(problem.m) + "; 0 to " + std::to_string(kMaxM) +
                   " is supported");
  }
  if (Status status = check_act_quant(problem.act_quant, is_image(problem)); !status.ok())
    return status;
  if (is_image(problem)) {
    if (Status status = check_image(problem); !status.ok()) return status;
  }
  bool quantized = problem.quantized.codes != nullptr;
  if (quantized) {
    int block = problem.quantized.block, fits = activation_block(w.group_size);
    if (block != -1 && block != fits) {
      return unsupported("the activations' block is " + std::to_string(block) +
                         "; with weights in groups of " + std::to_string(w.group_size) +
                         " it must be " + std::to_string(fits) + " or -1");
    }
  } else if (!is_float(problem.x_type)) {
    return unsupported("x has a type that is not fp16, bf16 or fp32");
  }
  if (problem.bias && !is_float(problem.bias_type)) return invalid("bias_type is not a float type");
  if (problem.residual && !is_float(problem.residual_type))
    return invalid("residual_type is not a float type");
  if (quantized && (problem.quantized.stride < problem.m || problem.quantized.stride % 16 != 0)) {
    return invalid("the activations' stride is " + std::to_string(problem.quantized.stride) +
                   "; a multiple of 16 that is at least m = " + std::to_string(problem.m) +
                   " is expected");
  }
  if (!is_float(problem.out_type))
    return unsupported("out_dtype is not float16, bfloat16 or float32");
  if (!has_integer_codes(w) && multiplies_int8(problem)) {
    return unsupported("the weight has " + std::string(info(w.format).codes) +
                       " and the activations are int8; that takes fp16 or bf16 activations");
  }
  if (Status status = check_activation(problem.activation, problem.clamp_low, problem.clamp_high);
      !status.ok())
    return status;
  if (problem.m == 0) return {};
  if (quantized) {
    QuantizedActivations const& q = problem.quantized;
    Status status = check_addresses({{"the activations' codes", q.codes, kLoadBytes},
                                     {"the activations' scales", q.scales, kLoadBytes},
                                     {"the activations' zeros", q.zeros, kLoadBytes, false}});
    if (!status.ok()) return status;
  } else {
    Status status = check_addresses({{"x", problem.x, bytes_of(problem.x_type)}});
    if (status.ok())
      status = check_stride("x_stride", problem.x_stride, stored_columns(problem), problem.m);
    if (!status.ok()) return status;
  }
  Status status =
      check_addresses({{"bias", problem.bias, bytes_of(problem.bias_type), false},
                       {"residual", problem.residual, bytes_of(problem.residual_type), false}});
  if (!status.ok() || !problem.residual) return status;
  return check_stride("residual_stride", problem.residual_stride, outputs(w), problem.m);
}

Status check_gemm(GemmProblem const& problem, Device const& device) {
  if (Status status = check_product(problem); !status.ok()) return status;
  if (!problem.quantized.codes && problem.act_quant == ActQuant::kNone &&
      problem.x_type == DataType::kFloat32) {
    return unsupported(
        "x is float32 with act_quant=\"none\"; on a GPU that takes float16 or bfloat16 (float32 "
        "with \"token\" or \"block\")");
  }
  return check_architecture(problem.architecture, device);
}

Status check_device(Device const& device) {
  if (device.multiprocessors > 0) return {};
  return invalid("device.multiprocessors is " + std::to_string(device.multiprocessors) +
                 "; at least 1 is expected");
}

Status check_architecture(int architecture, Device const& device) {
  if (Status status = check_device(device); !status.ok()) return status;
  if (architecture >= 0 && architecture <= device.architecture) return {};
  return unsupported("architecture is " + std::to_string(architecture) + "; the GPU is sm_" +
                     std::to_string(device.architecture) +
                     ", which runs kernels of that architecture and of earlier ones");
}

Status check_launch(GemmProblem const& problem, Plan const& plan, Workspace workspace) {
  if (workspace.bytes < plan.workspace) {
    return invalid("the workspace has " + std::to_string(workspace.bytes) + " bytes; " +
                   std::to_string(plan.workspace) + " are needed");
  }
  if (problem.weight.gated != (plan.gates || plan.layout.gates)) {
    return invalid(std::string("the plan is for a weight that is ") +
                   (problem.weight.gated ? "not gated; this one is" : "gated; this one is not"));
  }
  bool const stores_gated = plan.gates && !plan.layout.gates;
  if (stores_gated && (problem.residual || problem.out_type == DataType::kFloat32))
    return invalid("the plan is for 16-bit outputs of a gated weight without a residual");
  if (plan.compensates && !plan.layout.sums && !problem.weight.sums) {
    return invalid("the plan is for a weight that has its column sums; this one has none");
  }
  return check_addresses({{"the workspace", workspace.data, kWorkspaceBytes, plan.workspace > 0},
                          {"out", problem.out, stores_gated ? 16 : bytes_of(problem.out_type)}});
}

// Checks the epilogue of fp32 sums that are not a product's.
static Status check_epilogue_types(GemmProblem const& problem) {
  if (!is_float(problem.out_type))
    return unsupported("out_dtype is not float16, bfloat16 or float32");
  if (problem.bias && !is_float(problem.bias_type)) return invalid("bias_type is not a float type");
  if (problem.residual && !is_float(problem.residual_type))
    return invalid("residual_type is not a float type");
  return {};
}

Status check_depthwise(GemmProblem const& problem, float const* taps) {
  ImageRows const& image = problem.image;
  if (Status status = check_plain_rows(problem.weight, "a depthwise convolution"); !status.ok())
    return status;
  if (Status status = check_sizes(problem, 1); !status.ok()) return status;
  for (int axis = 0; axis < 3; ++axis) {
    for (int extent :
         {image.size[axis], image.stride[axis], image.padding[axis], image.dilation[axis]}) {
      if (extent > kMaxM) {
        return unsupported("the image has a size, stride, padding or dilation of " +
                           std::to_string(extent) + "; at most " + std::to_string(kMaxM) +
                           " is supported");
      }
    }
  }
  if (image.channels != 1 || problem.x_stride < 1 || problem.x_stride > problem.weight.n ||
      problem.weight.n % problem.x_stride != 0) {
    return invalid("the image has " + std::to_string(image.channels) + " channels a group and " +
                   std::to_string(problem.x_stride) + " groups, the weight " +
                   std::to_string(problem.weight.n) +
                   " rows; one channel, and a divisor of the rows, are expected");
  }
  if (problem.m > kMaxM || stored_rows(problem) > std::numeric_limits<int32_t>::max()) {
    return unsupported("the image has " + std::to_string(stored_rows(problem)) +
                       " pixels and the result " + std::to_string(problem.m) +
                       "; at most 2^31 - 1 and " + std::to_string(kMaxM) + " are supported");
  }
  if (problem.act_quant != ActQuant::kNone || problem.quantized.codes) {
    return unsupported(
        "the activations of a depthwise convolution are quantised; floats are supported");
  }
  if (!is_float(problem.x_type)) return unsupported("x has a type that is not fp16, bf16 or fp32");
  if (Status status = check_epilogue_types(problem); !status.ok()) return status;
  if (reinterpret_cast<uintptr_t>(taps) % 16) {
    return invalid("the weight's values start at an address that is no multiple of 16 bytes");
  }
  return {};
}

Status check_finish(GemmProblem const& problem, void const* sums) {
  if (Status status = check_plain_rows(problem.weight, "finish_sums"); !status.ok()) return status;
  if (problem.m < 0 || problem.m > kMaxM || problem.weight.n < 1) {
    return invalid("the sums are [" + std::to_string(problem.m) + ", " +
                   std::to_string(problem.weight.n) + "]; 0 to " + std::to_string(kMaxM) +
                   " rows of at least 1 column are supported");
  }
  if (problem.x_type != DataType::kFloat16 && problem.x_type != DataType::kBFloat16)
    return unsupported("the sums have a type that is not fp16 or bf16");
  if (Status status = check_epilogue_types(problem); !status.ok()) return status;
  return check_addresses({{"the sums", sums, 2, problem.m > 0},
                          {"out", problem.out, bytes_of(problem.out_type), problem.m > 0}});
}

Status check_quantize(QuantizeProblem const& p) {
  if (!is_float(p.x_type)) return unsupported("x has a type that is not fp16, bf16 or fp32");
  if (p.m < 0 || p.m > kMaxM || p.k < 1) {
    return invalid("x is [" + std::to_string(p.m) + ", " + std::to_string(p.k) + "]; 0 to " +
                   std::to_string(kMaxM) + " rows of at least 1 column are supported");
  }
  if (Status status = check_block(p.out.block); !status.ok()) return status;
  if (p.out.stride < p.m || p.out.stride % 16 != 0) {
    return invalid("stride is " + std::to_string(p.out.stride) +
                   "; a multiple of 16 that is at least m = " + std::to_string(p.m) +
                   " is expected");
  }
  if (p.norm_weight && p.up)
    return invalid("both norm_weight and up are given; at most one is supported");
  if (!p.residual != !p.sum || (p.residual && !p.norm_weight)) {
    return invalid(
        "residual, sum and norm_weight: a residual comes with a norm, and has a place for the sum");
  }
  if (p.norm_weight && !(p.norm_eps >= float(kLeastNormEps) && p.norm_eps <= 1.0f)) {
    return unsupported("norm_eps is " + std::to_string(p.norm_eps) + "; 1e-15 to 1 is supported");
  }
  if (p.norm_weight && p.k > kMaxNormK) {
    return unsupported("k is " + std::to_string(p.k) + "; a norm of at most " +
                       std::to_string(kMaxNormK) + " columns is supported");
  }
  if (p.m == 0) return {};
  int const bytes = bytes_of(p.x_type);
  Status status = check_addresses({{"x", p.x, bytes},
                                   {"perm", p.perm, int(sizeof(int32_t)), false},
                                   {"up", p.up, bytes, false},
                                   {"norm_weight", p.norm_weight, bytes, false},
                                   {"residual", p.residual, bytes, false},
                                   {"sum", p.sum, bytes, false},
                                   {"out.codes", p.out.codes, kLoadBytes},
                                   {"out.scales", p.out.scales, kLoadBytes},
                                   {"out.zeros", p.out.zeros, kLoadBytes, false}});
  if (status.ok()) status = check_stride("x_stride", p.x_stride, p.k, p.m);
  if (status.ok() && p.up) status = check_stride("up_stride", p.up_stride, p.k, p.m);
  if (status.ok() && p.residual)
    status = check_stride("residual_stride", p.residual_stride, p.k, p.m);
  return status;
}

Status check_quantized_values(QuantizedValues const& p) {
  if (!is_float(p.x_type)) return unsupported("x has a type that is not fp16, bf16 or fp32");
  if (!is_float(p.out_type)) return unsupported("out_type is not fp16, bf16 or fp32");
  if (p.rows < 0 || p.rows > std::numeric_limits<int32_t>::max() || p.columns < 1) {
    return invalid("x is [" + std::to_string(p.rows) + ", " + std::to_string(p.columns) +
                   "]; 0 to 2^31 - 1 rows of at least 1 column are supported");
  }
  if (Status status = check_block(p.block); !status.ok()) return status;
  bool const any = p.rows > 0;
  return check_addresses({{"x", p.x, bytes_of(p.x_type), any},
                          {"out", p.out, bytes_of(p.out_type), any},
                          {"range", p.range, int(sizeof(uint32_t)), false}});
}

Status check_sums(PackedWeight const& w, void const* colsums) {
  if (Status status = check_weight(w); !status.ok()) return status;
  if (has_int8_products(w)) return check_addresses({{"colsums", colsums, kLoadBytes}});
  return unsupported(
      "sums of codes are for integers of 4 or 8 bits in groups of 128 or more, without offsets or "
      "zero points of 8 bits");
}

Status check_dequantize(DequantizeProblem const& p) {
  if (Status status = check_weight(p.weight); !status.ok()) return status;
  if (p.first_row < 0 || p.first_row >= p.weight.n || p.first_row % kRowsPerPanel || p.rows < -1 ||
      p.rows == 0 || p.rows > p.weight.n - p.first_row) {
    return invalid("rows are " + std::to_string(p.rows) + " from row " +
                   std::to_string(p.first_row) + " of " + std::to_string(p.weight.n) +
                   "; the first must be a multiple of " + std::to_string(kRowsPerPanel));
  }
  if (!is_float(p.out_type)) return unsupported("out_type is not fp16, bf16 or fp32");
  if (p.tap_channels < 0 ||
      (p.tap_channels && (p.weight.perm || p.weight.k % padded_k(p.tap_channels)))) {
    return invalid("tap_channels is " + std::to_string(p.tap_channels) +
                   ", with k = " + std::to_string(p.weight.k) +
                   "; the channels of taps that are padded to a multiple of " +
                   std::to_string(kKPerTile) + ", and no perm, are expected");
  }
  return check_addresses({{"out", p.out, bytes_of(p.out_type)}});
}

Status check_flat(FlatProblem const& p, bool quantizes) {
  if (!is_float(p.type))
    return unsupported("the floats have a type that is not fp16, bf16 or fp32");
  if (p.blocksize < 32 || p.blocksize > 4096 || (p.blocksize & (p.blocksize - 1))) {
    return unsupported("blocksize is " + std::to_string(p.blocksize) +
                       "; supported are powers of two from 32 to 4096");
  }
  if (p.count < 0)
    return invalid("count is " + std::to_string(p.count) + "; at least 0 is expected");
  if (p.count == 0) return {};
  bool const nested = !quantizes && p.nested_codes;
  return check_addresses({{"floats", p.floats, kLoadBytes},
                          {"packed", p.packed, kLoadBytes},
                          {"absmax", p.absmax, int(sizeof(float)), !nested},
                          {"cuts", p.cuts, int(sizeof(float)), quantizes},
                          {"codes", p.codes, 1, quantizes},
                          {"book", p.book, int(sizeof(float)), !quantizes},
                          {"nested_absmax", p.nested_absmax, int(sizeof(float)), nested},
                          {"nested_book", p.nested_book, int(sizeof(float)), nested},
                          {"nested_offset", p.nested_offset, int(sizeof(float)), nested}});
}

Status check_awq(AwqWeight const& w, void const* out) {
  if (w.type != DataType::kFloat16 && w.type != DataType::kBFloat16) {
    return unsupported("the scales have a type that is not fp16 or bf16");
  }
  if (w.n < 8 || w.n % 8 || w.k < 1 || w.groups < 1 || w.k % w.groups) {
    return invalid("the weight is k = " + std::to_string(w.k) + " by n = " + std::to_string(w.n) +
                   " in " + std::to_string(w.groups) +
                   " groups; n must be a multiple of 8, and k of the groups");
  }
  return check_addresses({{"codes", w.codes, kLoadBytes},
                          {"scales", w.scales, kLoadBytes},
                          {"zeros", w.zeros, kLoadBytes},
                          {"out", out, kLoadBytes}});
}

Status check_awq_gemm(AwqWeight const& w, void const* x, int64_t x_stride, int m, void const* out) {
  int const group = w.groups > 0 ? w.k / w.groups : 0;
  if (m < 0 || m > kMaxAwqRows || group % 32) {
    return unsupported("m is " + std::to_string(m) + " and groups are of " + std::to_string(group) +
                       "; up to " + std::to_string(kMaxAwqRows) +
                       " rows and groups of a multiple of 32 are supported");
  }
  if (m == 0) return {};
  Status status = check_awq(w, out);
  if (status.ok()) status = check_addresses({{"x", x, kLoadBytes}});
  if (status.ok()) status = check_stride("x_stride", x_stride, w.k, m);
  if (!status.ok() || m == 1 || x_stride % 8 == 0) return status;
  return invalid("x_stride is " + std::to_string(x_stride) +
                 "; a multiple of 8 is expected, as kernels load 16 bytes at a time");
}

Status check_pack(PackProblem const& p) {
  // padding is counted in ints, too
  constexpr int kLargest = std::numeric_limits<int32_t>::max() - kKPerTile;
  if (!is_code_width(p.bits))
    return unsupported("bits is " + std::to_string(p.bits) + "; supported are 2, 4 and 8");
  if (p.n < 1 || p.n > kLargest || p.k < 1 || p.k > kLargest) {
    return invalid("the weight is n = " + std::to_string(p.n) + " by k = " + std::to_string(p.k) +
                   "; accepted are 1 to " + std::to_string(kLargest));
  }
  return check_addresses({{"codes", p.codes, 1}, {"packed", p.packed, kLaneBytes}});
}

}  // namespace cutlass_ops
