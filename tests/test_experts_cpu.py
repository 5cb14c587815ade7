"""Layers of experts on a CPU against the reference, bit for bit where the order of sums is its."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import FORMATS, both, check, problem, weights
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C, reference
from cutlass_ops.ops import gemm, native
from cutlass_ops.reference import experts as reference_experts

OPTIONS: list[dict[str, Any]] = [
    {"act_quant": "none"},
    {"act_quant": "block"},
    {"act_quant": "token", "act_symmetric": False},
]


@pytest.fixture(params=_C.cpu_instruction_sets(), autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    _C.use_cpu_instruction_set(request.param)
    yield
    _C.use_cpu_instruction_set(_C.cpu_instruction_sets()[0])


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def specified(
    x: Tensor,
    gate_up: Sequence[co.QuantizedWeight],
    down: Sequence[co.QuantizedWeight],
    ids: Tensor,
    topk_weights: Tensor,
    **options: Any,
) -> Tensor:
    """The reference's layer, of the reference's products."""

    def products(qws: Sequence[co.QuantizedWeight]) -> reference_experts.Product:
        return lambda e, rows: reference.mixed_gemm(
            rows, qws[e], out_dtype=torch.float32, **options
        )

    return reference_experts.mixed_moe(
        x,
        products(gate_up),
        products(down),
        down[0].k,
        ids,
        topk_weights,
        "silu",
        len(gate_up),
    )


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def assert_specified(found: Tensor, expected: Tensor, options: dict[str, Any]) -> None:
    """The reference's bits, but for an expert's many rows of floats (cpu_fuses)."""
    if options["act_quant"] == "none" and _C.cpu_fuses(_C.cpu_fused_rows, exact=False):
        assert found.dtype == expected.dtype
        check(found, expected.double())
    else:
        assert_same_bits(found, expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "intermediate"), [(96, 40), (200, 20), (33, 131)])
def test_a_layer_has_the_references_bits(
    kind: str, dtype: torch.dtype, hidden: int, intermediate: int, options: dict[str, Any]
) -> None:
    if kind == "nf4" and options["act_quant"] != "none":
        pytest.skip("a code book is multiplied by floats")
    sizes = {"hidden": hidden, "intermediate": intermediate}
    gate_up, down, x, ids, w = problem(17, 3, dtype=dtype, **sizes, **FORMATS[kind])
    if options["act_quant"] == "none" and _C.cpu_uses_bfloat16(
        co.reorder(gate_up[0]).native, 17, native.DATA_TYPES[dtype], False
    ):
        pytest.skip("sums have another order: tests/test_experts.py")
    found = co.mixed_moe(x, *both(gate_up, down), ids, w, "silu", **options)
    assert_specified(found, specified(x, gate_up, down, ids, w, **options), options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ids_of", ["one", "none", "all", "last"])
def test_experts_without_rows(ids_of: str, options: dict[str, Any]) -> None:
    gate_up, down, x, _, w = problem(7, 2)
    ids = {
        "one": torch.full((7, 2), 3),
        "none": torch.full((7, 2), -1),
        "all": torch.arange(14).view(7, 2) % 5,
        "last": torch.tensor([4, -1]).repeat(7, 1),
    }[ids_of]
    found = co.mixed_moe(x, *both(gate_up, down), ids, w, "silu", **options)
    assert_specified(found, specified(x, gate_up, down, ids, w, **options), options)


def test_act_orders_offsets_and_biases_are_each_experts() -> None:
    random = torch.Generator().manual_seed(3)
    gate_up, down, x, ids, w = problem(21, 3)

    def changed(qws: list[co.QuantizedWeight], n: int, k: int) -> list[co.QuantizedWeight]:
        return [
            replace(
                q,
                perm=torch.randperm(k, generator=random),
                bias=torch.randn(n, generator=random),
                offsets=torch.randn(q.scales.shape, generator=random),
            )
            for q in qws
        ]

    gate_up, down = changed(gate_up, 80, 96), changed(down, 96, 40)
    for options in OPTIONS:
        found = co.mixed_moe(x, *both(gate_up, down), ids, w, "silu", **options)
        assert_specified(found, specified(x, gate_up, down, ids, w, **options), options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_threads_change_no_bits(options: dict[str, Any], threads: None) -> None:
    gate_up, down, x, ids, w = problem(120, 3, experts=3, hidden=256, intermediate=200)
    ids[:110, 0] = 2  # more rows than one call of a kernel takes, of floats fewer than torch's
    ids[:, 1:] = ids[:, 1:].clamp(max=1)
    packed = both(gate_up, down)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(co.mixed_moe(x, *packed, ids, w, "relu", **options))
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_grouped_product_has_the_references_bits(options: dict[str, Any], gated: bool) -> None:
    given = weights(4, 70, 96)
    random = torch.Generator().manual_seed(5)
    routing = co.route(torch.randint(-1, 4, (7, 3), generator=random), 4)
    x, bias = torch.randn(7, 96, generator=random), torch.randn(4, 70, generator=random)
    found = co.grouped_gemm(
        x, co.reorder_experts(given, gated), routing, bias, out_dtype=torch.float16, **options
    )
    expected = reference_experts.grouped_gemm(
        x[routing.order.long() // 3],
        routing.offsets.diff().tolist(),
        70,
        lambda e, rows: reference.mixed_gemm(
            rows, given[e], bias=bias[e], out_dtype=torch.float16, **options
        ),
        torch.float16,
    )
    assert_specified(found, expected, options)


def test_many_rows_of_bfloat16_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "cpu_multiplies_bfloat16", lambda: True)
    given = weights(3, 70, 96, bits=8)
    ids = torch.tensor([1, 2]).repeat(20, 1)
    ids[15:, 1] = 0  # 20, 15 and 5 rows
    x = torch.randn(20, 96, generator=torch.Generator().manual_seed(5)).bfloat16()
    rows, multiply = [], gemm.mixed_gemm

    def product(x: Tensor, *args: Any, **options: Any) -> Tensor:
        rows.append(x.shape[0])
        return multiply(x, *args, **options)

    monkeypatch.setattr(gemm, "mixed_gemm", product)
    routing = co.route(ids, 3)
    found = co.grouped_gemm(x, co.reorder_experts(given), routing)
    # AMX's kernel takes them with the others.
    assert rows == ([] if _C.cpu_kernel() == "cpu_amx_int8" else [20])
    expected = torch.cat(
        [
            reference.mixed_gemm(x[routing.order[begin:end].long() // 2], qw).double()
            for qw, begin, end in zip(
                given, routing.offsets.tolist(), routing.offsets[1:].tolist(), strict=False
            )
        ]
    )
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2e-2)
