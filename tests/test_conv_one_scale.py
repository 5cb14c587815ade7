"""What convolutions of floats with one scale are prepared from; without a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import cutlass_ops as co
from cutlass_ops import _C, reference
from cutlass_ops.ops import native, natural_weight

H200, A100 = _C.Device(90, 132, 232448), _C.Device(80, 108, 166912)


@pytest.mark.parametrize(("channels", "kernel"), [(20, (3, 2)), (64, (1, 1)), (9, (4,))])
def test_channels_of_codes_are_in_the_order_of_activations(
    channels: int, kernel: tuple[int, ...]
) -> None:
    quantized = co.quantize(torch.randn(8, channels, *kernel), bits=8, group_size=-1)
    natural = natural_weight.in_activation_order(co.reorder(quantized))
    stored = _C.stored_channels(channels)
    assert natural.codes.shape == (8, *(1,) * (2 - len(kernel)), *kernel, stored)
    codes, taps = (quantized.codes.int() - 128).view(-1, channels), natural.codes.view(-1, stored)
    assert torch.equal(
        reference.natural_order(F.pad(taps, (0, 128 - stored)), channels).int(), codes
    )
    assert torch.equal(natural.sums, codes.view(8, -1).sum(1))


def problem(
    channels: int = 64,
    n: int = 64,
    activation: str | None = None,
    out: int = 4096,
    out_type: _C.ConvOutput = _C.ConvOutput.float16,
    x_type: _C.DataType = _C.DataType.float16,
    symmetric: bool = True,
    groups: int = 1,
    stride: int = 1,
    size: int = 14,
) -> _C.ConvProblem:
    """A 3 x 3 convolution of two images; nothing is read."""
    order = _C.conv_order(n, channels, 9, groups)
    weight = _C.ConvWeight(4096, order, 4096, 4096, _C.DataType.float32, n, (3, 3), channels)
    return _C.ConvProblem(
        weight, 4096, False, x_type, symmetric, (2, size, size, groups * channels),
        (stride, stride), (1, 1), (1, 1), groups, 0, False, _C.DataType.none, out, out_type,
        1.0, 0, 1.0, 0, native.ACTIVATIONS[activation], 0.0, 0.0,
    )  # fmt: skip


def test_workspaces_hold_the_range_and_the_codes() -> None:
    pixels = 2 * 14 * 14
    for channels, stored in ((64, 64), (320, 320), (40, 48)):
        for symmetric in (True, False):
            plans = problem(channels, symmetric=symmetric).plans(H200)
            assert {plan.kernel for plan in plans} == {"conv_int8_wgmma"}
            for plan in plans:
                assert plan.copied_channels == stored
                assert plan.workspace == 256 + pixels * stored


def test_what_no_kernel_takes_has_no_plans() -> None:
    assert problem().supported_plans(H200)
    assert not problem().supported_plans(A100)
    for unsupported in (
        problem(activation="silu"),
        problem(n=65),
        problem(channels=8),
        problem(groups=2),
        problem(out=4096 + 8),
        problem(stride=9, size=40),
        problem(channels=16000),  # 144,000 products may exceed int32
    ):
        assert not unsupported.supported_plans(H200)
    assert problem(channels=14000).supported_plans(H200)
    assert not problem(channels=14000, symmetric=False).supported_plans(H200)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (problem(out_type=_C.ConvOutput.int8), "x is floats, but out_type is not fp16 or bf16"),
        (problem(x_type=_C.DataType.none), "out_type is a float, but x is codes"),
    ],
)
def test_refusals(wrong: _C.ConvProblem, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrong.plans(H200)
