"""Operators under torch.library and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from expert_cases import both, problem
from op_cases import K, N, activations, same, weight
from torch import Tensor, nn

import cutlass_ops as co


def fields(packed: co.PackedWeight) -> tuple[Any, ...]:
    parts = [
        getattr(packed, name) for name in ("codes", "scales", "zeros", "offsets", "bias", "perm")
    ]
    sizes = (packed.n, packed.k, packed.bits, packed.group_size)
    return (*parts, *sizes, packed.book, packed.gated)


def samples() -> list[Any]:
    """Arguments for each registered operator."""
    library = torch.ops.cutlass_ops
    packed = {
        kind: co.reorder(weight(kind=kind, perm=kind == "zeros", bias=kind == "offsets"))
        for kind in ("zeros", "offsets")
    }
    packed["symmetric"] = co.reorder(weight(8))
    packed["gated"] = co.reorder([weight(bias=True), weight()], gated=True)
    x, half = activations(5, K), torch.float16
    qa = co.quantize_activations(x, block=64, symmetric=False)
    residual = activations(5, N)
    epilogue = (activations(N), "clamp", -1.0, 1.0, residual)
    plain = (None, None, 0.0, 0.0, None, half, False, "none", True, False, 0, False)
    found: list[Any] = [
        ("quantize_activations", library.quantize_activations,
         (x, packed["zeros"].perm, 64, False)),
        ("quantize_activations", library.quantize_activations, (x, None, -1, True)),
        ("rms_norm_quantize", library.rms_norm_quantize,
         (x, activations(K), 1e-6, activations(5, K), None, 64, False)),
        ("rms_norm_quantize", library.rms_norm_quantize,
         (x, activations(K), 1e-6, None, packed["zeros"].perm, -1, True)),
        ("silu_mul_quantize", library.silu_mul_quantize, (x, activations(5, K), None, 128, True)),
        ("gemm_quantized", library.gemm_quantized,
         (qa.codes, qa.scales, qa.zeros, 64, qa.dtype, *fields(packed["symmetric"]), *epilogue,
          half, True, False, 0, False)),
    ]  # fmt: skip
    for kind, weight_ in packed.items():
        found.append((f"dequantize-{kind}", library.dequantize, (*fields(weight_), half)))
        found.append((f"mixed_gemm-{kind}", library.mixed_gemm, (x, *fields(weight_), *plain)))
    args = (
        x,
        *fields(packed["symmetric"]),
        *epilogue,
        torch.bfloat16,
        True,
        "block",
        False,
        True,
        80,
        False,
    )
    found.append(("mixed_gemm-epilogue", library.mixed_gemm, args))
    return [pytest.param(op, args, id=name) for name, op, args in found]


@pytest.mark.parametrize(("op", "args"), samples())
def test_opcheck(op: Any, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(op.default, args)


def test_the_registered_operators_give_what_the_functions_give() -> None:
    packed = co.reorder(weight(kind="zeros", perm=True))
    x = activations(5, K)
    end = (None, "relu", 0.0, 0.0, None, torch.float16, False)
    y = torch.ops.cutlass_ops.mixed_gemm(x, *fields(packed), *end, "token", False, False, 0, False)
    assert torch.equal(
        y, co.mixed_gemm(x, packed, None, "relu", "token", False, out_dtype=torch.float16)
    )
    assert torch.equal(
        torch.ops.cutlass_ops.dequantize(*fields(packed), torch.float16),
        co.dequantize(packed, torch.float16),
    )


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """``function`` through fullgraph compilation with dynamic sizes, and a list that grows with
    every graph made.
    """
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(len(graph.graph.nodes))
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend), graphs


@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
def test_compile_with_any_number_of_rows(act_quant: str) -> None:
    packed = co.reorder(weight(kind="zeros", bias=True, perm=True))

    def layer(x: Tensor, residual: Tensor) -> Tensor:
        y = co.mixed_gemm(
            x * 2,
            packed,
            activation="silu",
            act_quant=act_quant,
            residual=residual,
            out_dtype=torch.float32,
        )
        return y + 1

    run, graphs = compiled(layer)
    for m in (5, 3, 33, 129):
        x, residual = activations(2, m, K), activations(2, m, N)
        assert torch.equal(run(x, residual), layer(x, residual))
    assert len(graphs) == 1


def test_compile_with_activations_quantized_once_for_two_products() -> None:
    first, second = co.reorder(weight(4)), co.reorder(weight(8, "offsets"))

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        qa = co.quantize_activations(x, block=64, symmetric=False)
        return co.mixed_gemm(qa, first, activation=("clamp", -3.0, 3.0)), co.mixed_gemm(qa, second)

    run, graphs = compiled(layer)
    for m in (5, 16, 33):
        x = activations(m, K, dtype=torch.bfloat16)
        for got, expected in zip(run(x), layer(x), strict=True):
            assert same(got, expected)
    assert len(graphs) == 1


def test_compile_dequantize() -> None:
    packed = co.reorder(weight(kind="offsets"))
    run, graphs = compiled(lambda: co.dequantize(packed, torch.bfloat16) * 2)
    assert torch.equal(run(), co.dequantize(packed, torch.bfloat16) * 2)
    assert len(graphs) == 1


def test_fake_tensors_get_shapes_and_types_without_running() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(7, K, dtype=torch.bfloat16)
        codes, scales, zeros = torch.ops.cutlass_ops.quantize_activations(x, None, 32, False)
    assert (codes.shape, codes.dtype) == ((7, 256), torch.int8)
    assert (scales.shape, scales.dtype) == ((8, 16), torch.float32)
    assert (zeros.shape, zeros.dtype) == ((8, 16), torch.int8)


def traced() -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]]:
    """Functions of a tensor, and what makes one."""
    packed = co.reorder(weight())
    x, images = partial(torch.randn, 5, K), partial(torch.randn, 1, 64, 6, 6)
    linear, conv = co.nn.MixedLinear(packed), nn.Sequential(nn.Conv2d(64, 96, 3, padding=1))
    co.quantize_model(conv, bits=8, group_size=64, convs=True)
    gate_up, down, _, ids, w = problem(5, 2, hidden=K)
    experts = both(gate_up, down)
    return {
        "product": (lambda x: co.mixed_gemm(x, packed), x),
        "epilogue": (lambda x: co.mixed_gemm(x, packed, torch.ones(N), "silu"), x),
        "quantised": (lambda x: co.mixed_gemm(co.quantize_activations(x, 64), packed), x),
        "values": (lambda x: x @ co.dequantize(packed, torch.float32).t(), x),
        "layer": (linear, x),
        "convolution": (conv, images),
        "experts": (lambda x: co.mixed_moe(x, *experts, ids, w), x),
    }


@pytest.mark.parametrize("name", traced())
def test_make_fx_records_operators_and_not_their_results(name: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    function, make = traced()[name]
    function(make())  # a launch that is kept
    recorded = make_fx(function)(make())
    x = make()
    assert torch.equal(recorded(x), function(x))
    assert any("cutlass_ops" in str(node.target) for node in recorded.graph.nodes)
