"""Products whose weights are rounded to x's type, on a GPU: every format by every tile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import (
    BFLOAT,
    FLOAT,
    GPU,
    HALF,
    Format,
    assert_close,
    assert_same,
    generator,
    integers,
    is_exact,
    make_exact_floats,
    make_floats,
    make_weight,
    multiply,
    oracle,
    same_bits,
)
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.weights import formats

pytestmark = pytest.mark.gpu

#: Rows of x while a batch decodes.
FEW_ROWS = (1, 2, 5, 8, 11, 16)
#: Rows of x for each tile, full and not, and for several of them.
ROWS = (*FEW_ROWS, 17, 32, 40, 64, 72, 96, 100, 128, 150, 160, 200, 208, 240, 256, 300, 777)
#: Integers; a real offset a group; 16 values; those of MXFP4; floats of 8 bits.
KINDS = ("symmetric", "zeros", "offsets", "codebook", "mxfp4", "e4m3")
#: Kinds that have one number of bits.
BITS = {"codebook": 4, "mxfp4": 4, "e4m3": 8}


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs than Hopper's have no kernel that rounds weights")


def weight(
    kind: str,
    bits: int,
    group_size: int,
    scales: torch.dtype,
    n: int,
    k: int,
    exact: bool,
    **extra: Any,
) -> co.QuantizedWeight:
    if kind not in BITS:
        return make_weight(Format(bits, kind, group_size, scales), n, k, exact=exact, **extra)
    plain, rng = (
        make_weight(
            Format(BITS[kind], "symmetric", group_size, scales), n, k, exact=exact, **extra
        ),
        generator(n, k),
    )
    if kind == "mxfp4":
        powers = (2.0 ** integers(-9, -3, tuple(plain.scales.shape), rng)).to(scales)
        return replace(plain, scales=powers, book=torch.tensor(formats.E2M1, device=GPU))
    if kind == "e4m3":  # if exact, 1/8 to 15; the two codes that are no numbers are left out
        magnitudes = (
            integers(4 << 3, 11 << 3, (n, k), rng) if exact else integers(0, 127, (n, k), rng)
        )
        codes = (magnitudes + 128 * integers(0, 2, (n, k), rng)).to(torch.uint8)
        return replace(plain, codes=codes, book=torch.tensor(formats.E4M3, device=GPU))
    assert kind == "codebook", f"{kind} has no case"
    book = (
        integers(-16, 17, (16,), rng).float() / 8
        if exact
        else torch.tensor(formats.NF4, device=GPU)
    )
    return replace(plain, book=book)


def has_room(qw: co.QuantizedWeight) -> bool:
    """Whether a tile of wgmma_fold16 has room for scales, offsets and zero points."""
    fp32_of_2_bits = qw.bits == 2 and qw.zeros is None and qw.scales.dtype is FLOAT
    return qw.group_size != 16 or (qw.zeros is None and qw.offsets is None) or fp32_of_2_bits


def check(
    x: Tensor, qw: co.QuantizedWeight, exact: bool, act_quant: str = "none", symmetric: bool = True
) -> None:
    packed = co.reorder(qw)
    options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric}
    y = multiply(x, packed, **options)
    # Integers of 4 and 8 bits in groups of 128 or more, without offsets, are multiplied exactly
    # whatever the order of their columns, and so are 8-bit zero points with many rows of symmetric
    # blocks, and groups of 16 for which wgmma_fold16 has no room; a few rows of others may be.
    keeps = is_exact(y, x, packed, **options)
    # Up to 32 rows of 2 bits may be, too, and of such groups of 16 may not.
    if len(x) > (32 if qw.bits == 2 or not has_room(qw) else 16):
        long_groups = qw.group_size == -1 or qw.group_size >= 128
        plain = long_groups and qw.offsets is None and qw.book is None and qw.bits > 2
        compensated = act_quant == "block" and symmetric and len(x) > 64
        exactly = (plain and (act_quant == "none" or compensated)) or not has_room(qw)
        assert keeps is exactly, co.explain(x, packed, **options)
    if qw.book is not None:  # its values are rounded to x's type first
        qw = replace(qw, book=qw.book.to(x.dtype).float())
    want = oracle(x, qw, act_quant, symmetric)
    if exact:
        assert_same(y, want.to(x.dtype))
    else:
        assert_close(y, want, rounded=not keeps)
        assert same_bits(y, multiply(x, packed, **options))
        # Another kernel is exact.
        assert_close(multiply(x, packed, exact=True, **options), want)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "any"])
@pytest.mark.parametrize("scales", [HALF, BFLOAT, FLOAT], ids=str)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("group_size", [16, 32, 64])
@pytest.mark.parametrize(
    ("kind", "bits"),
    [(kind, bits) for kind in KINDS for bits in (2, 4, 8) if BITS.get(kind, bits) == bits],
)
def test_floats(
    kind: str, bits: int, group_size: int, dtype: torch.dtype, scales: torch.dtype, exact: bool
) -> None:
    n, k = 576, 712
    # bf16 cannot hold 8 bits plus an offset.
    exact = exact and (dtype is HALF or (kind, bits) != ("offsets", 8))
    qw = weight(kind, bits, group_size, scales, n, k, exact)
    for m in ROWS:
        x = make_exact_floats(m, k, dtype, "none", True, 32) if exact else make_floats(m, k, dtype)
        check(x, qw, exact)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize(
    ("kind", "bits", "group_size"),
    [
        ("symmetric", 2, 128),
        ("zeros", 2, -1),
        ("offsets", 2, 256),
        ("offsets", 4, 128),
        ("offsets", 8, -1),
        ("codebook", 4, 256),
        ("codebook", 4, -1),
        ("e4m3", 8, 128),
        ("e4m3", 8, -1),
    ],
)
def test_long_groups(kind: str, bits: int, group_size: int, dtype: torch.dtype) -> None:
    for n, k in ((192, 576), (1000, 1000)):
        for exact in (True, False):
            exact = exact and (dtype is HALF or (kind, bits) != ("offsets", 8))
            qw = weight(kind, bits, group_size, HALF, n, k, exact)
            for m in (3, 16, 17, 100, 300):
                check(
                    make_exact_floats(m, k, dtype, "none", True, 32)
                    if exact
                    else make_floats(m, k, dtype),
                    qw,
                    exact,
                )


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize(
    ("kind", "group_size", "scales"),
    [("mxfp4", 32, BFLOAT), ("e4m3", 128, FLOAT), ("e4m3", 128, HALF), ("e4m3", -1, BFLOAT)],
)
def test_few_rows(kind: str, group_size: int, scales: torch.dtype, dtype: torch.dtype) -> None:
    for n, k in ((576, 712), (192, 8256), (4096, 4096), (9000, 640)):
        for exact in (True, False):
            packed = co.reorder(qw := weight(kind, BITS[kind], group_size, scales, n, k, exact))
            for m in (1, 2, 4, 5, 8, 9, 16, 23, 32):
                x = (
                    make_exact_floats(m, k, dtype, "none", True, 32)
                    if exact
                    else make_floats(m, k, dtype)
                )
                for options in ({}, {"exact": True}, {"architecture": 80}):
                    y, want = multiply(x, packed, **options), oracle(x, qw)
                    if exact:
                        assert_same(y, want.to(dtype))
                    else:
                        assert_close(y, want, rounded=not is_exact(y, x, packed, **options))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("scales", [HALF, BFLOAT, FLOAT], ids=str)
def test_every_float_of_8_bits(scales: torch.dtype, dtype: torch.dtype) -> None:
    n, k = 254, 256
    numbers = torch.tensor(
        [code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8, device=GPU
    )
    codes = numbers[
        (torch.arange(n, device=GPU)[:, None] + torch.arange(k, device=GPU)) % len(numbers)
    ]
    ones = torch.ones(n, 2, dtype=scales, device=GPU)
    packed = co.reorder(
        co.QuantizedWeight(codes, ones, bits=8, book=torch.tensor(formats.E4M3, device=GPU))
    )
    want = codes.view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(co.dequantize(packed, dtype), want)
    x = torch.eye(k, dtype=dtype, device=GPU)
    for options in ({}, {"exact": True}, {"architecture": 80}):
        for rows in (1, 5, 16, 40, k):
            y = torch.cat([multiply(part, packed, **options) for part in x.split(rows)])
            assert torch.equal(y.t(), want), (rows, options)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [16, 32, 128])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
def test_act_order_and_rows_at_any_address(dtype: torch.dtype, group_size: int, bits: int) -> None:
    n, k = 320, 712
    for perm in (True, False):
        qw = weight("zeros", bits, group_size, HALF, n, k, False, perm=perm)
        for m in (3, 16, 17, 100, 300):
            wide = make_floats(m, k + 3, dtype)
            check(wide[:, 3:], qw, False)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("act_quant", ["token", "block"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("kind", "bits", "group_size"),
    [
        ("symmetric", 2, 32),
        ("zeros", 2, 128),
        ("offsets", 2, 16),
        ("symmetric", 2, -1),
        ("symmetric", 4, 16),
        ("symmetric", 8, 16),
        ("zeros", 8, 16),
        ("offsets", 4, 16),
        ("symmetric", 4, 32),
        ("symmetric", 8, 64),
        ("zeros", 4, 64),
        ("zeros", 8, 128),
        ("offsets", 4, 32),
        ("offsets", 8, 128),
    ],
)
def test_int8_activations(
    kind: str, bits: int, group_size: int, symmetric: bool, act_quant: str, dtype: torch.dtype
) -> None:
    n, k = 576, 712
    for exact in (True, False):
        exact = exact and (dtype is HALF or (kind, bits) != ("offsets", 8))
        qw = weight(kind, bits, group_size, HALF, n, k, exact)
        for m in (*FEW_ROWS, 17, 64, 100, 300):
            block = formats.activation_block(group_size)
            x = (
                make_exact_floats(m, k, dtype, act_quant, symmetric, block)
                if exact
                else make_floats(m, k, dtype)
            )
            check(x, qw, exact, act_quant, symmetric)
            qa = co.quantize_activations(x, -1 if act_quant == "token" else block, symmetric)
            whole = co.mixed_gemm(x, co.reorder(qw), act_quant=act_quant, act_symmetric=symmetric)
            y = co.mixed_gemm(qa, co.reorder(qw))
            if exact or m > max(FEW_ROWS):
                assert same_bits(y, whole)
            else:  # a kernel that quantises x itself may cut K in another way
                assert_close(y, whole.double(), rounded=True)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "any"])
@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
@pytest.mark.parametrize(
    ("n", "k"), [(4096, 4096), (1000, 11008), (17000, 3584), (28672, 2048), (64, 200)]
)
@pytest.mark.parametrize(
    ("kind", "bits", "group_size"),
    [
        ("symmetric", 2, 128),
        ("zeros", 2, 32),
        ("offsets", 2, 64),
        ("symmetric", 2, 16),
        ("symmetric", 8, 16),
        ("zeros", 4, 16),
        ("codebook", 4, 16),
        ("symmetric", 4, 32),
        ("symmetric", 8, 64),
        ("zeros", 4, 32),
        ("zeros", 8, 32),
        ("offsets", 4, 64),
        ("offsets", 8, 128),
        ("zeros", 8, 128),
        ("zeros", 8, -1),
        ("codebook", 4, 32),
        ("symmetric", 4, 128),
        ("zeros", 4, 128),
    ],
)
def test_few_rows_in_every_shape_of_a_decode_kernel(
    kind: str, bits: int, group_size: int, n: int, k: int, act_quant: str, exact: bool
) -> None:
    """Clusters of one to eight CTAs, whole and half row panels, x that is quantised in the
    kernel and before.
    """
    if kind == "codebook" and act_quant != "none":
        pytest.skip("a code book is multiplied by floats")
    qw = weight(kind, bits, group_size, HALF, n, k, exact)
    for m in (7, 16, 18, 31, 41, 64) if act_quant == "none" else (7, 16):
        for symmetric in (True, False) if act_quant != "none" else (True,):
            block = formats.activation_block(group_size)
            x = (
                make_exact_floats(m, k, HALF, act_quant, symmetric, block)
                if exact
                else make_floats(m, k, HALF)
            )
            check(x, qw, exact, act_quant, symmetric)


# Kernels hold values and sums of bf16 products in smaller units (device/fold.cuh).
@pytest.mark.parametrize("scales", [BFLOAT, FLOAT])
@pytest.mark.parametrize(
    ("kind", "bits", "group_size"),
    [
        ("symmetric", 2, 32),
        ("symmetric", 4, 32),
        ("symmetric", 4, 128),
        ("symmetric", 8, 16),
        ("symmetric", 8, 64),
        ("zeros", 2, 64),
        ("zeros", 4, 32),
        ("zeros", 8, 128),
        ("offsets", 4, 32),
        ("offsets", 8, 64),
        ("codebook", 4, 32),
        ("e4m3", 8, 64),
    ],
)
def test_scales_of_every_magnitude(
    kind: str, bits: int, group_size: int, scales: torch.dtype
) -> None:
    qw = weight(kind, bits, group_size, scales, 192, 512, exact=True)
    for m in (1, 16, 24, 64, 200):
        x = make_exact_floats(m, 512, BFLOAT, "none", True, formats.activation_block(group_size))
        y = multiply(x, co.reorder(qw))
        assert y.isfinite().all()
        assert y.count_nonzero() > y.numel() // 2
        for power in (-80, -30, 30):
            changed = replace(
                qw,
                scales=qw.scales * 2.0**power,
                offsets=None if qw.offsets is None else qw.offsets * 2.0**power,
            )
            assert_same(multiply(x, co.reorder(changed)), y * 2.0**power)


@pytest.mark.parametrize(
    ("fmt", "m", "act_quant"),
    [
        (Format(2, "zeros", 64), 16, "none"),
        (Format(2, "zeros", 128), 5, "token"),
        (Format(4, "symmetric", 32), 1, "none"),
        (Format(8, "symmetric", 32), 16, "none"),
        (Format(8, "symmetric", 16, FLOAT), 9, "none"),
        (Format(4, "symmetric", 16), 1, "none"),
        (Format(4, "offsets", 16), 16, "block"),
        (Format(4, "offsets", 128), 7, "block"),
        (Format(8, "zeros", 128), 16, "token"),
        (Format(4, "symmetric", 32, FLOAT), 16, "none"),
    ],
)
def test_few_rows_are_folded(fmt: Format, m: int, act_quant: str) -> None:
    packed = co.reorder(make_weight(fmt, 4096, 4096, exact=False))
    explanation = co.explain(make_floats(m, 4096, HALF), packed, act_quant=act_quant)
    assert explanation.kernel == "wgmma_decode_fold16"
    assert not explanation.exact


@pytest.mark.parametrize(
    ("group_size", "m", "kernel"),
    [
        (16, 1, "decode_gemm"),
        (16, 8, "decode_gemm"),
        (32, 4, "decode_gemm"),
        (128, 8, "decode_gemm"),
        (128, 16, "wgmma_gemm_a16"),
    ],
)
def test_few_rows_with_scales_of_another_type_are_exact(
    group_size: int, m: int, kernel: str
) -> None:
    fmt, x = Format(4, "symmetric", group_size, FLOAT), make_floats(m, 4096, HALF)
    packed = co.reorder(make_weight(fmt, 14336, 4096, exact=False))
    explanation = co.explain(x, packed)
    assert explanation.kernel == kernel
    assert explanation.exact
    assert_same(co.mixed_gemm(x, packed), co.mixed_gemm(x, packed, exact=True))


@pytest.mark.parametrize("kind", KINDS)
def test_long_k_and_split_k(kind: str) -> None:
    """One sum over all of K; tiles that fill no wave, and last waves whose K is cut."""
    for n, k, m in (
        (192, 28672, 11),
        (8192, 28672, 16),
        (192, 28672, 64),
        (8192, 4104, 1030),
        (17152, 2048, 300),
    ):
        qw = weight(kind, 4, 32, HALF, n, k, False)
        check(make_floats(m, k, HALF), qw, False)


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_epilogue(activation: str) -> None:
    n, k = 576, 712
    qw = weight("offsets", 4, 32, HALF, n, k, False)
    for m in (6, 40, 300):
        x, residual, bias = (
            make_floats(m, k, HALF),
            make_floats(m, n, HALF),
            make_floats(1, n, HALF)[0],
        )
        y = multiply(x, co.reorder(qw), bias=bias, activation=activation, residual=residual)
        want = (
            getattr(torch.nn.functional, activation)(oracle(x, qw) + bias.double())
            + residual.double()
        )
        assert_close(y, want, rounded=True)


def test_a_row_with_nan_is_nan_and_no_other() -> None:
    qw = weight("offsets", 4, 32, HALF, 192, 576, False)
    packed = co.reorder(qw)
    for act_quant in ("none", "token", "block"):
        for bad in (float("nan"), float("inf")):
            for m in (9, 300):
                x = make_floats(m, 576, HALF)
                want = co.mixed_gemm(x, packed, act_quant=act_quant)
                x[7, 5] = bad
                y = co.mixed_gemm(x, packed, act_quant=act_quant)
                assert y[7].isnan().all()
                rest = torch.arange(m, device=GPU) != 7
                assert same_bits(y[rest], want[rest])
