// The epilogue of the persistent wgmma GEMM (hopper_gemm.cuh): stores, and the sums of a stream-K
// tail.
#pragma once

#include "device/hopper_tiles.cuh"
#include "device/mma.cuh"

namespace cutlass_ops::hopper {

// The residual of C::kLineRows rows of x from `first` on and a warpgroup's 64 features from n on,
// to lines of shared memory in the 128-byte swizzle. It needs no registers, which are scarce. Lines
// beyond the result are unchanged and not stored.
template <class C>
__device__ __forceinline__ void load_residual(uint8_t* lines, EpilogueParams const& e,
                                              ThreadCoord<C> const& coord, int first, int n) {
  int const thread = coord.warp * 32 + coord.lane, piece = thread % 8;
  uint16_t const* const from = static_cast<uint16_t const*>(e.residual) + n + piece * 8;
#pragma unroll 1
  for (int i = thread / 8; i < C::kLineRows; i += 16) {
    if (first + i < e.m && n + piece * 8 < e.n)
      copy_async_16(lines + i * C::kLineBytes + (piece ^ i % 8) * 16,
                    from + (first + i) * e.residual_stride);
  }
  commit_copies();
  wait_copies<0>();
}

// Add a matrix's residual, which a warp reads where it will store its outputs.
template <class T>
__device__ __forceinline__ void add_residual(float* sums, uint8_t const* matrix) {
  uint32_t pairs[4];
  cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(matrix), pairs[0],
                                pairs[1], pairs[2], pairs[3]);
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[i] += unpack_half<T>(pairs[i / 2], i % 2);
}

// Adds the bias, if there is one, to a thread's sums, which are pairs of rows `row` and row + 8 of
// the weight. The bias has `rows` elements.
template <int kSums>
__device__ __forceinline__ void add_bias(float (&sums)[kSums], void const* bias, DataType type,
                                         int64_t row, int64_t rows) {
#pragma unroll
  for (float& sum : sums) sum = nan_unless_finite(sum);
  if (!bias) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float const value = row + h * 8 < rows ? load_float(bias, type, row + h * 8) : 0.0f;
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      if (i % 4 / 2 == h) sums[i] += value;
  }
}

// Call `stage` with the outputs' type: it writes lines of a tile's rows of x from `first` on. Then
// the thread that `copies` stores them, n being the first feature, m0 the tile's first row of x and
// `end` that of the experts after its own.
template <class C, int kLineRows, class Stage>
__device__ __forceinline__ void store_lines(uint8_t const* lines, int line_bytes,
                                            CUtensorMap const& map, EpilogueParams const& e,
                                            int barrier, bool copies, int first, int n, int m0,
                                            int end, Stage const& stage) {
  if (e.out_type == DataType::kFloat16) {
    stage(__half());
  } else {
    stage(__nv_bfloat16());
  }
  cute::tma_store_fence();
  cutlass::arch::NamedBarrier::sync(128, barrier);
  if (!copies || n >= e.n) return;
#pragma unroll
  for (int i = 0; i < kLineRows && first + i < C::kBlockM; i += C::kXBoxRows) {
    if (!C::kGrouped || m0 + first + i < end)
      cute::SM90_TMA_STORE_2D::copy(&map, lines + i * line_bytes, n, m0 + first + i);
  }
  cute::tma_store_arrive();
}

// The usual outputs: a thread finishes and rounds its own sums, of two rows of the weight;
// transposing stores make the 64 outputs of each row of x adjacent, in the 128-byte swizzle, and
// one thread's copy stores them while the next tile begins. A residual is loaded in the same way.
// The general path below takes many times as long, during which the ring of stages is idle for both
// blocks. `end`: of an expert's rows of x.
template <class C>
__device__ __forceinline__ void store_halves(float (&sums)[C::kSums], float* staging,
                                             CUtensorMap const& map, Params const& p,
                                             ThreadCoord<C> const& coord, int row0, int m0,
                                             int end = 0) {
  EpilogueParams const& e = p.epilogue;
  int n = row0 + coord.warpgroup * kRowsPerPanel, barrier = 1 + coord.warpgroup;
  bool copies = coord.warp == 0 && coord.lane == 0;
  uint8_t* const lines =
      reinterpret_cast<uint8_t*>(staging) + coord.warpgroup * C::kLineRows * C::kLineBytes;
  // Four 8 x 8 matrices an instruction: rows g and g + 8 of eight rows of x, then of the next
  // eight. Each lane passes the address of one line of one matrix.
  int const matrix = (coord.lane / 16 * 8 + coord.lane % 8) * C::kLineBytes +
                     ((coord.warp * 2 + coord.lane / 8 % 2) ^ coord.lane % 8) * 16;
  auto const each_matrix = [&](int first, auto const& f) {
#pragma unroll
    for (int j = 0; j < C::kLineRows / 16 && first + 16 * j < C::kBlockM; ++j)
      f(sums + first / 2 + 8 * j, lines + matrix + j * 16 * C::kLineBytes);
  };
#pragma unroll
  for (int first = 0; first < C::kBlockM; first += C::kLineRows) {
    if (copies) cute::tma_store_wait<0>();  // the previous lines have been read
    cutlass::arch::NamedBarrier::sync(128, barrier);
    if constexpr (!C::kGrouped) {
      if (e.residual) {
        load_residual<C>(lines, e, coord, m0 + first, n);
        cutlass::arch::NamedBarrier::sync(128, barrier);
        if (e.residual_type == DataType::kFloat16) {
          each_matrix(first, [](float* v, uint8_t* address) { add_residual<__half>(v, address); });
        } else {
          each_matrix(first,
                      [](float* v, uint8_t* address) { add_residual<__nv_bfloat16>(v, address); });
        }
      }
    }
    if (!C::kGrouped && e.limit < HUGE_VALF) {
      each_matrix(first, [&](float* v, uint8_t*) {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = clamp_keeping_nan(v[i], -e.limit, e.limit);
      });
    }
    store_lines<C, C::kLineRows>(
        lines, C::kLineBytes, map, e, barrier, copies, first, n, m0, end, [&](auto type) {
          each_matrix(first, [&](float const* v, uint8_t* address) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
              pairs[i] = pack_pair<decltype(type)>(v[2 * i], v[2 * i + 1]);
            cute::SM90_U16x8_STSM_T::copy(pairs[0], pairs[1], pairs[2], pairs[3],
                                          *reinterpret_cast<cute::uint128_t*>(address));
          });
        });
  }
}

// Outputs of a gated weight, which overwrite gate's sums: one thread's copies store lines of 32
// outputs from the n-th on, of rows of x from m0 on. `end`: of an expert's rows.
template <class C>
__device__ __forceinline__ void store_gated(float const (&sums)[C::kSums], float* staging,
                                            CUtensorMap const& map, EpilogueParams const& e,
                                            ThreadCoord<C> const& coord, int n, int m0,
                                            int end = 0) {
  // Lines of 32 features, in the 64-byte swizzle.
  constexpr int kFeatures = kRowsPerPanel / 2, kLineBytes = kFeatures * 2;
  constexpr int kLineRows = C::kBlockM < 2 * C::kLineRows ? C::kBlockM : 2 * C::kLineRows;
  int const barrier = 1 + coord.warpgroup;
  bool const copies = coord.warp == 0 && coord.lane == 0;
  uint8_t* const lines =
      reinterpret_cast<uint8_t*>(staging) + coord.warpgroup * kLineRows * kLineBytes;
  // Two 8 x 8 matrices an instruction: eight features of eight rows of x, then of the next eight.
  int const line = coord.lane % 16, matrix = line * kLineBytes + (coord.warp ^ line / 2 % 4) * 16;
#pragma unroll
  for (int first = 0; first < C::kBlockM; first += kLineRows) {
    if (copies) cute::tma_store_wait<0>();  // the previous lines have been read
    cutlass::arch::NamedBarrier::sync(128, barrier);
    store_lines<C, kLineRows>(
        lines, kLineBytes, map, e, barrier, copies, first, n, m0, end, [&](auto type) {
#pragma unroll
          for (int j = 0; j < kLineRows / 16 && first + 16 * j < C::kBlockM; ++j) {
            float const* pair = sums + first / 2 + 8 * j;
            cute::SM90_U16x4_STSM_T::copy(
                pack_pair<decltype(type)>(pair[0], pair[1]),
                pack_pair<decltype(type)>(pair[4], pair[5]),
                *reinterpret_cast<cute::uint128_t*>(lines + matrix + j * 16 * kLineBytes));
          }
        });
  }
}

// A slice of a tile of the stream-K tail: the warps of all clusters but the one with the first
// slice store their sums in the workspace, in the order of registers, and set their flags; those of
// the first wait for the flags, add in the order of K, and return true: they store the tile. They
// wait only for clusters of lower numbers, which were started before. The workspace is
// uninitialised, but holds no flag of this launch: a flag is cleared by its reader, so that a graph
// replays the same launch correctly.
template <class C>
__device__ __forceinline__ bool add_parts(float (&sums)[C::kSums], Params const& p,
                                          ThreadCoord<C> const& coord,
                                          typename C::Work::Part part) {
  constexpr int kStride = C::kCluster * C::kWarpgroups * C::kSums * 128;  // floats of a slice
  int row_panel = coord.rank * C::kWarpgroups + coord.warpgroup, others = p.splits - 1;
  float* parts = p.splitk_workspace + int64_t(part.split_tile * others) * kStride +
                 row_panel * C::kSums * 128 + coord.warp * 32 + coord.lane;
  constexpr int kFlags = C::kCluster * C::kWarpgroups * 4;
  uint64_t* flags = p.flags + part.split_tile * others * kFlags + row_panel * 4 + coord.warp;
  // One float at a time: a vector needs consecutive registers, and the main loop is slower with
  // such a register assignment (docs/tuning-notes.md).
  if (part.split > 0) {
    float* to = parts + int64_t(part.split - 1) * kStride;
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) __stcg(to + i * 128, sums[i]);
    __syncwarp();
    if (coord.lane == 0) {
      asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flags + (part.split - 1) * kFlags),
                   "l"(p.flag)
                   : "memory");
    }
    return false;
  }
  if (coord.lane < others) {
    uint64_t found;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];"
                   : "=l"(found)
                   : "l"(flags + coord.lane * kFlags)
                   : "memory");
    } while (found != p.flag);
    flags[coord.lane * kFlags] = 0;
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < others; ++i, parts += kStride) {
#pragma unroll
    for (int j = 0; j < C::kSums; ++j) sums[j] += __ldcg(parts + j * 128);
  }
  return true;
}

// Epilogue store of a tile, or of a slice of one, through shared memory, kStoreRows at a time, so
// that whole lines are stored.
template <class C>
__device__ __forceinline__ void store(float (&sums)[C::kSums], float* staging,
                                      CUtensorMap const& map, Params const& p,
                                      ThreadCoord<C> const& coord, int index, int row0, int m0) {
  float* splitk_workspace = nullptr;
  if (index >= p.whole_tiles) {
    typename C::Work::Part const part(index, p);
    if (!p.flags) {
      splitk_workspace = p.splitk_workspace + int64_t(part.split) * p.epilogue.m * p.n_pad;
    } else if (!add_parts<C>(sums, p, coord, part)) {
      return;
    }
  }
  if (p.store_halves) {
    EpilogueParams const& e = p.epilogue;
    bool const gated = p.weight.gated;
    int const first = row0 + coord.warpgroup * kRowsPerPanel;
    add_bias(sums, e.bias, e.bias_type, first + coord.warp * 16 + coord.lane / 4, p.weight.n);
    activate_or_gate(sums, e.activation, e.bounds, gated);
    if (!gated) return store_halves<C>(sums, staging, map, p, coord, row0, m0);
    if (e.limit < HUGE_VALF) {
#pragma unroll
      for (float& sum : sums) sum = clamp_keeping_nan(sum, -e.limit, e.limit);
    }
    return store_gated<C>(sums, staging, map, e, coord, first / 2, m0);
  }
  int const n = row0 + coord.warpgroup * kRowsPerPanel, thread = thread_again() % 128,
            barrier = 1 + coord.warpgroup;
  staging += coord.warpgroup * C::kStoreRows * C::kStoreStride;
  // One body for all parts: unrolled, it took three quarters of a kernel's compilation. The vote
  // tells ptxas that the warp has converged; otherwise ptxas guards the main loop against a
  // diverged warp.
#pragma unroll 1
  for (int first = 0; first < C::kBlockM; first += C::kStoreRows) {
#pragma unroll
    for (int part = 0; part < C::kBlockM; part += C::kStoreRows) {
      if (!__any_sync(~0u, part == first)) continue;
#pragma unroll
      for (int i = 0; i < C::kStoreRows / 2; ++i) {
        int x_row = i / 4 * 8 + thread % 4 * 2 + i % 2,
            row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8;
        staging[x_row * C::kStoreStride + row] = sums[part / 2 + i];
      }
    }
    cutlass::arch::NamedBarrier::sync(128, barrier);
    int const column = thread % 8 * 8;
    bool const exists = n + column < (splitk_workspace ? p.n_pad : p.epilogue.n);
#pragma unroll 1
    for (int i = 0; i < C::kStoreRows; i += 16) {
      int const x_row = i + thread / 8, m = m0 + first + x_row;
      if (!exists || x_row >= C::kStoreRows || m >= p.epilogue.m) continue;
      float4 const* source =
          reinterpret_cast<float4 const*>(staging + x_row * C::kStoreStride + column);
      float4 a = source[0], b = source[1];
      if (splitk_workspace) {
        float4* to =
            reinterpret_cast<float4*>(splitk_workspace + int64_t(m) * p.n_pad + n + column);
        to[0] = a, to[1] = b;
      } else {
        float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        store_outputs(v, m, n + column, p.epilogue);
      }
    }
    cutlass::arch::NamedBarrier::sync(128, barrier);  // what is staged has been read
  }
}

// The scales of a tile's rows of x, of int8 activations with one scale a row, whose codes are
// multiplied as floats.
template <class C>
__device__ __forceinline__ void scale_x_rows(float (&sums)[C::kSums], typename C::Params const& p,
                                             ThreadCoord<C> const& coord, int m0) {
  if (!p.x.scales) return;
#pragma unroll
  for (int j = 0; j < C::kBlockM / 8; ++j) {
    float2 const scale =
        __ldg(reinterpret_cast<float2 const*>(p.x.scales + min(m0 + 8 * j, p.x.stride - 8)) +
              coord.lane % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[4 * j + i] *= i % 2 ? scale.y : scale.x;
  }
}

// scale_x_rows() for experts. Lane i of a warp loads the scales of rows i, i + 32 and so on, since
// finding a row of x takes two loads and a division. They are issued before the main loop and end
// during it, but with four warpgroups, which have no registers for them, after it. 32 rows need no
// shuffles, which make that main loop slower.
template <class C>
class ExpertRowScales {
  static constexpr bool kEarly = C::kWarpgroups < 4, kShuffles = kEarly || C::kBlockM > 32;
  float scales_[(C::kBlockM + 31) / 32];

  static __device__ __forceinline__ float of_row(GroupedParams const& p,
                                                 typename C::Work const& work, int row) {
    return p.x.scales[row_of_slot(p.groups, min(work.first_x_row + row, work.end_x_row - 1))];
  }
  __device__ __forceinline__ void load(GroupedParams const& p, ThreadCoord<C> const& coord,
                                       typename C::Work const& work) {
#pragma unroll
    for (int i = 0; i * 32 < C::kBlockM; ++i) scales_[i] = of_row(p, work, i * 32 + coord.lane);
  }

 public:
  __device__ __forceinline__ ExpertRowScales(GroupedParams const& p, ThreadCoord<C> const& coord,
                                             typename C::Work const& work) {
    if (kEarly && p.x.scales) load(p, coord, work);
  }
  __device__ __forceinline__ void apply(float (&sums)[C::kSums], GroupedParams const& p,
                                        ThreadCoord<C> const& coord, typename C::Work const& work) {
    if (!p.x.scales) return;
    if (kShuffles && !kEarly) load(p, coord, work);
    int pair = coord.lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < C::kBlockM / 4; ++i) {
      int const row = i / 2 * 8 + i % 2;
      asm volatile("" : "+r"(pair));  // one address of a shuffle at a time: registers
      float const scale = kShuffles ? __shfl_sync(~0u, scales_[row / 32], row % 32 + pair)
                                    : of_row(p, work, row + pair);
      sums[i / 2 * 4 + i % 2] *= scale, sums[i / 2 * 4 + i % 2 + 2] *= scale;
    }
  }
};

// ExpertRowScales for a tile of experts, to be made before its main loop; nothing for other tiles.
template <class C>
__device__ __forceinline__ auto row_scales_of(typename C::Params const& p,
                                              ThreadCoord<C> const& coord,
                                              typename C::Work const& work) {
  if constexpr (C::kGrouped) {
    return ExpertRowScales<C>(p, coord, work);
  } else {
    return 0;
  }
}

// 16-bit outputs of a tile of experts: one for each feature, or, where a thread's rows g and g + 8
// are gate's and up's of one feature, activation(gate) * up.
template <class C>
__device__ __forceinline__ void store_group(float (&sums)[C::kSums], float* staging,
                                            CUtensorMap const& map, GroupedParams const& p,
                                            ThreadCoord<C> const& coord,
                                            typename C::Work const& work, int row0) {
  Groups const& groups = p.groups;
  int const m0 = work.first_x_row, row_panel = row0 / kRowsPerPanel + coord.warpgroup;
  int64_t const row = (int64_t(work.expert) * groups.row_panels + row_panel) * kRowsPerPanel +
                      coord.warp * 16 + coord.lane / 4;
  add_bias(sums, row_panel < groups.row_panels ? groups.bias : nullptr, groups.bias_type, row,
           INT64_MAX);
  if (!groups.gated) return store_halves<C>(sums, staging, map, p, coord, row0, m0, work.end_x_row);
  activate_or_gate(sums, groups.activation, groups.bounds, true);
  store_gated<C>(sums, staging, map, p.epilogue, coord, row_panel * kRowsPerPanel / 2, m0,
                 work.end_x_row);
}

}  // namespace cutlass_ops::hopper
