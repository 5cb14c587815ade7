// Where the rows of x of a tile come from: a source brings the next columns of a CTA's share of BLOCK_M rows into a stage, for
// the CTAs of the cluster that multiply them.
//
//   matrix   rows [m][k]: a box of the tensor map
//   image    the pixels under one tap of a kernel, since a tile of K has one tap: TMA's im2col mode collects them in the order of
//            the result's pixels, with zeros where there are none
#pragma once

#include "device/hopper.cuh"
#include "device/image_tiles.cuh"

namespace cutlass_ops::hopper {

// kColumns: of a copy; it divides kKPerTile. kImages: whether x may be an image.
template <int kColumns, bool kImages>
class XRows {
  static constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);

  ImageTiles const& image_;
  int row_;       // the first; of an image, the number of the image
  int pixel_[3];  // of an image: the pixel under the first tap at the first row's place
  TapColumns tap_;

 public:
  __device__ __forceinline__ XRows(ImageTiles const& image, int row, int k_tile) : image_(image), row_(row) {
    if (!kImages || image.columns == 0) return;
    tap_ = TapColumns(image, k_tile);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      int const left = row_ / image.out[axis];
      pixel_[axis] = (row_ - left * image.out[axis]) * image.stride[axis] - image.padding[axis], row_ = left;
    }
  }

  // The columns from `column` of K on, which are the next, to `ctas` of the cluster, a bit each. `copies`: whether this lane is
  // the one that does it; all call.
  __device__ __forceinline__ void copy_next(bool copies, CUtensorMap const& map, uint64_t* full, uint16_t ctas, uint8_t* to,
                                            int column) {
    if (!kImages || image_.columns == 0) {
      if (copies) cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&map, full, ctas, kHint, to, column, row_);
      return;
    }
    if (copies) {
      auto const offset = [&](int axis) { return uint16_t(tap_.tap[axis] * image_.dilation[axis]); };
      if (image_.volume) {
        cute::SM90_TMA_LOAD_IM2COL_MULTICAST_5D::copy(&map, full, ctas, to, tap_.channel, pixel_[0], pixel_[1], pixel_[2], row_,
                                                      offset(0), offset(1), offset(2));
      } else {
        cute::SM90_TMA_LOAD_IM2COL_MULTICAST_4D::copy(&map, full, ctas, to, tap_.channel, pixel_[0], pixel_[1], row_, offset(0),
                                                      offset(1));
      }
    }
    tap_.advance(image_, kColumns);
  }
};

}  // namespace cutlass_ops::hopper
