"""A weight remembers how its products were launched: every call has the bits of a weight that
remembers nothing.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import ACTIVATION_KINDS, BFLOAT, HALF, Format, make_floats, make_weight, same_bits
from torch import Tensor

import cutlass_ops as co

pytestmark = pytest.mark.gpu

N, K = 256, 576


def packed_weight(kind: str = "zeros", group_size: int = 128) -> co.PackedWeight:
    return co.reorder(make_weight(Format(4, kind, group_size), N, K, exact=False, bias=True))


def fresh(packed: co.PackedWeight) -> co.PackedWeight:
    """The same weight, which was multiplied by nothing."""
    return replace(packed)


def check(x: Tensor, packed: co.PackedWeight, **options: Any) -> None:
    expected = co.mixed_gemm(x, fresh(packed), **options)
    for _ in range(3):
        assert same_bits(co.mixed_gemm(x, packed, **options), expected)


@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_any_number_of_rows_in_any_order(activations: str) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    packed = packed_weight()
    x = make_floats(300, K, HALF)
    for m in (1, 3, 16, 17, 40, 64, 100, 129, 200, 300, 2, 1, 17, 300, 64):
        check(x[:m], packed, act_quant=act_quant, act_symmetric=symmetric)


def test_changes_between_calls_choose_another_plan() -> None:
    packed, x = packed_weight(group_size=64), make_floats(40, K, HALF)
    wide = make_floats(40, K + 12, HALF)
    changes: tuple[tuple[Tensor, dict[str, Any]], ...] = (
        (x, {}),
        (wide[:, :K], {}),  # another stride
        (wide[:, 1 : K + 1], {}),  # rows do not start on 16 bytes
        (x.to(BFLOAT), {}),
        (x, {"act_quant": "block"}),
        (x, {"act_quant": "block", "act_symmetric": False}),
        (x, {"act_quant": "token"}),
        (x.float(), {"act_quant": "block"}),
        (x, {"out_dtype": torch.float32}),
        (x, {"batch_invariant": True}),
        (x, {"exact": True}),
        (x, {"architecture": 80}),
        (x, {"bias": None, "activation": "gelu", "residual": make_floats(40, N, HALF)}),
    )
    for given, options in (*changes, *reversed(changes)):
        check(given, packed, **options)


@pytest.mark.parametrize("act_quant", ["token", "block"])
def test_column_sums_between_calls(act_quant: str) -> None:
    packed, x = packed_weight(kind="symmetric"), make_floats(200, K, HALF)
    options = {"act_quant": act_quant, "act_symmetric": False}
    expected = co.mixed_gemm(x, packed, **options)
    packed.sum_codes()
    assert same_bits(co.mixed_gemm(x, packed, **options), expected)
    packed.scales.mul_(2)  # the kept sums now belong to other scales
    torch.cuda.synchronize()
    check(x, packed, **options)
    assert not same_bits(co.mixed_gemm(x, packed, **options), expected)
    packed.sum_codes()
    check(x, packed, **options)


def test_a_layer_that_moves_and_gets_other_tensors() -> None:
    x = make_floats(3, K, HALF)
    module = co.MixedLinear(packed_weight())
    expected = module(x)
    assert same_bits(module(x), expected)
    with pytest.raises(ValueError, match="x is on cuda:0; the weight is on cpu"):
        module.cpu()(x)
    assert module(x.cpu()).device.type == "cpu"
    assert same_bits(module.cuda()(x), expected)
    other = module.scales * 2
    module.scales = other
    doubled = co.mixed_gemm(x, replace(packed_weight(), scales=other))
    for _ in range(3):
        assert same_bits(module(x), doubled)
    module.bias = None
    plain = co.mixed_gemm(x, replace(packed_weight(), scales=other, bias=None))
    for _ in range(3):
        assert same_bits(module(x), plain)


def test_plans_keep_no_weight_alive() -> None:
    module = co.MixedLinear(packed_weight())
    module(make_floats(3, K, HALF))
    codes = weakref.ref(module.codes)
    del module
    gc.collect()
    assert codes() is None


def test_a_graph_is_captured_with_a_remembered_plan() -> None:
    packed, x = packed_weight(), make_floats(40, K, HALF)
    for _ in range(2):
        co.mixed_gemm(x, packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = co.mixed_gemm(x, packed)
    for seed in range(2):
        x.copy_(torch.randn(40, K, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert same_bits(y, co.mixed_gemm(x, fresh(packed)))


def test_other_streams() -> None:
    packed, x = packed_weight(), make_floats(40, K, HALF)
    expected = co.mixed_gemm(x, packed)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = co.mixed_gemm(x, packed)
    stream.synchronize()
    assert same_bits(y, expected)
