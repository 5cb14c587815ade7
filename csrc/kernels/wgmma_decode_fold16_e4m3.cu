// wgmma_decode_fold16's instances for formats/e4m3.cuh.
#include "formats/e4m3.cuh"
#include "kernels/wgmma_decode_fold16.cuh"

namespace cutlass_ops {

template Status launch_wgmma_decode_fold16<formats::E4m3>(GemmProblem const&, Plan const&, float*,
                                                          Stream);
template Status launch_grouped_decode_fold16<formats::E4m3>(GroupedGemm const&, Plan const&,
                                                            Stream);

}  // namespace cutlass_ops
