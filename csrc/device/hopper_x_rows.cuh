// Sources of the rows of x of a tile: a source copies the next columns of a CTA's share of BLOCK_M
// rows into a stage, for the CTAs of the cluster that multiply them.
//
//   matrix   rows [m][k]: a box of the tensor map
//   image    the pixels under one tap of a kernel, since a tile of K has one tap: TMA's im2col mode
//            collects them in the order of the result's pixels, with zeros where there are none
//   by index experts' rows, each wherever it lies: TMA has no such copy on Hopper, so lanes copy 16
//            bytes each, by address, into the swizzle. These copies are slow
//            (docs/tuning-notes.md), so each CTA of a cluster copies half of the rows and sends
//            them to the other
#pragma once

#include "device/grouped.cuh"
#include "device/hopper.cuh"
#include "device/image_tiles.cuh"

namespace cutlass_ops::hopper {

// Zeros for copies of up to 256 rows of 128 bytes. TMA fills what is beyond a tensor at 8 bytes a
// clock, and copies these several times as fast.
static __device__ uint4 missing_columns[256 * 128 / 16];

// kColumns: of a copy; it divides kKPerTile. kImages: whether x may be an image.
template <int kColumns, bool kImages>
class XRows {
  static constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  // Whether a copy may have no column of x. (Codes are padded to whole K tiles.)
  static constexpr bool kMayMiss = kColumns < kKPerTile;

  ImageTiles const& image_;
  int row_;       // the first; of an image, the number of the image
  int pixel_[3];  // of an image: the pixel under the first tap at the first row's place
  TapColumns tap_;

 public:
  __device__ __forceinline__ XRows(ImageTiles const& image, int row, int k_tile)
      : image_(image), row_(row) {
    if (!kImages || image.columns == 0) return;
    tap_ = TapColumns(image, k_tile);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      int const left = row_ / image.out[axis];
      pixel_[axis] = (row_ - left * image.out[axis]) * image.stride[axis] - image.padding[axis],
      row_ = left;
    }
  }

  // Copies the next columns, from `column` of `columns` on, to `ctas` of the cluster, a bit each.
  // All lanes call this; `copies`: whether this lane issues the copy, of so many bytes.
  __device__ __forceinline__ void copy_next(bool copies, CUtensorMap const& map, uint64_t* full,
                                            uint16_t ctas, uint8_t* to, int column, int columns,
                                            int bytes) {
    if (!kImages || image_.columns == 0) {
      if (!copies) return;
      if (kMayMiss && column >= columns) {
        bulk_copy_multicast(missing_columns, full, ctas, to, bytes);
      } else {
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&map, full, ctas, kHint, to, column, row_);
      }
      return;
    }
    if (kMayMiss && tap_.channel >= image_.channels) {
      if (copies) bulk_copy_multicast(missing_columns, full, ctas, to, bytes);
    } else if (copies) {
      auto const offset = [&](int axis) {
        return uint16_t(tap_.tap[axis] * image_.dilation[axis]);
      };
      if (image_.volume) {
        cute::SM90_TMA_LOAD_IM2COL_MULTICAST_5D::copy(&map, full, ctas, to, tap_.channel, pixel_[0],
                                                      pixel_[1], pixel_[2], row_, offset(0),
                                                      offset(1), offset(2));
      } else {
        cute::SM90_TMA_LOAD_IM2COL_MULTICAST_4D::copy(&map, full, ctas, to, tap_.channel, pixel_[0],
                                                      pixel_[1], row_, offset(0), offset(1));
      }
    }
    tap_.advance(image_, kColumns);
  }
};

// The slot of a row of a tile whose rows have slots that follow each other; beyond the last row,
// that row's.
template <class Work>
__device__ __forceinline__ int slot_of_row(Work const& work, int row) {
  return min(work.first_x_row + row, work.end_x_row - 1);
}

// kRows rows, read through an index by kWarps warps together; kPanels: panels of 128 bytes of a
// row, kPanelBytes apart in shared memory. Sixteen rows follow the sixteen before kSixteenBytes
// further. A lane holds where its rows begin: the copies are few instructions.
template <int kRows, int kPanels, int kPanelBytes, int kWarps, int kSixteenBytes = 16 * 128>
class RowsByIndex {
  static constexpr int kStep = 4 * kWarps;
  static_assert(kRows % kStep == 0 && 32 % kStep == 0);
  int pieces_[kRows / kStep];  // of this lane's row of each kStep rows; -1: there is none
  int row_;                    // of kStep rows, this lane's

 public:
  // slot_of(i): of row i; -1: there is none.
  template <class SlotOf>
  __device__ __forceinline__ RowsByIndex(Groups const& groups, RowPieces const& rows, int warp,
                                         SlotOf slot_of) {
    int const lane = threadIdx.x % 32;
    row_ = warp * 4 + lane / 8;
#pragma unroll
    for (int first = 0; first < kRows; first += 32) {
      int const row = first + lane, slot = row < kRows ? slot_of(row) : -1;
      int const begin = slot >= 0 ? row_of_slot(groups, slot) * rows.stride : -1;
#pragma unroll
      for (int i = 0; i < 32 && first + i < kRows; i += kStep)
        pieces_[(first + i) / kStep] = __shfl_sync(~0u, begin, i + row_);
    }
  }

  // Copies the panels from byte `byte` of rows on to `panels` in shared memory, with zeros behind a
  // row's end. `full` and others have an arrival of every lane when they have arrived. kMissing:
  // rows may be missing, and are left as they are.
  template <bool kMissing, class... Barrier>
  __device__ __forceinline__ void copy(RowPieces const& rows, int byte, uint32_t panels,
                                       Barrier*... full) const {
    int const piece = threadIdx.x % 8;
    uint32_t const to = panels + row_ * 128 + ((piece ^ row_ % 8) << 4);
    uint8_t const* from = rows.x + byte + piece * 16;
    asm volatile("" : "+l"(from));  // one instruction then adds a row's offset
    int const left = rows.bytes - byte - piece * 16;
#pragma unroll
    for (int first = 0; first < kRows; first += kStep) {
      int const pieces = pieces_[first / kStep];
      if (kMissing && pieces < 0) continue;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        // Every other step of four rows begins in the middle of an atom of the swizzle.
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                         (to ^ first % 8 * 16) + first / 16 * kSixteenBytes + first % 16 * 128 +
                         panel * kPanelBytes),
                     "l"(from + int64_t(pieces) * 16 + panel * 128),
                     "r"(left > panel * 128 ? 16 : 0)
                     : "memory");
      }
    }
    (cutlass::arch::cpasync_barrier_arrive_noinc(full), ...);
  }
};

}  // namespace cutlass_ops::hopper
