// wgmma_fold16's instances for int4 (formats/integers.cuh).
#include "formats/integers.cuh"
#include "kernels/wgmma_fold16.cuh"

namespace cutlass_ops {

template Status launch_wgmma_fold16<formats::Int4>(GemmProblem const&, Plan const&, float*, Stream);
template Status launch_grouped_fold16<formats::Int4>(GroupedGemm const&, Plan const&, Stream);

}  // namespace cutlass_ops
