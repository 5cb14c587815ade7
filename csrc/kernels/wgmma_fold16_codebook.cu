// wgmma_fold16's instances for formats/codebook.cuh.
#include "formats/codebook.cuh"
#include "kernels/wgmma_fold16.cuh"

namespace cutlass_ops {

template Status launch_wgmma_fold16<formats::Codebook>(GemmProblem const&, Plan const&, float*,
                                                       Stream);
template Status launch_grouped_fold16<formats::Codebook>(GroupedGemm const&, Plan const&, Stream);

}  // namespace cutlass_ops
