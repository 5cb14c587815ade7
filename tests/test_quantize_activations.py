"""Quantisers that compute a function of x."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_cases import NAN, Change, K, activations

import cutlass_ops as co
from cutlass_ops import reference
from cutlass_ops.ops import activations as activations_module


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [32, 128, -1])
def test_fused_quantisers_are_the_reference_and_the_plain_one(
    dtype: torch.dtype, block: int
) -> None:
    random = torch.Generator().manual_seed(7)
    x, other = (torch.randn(2, 3, 700, generator=random).to(dtype) for _ in range(2))
    weight_ = torch.randn(700, generator=random).to(dtype)
    perm = torch.randperm(700, generator=random).int()
    flat = other.view(6, 700)
    plain, _ = reference.rms_norm(x.view(6, 700), weight_, 1e-5)
    summed, total = reference.rms_norm(x.view(6, 700), weight_, 1e-5, flat)
    for symmetric in (True, False):
        for order in (None, perm):
            options: dict[str, Any] = {"block": block, "symmetric": symmetric, "perm": order}
            found = [co.rms_norm_quantize(x, weight_, 1e-5, **options)]
            with_residual, stream = co.rms_norm_quantize(x, weight_, 1e-5, other, **options)
            assert torch.equal(stream, total.view(x.shape))
            found += [with_residual, co.silu_mul_quantize(x, other, **options)]
            for qa, y in zip(
                found, (plain, summed, reference.silu_mul(x.view(6, 700), flat)), strict=True
            ):
                expected = co.quantize_activations(y.view(x.shape), **options)
                assert (qa.shape, qa.dtype, qa.block, qa.k) == (x.shape, dtype, block, 700)
                assert qa.perm is order
                assert torch.equal(qa.codes, expected.codes)
                assert torch.equal(qa.scales, expected.scales)
                assert (qa.zeros is None) == (expected.zeros is None)
                if qa.zeros is not None:
                    assert torch.equal(qa.zeros, expected.zeros)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": 3}, TypeError, ["x", "int"]),
        (
            {"weight": torch.zeros(K, dtype=torch.float16)},
            TypeError,
            ["weight", "float16", "x is float32"],
        ),
        ({"weight": torch.zeros(K - 1)}, ValueError, ["weight", "(199,)", "(200,)"]),
        ({"weight": None}, TypeError, ["weight", "NoneType"]),
        ({"weight": torch.zeros(K, device="meta")}, TypeError, ["weight", "meta", "cpu"]),
        ({"eps": 0.0}, ValueError, ["eps", "0.0", "1e-15 to 1"]),
        ({"eps": math.nextafter(1e-15, 0.0)}, ValueError, ["eps", "9.99"]),
        ({"eps": NAN}, ValueError, ["eps", "nan"]),
        ({"eps": math.nextafter(1.0, 2.0)}, ValueError, ["eps", "1.0000000000000002"]),
        ({"residual": torch.zeros(3, K)}, ValueError, ["residual", "(3, 200)", "(2, 200)"]),
        ({"residual": torch.zeros(2, K).half()}, TypeError, ["residual", "float16", "float32"]),
        ({"block": 8}, ValueError, ["block", "8"]),
        ({"perm": torch.arange(K)}, ValueError, ["perm", "int64"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_rms_norm_quantize_refuses(
    change: Change, error: type[Exception], words: list[str]
) -> None:
    arguments: Change = {"x": activations(2, K), "weight": activations(K), **change}
    with pytest.raises(error) as caught:
        co.rms_norm_quantize(**arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("eps", [1e-15, 1.0])
def test_a_norm_takes_the_least_and_the_largest_eps(eps: float) -> None:
    x, gain = torch.full((1, K), 1e-7), torch.ones(K)
    expected = reference.rms_norm(x, gain, eps)[0]
    assert torch.equal(
        co.rms_norm_quantize(x, gain, eps).codes, co.quantize_activations(expected).codes
    )
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(expected.double(), exact, rtol=1e-6, atol=0)


def test_silu_mul_quantize_refuses() -> None:
    x = activations(2, K)
    with pytest.raises(ValueError, match=r"up has shape \(2, 100\); \(2, 200\) is expected"):
        co.silu_mul_quantize(x, x[:, :100])
    with pytest.raises(TypeError, match="up is float16 on cpu; x is float32 on cpu"):
        co.silu_mul_quantize(x, x.half())
    with pytest.raises(TypeError, match="up is a int"):
        co.silu_mul_quantize(x, 3)
    with pytest.raises(ValueError, match="block is 8"):
        co.silu_mul_quantize(x, x, block=8)


def test_a_norm_of_too_many_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations_module, "_MAX_NORM_K", 199)
    with pytest.raises(ValueError, match="x has 200 columns; a norm of at most 199"):
        co.rms_norm_quantize(activations(2, K), activations(K))
