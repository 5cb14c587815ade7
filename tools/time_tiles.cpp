// Times every tile that may compute a product, on the GPU that is there, and prints JSON,
// a line a product.
//
//   time_tiles tiles [seconds [commit]] > results.json the persistent kernels, what
//   tools/fit_costs.py fits the costs of tiles to: of the product alone, x was
//                                                quantised before, column sums are there
//   time_tiles decode [seconds [commit]] > results.json   those of few rows of x, whole calls
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cutlass_ops/layout.h"
#include "cutlass_ops/ops.h"
#include "cutlass_ops/zero_compensation.h"
#include "dispatch/cost.h"
#include "dispatch/launchers.h"
#include "dispatch/problem.h"
#include "dispatch/spec.h"

using namespace cutlass_ops;

namespace {

constexpr size_t kColdBytes = size_t(200) << 20;  // weights that are together too
                                                  // large for the cache
constexpr double kBurst = 1.5e-3, kRest = 6e-3;   // seconds: long bursts lower the clock

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}
void check(Status const& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.text.c_str());
  std::exit(1);
}

// Device memory with what `bytes` holds.
template <class T>
T* upload(std::vector<T> const& data) {
  T* to;
  check(cudaMalloc(&to, data.size() * sizeof(T)));
  check(cudaMemcpy(to, data.data(), data.size() * sizeof(T), cudaMemcpyHostToDevice));
  return to;
}

// Device memory with `count` random numbers as fp16, and with others as bf16.
template <class Next>
void upload_as_both(void* (&to)[2], size_t count, Next next) {
  std::vector<__half> halves(count);
  for (__half& value : halves) value = __float2half(next());
  std::vector<__nv_bfloat16> bfloats(count);
  for (__nv_bfloat16& value : bfloats) value = __float2bfloat16(next());
  to[0] = upload(halves), to[1] = upload(bfloats);
}

struct Input {
  char const* name;
  int bits, group_size;
  ActQuant act_quant;
  bool symmetric;  // x
  bool zeros, offsets, codebook;
  bool wide = false;  // scales and offsets are fp32
};
constexpr Input kInputs[] = {
    {"w4a16", 4, 128, ActQuant::kNone, true, false, false, false},
    {"w8a16", 8, 128, ActQuant::kNone, true, false, false, false},
    {"w4a8-block", 4, 128, ActQuant::kBlock, true, false, false, false},
    {"w8a8-block", 8, 128, ActQuant::kBlock, true, false, false, false},
    {"w4a8-token", 4, 128, ActQuant::kToken, true, false, false, false},
    {"w8a8-token", 8, 128, ActQuant::kToken, true, false, false, false},
    {"w4a8-channel", 4, -1, ActQuant::kToken, true, false, false, false},
    {"w8a8-channel", 8, -1, ActQuant::kToken, true, false, false, false},
    {"w4a8-block-asym", 4, 128, ActQuant::kBlock, false, false, false, false},
    {"w8a8-block-asym", 8, 128, ActQuant::kBlock, false, false, false, false},
    {"w4a8-token-asym", 4, 128, ActQuant::kToken, false, false, false, false},
    {"w8a8-token-asym", 8, 128, ActQuant::kToken, false, false, false, false},
    {"w4a8-block-zp", 4, 128, ActQuant::kBlock, true, true, false, false},
    {"w8a8-block-zp", 8, 128, ActQuant::kBlock, true, true, false, false},
    {"w4a16-g32", 4, 32, ActQuant::kNone, true, false, false, false},
    {"w8a16-g32", 8, 32, ActQuant::kNone, true, false, false, false},
    {"w4a16-g32-offsets", 4, 32, ActQuant::kNone, true, false, true, false},
    {"nf4", 4, 64, ActQuant::kNone, true, false, false, true},
    {"w4a8-block-g32", 4, 32, ActQuant::kBlock, true, false, false, false},
    {"w8a8-block-g32", 8, 32, ActQuant::kBlock, true, false, false, false},
    {"w4a8-token-g32", 4, 32, ActQuant::kToken, true, false, false, false},
    {"w8a8-token-g32", 8, 32, ActQuant::kToken, true, false, false, false},
    {"w4a16-wide", 4, 128, ActQuant::kNone, true, false, false, false, true},
    {"w8a16-wide", 8, 128, ActQuant::kNone, true, false, false, false, true},
    {"w4a16-g32-wide", 4, 32, ActQuant::kNone, true, false, false, false, true},
    {"w8a16-g32-wide", 8, 32, ActQuant::kNone, true, false, false, false, true},
    {"w4a16-g32-offsets-wide", 4, 32, ActQuant::kNone, true, false, true, false, true},
    {"w8a16-g16-wide", 8, 16, ActQuant::kNone, true, false, false, false, true},
    {"nf4-wide", 4, 64, ActQuant::kNone, true, false, false, true, true},
};
constexpr int kShapes[][2] = {
    {4096, 4096},  {6144, 4096},  {14336, 4096}, {4096, 14336}, {11008, 4096}, {28672, 4096},
    {8192, 28672}, {18944, 3584}, {2048, 2048},  {5120, 13824}, {8192, 8192},  {5120, 2048},
    {2048, 4096},  {2560, 9728},  {3584, 3584},  {19456, 2560}, {10240, 8192}};
constexpr int kRowsOfX[] = {17,  24,  32,  33,  48,  64,  72,  96,   100,  128,  129,  150,
                            176, 200, 256, 320, 400, 512, 777, 1024, 1500, 2048, 3000, 4096};
// The names of DecodeKind.
constexpr char const* kDecodeKindNames[kDecodeKinds] = {
    "kFloats", "kFloatsRounded", "kFloatsWide", "kFloatsRoundedWide", "kCodebook",
    "kBlock",  "kBlockRounded",  "kToken",      "kTokenRounded"};
constexpr int kFewRowsOfX[] = {1, 2, 4, 7, 8, 16, 24, 32};
constexpr int kMostRows = 4096, kMostK = 28672, kMostN = 28672;

// The types of x, by name.
constexpr struct {
  char const* name;
  DataType type;
} kTypes[] = {{"fp16", DataType::kFloat16}, {"bf16", DataType::kBFloat16}};

struct Data {
  std::mt19937 random{1};
  uint8_t* codes;                // twice kColdBytes: copies begin where others do, or in between
  void *scales[2], *x[2], *out;  // by kTypes
  float* wide_scales;
  int8_t* zeros;
  float* codebook;
  uint8_t *workspace, *quantized, *colsums;
  size_t workspace_bytes = size_t(1) << 30;

  Data() {
    std::vector<uint32_t> words(size_t(kMostN) * kMostK / 4 + kColdBytes / 4);
    for (uint32_t& word : words) word = random();
    codes = reinterpret_cast<uint8_t*>(upload(words));
    std::uniform_real_distribution<float> positive(0.005f, 0.015f);
    upload_as_both(scales, size_t(kMostN) * kMostK / 32 + kMostN, [&] { return positive(random); });
    std::vector<float> wide(size_t(kMostN) * kMostK / 16 + kMostN);
    for (float& value : wide) value = positive(random);
    wide_scales = upload(wide);
    std::vector<int8_t> few(size_t(kMostN) * kMostK / 32 + kMostN);
    for (int8_t& zero : few) zero = int8_t(int(random() % 7) - 3);
    zeros = upload(few);
    std::normal_distribution<float> normal;
    upload_as_both(x, size_t(kMostRows) * kMostK, [&] { return normal(random); });
    std::vector<float> levels(16);
    for (int i = 0; i < 16; ++i) levels[i] = float(i - 8) / 8;
    codebook = upload(levels);
    check(cudaMalloc(&out, size_t(kMostRows) * kMostN * 2));
    check(cudaMalloc(&workspace, workspace_bytes));
    check(cudaMalloc(&quantized, size_t(kMostRows) * kMostK * 2));
    check(cudaMalloc(&colsums, size_t(64) << 20));
  }
};

// The kernels of every architecture whose smallest tile has 16 rows of x.
bool is_portable(KernelSpec const& spec) { return std::strncmp(spec.name, "mma_gemm", 8) == 0; }

// Whether a decode kernel was compiled for the candidate, wherever it may be chosen.
bool has_instance(KernelSpec const& spec, Candidate const& c, GemmProblem const& p) {
  bool const integers = info(p.weight.format).integers;
  if (is_portable(spec)) return c.tile.block_m == 16;
  if (std::strcmp(spec.name, "decode_gemm") == 0) return c.tile.block_m == 8 || !integers;
  if (c.quantizes && p.act_quant != ActQuant::kBlock) return false;
  if (c.tile.block_m == WgmmaDecodeShape::kMoreRows)
    return integers || std::strcmp(spec.name, "wgmma_decode_fold16") == 0;
  return kDecodesWithOneCta[info(p.weight.format).bits] || c.tile.min_ctas_per_sm == 2;
}

// Microseconds of one launch of the plan, weights cold: the lesser of two bursts.
double time_of(GemmProblem const& problem, Plan const& plan, Data const& data,
               cudaStream_t stream) {
  size_t const bytes =
      packed_bytes(problem.weight.n, problem.weight.k, info(problem.weight.format).bits);
  int const copies = int(kColdBytes / bytes + 1);
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start)), check(cudaEventCreate(&stop));
  auto const launch = [&](int i) {
    GemmProblem copy = problem;
    copy.weight.codes = data.codes + size_t(i % copies) * bytes;
    check(mixed_gemm(copy, plan, {data.workspace, data.workspace_bytes}, stream));
  };
  launch(0);
  check(cudaEventRecord(start, stream));
  for (int i = 0; i < 3; ++i) launch(i);
  check(cudaEventRecord(stop, stream));
  check(cudaStreamSynchronize(stream));
  float ms = 0, best = 1e9f;
  check(cudaEventElapsedTime(&ms, start, stop));
  int const count = std::clamp(int(kBurst * 1e3 / (ms / 3)), 4, 256);
  cudaGraph_t graph;
  cudaGraphExec_t run;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < count; ++i) launch(i);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&run, graph, 0));
  check(cudaGraphLaunch(run, stream));
  for (int i = 0; i < 2; ++i) {
    check(cudaStreamSynchronize(stream));
    std::this_thread::sleep_for(std::chrono::duration<double>(kRest));
    check(cudaEventRecord(start, stream));
    check(cudaGraphLaunch(run, stream));
    check(cudaEventRecord(stop, stream));
    check(cudaEventSynchronize(stop));
    check(cudaEventElapsedTime(&ms, start, stop));
    best = std::min(best, ms);
  }
  check(cudaGraphExecDestroy(run)), check(cudaGraphDestroy(graph));
  check(cudaEventDestroy(start)), check(cudaEventDestroy(stop));
  return best / count * 1e3;
}

}  // namespace

int main(int argc, char** argv) {
  bool const decode = argc > 1 && std::strcmp(argv[1], "decode") == 0;
  double const seconds = argc > 2 ? std::atof(argv[2]) : 1e9;
  auto const begin = std::chrono::steady_clock::now();
  Device device;
  check(current_device(&device));
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0));
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Data data;
  struct Product {
    Input const* format;
    int n, k, m;
  };
  std::vector<Product> products;
  for (Input const& format : kInputs)
    for (auto const& shape : kShapes) {
      for (int m : kRowsOfX)
        if (!decode) products.push_back({&format, shape[0], shape[1], m});
      for (int m : kFewRowsOfX)
        if (decode && format.symmetric) products.push_back({&format, shape[0], shape[1], m});
    }
  // so that any part of them is of all kinds, with x of either type
  std::shuffle(products.begin(), products.end(), data.random);
  std::printf(
      "{\"device\": \"%s\", \"multiprocessors\": %d, \"memory_bandwidth\": %d, "
      "\"commit\": \"%s\",\n",
      properties.name, device.multiprocessors, device.memory_bandwidth, argc > 3 ? argv[3] : "");
  std::printf(
      "\"columns\": [\"format\", \"n\", \"k\", \"m\", \"bits\", \"x\", "
      "\"candidates\"],\n\"candidate_columns\": [%s],\n\"rows\": [",
      decode ? "\"kernel\", \"block_m\", \"chosen\", \"us\", \"ctas_per_sm\", \"quantizes\", "
               "\"kind\", \"chunk\", \"share\", \"x\", \"row\", \"applies\""
             : "\"kernel\", \"block_m\", \"chosen\", \"us\", \"block_n\", \"compensates\", "
               "\"cost\", \"k_tiles\", \"ends\", \"constant\", \"slices\", \"tail_tiles\"");
  char const* comma = "";
  int timed = 0;
  for (Product const& product : products) {
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() > seconds)
      break;
    Input const& f = *product.format;
    int const which = timed++ % 2;
    DataType const type = kTypes[which].type;
    GemmProblem p;
    p.m = product.m, p.x_type = type, p.x_stride = product.k, p.out = data.out, p.out_type = type;
    p.weight.codes = data.codes, p.weight.n = product.n, p.weight.k = product.k;
    p.weight.scales = f.wide ? data.wide_scales : data.scales[which];
    p.weight.scale_type = f.wide ? DataType::kFloat32 : type;
    p.weight.format = f.codebook ? Format::kCodebook : f.bits == 4 ? Format::kInt4 : Format::kInt8;
    p.weight.group_size = f.group_size;
    if (f.zeros) p.weight.zeros = data.zeros;
    if (f.offsets) p.weight.offsets = p.weight.scales, p.weight.offset_type = p.weight.scale_type;
    if (f.codebook) p.weight.codebook = data.codebook;
    if (f.act_quant == ActQuant::kNone || decode) {
      p.x = data.x[which], p.act_quant = f.act_quant;
    } else {
      int64_t const k_pad = padded_k(product.k), stride = (product.m + 15) / 16 * 16;
      QuantizeProblem q{data.x[which], type, product.k, product.m, product.k};
      int const rows = (product.m + 255) / 256 * 256;  // memory for whole tiles
      q.out.codes = reinterpret_cast<int8_t*>(data.quantized);
      q.out.block = f.act_quant == ActQuant::kToken ? -1 : activation_block(f.group_size);
      q.out.scales = reinterpret_cast<float*>(data.quantized + rows * k_pad),
      q.out.stride = int(stride), q.out.rows = rows;
      size_t const scales = size_t(q.out.block == -1 ? 1 : k_pad / q.out.block) * stride;
      if (!f.symmetric) q.out.zeros = reinterpret_cast<int8_t*>(q.out.scales + scales);
      check(quantize_activations(q, stream));
      p.quantized = q.out;
      if (!f.symmetric) {
        check(weight_colsum(p.weight, data.colsums, stream));
        place_colsums(&p.weight, data.colsums);
      }
    }
    Plan chosen;
    check(plan(p, device, &chosen));
    if (!decode && chosen.spec->decodes) continue;
    std::printf("%s\n[\"%s\", %d, %d, %d, %d, \"%s\", [", comma, f.name, p.weight.n, p.weight.k,
                p.m, f.bits, kTypes[which].name);
    comma = ",";
    char const* inner = "";
    for (KernelSpec const& spec : kernel_specs()) {
      bool const competes = decode ? (spec.decodes || is_portable(spec)) &&
                                         spec.can_implement(p, device) == Field::kNone
                                   : &spec == chosen.spec;
      for (Candidate const& c : competes ? spec.candidates(p) : Candidates{nullptr, 0}) {
        if (p.m < c.min_m || p.m > c.max_m || (!decode && c.applies && !c.applies(p))) continue;
        if (is_mostly_empty(c.tile, p.m)) continue;
        if (decode && !has_instance(spec, c, p)) continue;
        Plan one;
        if (!plan_candidate(p, device, spec, c, &one) || one.workspace > data.workspace_bytes)
          continue;
        bool const is_chosen = &spec == chosen.spec && c.tile.block_m == chosen.block_m &&
                               c.tile.block_n == chosen.block_n &&
                               one.quantizes == chosen.quantizes &&
                               one.one_cta_per_sm == chosen.one_cta_per_sm;
        std::printf("%s[\"%s\", %d, %s, %.2f, ", inner, spec.name, c.tile.block_m,
                    is_chosen ? "true" : "false", time_of(p, one, data, stream));
        if (decode) {
          DecodeTerms const t = is_portable(spec) ? DecodeTerms{} : decode_terms(p, device, one);
          std::printf("%d, %s, \"%s\", %.1f, %.2f, %.2f, %d, %s]", c.tile.min_ctas_per_sm,
                      c.quantizes ? "true" : "false",
                      kDecodeKindNames[int(decode_kind(p, spec.rounds))], t.chunks, t.share, t.x,
                      t.rows, !c.applies || c.applies(p) ? "true" : "false");
        } else {
          PredictedTime const t = tail_split_of(p, device, spec, c).time;
          auto const cost = cost_kind(p, device, c);
          std::printf("%d, %s, \"%s\", %lld, %lld, %lld, %d, %d]", c.tile.block_n,
                      c.compensates ? "true" : "false",
                      cost == &TileCost::k4096        ? "k4096"
                      : cost == &TileCost::row_scales ? "row_scales"
                      : cost == &TileCost::whole_rows ? "whole_rows"
                                                      : "wide",
                      (long long)t.k_tiles, (long long)t.ends, (long long)t.constant, one.slices,
                      one.tail_tiles);
        }
        inner = ", ";
      }
    }
    std::printf("]]");
    std::fflush(stdout);
  }
  std::printf("\n]}\n");
  return 0;
}
