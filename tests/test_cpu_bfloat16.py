"""The CPU kernels for bf16, where the machine has products of bf16: that for few rows and
weights of 4 bits, and that of AMX.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cpu_sums import check, close, weight
from packed_cases import random_weight
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C, reference

BFLOAT16 = torch.bfloat16

needs_products = pytest.mark.skipif(
    not (_C.cpu_multiplies_bfloat16() and "avx512_vnni" in _C.cpu_instruction_sets()),
    reason="this machine has no products of bf16",
)
needs_tiles = pytest.mark.skipif(
    "amx_int8" not in _C.cpu_instruction_sets(), reason="this machine has no AMX"
)

#: The dtypes of scales, in turn, and the N and K of weights.
DTYPES = (torch.float16, BFLOAT16, torch.float32)
SIZES = [
    (70, 203),
    (64, 384),
    (1, 33),
    (130, 576),
    (65, 1),
    (3, 1300),
    (64, 64),
    (7, 514),
    (9, 65),
]


@pytest.fixture
def without_amx() -> Iterator[None]:
    _C.use_cpu_instruction_set("avx512_vnni")
    yield
    _C.use_cpu_instruction_set(_C.cpu_instruction_sets()[0])


def x_of(m: int, k: int) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(BFLOAT16)


@needs_products
@pytest.mark.usefixtures("without_amx")
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 384, -1])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets", "nf4", "mxfp4"])
def test_no_weight_is_rounded(kind: str, group_size: int) -> None:
    for dtype, (n, k), m in zip(
        DTYPES * 3,
        SIZES,
        [3, 2, 7, 4, 1, 9, 1, 17, 31],
        strict=True,
    ):
        check(x_of(m, k), weight(n, k, kind, group_size, dtype))


@needs_products
@pytest.mark.usefixtures("without_amx")
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
@pytest.mark.parametrize("m", [5, 21])
def test_rows_that_are_not_finite_are_nan(m: int) -> None:
    x = x_of(m, 200)
    x[1, 3], x[4, 199] = torch.nan, torch.inf
    y = co.mixed_gemm(x, co.reorder(random_weight(70, 200)))
    assert y[[1, 4]].isnan().all()
    assert y[[0, 2, 3, *range(5, m)]].isfinite().all()


@needs_products
def test_others_keep_the_references_bits() -> None:
    """Few rows of other codes and types, ``exact``, ``batch_invariant``, and other instructions."""
    for x, bits, options in (
        (x_of(4, 200), 8, {}),
        (x_of(4, 200).half(), 4, {}),
        (x_of(4, 200).float(), 4, {}),
        (x_of(15, 200), 8, {}),
        (x_of(20, 200), 4, {"exact": True}),
        (x_of(20, 200), 4, {"batch_invariant": True}),
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
@pytest.mark.usefixtures("without_amx")
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, -1])
def test_any_number_of_rows(group_size: int) -> None:
    for m in range(1, 32):
        check(x_of(m, 1300), random_weight(70, 1300, 4, group_size, "zeros"))


@needs_products
@pytest.mark.usefixtures("without_amx")
def test_panels_are_for_more_rows() -> None:
    packed = co.reorder(random_weight(70, 200, 4, 32, "zeros"))
    for m, kernel in ((31, _C.cpu_kernel()), (32, "torch.matmul")):
        assert co.explain(m, packed, dtype=BFLOAT16).kernel == kernel


def check_rounded(x: Tensor, qw: co.QuantizedWeight) -> None:
    """Every element: fp32 sums, in any order, of the weight's values rounded to bf16."""
    packed = co.reorder(qw)
    chosen = co.explain(x, packed)
    assert not chosen.exact
    assert "rounded to it" in chosen.why
    if qw.book is not None:
        qw = replace(qw, book=qw.book.to(BFLOAT16).float())
    w = reference.dequantize_weight(qw, BFLOAT16).double()
    close(x, packed, w, 5e-7 * (x.double().abs() @ w.abs().T), qw.bias)


@needs_tiles
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 384, -1])
@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        ("symmetric", 4),
        ("zeros", 4),
        ("offsets", 4),
        ("nf4", 4),
        ("mxfp4", 4),
        ("symmetric", 8),
        ("zeros", 8),
        ("offsets", 8),
    ],
)
def test_weights_are_rounded_once(kind: str, bits: int, group_size: int) -> None:
    for dtype, (n, k), m in zip(
        DTYPES * 4,
        [*SIZES, (70, 300), (200, 1100), (64, 128)],
        [8, 16, 17, 31, 32, 33, 600, 9, 15, 100, 530, 1025],
        strict=True,
    ):
        rows = m if bits == 4 else max(m, 16)
        check_rounded(x_of(rows, k), weight(n, k, kind, group_size, dtype, bits))


@needs_tiles
def test_tiles_of_e4m3_of_act_orders_and_of_biases() -> None:
    check_rounded(x_of(40, 210)[:, 3:203], random_weight(70, 200, 4, 32, "zeros", extras=True))
    w = torch.randn(70, 200, generator=torch.Generator().manual_seed(5)).to(BFLOAT16)
    check_rounded(x_of(40, 200), co.quantize(w, bits=8, group_size=32, book="e4m3"))


@needs_tiles
def test_a_row_of_tiles_has_the_same_bits_among_any_others() -> None:
    packed, x = co.reorder(random_weight(130, 1100, 4, 32, "zeros")), x_of(600, 1100)
    y = co.mixed_gemm(x, packed)
    for m in (8, 17, 33, 530):
        assert torch.equal(co.mixed_gemm(x[:m], packed), y[:m])
