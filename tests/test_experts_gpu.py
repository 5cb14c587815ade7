"""Experts on a GPU: the CPU's results, the same bits every time, in CUDA graphs too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_ops as co

pytestmark = pytest.mark.gpu

FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"bits": 4, "group_size": 128, "symmetric": True},
    "int4 with zero points": {"bits": 4, "group_size": 32, "symmetric": False},
    "int8": {"bits": 8, "group_size": -1, "symmetric": True},
    "int8 with zero points": {"bits": 8, "group_size": 64, "symmetric": False},
    "nf4": {"bits": 4, "group_size": 64, "book": "nf4"},
    "fp8": {"bits": 8, "group_size": 128, "book": "e4m3"},
}


#: Experts, hidden and intermediate size; the last one has a size that no kernel for whole layers takes.
SIZES = {"small": (6, 192, 64), "cut": (6, 520, 704), "long": (20, 1024, 192), "odd": (6, 192, 136)}


def layer(
    m: int, dtype: torch.dtype, size: str = "small", top: int = 3, **options: Any
) -> tuple[co.PackedExperts, co.PackedExperts, Tensor, Tensor, Tensor]:
    experts, hidden, intermediate = SIZES[size]
    random = torch.Generator().manual_seed(m)

    def packed(n: int, k: int) -> co.PackedExperts:
        weights = [torch.randn(n, k, generator=random) / k**0.5 for _ in range(experts)]
        return co.reorder_experts([co.quantize(weight, **options) for weight in weights])

    gate_up, down = packed(2 * intermediate, hidden), packed(hidden, intermediate)
    x = torch.randn(m, hidden, generator=random).to(dtype)
    return gate_up, down, x, torch.randint(-1, experts, (m, top), generator=random), torch.rand(m, top, generator=random)


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """act(gate) * up may be rounded to the other side, and weights are rounded to x's dtype."""
    limit = 2**-7 if dtype is torch.bfloat16 else 2**-9
    error, reference = (found.float().cpu() - expected.float()).abs(), expected.float()
    rms = reference.square().mean(1, keepdim=True).sqrt()  # of a row: some have several experts, and some none
    assert found.dtype == dtype
    excess = error - 4 * limit * rms - limit * reference.abs()
    assert bool((excess <= 0).all()), float((error / rms).nan_to_num().max())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_is_the_cpus(kind: str, dtype: torch.dtype, size: str) -> None:
    for m in (0, 1, 2, 17, 40, 100, 300, 777):
        gate_up, down, x, ids, w = layer(m, dtype, size, **FORMATS[kind])
        expected = co.mixed_moe(x, gate_up, down, ids, w)
        on_gpu = [value.to("cuda") for value in (x, gate_up, down, ids, w)]
        found = co.mixed_moe(*on_gpu)  # type: ignore[arg-type]
        assert torch.equal(found, co.mixed_moe(*on_gpu))  # type: ignore[arg-type]
        if m:
            check(found, expected, dtype)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_layer_of_fp32_is_the_cpus(kind: str) -> None:
    for m in (0, 1, 33):
        gate_up, down, x, ids, w = layer(m, torch.float32, **FORMATS[kind])
        expected = co.mixed_moe(x, gate_up, down, ids, w)
        found = co.mixed_moe(*[value.to("cuda") for value in (x, gate_up, down, ids, w)])  # type: ignore[arg-type]
        assert found.dtype == torch.float32
        assert bool((found.cpu() - expected).norm() <= 1e-5 * expected.norm())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_quant", ["token", "block"])
@pytest.mark.parametrize("kind", ["int4", "int4 with zero points", "int8"])
def test_a_layer_of_quantised_activations_is_the_cpus(kind: str, act_quant: str, symmetric: bool) -> None:
    for m in (1, 33, 300):
        gate_up, down, x, ids, w = layer(m, torch.float16, "cut", **FORMATS[kind])
        options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric}
        expected = co.mixed_moe(x, gate_up, down, ids, w, **options)
        found = co.mixed_moe(*[value.to("cuda") for value in (x, gate_up, down, ids, w)], **options)  # type: ignore[arg-type]
        # A code of act(gate) * up may be the next one, where it was rounded to the other side.
        assert float((found.cpu().float() - expected.float()).norm() / expected.float().norm()) < 5e-3


ACTIVATIONS = [None, "relu", "relu6", "gelu", "silu", ("clamp", -0.25, 0.5), ("clamped_swiglu", 1.702, 0.5)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: Any) -> None:
    for m in (3, 100):
        gate_up, down, x, ids, w = layer(m, torch.float16, **FORMATS["int8"])
        expected = co.mixed_moe(x, gate_up, down, ids, w, activation)
        on_gpu = [value.to("cuda") for value in (x, gate_up, down, ids, w)]
        check(co.mixed_moe(*on_gpu, activation), expected, torch.float16)  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", ["silu", ("clamped_swiglu", 1.702, 0.5)])
@pytest.mark.parametrize("size", ["cut", "odd"])
def test_biases_of_experts(size: str, activation: Any) -> None:
    random = torch.Generator().manual_seed(2)
    for m in (1, 17, 300):
        gate_up, down, x, ids, w = layer(m, torch.bfloat16, size, **FORMATS["int4"])
        biased = [
            co.reorder_experts([replace(weight, bias=torch.randn(weight.n, generator=random)) for weight in packed.unpack()])
            for packed in (gate_up, down)
        ]
        expected = co.mixed_moe(x, *biased, ids, w, activation)
        on_gpu = [value.to("cuda") for value in (x, *biased, ids, w)]
        check(co.mixed_moe(*on_gpu, activation), expected, torch.bfloat16)  # type: ignore[arg-type]


@pytest.mark.parametrize("m", [1, 16, 200])
def test_one_expert_with_all_rows_and_many_with_one(m: int) -> None:
    gate_up, down, x, ids, w = layer(m, torch.bfloat16, "long", **FORMATS["int4 with zero points"])
    experts = gate_up.experts
    for routing in (torch.full_like(ids, 7), torch.full_like(ids, -1), torch.arange(ids.numel()).view(ids.shape) % experts):
        expected = co.mixed_moe(x, gate_up, down, routing, w)
        on_gpu = [value.to("cuda") for value in (x, gate_up, down, routing, w)]
        check(co.mixed_moe(*on_gpu), expected, torch.bfloat16)  # type: ignore[arg-type]


def test_ids_of_other_ranks_and_dtypes() -> None:
    gate_up, down, x, ids, w = layer(40, torch.float16, **FORMATS["int4"])
    expert_map = torch.tensor([3, -1, 0, 5, -1, 1, 2, 4, -1])
    ids = torch.randint(-1, 9, ids.shape, generator=torch.Generator().manual_seed(1))
    expected = co.mixed_moe(x, gate_up, down, ids, w, expert_map=expert_map)
    for dtype in (torch.int32, torch.int64, torch.int16):
        for weights in (torch.float32, torch.float64, torch.float16):
            on_gpu = [value.to("cuda") for value in (x, gate_up, down, ids.to(dtype), w.to(weights))]
            found = co.mixed_moe(*on_gpu, expert_map=expert_map.to("cuda", dtype))  # type: ignore[arg-type]
            check(found, expected, torch.float16)


def test_an_act_order_of_each_expert() -> None:
    random = torch.Generator().manual_seed(0)

    def packed(n: int, k: int, perms: list[Tensor]) -> co.PackedExperts:
        weights = [co.quantize(torch.randn(n, k, generator=random) / k**0.5, 4, 64) for _ in perms]
        return co.reorder_experts([replace(weight, perm=perm) for weight, perm in zip(weights, perms, strict=True)])

    def orders(k: int) -> list[Tensor]:
        return [torch.randperm(k, generator=random).to(torch.int32) for _ in range(4)]

    gate_up, down = packed(256, 192, orders(192)), packed(192, 128, orders(128))
    for m, act_quant in ((5, "none"), (60, "none"), (5, "block"), (60, "token")):
        x, w = torch.randn(m, 192, generator=random).half(), torch.rand(m, 2, generator=random)
        ids = torch.randint(0, 4, (m, 2), generator=random)
        expected = co.mixed_moe(x, gate_up, down, ids, w, act_quant=act_quant)
        on_gpu = [value.to("cuda") for value in (x, gate_up, down, ids, w)]
        found = co.mixed_moe(*on_gpu, act_quant=act_quant)  # type: ignore[arg-type]
        assert float((found.cpu().float() - expected.float()).norm() / expected.float().norm()) < 5e-3


@pytest.mark.parametrize("act_quant", ["none", "block"])
@pytest.mark.parametrize("m", [1, 24, 300])
def test_a_layer_is_captured_and_replayed_with_other_routings(m: int, act_quant: str) -> None:
    gate_up, down, x, ids, w = (value.to("cuda") for value in layer(m, torch.float16, "cut", **FORMATS["int4"]))

    def run() -> Tensor:
        return co.mixed_moe(x, gate_up, down, ids, w, act_quant=act_quant)  # type: ignore[arg-type]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(3):
        random = torch.Generator("cuda").manual_seed(seed)
        ids.random_(-1, 6, generator=random)
        x.normal_(generator=random)  # type: ignore[union-attr]
        expected = run().clone()
        graph.replay()
        assert torch.equal(captured, expected)


def test_other_rows_change_no_bits_of_an_expert() -> None:
    gate_up, down, x, ids, w = (value.to("cuda") for value in layer(64, torch.bfloat16, **FORMATS["int4"]))
    y = co.mixed_moe(x, gate_up, down, ids, w)  # type: ignore[arg-type]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).cuda()
    assert torch.equal(co.mixed_moe(x[order], gate_up, down, ids[order], w[order]), y[order])  # type: ignore


@pytest.mark.parametrize("act_quant", ["token", "block"])
def test_quantised_activations_of_fp32_are_the_cpus(act_quant: str) -> None:
    gate_up, down, x, ids, w = layer(33, torch.float32, **FORMATS["int4"])
    expected = co.mixed_moe(x, gate_up, down, ids, w, act_quant=act_quant)
    on_gpu = [value.to("cuda") for value in (x, gate_up, down, ids, w)]
    found = co.mixed_moe(*on_gpu, act_quant=act_quant).cpu()  # type: ignore[arg-type]
    # A code of act(gate) * up may be the next one, where silu's last place differs.
    assert float((found - expected).norm() / expected.norm()) < 1e-3


def test_a_routing_is_the_cpus_and_is_captured() -> None:
    ids = torch.randint(-1, 300, (4097, 8), generator=torch.Generator().manual_seed(0))
    expected = co.route(ids, 300)
    on_gpu = torch.zeros_like(ids, device="cuda")
    co.route(on_gpu, 300)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = co.route(on_gpu, 300)
    on_gpu.copy_(ids)
    graph.replay()
    assert torch.equal(found.offsets.cpu(), expected.offsets)
    assert torch.equal(found.order.cpu(), expected.order)
    # Numbers of no expert cannot be refused without a synchronisation; they are no expert.
    odd = co.route(torch.tensor([[7, 0], [-5, 1]], device="cuda"), 2)
    assert odd.offsets.tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capture_of_a_product_for_each_expert_is_refused() -> None:
    gate_up, down, x, ids, w = (value.to("cuda") for value in layer(4, torch.float16, "odd", **FORMATS["int4"]))
    co.mixed_moe(x, gate_up, down, ids, w)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        co.mixed_moe(x, gate_up, down, ids, w)  # type: ignore[arg-type]
