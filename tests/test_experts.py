"""Mixture of experts: packing, routing, products, their files, and the module."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from imports import import_or_skip
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

import cutlass_ops as co
from cutlass_ops.cli import app
from cutlass_ops.files.packed_file import packed_info
from cutlass_ops.files.verify import diff_packed, verify_packed
from cutlass_ops.ops import experts as experts_module
from cutlass_ops.weights import formats
from cutlass_ops.weights.packed_experts import in_eights
from cutlass_ops.weights.weight import rows_of

FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"bits": 4, "group_size": 32, "symmetric": True},
    "int4 with zero points": {"bits": 4, "group_size": 128, "symmetric": False},
    "int8": {"bits": 8, "group_size": -1, "symmetric": True},
    "nf4": {"bits": 4, "group_size": 64, "book": "nf4"},
}


def weights(experts: int, n: int, k: int, seed: int = 0, **options: Any) -> list[co.QuantizedWeight]:
    random = torch.Generator().manual_seed(seed)
    options = options or FORMATS["int4"]
    return [co.quantize(torch.randn(n, k, generator=random) / k**0.5, **options) for _ in range(experts)]


def both(gate_up: list[co.QuantizedWeight], down: list[co.QuantizedWeight]) -> tuple[co.PackedExperts, co.PackedExperts]:
    """What mixed_moe takes."""
    return co.reorder_experts(gate_up, gated=True), co.reorder_experts(down)


def same(a: co.QuantizedWeight, b: co.QuantizedWeight) -> bool:
    parts = ("codes", "scales", "zeros", "offsets", "bias", "perm", "book")
    pairs = [(getattr(a, part), getattr(b, part)) for part in parts]
    return (a.bits, a.group_size) == (b.bits, b.group_size) and all(
        (x is None and y is None) or (x is not None and y is not None and x.dtype == y.dtype and torch.equal(x, y))
        for x, y in pairs
    )


def oracle(
    x: Tensor,
    gate_up: Sequence[co.QuantizedWeight],
    down: Sequence[co.QuantizedWeight],
    ids: Tensor,
    topk_weights: Tensor,
    activation: Callable[[Tensor], Tensor] = F.silu,
    expert_map: Tensor | None = None,
) -> Tensor:
    """The formula in fp64, token by token; only act(gate) * up is rounded to x's dtype."""
    result = torch.zeros(x.shape[0], down[0].n, dtype=torch.float64)
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            e = e if expert_map is None or e < 0 else int(expert_map[e])
            if e < 0:
                continue
            first, second = co.dequantize(gate_up[e], torch.float32).double(), co.dequantize(down[e], torch.float32).double()
            gate, up = (x[t].double() @ first.t()).chunk(2)
            hidden = (activation(gate) * up).to(x.dtype).double()
            result[t] += float(topk_weights[t, j]) * (hidden @ second.t())
    return result


def check(found: Tensor, expected: Tensor) -> None:
    rms = float(expected.square().mean().sqrt())
    # A rounding of act(gate) * up to 16 bits may fall to the other side in fp64.
    relative, absolute = {torch.float32: (0, 1e-5), torch.bfloat16: (2**-8, 2e-3), torch.float16: (2**-10, 6e-4)}[found.dtype]
    assert bool(((found.double() - expected).abs() <= relative * expected.abs() + absolute * rms + 1e-30).all())


# ---- packing


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("experts", "n", "k"), [(1, 64, 128), (3, 70, 96), (5, 128, 576)])
def test_experts_unpack_to_what_they_were(kind: str, experts: int, n: int, k: int, gated: bool) -> None:
    given = weights(experts, n, k, **FORMATS[kind])
    packed = co.reorder_experts(given, gated)
    assert packed.shape == (experts, n, k)
    assert packed.weight.shape == (experts * formats.padded_rows(n), k)
    assert packed.gated == packed.to("meta").gated == copy.deepcopy(packed).gated == gated
    assert all(map(same, packed.unpack(), given))
    # Eight rows of gate, the eight of up for the same features, and so on; fewer at the end.
    half = n // 2
    eights = [(part + first, part + min(first + 8, half)) for first in range(0, half, 8) for part in (0, half)]
    order = [row for begin, end in eights for row in range(begin, end)]
    for e, weight in enumerate(given):
        alone, view = co.reorder(rows_of(weight, torch.tensor(order)) if gated else weight), packed.expert(e)
        assert {part: t.tolist() for part, t in view.tensors().items()} == {
            part: t.tolist() for part, t in alone.tensors().items()
        }
        assert view.codes.untyped_storage().data_ptr() == packed.weight.codes.untyped_storage().data_ptr()


def test_a_bias_an_act_order_and_offsets_are_each_experts_own() -> None:
    random = torch.Generator().manual_seed(0)
    given = [
        replace(
            weight,
            bias=torch.randn(70, generator=random),
            perm=torch.randperm(96, generator=random),
            offsets=torch.randn(70, 3, generator=random).half(),
        )
        for weight in weights(3, 70, 96)
    ]
    packed = co.reorder_experts(given)
    assert packed.perm is not None
    assert packed.perm.shape == (3, 96)
    assert all(map(same, packed.unpack(), given))
    assert packed.to("cpu") is packed
    on_meta = packed.to("meta")
    assert on_meta.shape == packed.shape
    assert on_meta.perm is not None
    assert on_meta.perm.is_meta
    copied = copy.deepcopy(packed)
    assert all(map(same, copied.unpack(), given))


def test_rows_of_gate_and_up_are_packed_for_a_layer() -> None:
    gate_up, down, x, ids, w = problem(4, 2)
    experts = co.reorder_experts(gate_up, gated=True), co.reorder_experts(down, gated=True)
    with pytest.raises(ValueError, match="down was packed with gated=True"):
        co.mixed_moe(x, *experts, ids, w)
    with pytest.raises(ValueError, match="down was packed with gated=True"):
        co.nn.MixedExperts(*experts)
    with pytest.raises(ValueError, match=r"weights\[0\] is \[35, 96\]; as many rows of gate as of up are expected"):
        co.reorder_experts(weights(2, 35, 96), gated=True)
    with pytest.raises(ValueError, match="n is 35; an even number is expected"):
        co.PackedExperts(co.reorder(weights(1, 64, 96)[0]), 1, 35, gated=True)


def assert_same_tensors(found: co.PackedExperts, expected: co.PackedExperts) -> None:
    assert (found.shape, found.gated) == (expected.shape, expected.gated)
    assert found.tensors().keys() == expected.tensors().keys()
    for part, tensor in expected.tensors().items():
        assert found.tensors()[part].dtype == tensor.dtype
        assert torch.equal(found.tensors()[part], tensor), part


@pytest.mark.parametrize(("n", "k"), [(64, 128), (70, 96), (256, 200)])
@pytest.mark.parametrize("kind", [*FORMATS, "everything"])
def test_plain_rows_of_gate_and_up_are_brought_into_eights(kind: str, n: int, k: int) -> None:
    given = weights(3, n, k, **FORMATS.get(kind, {}))
    if kind == "everything":
        random = torch.Generator().manual_seed(0)
        terms = {"offsets": torch.randn(n, -(-k // 32), generator=random).half(), "bias": torch.randn(n, generator=random)}
        given = [replace(weight, **terms, perm=torch.randperm(k, generator=random)) for weight in given]
    plain, expected = co.reorder_experts(given), co.reorder_experts(given, gated=True)
    assert_same_tensors(in_eights(plain), expected)
    assert_same_tensors(plain, co.reorder_experts(given))
    on_meta = in_eights(plain.to("meta"))
    assert on_meta.gated
    assert on_meta.weight.codes.is_meta


def plain_layer() -> tuple[co.PackedExperts, tuple[Any, ...], Tensor]:
    """gate_up without ``gated``, the other arguments of mixed_moe (x first), and its result."""
    gate_up, down, x, ids, w = problem(4, 2)
    packed = both(gate_up, down)
    return co.reorder_experts(gate_up), (x, packed[1], ids, w), co.mixed_moe(x, *packed, ids, w)


def calls(gate_up: co.PackedExperts, x: Tensor, *rest: Any) -> tuple[Tensor, list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        y = co.mixed_moe(x, gate_up, *rest)
    return y, warned


def test_a_layer_of_plain_rows_converts_them_once_and_warns() -> None:
    gate_up, rest, expected = plain_layer()
    with torch.inference_mode():  # what is kept must serve training too
        y, warned = calls(gate_up, *rest)
    assert torch.equal(y, expected)
    (warning,) = warned
    assert warning.category is UserWarning
    assert warning.filename == __file__
    assert "takes as much memory again, and host time at every call; reorder_experts(..., gated=True) avoids it" in str(
        warning.message
    )
    other = co.PackedExperts(gate_up.weight, gate_up.experts, gate_up.n)  # of the same tensors
    for same_weight in (gate_up, other):
        y, warned = calls(same_weight, rest[0].clone().requires_grad_(), *rest[1:])
        assert (torch.equal(y, expected), warned) == (True, [])
        y.sum().backward()
    gate_up.weight.scales.mul_(2)  # another weight from now on
    doubled = co.reorder_experts(gate_up.unpack(), gated=True)
    assert torch.equal(calls(gate_up, *rest)[0], co.mixed_moe(rest[0], doubled, *rest[1:]))


def test_plain_rows_of_inference_tensors_are_converted_at_every_call() -> None:
    _, rest, expected = plain_layer()
    with torch.inference_mode():
        gate_up = co.reorder_experts(problem(4, 2)[0])
    for _ in range(2):
        y, (warning,) = calls(gate_up, *rest)
        assert torch.equal(y, expected)
        assert "at every call, as torch records no changes of inference tensors" in str(warning.message)


HINT = r"not while a CUDA graph is captured or under torch.compile; reorder_experts\(gate_up.unpack\(\), gated=True\) packs it"


def test_plain_rows_are_not_converted_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, rest, expected = plain_layer()
    with monkeypatch.context() as patch:
        patch.setattr("cutlass_ops.ops.kept.captures", lambda _: True)
        with pytest.raises(RuntimeError, match=HINT):
            calls(gate_up, *rest)
    calls(gate_up, *rest)
    monkeypatch.setattr("cutlass_ops.ops.kept.captures", lambda _: True)
    y, warned = calls(gate_up, *rest)
    assert (torch.equal(y, expected), warned) == (True, [])


def test_plain_rows_are_not_converted_under_torch_compile() -> None:
    gate_up, (x, *rest), expected = plain_layer()
    compiled = torch.compile(lambda x: co.mixed_moe(x, gate_up, *rest), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=HINT):
        compiled(x)
    calls(gate_up, x, *rest)
    assert torch.equal(compiled(x), expected)


def test_a_module_holds_plain_rows_in_eights() -> None:
    gate_up, (x, down, ids, w), expected = plain_layer()
    layer = co.nn.MixedExperts(gate_up, down)
    assert torch.equal(layer(x, ids, w), expected)
    assert_same_tensors(layer.gate_up_proj.packed, co.reorder_experts(gate_up.unpack(), gated=True))
    assert layer.state_dict().keys() == co.nn.MixedExperts(layer.gate_up_proj.packed, down).state_dict().keys()


@pytest.mark.parametrize("assign", [False, True])
def test_states_of_earlier_versions_are_loaded(assign: bool) -> None:
    gate_up, (x, down, ids, w), expected = plain_layer()
    layer = co.nn.MixedExperts(gate_up, down)
    state = dict(layer.state_dict())
    for name in ("gate_up_proj", "down_proj"):
        mark = json.loads(bytes(state[name].tolist()))
        del mark["gated"]
        state[name] = torch.tensor(list(json.dumps(mark).encode()), dtype=torch.uint8)
    state |= {f"gate_up_proj.{part}": tensor for part, tensor in gate_up.tensors().items()}
    given = dict(state)
    other = co.nn.MixedExperts(co.reorder_experts(weights(5, 80, 96, 7)), down)
    other.load_state_dict(state, assign=assign)
    assert torch.equal(other(x, ids, w), expected)
    assert state == given


def test_experts_are_packed_one_after_another() -> None:
    held: list[int] = []

    class Lazy(Sequence[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: Any) -> Any:
            held.append(index)
            return weights(1, 64, 128, seed=index)[0]

    packed = co.reorder_experts(Lazy())
    assert held == [0, 1, 2, 3]
    assert same(packed.unpack()[3], weights(1, 64, 128, seed=3)[0])


def test_experts_that_differ_are_refused() -> None:
    first = weights(1, 64, 128)[0]
    for other, message in (
        (
            weights(1, 65, 128)[0],
            r"weights\[1\] and weights\[0\] cannot .*: shape is \[65, 128\] and \[64, 128\]",
        ),
        (weights(1, 64, 128, bits=8, group_size=32)[0], "bits is 8 and 4"),
        (weights(1, 64, 128, bits=4, group_size=64)[0], "group_size is 64 and 32"),
        (replace(first, bias=torch.zeros(64)), "bias is float32 on cpu and None"),
        (replace(first, scales=first.scales * torch.nan), "scales.* is nan"),
    ):
        with pytest.raises(ValueError, match=message):
            co.reorder_experts([first, other])
    nf4, fp4 = weights(1, 64, 128, bits=4, group_size=64, book="nf4") + weights(1, 64, 128, bits=4, group_size=64, book="fp4")
    with pytest.raises(ValueError, match="code books differ"):
        co.reorder_experts([nf4, fp4])
    with pytest.raises(ValueError, match="no weight is given"):
        co.reorder_experts([])
    with pytest.raises(TypeError, match="weights is a QuantizedWeight"):
        co.reorder_experts(cast(Any, first))
    with pytest.raises(TypeError, match=r"weights\[1\] is a Tensor"):
        co.reorder_experts([first, cast(Any, torch.zeros(64, 128))])
    packed = co.reorder_experts([first, first])
    with pytest.raises(ValueError, match="the weight has 128 rows; 3 experts of 64 features"):
        co.PackedExperts(packed.weight, 3, 64)
    with pytest.raises(IndexError, match="expert 2 of 2"):
        packed.expert(2)


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


def test_a_routing_of_many() -> None:
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


def test_a_routing_of_nothing() -> None:
    for shape in ((0, 8), (3, 0)):
        routing = co.route(torch.empty(shape, dtype=torch.int64), 3)
        assert routing.offsets.tolist() == [0, 0, 0, 0]
        assert len(routing.order) == 0


def test_ids_that_mean_nothing_are_refused() -> None:
    for ids, experts, expert_map, message in (
        ([[4]], 4, None, "topk_ids holds 4; -1 to 3 are expected"),
        ([[-2]], 4, None, "topk_ids holds -2; -1 to 3"),
        ([[2]], 1, [0, -1], "topk_ids holds 2; -1 to 1"),
        ([[0]], 1, [1], "expert_map holds 1; -1 to 0"),
        ([0], 4, None, r"topk_ids has shape \(1,\)"),
        ([[0]], 0, None, "num_experts is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            co.route(torch.tensor(ids), experts, None if expert_map is None else torch.tensor(expert_map))
    with pytest.raises(ValueError, match="expert_map has no elements"):
        co.route(torch.tensor([[-1]]), 4, torch.tensor([], dtype=torch.int32))
    with pytest.raises(TypeError, match="topk_ids has dtype float32"):
        co.route(torch.zeros(1, 1), 4)
    with pytest.raises(TypeError, match="topk_ids has dtype bool"):
        co.route(torch.zeros(1, 1, dtype=torch.bool), 4)
    with pytest.raises(TypeError, match="expert_map is a list"):
        co.route(torch.zeros(1, 1, dtype=torch.int32), 4, cast(Any, [0]))


# ---- products


def problem(
    m: int,
    top: int,
    experts: int = 5,
    hidden: int = 96,
    intermediate: int = 40,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[list[co.QuantizedWeight], list[co.QuantizedWeight], Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(m)
    gate_up = weights(experts, 2 * intermediate, hidden, 1, **options)
    down = weights(experts, hidden, intermediate, 2, **options)
    x = torch.randn(m, hidden, generator=random).to(dtype)
    ids = torch.randint(-1, experts, (m, top), generator=random)
    return gate_up, down, x, ids, torch.rand(m, top, generator=random)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_of_experts(kind: str, dtype: torch.dtype) -> None:
    gate_up, down, x, ids, w = problem(17, 3, dtype=dtype, **FORMATS[kind])
    if kind == "nf4":  # the values of a code book are rounded to x's dtype
        gate_up, down = ([replace(q, book=q.book.to(dtype).float()) for q in qs] for qs in (gate_up, down))  # type: ignore[union-attr]
    found = co.mixed_moe(x, *both(gate_up, down), ids, w)
    assert found.dtype == dtype
    check(found, oracle(x, gate_up, down, ids, w))


@pytest.mark.parametrize(("m", "top"), [(0, 2), (1, 1), (3, 8), (129, 2), (4, 0)])
def test_any_number_of_tokens(m: int, top: int) -> None:
    gate_up, down, x, ids, w = problem(m, top)
    found = co.mixed_moe(x, *both(gate_up, down), ids, w)
    assert found.shape == (m, 96)
    check(found, oracle(x, gate_up, down, ids, w))


@pytest.mark.parametrize("activation", ["relu", "relu6", "gelu", None, ("clamp", -0.25, 0.5)])
def test_activations_of_gate(activation: Any) -> None:
    functions: dict[Any, Callable[[Tensor], Tensor]] = {"relu": F.relu, "relu6": F.relu6, "gelu": F.gelu, None: lambda y: y}
    function = functions.get(activation, lambda y: y.clamp(-0.25, 0.5))
    gate_up, down, x, ids, w = problem(9, 2)
    found = co.mixed_moe(x, *both(gate_up, down), ids, w, activation)
    check(found, oracle(x, gate_up, down, ids, w, function))


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
                first, second = (co.dequantize(qs[e], torch.float32).double() for qs in (gate_up, down))
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


@pytest.mark.parametrize("numbers", [(torch.nan, 7.0), (torch.inf, 7.0), (1.7, 0.0), (1.7, -1.0), (1.7, torch.nan)])
def test_numbers_of_the_clamped_activation_that_mean_nothing_are_refused(numbers: tuple[float, float]) -> None:
    gate_up, down, x, ids, w = problem(2, 1)
    with pytest.raises(ValueError, match="clamped_swiglu takes a finite alpha and a limit above 0"):
        co.mixed_moe(x, *both(gate_up, down), ids, w, ("clamped_swiglu", *numbers))


def test_the_clamped_activation_is_of_experts_alone() -> None:
    packed = co.reorder_experts(weights(2, 64, 96))
    x, activation = torch.ones(3, 96), ("clamped_swiglu", 1.7, 7.0)
    with pytest.raises(ValueError, match="activation is"):
        co.mixed_gemm(x, packed.expert(0), activation=activation)
    with pytest.raises(ValueError, match="activation is"):
        co.grouped_gemm(x, packed, co.route(torch.zeros(3, 1, dtype=torch.int64), 2), activation=activation)


def test_integers_are_exact_and_experts_are_added_in_order() -> None:
    """With activation None, powers of two as scales and small integers, every sum but the weighted one is exact."""
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
                gate, up = co.mixed_gemm(x[t : t + 1], first, None, None, act_quant, symmetric).chunk(2, dim=-1)
                expected[t] += w[t, j] * co.mixed_gemm(F.silu(gate) * up, second, None, None, act_quant, symmetric)[0]
    check(found, expected.double())
    exact = oracle(x, gate_up, down, ids, w)
    assert 1e-4 < float((found - exact).norm() / exact.norm()) < 0.03  # that they are quantised, and well


def test_an_expert_map_of_a_layer() -> None:
    gate_up, down, x, ids, w = problem(9, 3, experts=3)
    ids, expert_map = ids * 2, torch.tensor([1, -1, 2, -1, 0, -1])
    ids[ids < 0] = -1
    found = co.mixed_moe(x, *both(gate_up, down), ids.int(), w, expert_map=expert_map)
    check(found, oracle(x, gate_up, down, ids, w, expert_map=expert_map))


def test_formats_may_differ_and_experts_may_have_act_orders() -> None:
    random = torch.Generator().manual_seed(3)
    gate_up, _, x, ids, w = problem(9, 3)
    gate_up = [replace(q, perm=torch.randperm(96, generator=random), bias=torch.randn(80, generator=random)) for q in gate_up]
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
    found = co.grouped_gemm(rows, packed, routing, bias, "relu", out_dtype=torch.float16, gathered=gathered)
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
                total = total + w2[t, j] * ((F.silu(gate) * up) @ co.dequantize(down[e], torch.float32).t())
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
        return co.mixed_moe(x, gate_up, down, ids, w, "gelu"), co.grouped_gemm(x, gate_up, routing, activation=("clamp", 0, 1))

    def clamped(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return co.mixed_moe(x, gate_up, down, ids, w, ("clamped_swiglu", 1.7, 0.5))

    found = torch.compile(clamped, backend="aot_eager", fullgraph=True)(x, ids, w)
    assert torch.equal(found, clamped(x, ids, w))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(x, ids, w), layer(x, ids, w), strict=True):
        assert torch.equal(found, expected)
    fields = experts_module._fields
    options = (ids, w, "silu", 0.0, 0.0, "none", True, None)
    torch.library.opcheck(torch.ops.cutlass_ops.mixed_moe, (x, *fields(gate_up), *fields(down), *options))
    routing = co.route(ids, 5)
    options_of_grouped = (*routing, None, None, 0.0, 0.0, "none", True, torch.float32, False)
    torch.library.opcheck(torch.ops.cutlass_ops.grouped_gemm, (x, *fields(gate_up), *options_of_grouped))
    with pytest.raises(Exception, match="gradient in eager calls only"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x.requires_grad_(), ids, w)


# ---- files


@pytest.mark.parametrize("gated", [False, True])
def test_experts_in_a_file(tmp_path: Path, gated: bool) -> None:
    random = torch.Generator().manual_seed(0)
    given = [replace(w, bias=torch.randn(70, generator=random), perm=torch.randperm(96)) for w in weights(3, 70, 96)]
    linear = co.reorder(given[0])
    stored = {"a.experts": co.reorder_experts(given, gated), "b": linear, "c": torch.ones(3)}
    co.save_packed(tmp_path / "m.safetensors", stored)
    loaded = co.load_packed(tmp_path / "m.safetensors")
    experts = loaded["a.experts"]
    assert isinstance(experts, co.PackedExperts)
    assert experts.gated == gated
    assert packed_info(tmp_path / "m.safetensors").layout[1] == ("3" if gated else "2")
    assert isinstance(loaded["b"], co.PackedWeight)
    assert all(map(same, experts.unpack(), given))
    found = verify_packed(tmp_path / "m.safetensors")
    assert (found.problems, found.weights, found.tensors) == ([], 2, 1)
    other = co.reorder_experts([given[0], given[2], given[2]], gated)
    co.save_packed(tmp_path / "n.safetensors", {**stored, "a.experts": other})
    assert diff_packed(tmp_path / "m.safetensors", tmp_path / "m.safetensors").changed == {}
    changed = diff_packed(tmp_path / "m.safetensors", tmp_path / "n.safetensors").changed
    assert list(changed) == ["a.experts"]
    assert changed["a.experts"]
    assert all("[1] " in text for text in changed["a.experts"])


def test_a_file_that_says_nothing_of_gate_and_up_has_their_rows_in_order(tmp_path: Path) -> None:
    given, path = weights(2, 64, 96), tmp_path / "m.safetensors"
    co.save_packed(path, {"e": co.reorder_experts(given)})
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    facts["experts"] = facts["experts"].replace(', "gated": false', "")
    save_file(load_file(path), path, facts)
    experts = co.load_packed(path)["e"]
    assert isinstance(experts, co.PackedExperts)
    assert not experts.gated
    assert all(map(same, experts.unpack(), given))


def test_experts_of_other_sizes_in_as_many_rows_differ(tmp_path: Path) -> None:
    for name, experts, n, gated in (("a", 3, 128, False), ("b", 6, 64, False), ("c", 3, 127, False), ("d", 3, 128, True)):
        packed = co.PackedExperts(co.reorder(weights(1, 384, 96)[0]), experts, n, gated=gated)
        co.save_packed(tmp_path / f"{name}.safetensors", {"e": packed})
    words = "experts, their rows and whether they are gated are (3, 128, False) and "
    for other, sizes in (("b", "(6, 64, False)"), ("c", "(3, 127, False)"), ("d", "(3, 128, True)")):
        found = diff_packed(tmp_path / "a.safetensors", tmp_path / f"{other}.safetensors")
        assert (found.same, found.changed) == (0, {"e": [words + sizes]})


def test_experts_are_not_compared_with_one_matrix(tmp_path: Path) -> None:
    save_file({"m.weight": torch.randn(64, 128)}, tmp_path / "floats.safetensors")
    co.save_packed(tmp_path / "m.safetensors", {"m": co.reorder_experts(weights(2, 64, 128))})
    found = verify_packed(tmp_path / "m.safetensors", co.load_checkpoint(tmp_path / "floats.safetensors"))
    assert "m: holds 2 experts; the checkpoint has one matrix" in found.problems


def test_a_model_without_experts_is_not_loaded_with_packed_ones(tmp_path: Path) -> None:
    transformers = import_or_skip("transformers")
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=32)
    co.save_packed(
        tmp_path / "m.safetensors", {"model.layers.0.mlp.experts.down_proj": co.reorder_experts(weights(2, 64, 128))}
    )
    with pytest.raises(ValueError, match=r"experts\.down_proj' are packed experts; LlamaForCausalLM has none of that name"):
        co.load_model(tmp_path / "m.safetensors", config=config)


def test_inspect_tells_experts_and_their_rows(tmp_path: Path) -> None:
    co.save_packed(tmp_path / "m.safetensors", {"e": co.reorder_experts(weights(3, 70, 96))})
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "m.safetensors"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["tensors"][0]["shape"] == [3, 70, 96]


def rewritten(path: Path, change: Callable[[dict[str, str], dict[str, Tensor]], None]) -> None:
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(metadata, tensors)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"e": {"experts": 2, "n": 70}}, "'experts' says 2 experts of 70 rows; the weight has 384 rows"),
        ({"e": {"experts": 3, "n": 0}}, "experts and n of at least 1"),
        ({"e": {"experts": True, "n": 384}}, "experts and n of at least 1"),
        ({"e": {"experts": 3, "n": 70, "gated": 1}}, "n even where gated is true"),
        ({"e": {"experts": 6, "n": 63, "gated": True}}, "n even where gated is true"),
        ({"e": [3, 70]}, "experts and n of at least 1"),
        ({"f": {"experts": 3, "n": 70}}, "the weight has no rows"),
        ({"e": {"experts": 6, "n": 64}}, r"e.perm.*has shape \[3, 96\].*make it \[6, 96\]"),
        ({}, r"e.perm.*has shape \[3, 96\].*make it \[96\]"),
    ],
)
def test_a_file_that_lies_of_its_experts_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    path = tmp_path / "m.safetensors"
    co.save_packed(path, {"e": co.reorder_experts([replace(w, perm=torch.randperm(96)) for w in weights(3, 70, 96)])})
    rewritten(path, lambda metadata, _: metadata.update(experts=json.dumps(value)))
    with pytest.raises(co.CheckpointError, match=message):
        co.load_packed(path)


@pytest.mark.parametrize(("row", "padding"), [(0, False), (69, False), (70, True), (127, True), (128, False), (198, True)])
def test_padding_of_a_bias_is_rows_from_n_on(tmp_path: Path, row: int, padding: bool) -> None:
    path = tmp_path / "m.safetensors"
    co.save_packed(path, {"e": co.reorder_experts([replace(w, bias=torch.ones(70)) for w in weights(2, 70, 96)])})

    def change(_: Any, tensors: dict[str, Tensor]) -> None:
        tensors["e.bias"][row] = 3

    rewritten(path, change)
    assert ("e: bias has padding that is not zero" in verify_packed(path).problems) == padding


def test_an_act_order_and_padding_that_are_wrong_are_found(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    given = [replace(w, perm=torch.arange(96), bias=torch.ones(70)) for w in weights(3, 70, 96)]
    co.save_packed(path, {"e": co.reorder_experts(given)})

    def pad(_: Any, tensors: dict[str, Tensor]) -> None:
        tensors["e.bias"][127] = 1

    rewritten(path, pad)
    assert "e: bias has padding that is not zero" in verify_packed(path).problems

    def twice(_: Any, tensors: dict[str, Tensor]) -> None:
        tensors["e.perm"][2, 1] = 0

    rewritten(path, twice)
    with pytest.raises(co.CheckpointError, match=r"is not a permutation of 0 \.\. 95"):
        co.load_packed(path)


# ---- the module


def test_the_module(tmp_path: Path) -> None:
    gate_up, down, x, ids, w = problem(9, 2)
    packed = both(gate_up, down)
    layer = co.nn.MixedExperts(*packed)
    expected = co.mixed_moe(x, *packed, ids, w)
    assert torch.equal(layer(x, ids, w), expected)
    assert torch.equal(layer(x, ids.where(ids >= 0, 5), w), expected)  # transformers' mark of other ranks' experts
    assert (layer.num_experts, layer.hidden_dim, layer.intermediate_dim) == (5, 96, 40)
    assert set(layer.state_dict()) == {
        f"{part}{name}" for part in ("gate_up_proj", "down_proj") for name in (".codes", ".scales", "")
    }
    half = copy.deepcopy(layer).half()
    assert half.gate_up_proj.scales.dtype == torch.float32
    assert torch.equal(half(x, ids, w), expected)
    other = co.nn.MixedExperts(*both(gate_up[::-1], down[::-1]))
    assert not torch.equal(other(x, ids, w), expected)
    other.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(other(x, ids, w), expected)
    layer.gate_up_proj.scales = layer.gate_up_proj.scales * 2
    assert not torch.equal(layer(x, ids, w), expected)
    co.set_activations(layer, "block", False)
    assert (layer.act_quant, layer.act_symmetric) == ("block", False)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x, ids, w), layer(x, ids, w))
    assert "experts=5, out_features=80, in_features=96, bits=4" in str(layer)


def test_modules_that_do_not_fit_are_refused() -> None:
    gate_up, down, *_ = problem(1, 1)
    packed = both(gate_up, down)
    with pytest.raises(ValueError, match=r"gate_up is \[5, 80, 96\] and down \[5, 80, 96\]"):
        co.nn.MixedExperts(packed[0], packed[0])
    with pytest.raises(TypeError, match="packed is a PackedWeight"):
        co.nn.MixedExperts(cast(Any, packed[0].weight), packed[1])
    with pytest.raises(ValueError, match="act_quant is 'row'"):
        co.nn.MixedExperts(*packed, act_quant="row")
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        co.nn.MixedExperts(*packed, activation=cast(Any, "tanh"))
