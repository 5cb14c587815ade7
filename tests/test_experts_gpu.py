"""Experts on a GPU: the CPU's results, the same bits every time, and no capture."""

from __future__ import annotations

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
    "nf4": {"bits": 4, "group_size": 64, "book": "nf4"},
}


def layer(m: int, dtype: torch.dtype, **options: Any) -> tuple[co.PackedExperts, co.PackedExperts, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(m)

    def packed(n: int, k: int) -> co.PackedExperts:
        return co.reorder_experts([co.quantize(torch.randn(n, k, generator=random) / k**0.5, **options) for _ in range(6)])

    gate_up, down = packed(2 * 136, 192), packed(192, 136)
    x = torch.randn(m, 192, generator=random).to(dtype)
    return gate_up, down, x, torch.randint(-1, 6, (m, 3), generator=random), torch.rand(m, 3, generator=random)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("m", [0, 1, 17, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_is_the_cpus(kind: str, m: int, dtype: torch.dtype) -> None:
    gate_up, down, x, ids, w = layer(m, dtype, **FORMATS[kind])
    expected = co.mixed_moe(x, gate_up, down, ids, w).float()
    on_gpu = [value.to("cuda") for value in (x, gate_up, down, ids, w)]
    found = co.mixed_moe(*on_gpu)  # type: ignore[arg-type]
    assert found.dtype == dtype
    assert torch.equal(found, co.mixed_moe(*on_gpu))  # type: ignore[arg-type]
    if m:
        # act(gate) * up may be rounded to the other side, and so may some kernels' weights of short groups.
        limit = 2**-7 if dtype is torch.bfloat16 else 2**-9
        rms = expected.square().mean().sqrt()
        assert float((found.float().cpu() - expected).abs().max()) <= 4 * limit * float(rms)


@pytest.mark.parametrize("act_quant", ["token", "block"])
def test_quantised_activations_are_the_cpus(act_quant: str) -> None:
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
def test_capture_is_refused() -> None:
    gate_up, down, x, ids, w = (value.to("cuda") for value in layer(4, torch.float16, **FORMATS["int4"]))
    co.mixed_moe(x, gate_up, down, ids, w)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        co.mixed_moe(x, gate_up, down, ids, w)  # type: ignore[arg-type]
