"""Quantisers of activations, on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import (
    BFLOAT,
    FLOAT,
    GPU,
    HALF,
    INF,
    NAN,
    TYPE_NAMES,
    VIEWS,
    Format,
    assert_same,
    generator,
    make_floats,
    make_weight,
    multiply,
    poison,
)
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import reference
from cutlass_ops.weights import formats

pytestmark = pytest.mark.gpu


def special_rows(k: int, dtype: torch.dtype) -> Tensor:
    """Rows that quantisers get wrong, on the CPU; each is also the pattern of its blocks."""
    rng = torch.Generator().manual_seed(k)
    info = torch.finfo(dtype)
    plain = torch.randn(k, generator=rng)
    ramp = torch.linspace(-1, 1, k)
    rows = [
        plain,
        plain * 1000,
        torch.zeros(k),
        -torch.zeros(k),
        torch.full((k,), 3.7),
        torch.full((k,), -0.1),
        plain.abs(),
        -plain.abs(),
        torch.randint(-127, 128, (k,), generator=rng) * 0.5,  # ties
        torch.randint(0, 511, (k,), generator=rng) * 0.5,
        ramp * info.max,  # hi - lo overflows for bf16 and fp32
        ramp * info.max / 2,
        plain * info.tiny,  # subnormal
        ramp * 2.0**-100,
        ramp * 2.0**-101,
        torch.where(torch.arange(k) % 37 == 3, 1e4, plain),
        torch.where(torch.arange(k) == k // 2, NAN, plain),
        torch.where(torch.arange(k) == k - 1, INF, plain),
        torch.where(torch.arange(k) == 0, -INF, plain),
        torch.where(torch.arange(k) < k // 2, NAN, 0.0),
    ]
    return torch.stack([row.float() for row in rows]).to(dtype)


def assert_quantized_as_on_the_cpu(
    x: Tensor, on_cpu: Tensor, block: int, symmetric: bool, perm: Tensor | None = None
) -> None:
    m, k = on_cpu.shape
    k_pad = formats.padded_k(k)
    poison(m * k_pad, (k_pad // 32) * (m + 15) * 4)
    qa = co.quantize_activations(x, block, symmetric, perm)
    cpu = co.quantize_activations(on_cpu, block, symmetric, None if perm is None else perm.cpu())
    assert_same(qa.scales[:, :m].cpu(), cpu.scales[:, :m])
    if symmetric:
        assert qa.zeros is None
    else:
        assert qa.zeros is not None
        assert cpu.zeros is not None
        assert_same(qa.zeros[:, :m].cpu(), cpu.zeros[:, :m])
    assert_same(qa.codes.cpu(), cpu.codes)  # with the padding
    assert (qa.block, qa.k, qa.shape, qa.dtype) == (block, k, x.shape, x.dtype)
    # Against the specification too, not only against the CPU path.
    codes, scales, zeros = reference.quantize_activations(
        on_cpu if perm is None else on_cpu[:, perm.cpu().long()], block, symmetric
    )
    got = qa.natural()
    assert_same(got[0].cpu(), codes)
    assert_same(got[1].cpu(), scales)
    if zeros is not None:
        assert got[2] is not None
        assert_same(got[2].cpu(), zeros)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("block", [16, 32, 64, 128, -1])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT], ids=TYPE_NAMES.get)
def test_quantizer_is_the_reference_bit_for_bit(
    dtype: torch.dtype, block: int, symmetric: bool
) -> None:
    for k in (576, 128, 100, 33, 7, 1, 4224):  # 4224: a token's range and codes are two passes
        on_cpu = special_rows(k, dtype)
        assert_quantized_as_on_the_cpu(on_cpu.to(GPU), on_cpu, block, symmetric)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("block", [32, 128, -1])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT], ids=TYPE_NAMES.get)
def test_quantizer_rounds_every_value_as_the_reference(
    dtype: torch.dtype, block: int, symmetric: bool
) -> None:
    # Many ranges and values: a reciprocal or product that is fused or approximate shows
    # in some of them.
    rng = torch.Generator().manual_seed(3)
    on_cpu = (
        torch.randn(300, 1536, generator=rng) * torch.rand(300, 1, generator=rng).exp2() * 3
    ).to(dtype)
    assert_quantized_as_on_the_cpu(on_cpu.to(GPU), on_cpu, block, symmetric)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("k", [576, 100, 7])
def test_quantizer_reads_strided_rows(k: int, view: str) -> None:
    for dtype in (HALF, FLOAT):
        x = VIEWS[view](make_floats(10, k, dtype))
        for block in (32, 128, -1):
            for symmetric in (True, False):
                qa = co.quantize_activations(x, block, symmetric)
                plain = co.quantize_activations(x.reshape(-1, k).cpu(), block, symmetric)
                assert_same(qa.codes.cpu(), plain.codes)
                assert_same(qa.scales[:, :10].cpu(), plain.scales[:, :10])


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("block", [16, 32, 64, 128, -1])
def test_quantizer_gathers_in_act_order(block: int, symmetric: bool) -> None:
    for k in (576, 100, 4224):
        perm = torch.randperm(k, generator=generator(k), device=GPU).int()
        on_cpu = special_rows(k, HALF)
        assert_quantized_as_on_the_cpu(on_cpu.to(GPU), on_cpu, block, symmetric, perm)


def assert_same_activations(
    found: co.QuantizedActivations, expected: co.QuantizedActivations
) -> None:
    m = math.prod(expected.shape[:-1])
    assert (found.block, found.k, found.shape, found.dtype) == (
        expected.block,
        expected.k,
        expected.shape,
        expected.dtype,
    )
    assert_same(found.codes, expected.codes)  # with the padding
    assert_same(found.scales[:, :m], expected.scales[:, :m])
    assert (found.zeros is None) == (expected.zeros is None)
    if found.zeros is not None and expected.zeros is not None:
        assert_same(found.zeros[:, :m], expected.zeros[:, :m])


#: M, K: rows that are one piece a lane, several, too long for the registers, and of columns that
#: vectors do not fit.
FUSED_SHAPES = (
    (1, 576),
    (300, 4096),
    (5, 8192),
    (700, 1040),
    (3, 17408),
    (2, 30000),
    (9, 100),
    (2, 7),
)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("block", [32, 128, -1])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT], ids=TYPE_NAMES.get)
def test_fused_quantisers_are_the_unfused_ones_bit_for_bit(
    dtype: torch.dtype, block: int, symmetric: bool
) -> None:
    for m, k in FUSED_SHAPES:
        x, other = make_floats(m, k, dtype), make_floats(m + 1, k, dtype)[1:]
        x[0, : k // 3] *= 50
        x[m // 2] = x[m // 2] * 1e-4 if m > 1 else x[0]
        weight = make_floats(1, k, dtype)[0]
        for perm in (None, torch.randperm(k, generator=generator(k), device=GPU).int()):
            options: dict[str, Any] = {"block": block, "symmetric": symmetric, "perm": perm}
            y, _ = reference.rms_norm(x, weight, 1e-6)
            poison(m * formats.padded_k(k))
            assert_same_activations(
                co.rms_norm_quantize(x, weight, **options), co.quantize_activations(y, **options)
            )
            y, total = reference.rms_norm(x, weight, 1e-5, other)
            qa, stream = co.rms_norm_quantize(x, weight, 1e-5, other, **options)
            assert_same(stream, total)
            assert_same_activations(qa, co.quantize_activations(y, **options))
            # A CPU finds the same bits: the order of the sum is part of the specification.
            on_cpu, total_on_cpu = reference.rms_norm(x.cpu(), weight.cpu(), 1e-5, other.cpu())
            assert_same(stream.cpu(), total_on_cpu)
            assert_same(y.cpu(), on_cpu)
            y = reference.silu_mul(x, other)
            assert_same_activations(
                co.silu_mul_quantize(x, other, **options), co.quantize_activations(y, **options)
            )


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("block", [64, 128, -1])
def test_a_large_x_is_quantised_as_its_parts_are(block: int, symmetric: bool) -> None:
    m, k = 1700, 4096
    x, other, weight = (
        make_floats(m, k, HALF),
        make_floats(m + 1, k, HALF)[1:],
        make_floats(1, k, HALF)[0],
    )
    options: dict[str, Any] = {"block": block, "symmetric": symmetric}
    functions: list[Callable[[Tensor, Tensor], co.QuantizedActivations]] = [
        lambda x, other: co.quantize_activations(x, **options),
        lambda x, other: co.silu_mul_quantize(x, other, **options),
        lambda x, other: co.rms_norm_quantize(x, weight, 1e-6, other, **options)[0],
    ]
    for quantize in functions:
        whole = quantize(x, other)
        parts = [quantize(*rows) for rows in zip(x.split(m // 2), other.split(m // 2), strict=True)]
        for found, *expected in zip(
            whole.natural(), *(part.natural() for part in parts), strict=True
        ):
            if found is not None:
                assert_same(found, torch.cat(expected))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=TYPE_NAMES.get)
def test_silu_of_every_value(dtype: torch.dtype) -> None:
    values = torch.arange(-(1 << 15), 1 << 15, device=GPU, dtype=torch.int16).view(dtype)
    gate = torch.where(values.isfinite(), values, 0.0).view(-1, 32)
    for up in (torch.ones_like(gate), make_floats(*gate.shape, dtype)):
        for symmetric in (True, False):
            y = torch.nn.functional.silu(gate) * up  # what models compute
            assert_same_activations(
                co.silu_mul_quantize(gate, up, 32, symmetric),
                co.quantize_activations(y, 32, symmetric),
            )


@pytest.mark.parametrize("block", [64, -1])
def test_fused_quantisers_keep_nan(block: int) -> None:
    for k in (576, 100):
        for bad in (NAN, INF, -INF):
            x, other, weight = (
                make_floats(6, k, HALF),
                make_floats(7, k, HALF)[:6],
                make_floats(1, k, HALF)[0],
            )
            x[1, 3] = bad
            other[4, k - 1] = bad
            norm, total = reference.rms_norm(x, weight, 1e-6, other)
            qa, stream = co.rms_norm_quantize(x, weight, 1e-6, other, block)
            assert_same(stream, total)
            assert_same_activations(qa, co.quantize_activations(norm, block))
            assert_same_activations(
                co.silu_mul_quantize(x, other, block),
                co.quantize_activations(reference.silu_mul(x, other), block),
            )


def test_fused_quantisers_read_strided_rows_and_both_halves_of_one_product() -> None:
    for k in (576, 100):
        both = make_floats(10, 2 * k, HALF)
        gate, up = both.chunk(2, -1)
        y = reference.silu_mul(gate.contiguous(), up.contiguous())
        assert_same_activations(co.silu_mul_quantize(gate, up), co.quantize_activations(y))
        for view in VIEWS:
            x, other = (
                VIEWS[view](make_floats(10, k, HALF)),
                VIEWS[view](make_floats(20, k, HALF)[10:]),
            )
            weight = make_floats(1, k, HALF)[0]
            norm, total = reference.rms_norm(x.reshape(-1, k), weight, 1e-6, other.reshape(-1, k))
            qa, stream = co.rms_norm_quantize(x, weight, 1e-6, other)
            assert_same(stream, total.view(x.shape))
            assert_same_activations(qa, co.quantize_activations(norm.view(x.shape)))


@pytest.mark.parametrize("m", [17, 33, 129, 200, 300, 513])
@pytest.mark.parametrize("block", [128, -1])
@pytest.mark.parametrize("fmt", [Format(4), Format(8), Format(8, group_size=-1)], ids=str)
def test_memory_behind_the_last_row_changes_nothing(fmt: Format, block: int, m: int) -> None:
    n, k = 4096, 1024
    packed = co.reorder(make_weight(fmt, n, k, exact=False))
    for symmetric in (True, False):
        qa = co.quantize_activations(make_floats(m, k, HALF), block, symmetric)
        rows = qa.codes.untyped_storage().nbytes() // k
        assert rows == (m if m > 512 else 1 << (m - 1).bit_length())
        alone = co.mixed_gemm(replace(qa, codes=qa.codes.clone()), packed)
        for left in (0, -128, 127):
            qa.codes.as_strided((rows, k), (k, 1))[m:] = left
            assert_same(multiply(qa, packed), alone)
