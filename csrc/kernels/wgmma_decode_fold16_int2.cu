// wgmma_decode_fold16's instances for int2 (formats/integers.cuh).
#include "formats/integers.cuh"
#include "kernels/wgmma_decode_fold16.cuh"

namespace cutlass_ops {

template Status launch_wgmma_decode_fold16<formats::Int2>(GemmProblem const&, Plan const&, float*,
                                                          Stream);
template Status launch_grouped_decode_fold16<formats::Int2>(GroupedGemm const&, Plan const&,
                                                            Stream);

}  // namespace cutlass_ops
