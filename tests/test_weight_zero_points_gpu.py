"""8-bit weights with zero points times int8 activations, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_ops_gpu import (
    BFLOAT,
    FLOAT,
    GPU,
    HALF,
    Format,
    assert_close,
    assert_same,
    block_of,
    make_exact_floats,
    make_floats,
    make_weight,
    multiply,
    oracle,
    same_bits,
)

import cutlass_ops as co

pytestmark = pytest.mark.gpu

ROWS = (1, 17, 64, 100, 129, 777, 1000, 4097)
MODES = pytest.mark.parametrize(
    ("act_quant", "symmetric"),
    [(kind, symmetric) for kind in ("token", "block") for symmetric in (True, False)],
    ids=["token", "token-asym", "block", "block-asym"],
)
GROUPS = pytest.mark.parametrize("group_size", [128, 256, -1])


def weight(group_size: int, n: int, k: int, exact: bool, scales: torch.dtype = HALF, **extra: Any) -> co.QuantizedWeight:
    return make_weight(Format(8, "zeros", group_size, scales), n, k, exact=exact, **extra)


@MODES
@GROUPS
@pytest.mark.parametrize("m", ROWS)
def test_power_of_two_scales_are_exact(m: int, group_size: int, act_quant: str, symmetric: bool) -> None:
    for n, k in ((321, 1153), (1001, 2001)):
        qw = weight(group_size, n, k, True)
        x = make_exact_floats(m, k, HALF, act_quant, symmetric, 128)
        y = multiply(x, co.reorder(qw), act_quant=act_quant, act_symmetric=symmetric, out_dtype=FLOAT)
        assert_same(y, oracle(x, qw, act_quant, symmetric).float())


@MODES
@GROUPS
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("dtype", "scales"), [(HALF, HALF), (BFLOAT, FLOAT)], ids=str)
def test_any_scales(dtype: torch.dtype, scales: torch.dtype, m: int, group_size: int, act_quant: str, symmetric: bool) -> None:
    for n, k in ((321, 1153), (2049, 2048)):
        qw = weight(group_size, n, k, False, scales)
        packed = co.reorder(qw)
        x = make_floats(m, k, dtype)
        want = oracle(x, qw, act_quant, symmetric)
        for options in ({}, {"exact": True}, {"out_dtype": FLOAT}, {"batch_invariant": True}):
            y = multiply(x, packed, act_quant=act_quant, act_symmetric=symmetric, **options)
            assert_close(y, want)
            again = co.mixed_gemm(x, packed, act_quant=act_quant, act_symmetric=symmetric, **options)
            assert same_bits(y, again)


@MODES
@pytest.mark.parametrize("m", [32, 64, 96, 129, 144, 176, 256, 352])
def test_codes_and_zero_points_of_one_sign(m: int, act_quant: str, symmetric: bool) -> None:
    """The largest integers: codes, and zero points, at either end of their range."""
    for group_size in (128, -1):
        n, k = 1000, 384
        qw = weight(group_size, n, k, True)
        qw.codes[0::3], qw.zeros[0::3] = 255, 0
        qw.codes[1::3], qw.zeros[1::3] = 0, 255
        x = torch.full((m, k), 127.0 if symmetric else 255.0, device=GPU, dtype=HALF)
        x[1::3] *= -1
        y = multiply(x, co.reorder(qw), act_quant=act_quant, act_symmetric=symmetric, out_dtype=FLOAT)
        assert_same(y, oracle(x, qw, act_quant, symmetric).float())


@MODES
@GROUPS
@pytest.mark.parametrize("m", [17, 129, 1000])
def test_codes_that_are_there_already_and_act_order(m: int, group_size: int, act_quant: str, symmetric: bool) -> None:
    n, k = 513, 1153
    qw = weight(group_size, n, k, True, perm=True)
    packed = co.reorder(qw)
    x = make_exact_floats(m, k, HALF, "token", symmetric, 128)
    block = block_of(act_quant, group_size)
    qa = co.quantize_activations(x, block=block, symmetric=symmetric, perm=packed.perm)
    want = oracle(x, qw, act_quant, symmetric)
    of_codes = multiply(qa, packed, out_dtype=FLOAT)
    assert_close(of_codes, want)
    assert_same(of_codes, multiply(x, packed, act_quant=act_quant, act_symmetric=symmetric, out_dtype=FLOAT))
    assert_close(multiply(qa, packed), want)


@MODES
@GROUPS
def test_rows_with_nan_are_nan_and_others_are_not(group_size: int, act_quant: str, symmetric: bool) -> None:
    qw = weight(group_size, 320, 1153, False)
    packed = co.reorder(qw)
    x = make_floats(300, 1153, HALF)
    clean = multiply(x, packed, act_quant=act_quant, act_symmetric=symmetric)
    x[7, 1000], x[299, 3] = float("nan"), float("inf")
    y = multiply(x, packed, act_quant=act_quant, act_symmetric=symmetric)
    assert y[7].isnan().all()
    assert y[299].isnan().all()
    others = torch.ones(300, dtype=torch.bool, device=GPU)
    others[[7, 299]] = False
    assert torch.equal(y[others], clean[others])


@MODES
@GROUPS
def test_batch_invariance(group_size: int, act_quant: str, symmetric: bool) -> None:
    packed = co.reorder(weight(group_size, 1000, 1153, False))
    x = make_floats(1000, 1153, HALF)
    options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric, "batch_invariant": True}
    whole = multiply(x, packed, **options)
    for m in (1, 16, 17, 64, 100, 129, 256, 352):
        assert same_bits(multiply(x[:m].contiguous(), packed, **options), whole[:m]), m


@MODES
@GROUPS
def test_graphs(group_size: int, act_quant: str, symmetric: bool) -> None:
    packed = co.reorder(weight(group_size, 1000, 1152, False))
    x, other = make_floats(777, 1152, HALF), make_floats(777, 1152, HALF).flip(0)
    options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric}
    want = co.mixed_gemm(other, packed, **options)
    co.mixed_gemm(x, packed, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = co.mixed_gemm(x, packed, **options)
    x.copy_(other)
    for _ in range(2):
        y.fill_(float("nan"))
        graph.replay()
        assert same_bits(y, want)
