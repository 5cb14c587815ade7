"""MixedLinear and replace_linears: the layer equals the operator, whatever torch does to the
module.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import cutlass_ops as co
from cutlass_ops import reference

N, K = 40, 160


def quantized(
    n: int = N, k: int = K, seed: int = 0, bias: bool = True, perm: bool = True
) -> co.QuantizedWeight:
    """A weight that has every tensor but zeros, of several dtypes."""
    random = torch.Generator().manual_seed(seed)
    groups = -(-k // 64)
    return co.QuantizedWeight(
        codes=torch.randint(0, 16, (n, k), generator=random).to(torch.uint8),
        scales=torch.rand(n, groups, generator=random).to(torch.bfloat16),
        offsets=torch.randn(n, groups, generator=random),
        bits=4,
        group_size=64,
        bias=torch.randn(n, generator=random).half() if bias else None,
        perm=torch.randperm(k, generator=random) if perm else None,
    )


def activations(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def tensors(layer: co.MixedLinear) -> dict[str, Tensor]:
    return layer.packed.tensors()


def assert_consistent(layer: co.MixedLinear) -> None:
    """The packed weight is made of the very buffers of the module."""
    assert tensors(layer).keys() == dict(layer.named_buffers()).keys()
    for name, buffer in layer.named_buffers():
        assert tensors(layer)[name] is buffer


@pytest.mark.parametrize(
    ("act_quant", "act_symmetric"),
    [("none", True), ("block", True), ("block", False), ("token", False)],
)
@pytest.mark.parametrize("activation", [None, "silu", ("clamp", -1.0, 2.0)])
def test_forward_is_the_operator(act_quant: str, act_symmetric: bool, activation: Any) -> None:
    qw = quantized()
    layer = co.MixedLinear(co.reorder(qw), act_quant, act_symmetric, activation)
    x = activations(2, 2, K)
    expected = reference.mixed_gemm(
        x.view(4, K), qw, activation=activation, act_quant=act_quant, act_symmetric=act_symmetric
    )
    assert torch.equal(layer(x), expected.view(2, 2, N))
    assert (layer.in_features, layer.out_features) == (K, N)


def test_a_weight_that_is_not_packed_is_refused() -> None:
    with pytest.raises(TypeError, match="packed is a QuantizedWeight; a PackedWeight"):
        co.MixedLinear(co.quantize(torch.randn(N, K)))


def test_unknown_act_quant_is_refused_when_the_layer_is_made() -> None:
    with pytest.raises(ValueError, match=r"act_quant is 'row'.*'none', 'token', 'block'"):
        co.MixedLinear(co.reorder(quantized()), act_quant="row")


@pytest.mark.parametrize(
    "cast", [lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.bfloat16()]
)
def test_changes_of_dtype_leave_the_checkpoints_values(cast: Any) -> None:
    packed = co.reorder(quantized())
    layer = co.MixedLinear(packed)
    model = cast(nn.Sequential(layer, nn.Linear(N, 3)))
    assert model[1].weight.dtype != torch.float32
    for name, tensor in packed.tensors().items():
        assert getattr(layer, name).dtype == tensor.dtype
        assert torch.equal(getattr(layer, name), tensor)
    assert_consistent(layer)


def test_moves_take_the_packed_weight_along() -> None:
    layer = co.MixedLinear(co.reorder(quantized()))
    layer.to("meta")
    assert layer.packed.device.type == "meta"
    assert_consistent(layer)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(assign: bool) -> None:
    layer, other = (co.MixedLinear(co.reorder(quantized(seed=seed))) for seed in (0, 1))
    x = activations(2, K)
    expected = other(x)
    assert not torch.equal(layer(x), expected)
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    assert state.keys() == {*tensors(other), "weight"}
    layer.load_state_dict(state, assign=assign)
    assert torch.equal(layer(x), expected)
    assert_consistent(layer)


def test_tensors_that_move_to_shared_memory() -> None:
    """As torch moves them when a layer is sent to another process."""
    layer = co.MixedLinear(co.reorder(quantized()), "block", False)
    images, experts = torch.randn(1, 128, 6, 6), torch.randn(3, 128)
    conv = co.nn.MixedConv2d(
        co.reorder(co.quantize(torch.randn(256, 128, 3, 3), bits=4, group_size=256)),
        act_quant="token",
    )
    stack = [co.quantize(torch.randn(128, 128), bits=4, group_size=32) for _ in range(2)]
    moe = co.nn.MixedExperts(
        co.reorder_experts(stack, gated=True),
        co.reorder_experts([co.quantize(torch.randn(128, 64), bits=4, group_size=32)] * 2),
    )
    ids, weights = torch.tensor([[0, 1], [1, 0], [0, 1]]), torch.ones(3, 2)
    runs: list[tuple[Any, Callable[[], Tensor]]] = [
        (layer, lambda: layer(activations(2, K))),
        (conv, lambda: conv(images)),
        (moe, lambda: moe(experts, ids, weights)),
    ]
    for module, run in runs:
        expected = run()
        for tensor in module.buffers():
            before = tensor.data_ptr()
            tensor.share_memory_()
            assert tensor.data_ptr() != before
        assert torch.equal(run(), expected)
        for name, tensor in module.named_buffers():
            if name.endswith("codes"):  # which the kernels must read where they are now
                tensor.zero_()
        assert not torch.equal(run(), expected)


def test_copies_and_pickles_stand_alone() -> None:
    layer = co.MixedLinear(co.reorder(quantized()), "block", False)
    x = activations(2, K)
    expected = layer(x)
    # leaves pointers to its tensors in the packed weight
    co.explain(1, layer.packed, device="sm_90")
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for twin in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert "_native" not in vars(twin.packed)
        assert torch.equal(twin(x), expected)
        assert_consistent(twin)
        assert twin.codes.data_ptr() != layer.codes.data_ptr()


def test_a_weight_that_was_loaded_on_another_device_has_that_device() -> None:
    file = io.BytesIO()
    torch.save(co.reorder(quantized()), file)
    file.seek(0)
    packed = torch.load(file, map_location="meta", weights_only=False)
    assert (packed.device, packed.gpu) == (packed.codes.device, -1)
    assert packed.device.type == "meta"


def test_compiles_into_one_graph() -> None:
    layer = co.MixedLinear(co.reorder(quantized()), "block", activation="relu")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for m in (1, 5):
        x = activations(m, K)
        assert torch.equal(compiled(x), layer(x))


def test_repr_says_what_the_layer_holds() -> None:
    layer = co.MixedLinear(co.reorder(quantized()), "block", False, "silu")
    assert repr(layer) == (
        "MixedLinear(in_features=160, out_features=40, bias=True, bits=4, group_size=64, offsets, "
        "act_quant='block', "
        "act_symmetric=False, activation='silu')"
    )
    plain = co.MixedLinear(co.reorder(co.quantize(activations(8, 32), 8, 32)))
    assert repr(plain) == (
        "MixedLinear(in_features=32, out_features=8, bias=False, bits=8, group_size=32, symmetric, "
        "act_quant='none')"
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(N, K)
        self.up = nn.Sequential(nn.Linear(K, N), nn.ReLU())
        self.down = nn.Linear(N, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y


def test_replace_linears_replaces_what_is_named_and_keeps_biases() -> None:
    model = Block().eval()
    bias = model.up[0].bias.detach().clone()
    up, down = quantized(bias=False), quantized(24, N, perm=False)
    names = co.replace_linears(
        model, {"up.0": co.reorder(up), "down": co.reorder(down)}, "token", False
    )
    assert names == ["up.0", "down"]
    for layer in (model.up[0], model.down):
        assert isinstance(layer, co.MixedLinear)
        assert not layer.training
        assert (layer.act_quant, layer.act_symmetric) == ("token", False)
    x = activations(3, K)
    options: dict[str, Any] = {"act_quant": "token", "act_symmetric": False}
    hidden = reference.mixed_gemm(x, up, bias=bias, activation="relu", **options)
    # down's bias is the packed one
    assert torch.equal(model(x), reference.mixed_gemm(hidden, down, **options))
    assert isinstance(model.table, nn.Embedding)


def test_replace_linears_takes_the_packed_bias_where_both_have_one() -> None:
    model = Block()
    weight = co.reorder(quantized())
    co.replace_linears(model, {"up.0": weight})
    assert model.up[0].bias is weight.bias


def test_replace_linears_leaves_other_layers() -> None:
    model = Block()
    down = model.down
    assert co.replace_linears(model, {"up.0": co.reorder(quantized())}) == ["up.0"]
    assert model.down is down


@pytest.mark.parametrize(
    ("name", "weight", "error", "match"),
    [
        (
            "down",
            quantized(),
            ValueError,
            r"'down': the packed weight is \[40, 160\]; the layer is \[24, 40\]",
        ),
        ("sideways", quantized(), ValueError, "'sideways': the model has no module of that name"),
        ("", quantized(), ValueError, "'': the model has no module"),
        (
            "table",
            quantized(),
            TypeError,
            "'table': the module is a Embedding; torch.nn.Linear is expected",
        ),
        ("up", quantized(), TypeError, "'up': the module is a Sequential"),
        (
            "down",
            torch.zeros(24, N),
            TypeError,
            "'down': the weight is a Tensor; a PackedWeight is expected",
        ),
    ],
)
def test_replace_linears_refuses_and_changes_nothing(
    name: str, weight: Any, error: type[Exception], match: str
) -> None:
    model = Block()
    before = dict(model.named_modules())
    if isinstance(weight, co.QuantizedWeight):
        weight = co.reorder(weight)
    with pytest.raises(error, match=match):
        co.replace_linears(model, {"up.0": co.reorder(quantized()), name: weight})
    assert dict(model.named_modules()) == before


class Attention(nn.Module):
    """Calls its layers as transformers' models do: each with the same tensor."""

    def __init__(self, weights: dict[str, co.QuantizedWeight], act_quant: str = "none") -> None:
        super().__init__()
        for name, weight in weights.items():
            self.add_module(name, co.MixedLinear(co.reorder(weight), act_quant, False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(
            [self.get_submodule(name)(x).view(*x.shape[:-1], -1, 1) for name in PROJECTIONS], dim=-2
        )


PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def projections() -> dict[str, co.QuantizedWeight]:
    """Three weights that can be packed as one, of odd sizes, whose products with whole numbers
    are exact in fp32.
    """
    random = torch.Generator().manual_seed(0)
    perm = torch.randperm(K, generator=random)
    weights = {}
    for name, n in zip(PROJECTIONS, (70, 8, 24), strict=True):
        weights[name] = co.QuantizedWeight(
            codes=torch.randint(0, 16, (n, K), generator=random).to(torch.uint8),
            scales=2.0 ** torch.randint(-3, 3, (n, 3), generator=random).to(torch.bfloat16),
            zeros=torch.randint(0, 16, (n, 3), generator=random).to(torch.uint8),
            bits=4,
            group_size=64,
            bias=None if name == "k_proj" else torch.randint(-9, 9, (n,), generator=random).half(),
            perm=perm,
        )
    return weights


def whole_numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(-40, 40, shape, generator=torch.Generator().manual_seed(seed)).float()


class Counted:
    """How often a module runs."""

    def __init__(self, module: nn.Module) -> None:
        self.calls = 0
        module.register_forward_hook(self)

    def __call__(self, *args: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
@pytest.mark.parametrize("inference", [False, True])
def test_fused_layers_equal_the_separate_layers(act_quant: str, inference: bool) -> None:
    separate, model = (
        nn.ModuleDict({"self_attn": Attention(projections(), act_quant)}) for _ in range(2)
    )
    done = co.fuse_linears(model)
    assert done.layers == {"self_attn.qkv_proj": tuple(f"self_attn.{name}" for name in PROJECTIONS)}
    assert not done.refused
    attention = model["self_attn"]
    counted = Counted(attention.qkv_proj)
    with torch.inference_mode(inference):
        for seed in (1, 2):  # another x is another product
            x = whole_numbers(2, 3, K, seed=seed)
            expected = separate["self_attn"](x)
            y = attention(x)
            assert counted.calls == seed
            assert torch.equal(y, expected)
    assert attention._modules["q_proj"]._shared.last is None  # nothing is kept


@pytest.mark.parametrize("rows", [(70, 8, 24), (64, 128, 24)])
def test_a_part_of_a_fused_layer_equals_the_separate_weight(rows: tuple[int, ...]) -> None:
    weights = projections()
    for (name, weight), n in zip(weights.items(), rows, strict=True):
        parts = {part: getattr(weight, part) for part in ("codes", "scales", "zeros", "bias")}
        repeated = {
            part: t.repeat(16, *[1] * (t.dim() - 1))[:n]
            for part, t in parts.items()
            if t is not None
        }
        weights[name] = replace(weight, **repeated)
    separate, model = Attention(weights), Attention(weights)
    co.fuse_linears(model)
    for name in PROJECTIONS:
        expected, found = separate.get_submodule(name).packed, model.get_submodule(name).packed
        assert (found.shape, found.bits, found.group_size) == (
            expected.shape,
            expected.bits,
            expected.group_size,
        )
        assert found.tensors().keys() == expected.tensors().keys()
        for part, tensor in expected.tensors().items():
            assert torch.equal(found.tensors()[part], tensor), (name, part)


def test_offloaded_layers_are_not_fused() -> None:
    model = Attention(projections())
    model.k_proj.to("meta")
    done = co.fuse_linears(model)
    assert done.refused == {"qkv_proj": "k_proj is offloaded: its tensors are not in memory"}
    assert not done.layers


def test_fused_layers_can_be_called_in_any_order_and_separately() -> None:
    separate, model = (Attention(projections(), "block") for _ in range(2))
    co.fuse_linears(model)
    counted = Counted(model.qkv_proj)
    x, other = whole_numbers(3, K), whole_numbers(3, K) + 1
    calls = [
        ("v_proj", x),
        ("q_proj", x),
        ("q_proj", x),
        ("k_proj", other),
        ("k_proj", x),
        ("v_proj", x),
        ("v_proj", x.clone()),
    ]
    for name, argument in calls:
        assert torch.equal(
            model.get_submodule(name)(argument), separate.get_submodule(name)(argument)
        )
    assert counted.calls == 5
    model.q_proj(x)
    x += 1  # the same tensor, but not the same values
    assert torch.equal(model.k_proj(x), separate.k_proj(x))


@pytest.mark.parametrize("change", ["weights", "a buffer", "activations", "dtype", "mode"])
def test_fused_layers_keep_no_result_of_what_has_changed(change: str) -> None:
    separate, model = (Attention(projections()) for _ in range(2))
    co.fuse_linears(model)
    x = whole_numbers(3, K)

    def multiply(layer: nn.Module, dtype: torch.dtype, inference: bool) -> Tensor:
        with (
            torch.inference_mode(inference),
            torch.autocast("cpu", dtype, enabled=change == "dtype"),
        ):
            return cast(Tensor, layer(x))

    multiply(model.q_proj, torch.bfloat16, change == "mode")
    if change == "weights":
        other = {name: replace(w, scales=w.scales * 2) for name, w in projections().items()}
        separate, loaded = (Attention(other) for _ in range(2))
        co.fuse_linears(loaded)
        model.load_state_dict(loaded.state_dict())
    elif change == "a buffer":
        model.qkv_proj.scales.mul_(2)
        separate.k_proj.scales.mul_(2)
    elif change == "activations":
        co.set_activations(model, "token")
        co.set_activations(separate, "token")
    y = multiply(model.k_proj, torch.float16, False)
    expected = multiply(separate.k_proj, torch.float16, False)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    assert not y.is_inference()


def test_fused_layers_share_a_result_where_a_hook_brings_the_weight() -> None:
    model = Attention(projections())
    co.fuse_linears(model)
    layer = model.qkv_proj

    def bring(*args: Any) -> None:
        if not counted.calls:
            scales = torch.empty_like(layer.scales)
            for _ in range(9):  # a copy that is written to more often than the first
                scales.copy_(layer.scales)
            layer.scales = scales

    layer.register_forward_pre_hook(bring)
    counted = Counted(layer)
    model(whole_numbers(3, K))
    assert counted.calls == 1


def test_fused_layers_move_copy_pickle_and_have_one_copy_of_the_weights() -> None:
    model = Attention(projections(), "block")
    x = whole_numbers(3, K)
    expected = model(x)
    bytes_before = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    co.fuse_linears(model)
    assert {name.split(".")[0] for name, _ in model.named_buffers(remove_duplicate=False)} == {
        "qkv_proj"
    }
    assert sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()) <= bytes_before
    model.q_proj(x)  # leaves a result that no copy must have
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert twin.q_proj._shared.layer is twin.qkv_proj is not model.qkv_proj
        assert twin.q_proj._shared is twin.k_proj._shared
        assert twin.q_proj._shared.last is None
        assert torch.equal(twin(x), expected)
    assert repr(model.k_proj) == "FusedPart(in_features=160, out_features=8)"
    model.to("meta")
    assert model.q_proj._shared.layer.packed.device.type == "meta"


def test_fused_layers_compile_into_one_graph_with_one_product() -> None:
    model = Attention(projections(), "block")
    expected = {m: model(whole_numbers(m, K)) for m in (2, 5)}
    co.fuse_linears(model)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for m, y in expected.items():
        assert torch.equal(compiled(whole_numbers(m, K)), y)
    for graph in graphs:
        assert sum("mixed_gemm" in str(node.target) for node in graph.graph.nodes) == 1


@pytest.mark.parametrize("rows", [(64, 128, 64), (64, 64, 30), (64, 40, 64)])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "book"])
def test_the_shared_weight_is_that_of_reorder(kind: str, rows: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    weights = {
        name: co.quantize(torch.randn(n, K, generator=random), 4, 32, kind != "zeros")
        for name, n in zip(PROJECTIONS, rows, strict=True)
    }
    extra = {
        "perm": torch.randperm(K, generator=random),
        "book": torch.rand(16, generator=random) if kind == "book" else None,
    }
    weights = {
        name: replace(w, bias=torch.randn(w.n, generator=random), **extra)
        for name, w in weights.items()
    }
    model = Attention(weights)
    assert not co.fuse_linears(model).refused
    expected = co.reorder(list(weights.values()))
    assert model.qkv_proj.packed.shape == expected.shape
    assert tensors(model.qkv_proj).keys() == expected.tensors().keys()
    for name, tensor in expected.tensors().items():
        assert torch.equal(tensors(model.qkv_proj)[name], tensor)


def test_weights_of_whole_panels_that_differ_are_refused() -> None:
    weights = {name: co.quantize(activations(64, K), 4, 32) for name in PROJECTIONS}
    other = {
        "group_size": co.quantize(activations(64, K), 4, 64),
        "bits": co.quantize(activations(64, K), 8, 32),
    }
    other["dtype"] = co.quantize(activations(64, K).half(), 4, 32)
    first = replace(weights["q_proj"], perm=torch.arange(K))
    for name, weight in other.items():
        refused = co.fuse_linears(Attention({**weights, "v_proj": weight})).refused["qkv_proj"]
        assert ("scales is float16" if name == "dtype" else name) in refused
    assert (
        "act orders"
        in co.fuse_linears(
            Attention(
                {
                    "q_proj": first,
                    "k_proj": replace(first, perm=torch.arange(K).flip(0)),
                    "v_proj": first,
                }
            )
        ).refused["qkv_proj"]
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"k_proj": {"bits": 8}}, "bits is 8 and 4"),
        ({"v_proj": {"perm": None}}, "perm is None and int64"),
        ({"v_proj": {"perm": torch.arange(K)}}, "their act orders"),
        ({"k_proj": {"zeros": None}}, "zeros is None and uint8"),
        ({"k_proj": {"scales": torch.ones(8, 3)}}, "scales is float32 .* and bfloat16"),
    ],
)
def test_layers_that_differ_are_left_alone_with_the_reason(
    change: dict[str, Any], match: str
) -> None:
    weights = {
        name: replace(weight, **change.get(name, {})) for name, weight in projections().items()
    }
    model = nn.ModuleDict({"a": Attention(weights), "b": Attention(projections())})
    before = dict(model["a"].named_modules())
    done = co.fuse_linears(model)
    assert done.refused.keys() == {"a.qkv_proj"}
    assert re.search(match, done.refused["a.qkv_proj"])
    assert dict(model["a"].named_modules()) == before
    assert done.layers.keys() == {"b.qkv_proj"}


def test_layers_of_other_kinds_or_options_are_left_alone_with_the_reason() -> None:
    model = Attention(projections())
    model.k_proj.act_quant = "token"
    assert "act_quant" in co.fuse_linears(model).refused["qkv_proj"]
    model.k_proj = nn.Linear(K, 8)
    assert co.fuse_linears(model).refused == {
        "qkv_proj": "k_proj is a Linear; a MixedLinear is expected"
    }
    model = Attention(projections())
    assert not co.fuse_linears(model).refused
    assert co.fuse_linears(model).refused == {"qkv_proj": "its parent has a qkv_proj already"}
    # nothing to fuse
    assert co.fuse_linears(nn.ModuleDict({"gate_proj": nn.Linear(4, 4)})) == co.fuse_linears(
        nn.ReLU()
    )
    chosen = nn.ModuleDict(
        {name: co.MixedLinear(co.reorder(weight)) for name, weight in projections().items()}
    )
    assert co.fuse_linears(chosen, {"qv": ("q_proj", "v_proj")}).layers == {
        "qv": ("q_proj", "v_proj")
    }


def test_set_activations_reaches_every_layer() -> None:
    model = nn.ModuleDict({"a": Attention(projections()), "b": nn.Linear(2, 2)})
    co.fuse_linears(model["a"])
    co.set_activations(model, "token", False)
    assert (model["a"].qkv_proj.act_quant, model["a"].qkv_proj.act_symmetric) == ("token", False)
    with pytest.raises(ValueError, match="act_quant is 'row'"):
        co.set_activations(model, "row")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("act_quant", ["none", "block"])
def test_gpu_layer_moves_and_multiplies(act_quant: str, dtype: torch.dtype) -> None:
    qw = quantized()
    layer = co.MixedLinear(co.reorder(qw), act_quant)
    x = activations(5, K).to(dtype)
    expected = reference.mixed_gemm(
        x, qw, act_quant=act_quant, out_dtype=torch.float32, compute_dtype=torch.float64
    )
    # Weights may be rounded to x's dtype.
    step, sums = (2.0**-7, 1e-2) if dtype == torch.bfloat16 else (2.0**-10, 1.2e-3)
    for model in (layer.cuda(), copy.deepcopy(layer), layer.cpu().to("cuda", dtype)):
        assert_consistent(model)
        for _ in range(2):  # the second call uses the pointers that the first one kept
            y = model(x.cuda())
            assert y.dtype == dtype
            difference = (y.cpu().float() - expected).abs()
            assert (
                difference <= step * expected.abs() + sums * expected.square().mean().sqrt()
            ).all()


@pytest.mark.gpu
@pytest.mark.parametrize("act_quant", ["none", "block"])
@pytest.mark.parametrize("m", [1, 100])
def test_gpu_fused_layers_equal_the_separate_layers(m: int, act_quant: str) -> None:
    separate, model = (Attention(projections(), act_quant).cuda() for _ in range(2))
    co.fuse_linears(model)
    assert model.qkv_proj.packed.device.type == "cuda"
    x = whole_numbers(m, K).half().cuda()
    y, expected = model(x).float(), separate(x).float()
    # Sums of float products are exact here; those of quantised x depend on how many
    # parts K is cut into.
    tolerance = 0 if act_quant == "none" else 2.0**-10
    assert (
        (y - expected).abs() <= tolerance * (expected.abs() + expected.square().mean().sqrt())
    ).all()
