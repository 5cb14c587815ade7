"""MixedLinear computes with its present buffers, however they were set."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from imports import import_or_skip
from torch import Tensor, nn

import cutlass_ops as co

N, K = 64, 128


def layer(seed: int = 0, bias: bool = True) -> co.MixedLinear:
    random = torch.Generator().manual_seed(seed)
    qw = co.quantize(torch.randn(N, K, generator=random), 4, 64, False)
    given = co.QuantizedWeight(
        qw.codes,
        qw.scales,
        qw.zeros,
        group_size=64,
        bias=torch.randn(N, generator=random) if bias else None,
    )
    return co.MixedLinear(co.reorder(given))


def activations(m: int = 3) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(1))


def state(seed: int) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in layer(seed).named_buffers()}


def assign(module: co.MixedLinear, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        setattr(module, name, tensor)


def write(module: co.MixedLinear, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        getattr(module, name).copy_(tensor)


def through_accelerate(module: co.MixedLinear, tensors: dict[str, Tensor]) -> None:
    utils = import_or_skip("accelerate.utils")
    for name, tensor in tensors.items():
        utils.set_module_tensor_to_device(module, name, "cpu", value=tensor)


WAYS: dict[str, Callable[[co.MixedLinear, dict[str, Tensor]], None]] = {
    "assigned": assign,
    "written": write,
    "accelerate": through_accelerate,
    "load_state_dict": lambda module, tensors: (
        module.load_state_dict({**module.state_dict(), **tensors}, assign=True) and None
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", ["codes", "scales", "zeros", "bias", "all"])
def test_a_new_tensor_is_seen(part: str, way: str) -> None:
    module, x = layer(0), activations()
    before = module(x)
    new = state(1) if part == "all" else {part: state(1)[part]}
    WAYS[way](module, new)
    expected = co.MixedLinear(replace(layer(0).packed, **new))(x)
    for _ in range(3):  # the first call sees it, the second keeps it
        assert torch.equal(module(x), expected)
    assert not torch.equal(before, expected)
    assert torch.equal(copy.deepcopy(module)(x), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_a_new_tensor_is_seen_by_kernels(way: str) -> None:
    """Where pointers to the old ones are kept."""
    if way == "accelerate":
        pytest.skip("its tensors are put on the CPU here")
    module, x = layer(0).cuda(), activations().cuda().half()
    expected = layer(1).cuda()(x)
    assert not torch.equal(module(x), expected)
    WAYS[way](module, {name: t.cuda() for name, t in state(1).items()})
    for _ in range(3):
        assert torch.equal(module(x), expected)
    assert torch.equal(
        torch.func.functional_call(module, dict(layer(2).cuda().named_buffers()), (x,)),
        layer(2).cuda()(x),
    )
    assert torch.equal(module(x), expected)


@pytest.mark.gpu
def test_weights_offloaded_to_the_cpu_are_brought_to_the_gpu() -> None:
    accelerate = import_or_skip("accelerate")
    model, x = (
        nn.Sequential(layer(0), nn.ReLU(), nn.Linear(N, K).half(), layer(1)),
        activations().cuda().half(),
    )
    expected = copy.deepcopy(model).cuda()(x).detach()
    accelerate.cpu_offload(model, execution_device=torch.device("cuda", 0), offload_buffers=True)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), expected)
    assert {t.device.type for t in model.state_dict().values()} == {"meta"}


def test_a_bias_can_be_added_and_removed() -> None:
    module, x = layer(), activations()
    with_bias, bias = module(x), module.bias
    module.bias = None
    torch.testing.assert_close(module(x), with_bias - bias)
    assert "bias=False" in repr(module)
    module.bias = bias
    assert torch.equal(module(x), with_bias)


@pytest.mark.parametrize("compiled", [False, True])
def test_functional_call(compiled: bool) -> None:
    module, x = layer(bias=False), activations()
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    prefix = "_orig_mod." if compiled else ""
    own = run(x)
    for factor in (2.0, 4.0):
        replaced = {f"{prefix}scales": module.scales * factor}
        assert torch.equal(torch.func.functional_call(run, replaced, (x,)), factor * own)
        assert torch.equal(run(x), own)


def test_a_compiled_layer_sees_new_tensors() -> None:
    module, x = layer(), activations()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled(x)
    for name, tensor in state(1).items():
        setattr(module, name, tensor)
        assert torch.equal(compiled(x), module(x))
    module.bias = None
    assert torch.equal(compiled(x), module(x))
    assert torch.equal(module(x), layer(1, bias=False)(x))


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("scales", torch.ones(2, 32), r"scales has shape \(2, 32\); \(2, 64\) is expected"),
        ("scales", torch.ones(2, 64, dtype=torch.float64), "scales has dtype float64"),
        ("scales", torch.ones(64, 2).t(), "scales has strides"),
        ("scales", None, "scales is a NoneType"),
        ("codes", torch.ones(3, dtype=torch.uint8), "codes has shape"),
        ("bias", torch.ones(N, device="meta"), "bias is on meta; the codes are on cpu"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(part: str, tensor: Any, message: str) -> None:
    module = layer()
    setattr(module, part, tensor)
    with pytest.raises((TypeError, ValueError), match=message):
        module(activations())


@pytest.mark.parametrize("part", ["scales", "bias"])
def test_a_parameter_in_place_of_a_packed_tensor_is_refused_with_gradients(part: str) -> None:
    module, x = layer(), activations()
    expected = module(x)
    setattr(module, part, nn.Parameter(getattr(module, part)))
    with pytest.raises(
        RuntimeError,
        match=f"{part} of the packed weight requires a gradient; packed weights are frozen",
    ):
        module(x)
    with torch.no_grad():
        assert torch.equal(module(x), expected)


@pytest.mark.parametrize("partly", [False, True])
def test_offloaded_weights_are_brought_for_a_call_and_not_kept(partly: bool) -> None:
    accelerate = import_or_skip("accelerate")
    model, x = nn.Sequential(layer(0), nn.Linear(N, K), layer(1)), activations()
    expected = model(x).detach()
    if partly:
        devices = (
            {"0": "cpu", "1": 0, "2": "cpu"}
            if torch.cuda.is_available()
            else {"0": "cpu", "1": "cpu", "2": "cpu"}
        )
        accelerate.dispatch_model(
            model, devices, main_device="cpu", offload_buffers=True, force_hooks=True
        )
    else:
        accelerate.cpu_offload(model, execution_device="cpu", offload_buffers=True)
    brought: list[weakref.ref[Tensor]] = []
    model[2].register_forward_pre_hook(
        lambda module, args: brought.append(weakref.ref(module.codes))
    )
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x).cpu(), expected)
    if not partly:
        assert {t.device.type for t in model.state_dict().values()} == {"meta"}
        gc.collect()
        # The copy that offloads is the last that lives: the layer holds none that a call was given.
        assert model[2].packed.device.type == "meta"


def test_a_functional_call_keeps_no_reference_to_its_tensors() -> None:
    module, x = layer(), activations()
    for seed in (1, 2, 3):
        lent = state(seed)
        codes = weakref.ref(lent["codes"])
        y = torch.func.functional_call(module, lent, (x,))
        assert torch.equal(y, layer(seed)(x))
        del lent
        assert codes() is None


def test_copies_and_pickles_of_a_layer_with_new_tensors() -> None:
    module, x = layer(), activations()
    assign(module, state(1))
    expected = module(x)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (copy.copy(module), copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), expected)


# ---- other ways into the layer


def test_dequantize() -> None:
    module = layer()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert torch.equal(module.dequantize(dtype), co.dequantize(module.packed, dtype))
    assert module.dequantize().dtype == torch.float16
    assert module.dequantize().shape == (module.out_features, module.in_features)
    with pytest.raises(TypeError, match=r"dtype is torch\.int8"):
        module.dequantize(torch.int8)


def test_there_is_no_weight() -> None:
    with pytest.raises(AttributeError, match=r"MixedLinear has no 'weight'.*dequantize\(\)"):
        _ = layer().weight
    assert not hasattr(layer(), "weight")
    with pytest.raises(AttributeError, match="nothing"):
        _ = layer().nothing


def test_torch_jit_is_refused() -> None:
    model, x = nn.Sequential(layer()), activations()
    with (
        pytest.warns((DeprecationWarning, FutureWarning), match="script"),
        pytest.raises(RuntimeError, match=r"scripted by torch\.jit"),
    ):
        torch.jit.script(model)
    with (
        pytest.warns((DeprecationWarning, FutureWarning), match="trace"),
        pytest.raises(RuntimeError, match=r"recorded by torch\.jit"),
    ):
        torch.jit.trace(model, x)


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export(strict: bool) -> None:
    model, x = nn.Sequential(layer()), activations()
    exported = torch.export.export(model, (x,), strict=strict)
    assert exported.state_dict.keys() == dict(model.named_buffers()).keys()
    assert torch.equal(exported.module()(x), model(x))


def test_hooks() -> None:
    module, x = layer(), activations()
    expected = module(x)
    module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    module.register_forward_hook(lambda module, args, y: y + 1)
    torch.testing.assert_close(module(x), 2 * expected - module.bias + 1)


# ---- fused layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = layer(0), layer(1), layer(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def fused() -> tuple[Block, Block]:
    model, plain = Block(), Block()
    assert co.fuse_linears(model).layers
    return model, plain


def test_fused_layers_are_differentiable() -> None:
    model, plain = fused()
    x, other = activations().requires_grad_(), activations().requires_grad_()
    grads = torch.randn(3, 3, N, generator=torch.Generator().manual_seed(2)).unbind()
    torch.autograd.backward(model(x), grads)
    torch.autograd.backward(plain(other), grads)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_parts_may_be_written_to_while_gradients_are_recorded() -> None:
    model, plain = fused()
    x, other = activations().requires_grad_(), activations().requires_grad_()
    for block, t in ((model, x), (plain, other)):
        q, k, v = block(t)
        q.mul_(2)
        (q.sin().sum() + k.sum() + v.sum()).backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_a_shared_result_is_not_taken_where_things_have_changed() -> None:
    model, plain = fused()
    x = activations()
    with torch.no_grad():
        model.q_proj(x)
    x.requires_grad_()
    assert model.k_proj(x).requires_grad
    x = activations().requires_grad_()
    with torch.no_grad():
        model.q_proj(x)
    assert model.k_proj(x).requires_grad

    x = activations()
    model.q_proj(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.k_proj(x).dtype == torch.bfloat16

    x = activations()
    model.q_proj(x)
    model.qkv_proj.scales = model.qkv_proj.scales * 2
    torch.testing.assert_close(
        model.k_proj(x), 2 * (plain.k_proj(x) - plain.k_proj.bias) + plain.k_proj.bias
    )
