// The tiles of conv_int8_wgmma.cu, and the warps that load them and fill their padding.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/fast_math.h>

#include <type_traits>

#include "device/hopper.cuh"
#include "device/requantize.cuh"
#include "dispatch/conv_int8.h"

namespace cutlass_ops {
namespace {

struct Params : ConvParams {
  int stages;
  cutlass::FastDivmod n_tiles, group_tiles;  // of all output channels; of a group
  int group_channels;                        // output channels of a group
  int tiles;                                 // of a cluster
  int k_blocks, last_steps;  // of a tap's channels; of 32 of them, in the last block
  ConvWindow window;
  cutlass::FastDivmod columns, lines;  // of the result
  cutlass::FastDivmod patches[2];      // along width and height
  int all_patches;                     // of all images
  int slices;       // of the channels of a tile, where a cluster's CTAs take one each
  int tile_pixels;  // of a tile that are loaded: of kBlockM, those that there are at all
};

// Tensor maps; [1]: of blocks of at most 64 channels.
struct Maps {
  CUtensorMap pixels[2], weights[2];
};

template <bool kUnsigned_, int kBlockN_, int kCluster_, bool kLoadsWindows_, bool kSlices_ = false,
          bool kTurns_ = false>
struct Config {
  using Tile = ConvWgmmaTile;
  static constexpr Tile kTile = {kBlockN_, kCluster_, kLoadsWindows_, kSlices_, kTurns_};
  static constexpr bool kUnsigned = kUnsigned_, kLoadsWindows = kLoadsWindows_, kSlices = kSlices_,
                        kTurns = kTurns_;
  static constexpr int kWarpgroups = Tile::kWarpgroups, kBlockM = Tile::kBlockM;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kCluster = kCluster_;  // CTAs that share weights
  static constexpr int kPixelBytes = kTile.pixel_bytes(), kStageBytes = kTile.stage_bytes();
  static constexpr int kBands = kBlockM / 64 / kTile.sharing();  // of 64 pixels, of a warpgroup
  static constexpr int kSums = kBlockN / 2;                      // of a thread and band
  using Mma = decltype(cute::SM90::GMMA::ss_op_selector<
                       std::conditional_t<kUnsigned, uint8_t, int8_t>, int8_t, int32_t,
                       cute::Shape<cute::_64, cute::Int<kBlockN>, cute::_32>>());
};

struct Barriers {
  uint64_t full[ConvWgmmaTile::kMostStages], empty[ConvWgmmaTile::kMostStages];
  uint64_t window_full[ConvWindow::kBuffers], window_empty[ConvWindow::kBuffers];
  // with the zero point of x, where it has one, outside of x
  uint64_t filled[ConvWgmmaTile::kMostStages], window_filled[ConvWindow::kBuffers];
  uint64_t sums;                           // of the other slices
  XNumbers x[ConvWgmmaTile::kWarpgroups];  // where x was floats: a copy for each warpgroup
};
static_assert(sizeof(Barriers) == ConvWgmmaTile::kBarrierBytes);

struct Ring {
  int const stages;
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ void advance(int steps) {
    int const turns = (stage + steps) / stages;
    stage += steps - turns * stages, phase ^= turns & 1;
  }
};

// The first pixel of a patch of the result, by the patch's number.
struct Patch {
  int x, y, image;
  __device__ __forceinline__ Patch(Params const& p, int index) {
    int line;
    p.patches[0](line, x, index);
    p.patches[1](image, y, line);
    x *= ConvWindow::kPatch, y *= ConvWindow::kPatch;
  }
};

// CTAs of a cluster that takes a tile, or neighbouring ones.
template <class C>
__device__ __forceinline__ int cluster_size(Params const& p) {
  return C::kSlices ? p.slices : C::kCluster;
}

// The blocks of channels that a CTA multiplies.
template <class C>
struct Blocks {
  int first, end;
  __device__ __forceinline__ Blocks(Params const& p, int rank) : first(0), end(p.k_blocks) {
    if constexpr (C::kSlices)
      first = rank * p.k_blocks / p.slices, end = (rank + 1) * p.k_blocks / p.slices;
  }
};

template <class C>
struct Tile {
  int first_row, group, first_n, end_n;  // rows are pixels of the result, or of its patches
  __device__ __forceinline__ Tile(Params const& p, int index, int rank) {
    int row, column, tile;
    p.n_tiles(row, column, index);
    p.group_tiles(group, tile, column);
    first_row = (row * C::kCluster + (C::kSlices ? 0 : rank)) * C::kBlockM;
    first_n = group * p.group_channels + tile * C::kBlockN;
    end_n = (group + 1) * p.group_channels;
  }
};

// The pixels of the result that are a warpgroup's 64 rows.
template <class C>
struct RowPixels {
  static constexpr int kPatch = ConvWindow::kPatch;
  int first, columns, lines;  // of a patch: its first pixel, and how much of it is in the image
  __device__ __forceinline__ RowPixels(Params const& p, int row)
      : first(row), columns(0), lines(0) {
    if constexpr (C::kLoadsWindows) {
      int const index = row / (kPatch * kPatch);
      Patch const patch(p, index);
      first = (patch.image * p.out_height + patch.y) * p.out_width + patch.x;
      columns = p.out_width - patch.x;
      lines = index < p.all_patches ? p.out_height - patch.y : 0;
    }
  }
  // The pixel of a row; -1 where there is none.
  __device__ __forceinline__ int operator()(Params const& p, int row) const {
    if constexpr (!C::kLoadsWindows) return first + row < p.pixels ? first + row : -1;
    int const x = row % kPatch, y = row / kPatch;
    return x < columns && y < lines ? first + y * p.out_width + x : -1;
  }
};

// Loads the windows of a CTA's tiles, in the order in which they are multiplied.
template <class C>
class WindowLoader {
  uint8_t* const windows_;
  Barriers& barriers_;
  Maps const& maps_;
  Params const& p_;
  int const rank_;
  bool const leader_;
  Blocks<C> const blocks_;
  int index_, block_;
  Ring ring_{ConvWindow::kBuffers};

 public:
  __device__ __forceinline__ WindowLoader(uint8_t* windows, Barriers& barriers, Maps const& maps,
                                          Params const& p, int rank, bool leader)
      : windows_(windows),
        barriers_(barriers),
        maps_(maps),
        p_(p),
        rank_(rank),
        leader_(leader),
        blocks_(p, rank),
        index_(blockIdx.x / cluster_size<C>(p)),
        block_(blocks_.first) {}

  // Loads the windows of the next block of channels.
  __device__ __forceinline__ void load_next() {
    if (index_ >= p_.tiles) return;
    ClusterBarrier::wait(&barriers_.window_empty[ring_.stage], ring_.phase ^ 1);
    if (leader_) {
      Tile<C> const tile(p_, index_, rank_);
      ConvProblem const& problem = p_.problem;
      bool const narrow = block_ == p_.k_blocks - 1 && p_.last_steps <= 2;
      uint64_t* const full = &barriers_.window_full[ring_.stage];
      uint8_t* const to = windows_ + ring_.stage * C::Tile::kPatches * p_.window.bytes();
      TransactionBarrier::arrive_and_expect_tx(
          full, C::Tile::kPatches * p_.window.pixels() * (narrow ? 64 : ConvWgmmaTile::kBlockK));
#pragma unroll
      for (int i = 0; i < C::Tile::kPatches; ++i) {
        int const number = tile.first_row / 64 + i;
        Patch const patch(p_, min(number, p_.all_patches - 1));
        cute::SM90_TMA_LOAD_4D::copy(
            &maps_.pixels[narrow], full, uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL),
            to + i * p_.window.bytes(),
            tile.group * problem.weight.channels + block_ * ConvWgmmaTile::kBlockK,
            patch.x - problem.padding[1], patch.y - problem.padding[0], patch.image);
      }
    }
    ring_.advance();
    if (++block_ == blocks_.end) block_ = blocks_.first, index_ += gridDim.x / cluster_size<C>(p_);
  }
};

template <class C>
__device__ __forceinline__ void load_tiles(uint8_t* windows, uint8_t* stages, Barriers& barriers,
                                           Maps const& maps, Params const& p, int rank) {
  constexpr int kShare = C::kBlockN / C::kCluster;
  constexpr uint16_t kEveryCta = (1 << C::kCluster) - 1;
  constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  ConvProblem const& problem = p.problem;
  bool const leader = cute::elect_one_sync();
  int const taps = problem.weight.height * problem.weight.width, size = cluster_size<C>(p),
            share = C::kSlices ? 0 : rank;
  Blocks<C> const blocks(p, rank);
  WindowLoader<C> window(windows, barriers, maps, p, rank, leader);
  if constexpr (C::kLoadsWindows) window.load_next();
  Ring ring{p.stages};
  for (int index = blockIdx.x / size; index < p.tiles; index += gridDim.x / size) {
    Tile<C> const tile(p, index, rank);
    int const row = tile.first_row / p.out_width, image = row / p.out_height;
    int const x = (tile.first_row - row * p.out_width) * problem.stride[1] - problem.padding[1];
    int const y = (row - image * p.out_height) * problem.stride[0] - problem.padding[0];
    int const first_channel = tile.group * problem.weight.channels;
#pragma unroll 1
    for (int block = blocks.first; block < blocks.end; ++block) {
      int const channel = block * ConvWgmmaTile::kBlockK;
      bool const narrow = block == p.k_blocks - 1 && p.last_steps <= 2;
      int const line = narrow ? 64 : ConvWgmmaTile::kBlockK;
#pragma unroll 1
      for (int tap = 0, i = 0, j = 0; tap < taps; ++tap, ring.advance()) {
        // The next window, while this one is multiplied.
        if (C::kLoadsWindows && tap == taps / 2) window.load_next();
        uint8_t* const stage = stages + ring.stage * C::kStageBytes;
        uint64_t* const full = &barriers.full[ring.stage];
        ClusterBarrier::wait(&barriers.empty[ring.stage], ring.phase ^ 1);
        if (leader) {
          int const pixels = C::kLoadsWindows ? 0 : p.tile_pixels;
          TransactionBarrier::arrive_and_expect_tx(full, (pixels + C::kBlockN) * line);
          if constexpr (!C::kLoadsWindows) {
            cute::SM90_TMA_LOAD_IM2COL_4D::copy(
                &maps.pixels[narrow], full, stage, first_channel + channel, x, y, image,
                uint16_t(j * problem.dilation[1]), uint16_t(i * problem.dilation[0]));
          }
          uint8_t* const to = stage + C::kPixelBytes + share * kShare * line;
          CUtensorMap const& weights = maps.weights[narrow];
          if constexpr (C::kCluster > 1) {
            cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&weights, full, kEveryCta, kHint, to, channel,
                                                   tap, tile.first_n + share * kShare);
          } else {
            cute::SM90_TMA_LOAD_3D::copy(&weights, full, kHint, to, channel, tap, tile.first_n);
          }
        }
        if (++j == problem.weight.width) j = 0, ++i;
      }
    }
  }
  // A CTA must not exit before the last arrivals of its neighbour at its barriers.
  for (int i = 0; C::kCluster > 1 && i < p.stages; ++i, ring.advance())
    ClusterBarrier::wait(&barriers.empty[ring.stage], ring.phase ^ 1);
}

// ---- padding

// Writes the zero point of x, a multiple of whose bytes is `codes`, to a pixel's line. Lanes begin
// with different banks.
template <int kLine>
__device__ __forceinline__ void fill_pixel(uint8_t* to, uint32_t codes) {
#pragma unroll
  for (int i = 0; i < kLine / 16; ++i)
    *reinterpret_cast<uint4*>(to + (i ^ int(threadIdx.x) % (kLine / 16)) * 16) =
        make_uint4(codes, codes, codes, codes);
}

// Along an axis of a window, the pixels inside of x; behind its padding there are no results.
struct Inside {
  int begin, count, all;
  __device__ __forceinline__ Inside(ConvProblem const& p, int axis, int place, int extent) {
    int const first = place - p.padding[axis], size = axis ? p.width : p.height;
    all = min(size + p.padding[axis] - first, extent);
    begin = min(max(-first, 0), all), count = max(min(size - first, all) - begin, 0);
  }
  // The place of a pixel, by its number among those outside.
  __device__ __forceinline__ int outside(int i) const { return i < begin ? i : i + count; }
};

// The pixels outside of x of a window: all of some lines, and some of the others. A lane has every
// 32nd, and knows the first before the window is loaded.
class WindowPadding {
  Inside lines_, columns_;
  int whole_, rest_;  // pixels of whole lines; of each other line
  int width_, first_;

  // The place in the window of a pixel, by its number among those outside.
  __device__ __forceinline__ int place(int i) const {
    bool const of_whole = i < whole_;
    int const number = of_whole ? i : i - whole_, extent = of_whole ? columns_.all : max(rest_, 1);
    int const quotient = number / extent, remainder = number - quotient * extent;
    int const line = of_whole ? lines_.outside(quotient) : lines_.begin + quotient,
              column = of_whole ? remainder : columns_.outside(remainder);
    return line * width_ + column;
  }

 public:
  __device__ __forceinline__ WindowPadding(Params const& p, int patch)
      : WindowPadding(p, Patch(p, min(patch, p.all_patches - 1))) {}
  __device__ __forceinline__ WindowPadding(Params const& p, Patch const& patch)
      : lines_(p.problem, 0, patch.y, p.window.height),
        columns_(p.problem, 1, patch.x, p.window.width),
        whole_((lines_.all - lines_.count) * columns_.all),
        rest_(columns_.all - columns_.count),
        width_(p.window.width),
        first_(place(int(threadIdx.x) % 32)) {}

  template <int kLine>
  __device__ __forceinline__ void fill(uint8_t* window, uint32_t codes) const {
    int const all = whole_ + lines_.count * rest_;
    for (int i = int(threadIdx.x) % 32; i < all; i += 32)
      fill_pixel<kLine>(window + (i < 32 ? first_ : place(i)) * kLine, codes);
  }
};

// The pixels under the taps of a tile's rows; a lane has several.
template <class C>
class RowPadding {
  static constexpr int kRows = C::kBlockM / 32;
  int y_[kRows], x_[kRows];  // under the first tap

 public:
  __device__ __forceinline__ RowPadding(Params const& p, Tile<C> const& tile) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int line, image;
      p.columns(line, x_[i], tile.first_row + i * 32 + int(threadIdx.x) % 32);
      p.lines(image, y_[i], line);
      y_[i] = y_[i] * p.problem.stride[0] - p.problem.padding[0],
      x_[i] = x_[i] * p.problem.stride[1] - p.problem.padding[1];
    }
  }

  template <int kLine>
  __device__ __forceinline__ void fill(uint8_t* pixels, Params const& p, uint32_t codes, int tap_y,
                                       int tap_x) const {
    pixels += int(threadIdx.x) % 32 * kLine;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (unsigned(y_[i] + tap_y) >= unsigned(p.problem.height) ||
          unsigned(x_[i] + tap_x) >= unsigned(p.problem.width))
        fill_pixel<kLine>(pixels + i * 32 * kLine, codes);
    }
  }
};

// Fills the pixels outside of x in what is loaded for a CTA's tiles, in the order in which it is.
// Warp `own` of those that do so has every so many of the windows' buffers or of the stages: it
// waits for each of their phases, which a barrier does not tell apart from the one before the last.
template <class C>
__device__ __forceinline__ void fill_tiles(uint8_t* windows, uint8_t* stages, Barriers& barriers,
                                           Params const& p, int rank, int own) {
  ConvProblem const& problem = p.problem;
  int const size = cluster_size<C>(p);
  uint32_t const codes = uint32_t(XNumbers(p).zero & 0xff) * 0x01010101u;
  Blocks<C> const blocks(p, rank);
  uint64_t* const full = C::kLoadsWindows ? barriers.window_full : barriers.full;
  uint64_t* const filled = C::kLoadsWindows ? barriers.window_filled : barriers.filled;
  Ring ring{C::kLoadsWindows ? ConvWindow::kBuffers : p.stages};
  auto const fill = [&](int block, auto const& fill_lines) {
    if (ring.stage % C::kTile.filling_warps() == own) {
      TransactionBarrier::wait(&full[ring.stage], ring.phase);
      if (block == p.k_blocks - 1 && p.last_steps <= 2) {
        fill_lines(std::integral_constant<int, 64>());
      } else {
        fill_lines(std::integral_constant<int, ConvWgmmaTile::kBlockK>());
      }
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (threadIdx.x % 32 == 0) ClusterBarrier::arrive(&filled[ring.stage]);
    }
    ring.advance();
  };
  for (int index = blockIdx.x / size; index < p.tiles; index += gridDim.x / size) {
    Tile<C> const tile(p, index, rank);
    if constexpr (C::kLoadsWindows) {
      static_assert(C::Tile::kPatches == 2);
      int const patch = tile.first_row / 64, bytes = p.window.bytes();
      WindowPadding const paddings[] = {{p, patch}, {p, patch + 1}};
#pragma unroll 1
      for (int block = blocks.first; block < blocks.end; ++block) {
        fill(block, [&](auto line) {
          uint8_t* const window = windows + ring.stage * C::Tile::kPatches * bytes;
          paddings[0].template fill<line>(window, codes);
          paddings[1].template fill<line>(window + bytes, codes);
        });
      }
    } else {
      RowPadding<C> const padding(p, tile);
#pragma unroll 1
      for (int block = blocks.first; block < blocks.end; ++block) {
#pragma unroll 1
        for (int i = 0; i < problem.weight.height; ++i) {
#pragma unroll 1
          for (int j = 0; j < problem.weight.width; ++j) {
            fill(block, [&](auto line) {
              padding.template fill<line>(stages + ring.stage * C::kStageBytes, p, codes,
                                          i * problem.dilation[0], j * problem.dilation[1]);
            });
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace cutlass_ops
