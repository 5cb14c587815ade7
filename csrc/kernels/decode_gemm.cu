// A few rows of x times int4, int8 or code-book weights (decoding): W4A16, W8A16, W4A8 and W8A8 for
// up to 8 rows of x, sm_90 and later.
//
// The time is that of reading the weights once, so everything else is arranged around their stream:
//
//   cluster   whole row panels of 64 output features; its blocks share K in equal slices, so that a
//             block's x is small and stays in shared memory
//   warp      an equal run of its block's pieces (64 features x 128 columns at 4 bits, 64 at 8),
//             which follow one another in memory. Every lane copies its own 16-byte vectors to a
//             ring of stages of its warp's (cp.async) and reads them back: no barrier. The first
//             stages are issued before the previous launch ends, but for those of the warp that
//             requests x first, and the next launch's blocks start once this one has issued all its
//             loads
//   multiply  mma.sync m16n8k16, weights as operand A, x by ldmatrix as operand B
//   promote   sum = fma(step's sum, weight scale, sum), as in mma_gemm_a16.cu
//   end       sums of warps that share a row panel are added in shared memory, and those of a
//             cluster's blocks in the block that ends with those features, always in the order of
//             K: no scratch memory, no atomics. Blocks send them by st.async, whose bytes a barrier
//             of the receiver counts: a fence at the scope of a cluster waits for every access in
//             flight, a tenth of a small product's time
//
// Where zero points or offsets take the sums of x over a step, which a block adds up once, codes
// become fp16 by bit operations alone: subnormal numbers (decode.cuh) with a bias that the sums'
// start takes away. Elsewhere the sums would cost more than the arithmetic of exact numbers saves.
//
// The values of a code book are looked up in shared memory (decode.cuh), the next word's while one
// is multiplied. More warps hide that, so a block leaves no room for one of the next launch, but
// where its part is small.
//
// int8 activations use the same loop. Blocks quantise x themselves in shared memory, with the
// quantiser's arithmetic (quantize.cuh), and keep the codes minus their zero point as fp16, which
// holds them exactly; products and their sums over a step are integers below 2^24, exact in fp32.
#include "kernels/decode_gemm_config.cuh"
#include "kernels/decode_gemm_x.cuh"

namespace cutlass_ops {
namespace {

// 4 or 8 neighbouring values of a group vector, as floats. kNarrow: the type has 16 bits.
template <bool kNarrow = false, int kCount>
__device__ __forceinline__ void load_vector(uint8_t const* vector, DataType type, int index,
                                            float (&out)[kCount]) {
  if (!kNarrow && type == DataType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      float4 v = *reinterpret_cast<float4 const*>(vector + (index + i) * 4);
      out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
    }
    return;
  }
  uint32_t words[kCount / 2];
  if constexpr (kCount == 8) {
    uint4 v = *reinterpret_cast<uint4 const*>(vector + index * 2);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else {
    uint2 v = *reinterpret_cast<uint2 const*>(vector + index * 2);
    words[0] = v.x, words[1] = v.y;
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    if (type == DataType::kFloat16) {
      float2 pair = __half22float2(reinterpret_cast<__half2 const&>(words[i]));
      out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
    } else {
      out[2 * i] = __uint_as_float(words[i] << 16),
              out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
}

template <class C>
using Sums = float[C::kMBlocks][C::kSumBlocks][4];

// Up to 4 rows of x times two row blocks' look-ups at a time, which are operands as they are:
// the values of rows g and g + 8 for one column stand for two columns of operand B, which for
// its first four columns are (x, 0), to pick row g for each row of x, and for the others (0, x), to
// pick row g + 8.
template <class C, class LookUp>
__device__ __forceinline__ void multiply_pairs(uint32_t (&pairs)[4][4], LookUp look_up,
                                               int first_turn, int turns, uint32_t const* x,
                                               bool first, float (&products)[C::kSumBlocks][4]) {
  uint32_t const even = threadIdx.x % 32 < 16 ? 0x4410u : 0x1044u,
                 odd = threadIdx.x % 32 < 16 ? 0x4432u : 0x3244u;
  uint32_t const b[4] = {__byte_perm(x[0], 0, even), __byte_perm(x[1], 0, even),
                         __byte_perm(x[0], 0, odd), __byte_perm(x[1], 0, odd)};
#pragma unroll
  for (int two = 0; two < 2; ++two) {
    int const turn = first_turn + 2 * two;
    if (turn + 2 < turns) look_up(turn + 2), look_up(turn + 3);
    uint32_t (&low)[4] = pairs[turn % 4], (&high)[4] = pairs[turn % 4 + 1];
    uint32_t const a[2][4] = {{low[0], high[0], low[1], high[1]},
                              {low[2], high[2], low[3], high[3]}};
    multiply_add<C::kOperand>(products[two], a[0], b[0], b[1], first, 0.0f);
    multiply_add<C::kOperand>(products[two], a[1], b[2], b[3], false, 0.0f);
  }
}

// The oldest piece of the ring; `column` is its first, counted from the slice's. Its stage is
// refilled at once.
template <class C>
__device__ __forceinline__ void multiply_piece(uint8_t const* shared, Params const& p, int column,
                                               Sums<C>& sums, WeightLoader<C>& loader) {
  using Decode = typename C::Decode;
  using E = CodeBias<Decode>;
  constexpr int kUnitColumns = C::kPieceColumns / 2;
  constexpr int kUnitPieces = kUnitColumns / 16;  // of 16 columns
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint8_t const* stage = loader.ring + loader.stage * p.memory.stage;
  uint32_t const table =
      C::kHasCodebook ? cute::cast_smem_ptr_to_uint(shared + p.memory.table) + lane * 4 : 0;
  uint32_t x[C::kMBlocks];
#pragma unroll
  for (int tb = 0; tb < C::kMBlocks; ++tb) x[tb] = x_row_of_thread<C>(shared, p, tb) + column * 2;

  float products[C::kMBlocks][C::kSumBlocks][4];
  float start[C::kMBlocks][4] = {};
  uint32_t b[C::kMBlocks][4];
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
    uint4 codes[kRowBlocks];
#pragma unroll
    for (int rb = 0; rb < kRowBlocks; ++rb)
      codes[rb] = *reinterpret_cast<uint4 const*>(stage + rb * C::kPieceBytes +
                                                  unit * C::kSecondHalf + lane * kLaneBytes);
    loader.copy_codes(p, unit);
    constexpr int kTurns = kUnitPieces * kRowBlocks, kAtOnce = C::kPairs ? 2 : 1;
    uint32_t pairs[2 * kAtOnce][4];  // looked up: of this word, or two, and of the next
    auto look_up = [&](int turn) {
      uint4 const& four = codes[turn % kRowBlocks];
      int const i = turn / kRowBlocks;
      uint32_t word = i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
      asm volatile("" : "+r"(word));  // not before its turn, as below
      decode::Int4Codebook::look_up<C::kBlockM == 8 && C::kMinCtasPerSm == 2 ? 3 : 4>(
          word, table, pairs[turn % (2 * kAtOnce)]);
    };
    if constexpr (C::kHasCodebook) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) look_up(i);
    }
#pragma unroll
    for (int piece = 0; piece < kUnitPieces; ++piece) {
      int const k_slice = unit * kUnitPieces + piece;  // of the piece's 16 columns
      int const step = k_slice * 16 / C::kStepColumns;
      bool const first = k_slice * 16 % C::kStepColumns == 0,
                 last = (k_slice + 1) * 16 % C::kStepColumns == 0;
      int const index = (column / C::kStepColumns + step) * C::kBlockM + 2 * t;
      float const* step_sums = reinterpret_cast<float const*>(shared + p.memory.sums) + index;
      if (first && E::kCodeBias > 0) {
#pragma unroll
        for (int tb = 0; tb < C::kMBlocks; ++tb) {
          float2 sum = *reinterpret_cast<float2 const*>(step_sums + tb * 8);
          start[tb][0] = -E::kCodeBias * sum.x, start[tb][1] = -E::kCodeBias * sum.y;
          start[tb][2] = E::kUpper * start[tb][0], start[tb][3] = E::kUpper * start[tb][1];
        }
      }
      if (k_slice % 2 == 0) {
#pragma unroll
        for (int tb = 0; tb < C::kMBlocks; ++tb) {
          load_operand_b(x[tb] + k_slice / 2 * 64, b[tb]);
        }
      }
      if constexpr (C::kPairs)
        multiply_pairs<C>(pairs, look_up, piece * kRowBlocks, kTurns, &b[0][k_slice % 2 * 2], first,
                          products[0]);
#pragma unroll
      for (int rb = 0; !C::kPairs && rb < kRowBlocks; ++rb) {
        uint32_t a[4];
        if constexpr (C::kHasCodebook) {
          int const turn = piece * kRowBlocks + rb;
          if (turn + 1 < kTurns) look_up(turn + 1);
          Decode::combine(pairs[turn % 2], a);
        } else {
          uint32_t words[4] = {codes[rb].x, codes[rb].y, codes[rb].z, codes[rb].w};
          // not decoded before its turn: registers
          asm volatile("" : "+r"(words[piece * Decode::kWords]));
          // of a nibble's second column
          if (nibble_columns(C::kBits) == 2) words[piece] >>= 2 * unit;
          Decode::fragment(words + piece * Decode::kWords, a);
        }
#pragma unroll
        for (int tb = 0; tb < C::kMBlocks; ++tb) {
          float (&d)[4] = products[tb][rb];
          if (first) {
            float (&c)[4] = start[tb];
            multiply_add<C::kOperand>(d, a, b[tb][k_slice % 2 * 2], b[tb][k_slice % 2 * 2 + 1],
                                      c[0], c[1], c[2], c[3]);
          } else {
            multiply_add<C::kOperand>(d, a, b[tb][k_slice % 2 * 2], b[tb][k_slice % 2 * 2 + 1],
                                      d[0], d[1], d[2], d[3]);
          }
        }
      }
      if (!last) continue;
      int row = (C::kShortGroups ? step : 0) * kRowsPerPanel + g * 8;
      if (C::kCompensates && p.weight.zeros) {
        uint32_t zeros[kRowBlocks / 2];
#pragma unroll
        for (int i = 0; i < kRowBlocks / 2; ++i)
          zeros[i] = reinterpret_cast<uint32_t const*>(stage + p.memory.zeros + row)[i];
#pragma unroll
        for (int tb = 0; tb < C::kMBlocks; ++tb) {
          float2 sum = *reinterpret_cast<float2 const*>(step_sums + tb * 8);
#pragma unroll
          for (int rb = 0; rb < C::kSumBlocks; ++rb)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float zero = float(int8_t(zeros[rb / 2] >> (rb % 2 * 16 + e / 2 * 8))) *
                           (e / 2 ? E::kUpper : 1.0f);
              products[tb][rb][e] = fmaf(-zero, e % 2 ? sum.y : sum.x, products[tb][rb][e]);
            }
        }
      }
      float scales[2 * kRowBlocks];
      load_vector<C::kPlain>(stage + C::kScales,
                             C::kPlain && !C::kInt8 ? C::kElementType : p.weight.scale_type, row,
                             scales);
      float const* step_scales = reinterpret_cast<float const*>(shared + p.memory.scales) + index;
#pragma unroll
      for (int tb = 0; tb < C::kMBlocks; ++tb) {
        float2 x_row_scale = C::kInt8 ? *reinterpret_cast<float2 const*>(step_scales + tb * 8)
                                      : make_float2(1.0f, 1.0f);
#pragma unroll
        for (int rb = 0; rb < C::kSumBlocks; ++rb)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float scale = scales[2 * rb + e / 2];
            if (C::kPairs)
              scale = t / 2 ? scales[2 * (2 * rb + e / 2) + 1] : scales[2 * (2 * rb + e / 2)];
            if (C::kInt8) scale *= e % 2 ? x_row_scale.y : x_row_scale.x;
            sums[tb][rb][e] = fmaf(products[tb][rb][e], scale, sums[tb][rb][e]);
          }
      }
      if (C::kCompensates && p.weight.offsets) {
        float offsets[2 * kRowBlocks];
        load_vector(stage + p.memory.offsets, p.weight.offset_type, row, offsets);
#pragma unroll
        for (int tb = 0; tb < C::kMBlocks; ++tb) {
          float2 sum = *reinterpret_cast<float2 const*>(step_sums + tb * 8);
          if (C::kInt8) {
            float2 x_row_scale = *reinterpret_cast<float2 const*>(step_scales + tb * 8);
            sum.x *= x_row_scale.x, sum.y *= x_row_scale.y;
          }
#pragma unroll
          for (int rb = 0; rb < C::kSumBlocks; ++rb)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              sums[tb][rb][e] = fmaf(offsets[2 * rb + e / 2] * (e / 2 ? E::kUpper : 1.0f),
                                     e % 2 ? sum.y : sum.x, sums[tb][rb][e]);
        }
      }
    }
  }
  __syncwarp();  // all lanes have read the vectors
  // Addresses of the next copies are computed after the products, to save registers.
  asm volatile(""
               : "+r"(loader.next.piece), "+r"(loader.next.row_panel), "+r"(loader.stage),
                 "+r"(loader.left));
  loader.copy_rest(p);
}

// A warp's sums of a row panel to shared memory, [x_row][row].
template <class C>
__device__ __forceinline__ void store_sums(float* to, Params const& p, Sums<C>& sums) {
  using E = CodeBias<typename C::Decode>;
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int const first = 2 * t % C::kBlockColumns;
  to += first * kSlotFloats + g + 2 * t / C::kBlockColumns * 8;
#pragma unroll
  for (int tb = 0; tb < C::kMBlocks; ++tb)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      bool const there = tb * 8 + first + e < p.epilogue.m;
#pragma unroll
      for (int i = 0; i < 2 * C::kSumBlocks; ++i) {
        float& sum = sums[tb][i / 2][i % 2 * 2 + e];
        float const unit = E::kUnit * (i % 2 ? E::kUpper : 1.0f);
        if (there)
          to[(tb * 8 + e) * kSlotFloats + i * (kRowsPerPanel / 2 / C::kSumBlocks)] =
              sum * (1.0f / unit);
        sum = 0.0f;
      }
    }
}

__device__ __forceinline__ void add(float (&sum)[4], float4 const& v) {
  sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
}

// Every `step`th row of [row panel][x_row], from row `first`.
struct Rows {
  int row_panel, x_row, row_panel_step, x_row_step;
  __device__ __forceinline__ Rows(int first, EvenPartition const& step, int m)
      : row_panel_step(step.base), x_row_step(step.rest) {
    Quotient begin(first, m);
    row_panel = begin.quotient, x_row = begin.remainder;
  }
  __device__ __forceinline__ void next(int m) {
    row_panel += row_panel_step, x_row += x_row_step;
    if (x_row >= m) x_row -= m, ++row_panel;
  }
};

// Which of a row panel's quads of features stands at a place in their order. Those of gate and of
// up for the same outputs are neighbours.
__device__ __forceinline__ int quad_at(int place, bool gated) {
  return gated ? (place & ~3) | (place & 1) << 1 | (place >> 1 & 1) : place;
}

// The sums of a quad of features of a row of x. `n`: the first, if quads' places are their order.
template <class C>
__device__ __forceinline__ void finish(float (&v)[4], int x_row, int n, Params const& p) {
  if (p.weight.gated) {
    float up[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) up[i] = __shfl_xor_sync(3u << (threadIdx.x % 32 & ~1u), v[i], 1);
    if (n % 8 == 0 && n / 2 < p.epilogue.n) store_gated_outputs(v, up, x_row, n / 2, p.epilogue);
    return;
  }
  if (n >= p.epilogue.n) return;
  if (p.plain_epilogue) {
    uint32_t low = pack_pair<typename C::Element>(nan_unless_finite(v[0]), nan_unless_finite(v[1]));
    uint32_t high =
        pack_pair<typename C::Element>(nan_unless_finite(v[2]), nan_unless_finite(v[3]));
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.epilogue.out) +
                              int64_t(x_row) * p.epilogue.n + n) = make_uint2(low, high);
  } else {
    store_outputs(v, x_row, n, p.epilogue);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinCtasPerSm)
    decode_gemm(__grid_constant__ Params const p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ RangePartition<C> partition;
  __shared__ Barriers barriers;
  int warp = threadIdx.x / 32, rank = blockIdx.x & (p.cluster - 1), m = p.epilogue.m;
  Part part(p, blockIdx.x >> p.log_cluster, rank);
  if (threadIdx.x == C::kThreads - 32) request_x<C>(shared, p, part, barriers);
  Pieces<C> pieces(part);
  int begin = pieces.begin(warp), end = pieces.begin(warp + 1),
      ring_bytes = (C::kMoreStages ? p.stages : C::kStages) * p.memory.stage;
  WeightLoader<C> loader(p, part, pieces, begin, end, shared + warp * ring_bytes);
  TileIterator current = loader.next;
#pragma unroll
  for (int i = 0; i < C::kStages; ++i) {
    loader.copy_codes(p, 0);
    loader.copy_codes(p, 1);
    loader.copy_rest(p);
  }
  if constexpr (C::kHasCodebook)
    decode::Int4Codebook::fill<typename C::Element>(shared + p.memory.table, p.weight.codebook,
                                                    threadIdx.x, C::kThreads);
  // Everything else that does not depend on x: for each row panel the first warp and the number of
  // warps that share it, and whether the last warp continues with the next panel.
  uint32_t* parts = reinterpret_cast<uint32_t*>(shared + p.memory.parts);
#pragma unroll 1
  for (int row_panel = threadIdx.x; row_panel < part.row_panels; row_panel += C::kThreads) {
    int past = (row_panel + 1) * pieces.of_row_panel,
        first = pieces.warp_of(past - pieces.of_row_panel), last = pieces.warp_of(past - 1);
    parts[row_panel] = uint32_t(first) | uint32_t(last - first) << 8 |
                       uint32_t(pieces.begin(last + 1) > past) << 16;
  }
  int const first = part.first_tile * kKPerTile, columns = part.tiles * kKPerTile;
  TileWalk walk(part.tiles, m, C::kWarps);
  if (C::kInt8 && threadIdx.x < 2 * C::kBlockM)
    partition.own[threadIdx.x / C::kBlockM][threadIdx.x % C::kBlockM] = 0;
  if (p.vector_x) {
    int past = p.weight.k - first, width = columns - past;  // columns beyond K
#pragma unroll 1
    for (int i = threadIdx.x; i < m * width; i += C::kThreads) {
      Quotient place(i, width);
      reinterpret_cast<uint16_t*>(shared + p.memory.x +
                                  place.quotient * p.memory.x_row)[past + place.remainder] = 0;
    }
  }
  __syncthreads();
  if (p.cluster > 1) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  }
  pdl_wait();
  if constexpr (C::kMoreStages > 0) {  // behind x, which would come later otherwise
#pragma unroll 1
    for (int i = C::kStages; i < p.stages; ++i) {
      loader.copy_codes(p, 0);
      loader.copy_codes(p, 1);
      loader.copy_rest(p);
    }
  }
  if (p.vector_x) {
    TransactionBarrier::wait(&barriers.x, 0);
  } else if (!C::kInt8 || (p.source != Source::kCodes && p.x.x_type != DataType::kFloat32)) {
    stage_floats<C>(shared, p, first, columns);
    if (C::kInt8) __syncthreads();
  }
  if constexpr (C::kInt8) {
    if (p.source == Source::kCodes) {
      stage_codes<C>(shared, p, first, walk);
    } else if (p.x.x_type != DataType::kFloat32) {
      if (p.symmetric) {
        stage_floats_as_integers<C, true, false>(shared, p, first, walk, partition, barriers);
      } else {
        stage_floats_as_integers<C, false, false>(shared, p, first, walk, partition, barriers);
      }
    } else {
      if (p.symmetric) {
        stage_floats_as_integers<C, true, true>(shared, p, first, walk, partition, barriers);
      } else {
        stage_floats_as_integers<C, false, true>(shared, p, first, walk, partition, barriers);
      }
    }
  }
  if (p.step_sums) {
    if (C::kInt8 || !p.vector_x) __syncthreads();
    sum_steps<C>(shared, p, columns);
  }
  __syncthreads();
  // Only after this launch has issued all its loads: otherwise x, which all blocks wait for, would
  // queue behind the next launch's weights.
  if (loader.left <= 0) pdl_launch_dependents();

  float *own_sums = reinterpret_cast<float*>(shared + warp * ring_bytes),
        *slots = reinterpret_cast<float*>(shared + p.memory.slots);
  int const slot = m * kSlotFloats;
  Sums<C> sums = {};
  for (int i = begin; i < end; ++i) {
    if (C::kMoreStages > 0 && p.stages > C::kStages) {
      wait_copies<C::kStages + C::kMoreStages - 1>();
    } else {
      wait_copies<C::kStages - 1>();
    }
    __syncwarp();
    multiply_piece<C>(shared, p, current.piece * C::kPieceColumns, sums, loader);
    if (loader.left <= 0) pdl_launch_dependents();
    if (++current.piece == pieces.of_row_panel && i + 1 < end) {
      store_sums<C>(slots + current.row_panel * slot, p, sums);
      ++current.row_panel, current.piece = 0;
    }
  }
  store_sums<C>(own_sums, p, sums);  // where its ring was
  __syncthreads();
  if (p.cluster > 1) {  // all blocks have read their x: sums of other blocks overwrite it
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  }

  // A row panel's sums in the order of its warps, a thread four features of a row of x.
  int const features = kRowsPerPanel >> p.log_cluster, log_quads = 4 - p.log_cluster;
  // [rank][row panel][x_row][features]
  float* const received = reinterpret_cast<float*>(shared + p.memory.x);
#pragma unroll 2
  for (Rows rows(thread_again() / 16, p.sum_step, m); rows.row_panel < part.row_panels;
       rows.next(m)) {
    uint32_t warps = parts[rows.row_panel];
    int const quad = thread_again() % 16,
              place = rows.x_row * kSlotFloats + quad_at(quad, p.weight.gated) * 4;
    int first = int(warps & 0xff), last = first + int(warps >> 8 & 0xff);
    uint8_t const* from = shared + first * ring_bytes + place * 4;
    float v[4] = {};
#pragma unroll 1
    for (; first < last; first += 4) {
      float4 theirs[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i, from += ring_bytes)
        if (first + i < last) theirs[i] = *reinterpret_cast<float4 const*>(from);
#pragma unroll
      for (int i = 0; i < 4; ++i) add(v, theirs[i]);
    }
    from = warps >> 16 ? reinterpret_cast<uint8_t const*>(slots + rows.row_panel * slot + place)
                       : shared + last * ring_bytes + place * 4;
    add(v, *reinterpret_cast<float4 const*>(from));
    if (p.cluster == 1) {
      finish<C>(v, rows.x_row, (part.first_row_panel + rows.row_panel) * kRowsPerPanel + quad * 4,
                p);
    } else {
      float* to = received +
                  ((rank * part.row_panels + rows.row_panel) * m + rows.x_row) * features +
                  (quad & ((1 << log_quads) - 1)) * 4;
      store_remote(to, make_float4(v[0], v[1], v[2], v[3]), &barriers.sums, quad >> log_quads);
    }
  }
  if (p.cluster == 1) return;

  // Every block finishes an equal share of each row panel's features, whose sums it adds in the
  // order of K.
  TransactionBarrier::wait(&barriers.sums, 0);
  int const all = part.row_panels * m * features;
#pragma unroll 2
  for (Rows rows(thread_again() >> log_quads, p.end_step, m); rows.row_panel < part.row_panels;
       rows.next(m)) {
    int quad = thread_again() & ((1 << log_quads) - 1);
    float const* from = received + (rows.row_panel * m + rows.x_row) * features + quad * 4;
    float v[4] = {};
#pragma unroll 2
    for (int r = 0; r < p.cluster; ++r, from += all) add(v, *reinterpret_cast<float4 const*>(from));
    finish<C>(v, rows.x_row,
              (part.first_row_panel + rows.row_panel) * kRowsPerPanel + rank * features + quad * 4,
              p);
  }
#endif
}

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, Stream stream) {
  PackedWeight const& w = problem.weight;
  DecodeShape const& shape = plan.decode;
  EpilogueParams epilogue(problem);
  bool plain = !w.gated && !problem.bias && !problem.residual &&
               problem.activation == Activation::kNone && !problem.saturate &&
               epilogue.vector_store && problem.out_type == C::kElementType;
  bool vector_x = !problem.quantized.codes && reinterpret_cast<uintptr_t>(problem.x) % 16 == 0 &&
                  problem.x_stride % 8 == 0 && w.k % 8 == 0 && !w.perm &&
                  problem.x_type != DataType::kFloat32;
  Source source = !C::kInt8                               ? Source::kFloats
                  : problem.quantized.codes               ? Source::kCodes
                  : problem.act_quant == ActQuant::kToken ? Source::kBlockM
                                                          : Source::kBlocks;
  Params p{w,
           FloatRows(problem.x, problem.x_type, problem.x_stride, w.k, w.perm),
           problem.quantized,
           source,
           problem.act_symmetric,
           epilogue,
           VectorRows(w.group_size),
           int(padded_k(w.k) / kKPerTile),
           int(padded_rows(w.n)),
           shape.stages,
           shape.cluster,
           shape.clusters,
           log2_of(shape.cluster),
           EvenPartition(int(padded_rows(w.n)) / kRowsPerPanel, shape.clusters),
           EvenPartition(int(padded_k(w.k) / kKPerTile), shape.cluster),
           EvenPartition(C::kThreads / 16, problem.m),
           EvenPartition(C::kThreads * shape.cluster / 16, problem.m),
           log2_bytes_of(w.scale_type),
           log2_bytes_of(w.offset_type),
           plan.decode_memory,
           plain,
           vector_x,
           CodeBias<typename C::Decode>::kCodeBias > 0 || w.zeros || w.offsets};
  return launch_plan(decode_gemm<C>, plan, C::kThreads, plan.decode_memory.total, stream, p);
}

template <class Element, class Format, int kBlockM, bool kInt8, int kWarps>
Status launch_warps(GemmProblem const& problem, Plan const& plan, Stream stream) {
  PackedWeight const& w = problem.weight;
  switch (w.group_size) {
    case 16:
      if constexpr (Format::kIntegers && !kInt8) {
        return launch_config<Config<Element, Format, kBlockM, 16, kInt8, kWarps, Weights::kAny>>(
            problem, plan, stream);
      } else {
        return unsupported("decode_gemm has groups of 16 of integers times 16-bit x alone");
      }
    case 32:
      return launch_config<Config<Element, Format, kBlockM, 32, kInt8, kWarps, Weights::kAny>>(
          problem, plan, stream);
    case 64:
      return launch_config<Config<Element, Format, kBlockM, 64, kInt8, kWarps, Weights::kAny>>(
          problem, plan, stream);
    default:
      if constexpr (Format::kIntegers) {
        using Plain = Config<Element, Format, kBlockM, 0, kInt8, kWarps, Weights::kPlain>;
        bool const has_type =
            kInt8 ? bytes_of(w.scale_type) == 2 : w.scale_type == Plain::kElementType;
        if (!w.zeros && !w.offsets && has_type) return launch_config<Plain>(problem, plan, stream);
      }
      return launch_config<Config<Element, Format, kBlockM, 0, kInt8, kWarps, Weights::kAny>>(
          problem, plan, stream);
  }
}

template <class Element, class Format, int kBlockM, bool kInt8>
Status launch_element(GemmProblem const& problem, Plan const& plan, Stream stream) {
  constexpr int kMost = decode_warps(Format::kTableBytes > 0);
  return plan.decode.warps == kMost
             ? launch_warps<Element, Format, kBlockM, kInt8, kMost>(problem, plan, stream)
             : launch_warps<Element, Format, kBlockM, kInt8, 8>(problem, plan, stream);
}

template <class Format, int kBlockM, bool kInt8>
Status launch_input(GemmProblem const& problem, Plan const& plan, Stream stream) {
  if constexpr (kInt8) {
    return launch_element<__half, Format, kBlockM, true>(problem, plan, stream);
  } else {
    return problem.x_type == DataType::kFloat16
               ? launch_element<__half, Format, kBlockM, false>(problem, plan, stream)
               : launch_element<__nv_bfloat16, Format, kBlockM, false>(problem, plan, stream);
  }
}

}  // namespace

Status launch_decode_gemm(GemmProblem const& problem, Plan const& plan, float*, Stream stream) {
  return visit(problem.weight.format, [&](auto format) -> Status {
    using Format = decltype(format);
    if constexpr (Format::kCodebook) {
      return plan.block_m == 4 ? launch_input<Format, 4, false>(problem, plan, stream)
                               : launch_input<Format, 8, false>(problem, plan, stream);
    } else if constexpr (Format::kDecodes) {
      if constexpr (Format::kExact) {
        if (multiplies_int8(problem)) return launch_input<Format, 8, true>(problem, plan, stream);
      }
      return launch_input<Format, 8, false>(problem, plan, stream);
    } else {
      return unsupported(std::string("decode_gemm has no instances of ") + Format::kCodes);
    }
  });
}

}  // namespace cutlass_ops
