"""Quantise a weight in several formats, pack it, and compare what each product loses."""

import torch

import cutlass_ops as co

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
weight = torch.randn(256, 512) / 512**0.5
x = torch.randn(8, 512, device=device).half()
exact = x.double() @ weight.double().t().to(device)

FORMATS = {
    "int8, groups of 128": {"bits": 8},
    "int4, groups of 32, zero points": {"bits": 4, "group_size": 32, "symmetric": False},
    "NF4, groups of 64": {"book": "nf4", "group_size": 64},
    "MXFP4": {"book": "mxfp4", "group_size": 32},
}
for name, options in FORMATS.items():
    packed = co.reorder(co.quantize(weight, **options)).to(device)
    for act_quant in ("none", "block"):
        if packed.book is not None and act_quant != "none":
            continue  # products of code books take floats
        y = co.mixed_gemm(x, packed, act_quant=act_quant)
        error = (y.double() - exact).norm() / exact.norm()
        kernel = co.explain(x, packed, act_quant=act_quant).kernel
        print(
            f"{name:34s} x {'int8' if act_quant == 'block' else 'fp16'}   error "
            f"{100 * float(error):6.2f} %   {kernel}"
        )
