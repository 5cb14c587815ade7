"""Models of transformers with packed experts: in memory, and saved and loaded."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from expert_models import FAMILIES, SIZES, assert_same_experts, changed, experts_of, logits, tiny
from imports import import_or_skip
from safetensors import safe_open
from safetensors.torch import save_file

import cutlass_ops as co
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.packed_file import packed_info
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import diff_packed, verify_packed

transformers = import_or_skip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_experts_are_saved_and_loaded_bit_for_bit(family: str, tmp_path: Path) -> None:
    names = FAMILIES[family][1]
    model = co.quantize_model(tiny(family), 4, 32, act_quant="block")
    assert experts_of(model).keys() == set(names)
    expected = logits(model)
    model.save_pretrained(tmp_path / "a")
    for loaded in (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a"),
        co.load_model(tmp_path / "a", fuse=False),
    ):
        assert_same_experts(loaded, model)
        assert torch.equal(logits(loaded), expected)
        loaded.save_pretrained(tmp_path / "b")
        found = diff_packed(tmp_path / "a", tmp_path / "b")
        assert (found.changed, found.only_first, found.only_second) == ({}, [], [])
    # Experts have the model's names in files, whatever those of a float checkpoint are.
    info = packed_info(tmp_path / "a")
    assert info.experts.keys() == {
        f"{name}.{product}" for name in names for product in ("gate_up_proj", "down_proj")
    }
    assert verify_packed(tmp_path / "a").problems == []


def test_experts_of_some_layers_are_packed_and_others_are_not(tmp_path: Path) -> None:
    """transformers converts the names and values of the float ones when it saves and loads them."""
    model = co.quantize_model(tiny("Mixtral"), 8, 32, skip=("lm_head", "layers.0.mlp"))
    assert experts_of(model).keys() == {"model.layers.1.mlp.experts"}
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in names
    assert "model.layers.1.mlp.experts.gate_up_proj.codes" in names
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_experts(loaded, model)
    assert torch.equal(logits(loaded), logits(model))


def test_experts_are_saved_in_several_files(tmp_path: Path) -> None:
    model = co.quantize_model(tiny("Qwen3Moe"), 4, 32)
    model.save_pretrained(tmp_path, max_shard_size="30kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert verify_packed(tmp_path).problems == []
    assert torch.equal(
        logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model)
    )


def test_a_model_with_packed_experts_alone_is_saved(tmp_path: Path) -> None:
    model = co.quantize_model(tiny("Qwen3Moe"), 4, 32, skip=("lm_head", "self_attn"))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(isinstance(module, co.MixedLinear) for module in loaded.modules())
    assert torch.equal(logits(loaded), logits(model))


def test_load_model_chooses_how_experts_quantise_activations(tmp_path: Path) -> None:
    co.quantize_model(tiny("Qwen3Moe"), 4, 32).save_pretrained(tmp_path)
    loaded = co.load_model(tmp_path, act_quant="token", act_symmetric=False)
    assert {(layer.act_quant, layer.act_symmetric) for layer in experts_of(loaded).values()} == {
        ("token", False)
    }


def test_experts_that_the_configuration_does_not_describe_are_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    co.quantize_model(tiny("Qwen3Moe"), 4, 32).save_pretrained(tmp_path)
    changed(tmp_path, lambda modules: modules.pop(name))
    with pytest.raises(ValueError, match=rf"{name} \(quantization_config does not name it\)"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    changed(
        tmp_path,
        lambda modules: modules.update({name: {"bits": 3, "group_size": 32, "tensors": {}}}),
    )
    with pytest.raises(ValueError, match="bits is 3"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tensors = {"scales": "float32", "offsets": "float32"}
    changed(
        tmp_path,
        lambda modules: modules.update({name: {"bits": 4, "group_size": 32, "tensors": tensors}}),
    )
    with pytest.raises(
        ValueError,
        match=rf"tensor '{name}\.offsets' is not in the model's files, or is of another size",
    ):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_experts_of_which_one_product_is_packed_are_refused(tmp_path: Path) -> None:
    model = co.quantize_model(tiny("Qwen3Moe"), 4, 32)
    experts = {
        f"{name}.gate_up_proj": layer.gate_up_proj.packed
        for name, layer in experts_of(model).items()
    }
    co.save_packed(tmp_path / "half.safetensors", experts)
    with pytest.raises(
        ValueError,
        match=r"0\.mlp\.experts\.gate_up_proj' are packed experts, and '.*down_proj' is not packed",
    ):
        co.load_model(tmp_path / "half.safetensors", config=tiny("Qwen3Moe").config)
    with pytest.raises(
        ValueError, match=r"gate_up_proj' is \[4, 80, 64\]; the model's experts are \[4, 96, 64\]"
    ):
        co.load_model(
            tmp_path / "half.safetensors", config=tiny("Qwen3Moe", moe_intermediate_size=48).config
        )


def as_before(path: Path) -> None:
    """Give a file the rows and the metadata that earlier versions wrote for experts."""
    with safe_open(path, "pt") as file:
        metadata, names = file.metadata(), file.keys()
        tensors = {name: file.get_tensor(name).clone() for name in names}
    weights, experts = json.loads(metadata["weights"]), json.loads(metadata["experts"])
    for name, form in experts.items():
        gated, numbers = form.pop("gated"), weights[name]
        if not gated:
            continue
        parts = {
            key.removeprefix(f"{name}."): tensor
            for key, tensor in tensors.items()
            if key.startswith(f"{name}.")
        }
        sizes = (form["experts"], form["n"], numbers["k"], numbers["bits"], numbers["group_size"])
        plain = co.reorder_experts(co.PackedExperts.of_parts(parts, *sizes, gated=True).unpack())
        tensors |= {f"{name}.{part}": tensor for part, tensor in plain.tensors().items()}
    metadata["experts"] = json.dumps(experts)
    if "layout_version" in metadata:
        metadata["layout_version"] = "2"
    metadata.pop("checksums", None)
    save_file(tensors, path, metadata)


def as_directory_before(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    as_before(file)
    config = json.loads((path / "config.json").read_text())
    assert config["quantization_config"]["layout_version"] == 3
    config["quantization_config"]["layout_version"] = 2
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_experts_of_earlier_versions_are_loaded(tmp_path: Path, family: str) -> None:
    """Directories of both kinds and files, with gate's rows before up's."""
    model = co.quantize_model(tiny(family), 4, 32)
    expected = logits(model)
    model.save_pretrained(tmp_path / "saved")
    tiny(family).save_pretrained(tmp_path / "float")
    checkpoint = co.load_checkpoint(tmp_path / "float")
    reorder_model(checkpoint, tmp_path / "reordered", Options(4, 32))
    reorder_checkpoint(checkpoint, tmp_path / "m.safetensors", bits=4, group_size=32)
    new = {path: logits(co.load_model(tmp_path / path)) for path in ("reordered", "m.safetensors")}
    as_directory_before(tmp_path / "saved")
    as_directory_before(tmp_path / "reordered")
    as_before(tmp_path / "m.safetensors")
    for path in new:
        assert torch.equal(logits(co.load_model(tmp_path / path)), new[path])
    for path in ("saved", "reordered"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / path)
        assert all(layer.gate_up_proj.packed.gated for layer in experts_of(loaded).values())
        assert torch.equal(logits(loaded), expected if path == "saved" else new[path])
    loaded.save_pretrained(tmp_path / "again")  # in the order of this version
    assert_same_experts(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again"), loaded
    )


def test_offloaded_experts_of_earlier_versions_are_refused(tmp_path: Path) -> None:
    co.quantize_model(tiny("Qwen3Moe"), 4, 32).save_pretrained(tmp_path / "saved")
    as_directory_before(tmp_path / "saved")
    names = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0")
    places = {**dict.fromkeys(names, "cpu"), "model.layers.1": "disk"}
    options = {
        "device_map": places,
        "offload_folder": tmp_path / "offload",
        "offload_buffers": True,
    }
    with pytest.raises(
        ValueError,
        match=r"'model\.layers\.1\.mlp\.experts' is offloaded and was packed by an earlier version",
    ):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)


def test_a_second_product_in_the_rows_of_gate_and_up_is_refused(tmp_path: Path) -> None:
    model = co.quantize_model(tiny("Qwen3Moe"), 4, 32)
    packed = {
        f"{name}.{product}": co.reorder_experts(getattr(layer, product).packed.unpack(), gated=True)
        for name, layer in experts_of(model).items()
        for product in ("gate_up_proj", "down_proj")
    }
    co.save_packed(tmp_path / "wrong.safetensors", packed)
    with pytest.raises(
        ValueError,
        match=r"down_proj' was packed with gated=True, which is for weights of gate and up",
    ):
        co.load_model(tmp_path / "wrong.safetensors", config=model.config)


def test_experts_that_transformers_converts_on_loading_are_not_saved(tmp_path: Path) -> None:
    text = {**SIZES, **FAMILIES["Qwen3Moe"][0], "num_hidden_layers": 1}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
    }
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    model = co.quantize_model(
        transformers.Qwen3VLMoeForConditionalGeneration(config), 4, 32, skip=("visual", "lm_head")
    )
    with pytest.raises(
        ValueError,
        match=r"experts of Qwen3VLMoe.* cannot be saved, since transformers converts "
        r".*gate_up_proj",
    ):
        model.save_pretrained(tmp_path)


def test_saved_experts_become_float_again(tmp_path: Path) -> None:
    model = co.quantize_model(tiny("Mixtral"), 4, 32)
    expected = logits(copy.deepcopy(model).dequantize())
    model.save_pretrained(tmp_path / "packed")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    loaded.dequantize().save_pretrained(tmp_path / "float")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    assert not experts_of(again)
    assert torch.equal(logits(again), expected)
