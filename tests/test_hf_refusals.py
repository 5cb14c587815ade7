"""load_model and from_pretrained refuse directories that are no packed models or claim to be."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MOE, SIZES, rewrite, tiny, write_act_order
from imports import import_or_skip
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model

transformers = import_or_skip("transformers")


@pytest.fixture(scope="module")
def act_order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_act_order(tmp_path_factory.mktemp("act_order"))


def test_a_config_of_absurd_size_is_refused(act_order: Path, tmp_path: Path) -> None:
    tiny(num_hidden_layers=1).save_pretrained(tmp_path)
    config = {**json.loads((tmp_path / "config.json").read_text()), "num_hidden_layers": 10**9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="num_hidden_layers 1000000000; at most 1000 are expected"):
        reorder_model(co.load_checkpoint(tmp_path), tmp_path / "packed", Options(8, 32))
    (tmp_path / "packed.safetensors").write_bytes(act_order.read_bytes())
    with pytest.raises(ValueError, match="num_hidden_layers 1000000000; at most 1000 are expected"):
        co.load_model(tmp_path / "packed.safetensors")


def test_an_old_transformers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny().save_pretrained(tmp_path / "float")
    reorder_model(co.load_checkpoint(tmp_path / "float"), tmp_path / "packed", Options(8, 32))
    module = import_module("cutlass_ops.integrations.hf_quantizer")
    quantizer, hook = module.CutlassOpsQuantizer, "update_attn_implementation"
    # Where transformers has both hooks, as 5.20 does, it calls the older one, too.
    taken = getattr(quantizer, hook)
    monkeypatch.setattr(quantizer, hook, lambda own, c: taken(own, own.update_tp_plan(c)))
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    monkeypatch.delattr(module.HfQuantizer, hook)
    monkeypatch.setattr(transformers, "__version__", "5.17.0")
    with pytest.raises(
        ImportError, match=r"^transformers 5\.17\.0 is .* packed models need 5\.20 "
    ):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


def test_transformers_alone_refuses_a_packed_directory(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "float")
    reorder_model(co.load_checkpoint(tmp_path / "float"), tmp_path / "packed", Options(8, 32))
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed").save_pretrained(
        tmp_path / "saved"
    )
    code = f"""
        import sys, transformers
        for name in ("packed", "saved"):
        \ttry:
        \t\ttransformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r} + "/" + name)
        \texcept ValueError as error:
        \t\tprint(name, error)
        assert "cutlass_ops" not in sys.modules
    """
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        "\n".join(line.strip(" ") for line in code.splitlines()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["packed", "saved"]
    # A configuration that is read and written alone keeps it too.
    transformers.AutoConfig.from_pretrained(tmp_path / "packed").save_pretrained(tmp_path)
    assert (
        "is packed by cutlass_ops"
        in json.loads((tmp_path / "config.json").read_text())["transformers_weights"]
    )
    said = (
        "this model is packed by cutlass_ops: install it and import cutlass_ops before "
        "from_pretrained"
    )
    assert all(line.endswith(said) for line in lines)


def test_experts_packed_one_by_one_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier versions wrote them: transformers has no linear layers of these names."""
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**SIZES, **MOE}))
    model.save_pretrained(tmp_path / "float")
    with monkeypatch.context() as patch:
        patch.setattr("cutlass_ops.files.conversion_plan.layers_of", lambda *_: [])
        patch.setattr("cutlass_ops.nn.architecture.Architecture.reason_to_keep", lambda *_: "")
        reorder_model(co.load_checkpoint(tmp_path / "float"), tmp_path / "packed", Options(8, 32))
    reasons = (
        r"packed, but not linear layers or experts of MixtralForCausalLM: "
        r"model\.layers\.0\.block_sparse_moe\.experts\.0\.w1 \(transformers loads it as part of "
        r".*gate_up_proj\).*"
        r"model\.layers\.0\.block_sparse_moe\.gate \(it is a parameter of MixtralTopKRouter.*; "
        r"reorder the checkpoint"
    )
    for load in (co.load_model, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=reasons):
            load(tmp_path / "packed")


def test_layers_that_a_config_cannot_describe_are_not_saved(
    act_order: Path, tmp_path: Path
) -> None:
    model = co.load_model(act_order, fuse=False)
    layer = model.model.layers[0].mlp.up_proj
    layer.act_quant = "token"
    with pytest.raises(
        ValueError,
        match=r"differ between layers \('.*' has 'none', True, '.*up_proj' has 'token', True\)",
    ):
        model.save_pretrained(tmp_path / "saved")
    layer.act_quant, layer.activation = "none", "relu"
    with pytest.raises(ValueError, match=r"up_proj' has activation 'relu', which is not stored"):
        model.save_pretrained(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*.json"))
    model.hf_quantizer = object.__new__(transformers.quantizers.quantizer_hqq.HqqHfQuantizer)
    model.hf_quantizer.quantization_config = transformers.HqqConfig()
    with pytest.raises(ValueError, match="the model is quantised by hqq already"):
        co.replace_linears(model, {})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"up_proj.perm": torch.zeros(64, dtype=torch.int32)},
            "up_proj.perm' is not a permutation of 0 .. 63",
        ),
        (
            {"up_proj.zeros": torch.full((4, 128), 9, dtype=torch.int8)},
            "up_proj.zeros' holds values outside of -8 .. 7",
        ),
        ({"up_proj.scales": None}, "up_proj.scales' is not in the model's files"),
    ],
)
def test_files_with_false_metadata(
    act_order: Path, tmp_path: Path, change: dict[str, Tensor | None], match: str
) -> None:
    model = co.load_model(act_order, fuse=False)
    model.save_pretrained(tmp_path / "saved")
    broken = {f"model.layers.0.mlp.{name}": tensor for name, tensor in change.items()}
    folder = rewrite(tmp_path / "saved", tmp_path / "broken", broken)
    for load in (co.load_model, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=match):
            load(folder)
    on_disk = {"device_map": {"model": "disk", "lm_head": "cpu"}, "offload_buffers": True}
    with pytest.raises(ValueError, match=match):
        transformers.AutoModelForCausalLM.from_pretrained(
            folder, **on_disk, offload_folder=tmp_path / "offload"
        )


@pytest.mark.parametrize("quantised", [True, False], ids=["packed", "on load"])
def test_a_tensor_parallel_plan_is_refused(
    quantised: bool, act_order: Path, tmp_path: Path
) -> None:
    model = co.load_model(act_order, fuse=False)
    (model if quantised else model.dequantize()).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    # as from_pretrained(tp_size=2) has it
    config.distributed_config = transformers.distributed.DistributedConfig(tp_size=2)
    options = (
        {} if quantised else {"quantization_config": co.CutlassOpsConfig(bits=4, group_size=32)}
    )
    with pytest.raises(ValueError, match="tp_plan and tp_size split parameters"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config, **options)


def test_other_models_files_are_refused(act_order: Path, tmp_path: Path) -> None:
    model = co.load_model(act_order, fuse=False)
    model.save_pretrained(tmp_path / "saved")
    for name, match in (
        (
            "model.layers.0.mlp.up_proj.codes",
            r"up_proj.codes(' is not in the model's files, or is of another size|: codes "
            r"has shape \(5,\))",
        ),
        ("model.norm.weight", r"tensor 'model.norm.weight' is \[5\]; the model's is \[64\]"),
    ):
        folder = rewrite(
            tmp_path / "saved", tmp_path / name, {name: torch.zeros(5, dtype=torch.uint8)}
        )
        with pytest.raises(ValueError, match=match):
            co.load_model(folder)
    more = rewrite(tmp_path / "saved", tmp_path / "more", {"model.other.weight": torch.zeros(3)})
    less = rewrite(tmp_path / "saved", tmp_path / "less", {"model.norm.weight": None})
    auto = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModel,
        transformers.AutoModelForSequenceClassification,
    )
    for load in (co.load_model, *(cls.from_pretrained for cls in auto)):
        with pytest.raises(ValueError, match=r"the model has no place for model\.other\.weight$"):
            load(more)
        with pytest.raises(ValueError, match=r"the file lacks (model\.)?norm\.weight$"):
            load(less)
    (tmp_path / "less" / "model.safetensors").write_bytes(b"no header")
    for load in (co.load_model, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(co.CheckpointError, match="not a valid safetensors file"):
            load(less)
    with pytest.raises(ValueError, match="transformers has no causal language model for T5Config"):
        co.load_model(more, config=transformers.T5Config())
    tiny().save_pretrained(tmp_path / "float")
    with pytest.raises(ValueError, match=r"give bits \(--bits 4 or --bits 8\)"):
        co.load_model(tmp_path / "float")
    # Sizes that no memory holds are refused before any is taken.
    config = transformers.LlamaConfig(**{**SIZES, "vocab_size": 1 << 40})
    with pytest.raises(
        ValueError, match=rf"embed_tokens.weight' is \[160, 64\]; the model's is \[{1 << 40}, 64\]"
    ):
        co.load_model(tmp_path / "float", config=config, options=Options(4, 32))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layout_version": 9}, r"layout 'cutlass_ops.slab64', version 9; known is"),
        ({"bits": 5}, "bits is 5"),
        ({"modules": []}, r"modules is \[\]; a dict is expected"),
        ({"modules": {"model.layers.0.mlp.up_proj": 4}}, "4 is no weight's format"),
        (
            {"modules_to_not_convert": "lm_head"},
            "modules_to_not_convert is 'lm_head'; a list is expected",
        ),
        ({"act_quant": "row"}, "act_quant is 'row'; supported are"),
        ({"act_quant": 1}, "act_quant is 1; a str is expected"),
        ({"act_symmetric": "no"}, "act_symmetric is 'no'; a bool is expected"),
        ({"tensors": {"scales": "int8"}}, r"quantization_config of '.*': scales has dtype int8"),
        ({"tensors": {}}, r"quantization_config of '.*': scales is a NoneType"),
        (
            {"tensors": {"scales": "float16", "weights": "float16"}},
            "tensors names weights; known are codes, scales",
        ),
        ({"tensor_parallel": 3}, "one rank of a model that was split"),
    ],
)
def test_invalid_configs(
    act_order: Path, tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    co.load_model(act_order, fuse=False).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"].update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=match):
        co.load_model(tmp_path)


@pytest.mark.parametrize(
    "value", [True, 0.5, "4", [1], {"modules": json.loads("[" * 200 + "]" * 200)}]
)
def test_a_quantization_config_that_is_no_object(
    act_order: Path, tmp_path: Path, value: object
) -> None:
    config = json.loads((act_order.parent / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": value}))
    (tmp_path / "model.safetensors").write_bytes(act_order.read_bytes())
    with pytest.raises(
        co.CheckpointError,
        match=r"config\.json: (quantization_config is .*; an object is expected|has objects)",
    ):
        co.load_model(tmp_path / "model.safetensors")


def test_one_rank_of_a_split_model_is_refused(tmp_path: Path) -> None:
    tiny(intermediate_size=128).save_pretrained(tmp_path / "float")
    reorder_model(
        co.load_checkpoint(tmp_path / "float"), tmp_path / "packed", Options(4, 32), ranks=2
    )
    with pytest.raises(ValueError, match=r"one rank of a model that was split .*'rank': 0"):
        co.load_model(tmp_path / "packed" / "rank-0-of-2")


def test_a_float_model_is_not_loaded_as_a_packed_one(tmp_path: Path) -> None:
    from cutlass_ops.files.packed_config import WeightFormat, quantization_config
    from cutlass_ops.integrations.hf_config import PackedModelConfig

    tiny().save_pretrained(tmp_path)
    config = PackedModelConfig(
        **quantization_config({"a": WeightFormat(4, 32, (("scales", torch.float32),))})
    )
    with pytest.raises(ValueError, match="require the model to be pre-quantized"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
