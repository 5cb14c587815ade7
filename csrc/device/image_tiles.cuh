// An image whose pixels are rows of x: what kernels need of ImageRows, and a pixel's number by its row and tap.
#pragma once

#include "cutlass_ops/layout.h"
#include "dispatch/problem.h"

namespace cutlass_ops {

// Axes: width, height, depth.
struct ImageTiles {
  int columns = 0;  // of a tap, a multiple of kKPerTile; 0: x is a matrix
  int channels;     // of a pixel
  int rows;         // of x: the kernel's places
  int scale_step;   // scales of a pixel from a tile of K of a tap to the next: 1, or 0 where it has one
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
      stride[axis] = image.stride[from], padding[axis] = image.padding[from], dilation[axis] = image.dilation[from];
    }
  }
  ImageTiles() = default;
};

// The tap of a tile of K.
struct ImageTap {
  int tile;       // among those of the tap
  int offset[3];  // from the pixel under the first tap

  __device__ __forceinline__ ImageTap(ImageTiles const& image, int k_tile) {
    int const tiles = image.columns / kKPerTile;
    int tap = k_tile / tiles;
    tile = k_tile - tap * tiles;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      int const left = tap / image.taps[axis];
      offset[axis] = (tap - left * image.taps[axis]) * image.dilation[axis], tap = left;
    }
  }

  // The number of the pixel under the tap at the place of a row of x; -1 where there is none.
  __device__ __forceinline__ int pixel(ImageTiles const& image, int row) const {
    int at[3];
    bool inside = true;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      int const left = row / image.out[axis];
      at[axis] = (row - left * image.out[axis]) * image.stride[axis] - image.padding[axis] + offset[axis];
      inside = inside && unsigned(at[axis]) < unsigned(image.size[axis]), row = left;
    }
    return inside ? ((row * image.size[2] + at[2]) * image.size[1] + at[1]) * image.size[0] + at[0] : -1;
  }
};

}  // namespace cutlass_ops
