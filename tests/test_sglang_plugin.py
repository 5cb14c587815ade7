"""The plugin's behaviour when SGLang calls it, with SGLang's classes in miniature."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_models import GROUP, stored

import cutlass_ops as co
from cutlass_ops import _C, sglang
from cutlass_ops.engines import layers as layers_module
from cutlass_ops.engines.layers import MODULE
from cutlass_ops.files.packed_config import WeightFormat, quantization_config
from cutlass_ops.sglang import directory, engine, linear

N, K = 64, 128


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang on a CPU that has our kernels and no AMX; ``settings`` are the plugin's,
    ``lines`` the log's.
    """
    settings: dict[str, Any] = {}
    lines: list[str] = []
    state = SimpleNamespace(
        settings=settings, lines=lines, is_cpu=True, is_cuda=False, has_amx=False
    )
    state.enable_deterministic_inference = False
    overrides = SimpleNamespace(json_model_override_args=None)

    def get_model() -> SimpleNamespace:
        overrides.json_model_override_args = json.dumps({"cutlass_ops": settings})
        return overrides

    logger = SimpleNamespace(info_once=lambda line, *arguments: lines.append(line % arguments))
    monkeypatch.setattr(linear._Linear, "engine", replace(engine.ENGINE, logger=logger))
    for module, name, value in (
        (engine, "get_model", get_model),
        (engine, "get_exec", lambda: SimpleNamespace(deterministic=state)),
        (linear, "is_cpu", lambda: state.is_cpu),
        (linear, "is_cuda", lambda: state.is_cuda),
        (linear, "cpu_has_amx_support", lambda: state.has_amx),
        (_C, "cpu_instruction_sets", lambda: ["avx2", "scalar"]),
    ):
        monkeypatch.setattr(module, name, value, raising=False)
    return state


def method_of(name: str, config: Any, parameters: dict[str, torch.Tensor]) -> Any:
    """A method of SGLang's that makes these parameters, and returns what the others get."""

    def create_weights(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        for part, value in parameters.items():
            layer.register_parameter(part, torch.nn.Parameter(value, requires_grad=False))

    members = {
        "create_weights": create_weights,
        "process_weights_after_loading": lambda self, layer: None,
        "apply": lambda self, layer, x, bias: "theirs",
    }
    method = type(name, (), members)()
    method.quant_config = config
    return method


def scheme(name: str, **fields: Any) -> Any:
    """A scheme of compressed-tensors' layers in SGLang."""
    return type(name, (), fields)()


def weight(kind: str, bits: int) -> co.QuantizedWeight:
    values = torch.randn(N, K, generator=torch.Generator().manual_seed(3))
    return co.quantize(
        values,
        bits,
        -1 if kind == "w8a8" else GROUP,
        symmetric=kind not in ("awq", "ct-asymmetric"),
    )


def case(kind: str, bits: int) -> tuple[Any, Any, co.QuantizedWeight]:
    """The method and scheme of a layer, and the weight that it holds."""
    one = weight(kind, bits)
    if kind == "awq":
        config = SimpleNamespace(weight_bits=4, group_size=GROUP)
        return method_of("AWQLinearMethod", config, stored(kind, one)), None, one
    if kind.startswith("gptq"):
        config = SimpleNamespace(weight_bits=bits, group_size=GROUP, desc_act=kind == "gptq-order")
        if kind == "gptq":
            config.checkpoint_format = ""
            return method_of("GPTQLinearMethod", config, stored(kind, one)), None, one
        config.is_sym = True
        parameters = stored("gptq", one)
        if kind == "gptq-order":
            perm = torch.randperm(K, generator=torch.Generator().manual_seed(4))
            groups = torch.empty(K, dtype=torch.int32)
            groups[perm] = parameters["g_idx"]
            order = torch.argsort(groups, stable=True)
            codes = torch.empty_like(one.codes)
            codes[:, order] = one.codes
            parameters = stored(
                "gptq", co.QuantizedWeight(codes, one.scales, bits=bits, group_size=GROUP)
            ) | {"g_idx": groups}
            one = co.QuantizedWeight(one.codes, one.scales, bits=bits, group_size=GROUP, perm=order)
        return method_of("GPTQMarlinLinearMethod", config, parameters), None, one
    method = method_of("CompressedTensorsLinearMethod", None, stored(kind, one))
    if kind == "w8a8":
        return (
            method,
            scheme(
                "CompressedTensorsW8A8Int8", is_static_input_scheme=False, input_symmetric=False
            ),
            one,
        )
    fields = {
        "pack_factor": 32 // bits,
        "group_size": GROUP,
        "symmetric": one.zeros is None,
        "has_g_idx": False,
    }
    return method, scheme("CompressedTensorsWNA16", **fields), one


CASES = [
    ("awq", 4),
    ("gptq", 4),
    ("gptq-marlin", 4),
    ("gptq-order", 4),
    ("ct", 4),
    ("ct", 8),
    ("ct-asymmetric", 8),
    ("w8a8", 8),
]


def loaded(method: Any, form: Any, k: int = K) -> tuple[Any, Any]:
    """Our method of a layer, and the layer, after loading; ``k`` input features on this rank."""
    layer = torch.nn.Module()
    layer.scheme = form
    ours = linear.taken(method)
    ours.create_weights(layer, k, [N], K, N, torch.bfloat16)
    ours.process_weights_after_loading(layer)
    return ours, layer


@pytest.mark.parametrize(("kind", "bits"), CASES)
def test_a_layer_is_packed_and_multiplied(kind: str, bits: int, cpu: SimpleNamespace) -> None:
    method, form, one = case(kind, bits)
    ours, layer = loaded(method, form)
    assert type(ours).__name__ == type(method).__name__
    assert linear.taken(ours) is ours
    kept = getattr(layer, MODULE)
    assert (kept.act_quant, kept.act_symmetric) == (
        ("token", False) if kind == "w8a8" else ("none", True)
    )
    found = kept.packed.unpack()
    for part in ("codes", "scales", "zeros", "perm"):
        expected = getattr(one, part)
        assert (
            (getattr(found, part) is None)
            if expected is None
            else torch.equal(getattr(found, part), expected)
        )
    x, bias = torch.randn(3, K).bfloat16(), torch.randn(N).bfloat16()
    y = co.mixed_gemm(
        x, co.reorder(one), bias, act_quant=kept.act_quant, act_symmetric=kept.act_symmetric
    )
    assert torch.equal(ours.apply(layer, x, bias), y)
    assert not {"scales", "qzeros", "g_idx", "weight_scale", "weight_zero_point"} & set(
        layer._parameters
    )
    ours.process_weights_after_loading(layer)  # a second time changes nothing
    assert getattr(layer, MODULE) is kept


@pytest.mark.parametrize("version", ["", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_gptq_are_read_by_the_files_version(bits: int, version: str) -> None:
    zeros = torch.randint(
        0 if version else 1, 2**bits, (4, 32), generator=torch.Generator().manual_seed(5)
    )
    parts = (zeros - (0 if version else 1)).unflatten(-1, (-1, 32 // bits)) << torch.arange(
        0, 32, bits
    )
    words = parts.sum(-1).to(torch.uint32).view(torch.int32)
    found = linear._gptq_zeros(words, bits, version)
    assert found is not None
    assert torch.equal(found, zeros.t().to(torch.uint8))


def test_gptq_zero_points_of_8_are_dropped() -> None:
    assert linear._gptq_zeros(torch.full((4, 4), 0x77777777, dtype=torch.int32), 4, "") is None


LEFT = {
    "GPTQ codes have 3 bits": (
        "gptq",
        lambda method, form, cpu: setattr(method.quant_config, "weight_bits", 3),
    ),
    "AWQ codes have 8 bits": (
        "awq",
        lambda method, form, cpu: setattr(method.quant_config, "weight_bits", 8),
    ),
    "x has one scale": (
        "w8a8",
        lambda method, form, cpu: setattr(form, "is_static_input_scheme", True),
    ),
    "group_size is 8": ("ct", lambda method, form, cpu: setattr(form, "group_size", 8)),
    "use AMX on this CPU": ("awq", lambda method, form, cpu: setattr(cpu, "has_amx", True)),
    "neither an NVIDIA GPU nor a CPU": (
        "ct",
        lambda method, form, cpu: setattr(cpu, "is_cpu", False),
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_a_layer_that_stays_with_sglang_is_logged_with_the_reason(
    reason: str, cpu: SimpleNamespace
) -> None:
    kind, change = LEFT[reason]
    method, form, _ = case(kind, 8 if kind == "w8a8" else 4)
    change(method, form, cpu)
    ours, layer = loaded(method, form)
    assert ours.apply(layer, torch.zeros(1, K)) == "theirs"
    assert len(cpu.lines) == 1
    assert cpu.lines[0].startswith(
        f"cutlass_ops leaves linear layers of {N} x {K} to SGLang's kernels: "
    )
    assert reason in cpu.lines[0]


def test_act_order_over_ranks_is_left_to_sglang(cpu: SimpleNamespace) -> None:
    method, form, _ = case("gptq-order", 4)
    loaded(method, form, K // 2)
    assert "act order and its input features are split over ranks" in cpu.lines[0]


def test_other_schemes_of_compressed_tensors_are_left_to_sglang(cpu: SimpleNamespace) -> None:
    method, _, _ = case("ct", 4)
    loaded(method, scheme("CompressedTensorsW8A8Fp8"))
    assert "the scheme of compressed-tensors is CompressedTensorsW8A8Fp8" in cpu.lines[0]


def test_the_user_chooses_how_activations_are_quantised_also_with_amx(cpu: SimpleNamespace) -> None:
    cpu.settings["act_quant"] = "block"
    cpu.has_amx = True
    method, form, _ = case("awq", 4)
    assert getattr(loaded(method, form)[1], MODULE).act_quant == "block"


@pytest.mark.parametrize("is_set", [True, False])
def test_products_are_batch_invariant_where_sglang_is_deterministic(
    is_set: bool, cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu.enable_deterministic_inference = is_set
    flags: list[bool] = []
    ours, layer = loaded(*case("ct", 4)[:2])
    monkeypatch.setattr(
        layers_module.gemm,
        "mixed_gemm",
        lambda *args, batch_invariant: flags.append(batch_invariant),
    )
    ours.apply(layer, torch.zeros(1, K))
    assert flags == [is_set]


def test_a_setting_that_does_not_exist_is_an_error(cpu: SimpleNamespace) -> None:
    cpu.settings["reference"] = True
    with pytest.raises(
        ValueError,
        match="json_model_override_args has 'reference' for cutlass_ops; known are act_quant",
    ):
        loaded(*case("ct", 4)[:2])


def test_methods_of_other_layers_stay_as_they_are() -> None:
    method = method_of("CompressedTensorsFusedMoEMethod", None, {})
    assert linear.taken(method) is method
    assert linear.taken(None) is None


def test_a_missing_configuration_is_named_and_the_others_are_hooked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    targets: list[str] = []
    registry = SimpleNamespace(register=lambda target, hook, kind: targets.append(target))
    monkeypatch.setattr(linear, "HookRegistry", registry, raising=False)
    monkeypatch.setattr(linear, "HookType", SimpleNamespace(AFTER="after"), raising=False)
    monkeypatch.setattr(linear, "_CONFIGS", ("json.JSONDecoder", "json.Missing"))
    monkeypatch.setattr(json.JSONDecoder, "get_quant_method", None, raising=False)
    with caplog.at_level(logging.WARNING):
        linear.take_layers()
    assert targets == ["json.JSONDecoder.get_quant_method"]
    assert "cutlass_ops leaves the layers of Missing to SGLang" in caplog.text


def test_packed_directories_are_registered_also_for_cpus_with_amx(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    methods: list[dict[str, Any]] = [{}, {}]
    calls: list[None] = []
    hooks: list[Any] = []
    for name, value in {
        "MISSING": None,
        "QUANTIZATION_METHODS": methods[0],
        "CPU_QUANTIZATION_METHODS": methods[1],
        "take_layers": lambda: calls.append(None),
        "HookRegistry": SimpleNamespace(
            register=lambda target, hook, kind: hooks.append((target, hook, kind))
        ),
        "HookType": SimpleNamespace(BEFORE="before"),
    }.items():
        monkeypatch.setattr(sglang, name, value, raising=False)
    sglang.register()
    assert methods == [{"cutlass_ops": directory.CutlassOpsConfig}] * 2
    assert len(calls) == 1
    target = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only"
    assert hooks == [(target, directory.named_as_the_model, "before")]


# ---- packed directories


@pytest.fixture
def layers(cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """SGLang's classes of layers and methods in miniature."""
    kinds: dict[str, Any] = {
        name: type(name, (torch.nn.Module,), {})
        for name in ("FusedMoE", "LinearBase", "VocabParallelEmbedding")
    }
    kinds["ParallelLMHead"] = type("ParallelLMHead", (kinds["VocabParallelEmbedding"],), {})
    kinds["UnquantizedEmbeddingMethod"] = type("UnquantizedEmbeddingMethod", (), {})
    kinds["UnquantizedLinearMethod"] = type("UnquantizedLinearMethod", (), {})
    for name, kind in kinds.items():
        monkeypatch.setattr(directory, name, kind, raising=False)
    return kinds


def config(modules: dict[str, int], mapping: dict[str, list[str]], **options: Any) -> Any:
    """The configuration of a directory with these layers, by their bits."""
    formats = {
        name: WeightFormat(bits, 32, (("scales", torch.float16),)) for name, bits in modules.items()
    }
    fields = quantization_config(formats, **options) | {
        "packed_modules_mapping": mapping,
        "hf_config": object(),
    }
    return directory.CutlassOpsConfig.from_config(fields)


def test_fused_layers_are_known_also_where_the_model_does_not_name_them(
    layers: dict[str, Any],
) -> None:
    modules = {"m.q_proj": 4, "m.k_proj": 4, "m.v_proj": 4, "m.o_proj": 8, "m.one": 8, "m.two": 8}
    found = config(modules, {"both": ["one", "two"]})
    for name, bits in (("m.qkv_proj", 4), ("m.o_proj", 8), ("m.both", 8)):
        method = found.get_quant_method(layers["LinearBase"](), name)
        assert type(method) is directory.PackedLinearMethod
        assert method.form.bits == bits


def test_layers_that_differ_and_are_fused_are_each_packed(layers: dict[str, Any]) -> None:
    found = config({"m.q_proj": 4, "m.k_proj": 8}, {}, not_converted=["m.v_proj"])
    method = found.get_quant_method(layers["LinearBase"](), "m.qkv_proj")
    assert type(method) is directory.FusedLinearMethod
    assert [one and one.form.bits for one in method.methods] == [4, 8, None]


def test_layers_that_are_not_packed_are_sglangs(layers: dict[str, Any]) -> None:
    found = config({"m.one": 4}, {}, not_converted=["m.two", "lm_head"])
    assert (
        type(found.get_quant_method(layers["LinearBase"](), "m.two")).__name__
        == "UnquantizedLinearMethod"
    )
    assert (
        type(found.get_quant_method(layers["ParallelLMHead"](), "lm_head")).__name__
        == "UnquantizedEmbeddingMethod"
    )
    assert found.get_quant_method(layers["VocabParallelEmbedding"](), "embed") is None
    assert found.get_quant_method(torch.nn.Module(), "attention") is None


def test_what_sglang_cannot_load_is_refused(layers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="packed experts are not loaded in SGLang yet"):
        config({"m.one": 4}, {}).get_quant_method(layers["FusedMoE"](), "m.experts")
    packed = config({"one": 8, "two": 8}, {}, embeddings={"one": "one", "two": "two"})
    with pytest.raises(ValueError, match="which of the packed embeddings one, two it makes"):
        packed.get_quant_method(layers["VocabParallelEmbedding"](), "")
    with pytest.raises(ValueError, match="without its name"):
        packed.get_quant_method(layers["LinearBase"](), "")


@pytest.mark.parametrize("name", ["one", "k_proj"])
def test_a_packed_layer_that_sglang_makes_without_the_configuration_is_refused(name: str) -> None:
    model = torch.nn.Module()
    model.m = torch.nn.ModuleDict({"one": torch.nn.Linear(8, 8), "qkv_proj": torch.nn.Linear(8, 8)})
    names = [(f"m.{name}.scales", torch.zeros(1)), (f"m.{name}.codes", torch.zeros(1))]
    arguments, _ = directory.named_as_the_model(model, names, "cpu")
    assert (arguments[0], arguments[2]) == (model, "cpu")
    with pytest.raises(
        ValueError,
        match=rf"m\.{name} is packed, but SGLang's Module makes it without the configuration",
    ):
        list(arguments[1])


def test_weights_of_layers_that_are_packed_or_elsewhere_are_passed_on() -> None:
    model = torch.nn.Module()
    model.one = torch.nn.Module()
    model.one.codes = torch.nn.Parameter(torch.zeros(1))
    # as of fused layers of which one stays floats
    model.one.weight = torch.nn.Parameter(torch.zeros(0))
    names = [
        ("one.codes", torch.zeros(1)),
        ("elsewhere.two.codes", torch.zeros(1)),
        ("one.weight", torch.zeros(1)),
    ]
    assert list(directory.named_as_the_model(model, names)[0][1]) == names


def embedding(layers: dict[str, Any], holder: str) -> Any:
    """A packed embedding of 64 x 32, and its weight, which has the name ``holder``."""
    packed = co.reorder(
        co.quantize(torch.randn(64, 32, generator=torch.Generator().manual_seed(7)), 8, 32)
    )
    form = WeightFormat(
        8, 32, tuple((part, t.dtype) for part, t in packed.tensors().items() if part != "codes")
    )
    found = directory.CutlassOpsConfig.from_config(
        quantization_config({holder: form}, embeddings={"embed": holder})
    )
    layer = layers["VocabParallelEmbedding"]()
    layer.tp_group, layer.org_vocab_size = (0, 1), 64
    layer.quant_method = found.get_quant_method(layer, "embed")
    layer.quant_method.create_weights(layer, 32, [64], 32, 64, torch.bfloat16)
    return layer, packed


@pytest.mark.parametrize("head", ["", "same", "other"])
def test_an_embedding_gets_the_tensors_of_the_head_that_it_is_tied_to(
    head: str, layers: dict[str, Any], cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "get_group_rank_size", lambda group: group, raising=False)
    quiet = replace(
        engine.ENGINE, is_cuda=lambda: False, logger=SimpleNamespace(info_once=lambda line: None)
    )
    monkeypatch.setattr(directory.PackedLinearMethod, "engine", quiet)
    layer, packed = embedding(layers, "lm_head" if head else "embed")
    model = torch.nn.Module()
    model.embed = layer
    if head:
        model.lm_head = (
            layer if head == "same" else torch.nn.ParameterDict({"codes": torch.zeros(1)})
        )
    stored = [
        (f"{'lm_head' if head else 'embed'}.{part}", tensor)
        for part, tensor in packed.tensors().items()
    ]
    names = []
    for name, tensor in directory.named_as_the_model(model, stored)[0][1]:
        names.append(name)
        if name.startswith("embed."):
            parameter = model.get_parameter(name)
            parameter.weight_loader(parameter, tensor)
    of_head = [name for name in names if name.startswith("lm_head")]
    assert of_head == (["lm_head.codes", "lm_head.scales"] if head == "other" else [])
    layer.quant_method.process_weights_after_loading(layer)
    ids = torch.tensor([[3, 63]])
    assert torch.equal(
        layer.quant_method.embedding(layer, ids), co.dequantize(packed, torch.bfloat16)[ids]
    )


def test_ranks_that_share_a_layer_are_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "get_group_rank_size", lambda group: group, raising=False)
    layer: Any = SimpleNamespace(tp_group=(3, 4))
    assert engine.ENGINE.rank(layer) == 3
    assert engine.ENGINE.kv_place(layer, 3, 4) == (3, 4)
    layer = SimpleNamespace(kv_tp_group=(3, 4), num_kv_head_replicas=2)
    assert engine.ENGINE.kv_place(layer, 3, 4) == (1, 2)
    layer = SimpleNamespace(kv_tp_group=(1, 2), num_kv_head_replicas=1)
    assert engine.ENGINE.kv_place(layer, 3, 4) == (1, 2)
