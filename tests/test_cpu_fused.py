"""The CPU kernels for five rows of floats and more, which add products in one rounding each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cpu_sums import check, weight
from packed_cases import random_weight

import cutlass_ops as co
from cutlass_ops import _C, reference

VECTORS = [name for name in _C.cpu_instruction_sets() if name != "scalar"]


@pytest.fixture(params=VECTORS, autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    _C.use_cpu_instruction_set(request.param)
    yield
    _C.use_cpu_instruction_set(_C.cpu_instruction_sets()[0])


def x_of(m: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)


@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 384, -1])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets", "nf4", "mxfp4"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_no_weight_is_rounded(bits: int, kind: str, group_size: int) -> None:
    if bits == 8 and kind in ("nf4", "mxfp4"):
        pytest.skip("a code book has 4 bits")
    for dtype, (n, k), m in (
        (torch.float32, (70, 203), 5),
        (torch.float32, (64, 384), 6),
        (torch.float32, (1, 33), 7),
        (torch.float16, (130, 576), 13),
        (torch.float32, (65, 1), 12),
        (torch.float32, (3, 1300), 97),  # more rows than a kernel takes at once
        (torch.float16, (64, 64), 18),
    ):
        check(x_of(m, k, dtype), weight(n, k, kind, group_size, torch.float32, bits))


def test_act_orders_biases_and_rows_apart() -> None:
    qw = random_weight(70, 200, 4, 32, "zeros", extras=True)
    check(x_of(9, 210)[:, 3:203], qw)


def test_neither_threads_nor_other_rows_nor_vectors_change_bits() -> None:
    packed, x = co.reorder(random_weight(200, 2100, 4, 32, "zeros")), x_of(131, 2100)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(co.mixed_gemm(x, packed))
    finally:
        torch.set_num_threads(before)
    found += [torch.cat([co.mixed_gemm(rows, packed) for rows in x.split([5, 95, 6, 25])])]
    for name in VECTORS:
        _C.use_cpu_instruction_set(name)
        found.append(co.mixed_gemm(x, packed))
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_rows_have_the_same_bits_in_any_batch(activation: str) -> None:
    packed, x = co.reorder(random_weight(97, 128, 4, 32, "zeros")), x_of(40, 128)
    options: Any = {"activation": activation, "batch_invariant": True}
    whole = co.mixed_gemm(x, packed, **options)
    for m in range(1, 40):
        assert torch.equal(co.mixed_gemm(x[:m], packed, **options), whole[:m])


def test_fewer_rows_and_exact_products_have_the_references_bits() -> None:
    qw = random_weight(70, 300, 4, 64, "zeros")
    packed, x = co.reorder(qw), x_of(8, 300)
    expected = reference.mixed_gemm(x, qw)
    assert torch.equal(co.mixed_gemm(x[: _C.cpu_fused_rows - 1], packed), expected[:4])
    assert torch.equal(co.mixed_gemm(x, packed, exact=True), expected)
    assert torch.equal(co.mixed_gemm(x, packed, batch_invariant=True), expected)
    assert not torch.equal(co.mixed_gemm(x, packed), expected), "nothing is tested"
