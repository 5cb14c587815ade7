// Problems that no kernel implements, and the field that the message names. Needs no GPU.

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cutlass_ops/awq.h"
#include "cutlass_ops/conv.h"
#include "cutlass_ops/experts.h"
#include "cutlass_ops/flat_4bit.h"
#include "cutlass_ops/zero_compensation.h"
#include "dispatch/checks.h"
#include "dispatch_problems.h"

namespace cutlass_ops {
namespace {

TEST(Dispatch, RefusesArgumentsThatWouldBeMisread) {
  auto text = [](GemmProblem const& p) {
    Plan chosen;
    Status const status = plan(p, kHopper, &chosen);
    EXPECT_EQ(status.code, Status::kInvalid);
    return status.text;
  };
  GemmProblem p = problem(5, 192, 576);
  p.bias = &some_byte;
  p.bias_type = DataType::kInt8;
  EXPECT_NE(text(p).find("bias_type"), std::string::npos);
  p = problem(5, 192, 576);
  p.residual = &some_byte;
  EXPECT_NE(text(p).find("residual_type"), std::string::npos);
  for (int stride : {0, 8, 24}) {
    p = already_quantized(problem(17, 192, 576), 128);
    p.quantized.stride = stride;
    EXPECT_NE(text(p).find("stride is " + std::to_string(stride)), std::string::npos);
  }
  auto* const codes = reinterpret_cast<int8_t*>(&some_byte);
  QuantizeProblem const fits{
      codes, DataType::kFloat16, 576, 17, 576, nullptr, {codes, some_book, nullptr, 128, 32}};
  EXPECT_TRUE(check_quantize(fits).ok());
  QuantizeProblem q = fits;
  q.out.block = 8;
  EXPECT_NE(check_quantize(q).text.find("block is 8"), std::string::npos);
  q = fits;
  q.out.stride = 16;
  EXPECT_NE(check_quantize(q).text.find("stride is 16"), std::string::npos);
  q = fits;
  q.x_type = DataType::kInt8;
  EXPECT_EQ(check_quantize(q).code, Status::kUnsupported);
  EXPECT_EQ(check_dequantize({problem(1, 192, 576).weight, codes, DataType::kInt8}).code,
            Status::kUnsupported);
  PackedWeight unknown = problem(1, 192, 576).weight;
  unknown.format = Format(99);
  EXPECT_EQ(check_dequantize({unknown, codes, DataType::kFloat16}).code, Status::kUnsupported);
}

TEST(Dispatch, TakesEveryOptionOfTheEpilogueAndEveryType) {
  for (DataType type : {DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32}) {
    GemmProblem p = problem(5, 192, 576);
    p.out_type = p.bias_type = p.residual_type = p.weight.scale_type = p.weight.offset_type = type;
    p.bias = p.residual = p.weight.offsets = &some_byte, p.residual_stride = 192;
    for (ActivationInfo const& info : kActivations) {
      p.activation = info.activation;
      if (info.of_gate_and_up) {
        EXPECT_EQ(check_product(p).code, Status::kInvalid);
      } else {
        EXPECT_TRUE(planned(p).spec);
      }
    }
  }
}

TEST(Dispatch, SaysWhichFieldIsUnsupportedAndWhatIsSupported) {
  struct Case {
    std::function<void(GemmProblem&)> change;
    Status::Code code;
    std::vector<std::string> words;
  };
  int8_t const* zeros = reinterpret_cast<int8_t const*>(&some_byte);
  std::vector<Case> const cases = {
      {[](auto& p) { p.weight.format = Format(99); }, Status::kUnsupported, {"no format 99"}},
      {[](auto& p) { p.weight.format = Format(-1); }, Status::kUnsupported, {"no format -1"}},
      {[](auto& p) { look_up(p.weight), p.weight.codebook = nullptr; },
       Status::kInvalid,
       {"codebook is a null pointer"}},
      {[](auto& p) { p.weight.codebook = some_book; },
       Status::kUnsupported,
       {"codebook and 4-bit integers", "Format::kCodebook"}},
      {[=](auto& p) { look_up(p.weight), p.weight.zeros = zeros; },
       Status::kUnsupported,
       {"a code book and zeros", "integers"}},
      {[](auto& p) {
         p.weight.format = Format::kE4m3, p.weight.offsets = &some_byte,
         p.weight.offset_type = DataType::kFloat16;
       },
       Status::kUnsupported,
       {"e4m3 codes and offsets", "integers"}},
      {[](auto& p) { p.weight.n = 0; }, Status::kInvalid, {"shape", "[0, 576]", "at least 1"}},
      {[](auto& p) { p.weight.k = -5; }, Status::kInvalid, {"shape", "[192, -5]", "at least 1"}},
      {[](auto& p) { p.m = -1; }, Status::kInvalid, {"m is -1", std::to_string(kMaxM)}},
      {[](auto& p) { p.m = kMaxM + 1; },
       Status::kInvalid,
       {"m is 16777217", std::to_string(kMaxM)}},
      {[](auto& p) { p.weight.group_size = 0; },
       Status::kUnsupported,
       {"group_size", "0", "16, 32, 64", "128", "-1"}},
      {[](auto& p) { p.weight.group_size = 8; },
       Status::kUnsupported,
       {"group_size", "8", "16, 32, 64"}},
      {[](auto& p) { p.weight.group_size = 96; },
       Status::kUnsupported,
       {"group_size", "96", "32, 64"}},
      {[](auto& p) { p.weight.group_size = -2; },
       Status::kUnsupported,
       {"group_size", "-2", "32, 64"}},
      {[](auto& p) { p.weight.group_size = -128; },
       Status::kUnsupported,
       {"group_size", "-128", "32, 64"}},
      {[](auto& p) { p.weight.scale_type = DataType::kNone; },
       Status::kInvalid,
       {"scale_type", "float"}},
      {[](auto& p) { p.weight.scale_type = DataType::kInt8; },
       Status::kInvalid,
       {"scale_type", "float"}},
      {[](auto& p) { p.weight.offsets = &some_byte; }, Status::kInvalid, {"offset_type", "float"}},
      {[zeros](auto& p) {
         p.weight.zeros = zeros;
         p.weight.offsets = &some_byte;
         p.weight.offset_type = DataType::kFloat16;
       },
       Status::kInvalid,
       {"zeros and offsets", "at most one"}},
      {[](auto& p) { p = already_quantized(p, 64); },
       Status::kUnsupported,
       {"block is 64", "groups of 128", "128 or -1"}},
      {[](auto& p) {
         p.weight.group_size = 32;
         p = already_quantized(p, 128);
       },
       Status::kUnsupported,
       {"block is 128", "groups of 32", "32 or -1"}},
      {[](auto& p) { p.x_type = DataType::kNone; },
       Status::kUnsupported,
       {"x has a type", "fp16, bf16 or fp32"}},
      {[](auto& p) { p.x_type = DataType::kInt8; },
       Status::kUnsupported,
       {"x has a type", "fp16, bf16 or fp32"}},
      {[](auto& p) { p.x_type = DataType::kFloat32; },
       Status::kUnsupported,
       {"x is float32", "act_quant=\"none\"", "float16 or bfloat16", "\"token\" or \"block\""}},
      {[](auto& p) {
         look_up(p.weight);
         p.act_quant = ActQuant::kBlock;
       },
       Status::kUnsupported,
       {"code book", "int8", "fp16 or bf16"}},
      {[](auto& p) { p.out_type = DataType::kNone; },
       Status::kUnsupported,
       {"out_dtype", "float16, bfloat16 or float32"}},
      {[](auto& p) { p.out_type = DataType::kInt8; },
       Status::kUnsupported,
       {"out_dtype", "float16, bfloat16 or float32"}},
      {[](auto& p) { p.activation = Activation(77); },
       Status::kInvalid,
       {"activation is 77", "relu6", "clamp"}},
      {[](auto& p) { p.activation = Activation::kClamp, p.clamp_low = 2, p.clamp_high = 1; },
       Status::kInvalid,
       {"clamp_low is 2", "clamp_high 1"}},
      {[](auto& p) { p.act_quant = ActQuant(9); },
       Status::kInvalid,
       {"act_quant is 9", "none, token and block"}},
      {[](auto& p) { p.x_stride = 0; }, Status::kInvalid, {"x_stride is 0", "576"}},
      {[](auto& p) { p.x_stride = 575; }, Status::kInvalid, {"x_stride is 575", "576"}},
      {[](auto& p) { p.x_stride = -576; }, Status::kInvalid, {"x_stride is -576", "576"}},
      {[](auto& p) {
         p.residual = &some_byte, p.residual_type = DataType::kFloat16, p.residual_stride = 191;
       },
       Status::kInvalid,
       {"residual_stride is 191", "192"}},
      {[](auto& p) { p.x = nullptr; }, Status::kInvalid, {"x is a null pointer"}},
      {[](auto& p) { p.x = &some_byte + 1; },
       Status::kInvalid,
       {"x starts at", "no multiple of 2 bytes"}},
      {[](auto& p) { p.bias = &some_byte + 2, p.bias_type = DataType::kFloat32; },
       Status::kInvalid,
       {"bias starts at", "4 bytes"}},
      {[](auto& p) {
         p.residual = &some_byte + 1, p.residual_type = DataType::kFloat16, p.residual_stride = 192;
       },
       Status::kInvalid,
       {"residual starts at", "2 bytes"}},
      {[](auto& p) { p.weight.codes = nullptr; }, Status::kInvalid, {"codes is a null pointer"}},
      {[](auto& p) { p.weight.codes += 8; }, Status::kInvalid, {"codes starts at", "16 bytes"}},
      {[](auto& p) { p.weight.scales = nullptr; }, Status::kInvalid, {"scales is a null pointer"}},
      {[](auto& p) { p.weight.scales = &some_byte + 8; },
       Status::kInvalid,
       {"scales starts at", "16 bytes"}},
      {[zeros](auto& p) { p.weight.zeros = zeros + 8; },
       Status::kInvalid,
       {"zeros starts at", "16 bytes"}},
      {[](auto& p) {
         p.weight.offsets = &some_byte + 4, p.weight.offset_type = DataType::kFloat16;
       },
       Status::kInvalid,
       {"offsets starts at", "16 bytes"}},
      {[](auto& p) { p.weight.perm = reinterpret_cast<int32_t const*>(&some_byte + 4); },
       Status::kInvalid,
       {"perm starts at", "16 bytes"}},
      {[](auto& p) { look_up(p.weight), p.weight.codebook = some_book + 1; },
       Status::kInvalid,
       {"codebook starts at", "16 bytes"}},
      {[](auto& p) { p.weight.sums = &some_byte + 1; },
       Status::kInvalid,
       {"sums starts at", "16 bytes"}},
      {[](auto& p) { p = already_quantized(p, -1), p.quantized.codes += 1; },
       Status::kInvalid,
       {"the activations' codes starts at", "16 bytes"}},
      {[](auto& p) { p = already_quantized(p, -1), p.quantized.scales = nullptr; },
       Status::kInvalid,
       {"the activations' scales is a null pointer"}},
      {[zeros](auto& p) {
         p = already_quantized(p, -1), p.quantized.zeros = const_cast<int8_t*>(zeros) + 1;
       },
       Status::kInvalid,
       {"the activations' zeros starts at", "16 bytes"}},
  };
  for (Case const& wrong : cases) {
    GemmProblem p = problem(5, 192, 576);
    wrong.change(p);
    Plan chosen;
    Status const status = plan(p, kHopper, &chosen);
    EXPECT_EQ(status.code, wrong.code) << status.text;
    for (std::string const& word : wrong.words)
      EXPECT_NE(status.text.find(word), std::string::npos) << status.text;
    EXPECT_EQ(chosen.kernel, nullptr);
  }
}

TEST(Dispatch, NamesWhatForbidsEachKernelIfNoneIsLeft) {
  struct Case {
    Device device;
    std::vector<std::string> words;
  };
  for (Case const& c :
       {Case{{75, 68, 232448},
             {"architecture 75 (wgmma_gemm_a8,", "mma_gemm_a16", "sm_80 and later"}},
        Case{{80, 108, 65536},
             {"65536 bytes of shared memory (", "mma_gemm_a16",
              "architecture 80 (wgmma_gemm_a8,"}}}) {
    Plan chosen;
    Status const status = plan(problem(50, 192, 576), c.device, &chosen);
    EXPECT_EQ(status.code, Status::kUnsupported);
    for (std::string const& word : c.words)
      EXPECT_NE(status.text.find(word), std::string::npos) << status.text;
    EXPECT_NE(status.text.find("50 rows of x (wgmma_decode, wgmma_decode_fold16, decode_gemm,"),
              std::string::npos)
        << status.text;
  }
}

TEST(Dispatch, NamesTheFieldThatForbidsAKernel) {
  auto const forbids = [](char const* kernel, std::string const& field,
                          std::function<void(GemmProblem&)> const& change,
                          Device const& device = kHopper) {
    GemmProblem p = problem(8, 4096, 4096);
    change(p);
    EXPECT_EQ(forbidden_by(*find_kernel(kernel), p, device), field) << kernel;
  };
  auto const nothing = [](GemmProblem&) {};
  auto const int8 = [](GemmProblem& p) { p.act_quant = ActQuant::kBlock; };
  auto const fp32 = [](GemmProblem& p) { p.x_type = DataType::kFloat32; };
  auto const offsets = [](GemmProblem& p) {
    p.weight.offsets = &some_byte, p.weight.offset_type = DataType::kFloat16;
  };
  auto const book = [](GemmProblem& p) { look_up(p.weight); };
  auto const e4m3 = [](GemmProblem& p) { p.weight.format = Format::kE4m3; };
  auto const int2 = [](GemmProblem& p) { p.weight.format = Format::kInt2; };
  auto const perm = [](GemmProblem& p) {
    p.weight.perm = reinterpret_cast<int32_t const*>(&some_byte);
  };
  auto const zeros8 = [](GemmProblem& p) {
    p.weight.format = Format::kInt8, p.act_quant = ActQuant::kBlock,
    p.weight.zeros = reinterpret_cast<int8_t const*>(&some_byte);
  };
  for (char const* kernel :
       {"wgmma_decode", "decode_gemm", "wgmma_gemm_a16", "wgmma_fold16", "mma_gemm_a16"}) {
    forbids(kernel, "", nothing);
    forbids(kernel, std::string(kernel) == "mma_gemm_a16" ? "" : "architecture 80", nothing,
            kDevices[0]);
  }
  for (char const* kernel : {"wgmma_gemm_a8", "mma_gemm_a8"}) {
    forbids(kernel, "16-bit x", nothing);
    forbids(kernel, "", int8);
  }
  for (char const* kernel : {"wgmma_gemm_a16", "mma_gemm_a16"}) {
    forbids(kernel, "int8 x", int8);
    forbids(kernel, "fp32 x", fp32);
  }
  for (int group_size : {16, 32, 64}) {
    auto const groups = [=](GemmProblem& p) { p.weight.group_size = group_size; };
    forbids("wgmma_gemm_a16", "groups of " + std::to_string(group_size), groups);
    forbids("wgmma_decode", "groups of " + std::to_string(group_size), groups);
    forbids("decode_gemm", "", groups);
    forbids("wgmma_decode_fold16", "", groups);
    forbids("wgmma_fold16", "", groups);
  }
  forbids("wgmma_fold16", "groups of 16", [&](GemmProblem& p) {
    offsets(p);
    p.weight.group_size = 16;
  });
  for (char const* kernel : {"decode_gemm", "book_gemm_a16"}) {
    forbids(kernel, "groups of 16", [&](GemmProblem& p) {
      book(p), p.m = 4;
      p.weight.group_size = 16;
    });
  }
  forbids("wgmma_gemm_a16", "offsets", offsets);
  forbids("wgmma_decode", "offsets", offsets);
  forbids("wgmma_gemm_a16", "a code book", book);
  for (char const* kernel : {"wgmma_gemm_a16", "wgmma_decode", "decode_gemm"})
    forbids(kernel, "e4m3 codes", e4m3);
  for (char const* kernel : {"wgmma_fold16", "wgmma_decode_fold16", "mma_gemm_a16"})
    forbids(kernel, "", e4m3);
  forbids("wgmma_gemm_a16", "2-bit integers", int2);
  for (char const* kernel :
       {"wgmma_decode", "decode_gemm", "wgmma_fold16", "wgmma_decode_fold16", "mma_gemm_a16"})
    forbids(kernel, "", int2);
  auto const int2_and_int8 = [&](GemmProblem& p) { int2(p), int8(p); };
  for (char const* kernel : {"wgmma_gemm_a8", "wgmma_decode", "decode_gemm"})
    forbids(kernel, "2-bit integers", int2_and_int8);
  for (char const* kernel : {"wgmma_fold16", "wgmma_decode_fold16", "mma_gemm_a8"})
    forbids(kernel, "", int2_and_int8);
  forbids("book_gemm_a16", "a weight without a code book", [](GemmProblem& p) { p.m = 4; });
  forbids("wgmma_gemm_a8", "8-bit zero points", zeros8);
  forbids("wgmma_decode", "8-bit zero points", zeros8);
  forbids("wgmma_decode", "act order", perm);
  forbids("wgmma_decode", "rows of x that do not start on 16 bytes",
          [](GemmProblem& p) { p.x_stride = 4097; });
  forbids("wgmma_decode", "scales that are not of x's type",
          [](GemmProblem& p) { p.x_type = DataType::kBFloat16; });
  forbids("wgmma_decode", "", [](GemmProblem& p) { p.m = 32; });
  forbids("wgmma_decode", "33 rows of x", [](GemmProblem& p) { p.m = 33; });
  forbids("wgmma_decode", "17 rows of x", [&](GemmProblem& p) { int8(p), p.m = 17; });
  forbids("wgmma_decode", "17 rows of x", [&](GemmProblem& p) { book(p), p.m = 17; });
  forbids("wgmma_decode_fold16", "", [&](GemmProblem& p) { book(p), p.m = 32; });
  forbids("wgmma_decode_fold16", "33 rows of x", [&](GemmProblem& p) { book(p), p.m = 33; });
  for (int group_size : {16, 32})
    for (DataType scales : {DataType::kFloat16, DataType::kFloat32})
      forbids("wgmma_decode_fold16", scales == DataType::kFloat16 ? "" : "17 rows of x",
              [&](GemmProblem& p) {
                p.weight.group_size = group_size, p.m = 17, p.weight.scale_type = scales;
              });
  forbids("decode_gemm", "batch_invariant", [](GemmProblem& p) { p.batch_invariant = true; });
  forbids("wgmma_fold16", "exact", [](GemmProblem& p) { p.exact = true; });
  forbids("wgmma_fold16", "a result that is not of x's 16-bit type",
          [](GemmProblem& p) { p.out_type = DataType::kFloat32; });
  EXPECT_EQ(find_kernel("no_kernel"), nullptr);
}

TEST(Quantize, RefusesInvalidFunctions) {
  QuantizeProblem good;
  good.m = 3, good.k = 576, good.out.stride = 16, good.out.block = 128;
  good.x = &some_byte, good.x_stride = 576;
  good.out.codes = reinterpret_cast<int8_t*>(&some_byte), good.out.scales = some_book;
  ASSERT_TRUE(check_quantize(good).ok());
  QuantizeProblem norm = good;
  norm.norm_weight = &some_byte;
  norm.norm_eps = 1e-6f;
  ASSERT_TRUE(check_quantize(norm).ok());
  auto const refuses = [](QuantizeProblem const& p, char const* words) {
    Status const status = check_quantize(p);
    EXPECT_NE(status.text.find(words), std::string::npos) << status.text;
  };
  QuantizeProblem p = norm;
  p.up = &some_byte;
  refuses(p, "both norm_weight and up");
  p = norm;
  p.residual = &some_byte;
  refuses(p, "a residual comes with a norm, and has a place for the sum");
  p = good;
  p.residual = p.sum = &some_byte;
  refuses(p, "a residual comes with a norm");
  for (float eps : {0.0f, 2.0f, std::numeric_limits<float>::quiet_NaN()}) {
    p = norm;
    p.norm_eps = eps;
    refuses(p, "norm_eps is");
  }
  p = norm;
  p.k = kMaxNormK + 1;
  refuses(p, "a norm of at most 4194304 columns");
}

TEST(Checks, OneRowAndNoRowsHaveNoStride) {
  for (int m : {0, 1}) {
    GemmProblem p = problem(m, 192, 576);
    p.x_stride = 0;
    if (m == 0) p.x = nullptr;
    EXPECT_TRUE(planned(p).spec);
  }
}

// The checks of a launch beyond those of its plan.
TEST(Checks, ALaunchHasItsMemory) {
  GemmProblem p = problem(5, 192, 576);
  p.out = &some_byte, p.out_type = DataType::kFloat32;
  Plan chosen;
  chosen.workspace = 512;
  EXPECT_TRUE(check_launch(p, chosen, {&some_byte, 512}).ok());
  EXPECT_NE(check_launch(p, chosen, {&some_byte, 511}).text.find("the workspace has 511 bytes"),
            std::string::npos);
  EXPECT_NE(check_launch(p, chosen, {nullptr, 512}).text.find("the workspace is a null pointer"),
            std::string::npos);
  EXPECT_NE(check_launch(p, chosen, {&some_byte + 16, 512}).text.find("the workspace starts at"),
            std::string::npos);
  p.out = &some_byte + 2;
  EXPECT_NE(check_launch(p, chosen, {&some_byte, 512}).text.find("out starts at"),
            std::string::npos);
  p.out = nullptr;
  EXPECT_NE(check_launch(p, chosen, {&some_byte, 512}).text.find("out is a null pointer"),
            std::string::npos);
}

// Other operators than the product: a field that is missing, misaligned or too short is named.
TEST(Checks, NameThePointerOfEveryOperator) {
  auto const names = [](Status const& status, char const* words) {
    EXPECT_EQ(status.code, Status::kInvalid);
    EXPECT_NE(status.text.find(words), std::string::npos) << status.text;
  };
  auto* const codes = reinterpret_cast<int8_t*>(&some_byte);
  auto* const words = reinterpret_cast<uint32_t*>(&some_byte);

  QuantizeProblem const quantizes{
      codes, DataType::kFloat16, 576, 17, 576, nullptr, {codes, some_book, nullptr, 128, 32}};
  ASSERT_TRUE(check_quantize(quantizes).ok());
  QuantizeProblem q = quantizes;
  q.x = nullptr;
  names(check_quantize(q), "x is a null pointer");
  q = quantizes, q.x_stride = 0;
  names(check_quantize(q), "x_stride is 0");
  q = quantizes, q.up = codes, q.up_stride = 575;
  names(check_quantize(q), "up_stride is 575");
  q = quantizes, q.norm_weight = q.residual = q.sum = codes, q.norm_eps = 1e-6f,
  q.residual_stride = 1;
  names(check_quantize(q), "residual_stride is 1");
  q = quantizes, q.out.codes = nullptr;
  names(check_quantize(q), "out.codes is a null pointer");
  q = quantizes, q.out.scales = some_book + 1;
  names(check_quantize(q), "out.scales starts at");
  names(check_sums(problem(1, 200, 576).weight, &some_byte + 8), "colsums starts at");
  names(check_dequantize({problem(1, 200, 576).weight, nullptr}), "out is a null pointer");

  PackProblem packs{&some_byte, &some_byte, 576, 1, 200, 576, 4};
  ASSERT_TRUE(check_pack(packs).ok());
  packs.codes = nullptr;
  names(check_pack(packs), "codes is a null pointer");
  packs.codes = &some_byte, packs.packed = &some_byte + 8;
  names(check_pack(packs), "packed starts at");

  FlatProblem flat;
  flat.count = 64, flat.floats = flat.packed = &some_byte, flat.absmax = some_book,
  flat.cuts = some_book;
  names(check_flat(flat, true), "codes is a null pointer");
  flat.codes = &some_byte;
  EXPECT_TRUE(check_flat(flat, true).ok());
  names(check_flat(flat, false), "book is a null pointer");
  flat.book = some_book;
  EXPECT_TRUE(check_flat(flat, false).ok());
  flat.nested_codes = &some_byte;
  names(check_flat(flat, false), "nested_absmax is a null pointer");

  AwqWeight const awq{words, &some_byte, words, 64, 128, 4};
  EXPECT_TRUE(check_awq(awq, &some_byte).ok());
  names(check_awq({nullptr, &some_byte, words, 64, 128, 4}, &some_byte), "codes is a null pointer");
  EXPECT_TRUE(check_awq_gemm(awq, &some_byte, 128, 3, &some_byte).ok());
  names(check_awq_gemm(awq, &some_byte, 0, 3, &some_byte), "x_stride is 0");
  names(check_awq_gemm(awq, &some_byte, 129, 3, &some_byte), "x_stride is 129");
  names(check_awq_gemm(awq, &some_byte + 2, 128, 3, &some_byte), "x starts at");
  names(check_awq_gemm(awq, &some_byte, 128, 3, nullptr), "out is a null pointer");
  EXPECT_EQ(check_awq_gemm(awq, &some_byte, 128, 65, &some_byte).code, Status::kUnsupported);
}

TEST(Plans, NeedMultiprocessorsAndAPlaceForTheResult) {
  GemmProblem const p = problem(5, 192, 576);
  ConvProblem conv;
  conv.weight.n = conv.weight.channels = conv.channels = 32;
  conv.weight.height = conv.weight.width = 3;
  conv.weight.codes = reinterpret_cast<int8_t*>(&some_byte), conv.weight.scales = some_book;
  conv.x = &some_byte, conv.batch = 1, conv.height = conv.width = 8;
  for (int multiprocessors : {0, -5}) {
    Device device = kHopper;
    device.multiprocessors = multiprocessors;
    Plan chosen;
    ConvPlan chosen_conv;
    for (Status const& status :
         {plan(p, device, &chosen), plan_conv_int8(conv, device, &chosen_conv)}) {
      EXPECT_EQ(status.code, Status::kInvalid);
      EXPECT_NE(status.text.find("multiprocessors is " + std::to_string(multiprocessors)),
                std::string::npos)
          << status.text;
    }
  }
  for (Status const& status :
       {plan(p, kHopper, nullptr), plan_conv_int8(conv, kHopper, nullptr),
        plans_conv_int8(conv, kHopper, nullptr), plan_moe(MoeProblem(), kHopper, nullptr)}) {
    EXPECT_EQ(status.code, Status::kInvalid);
    EXPECT_NE(status.text.find("null pointer"), std::string::npos) << status.text;
  }
}

TEST(Checks, NameTheFieldOfAConvolution) {
  auto const text = [](std::function<void(ConvProblem&)> const& change) {
    ConvProblem p;
    p.weight.n = p.weight.channels = p.channels = 32, p.weight.height = p.weight.width = 3;
    p.weight.codes = reinterpret_cast<int8_t*>(&some_byte), p.weight.scales = some_book;
    p.x = &some_byte, p.batch = 1, p.height = p.width = 8;
    change(p);
    ConvPlan chosen;
    return plan_conv_int8(p, kHopper, &chosen).text;
  };
  EXPECT_EQ(text([](auto&) {}), "");
  for (auto const& [change, words] :
       std::vector<std::pair<std::function<void(ConvProblem&)>, std::string>>{
           {[](auto& p) { p.activation = Activation(77); }, "activation is 77"},
           {[](auto& p) { p.activation = Activation::kGelu; },
            "activation is gelu; static int8 takes none, relu, relu6, clamp"},
           {[](auto& p) { p.activation = Activation::kClamp, p.clamp_low = 1; }, "clamp_low is 1"},
           {[](auto& p) { p.weight.scale_type = DataType::kInt8; }, "scale_type"},
           {[](auto& p) { p.x = nullptr; }, "x is a null pointer"},
           {[](auto& p) { p.weight.codes = nullptr; }, "the weight's codes is a null pointer"},
           {[](auto& p) { p.weight.codes += 8; }, "the weight's codes starts at"},
           {[](auto& p) { p.weight.scales = nullptr; }, "the weight's scales is a null pointer"},
           {[](auto& p) { p.x_zero_point = 3; }, "the weight's sums is a null pointer"},
           {[](auto& p) { p.bias = &some_byte + 1, p.bias_int32 = true; }, "bias starts at"},
           {[](auto& p) { p.x_type = DataType::kInt8; }, "x_type is not a float type"},
           {[](auto& p) { p.x_type = DataType::kFloat16; }, "out_type is not fp16 or bf16"},
           {[](auto& p) { p.out_type = ConvOutput::kFloat16; }, "but x is codes"},
           {[](auto& p) {
              p.x_type = DataType::kFloat16, p.out_type = ConvOutput::kFloat16, p.bias_int32 = true,
              p.bias = some_book;
            },
            "the bias is int32, but x is floats"},
           {[](auto& p) {
              p.x_type = DataType::kFloat16, p.out_type = ConvOutput::kFloat16,
              p.x_symmetric = false;
            },
            "the weight's sums is a null pointer"},
       })
    EXPECT_NE(text(change).find(words), std::string::npos) << words << ": " << text(change);
}

TEST(Checks, LeavesOutWhatPadsTaps) {
  DequantizeProblem problem;
  problem.weight = cutlass_ops::problem(1, 64, 2 * 256).weight, problem.out = &some_byte;
  for (int channels : {0, 129, 256}) {
    problem.tap_channels = channels;
    EXPECT_TRUE(check_dequantize(problem).ok()) << channels;
  }
  for (int channels : {-1, 257, 1000}) {
    problem.tap_channels = channels;
    EXPECT_EQ(check_dequantize(problem).code, Status::kInvalid) << channels;
  }
}

TEST(Checks, FinishesSumsOf16Bits) {
  GemmProblem problem = cutlass_ops::problem(5, 64, 256);
  problem.out = &some_byte;
  EXPECT_TRUE(check_finish(problem, &some_byte).ok());
  EXPECT_EQ(check_finish(problem, nullptr).code, Status::kInvalid);
  problem.x_type = DataType::kFloat32;
  EXPECT_EQ(check_finish(problem, &some_byte).code, Status::kUnsupported);
}

TEST(Checks, DequantizesRowsFromAWholePanelOn) {
  DequantizeProblem problem;
  problem.weight = cutlass_ops::problem(1, 200, 128).weight, problem.out = &some_byte;
  auto const ok = [&](int first_row, int rows) {
    problem.first_row = first_row, problem.rows = rows;
    return check_dequantize(problem).ok();
  };
  EXPECT_TRUE(ok(0, -1) && ok(0, 200) && ok(64, 1) && ok(192, 8) && ok(192, -1));
  EXPECT_FALSE(ok(-64, -1) || ok(32, -1) || ok(256, -1) || ok(192, 9) || ok(0, 0) || ok(0, -2));
}

#if !CUTLASS_OPS_CUDA
TEST(WithoutCuda, EveryOperatorIsUnsupported) {
  Device device;
  for (Status const& status :
       {current_device(&device), mixed_gemm(problem(5, 192, 576), {}, nullptr),
        quantize_activations({}, nullptr), weight_colsum({}, nullptr, nullptr),
        dequantize({}, nullptr), route({}, {}, nullptr), mixed_moe({}, {}, {}, nullptr)}) {
    EXPECT_EQ(status.code, Status::kUnsupported);
    EXPECT_NE(status.text.find("no CUDA kernels"), std::string::npos) << status.text;
  }
}
#endif

}  // namespace
}  // namespace cutlass_ops
