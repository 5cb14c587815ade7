"""Multiply with the package of a wheel: tests/test_wheel.py and cibuildwheel run this in an
environment that has the wheel.
"""

from __future__ import annotations

import sys

import torch

import cutlass_ops as co
from cutlass_ops import _C, reference

for module in (co, _C):
    assert (module.__file__ or "").startswith(sys.prefix), module.__file__
torch.manual_seed(0)
weight = co.quantize(torch.randn(192, 576), bits=4, group_size=32, symmetric=False)
x, packed = torch.randn(3, 576), co.reorder(weight)
exact = x.double() @ co.dequantize(weight, torch.float32).double().T
for act_quant in ("none", "token", "block"):
    y = co.mixed_gemm(x, packed, act_quant=act_quant)
    assert torch.equal(y, reference.mixed_gemm(x, weight, act_quant=act_quant)), act_quant
    assert (y - exact).norm() < 0.02 * exact.norm(), act_quant
    print(tuple(y.shape), act_quant, "CUDA" if _C.built_with_cuda else "CPU")
