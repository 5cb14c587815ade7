// How clusters share the K of the tiles that whole waves over the GPU leave over: for dispatch.cpp and device/hopper_gemm.cuh.
#pragma once

namespace cutlass_ops {

// The K of each cut tile is `parts`, and each part but the last has a cluster of its own. Where the clusters that remain are fewer than the tiles, each takes
// the last parts of `gathered` tiles, one after another, and these are so much shorter.
struct CutTiles {
  // To begin with one more last part costs a cluster some 4 us (measured on an H200 beside 128 to 176 tokens): so many tiles of K.
  static constexpr int kStart = 6;

  int parts, gathered;
  int last;           // clusters that take last parts
  int dealt, pieces;  // part i of K begins with tile dealt * i / pieces

  constexpr CutTiles(int tiles, int count, int clusters, int k_tiles)
      : parts(count),
        gathered(tiles * count <= clusters ? 1 : (tiles - 1) / (clusters - tiles * (count - 1)) + 1),
        last((tiles - 1) / gathered + 1),
        dealt((k_tiles + (gathered > 1 ? kStart : 0)) * gathered),
        pieces(gathered * (count - 1) + 1) {}
  // Of tiles whose parts reduce_splits adds up.
  constexpr CutTiles(int tiles, int count, int k_tiles)
      : parts(count), gathered(1), last(tiles), dealt(k_tiles), pieces(count) {}
};

}  // namespace cutlass_ops
