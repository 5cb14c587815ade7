"""Kernels on other libraries' tensors against the specification, bit for bit, and against those
libraries where they are.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from imports import import_or_skip
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import reference
from cutlass_ops.weights import formats

pytestmark = pytest.mark.gpu

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = (HALF, BFLOAT, FLOAT)
COUNTS = (1, 7, 64, 331, 4096, 100_003, 1_000_000, 5_000_001)


def randn(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator("cuda").manual_seed(sum(shape)), device="cuda"
    ).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocksize", formats.FLAT_BLOCK_SIZES)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_flat_codes_and_values(quant_type: str, blocksize: int, dtype: torch.dtype) -> None:
    for count in COUNTS:
        x = randn(count, dtype=dtype)
        x[count // 3 : count // 2] = 0
        packed, absmax = co.quantize_4bit(x, blocksize, quant_type)
        expected, expected_absmax = reference.quantize_4bit(x, blocksize, quant_type)
        assert same_bits(packed, expected), f"{count}: {(packed != expected).sum()} bytes differ"
        assert same_bits(absmax, expected_absmax)
        for out in DTYPES:
            y = co.dequantize_4bit(packed, absmax, (count,), blocksize, quant_type, out)
            assert same_bits(
                y, reference.dequantize_4bit(packed, absmax, (count,), blocksize, quant_type, out)
            ), f"{count} {out}"


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_every_value_of_sixteen_bits(quant_type: str) -> None:
    for dtype in (HALF, BFLOAT):
        every = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
        x = every[every.isfinite()].sort().values  # neighbours of like size share a block
        for values in (x, x.flip(0)[1:].contiguous(), x[torch.randperm(len(x), device="cuda")]):
            packed, absmax = co.quantize_4bit(values, 32, quant_type)
            expected, expected_absmax = reference.quantize_4bit(values, 32, quant_type)
            assert same_bits(packed, expected)
            assert same_bits(absmax, expected_absmax)


def test_limits_and_other_books() -> None:
    for quant_type in formats.CODE_BOOKS:
        cuts, _ = reference.book_cuts(quant_type, device=torch.device("cuda"))
        near = torch.cat([torch.nextafter(cuts, cuts + step) for step in (-1, 0, 1)])
        x = torch.cat([near, -near, torch.ones(64 - 2 * len(near) % 64, device="cuda")])
        assert same_bits(
            co.quantize_4bit(x, 4096, quant_type)[0],
            reference.quantize_4bit(x, 4096, quant_type)[0],
        )
    x = randn(10_007, dtype=HALF)
    even = torch.linspace(-1, 1, 16, device="cuda")[torch.randperm(16, device="cuda")].contiguous()
    crowded = torch.cat([even[:8], even[:8] / 100])  # several limits in one of the kernel's ranges
    for code in (even, crowded, 10 * even):
        packed, absmax = co.quantize_4bit(x, 64, code=code)
        assert same_bits(packed, reference.quantize_4bit(x, 64, code=code)[0])
        y = co.dequantize_4bit(packed, absmax, (10_007,), 64, code=code)
        assert same_bits(y, reference.dequantize_4bit(packed, absmax, (10_007,), 64, code=code))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity(dtype: torch.dtype) -> None:
    x = randn(4, 64, dtype=dtype)
    x[0, 5], x[1, 6], x[2, 7] = math.nan, math.inf, -math.inf
    for quant_type in formats.CODE_BOOKS:
        packed, absmax = co.quantize_4bit(x, 64, quant_type)
        expected, expected_absmax = reference.quantize_4bit(x, 64, quant_type)
        assert torch.equal(packed, expected)
        assert torch.equal(absmax[1:], expected_absmax[1:])
        assert absmax[0].isnan()


def test_double_quantisation_in_the_same_launch() -> None:
    x = randn(1003 * 64 + 5, dtype=HALF)
    packed, absmax = co.quantize_4bit(x)
    nested = co.NestedAbsmax.quantize(absmax)
    y = co.dequantize_4bit(packed, nested, (len(x),))
    assert same_bits(y, co.dequantize_4bit(packed, nested.dequantize(), (len(x),)))
    assert torch.equal(
        nested.dequantize().cpu(), co.NestedAbsmax(*(t.cpu() for t in nested)).dequantize()
    )


def test_views_streams_and_graphs() -> None:
    x = randn(4097, dtype=HALF)
    assert same_bits(co.quantize_4bit(x[1:])[0], reference.quantize_4bit(x[1:], 64)[0])
    packed, absmax = co.quantize_4bit(x)
    shifted = torch.cat([packed.flatten()[:3], packed.flatten()])[3:]
    y = co.dequantize_4bit(shifted, absmax, (4097,))
    assert same_bits(y, co.dequantize_4bit(packed, absmax, (4097,)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again, scale = co.quantize_4bit(x)
        values = co.dequantize_4bit(again, scale, (4097,))
    x.copy_(randn(4097) * 3)
    graph.replay()
    assert same_bits(
        values, reference.dequantize_4bit(*reference.quantize_4bit(x, 64), (4097,), 64)
    )


@pytest.fixture
def bnb() -> Any:
    """bitsandbytes.functional with its CUDA library."""
    module = import_or_skip("bitsandbytes.functional")
    try:
        module.quantize_4bit(torch.ones(64, device="cuda").half(), quant_type="nf4")
    except Exception as error:
        pytest.skip(f"bitsandbytes has no kernels here: {error!r:.100}")
    return module


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_bitsandbytes_has_the_same_codes_and_values(
    bnb: Any, quant_type: str, dtype: torch.dtype
) -> None:
    for count in (64, 4096 * 33, 1_000_003):
        x = randn(count, dtype=dtype)
        for blocksize in formats.FLAT_BLOCK_SIZES:
            packed, absmax = co.quantize_4bit(x, blocksize, quant_type)
            theirs, state = bnb.quantize_4bit(x, blocksize=blocksize, quant_type=quant_type)
            assert torch.equal(absmax, state.absmax)
            # Its reciprocal of absmax is an approximation: a value at a limit, to the last place,
            # may take the other code.
            assert (packed != theirs).sum() <= 5e-4 * count + 1, (
                f"{(packed != theirs).sum()} of {count // 2} bytes differ"
            )
            y = co.dequantize_4bit(theirs, state.absmax, (count,), blocksize, quant_type, dtype)
            assert torch.equal(y, bnb.dequantize_4bit(theirs, state))


# ---- AWQ


def awq_weight(k: int, n: int, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator("cuda").manual_seed(k + n)
    words = [
        torch.randint(-(2**31), 2**31, (r, n // 8), generator=rng, device="cuda").int()
        for r in (k, groups)
    ]
    scales = (torch.rand(groups, n, generator=rng, device="cuda") * 0.02 - 0.002).to(dtype)
    return words[0], scales, words[1]


AWQ_SHAPES = [
    (4096, 4096, 32),
    (576, 1000, 9),
    (100, 8, 5),
    (7, 16, 7),
    (8192, 2048, 64),
    (127, 24, 1),
    (11008, 4096, 86),
]


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize(("k", "n", "groups"), AWQ_SHAPES)
def test_awq_values(k: int, n: int, groups: int, dtype: torch.dtype) -> None:
    weight = awq_weight(k, n, groups, dtype)
    assert same_bits(co.awq_dequantize(*weight), reference.awq_dequantize(*weight))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize(("k", "n", "groups"), AWQ_SHAPES)
def test_awq_products(k: int, n: int, groups: int, dtype: torch.dtype) -> None:
    weight = awq_weight(k, n, groups, dtype)
    group = torch.arange(k, device="cuda") // (k // groups)
    integers = (
        reference.awq_unpack(weight[0]).double() - reference.awq_unpack(weight[2]).double()[group]
    )
    values = integers * weight[1].double()[group]
    unit = {HALF: 2.0**-11, BFLOAT: 2.0**-8}[dtype]
    for m in (1, 2, 8, 16, 17, 33, 64, 65, 200):
        x = randn(m, k, dtype=dtype)
        y = co.awq_gemm(x, *weight)
        exact = x.double() @ values
        # A value may be rounded before it is multiplied, the result once.
        allowed = (
            unit * (exact.abs() + (x.double().square() @ values.square()).sqrt() * 4)
            + 1e-4 * exact.square().mean().sqrt()
        )
        assert ((y.double() - exact).abs() <= allowed).all(), (
            f"m={m}: {((y.double() - exact).abs() / allowed).max()}"
        )
        assert same_bits(y, co.awq_gemm(x, *weight))
        if m > 32 or k // groups % 32:  # torch's product has other bits where rows begin elsewhere
            continue
        wider = torch.full((m, k + 16), math.nan, dtype=dtype, device="cuda")
        for first in (0, 1, 8):  # rows apart, from any address
            wider[:, first : first + k] = x
            assert same_bits(y, co.awq_gemm(wider[:, first : first + k], *weight)), (
                f"m={m}, from column {first}"
            )


def test_vllm_has_the_same_awq_values() -> None:
    if not hasattr(torch.ops, "_C") or not hasattr(torch.ops._C, "awq_dequantize"):
        pytest.skip("vLLM's kernels are not loaded")
    weight = awq_weight(4096, 4096, 32, HALF)
    assert same_bits(co.awq_dequantize(*weight), torch.ops._C.awq_dequantize(*weight, 0, 0, 0))
