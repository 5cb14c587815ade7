"""The values of pixels' codes on a GPU: the reference's, to the bit."""

from __future__ import annotations

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.ops import conv_gpu
from cutlass_ops.ops.call import Call
from cutlass_ops.reference import conv as reference_conv

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("act_quant", ["token", "block", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("c", "groups"),
    [(3, 1), (17, 1), (64, 1), (200, 1), (320, 1), (4096, 1), (1, 40), (24, 5), (160, 2)],
)
def test_values_of_pixels_codes_are_the_references(
    c: int, groups: int, dtype: torch.dtype, symmetric: bool, act_quant: str
) -> None:
    torch.manual_seed(0)
    for group_size in (128, 32):
        weight = co.reorder(
            co.quantize(torch.randn(groups, c, 1, 1), bits=8, group_size=group_size)
        ).to("cuda")
        x = (
            torch.randn(2, c * groups, 7, 5) * torch.logspace(-3, 3, c * groups)[:, None, None]
        ).to(dtype)
        x[1, :, 2] = 0.0
        x[0, 0, 0, 0] = torch.inf if act_quant != "tensor" else 1.0
        for of in (x, x.to(memory_format=torch.channels_last), x[:, :, :, 1:]):
            for out in (dtype, torch.float32):
                call = Call(act_quant=act_quant, act_symmetric=symmetric)
                found = conv_gpu.dequantized_pixels(of.cuda(), weight, groups, call, out)
                options = (group_size, groups, act_quant, symmetric)
                expected = reference_conv.dequantized_pixels(of, *options, torch.float32).to(out)
                torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
