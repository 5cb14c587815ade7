"""CPU kernels against the reference, bit for bit: each instruction set that the machine has."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cutlass_ops import (
    _C,
    PackedWeight,
    QuantizedWeight,
    dequantize,
    mixed_gemm,
    quantize_activations,
    reference,
    reorder,
)
from cutlass_ops.ops import products
from cutlass_ops.weights import formats

TYPES = [torch.float16, torch.bfloat16, torch.float32]
KINDS = ["symmetric", "zeros", "offsets", "nf4", "mxfp4", "e4m3"]


@pytest.fixture(params=_C.cpu_instruction_sets(), autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    _C.use_cpu_instruction_set(request.param)
    yield request.param
    _C.use_cpu_instruction_set(_C.cpu_instruction_sets()[0])


def weight_of(
    n: int,
    k: int,
    kind: str,
    bits: int,
    group_size: int,
    dtype: torch.dtype = torch.float16,
    **parts: Tensor,
) -> QuantizedWeight:
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))
    if kind in formats.BOOKS:
        qw = reference.quantize_weight_book(
            w.to(dtype), 32 if kind == "mxfp4" else group_size, kind
        )
        return QuantizedWeight(
            qw.codes, qw.scales, bits=qw.bits, group_size=qw.group_size, book=qw.book, **parts
        )
    codes = torch.randint(0, 2**bits, (n, k), generator=torch.Generator().manual_seed(k)).to(
        torch.uint8
    )
    groups = formats.group_count(k, group_size)
    scales = (torch.rand(n, groups) - 0.3).to(dtype)
    zeros = torch.randint(0, 2**bits, (n, groups)).to(torch.uint8) if kind == "zeros" else None
    offsets = torch.randn(n, groups).to(dtype) if kind == "offsets" else None
    return QuantizedWeight(codes, scales, zeros, offsets, bits, group_size, **parts)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return False
    integer = torch.int32 if actual.dtype == torch.float32 else torch.int16
    return bool(
        (
            (actual.view(integer) == expected.view(integer)) | (actual.isnan() & expected.isnan())
        ).all()
    )


def check(x: Tensor, qw: QuantizedWeight, **call: object) -> None:
    expected = reference.mixed_gemm(x, qw, **call)
    assert same_bits(mixed_gemm(x, reorder(qw), exact=True, **call), expected)


@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 256, -1])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_products_have_the_bits_of_the_reference(kind: str, bits: int, group_size: int) -> None:
    torch.manual_seed(group_size)
    if kind in formats.BOOKS and len(formats.BOOKS[kind]) != 1 << bits:
        pytest.skip("a code book has its own number of bits")
    # N and K inside a tile, whole tiles, and odd.
    for dtype, (n, k), m in zip(
        TYPES * 2,
        [(70, 203), (64, 384), (1, 33), (130, 576), (65, 1), (3, 300)],
        [3, 1, 7, 4, 2, 197],
        strict=True,
    ):
        qw = weight_of(n, k, kind, bits, group_size, dtype)
        x = torch.randn(m, k).to(dtype)
        check(x, qw, out_dtype=torch.float32)
        for act_quant in ("token", "block") if qw.book is None else ():
            for symmetric in (True, False):
                check(
                    x + 0.25,
                    qw,
                    act_quant=act_quant,
                    act_symmetric=symmetric,
                    out_dtype=torch.float32,
                )


@pytest.mark.parametrize("out_dtype", TYPES)
@pytest.mark.parametrize("act_quant", ["none", "token"])
def test_results_are_rounded_to_nearest_even(out_dtype: torch.dtype, act_quant: str) -> None:
    """Sums halfway between two values of 16 bits, beyond the largest of them, and of denormals."""
    qw = QuantizedWeight(torch.full((70, 64), 11, dtype=torch.uint8), torch.ones(70, 1), bits=4)
    halves = 2.0 ** torch.arange(-30, 8).repeat_interleave(2) * torch.tensor([129, 131]).repeat(38)
    huge = torch.tensor([2.0**127, -(2.0**127), 65519, 65520, 1e30, torch.inf, torch.nan]) / 3
    for values in (halves, huge, halves[:3]):  # sums are three times as large
        x = torch.zeros(len(values), 64)
        x[:, 7] = values
        for bias in (None, torch.linspace(-1, 1, 70)):
            check(x, qw, act_quant=act_quant, bias=bias, out_dtype=out_dtype)


@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 384, -1])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_values_have_the_bits_of_the_reference(
    kind: str, bits: int, group_size: int
) -> None:
    if kind in formats.BOOKS and len(formats.BOOKS[kind]) != 1 << bits:
        pytest.skip("a code book has its own number of bits")
    for (n, k), scale_type in zip(
        [(70, 203), (64, 384), (1, 33), (130, 576), (65, 1)], [*TYPES, *TYPES[:2]], strict=True
    ):
        order = torch.randperm(k, generator=torch.Generator().manual_seed(n)).to(torch.int32)
        for perm in (None, order):
            qw = weight_of(n, k, kind, bits, group_size, scale_type, perm=perm)
            # Scales whose products are denormal and infinite, and values halfway
            # between two of 16 bits.
            range_of = torch.finfo(scale_type)
            for row, scale in enumerate((range_of.tiny / 16, range_of.max, 1 + 2**-9)[: min(n, 3)]):
                qw.scales[row] = scale
            pw = reorder(qw)
            for dtype in TYPES:
                expected = reference.dequantize_weight(qw, dtype)
                assert same_bits(dequantize(pw, dtype), expected)
                if n > 64:
                    assert same_bits(products.run_dequantize(pw, dtype, 64), expected[64:])
                    assert same_bits(products.run_dequantize(pw, dtype, 0, 64), expected[:64])


def test_dequantised_values_of_scales_that_are_nan() -> None:
    pw = reorder(weight_of(70, 203, "symmetric", 4, 64, torch.float32))
    # as memory that nobody wrote: its bits, rounded, overflow
    pw.scales.view(torch.int32).fill_(-1)
    for dtype in TYPES:
        assert dequantize(pw, dtype).isnan().all()


@pytest.mark.parametrize("m", [0, 1, 2, 3, 4, 5, 8, 9, 33, 97, 200])
def test_rows_and_threads_change_no_bits(m: int) -> None:
    torch.manual_seed(m)
    threads = torch.get_num_threads()
    pw = reorder(weight_of(1030, 600, "zeros", 4, 64))
    x = torch.randn(m, 600)
    try:
        for act_quant in ("none", "token", "block"):
            results = []
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                results.append(mixed_gemm(x, pw, act_quant=act_quant, exact=True))
            assert results[0].shape == (m, 1030)
            assert same_bits(results[0], results[1])
            assert same_bits(results[0], results[2])
            if m:
                assert same_bits(mixed_gemm(x[-1:], pw, act_quant=act_quant), results[0][-1:])
    finally:
        torch.set_num_threads(threads)


def product_of_a_child(
    pw: PackedWeight, x: Tensor, queue: multiprocessing.SimpleQueue[Any]
) -> None:
    torch.set_num_threads(3)
    queue.put(mixed_gemm(x, pw).numpy())


def test_a_process_that_was_forked_has_threads() -> None:
    pw = reorder(weight_of(1030, 600, "zeros", 4, 64))
    x = torch.randn(4, 600)
    threads = torch.get_num_threads()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    try:
        torch.set_num_threads(2)
        expected = mixed_gemm(x, pw)
        child = context.Process(target=product_of_a_child, args=(pw, x, queue), daemon=True)
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert same_bits(torch.from_numpy(queue.get()), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("out_dtype", TYPES)
def test_epilogues_have_the_bits_of_the_reference(
    x_type: torch.dtype, out_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    m, n, k = 3, 77, 130
    x = torch.randn(m, k).to(x_type)
    qw = weight_of(n, k, "symmetric", 4, 32)
    bias, residual = torch.randn(n).bfloat16(), torch.randn(m, n)
    for call in (
        {},
        {"bias": bias},
        {"bias": bias, "activation": "silu", "residual": residual},
        {"activation": ("clamp", -1.0, 2.0)},
        {"saturate": True},
    ):
        check(x, qw, out_dtype=out_dtype, act_quant="block", **call)
        check(x, qw, out_dtype=out_dtype, **call)
    check(x, weight_of(n, k, "symmetric", 4, 32, bias=bias), out_dtype=out_dtype)
    check(x.float() * 1e4, qw, out_dtype=out_dtype)  # beyond fp16
    check(x.float() * 1e-6, qw, out_dtype=out_dtype)  # below its normal numbers
    check(x.float() * 1e-39, qw, out_dtype=out_dtype)  # and fp32's


def test_act_order_strides_and_values_that_are_not_finite() -> None:
    torch.manual_seed(1)
    qw = weight_of(40, 200, "zeros", 4, 64, perm=torch.randperm(200))
    wide = torch.randn(5, 300).half()
    for act_quant in ("none", "token", "block"):
        x = wide[:, 50:250].clone()
        x[1, 7], x[3, 199] = torch.inf, torch.nan
        y = mixed_gemm(x, reorder(qw), act_quant=act_quant)
        assert y.isnan().any(-1).tolist() == [False, True, False, True, False]
        check(x, qw, act_quant=act_quant)
        check(wide[:, 50:250], qw, act_quant=act_quant)
        check(wide.t()[:200].t(), qw, act_quant=act_quant)


def test_rows_longer_than_32_bits_hold() -> None:
    # 20000 * 255 * 255 > 2^31 - 1, and its half is above fp32's integers.
    k = 40000
    codes = torch.full((3, k), 255, dtype=torch.uint8)
    codes[1, ::2] = 3
    qw = QuantizedWeight(
        codes, torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.uint8), bits=8, group_size=-1
    )
    x = torch.full((2, k), 1.0)
    x[1] = torch.rand(k)
    check(x, qw, act_quant="token", act_symmetric=False)
    four = QuantizedWeight(
        codes & 15, torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.uint8), bits=4, group_size=-1
    )
    check(x, four, act_quant="token", act_symmetric=False)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block", [16, 32, 64, 128, -1])
def test_quantised_codes_are_those_of_the_reference(block: int, symmetric: bool) -> None:
    torch.manual_seed(block)
    k = 333
    x = torch.randn(9, k) * torch.logspace(-42, 37, 9)[:, None]
    x[2, 40], x[3, 50], x[4, 60] = torch.inf, -torch.nan, -torch.inf
    x[5] = 0
    x[6, :64], x[7] = -0.0, 3.4e38
    x[7, 0] = -3.4e38
    for dtype in TYPES:
        rows = x.to(dtype)
        expected = reference.quantize_activations(rows, block, symmetric)
        found = quantize_activations(rows, block, symmetric)
        codes, scales, zeros = found.natural()
        assert torch.equal(codes, expected[0])
        assert same_bits(scales, expected[1])
        assert (zeros is None) == (expected[2] is None)
        if zeros is not None and expected[2] is not None:
            assert torch.equal(zeros, expected[2])
        assert torch.equal(found.codes, reference.activation_order(*expected[::2], block))
