// The sm_90a instructions of the wgmma kernels: CUTLASS's and CuTe's barriers, copies and MMA atoms
// under names for their use here.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // 104, 144, 160 and 176 columns

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>
#include <utility>

namespace cutlass_ops {

using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;
using ClusterBarrier = cutlass::arch::ClusterBarrier;

// Stores to the shared memory of a block of the cluster; `barrier`, at its address there, counts
// the bytes. Without a fence, which would wait for every memory access in flight.
__device__ __forceinline__ void store_remote(void* here, float4 const& v, uint64_t* barrier,
                                             int rank) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(here), rank)),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w),
      "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(barrier), rank))
      : "memory");
}
__device__ __forceinline__ void store_remote(uint32_t* here, uint32_t v, uint64_t* barrier,
                                             int rank) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                   cute::set_block_rank(cute::cast_smem_ptr_to_uint(here), rank)),
               "r"(v), "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(barrier), rank))
               : "memory");
}

// `bytes`, a multiple of 16, from shared memory to the same place of another block of the cluster;
// `barrier`, at its address there, counts them.
__device__ __forceinline__ void send(void const* here, uint64_t* barrier, int rank, int bytes) {
  uint32_t const from = cute::cast_smem_ptr_to_uint(here);
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(cute::set_block_rank(from, rank)),
      "r"(from), "r"(bytes), "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(barrier), rank))
      : "memory");
}

// `bytes`, a multiple of 16, to the same place of the CTAs of the cluster that have a bit in
// `ctas`; `barrier`, at its place there, counts them.
__device__ __forceinline__ void bulk_copy_multicast(void const* from, uint64_t* barrier,
                                                    uint16_t ctas, void* to, int bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1], %2, [%3], %4;" ::"r"(cute::cast_smem_ptr_to_uint(to)),
      "l"(from), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(barrier)), "h"(ctas)
      : "memory");
}

// `bytes`, a multiple of 16, to this CTA. `once`: no other CTA reads them, so L2 evicts them before
// other lines. Other copies have no hint: one for normal eviction makes products slower
// (docs/tuning-notes.md).
__device__ __forceinline__ void bulk_copy(void const* from, uint64_t* barrier, void* to, int bytes,
                                          bool once) {
  if (!once) return cute::SM90_BULK_COPY_G2S::copy(from, barrier, to, bytes);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(cute::cast_smem_ptr_to_uint(to)),
      "l"(from), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(barrier)),
      "l"(uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST))
      : "memory");
}

// CuTe's wgmma atoms of kBlockM columns, operand A in registers: 64 x 32 int8, int32 sums; 64 x 16
// floats, fp32 sums.
template <class Operand, class Sum, int kBlockM, int kColumns>
using Wgmma = decltype(cute::SM90::GMMA::rs_op_selector<
                       Operand, Operand, Sum,
                       cute::Shape<cute::_64, cute::Int<kBlockM>, cute::Int<kColumns>>>());
template <int kBlockM>
using Int8Wgmma = Wgmma<int8_t, int32_t, kBlockM, 32>;
template <class Element, int kBlockM>
using FloatWgmma =
    Wgmma<std::conditional_t<std::is_same_v<Element, __half>, cutlass::half_t, cutlass::bfloat16_t>,
          float, kBlockM, 16>;

template <class Atom, class Sum, size_t... I>
__device__ __forceinline__ void wgmma_expand(uint32_t const (&a)[4], uint64_t b, Sum* sums,
                                             bool add, std::index_sequence<I...>) {
  using cute::SM90::GMMA::ScaleOut;
  Atom::fma(a[0], a[1], a[2], a[3], b, sums[I]..., add ? ScaleOut::One : ScaleOut::Zero);
}

// sums[64 x kBlockM] (+)= a[64 x 32] b[kBlockM x 32]^T, issued; `b` is a shared-memory descriptor.
template <int kBlockM>
__device__ __forceinline__ void wgmma_int8(uint32_t const (&a)[4], uint64_t b, uint32_t* sums,
                                           bool add) {
  wgmma_expand<Int8Wgmma<kBlockM>>(a, b, sums, add, std::make_index_sequence<kBlockM / 2>{});
}

// sums[64 x kBlockM] (+)= a[64 x 16] b[kBlockM x 16]^T, issued.
template <class Element, int kBlockM>
__device__ __forceinline__ void wgmma_float(uint32_t const (&a)[4], uint64_t b, float* sums,
                                            bool add) {
  wgmma_expand<FloatWgmma<Element, kBlockM>>(a, b, sums, add,
                                             std::make_index_sequence<kBlockM / 2>{});
}

// Loads of shared memory that the compiler must not move: it would move them to their first use,
// where their latency is exposed.
__device__ __forceinline__ void load_shared(uint32_t address, uint32_t (&v)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address));
}

__device__ __forceinline__ void load_shared(uint32_t address, float (&v)[4]) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(address));
}

// Four 8 x 8 matrices of 16 bits; a lane has the address of a line of one.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t const (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

// Keep the compiler from moving uses of registers that an MMA in flight reads or writes.
template <int kCount>
__device__ __forceinline__ void fence_registers(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void fence_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Descriptor of a K-major operand of 128-byte rows in the 128-byte swizzle: 8 rows to an atom of
// 1024 bytes, atoms 1024 bytes apart (PTX ISA, "Matrix descriptor": start address / 16 in bits
// 0..13, stride / 16 from bit 32, swizzle mode 1 from bit 62). The atom starts on 1024 bytes; 32
// columns further is +2.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t shared) {
  return uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 | ((shared >> 4) & 0x3fff);
}

// operand_descriptor() for an address that is the same in all lanes, kept in uniform registers,
// from which wgmma reads it. Rows may have 64 bytes, in the 64-byte swizzle, and eights of rows may
// be `step` rows apart; the operand may begin at any row.
template <int kRowBytes = 128>
__device__ __forceinline__ uint64_t uniform_operand_descriptor(void const* shared, int step = 8) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  uint32_t address = __shfl_sync(~0u, (cute::cast_smem_ptr_to_uint(shared) >> 4) & 0x3fff, 0);
  return uint64_t(kRowBytes == 64 ? 2 : 1) << 62 | uint64_t(step * (kRowBytes / 16)) << 32 |
         address;
}

// Descriptor of 32 columns of bytes of which the first 16 are the second 16 too: 16 bytes a row,
// not swizzled, 8 rows to 128 bytes.
__device__ __forceinline__ uint64_t repeated_descriptor(void const* shared) {
  return uint64_t(128 / 16) << 32 | ((cute::cast_smem_ptr_to_uint(shared) >> 4) & 0x3fff);
}

}  // namespace cutlass_ops
