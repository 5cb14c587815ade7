// wgmma_decode's launches: the maps and parameters of a matrix's kernel, and of experts'.
#pragma once

#include "kernels/wgmma_decode.cuh"

namespace cutlass_ops {
namespace {

inline int offset_bytes(PackedWeight const& w) { return w.offsets ? bytes_of(w.offset_type) : 0; }

// What a launch reads of a kernel's Config: the code that fills in its parameters is compiled once.
struct DecodeLaunch {
  int chunk;  // bytes of the codes of a panel's tile of K
  bool int8_x, one_cta;
  int block_m;

  template <class C>
  static constexpr DecodeLaunch of() {
    return {C::kChunk, std::is_same_v<typename C::Element, int8_t>, C::kOneCta, C::kBlockM};
  }
};

// The maps of a weight's codes and group vectors, in boxes of as many row panels as
// any cluster has.
inline Status encode_weights(DecodeLaunch const& c, PackedWeight const& w,
                             WgmmaDecodeShape const& shape, Maps* maps) {
  int64_t const k_pad = padded_k(w.k), n_pad = padded_rows(w.n);
  cuuint64_t const row_panels = n_pad / kRowsPerPanel,
                   runs = k_pad / kKPerTile * (c.chunk / kCodeRun),
                   groups = w.group_size == -1 ? 1 : (k_pad + w.group_size - 1) / w.group_size;
  cuuint32_t const row_panel_box = shape.most_row_panels, chunk_runs = c.chunk / kCodeRun,
                   group_box = VectorRows(w.group_size).count;
  Status status = hopper::encode<3>(
      CU_TENSOR_MAP_DATA_TYPE_UINT64, w.codes, {kCodeRun / 8, runs, row_panels},
      {kCodeRun, runs * kCodeRun}, {kCodeRun / 8, chunk_runs, row_panel_box},
      CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &maps->codes);
  // Maps of vectors with `bytes` for each row and group.
  auto const encode_vectors = [&](void const* vectors, int bytes, CUtensorMap* map) {
    if (!vectors || !status.ok()) return;
    CUtensorMapDataType const type = bytes == 4   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                  : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    status = hopper::encode<3>(type, vectors, {kRowsPerPanel, row_panels, groups},
                               {cuuint64_t(kRowsPerPanel * bytes), cuuint64_t(n_pad) * bytes},
                               {kRowsPerPanel, row_panel_box, group_box},
                               CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, map);
  };
  encode_vectors(w.scales, bytes_of(w.scale_type), &maps->scales);
  encode_vectors(w.offsets, offset_bytes(w), &maps->offsets);
  encode_vectors(w.zeros, 1, &maps->zeros);
  return status;
}

inline Status launch_rows(DecodeLaunch const& c, void (*kernel)(Maps, Params),
                          GemmProblem const& problem, Plan const& plan, Stream stream) {
  PackedWeight const& w = problem.weight;
  WgmmaDecodeShape const& shape = plan.wgmma_decode;
  Maps maps;
  QuantizedActivations const& q = problem.quantized;
  int64_t const k_pad = padded_k(w.k);
  // A large tile's rows that there are, in whole eights: TMA fills others with zeros, slowly.
  int const rows =
      c.block_m > WgmmaDecodeShape::kBlockM ? (problem.m + 7) / 8 * 8 : WgmmaDecodeShape::kBlockM;
  Status status =
      c.int8_x ? hopper::encode_x_rows(q.codes, 1, problem.m, int(k_pad), k_pad, rows, &maps.x_rows)
               : hopper::encode_x_rows(problem.x, 2, problem.m, w.k, problem.x_stride * 2, rows,
                                       &maps.x_rows);
  if (!status.ok()) return status;
  int const k_tiles = int(k_pad / kKPerTile), n_pad = int(padded_rows(w.n));
  status = encode_weights(c, w, shape, &maps);
  if (!status.ok()) return status;
  Params p{w,
           q.scales,
           q.zeros,
           q.block == -1 ? 0 : q.stride,
           problem.act_symmetric,
           activation_block(w.group_size) / kLaneColumns,
           bytes_of(w.scale_type),
           offset_bytes(w),
           EpilogueParams(problem),
           VectorRows(w.group_size),
           shape,
           EvenPartition(n_pad / WgmmaDecodeShape::unit(c.one_cta), shape.clusters),
           EvenPartition(k_tiles, shape.cluster),
           k_tiles,
           n_pad,
           log2_of(shape.cluster),
           {},
           {}};
  p.x_bytes = rows * kKPerTile * 2;
  return launch_plan(kernel, plan, WgmmaDecodeShape::threads(c.one_cta), shape.shared_bytes, stream,
                     maps, p);
}

// For experts: a cluster has a tile of rows and a share of its expert's features.
inline Status launch_groups_of_rows(DecodeLaunch const& c, void (*kernel)(Maps, Params),
                                    GroupedGemm const& problem, Plan const& plan, Stream stream) {
  PackedWeight const& w = problem.weight;
  WgmmaDecodeShape const& shape = plan.wgmma_decode;
  Groups const& groups = problem.groups;
  Maps maps = {};
  int const k_tiles = int(padded_k(w.k) / kKPerTile);
  Status status = encode_weights(c, w, shape, &maps);
  if (!status.ok()) return status;
  Params const p{w,
                 problem.x_scales,
                 nullptr,
                 problem.x_codes == ActQuant::kBlock ? problem.x_rows : 0,
                 true,
                 0,
                 bytes_of(w.scale_type),
                 offset_bytes(w),
                 EpilogueParams(rows_of_all(problem)),
                 VectorRows(w.group_size),
                 shape,
                 EvenPartition(groups.row_panels, shape.clusters),
                 EvenPartition(k_tiles, shape.cluster),
                 k_tiles,
                 int(padded_rows(w.n)),
                 log2_of(shape.cluster),
                 groups,
                 RowPieces(problem),
                 shape.weights / shape.stages};
  return launch_plan(kernel, plan, WgmmaDecodeShape::threads(c.one_cta), shape.shared_bytes, stream,
                     maps, p);
}

template <class C>
auto kernel_of() -> void (*)(Maps, Params) {
  if constexpr (C::kFolds) {
    return wgmma_decode_fold16<C>;
  } else {
    return wgmma_decode<C>;
  }
}

template <class C>
Status launch_config(GemmProblem const& problem, Plan const& plan, Stream stream) {
  return launch_rows(DecodeLaunch::of<C>(), kernel_of<C>(), problem, plan, stream);
}

template <class C>
Status launch_grouped_config(GroupedGemm const& problem, Plan const& plan, Stream stream) {
  return launch_groups_of_rows(DecodeLaunch::of<C>(), kernel_of<C>(), problem, plan, stream);
}

}  // namespace
}  // namespace cutlass_ops
