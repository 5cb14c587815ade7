"""Products with code-book weights on a GPU, against fp64 over the dequantised operands (the book
rounded to x's type).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import reference
from cutlass_ops.weights import formats

pytestmark = pytest.mark.gpu

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
#: Rows of x for every kernel and tile.
MS = (1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 150, 600)
SHAPES = [(1000, 576), (64, 128), (70, 200), (2048, 4096), (512, 8256), (4096, 2048)]


def make(
    n: int, k: int, group_size: int, scale_dtype: torch.dtype, *, exact: bool, **extra: Any
) -> co.QuantizedWeight:
    """Random codes. If ``exact``: a book of small multiples of 1/8, scales of 1/4, 1/2 or 1
    (of both signs).
    """
    rng = torch.Generator("cuda").manual_seed(n + k + group_size)
    shape = (n, formats.group_count(k, group_size))
    scales = torch.rand(shape, generator=rng, device="cuda") * 0.02 + 0.001
    book = torch.tensor(formats.NF4, device="cuda")
    if exact:
        signs = torch.randint(0, 2, shape, generator=rng, device="cuda") * 2 - 1
        scales = signs * 2.0 ** torch.randint(-2, 1, shape, generator=rng, device="cuda")
        book = torch.randperm(33, generator=rng, device="cuda")[:16].float() / 8 - 2
    codes = torch.randint(0, 16, (n, k), generator=rng, device="cuda").to(torch.uint8)
    return co.QuantizedWeight(
        codes, scales.to(scale_dtype), bits=4, group_size=group_size, book=book, **extra
    )


def oracle(x: Tensor, qw: co.QuantizedWeight) -> Tensor:
    assert qw.book is not None
    rounded = co.QuantizedWeight(
        qw.codes,
        qw.scales,
        group_size=qw.group_size,
        perm=qw.perm,
        book=qw.book.to(x.dtype).float(),
    )
    return x.double() @ reference.dequantize_weight(rounded, torch.float64).t()


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 256, -1])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_exact_products(n: int, k: int, group_size: int, dtype: torch.dtype) -> None:
    qw = make(n, k, group_size, HALF, exact=True)
    packed = co.reorder(qw)
    for m, architecture in itertools.product(MS, (0, 80)):
        x = torch.randint(
            -4, 5, (m, k), generator=torch.Generator("cuda").manual_seed(m), device="cuda"
        ).to(dtype)
        y = co.mixed_gemm(x, packed, out_dtype=FLOAT, architecture=architecture)
        assert torch.equal(y.double(), oracle(x, qw)), (
            f"m={m}: {co.explain(m, packed, architecture=architecture)}"
        )


@pytest.mark.parametrize("scale_dtype", [HALF, BFLOAT, FLOAT])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(1000, 576, 64), (2048, 4096, 64), (192, 1024, 128), (300, 4096, 32)]
)
def test_products(
    n: int, k: int, group_size: int, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    qw = make(n, k, group_size, scale_dtype, exact=False)
    packed = co.reorder(qw)
    for m in MS:
        x = torch.randn(m, k, generator=torch.Generator("cuda").manual_seed(m), device="cuda").to(
            dtype
        )
        y = co.mixed_gemm(x, packed, out_dtype=FLOAT)
        exact = oracle(x, qw)
        error = (y.double() - exact).abs()
        assert error.norm() <= 1e-6 * exact.norm(), f"m={m}"
        assert error.max() <= 1e-5 * exact.square().mean().sqrt()
        assert torch.equal(y, co.mixed_gemm(x, packed, out_dtype=FLOAT))
        assert torch.equal(co.mixed_gemm(x, packed, exact=True), y.to(dtype))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize(("n", "k"), [(33, 8), (4096, 4096), (9000, 640), (28672, 1024)])
def test_every_shape_of_wgmma_decode(n: int, k: int, group_size: int, dtype: torch.dtype) -> None:
    qw = make(n, k, group_size, FLOAT, exact=True)
    packed = co.reorder(qw)
    for m in (9, 16):
        x = torch.randint(
            -4, 5, (m, k), generator=torch.Generator("cuda").manual_seed(m), device="cuda"
        ).to(dtype)
        assert torch.equal(co.mixed_gemm(x, packed, out_dtype=FLOAT).double(), oracle(x, qw))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_exact_products_of_many_rows(dtype: torch.dtype) -> None:
    for scale_dtype in (HALF, BFLOAT, FLOAT):
        qw = make(4096, 1000, 64, scale_dtype, exact=True)
        packed = co.reorder(qw)
        x = torch.randint(
            -4, 5, (600, 1000), generator=torch.Generator("cuda").manual_seed(1), device="cuda"
        ).to(dtype)
        assert torch.equal(co.mixed_gemm(x, packed, out_dtype=FLOAT).double(), oracle(x, qw))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_many_rows(dtype: torch.dtype) -> None:
    qw = make(512, 2048, 64, HALF, exact=False, perm=torch.randperm(2048, device="cuda"))
    packed = co.reorder(qw)
    x = torch.randn(300, 2048, device="cuda").to(dtype)
    y = co.mixed_gemm(x, packed).double()
    values = (
        reference.dequantize_weight(qw, dtype)
        if co.explain(300, packed, dtype=dtype).exact
        else rounded_values(qw, dtype)
    )
    exact = x.double() @ values.double().t()
    unit = {HALF: 2.0**-10, BFLOAT: 2.0**-8}[dtype]
    assert ((y - exact).abs() <= unit * exact.abs() + 3e-5 * exact.square().mean().sqrt()).all()
    y = co.mixed_gemm(x, packed, out_dtype=FLOAT).double()
    exact = oracle(x, qw)
    assert (y - exact).abs().max() <= 1e-5 * exact.square().mean().sqrt()


def rounded_values(qw: co.QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Weights that are rounded to x's dtype: the code book in it times the scales,
    rounded once more.
    """
    assert qw.book is not None
    book = qw.book.to(dtype).float()
    values = co.QuantizedWeight(
        qw.codes, qw.scales, group_size=qw.group_size, perm=qw.perm, book=book
    )
    return reference.dequantize_weight(values, torch.float32).to(dtype)


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="a kernel of Hopper's",
)


@needs_hopper
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("scale_dtype", [HALF, BFLOAT, FLOAT])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 384, -1])
def test_each_weight_is_rounded_once(
    group_size: int, scale_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    for n, k, m in ((2500, 768, 1300), (64, 704, 11600), (4096, 712, 712)):
        qw = make(n, k, group_size, scale_dtype, exact=False)
        packed = co.reorder(qw)
        x = torch.zeros(m, k, device="cuda", dtype=dtype)
        x[:k] = torch.eye(k, device="cuda", dtype=dtype)
        assert not co.explain(m, packed, dtype=dtype).exact
        y = co.mixed_gemm(x, packed)
        assert torch.equal(y[:k], rounded_values(qw, dtype).t())
        assert not y[k:].any()


@needs_hopper
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("scale_dtype", [HALF, BFLOAT, FLOAT])
def test_rounded_weights(scale_dtype: torch.dtype, dtype: torch.dtype) -> None:
    # Rows beyond N, the last group beyond K, and parts of the K of tiles that whole
    # waves leave over.
    for n, k, m in (
        (8000, 576, 500),
        (70, 200, 12000),
        (8192, 1024, 700),
        (9000, 640, 1030),
        (2048, 4104, 2300),
    ):
        qw = make(n, k, 64, scale_dtype, exact=False)
        packed = co.reorder(qw)
        x = torch.randn(m, k, generator=torch.Generator("cuda").manual_seed(m), device="cuda").to(
            dtype
        )
        plan = co.explain(m, packed, dtype=dtype)
        assert not plan.exact
        y = co.mixed_gemm(x, packed)
        exact = x.double() @ rounded_values(qw, dtype).double().t()
        unit = {HALF: 2.0**-10, BFLOAT: 2.0**-8}[dtype]
        # The tensor cores add to one sum for all of K, and round towards zero.
        assert (
            (y.double() - exact).abs() <= unit * exact.abs() + 3e-5 * exact.square().mean().sqrt()
        ).all(), plan
        assert torch.equal(y, co.mixed_gemm(x, packed))
    bias, residual = torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda").to(dtype)
    y = co.mixed_gemm(x, packed, bias=bias, activation="silu", residual=residual).double()
    total = exact + bias.double()
    exact = total * total.sigmoid() + residual.double()
    assert ((y - exact).abs() <= unit * exact.abs() + 3e-5 * exact.square().mean().sqrt()).all()
    x[5, 7], x[600, 3] = math.nan, math.inf
    finite = co.mixed_gemm(x, packed).isfinite()
    assert torch.equal(finite.all(1), finite.any(1))
    assert finite.all(1).sum() == m - 2


@pytest.mark.parametrize("m", [1, 9, 40])
def test_epilogue_order_and_views(m: int) -> None:
    n, k = 200, 456
    bias = torch.randn(n, device="cuda")
    qw = make(n, k, 64, HALF, exact=False, bias=bias, perm=torch.randperm(k, device="cuda"))
    packed = co.reorder(qw)
    wide = torch.randn(m, k + 3, device="cuda").half()
    residual = torch.randn(m, n, device="cuda").half()
    for x in (wide[:, 3:], wide[:, :k]):
        y = co.mixed_gemm(x, packed, activation="silu", residual=residual, out_dtype=FLOAT)
        total = oracle(x, qw) + bias.double()
        exact = total * total.sigmoid() + residual.double()
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    x = wide[:, :k].contiguous()
    x[m // 2, 5] = math.nan
    finite = co.mixed_gemm(x, packed).isfinite().all(1)
    assert finite.tolist() == [row != m // 2 for row in range(m)]
    assert co.mixed_gemm(x[:0], packed).shape == (0, n)


def test_graphs_and_other_books() -> None:
    for name, group_size in {
        **dict.fromkeys(formats.CODE_BOOKS, 64),
        "mxfp4": formats.MXFP4_GROUP,
    }.items():
        weight = torch.randn(320, 640, device="cuda").half()
        qw = co.quantize(weight, group_size=group_size, book=name)
        host = co.quantize(weight.cpu(), group_size=group_size, book=name)
        assert torch.equal(qw.codes.cpu(), host.codes)
        assert torch.equal(qw.scales.cpu(), host.scales)
        packed = co.reorder(qw)
        assert torch.equal(co.dequantize(packed, HALF), reference.dequantize_weight(qw, HALF))
        x = torch.randn(4, 640, device="cuda").half()
        co.mixed_gemm(x, packed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = co.mixed_gemm(x, packed, out_dtype=FLOAT)
        x.copy_(torch.randn(4, 640, device="cuda"))
        graph.replay()
        torch.testing.assert_close(y.double(), oracle(x, qw), rtol=1e-5, atol=1e-4)


def test_dequantize_every_format() -> None:
    for n, k, group_size in ((70, 200, 32), (256, 640, 64), (1000, 576, 128), (64, 8192, -1)):
        for scale_dtype in (HALF, BFLOAT, FLOAT):
            qw = make(
                n, k, group_size, scale_dtype, exact=False, perm=torch.randperm(k, device="cuda")
            )
            for dtype in (HALF, BFLOAT, FLOAT):
                assert torch.equal(
                    co.dequantize(co.reorder(qw), dtype), reference.dequantize_weight(qw, dtype)
                )
