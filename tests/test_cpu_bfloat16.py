"""The CPU kernel for bf16 and weights of 4 bits, where the machine has products of bf16."""

from __future__ import annotations

import pytest
import torch
from cpu_sums import check, weight
from packed_cases import random_weight
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C, reference

BFLOAT16 = torch.bfloat16

needs_products = pytest.mark.skipif(
    not (_C.cpu_multiplies_bfloat16() and "avx512_vnni" in _C.cpu_instruction_sets()),
    reason="this machine has no products of bf16",
)


def x_of(m: int, k: int) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(BFLOAT16)


@needs_products
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 384, -1])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets", "nf4", "mxfp4"])
def test_no_weight_is_rounded(kind: str, group_size: int) -> None:
    for dtype, (n, k), m in zip(
        (torch.float16, BFLOAT16, torch.float32) * 3,
        [
            (70, 203),
            (64, 384),
            (1, 33),
            (130, 576),
            (65, 1),
            (3, 1300),
            (64, 64),
            (7, 514),
            (9, 65),
        ],
        [3, 2, 7, 4, 1, 9, 1, 17, 31],
        strict=True,
    ):
        check(x_of(m, k), weight(n, k, kind, group_size, dtype))


@needs_products
def test_act_orders_biases_and_rows_apart() -> None:
    qw = random_weight(70, 200, 4, 32, "zeros", extras=True)
    check(x_of(9, 210)[:, 3:203], qw)


@needs_products
def test_more_columns_than_a_chunk_with_any_number_of_threads() -> None:
    packed, x = co.reorder(random_weight(200, 2100, 4, 32, "zeros")), x_of(11, 2100)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(co.mixed_gemm(x, packed))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, found[0]) for y in found)


@needs_products
def test_rows_that_are_not_finite_are_nan() -> None:
    x = x_of(5, 200)
    x[1, 3], x[4, 199] = torch.nan, torch.inf
    y = co.mixed_gemm(x, co.reorder(random_weight(70, 200)))
    assert y[[1, 4]].isnan().all()
    assert y[[0, 2, 3]].isfinite().all()


@needs_products
def test_others_keep_the_references_bits() -> None:
    """Few rows of other codes and types, ``exact``, ``batch_invariant``, and other instructions."""
    for x, bits, options in (
        (x_of(4, 200), 8, {}),
        (x_of(4, 200).half(), 4, {}),
        (x_of(4, 200).float(), 4, {}),
        (x_of(8, 200), 4, {"exact": True}),
        (x_of(8, 200), 4, {"batch_invariant": True}),
    ):
        qw = random_weight(70, 200, bits, 32, "zeros")
        packed = co.reorder(qw)
        assert co.explain(x, packed, **options).exact
        assert torch.equal(co.mixed_gemm(x, packed, **options), reference.mixed_gemm(x, qw))
    qw, x = random_weight(70, 200, 4, 32, "zeros"), x_of(4, 200)
    packed = co.reorder(qw)
    single = {"out_dtype": torch.float32}
    assert not torch.equal(
        co.mixed_gemm(x, packed, **single), reference.mixed_gemm(x, qw, **single)
    )
    _C.use_cpu_instruction_set("avx2")
    try:
        assert co.explain(x, packed).exact
        assert torch.equal(co.mixed_gemm(x, packed), reference.mixed_gemm(x, qw))
    finally:
        _C.use_cpu_instruction_set(_C.cpu_instruction_sets()[0])


@needs_products
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, -1])
def test_any_number_of_rows(group_size: int) -> None:
    for m in range(1, 32):
        check(x_of(m, 1300), random_weight(70, 1300, 4, group_size, "zeros"))


@needs_products
def test_panels_are_for_more_rows() -> None:
    packed = co.reorder(random_weight(70, 200, 4, 32, "zeros"))
    for m, kernel in ((31, _C.cpu_kernel()), (32, "torch.matmul")):
        assert co.explain(m, packed, dtype=BFLOAT16).kernel == kernel
