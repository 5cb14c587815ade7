"""MLPs that compute down(activation(gate(x)) * up(x)): which of them become gated, and that
everything else about the model stays, on a CPU.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import linears, logits, tiny
from imports import import_or_skip
from safetensors.torch import load_file
from torch import Tensor, nn

import cutlass_ops as co
from cutlass_ops import reference
from cutlass_ops.nn import FusedPart, GatedMLP
from cutlass_ops.nn.buffers import read_mark
from cutlass_ops.nn.gated_mlp import gated_form

transformers = import_or_skip("transformers")

K, N = 64, 40


class MLP(nn.Module):
    def __init__(self, act: nn.Module | None = None, n: int = N) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(K, n), nn.Linear(K, n, bias=False)
        self.down_proj = nn.Linear(n, K)
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class Swapped(MLP):
    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        y: Tensor = self.down_proj(torch.mul(up, self.act_fn(self.gate_proj(x))))
        return y


def packed(mlp: MLP, **options: Any) -> MLP:
    """With packed layers, the same ones every time."""
    torch.manual_seed(0)
    for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        nn.init.normal_(layer.weight)
        if layer.bias is not None:
            nn.init.normal_(layer.bias)
    weights = {
        name: co.reorder(co.quantize(getattr(mlp, name).weight.detach(), 8, 32))
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    co.replace_linears(mlp, weights, **options)
    return mlp


def fused(mlp: MLP, **options: Any) -> Any:
    model = packed(mlp, **options)
    co.fuse_linears(model)
    return model


def x(dtype: torch.dtype = torch.float32, m: int = 6) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(m)).to(dtype)


# ---- which do


@pytest.mark.parametrize("kind", [MLP, Swapped])
@pytest.mark.parametrize(
    ("act", "name"),
    [
        (nn.SiLU, "silu"),
        (nn.ReLU, "relu"),
        (lambda: transformers.activations.ACT2FN["silu"], "silu"),
        (lambda: transformers.activations.ACT2FN["gelu"], "gelu"),
        (lambda: transformers.activations.ACT2FN["gelu_pytorch_tanh"], "gelu_tanh"),
    ],
)
@pytest.mark.parametrize("act_quant", ["none", "block"])
def test_an_mlp_of_gate_and_up_becomes_gated(
    kind: type[MLP], act: Callable[[], nn.Module], name: str, act_quant: str
) -> None:
    plain, model = packed(kind(act()), act_quant=act_quant), fused(kind(act()), act_quant=act_quant)
    assert type(model) is GatedMLP
    layer: Any = model.gate_up_proj
    assert (layer.out_features, layer.activation, layer.packed.gated) == (N, name, True)
    assert "gated=True" in repr(layer)
    for m, dtype in ((6, torch.float32), (200, torch.bfloat16)):
        gate, up = (part.to(torch.float32) for part in (plain.gate_proj, plain.up_proj))
        wide = x(dtype, m)
        factors = [
            co.mixed_gemm(wide, w.packed, act_quant=act_quant, out_dtype=torch.float32)
            for w in (gate, up)
        ]
        product = (reference.activate(factors[0], name) * factors[1]).to(dtype)
        found = model.gate_up_proj(wide)
        # torch's sums of many rows have another order for a weight of another size.
        near = {} if m == 6 else {"rtol": 2**-7, "atol": 1e-3}
        torch.testing.assert_close(found, product, **(near or {"rtol": 0, "atol": 0}))
        assert torch.equal(model(wide), model.down_proj(found))


class Scaled(MLP):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 2
        return y


class Exchanged(MLP):
    """The activation is applied to the layer named up."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))
        return y


class Twice(MLP):
    def forward(self, x: Tensor) -> Tensor:
        self.down_proj(self.up_proj(x))
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class Branches(MLP):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class Other(MLP):
    """Others may call its method."""

    def gates(self, x: Tensor) -> Tensor:
        y: Tensor = self.act_fn(self.gate_proj(x))
        return y


def with_hook(name: str) -> Callable[[], MLP]:
    def make() -> MLP:
        mlp = packed(MLP())
        module: Any = getattr(mlp, name) if name else mlp
        module.register_forward_hook(lambda *_: None)
        return mlp

    return make


def with_forward() -> MLP:
    mlp = packed(MLP())
    mlp.forward = mlp.forward  # as accelerate does it
    return mlp


def with_activation() -> MLP:
    mlp = packed(MLP())
    for layer in (mlp.gate_proj, mlp.up_proj):
        layer.activation = "relu"
    return mlp


@pytest.mark.parametrize(
    "make",
    [
        lambda: packed(Scaled()),
        lambda: packed(Exchanged()),
        lambda: packed(Twice()),
        lambda: packed(Branches()),
        lambda: packed(Other()),
        lambda: packed(MLP(nn.GELU(approximate="tanh"))),
        lambda: packed(MLP(n=44)),
        with_hook(""),
        with_hook("act_fn"),
        with_hook("gate_proj"),
        with_hook("up_proj"),
        with_forward,
        with_activation,
    ],
)
def test_an_mlp_of_unknown_function_is_not_gated(make: Callable[[], MLP]) -> None:
    model: Any = make()
    kind, expected = type(model), make()(x())
    assert list(co.fuse_linears(model).layers) == ["gate_up_proj"]
    assert type(model) is kind
    assert not model.gate_up_proj.packed.gated
    torch.testing.assert_close(model(x()), expected)


def test_layers_that_are_gated_are_not_fused() -> None:
    model: Any = packed(MLP())
    model.gate_proj = co.nn.MixedLinear(fused(MLP()).gate_up_proj.packed)
    found = co.fuse_linears(model)
    assert found.refused == {"gate_up_proj": "gate_proj has a gated weight"}


def test_weights_of_other_forms_stay_apart() -> None:
    model: Any = packed(MLP())
    whole = model.up_proj.packed.unpack()
    other = co.reorder(co.quantize(co.dequantize(whole), 4, 32))
    model.up_proj = co.nn.MixedLinear(other)
    found = co.fuse_linears(model)
    assert "bits is 4 and 8" in found.refused["gate_up_proj"]
    assert type(model) is MLP


# ---- that all else stays


def test_gate_and_up_of_a_gated_layer_equal_the_separate_layers() -> None:
    plain, model = packed(MLP()), fused(MLP())
    for name in ("up_proj", "gate_proj"):
        part: Any = getattr(model, name)
        assert type(part) is FusedPart
        assert torch.equal(part(x()), getattr(plain, name)(x()))
        assert part.has_bias == (name == "gate_proj")
        own = getattr(plain, name).packed.tensors()
        found = part.packed.tensors()
        assert own.keys() == found.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in own.items())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "act_fn", nn.Tanh()),
        lambda m: setattr(m, "up_proj", nn.Identity()),
        lambda m: m.gate_proj.register_forward_hook(lambda _, args, y: y * 2),
        lambda m: m.act_fn.register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
        lambda m: setattr(m.up_proj, "forward", lambda x: x.new_ones(len(x), K)),
    ],
)
def test_later_changes_of_the_module_are_seen(change: Callable[[Any], Any]) -> None:
    plain, model = packed(MLP(n=K)), fused(MLP(n=K))
    for mlp in (plain, model):
        change(mlp)
    assert torch.equal(model(x()), plain(x()))


@pytest.mark.parametrize("move", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_gated_mlps(move: Callable[[Any], Any]) -> None:
    model = fused(MLP())
    moved = move(model)
    assert type(moved) is GatedMLP
    assert torch.equal(moved(x()), model(x()))
    moved.gate_up_proj.codes.zero_()
    assert not torch.equal(moved(x()), model(x()))


def test_it_compiles_into_one_graph_with_two_products() -> None:
    model = fused(MLP())
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x()), model(x()))
    products = [
        node for node in graphs[0].graph.nodes if node.target is torch.ops.cutlass_ops.mixed_gemm
    ]
    assert len(graphs) == 1
    assert len(products) == 2
    alone = torch.compile(
        lambda x: model.up_proj(x) + model.gate_proj(x), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(alone(x()), model.up_proj(x()) + model.gate_proj(x()))


def test_gradients_in_x_are_those_of_the_separate_layers() -> None:
    plain, model = packed(MLP()), fused(MLP())
    found = []
    for module in (plain, model):
        given = x().requires_grad_()
        (grad,) = torch.autograd.grad(module(given).square().sum(), given)
        found.append(grad)
    torch.testing.assert_close(
        found[0], found[1], rtol=1e-4, atol=1e-4 * float(found[0].abs().max())
    )


def test_the_state_of_a_gated_layer_is_for_gated_layers() -> None:
    model, other = fused(MLP()), fused(MLP())
    other.gate_up_proj.codes.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x()), model(x()))
    plain: Any = packed(Other())
    co.fuse_linears(plain)
    for a, b in ((plain, model), (model, plain)):
        with pytest.raises(
            RuntimeError, match=r"gate_up_proj.weight is of a packed weight that is"
        ):
            a.load_state_dict(b.state_dict())
    layer = co.nn.MixedLinear(model.gate_up_proj.packed)
    mark = read_mark(layer.state_dict()["weight"])
    assert mark is not None
    assert (mark["gated"], mark["layout_version"], mark["shape"]) == (True, 4, [N, K])
    moved = layer.to("meta").to_empty(device="cpu")
    assert moved.packed.gated


def test_the_form_has_the_names_of_the_children() -> None:
    form = gated_form(MLP(), "gate_proj", "up_proj")
    assert form is not None
    assert (form.function, form.down, form.activation) == ("act_fn", "down_proj", "silu")
    assert gated_form(MLP(), "up_proj", "gate_proj") is None
    assert gated_form(nn.Linear(3, 3), "gate_proj", "up_proj") is None
    assert gated_form(nn.Sequential(nn.SiLU()), "0", "1") is None


# ---- models of transformers


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_models_of_transformers(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    weights = {
        name: co.reorder(co.quantize(linear.weight.detach(), 4, 32, False))
        for name, linear in linears(model).items()
    }
    kinds = {name: type(module) for name, module in model.named_modules()}
    co.replace_linears(model, weights)
    model.save_pretrained(tmp_path / "separate")
    expected = logits(model)
    co.fuse_linears(model)
    mlps = [module for module in model.modules() if isinstance(module, GatedMLP)]
    assert len(mlps) == model.config.num_hidden_layers
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "fused")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("separate", "fused")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
    configs = [(tmp_path / name / "config.json").read_text() for name in ("separate", "fused")]
    assert configs[0] == configs[1]
    loaded = co.load_model(tmp_path / "fused")
    assert sum(isinstance(module, GatedMLP) for module in loaded.modules()) == len(mlps)
    assert torch.equal(logits(loaded), logits(model))
    plain = co.load_model(tmp_path / "fused", fuse=False)
    assert not any(isinstance(module, GatedMLP) for module in plain.modules())
    # Made float, its modules are of the model's classes again.
    floats = model.dequantize()
    assert {name: type(module) for name, module in floats.named_modules()} == kinds
    torch.testing.assert_close(logits(floats), expected, rtol=1e-3, atol=1e-3)


def test_a_layer_with_a_gated_weight_is_not_saved_and_has_no_float_layer(tmp_path: Path) -> None:
    model = tiny("llama")
    mlp = model.model.layers[0].mlp
    pair = [co.quantize(part.weight.detach(), 4, 32) for part in (mlp.gate_proj, mlp.up_proj)]
    co.replace_linears(
        model,
        {
            "model.layers.0.mlp.down_proj": co.reorder(
                co.quantize(mlp.down_proj.weight.detach(), 4, 32)
            )
        },
    )
    mlp.gate_up = co.nn.MixedLinear(co.reorder(pair, gated=True))
    with pytest.raises(
        ValueError, match=r"'model.layers.0.mlp.gate_up' has a gated weight, which is"
    ):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"gate_up' has a gated weight, the product of two"):
        model.dequantize()
    peft = import_or_skip("peft")
    with pytest.raises(ValueError, match="the layer has a gated weight, gate and up as one"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["gate_up"]))


def test_a_packed_file_with_a_gated_weight_is_no_model(tmp_path: Path) -> None:
    model = tiny("llama")
    pair = [co.quantize(torch.randn(64, 64), 4, 32) for _ in range(2)]
    path = tmp_path / "w.safetensors"
    co.save_packed(path, {"model.layers.0.mlp.gate_proj": co.reorder(pair, gated=True)})
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.gate_proj' is a gated weight"):
        co.load_model(path, config=model.config)


def test_adapters_on_gate_and_up_count() -> None:
    peft = import_or_skip("peft")
    found = []
    for fuse in (False, True):
        model = tiny("llama")
        weights = {
            name: co.reorder(co.quantize(linear.weight.detach(), 4, 32, False))
            for name, linear in linears(model).items()
        }
        co.replace_linears(model, weights)
        if fuse:
            co.fuse_linears(model)
        plain = logits(model)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["gate_proj", "up_proj"]))
        for i, (_, parameter) in enumerate(sorted(model.named_parameters())):
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(i))
        assert not torch.allclose(logits(model), plain)
        found.append(logits(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
