// Sources of the rows of x of a tile: a source copies the next columns of a CTA's share of BLOCK_M
// rows into a stage, for the CTAs of the cluster that multiply them.
//
//   matrix   rows [m][k]: a box of the tensor map
//   image    the pixels under one tap of a kernel, since a tile of K has one tap: TMA's im2col mode
//            collects them in the order of the result's pixels, with zeros where there are none
//   by index experts' rows, each wherever it lies: TMA has no such copy on Hopper, so lanes copy 16
//            bytes each, by address, into the swizzle. A CTA copies all rows of its tile
//            itself: these copies reach no other CTA of the cluster
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

// The slot of a row of a tile whose rows have slots that follow each other, or -1.
template <class Work>
__device__ __forceinline__ int slot_of_row(Work const& work, int row) {
  int const slot = work.first_x_row + row;
  return slot < work.end_x_row ? slot : -1;
}

// Rows of a tile of kBlockM rows, read through an index by kWarps warps together; kPanels: panels
// of 128 bytes of a row, kPanelBytes apart in shared memory. Sixteen rows follow the sixteen before
// kSixteenBytes further.
template <int kBlockM, int kPanels, int kPanelBytes, int kWarps, int kSixteenBytes = 16 * 128>
class RowsByIndex {
  static constexpr int kHeld = (kBlockM + 31) / 32, kStep = 4 * kWarps;
  static_assert(kBlockM % kStep == 0);
  int first_[kHeld];  // pieces of rows `lane`, `lane` + 32 and so on of the tile; -1: no row
  int row_;           // of a step's rows, this lane's

 public:
  // slot_of(i): of the tile's row i; -1: there is none.
  template <class SlotOf>
  __device__ __forceinline__ RowsByIndex(Groups const& groups, RowPieces const& rows, int warp,
                                         SlotOf slot_of) {
    int const lane = threadIdx.x % 32;
    row_ = warp * 4 + lane / 8;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      int const slot = slot_of(i * 32 + lane);
      first_[i] = slot >= 0 ? row_of_slot(groups, slot) * rows.stride : -1;
    }
  }

  // The rows that exist, a bit each.
  __device__ __forceinline__ uint32_t mask() const {
    static_assert(kHeld == 1, "a bit for each lane");
    return __ballot_sync(~0u, first_[0] >= 0);
  }

  // Copies the panels from byte `byte` of rows on to `panels` in shared memory. They have arrived
  // when every lane has arrived at `full`. Missing rows are filled with zeros, or left as they are
  // where `mask` has none of four.
  __device__ __forceinline__ void copy(RowPieces const& rows, int byte, uint32_t panels,
                                       uint64_t* full, uint32_t mask = ~0u) const {
    int const piece = threadIdx.x % 8;
    uint32_t const to = panels + row_ * 128 + ((piece ^ row_ % 8) << 4);
    uint8_t const* from = rows.x + byte + piece * 16;
    asm volatile("" : "+l"(from));  // one instruction then adds a row's offset
#pragma unroll
    for (int first = 0; first < kBlockM; first += kStep) {
      if (!(mask >> first % 32 & 15)) continue;
      int const piece_of_row = __shfl_sync(~0u, first_[first / 32], first % 32 + row_);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        bool const exists = piece_of_row >= 0 && byte + panel * 128 + piece * 16 < rows.bytes;
        // Every other step of four rows begins in the middle of an atom of the swizzle.
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                         (to ^ first % 8 * 16) + first / 16 * kSixteenBytes + first % 16 * 128 +
                         panel * kPanelBytes),
                     "l"(from + int64_t(piece_of_row) * 16 + panel * 128), "r"(exists ? 16 : 0)
                     : "memory");
      }
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(full);
  }
};

}  // namespace cutlass_ops::hopper
