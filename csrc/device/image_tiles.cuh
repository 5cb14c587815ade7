// An image whose pixels are rows of x: the part of ImageRows that kernels need, and a pixel's
// number by its row and tap.
#pragma once

#include <climits>

#include "cutlass_ops/layout.h"
#include "dispatch/problem.h"

namespace cutlass_ops {

// Axes: width, height, depth.
struct ImageTiles {
  int columns = 0;  // of a tap, a multiple of kKPerTile; 0: x is a matrix
  int channels;     // of a pixel
  int rows;         // of x: the kernel's places
  int scale_step;   // scales of a pixel from a tile of K of a tap to the next: 1, or 0
                    // where it has one
  bool volume;      // the tensor map of TMA's im2col mode has depth
  int size[3], taps[3], out[3], stride[3], padding[3], dilation[3];

  explicit ImageTiles(GemmProblem const& problem) {
    if (!is_image(problem)) return;
    ImageRows const& image = problem.image;
    columns = int(padded_k(image.channels)), channels = image.channels, rows = problem.m;
    volume = im2col_rank(image) == 5, scale_step = problem.quantized.block == -1 ? 0 : 1;
    for (int axis = 0; axis < 3; ++axis) {
      int const from = 2 - axis;
      size[axis] = image.size[from], taps[axis] = image.taps[from], out[axis] = image.out[from];
      stride[axis] = image.stride[from], padding[axis] = image.padding[from],
      dilation[axis] = image.dilation[from];
    }
  }
  ImageTiles() = default;
};

// Columns of K of an image: their tap and the channel of the first.
struct TapColumns {
  int channel, tap[3];

  TapColumns() = default;
  __device__ __forceinline__ TapColumns(ImageTiles const& image, int k_tile) {
    int index = k_tile * kKPerTile / image.columns;
    channel = k_tile * kKPerTile - index * image.columns;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      int const left = index / image.taps[axis];
      tap[axis] = index - left * image.taps[axis], index = left;
    }
  }

  // Advances by a number of columns that divides kKPerTile.
  __device__ __forceinline__ void advance(ImageTiles const& image, int columns) {
    channel += columns;
    if (channel < image.columns) return;
    channel = 0;
    if (++tap[0] < image.taps[0]) return;
    tap[0] = 0;
    if (++tap[1] < image.taps[1]) return;
    tap[1] = 0, ++tap[2];
  }
};

// The pixel under the first tap at the place of a row of x, and from it those under the others.
struct RowPixel {
  int number;  // as if the image went on beyond its bounds
  int corner[3];

  RowPixel() = default;
  __device__ __forceinline__ RowPixel(ImageTiles const& image, int row) {
    bool const exists = row < image.rows;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      int const left = row / image.out[axis];
      corner[axis] = (row - left * image.out[axis]) * image.stride[axis] - image.padding[axis],
      row = left;
    }
    number =
        ((row * image.size[2] + corner[2]) * image.size[1] + corner[1]) * image.size[0] + corner[0];
    if (!exists) corner[0] = INT_MIN;  // no tap brings it inside
  }

  // The pixel's number under a tap; -1 where there is none.
  __device__ __forceinline__ int under(ImageTiles const& image, TapColumns const& columns) const {
    int step = 0;
    bool inside = true;
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      int const offset = columns.tap[axis] * image.dilation[axis];
      inside = inside && unsigned(corner[axis]) + unsigned(offset) < unsigned(image.size[axis]);
      step = step * image.size[axis] + offset;
    }
    return inside ? number + step : -1;
  }
};

}  // namespace cutlass_ops
