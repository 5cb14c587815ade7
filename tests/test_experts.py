"""Mixture of experts: routing and products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from expert_cases import FORMATS, both, check, problem, weights
from torch import Tensor
from torch.nn import functional as F

import cutlass_ops as co
from cutlass_ops import _C, reference
from cutlass_ops.ops import experts as experts_module
from cutlass_ops.ops import native


def oracle(
    x: Tensor,
    gate_up: Sequence[co.QuantizedWeight],
    down: Sequence[co.QuantizedWeight],
    ids: Tensor,
    topk_weights: Tensor,
    activation: Callable[[Tensor], Tensor] = F.silu,
    expert_map: Tensor | None = None,
) -> Tensor:
    """The formula in fp64, token by token; only act(gate) * up is rounded to x's dtype, and values
    of a weight where the kernel of an expert's rows rounds them.
    """
    if expert_map is not None:
        ids = torch.where(ids < 0, ids, expert_map[ids.clamp(min=0).long()])
    rows = torch.bincount(ids[ids >= 0].flatten(), minlength=len(gate_up)).tolist()

    def values(qws: Sequence[co.QuantizedWeight]) -> list[Tensor]:
        rounds = [
            _C.cpu_rounds_weight(co.reorder(q).native, count, native.DATA_TYPES[x.dtype], False)
            for q, count in zip(qws, rows, strict=True)
        ]
        return [
            co.dequantize(q, x.dtype if rounded else torch.float32).double()
            for q, rounded in zip(qws, rounds, strict=True)
        ]

    first, second = values(gate_up), values(down)
    result = torch.zeros(x.shape[0], down[0].n, dtype=torch.float64)
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            if e < 0:
                continue
            gate, up = (x[t].double() @ first[e].t()).chunk(2)
            hidden = (activation(gate) * up).to(x.dtype).double()
            result[t] += float(topk_weights[t, j]) * (hidden @ second[e].t())
    return result


# ---- routing


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint32])
def test_a_routing_sorts_stably_with_no_expert_last(dtype: torch.dtype) -> None:
    ids = [[2, 0], [1, 2], [2, 2]] if not dtype.is_signed else [[2, -1], [0, 2], [-1, 0]]
    routing = co.route(torch.tensor(ids).to(dtype), 4)
    if dtype.is_signed:
        assert routing.order.tolist() == [2, 5, 0, 3, 1, 4]
        assert routing.offsets.tolist() == [0, 2, 2, 4, 4]
    else:
        assert routing.order.tolist() == [1, 2, 0, 3, 4, 5]
        assert routing.offsets.tolist() == [0, 1, 2, 6, 6]
    assert routing.order.dtype == routing.offsets.dtype == torch.int32
    assert routing.top == 2


def test_a_routing_of_many_tokens() -> None:
    ids = torch.randint(-1, 300, (4097, 8), generator=torch.Generator().manual_seed(0))
    routing = co.route(ids, 300)
    flat = ids.reshape(-1)
    expected = [p for e in range(300) for p in (flat == e).nonzero().flatten().tolist()]
    assert routing.order.tolist() == expected + (flat == -1).nonzero().flatten().tolist()
    assert routing.offsets.diff().tolist() == [int((flat == e).sum()) for e in range(300)]


def test_an_expert_map_renames_and_leaves_out() -> None:
    expert_map = torch.tensor([-1, 1, -1, 0], dtype=torch.int32)
    routing = co.route(torch.tensor([[0, 1], [3, 2], [-1, 3]]), 2, expert_map)
    assert routing.order.tolist() == [2, 5, 1, 0, 3, 4]
    assert routing.offsets.tolist() == [0, 2, 3]


def test_a_routing_without_tokens() -> None:
    for shape in ((0, 8), (3, 0)):
        routing = co.route(torch.empty(shape, dtype=torch.int64), 3)
        assert routing.offsets.tolist() == [0, 0, 0, 0]
        assert len(routing.order) == 0


def test_invalid_ids_are_refused() -> None:
    for ids, experts, expert_map, message in (
        ([[4]], 4, None, "topk_ids holds 4; -1 to 3 are expected"),
        ([[-2]], 4, None, "topk_ids holds -2; -1 to 3"),
        ([[2]], 1, [0, -1], "topk_ids holds 2; -1 to 1"),
        ([[0]], 1, [1], "expert_map holds 1; -1 to 0"),
        ([0], 4, None, r"topk_ids has shape \(1,\)"),
        ([[0]], 0, None, "num_experts is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            co.route(
                torch.tensor(ids), experts, None if expert_map is None else torch.tensor(expert_map)
            )
    with pytest.raises(ValueError, match="expert_map has no elements"):
        co.route(torch.tensor([[-1]]), 4, torch.tensor([], dtype=torch.int32))
    with pytest.raises(TypeError, match="topk_ids has dtype float32"):
        co.route(torch.zeros(1, 1), 4)
    with pytest.raises(TypeError, match="topk_ids has dtype bool"):
        co.route(torch.zeros(1, 1, dtype=torch.bool), 4)
    with pytest.raises(TypeError, match="expert_map is a list"):
        co.route(torch.zeros(1, 1, dtype=torch.int32), 4, cast(Any, [0]))


# ---- products


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_of_experts(kind: str, dtype: torch.dtype) -> None:
    gate_up, down, x, ids, w = problem(17, 3, dtype=dtype, **FORMATS[kind])
    if kind == "nf4":  # the values of a code book are rounded to x's dtype
        gate_up, down = (
            [replace(q, book=q.book.to(dtype).float()) for q in qs] for qs in (gate_up, down)
        )
    found = co.mixed_moe(x, *both(gate_up, down), ids, w)
    assert found.dtype == dtype
    check(found, oracle(x, gate_up, down, ids, w))


@pytest.mark.parametrize(("m", "top"), [(0, 2), (1, 1), (3, 8), (129, 2), (4, 0)])
def test_any_number_of_tokens(m: int, top: int) -> None:
    gate_up, down, x, ids, w = problem(m, top)
    found = co.mixed_moe(x, *both(gate_up, down), ids, w)
    assert found.shape == (m, 96)
    check(found, oracle(x, gate_up, down, ids, w))


@pytest.mark.parametrize("activation", [None, *reference.ACTIVATIONS, ("clamp", -0.25, 0.5)])
def test_activations_of_gate(activation: Any) -> None:
    gate_up, down, x, ids, w = problem(9, 2)
    found = co.mixed_moe(x, *both(gate_up, down), ids, w, activation)
    check(
        found, oracle(x, gate_up, down, ids, w, partial(reference.activate, activation=activation))
    )


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """As gpt-oss has it."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def test_biases_and_the_clamped_activation_of_gate_and_up() -> None:
    random = torch.Generator().manual_seed(0)
    gate_up, down, x, ids, w = problem(9, 3)
    gate_up = [replace(q, bias=torch.randn(80, generator=random)) for q in gate_up]
    down = [replace(q, bias=torch.randn(96, generator=random)) for q in down]
    x.requires_grad_()
    found = co.mixed_moe(x, *both(gate_up, down), ids, w, ("clamped_swiglu", 1.702, 0.5))
    exact = x.detach().double().requires_grad_()
    rows = []
    for t in range(9):
        total = torch.zeros(96, dtype=torch.float64)
        for j in range(3):
            if (e := int(ids[t, j])) >= 0:
                first, second = (
                    co.dequantize(qs[e], torch.float32).double() for qs in (gate_up, down)
                )
                gate, up = (exact[t] @ first.t() + gate_up[e].bias).chunk(2)
                hidden = clamped_swiglu(gate, up, 1.702, 0.5)
                total = total + w[t, j].double() * (hidden @ second.t() + down[e].bias)
        rows.append(total)
    expected = torch.stack(rows)
    check(found.detach(), expected.detach())
    found.square().sum().backward()
    expected.square().sum().backward()
    assert x.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "numbers", [(torch.nan, 7.0), (torch.inf, 7.0), (1.7, 0.0), (1.7, -1.0), (1.7, torch.nan)]
)
def test_invalid_numbers_of_the_clamped_activation_are_refused(
    numbers: tuple[float, float],
) -> None:
    gate_up, down, x, ids, w = problem(2, 1)
    with pytest.raises(ValueError, match="clamped_swiglu takes a finite alpha and a limit above 0"):
        co.mixed_moe(x, *both(gate_up, down), ids, w, ("clamped_swiglu", *numbers))


def test_the_clamped_activation_is_of_experts_alone() -> None:
    packed = co.reorder_experts(weights(2, 64, 96))
    x, activation = torch.ones(3, 96), ("clamped_swiglu", 1.7, 7.0)
    with pytest.raises(ValueError, match="activation is"):
        co.mixed_gemm(x, packed.expert(0), activation=activation)
    with pytest.raises(ValueError, match="activation is"):
        co.grouped_gemm(
            x, packed, co.route(torch.zeros(3, 1, dtype=torch.int64), 2), activation=activation
        )


def test_integers_are_exact_and_experts_are_added_in_order() -> None:
    """With activation None, powers of two as scales and small integers, every sum but the
    weighted one is exact.
    """
    random = torch.Generator().manual_seed(0)

    def integers(n: int, k: int) -> co.QuantizedWeight:
        codes = torch.randint(7, 10, (n, k), generator=random, dtype=torch.uint8)
        return co.QuantizedWeight(codes, torch.ones(n, 1), bits=4, group_size=-1)

    gate_up, down = [integers(24, 33) for _ in range(4)], [integers(33, 12) for _ in range(4)]
    x = torch.randint(-2, 3, (6, 33), generator=random).float()
    ids = torch.tensor([[3, 0, 1], [0, 3, 2], [1, 1, 1], [-1, 2, 0], [2, -1, -1], [-1, -1, -1]])
    w = torch.rand(6, 3, generator=random)
    w[3, 0] = w[5, 2] = torch.nan  # of no expert
    found = co.mixed_moe(x, *both(gate_up, down), ids, w, None)
    for t in range(6):
        total = torch.zeros(33)
        for j in range(3):
            if (e := int(ids[t, j])) >= 0:
                gate, up = (x[t] @ co.dequantize(gate_up[e], torch.float32).t()).chunk(2)
                total = total + w[t, j] * ((gate * up) @ co.dequantize(down[e], torch.float32).t())
        assert torch.equal(found[t], total)


@pytest.mark.parametrize("act_quant", ["token", "block"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantised_activations(act_quant: str, symmetric: bool) -> None:
    gate_up, down, x, ids, w = problem(11, 2, hidden=160, intermediate=72)
    found = co.mixed_moe(x, *both(gate_up, down), ids, w, "silu", act_quant, symmetric)
    expected = torch.zeros(11, 160)
    for t in range(11):
        for j in range(2):
            if (e := int(ids[t, j])) >= 0:
                first, second = co.reorder(gate_up[e]), co.reorder(down[e])
                gate, up = co.mixed_gemm(
                    x[t : t + 1], first, None, None, act_quant, symmetric
                ).chunk(2, dim=-1)
                expected[t] += (
                    w[t, j]
                    * co.mixed_gemm(F.silu(gate) * up, second, None, None, act_quant, symmetric)[0]
                )
    check(found, expected.double())
    exact = oracle(x, gate_up, down, ids, w)
    # that they are quantised, and well
    assert 1e-4 < float((found - exact).norm() / exact.norm()) < 0.03


def test_an_expert_map_of_a_layer() -> None:
    gate_up, down, x, ids, w = problem(9, 3, experts=3)
    ids, expert_map = ids * 2, torch.tensor([1, -1, 2, -1, 0, -1])
    ids[ids < 0] = -1
    found = co.mixed_moe(x, *both(gate_up, down), ids.int(), w, expert_map=expert_map)
    check(found, oracle(x, gate_up, down, ids, w, expert_map=expert_map))


def test_formats_may_differ_and_experts_may_have_act_orders() -> None:
    random = torch.Generator().manual_seed(3)
    gate_up, _, x, ids, w = problem(9, 3)
    gate_up = [
        replace(
            q, perm=torch.randperm(96, generator=random), bias=torch.randn(80, generator=random)
        )
        for q in gate_up
    ]
    down = weights(5, 96, 40, 2, bits=8, group_size=-1)
    found = co.mixed_moe(x, *both(gate_up, down), ids, w)
    expected = torch.zeros(9, 96)
    for t in range(9):
        for j in range(3):
            if (e := int(ids[t, j])) >= 0:
                gate, up = co.mixed_gemm(x[t : t + 1], co.reorder(gate_up[e])).chunk(2, dim=-1)
                expected[t] += w[t, j] * co.mixed_gemm(F.silu(gate) * up, co.reorder(down[e]))[0]
    check(found, expected.double())


def test_a_nan_stays_in_its_row() -> None:
    gate_up, down, x, ids, w = problem(6, 2)
    ids = ids.clamp(min=0)
    clean = co.mixed_moe(x, *both(gate_up, down), ids, w)
    x[2, 5] = torch.inf
    found = co.mixed_moe(x, *both(gate_up, down), ids, w)
    assert bool(found[2].isnan().all())
    rest = [0, 1, 3, 4, 5]
    torch.testing.assert_close(found[rest], clean[rest])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
def test_a_grouped_product(gathered: bool, gated: bool) -> None:
    given = weights(4, 70, 96)
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(-1, 4, (7, 3), generator=random)
    routing = co.route(ids, 4)
    x, bias = torch.randn(7, 96, generator=random), torch.randn(4, 70, generator=random)
    rows = x[routing.order.long() // 3] if gathered else x
    packed = co.reorder_experts(given, gated)
    found = co.grouped_gemm(
        rows, packed, routing, bias, "relu", out_dtype=torch.float16, gathered=gathered
    )
    assert found.shape == (21, 70)
    assert found.dtype == torch.float16
    for i, p in enumerate(routing.order.tolist()):
        e = int(ids[p // 3, p % 3])
        expected = torch.zeros(70)
        if e >= 0:
            expected = F.relu(x[p // 3] @ co.dequantize(given[e], torch.float32).t() + bias[e])
        check(found[i], expected.double())
    # top 1 of other lengths: neither reading of x fits
    with pytest.raises(ValueError, match="x has 6 rows"):
        co.grouped_gemm(x[:6], packed, routing, gathered=gathered)


def test_arguments_that_do_not_fit_are_refused() -> None:
    gate_up_weights, down_weights, x, ids, w = problem(4, 2)
    gate_up, down = both(gate_up_weights, down_weights)
    good = {"x": x, "gate_up": gate_up, "down": down, "topk_ids": ids, "topk_weights": w}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"x": x[:, :-1]}, ValueError, r"x has shape \(4, 95\); \[M, 96\] is expected"),
        ({"x": x[None]}, ValueError, r"x has shape \(1, 4, 96\)"),
        ({"x": x.double()}, TypeError, "x has dtype float64"),
        ({"gate_up": gate_up.weight}, TypeError, "gate_up is a PackedWeight"),
        ({"down": gate_up}, ValueError, r"gate_up is \[5, 80, 96\] on cpu and down \[5, 80, 96\]"),
        ({"topk_ids": ids.float()}, TypeError, "topk_ids has dtype float32"),
        ({"topk_ids": ids[:3]}, ValueError, r"topk_ids has shape \(3, 2\); \(4, 2\) is expected"),
        ({"topk_ids": ids + 5}, ValueError, "topk_ids holds"),
        ({"topk_weights": w[:, :1]}, ValueError, r"topk_weights has shape \(4, 1\); \(4, 2\)"),
        ({"topk_weights": w.long()}, TypeError, "topk_weights is int64"),
        ({"activation": "tanh"}, ValueError, "activation is 'tanh'"),
        ({"act_quant": "row"}, ValueError, "act_quant is 'row'"),
        ({"expert_map": torch.zeros(5)}, TypeError, "expert_map has dtype float32"),
    ]
    for change, error, message in cases:
        with pytest.raises(error, match=message):
            co.mixed_moe(**{**good, **change})
    book = co.reorder_experts(weights(5, 80, 96, bits=4, group_size=32, book="nf4"))
    with pytest.raises(ValueError, match="act_quant is 'block'"):
        co.mixed_moe(x, book, down, ids, w, act_quant="block")
    routing = co.route(ids, 5)
    for change, error, message in (
        ({"routing": co.route(ids, 6)}, ValueError, "routing is for 6 experts; there are 5"),
        ({"routing": tuple(routing)}, TypeError, "routing is a tuple"),
        ({"bias": torch.zeros(80)}, ValueError, r"bias has shape \(80,\); \(5, 80\)"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype is torch.int8"),
    ):
        with pytest.raises(error, match=message):
            co.grouped_gemm(**{"x": x, "experts": gate_up, "routing": routing, **change})


def test_gradients_of_x_and_of_the_weights_of_experts() -> None:
    gate_up, down, x, ids, w = problem(5, 2)
    x.requires_grad_()
    w.requires_grad_()
    y = co.mixed_moe(x, *both(gate_up, down), ids, w)
    y.square().sum().backward()
    x2, w2 = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    rows = []
    for t in range(5):
        total = torch.zeros(96)
        for j in range(2):
            if (e := int(ids[t, j])) >= 0:
                gate, up = (x2[t] @ co.dequantize(gate_up[e], torch.float32).t()).chunk(2)
                total = total + w2[t, j] * (
                    (F.silu(gate) * up) @ co.dequantize(down[e], torch.float32).t()
                )
        rows.append(total)
    torch.stack(rows).square().sum().backward()
    assert x.grad is not None
    assert x2.grad is not None
    assert w.grad is not None
    assert w2.grad is not None
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w.grad, w2.grad, rtol=1e-4, atol=1e-5)


def test_gradients_that_do_not_exist_are_refused() -> None:
    gate_up_weights, down_weights, x, ids, w = problem(4, 2)
    gate_up, down = both(gate_up_weights, down_weights)
    with pytest.raises(RuntimeError, match="neither forward-mode"):
        torch.func.jvp(lambda x: co.mixed_moe(x, gate_up, down, ids, w), (x,), (x,))
    gate_up.weight.scales.requires_grad_()
    with pytest.raises(RuntimeError, match="scales of the packed weight requires a gradient"):
        co.mixed_moe(x, gate_up, down, ids, w)


def test_the_operators_are_traced_whole() -> None:
    gate_up_weights, down_weights, x, ids, w = problem(4, 2)
    gate_up, down = both(gate_up_weights, down_weights)

    def layer(x: Tensor, ids: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        routing = co.route(ids, 5)
        return co.mixed_moe(x, gate_up, down, ids, w, "gelu"), co.grouped_gemm(
            x, gate_up, routing, activation=("clamp", 0, 1)
        )

    def clamped(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return co.mixed_moe(x, gate_up, down, ids, w, ("clamped_swiglu", 1.7, 0.5))

    found = torch.compile(clamped, backend="aot_eager", fullgraph=True)(x, ids, w)
    assert torch.equal(found, clamped(x, ids, w))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(x, ids, w), layer(x, ids, w), strict=True):
        assert torch.equal(found, expected)
    fields = experts_module._fields
    options = (ids, w, None, "silu", 0.0, 0.0, "none", True, 0)
    torch.library.opcheck(
        torch.ops.cutlass_ops.mixed_moe, (x, *fields(gate_up), *fields(down), *options)
    )
    routing = co.route(ids, 5)
    options_of_grouped = (*routing, False, None, None, 0.0, 0.0, torch.float32, "none", True)
    torch.library.opcheck(
        torch.ops.cutlass_ops.grouped_gemm, (x, *fields(gate_up), *options_of_grouped)
    )
    with pytest.raises(Exception, match="gradient in eager calls only"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x.requires_grad_(), ids, w)
