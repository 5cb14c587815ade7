// The decoders of formats/decode.cuh on the device: their PTX and their vector instructions, for
// every code at every place of a word with every zero point. test_decode.cpp does the same with the
// host's half of them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "formats/integers.cuh"

namespace cutlass_ops::decode {
namespace {

__device__ int code(uint32_t word, int bits, int place) {
  return int(word << (32 - bits - bits * place)) >> (32 - bits);
}

__device__ float number(uint32_t reg, int high, __half) {
  return __half2float(__ushort_as_half(uint16_t(reg >> 16 * high)));
}
__device__ float number(uint32_t reg, int high, __nv_bfloat16) {
  return __bfloat162float(__ushort_as_bfloat16(uint16_t(reg >> 16 * high)));
}

// Counts wrong elements. A thread has a word and its complement; each half of it goes through
// every 16-bit pattern.
template <class Format, class Element>
__global__ void check_float(int* wrong) {
  using Decoder = typename Format::template Decoder<Element>;
  constexpr int kBits = Format::kBits, kCodes = 1 << kBits;
  uint32_t const low = blockIdx.x * blockDim.x + threadIdx.x;
  uint32_t const word = (low * 40503u & 0xffff) << 16 | low, words[2] = {word, ~word};
  for (int z = -1; z < kCodes; ++z) {  // -1: the decoder without zero points
    int const zeros[2] = {z < 0 ? 0 : z - kCodes / 2, z < 0 ? 0 : (z + 5) % kCodes - kCodes / 2};
    uint32_t out[4];
    if (z < 0) {
      Decoder::fragment(words, out);
    } else {
      Decoder::fragment(words, Decoder::zero_constants(zeros[0], zeros[1]), out);
    }
    for (int r = 0; r < 4; ++r) {
      for (int h = 0; h < 2; ++h) {
        int const stored = kBits == 8 ? code(words[r % 2], 8, r / 2 + 2 * h)
                                      : code(words[0], kBits, (r + 4 * h) * (4 / kBits));
        if (number(out[r], h, Element{}) != Decoder::kUnit * float(stored - zeros[r % 2]))
          atomicAdd(wrong, 1);
      }
    }
  }
}

__global__ void check_int8(int* wrong) {
  uint32_t const low = blockIdx.x * blockDim.x + threadIdx.x;
  uint32_t const word = (low * 40503u & 0xffff) << 16 | low, words[2] = {word, ~word};
  for (int z = -1; z < 16; ++z) {
    int const zeros[2] = {z < 0 ? 0 : z - 8, z < 0 ? 0 : (z + 5) % 16 - 8};
    uint32_t out[4];
    if (z < 0) {
      Int4Int8::fragment(words, out);
    } else {
      Int4MinusZeroInt8::fragment(words, Int4MinusZeroInt8::zero_constants(zeros[0], zeros[1]),
                                  out);
    }
    for (int r = 0; r < 4; ++r) {
      for (int e = 0; e < 4; ++e) {
        int const stored = code(words[r / 2], 4, 2 * e + r % 2);
        int const expected = z < 0 ? Int4Int8::kScale * stored : stored - zeros[r % 2];
        if (code(out[r], 8, e) != expected) atomicAdd(wrong, 1);
      }
    }
  }
}

int wrong_elements(void (*kernel)(int*)) {
  int* wrong = nullptr;
  EXPECT_EQ(cudaMallocManaged(&wrong, sizeof *wrong), cudaSuccess);
  *wrong = 0;
  kernel<<<256, 256>>>(wrong);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cudaGetErrorString(cudaGetLastError());
  int const count = *wrong;
  cudaFree(wrong);
  return count;
}

TEST(DecodeOnDevice, EveryCodeWithEveryZeroPoint) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device";
  EXPECT_EQ(wrong_elements(check_float<formats::Int2, __half>), 0) << "2 bits to fp16";
  EXPECT_EQ(wrong_elements(check_float<formats::Int2, __nv_bfloat16>), 0) << "2 bits to bf16";
  EXPECT_EQ(wrong_elements(check_float<formats::Int4, __half>), 0) << "4 bits to fp16";
  EXPECT_EQ(wrong_elements(check_float<formats::Int4, __nv_bfloat16>), 0) << "4 bits to bf16";
  EXPECT_EQ(wrong_elements(check_float<formats::Int8, __half>), 0) << "8 bits to fp16";
  EXPECT_EQ(wrong_elements(check_float<formats::Int8, __nv_bfloat16>), 0) << "8 bits to bf16";
  EXPECT_EQ(wrong_elements(check_int8), 0) << "4 bits to int8";
}

}  // namespace
}  // namespace cutlass_ops::decode
