"""Experts on a GPU: the CPU's results, the same bits every time, in CUDA graphs too."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from gpu_cases import cached_allocator
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import reference
from cutlass_ops.weights.packed_experts import in_eights

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[0, 80], ids=["of the GPU", "portable"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's kernels, and those that every GPU since sm_80 has."""
    monkeypatch.setattr(co, "mixed_moe", partial(co.mixed_moe, architecture=request.param))


FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"bits": 4, "group_size": 128, "symmetric": True},
    "int4 with zero points": {"bits": 4, "group_size": 128, "symmetric": False},
    "int4 of 64": {"bits": 4, "group_size": 64, "symmetric": True},
    "int4 of 64 with zero points": {"bits": 4, "group_size": 64, "symmetric": False},
    "int4 in short groups": {"bits": 4, "group_size": 32, "symmetric": False},
    "int8 of 16": {"bits": 8, "group_size": 16, "symmetric": True},
    "int8": {"bits": 8, "group_size": -1, "symmetric": True},
    "int8 of 128 with zero points": {"bits": 8, "group_size": 128, "symmetric": False},
    "int8 of 128": {"bits": 8, "group_size": 128, "symmetric": True},
    "int8 of 64": {"bits": 8, "group_size": 64, "symmetric": True},
    "int8 with zero points": {"bits": 8, "group_size": 64, "symmetric": False},
    "int2": {"bits": 2, "group_size": 128, "symmetric": True},
    "int2 in short groups": {"bits": 2, "group_size": 32, "symmetric": False},
    "nf4": {"bits": 4, "group_size": 64, "book": "nf4"},
    "nf4 of 16": {"bits": 4, "group_size": 16, "book": "nf4"},
    "fp8": {"bits": 8, "group_size": 128, "book": "e4m3"},
}


#: Experts, hidden and intermediate size. Portable kernels cut the K of "deep"; the last one has a
#: size that no kernel for whole layers takes.
SIZES = {
    "small": (6, 192, 64),
    "cut": (6, 520, 704),
    "long": (20, 1024, 192),
    "many": (80, 256, 512),
    "deep": (4, 3080, 64),
    "odd": (6, 192, 136),
    "uneven": (6, 192, 132),
}
#: Rows of x by which the experts of most sizes get all heights of tiles.
ROWS = (0, 1, 2, 17, 40, 100, 150, 300, 777)


@lru_cache(maxsize=2)
def experts_of(size: str, kind: str) -> tuple[co.PackedExperts, co.PackedExperts]:
    """gate_up and down of a size, in one of FORMATS; kept for the numbers of rows of a test."""
    experts, hidden, intermediate = SIZES[size]
    random = torch.Generator().manual_seed(0)

    def packed(n: int, k: int, gated: bool) -> co.PackedExperts:
        weights = [torch.randn(n, k, generator=random) / k**0.5 for _ in range(experts)]
        return co.reorder_experts(
            [co.quantize(weight, **FORMATS[kind]) for weight in weights], gated
        )

    return packed(2 * intermediate, hidden, True), packed(hidden, intermediate, False)


def layer(
    m: int, dtype: torch.dtype, kind: str, size: str = "small", top: int = 3
) -> tuple[co.PackedExperts, co.PackedExperts, Tensor, Tensor, Tensor]:
    experts, hidden, _ = SIZES[size]
    random = torch.Generator().manual_seed(m)
    x = torch.randn(m, hidden, generator=random).to(dtype)
    ids = torch.randint(-1, experts, (m, top), generator=random)
    return *experts_of(size, kind), x, ids, torch.rand(m, top, generator=random)


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """act(gate) * up may be rounded to the other side, and weights are rounded to x's dtype."""
    limit = 2**-7 if dtype is torch.bfloat16 else 2**-9
    error, reference = (found.float().cpu() - expected.float()).abs(), expected.float()
    # of a row: some have several experts, and some none
    rms = reference.square().mean(1, keepdim=True).sqrt()
    assert found.dtype == dtype
    excess = error - 4 * limit * rms - limit * reference.abs()
    assert bool((excess <= 0).all()), float((error / rms).nan_to_num().max())


def check_quantised(found: Tensor, expected: Tensor) -> None:
    """A code of act(gate) * up may be the next one, where it was rounded to the other side."""
    error, reference = (
        (found.cpu().float() - expected.float()).norm(dim=1),
        expected.float().norm(dim=1),
    )
    assert float(error.norm()) <= 1e-2 * float(reference.norm())
    assert bool((error <= 2e-2 * reference).all())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_equals_the_cpus(kind: str, dtype: torch.dtype, size: str) -> None:
    for m in ROWS:
        gate_up, down, x, ids, w = layer(m, dtype, kind, size)
        expected = co.mixed_moe(x, gate_up, down, ids, w)
        on_gpu = [value.to("cuda") for value in (x, gate_up, down, ids, w)]
        found = co.mixed_moe(*on_gpu)
        assert torch.equal(found, co.mixed_moe(*on_gpu))
        if m:
            check(found, expected, dtype)


def test_more_pairs_than_one_cta_assigns() -> None:
    gate_up, down, x, ids, w = layer(1500, torch.float16, "int4")
    assert ids.numel() > 4096
    on_gpu = [value.to("cuda") for value in (x, gate_up, down, ids, w)]
    check(co.mixed_moe(*on_gpu), co.mixed_moe(x, gate_up, down, ids, w), torch.float16)


def integers(
    experts: int,
    n: int,
    k: int,
    bits: int,
    group_size: int,
    terms: str,
    scales: torch.dtype,
    random: torch.Generator,
) -> list[co.QuantizedWeight]:
    """Weights of small integers, most of them 0, in groups of 1 or 2 of a step."""
    groups, weights = -(-k // (k if group_size == -1 else group_size)), []
    for _ in range(experts):
        values = torch.randint(-1, 2, (n, k), generator=random) * (
            torch.rand(n, k, generator=random) < 0.2
        )
        middle, per_group = 1 << (bits - 1), torch.randint(-1, 2, (n, groups), generator=random)
        zeros = middle + (per_group if terms == "zeros" else torch.zeros_like(per_group))
        columns = torch.arange(k) // (k if group_size == -1 else group_size)
        weights.append(
            co.QuantizedWeight(
                codes=(values + zeros[:, columns]).clamp(0, 2 * middle - 1).to(torch.uint8),
                scales=torch.randint(1, 3, (n, groups), generator=random).to(scales),
                zeros=zeros.to(torch.uint8) if terms == "zeros" else None,
                offsets=per_group.to(scales) if terms == "offsets" else None,
                bits=bits,
                group_size=group_size,
            )
        )
    return weights


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("terms", ["symmetric", "zeros", "offsets"])
@pytest.mark.parametrize("group_size", [-1, 128, 64, 16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_small_integers_are_exact(
    bits: int, group_size: int, terms: str, scales: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(bits)
    experts, hidden, intermediate = 6, 264, 136
    form = (bits, group_size, terms, scales, random)
    gate_up = co.reorder_experts(integers(experts, 2 * intermediate, hidden, *form), gated=True)
    down = co.reorder_experts(integers(experts, hidden, intermediate, *form))
    for dtype in (torch.float16, torch.bfloat16):
        for m in ROWS:
            # Three columns of a row are not 0, so that gate and up are small; gate becomes 0 or 1.
            x = (
                torch.zeros(m, hidden)
                .scatter_(1, torch.randint(0, hidden, (m, 3), generator=random), 1.0)
                .to(dtype)
            )
            ids = torch.randint(-1, experts, (m, 3), generator=random)
            ids[ids == 2] = 4  # an expert without rows
            w = torch.randint(1, 3, (m, 3), generator=random).float()
            expected = co.mixed_moe(x, gate_up, down, ids, w, ("clamp", 0.0, 1.0))
            on_gpu = [value.to("cuda") for value in (x, gate_up, down, ids, w)]
            found = co.mixed_moe(*on_gpu, ("clamp", 0.0, 1.0)).cpu()
            assert torch.equal(found, expected), m


@pytest.mark.parametrize("kind", FORMATS)
def test_a_layer_of_fp32_equals_the_cpus(kind: str) -> None:
    for m in (0, 1, 33):
        gate_up, down, x, ids, w = layer(m, torch.float32, kind)
        expected = co.mixed_moe(x, gate_up, down, ids, w)
        found = co.mixed_moe(*[value.to("cuda") for value in (x, gate_up, down, ids, w)])
        assert found.dtype == torch.float32
        assert bool((found.cpu() - expected).norm() <= 1e-5 * expected.norm())


@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
@pytest.mark.parametrize("kind", ["int4", "int4 in short groups"])
@pytest.mark.parametrize("m", [5, 100, 300, 777])
def test_rows_of_x_are_read_wherever_they_lie(m: int, kind: str, act_quant: str) -> None:
    gate_up, down, x, ids, w = (value.to("cuda") for value in layer(m, torch.float16, kind, "cut"))
    expected = co.mixed_moe(x, gate_up, down, ids, w, act_quant=act_quant)
    for before, after in ((8, 64), (0, 3), (1, 7)):  # rows that start on 16 bytes, and not
        wide = torch.full((m, before + x.shape[1] + after), torch.nan, dtype=x.dtype, device="cuda")
        view = wide[:, before : before + x.shape[1]]
        view.copy_(x)
        assert torch.equal(co.mixed_moe(view, gate_up, down, ids, w, act_quant=act_quant), expected)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_quant", ["token", "block"])
@pytest.mark.parametrize("size", ["cut", "odd", "long"])
@pytest.mark.parametrize(
    "kind",
    [
        *("int4", "int4 with zero points", "int4 of 64", "int4 of 64 with zero points"),
        *("int4 in short groups", "int8", "int8 of 128", "int8 of 64", "int8 of 16"),
    ],
)
def test_a_layer_of_quantised_activations_equals_the_cpus(
    kind: str, size: str, act_quant: str, symmetric: bool
) -> None:
    for m in (1, 33, 100, 150, 300, 777):
        gate_up, down, x, ids, w = layer(m, torch.float16, kind, size)
        options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric}
        expected = co.mixed_moe(x, gate_up, down, ids, w, **options)
        on_gpu = [value.to("cuda") for value in (x, gate_up, down, ids, w)]
        found = co.mixed_moe(*on_gpu, **options)
        assert torch.equal(found, co.mixed_moe(*on_gpu, **options))
        check_quantised(found, expected)


ACTIVATIONS = [None, *reference.ACTIVATIONS, ("clamp", -0.25, 0.5), ("clamped_swiglu", 1.702, 0.5)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: Any) -> None:
    for m, kind in ((3, "int8"), (100, "int8"), (100, "int4 in short groups")):
        gate_up, down, x, ids, w = layer(m, torch.float16, kind)
        expected = co.mixed_moe(x, gate_up, down, ids, w, activation)
        on_gpu = [value.to("cuda") for value in (x, gate_up, down, ids, w)]
        check(co.mixed_moe(*on_gpu, activation), expected, torch.float16)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, ("clamped_swiglu", 1.702, math.inf)])
def test_no_activation_makes_a_number_of_a_nan(activation: Any) -> None:
    for m in (3, 100):
        gate_up, down, x, ids, w = (value.to("cuda") for value in layer(m, torch.float16, "int4"))
        x[1, 5] = math.nan
        ids[ids < 0] = 0
        y = co.mixed_moe(x, gate_up, down, ids, w, activation)
        assert bool(y[1].isnan().all())
        assert not bool(y[0].isnan().any())


@pytest.mark.parametrize("activation", ["silu", ("clamped_swiglu", 1.702, 0.5)])
@pytest.mark.parametrize("kind", ["int4", "int8 with zero points"])
@pytest.mark.parametrize("size", ["cut", "odd", "uneven"])
def test_biases_of_experts(size: str, kind: str, activation: Any) -> None:
    random = torch.Generator().manual_seed(2)
    for m in (1, 17, 150, 300):
        gate_up, down, x, ids, w = layer(m, torch.bfloat16, kind, size)
        biased = [
            co.reorder_experts(
                [
                    replace(weight, bias=torch.randn(weight.n, generator=random))
                    for weight in packed.unpack()
                ],
                packed.gated,
            )
            for packed in (gate_up, down)
        ]
        expected = co.mixed_moe(x, *biased, ids, w, activation)
        on_gpu = [value.to("cuda") for value in (x, *biased, ids, w)]
        check(co.mixed_moe(*on_gpu, activation), expected, torch.bfloat16)


@pytest.mark.parametrize("kind", ["int4 with zero points", "int4 in short groups", "fp8"])
@pytest.mark.parametrize("m", [1, 16, 200, 600])
def test_one_expert_with_all_rows_and_many_with_one(m: int, kind: str) -> None:
    gate_up, down, x, ids, w = layer(m, torch.bfloat16, kind, "long")
    experts = gate_up.experts
    for routing in (
        torch.full_like(ids, 7),
        torch.full_like(ids, -1),
        torch.arange(ids.numel()).view(ids.shape) % experts,
    ):
        expected = co.mixed_moe(x, gate_up, down, routing, w)
        on_gpu = [value.to("cuda") for value in (x, gate_up, down, routing, w)]
        check(co.mixed_moe(*on_gpu), expected, torch.bfloat16)


def test_ids_of_other_ranks_and_dtypes() -> None:
    gate_up, down, x, ids, w = layer(40, torch.float16, "int4")
    expert_map = torch.tensor([3, -1, 0, 5, -1, 1, 2, 4, -1])
    ids = torch.randint(-1, 9, ids.shape, generator=torch.Generator().manual_seed(1))
    expected = co.mixed_moe(x, gate_up, down, ids, w, expert_map=expert_map)
    for dtype in (torch.int32, torch.int64, torch.int16):
        for weights in (torch.float32, torch.float64, torch.float16):
            on_gpu = [
                value.to("cuda") for value in (x, gate_up, down, ids.to(dtype), w.to(weights))
            ]
            found = co.mixed_moe(*on_gpu, expert_map=expert_map.to("cuda", dtype))
            check(found, expected, torch.float16)


@pytest.mark.parametrize("group_size", [64, 128])
def test_an_act_order_of_each_expert(group_size: int) -> None:
    random = torch.Generator().manual_seed(0)

    def packed(n: int, k: int, perms: list[Tensor], gated: bool) -> co.PackedExperts:
        weights = [
            co.quantize(torch.randn(n, k, generator=random) / k**0.5, 4, group_size) for _ in perms
        ]
        return co.reorder_experts(
            [replace(weight, perm=perm) for weight, perm in zip(weights, perms, strict=True)], gated
        )

    def orders(k: int) -> list[Tensor]:
        return [torch.randperm(k, generator=random).to(torch.int32) for _ in range(4)]

    gate_up, down = packed(256, 192, orders(192), True), packed(192, 128, orders(128), False)
    for m, act_quant in (
        (5, "none"),
        (60, "none"),
        (200, "none"),
        (5, "block"),
        (60, "token"),
        (200, "block"),
    ):
        x, w = torch.randn(m, 192, generator=random).half(), torch.rand(m, 2, generator=random)
        ids = torch.randint(0, 4, (m, 2), generator=random)
        expected = co.mixed_moe(x, gate_up, down, ids, w, act_quant=act_quant)
        on_gpu = [value.to("cuda") for value in (x, gate_up, down, ids, w)]
        found = co.mixed_moe(*on_gpu, act_quant=act_quant)
        # a code of act(gate) * up may be the next one
        limit = 5e-3 if act_quant == "none" else 1e-2
        assert (
            float((found.cpu().float() - expected.float()).norm() / expected.float().norm()) < limit
        )


@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
@pytest.mark.parametrize("activation", ["silu", ("clamped_swiglu", 1.702, 7.0)])
@pytest.mark.parametrize("m", [1, 24, 300])
def test_a_layer_is_captured_and_replayed_with_other_routings(
    m: int, activation: Any, act_quant: str
) -> None:
    gate_up, down, x, ids, w = (
        value.to("cuda") for value in layer(m, torch.float16, "int4", "cut")
    )

    def run() -> Tensor:
        return co.mixed_moe(x, gate_up, down, ids, w, activation, act_quant)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(3):
        random = torch.Generator("cuda").manual_seed(seed)
        ids.random_(-1, 6, generator=random)
        x.normal_(generator=random)
        expected = run().clone()
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("size", ["small", "cut", "uneven"])
@pytest.mark.parametrize("kind", FORMATS)
def test_plain_rows_of_gate_and_up_are_brought_into_eights(kind: str, size: str) -> None:
    gate_up, down, x, ids, w = (value.to("cuda") for value in layer(40, torch.float16, kind, size))
    plain = co.reorder_experts(gate_up.unpack())
    found, expected = in_eights(plain).tensors(), gate_up.tensors()
    assert all(torch.equal(found[part], tensor) for part, tensor in expected.items())
    with pytest.warns(UserWarning, match="takes as much memory again"):
        y = co.mixed_moe(x, plain, down, ids, w)
    assert torch.equal(y, co.mixed_moe(x, gate_up, down, ids, w))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_row_major_experts_can_be_captured_after_an_eager_call_has_converted_them() -> None:
    gate_up, down, x, ids, w = (value.to("cuda") for value in layer(40, torch.float16, "int4"))
    plain = co.reorder_experts(gate_up.unpack())

    def run() -> Tensor:
        return co.mixed_moe(x, plain, down, ids, w)

    with (
        pytest.raises(RuntimeError, match="not while a CUDA graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        run()
    with pytest.warns(UserWarning, match="takes as much memory again"):
        expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    assert torch.equal(captured, expected)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(), expected)


@pytest.mark.parametrize("top", [1, 2, 6, 8, 11])
def test_a_token_may_have_any_number_of_experts(top: int) -> None:
    for m in (5, 200):
        gate_up, down, x, ids, w = layer(m, torch.float16, "int4", top=top)
        for weights in (w, w.half(), w.bfloat16()):
            expected = co.mixed_moe(x, gate_up, down, ids, weights)
            on_gpu = [value.to("cuda") for value in (x, gate_up, down, ids, weights)]
            check(co.mixed_moe(*on_gpu), expected, torch.float16)


@pytest.mark.parametrize(
    ("kind", "act_quant"),
    [
        *((kind, "none") for kind in FORMATS),
        ("int4", "block"),
        ("int4 with zero points", "token"),
        ("int4 in short groups", "block"),
        ("int4 in short groups", "token"),
        ("int8", "token"),
        ("int8 of 128", "block"),
    ],
)
def test_row_panels_that_are_dealt_to_all_ctas(kind: str, act_quant: str) -> None:
    random = torch.Generator().manual_seed(0)

    def packed(n: int, k: int, gated: bool) -> co.PackedExperts:
        weights = [(torch.randn(n, k, generator=random) / k**0.5).half() for _ in range(4)]
        return co.reorder_experts(
            [co.quantize(weight, **FORMATS[kind]) for weight in weights] * 24, gated
        )

    # 96 experts, of which gate and up have 8 row panels and down has 22: a CTA's share, and what it
    # takes of that at a time, begin and end anywhere in an expert.
    gate_up, down = packed(512, 1408, True), packed(1408, 256, False)
    weights = gate_up.to("cuda"), down.to("cuda")
    for m in (32, 100):  # 256 positions, whose rows CTAs find, and more
        x, w = torch.randn(m, 1408, generator=random).half(), torch.rand(m, 8, generator=random)
        ids = torch.zeros(m, 8, dtype=torch.int64, device="cuda")
        on_gpu = x.cuda(), *weights, ids, w.cuda()
        product = partial(co.mixed_moe, act_quant=act_quant)
        product(*on_gpu)
        graph = torch.cuda.CUDAGraph()
        if cached_allocator():  # else there is no memory for a graph
            with torch.cuda.graph(graph):
                captured = product(*on_gpu)
        of_one = torch.randint(7, 8, ids.shape)
        for routing in (
            torch.randint(-1, 96, ids.shape, generator=random),
            of_one,
            -of_one,
            of_one.cumsum(1) + 30,
        ):
            ids.copy_(routing)
            expected, found = (
                product(x, gate_up, down, routing.clamp(min=-1), w),
                product(*on_gpu),
            )
            if act_quant == "none":
                check(found, expected, torch.float16)
            else:
                check_quantised(found, expected)
            if cached_allocator():
                graph.replay()
                assert torch.equal(captured, found)


@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
@pytest.mark.parametrize(
    "kind",
    ["int4", "int4 of 64 with zero points", "int4 in short groups", "int8 of 128", "int8 of 64"],
)
@pytest.mark.parametrize(("size", "more"), [("many", 0), ("long", 0), ("long", 36), ("long", 144)])
def test_tiles_multiply_the_rows_that_there_are(
    size: str, more: int, kind: str, act_quant: str
) -> None:
    # The least and most rows of the steps of tiles of 64 rows, and of 96, 144 and 176; `more` for
    # an average that takes tiles of these.
    low = (0, 1, 15, 16, 17, 20, 24, 28, 31, 32, 33, 40, 47, 48, 49, 56, 62, 63, 64, 65)
    high = (1, 16, 47, 48, 49, 64, 65, 79, 80, 81, 96, 97, 111, 112, 113, 128, 143, 144, 145, 176)
    rows = torch.tensor(4 * low if size == "many" else high) + more
    random = torch.Generator().manual_seed(0)
    ids = torch.arange(len(rows)).repeat_interleave(rows)
    ids = ids[torch.randperm(len(ids), generator=random)][:, None]
    x = torch.randn(len(ids), SIZES[size][1], generator=random).half()
    values = (x, *experts_of(size, kind), ids, torch.ones(len(ids), 1))
    expected = co.mixed_moe(*values, act_quant=act_quant)
    found = co.mixed_moe(*[value.to("cuda") for value in values], act_quant=act_quant)
    if act_quant == "none":
        check(found, expected, torch.float16)
    else:
        check_quantised(found, expected)


@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
@pytest.mark.parametrize("kind", ["int4", "int4 in short groups"])
def test_dealt_row_panels_of_many_small_experts(kind: str, act_quant: str) -> None:
    # 1200 experts of one and two row panels: a CTA's share is of up to six.
    random = torch.Generator().manual_seed(0)
    weights = [
        [(torch.randn(n, 64, generator=random) / 8).half() for _ in range(7)] for n in (128, 64)
    ]
    gate_up, down = (
        co.reorder_experts(
            [co.quantize(of[i % 7], **FORMATS[kind]) for i in range(1200)], of is weights[0]
        )
        for of in weights
    )
    x, w = torch.randn(256, 64, generator=random).half(), torch.rand(256, 8, generator=random)
    ids = torch.randint(0, 1200, (256, 8), generator=random)
    expected = co.mixed_moe(x, gate_up, down, ids, w, act_quant=act_quant)
    on_gpu = (value.to("cuda") for value in (x, gate_up, down, ids, w))
    found = co.mixed_moe(*on_gpu, act_quant=act_quant)
    if act_quant == "none":
        check(found, expected, torch.float16)
    else:
        check_quantised(found, expected)


@pytest.mark.parametrize(
    ("kind", "act_quant"),
    [
        ("int4", "none"),
        ("nf4", "none"),
        ("int8 with zero points", "token"),
        ("int4 in short groups", "block"),
        ("int4 with zero points", "block"),
        ("int8 of 128", "token"),
    ],
)
def test_rows_that_ctas_find_in_256_ids_have_the_bits_of_sorted_ones(
    kind: str, act_quant: str
) -> None:
    some_experts = (
        torch.randint(-1, 20, (20,), generator=torch.Generator().manual_seed(0)).int().cuda()
    )
    for top, expert_map in ((8, None), (4, some_experts), (1, None)):
        on_cpu = layer(256 // top + 1, torch.bfloat16, kind, "long", top)
        gate_up, down, x, ids, w = (value.to("cuda") for value in on_cpu)
        options: dict[str, Any] = {"act_quant": act_quant, "expert_map": expert_map}
        sorted_first = co.mixed_moe(x, gate_up, down, ids, w, **options)
        found = co.mixed_moe(x[:-1], gate_up, down, ids[:-1], w[:-1], **options)
        assert torch.equal(found, sorted_first[:-1])


def test_other_rows_change_no_bits_of_an_expert() -> None:
    gate_up, down, x, ids, w = (value.to("cuda") for value in layer(64, torch.bfloat16, "int4"))
    y = co.mixed_moe(x, gate_up, down, ids, w)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).cuda()
    assert torch.equal(co.mixed_moe(x[order], gate_up, down, ids[order], w[order]), y[order])


@pytest.mark.parametrize("act_quant", ["token", "block"])
def test_quantised_activations_of_fp32_are_the_cpus(act_quant: str) -> None:
    gate_up, down, x, ids, w = layer(33, torch.float32, "int4")
    expected = co.mixed_moe(x, gate_up, down, ids, w, act_quant=act_quant)
    on_gpu = [value.to("cuda") for value in (x, gate_up, down, ids, w)]
    found = co.mixed_moe(*on_gpu, act_quant=act_quant).cpu()
    # A code of act(gate) * up may be the next one, where silu's last place differs.
    assert float((found - expected).norm() / expected.norm()) < 1e-3


def test_a_routing_equals_the_cpus_and_can_be_captured() -> None:
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
    gate_up, down, x, ids, w = (
        value.to("cuda") for value in layer(4, torch.float16, "int4", "uneven")
    )
    co.mixed_moe(x, gate_up, down, ids, w)
    with (
        pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        co.mixed_moe(x, gate_up, down, ids, w)
