"""Packed models through transformers and load_model: loaded, saved, changed."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import (
    FAMILIES,
    TOKENS,
    assert_same_logits,
    imported,
    linears,
    logits,
    mixed,
    rewrite,
    tiny,
    write_act_order,
)
from imports import import_or_skip
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import cutlass_ops as co
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.packed_file import packed_info
from cutlass_ops.files.verify import verify_packed

transformers = import_or_skip("transformers")


@pytest.fixture(scope="module")
def act_order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_act_order(tmp_path_factory.mktemp("act_order"))


def dequantised(model: Any, weights: dict[str, co.QuantizedWeight]) -> Any:
    """The model with the values of quantised weights."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, linear in linears(model).items():
            linear.weight.copy_(co.dequantize(weights[name], torch.float32))
    return model


def assert_same_text(found: Any, expected: Any) -> None:
    """Token by token, with a cache."""
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(found.generate(TOKENS, **options), expected.generate(TOKENS, **options))


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path, Path]:
    """A model with its dequantised weights, its float directory, and its packed
    one in two shards.
    """
    model = tiny(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder / "float")
    reorder_model(
        co.load_checkpoint(folder / "float"),
        folder / "packed",
        Options(4, 32, False),
        shard_bytes=60_000,
    )
    weights = {
        name: co.quantize(linear.weight.detach(), 4, 32, False)
        for name, linear in linears(model).items()
    }
    return dequantised(model, weights), folder / "float", folder / "packed"


def test_a_packed_directory_through_from_pretrained(family: tuple[Any, Path, Path]) -> None:
    expected, _, packed = family
    assert len(list(packed.glob("*.safetensors"))) > 1
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        packed, output_loading_info=True
    )
    assert not any(info.values())
    assert mixed(model).keys() == linears(expected).keys()
    assert not model.training
    assert_same_logits(model, expected)
    assert_same_text(model, expected)


def test_an_index_without_metadata_is_refused(
    family: tuple[Any, Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(family[2], tmp_path / "packed")
    index = tmp_path / "packed" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    with pytest.raises(
        co.CheckpointError, match='has no object "metadata", which transformers expects'
    ):
        co.load_model(tmp_path / "packed")


def test_dtype_applies_to_parameters_but_not_to_scales(family: tuple[Any, Path, Path]) -> None:
    expected, _, packed = family
    model = transformers.AutoModelForCausalLM.from_pretrained(packed, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for layer in mixed(model).values():
        assert (layer.packed.scales.dtype, layer.packed.codes.dtype) == (torch.float32, torch.uint8)
    assert (logits(model) - logits(expected)).norm() < 0.03 * logits(expected).norm()


def test_load_model_fuses_what_shares_x(family: tuple[Any, Path, Path]) -> None:
    expected, _, packed = family
    model = co.load_model(packed)
    names = {name.rpartition(".")[2] for name in mixed(model)}
    assert names == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert_same_logits(model, expected)
    assert_same_text(model, expected)
    plain = co.load_model(packed, fuse=False, act_quant="block", act_symmetric=False)
    assert mixed(plain).keys() == linears(expected).keys()
    assert {(layer.act_quant, layer.act_symmetric) for layer in mixed(plain).values()} == {
        ("block", False)
    }
    assert 1e-4 < (logits(plain) - logits(expected)).norm() / logits(expected).norm() < 0.1


def test_load_model_quantises_floats_on_the_way(family: tuple[Any, Path, Path]) -> None:
    expected, floats, _ = family
    assert_same_logits(co.load_model(floats, options=Options(4, 32, False)), expected)


def test_the_directorys_act_quant_is_the_default(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "float")
    checkpoint = co.load_checkpoint(tmp_path / "float")
    reorder_model(
        checkpoint, tmp_path / "packed", Options(8, 32), act_quant="token", act_symmetric=False
    )
    for model in (
        co.load_model(tmp_path / "packed"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed"),
    ):
        assert {(layer.act_quant, layer.act_symmetric) for layer in mixed(model).values()} == {
            ("token", False)
        }
    model = co.load_model(tmp_path / "packed", act_quant="none")
    assert {layer.act_quant for layer in mixed(model).values()} == {"none"}


def test_layers_of_different_formats_and_some_left_as_they_are(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path / "float")
    options = Options(4, 32, exclude=r"down_proj|layers\.1\.mlp\.up_proj")
    reorder_model(co.load_checkpoint(tmp_path / "float"), tmp_path / "packed", options)
    loaded = co.load_model(tmp_path / "packed")
    down = "model.layers.0.mlp.down_proj"
    assert torch.equal(loaded.get_submodule(down).weight, model.get_submodule(down).weight)
    # gate alone is packed in layer 1, so that there is nothing to share
    assert {name for name in mixed(loaded) if "mlp" in name} == {
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.1.mlp.gate_proj",
    }


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    model = tiny("qwen2", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "float")
    reorder_model(co.load_checkpoint(tmp_path / "float"), tmp_path / "packed", Options(8, 32))
    for loaded in (
        co.load_model(tmp_path / "packed"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed"),
    ):
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_packed_head_is_not_the_embedding(tmp_path: Path) -> None:
    model = tiny("qwen2", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "float")
    tensors = load_file(tmp_path / "float" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "float" / "model.safetensors", metadata={"format": "pt"})
    options = Options(8, 32, include="lm_head|_proj|embed_tokens")
    done = reorder_model(co.load_checkpoint(tmp_path / "float"), tmp_path / "packed", options)
    assert done.kept == {"model.embed_tokens": "it shares its weight with another module"}
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    # As earlier versions left it.
    (tmp_path / "packed" / "config.json").write_text(
        json.dumps({**config, "tie_word_embeddings": True})
    )
    for loaded in (
        co.load_model(tmp_path / "packed"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed"),
    ):
        assert "lm_head" in mixed(loaded)
        assert torch.equal(loaded.model.embed_tokens.weight, model.lm_head.weight)
        assert (logits(loaded) - logits(model)).norm() < 0.03 * logits(model).norm()
    # Where the table is not stored, it is not random.
    folder = rewrite(tmp_path / "packed", tmp_path / "less", {"model.embed_tokens.weight": None})
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"the file lacks model\.embed_tokens\.weight"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_a_model_without_its_head(family: tuple[Any, Path, Path], tmp_path: Path) -> None:
    expected, floats, _ = family
    # Exceptions are listed under the names of the model with the head.
    reorder_model(
        co.load_checkpoint(floats), tmp_path / "packed", Options(4, 32, False, exclude="down_proj")
    )
    model = transformers.AutoModel.from_pretrained(tmp_path / "packed")
    assert mixed(model).keys() == {
        n.removeprefix("model.") for n in linears(expected) if "down_proj" not in n
    }
    assert isinstance(model.layers[0].mlp.down_proj, nn.Linear)


def test_a_model_with_a_new_head(family: tuple[Any, Path, Path]) -> None:
    expected, _, packed = family
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        packed, output_loading_info=True
    )
    # transformers reports these itself.
    assert (info["missing_keys"], info["unexpected_keys"]) == ({"score.weight"}, {"lm_head.weight"})
    assert mixed(model).keys() == linears(expected).keys()
    body = expected.model(input_ids=TOKENS).last_hidden_state
    found = model.model(input_ids=TOKENS).last_hidden_state
    assert (found - body).abs().max() <= 2e-5 * body.square().mean().sqrt()


def test_directories_written_before_the_guard_still_load(act_order: Path, tmp_path: Path) -> None:
    co.load_model(act_order, fuse=False).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["transformers_weights"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (
        co.load_model(tmp_path),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        assert_same_logits(model, co.load_model(act_order))


def test_a_packed_layer_that_the_config_excludes(act_order: Path, tmp_path: Path) -> None:
    co.load_model(act_order, fuse=False).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append("model.layers.0.mlp.up_proj")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (co.load_model, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=r"mlp\.up_proj \(modules_to_not_convert names it\)"):
            load(tmp_path)


def test_saved_and_loaded_again(family: tuple[Any, Path, Path], tmp_path: Path) -> None:
    expected, _, packed = family
    model = transformers.AutoModelForCausalLM.from_pretrained(packed)
    model.save_pretrained(tmp_path / "again")
    again = co.load_model(tmp_path / "again", fuse=False)
    assert verify_packed(tmp_path / "again").problems == []
    assert packed_info(tmp_path / "again").weights == packed_info(packed).weights
    for name, layer in mixed(model).items():
        for part, tensor in layer.packed.tensors().items():
            assert torch.equal(mixed(again)[name].packed.tensors()[part], tensor)
    assert_same_logits(again, expected)
    # Fused layers are saved as they were before, bit for bit.
    co.fuse_linears(model)
    model.save_pretrained(tmp_path / "fused")
    again_file, fused_file = (tmp_path / name / "model.safetensors" for name in ("again", "fused"))
    first, second = load_file(again_file), load_file(fused_file)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    with safe_open(again_file, "pt") as one, safe_open(fused_file, "pt") as other:
        assert one.metadata() == other.metadata()
    assert (tmp_path / "again" / "config.json").read_text() == (
        tmp_path / "fused" / "config.json"
    ).read_text()
    assert "model.layers.0.self_attn.qkv_proj" in mixed(model)


@pytest.mark.parametrize("shared", ["perm", "book"])
def test_fused_layers_that_share_an_order_or_a_book_are_saved(shared: str, tmp_path: Path) -> None:
    # whole row panels
    model = tiny(num_hidden_layers=1, num_key_value_heads=4, intermediate_size=128)
    packed = {}
    for name, linear in linears(model).items():
        weight = co.quantize(
            linear.weight.detach(), 4, 32, book="nf4" if shared == "book" else None
        )
        packed[name] = co.reorder(
            weight if shared == "book" else replace(weight, perm=torch.arange(weight.k).flip(0))
        )
    co.replace_linears(model, packed)
    fused = co.fuse_linears(model).layers
    assert len(fused) == 2
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in packed:
        assert torch.equal(tensors[f"{layer}.{shared}"], getattr(packed[layer], shared))
    assert_same_logits(co.load_model(tmp_path), model)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_packed_in_memory_is_saved(tied: bool, tmp_path: Path) -> None:
    model = tiny("qwen2", tie_word_embeddings=tied)
    layers = {**linears(model), "lm_head": model.lm_head}
    del layers["model.layers.0.mlp.down_proj"]
    packed = {
        name: co.reorder(co.quantize(linear.weight.detach(), 4, 32, False))
        for name, linear in layers.items()
    }
    co.replace_linears(model, packed, act_quant="token", act_symmetric=False)
    co.set_activations(model, "block")
    expected = logits(model)
    model.save_pretrained(tmp_path / "separate")
    co.fuse_linears(model)
    model.save_pretrained(tmp_path / "fused")
    for folder in (tmp_path / "separate", tmp_path / "fused"):
        config = json.loads((folder / "config.json").read_text())
        assert config["quantization_config"]["modules_to_not_convert"] == [
            "model.layers.0.mlp.down_proj"
        ]
        assert not config.get("tie_word_embeddings")
        for loaded in (
            transformers.AutoModelForCausalLM.from_pretrained(folder),
            co.load_model(folder, fuse=False),
        ):
            assert {(layer.act_quant, layer.act_symmetric) for layer in mixed(loaded).values()} == {
                ("block", True)
            }
            assert mixed(loaded).keys() == packed.keys()
            assert torch.equal(logits(loaded), expected)


def halves(model: Any) -> dict[str, str]:
    """A device map with one layer on the disk."""
    places = dict.fromkeys((name for name, _ in model.model.named_children()), "cpu")
    del places["layers"]
    places = {f"model.{name}": place for name, place in places.items()}
    return {**places, "model.layers.0": "cpu", "model.layers.1": "disk", "lm_head": "cpu"}


@pytest.mark.parametrize("offload_buffers", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_layers_on_the_disk(offload_buffers: bool, tied: bool, tmp_path: Path) -> None:
    import_or_skip("accelerate")
    tiny("qwen2", tie_word_embeddings=tied).save_pretrained(tmp_path / "float")
    reorder_model(
        co.load_checkpoint(tmp_path / "float"),
        tmp_path / "packed",
        Options(4, 32, False),
        shard_bytes=60_000,
    )
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    options = {"offload_folder": tmp_path / "offload", "offload_buffers": offload_buffers}
    maps: list[dict[str, Any]] = [
        {"device_map": halves(expected)},
        {"device_map": "auto", "max_memory": {"cpu": 100_000}},
    ]
    for places in maps:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "packed", **places, **options
        )
        assert "disk" in model.hf_device_map.values()
        for _ in range(2):
            assert torch.equal(logits(model), logits(expected))
            # Nothing of them stays in memory.
            on_disk = {name for name, layer in mixed(model).items() if layer.packed.codes.is_meta}
            assert all(
                layer.codes.is_meta == (name in on_disk) for name, layer in mixed(model).items()
            )
            assert bool(on_disk) == offload_buffers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the memory that it takes
        model.save_pretrained(tmp_path / "saved")
    assert torch.equal(
        logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")),
        logits(expected),
    )


def test_a_packed_file_beside_its_config(act_order: Path, tmp_path: Path) -> None:
    model = co.load_model(act_order)
    assert "model.layers.0.self_attn.o_proj" in mixed(model)
    model = co.load_model(act_order, fuse=False)
    packed = co.load_packed(act_order)
    assert all(layer.packed.perm is not None for layer in mixed(model).values())
    assert_same_logits(
        model, dequantised(tiny(num_hidden_layers=1), {n: packed[n].unpack() for n in mixed(model)})
    )
    (tmp_path / "lone.safetensors").write_bytes(act_order.read_bytes())
    with pytest.raises(co.CheckpointError, match=r"there is no config.json"):
        co.load_model(tmp_path / "lone.safetensors")
    assert_same_logits(co.load_model(tmp_path / "lone.safetensors", config=model.config), model)


def test_compiles_into_one_graph(act_order: Path) -> None:
    model = co.load_model(act_order, act_quant="block")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        found = compiled(input_ids=TOKENS, use_cache=False).logits
    assert (found - logits(model)).abs().max() <= 1e-5 * logits(model).square().mean().sqrt()


@pytest.mark.slow
def test_import_hooks_are_left_out_on_request(act_order: Path) -> None:
    done = imported(
        f"""
assert sys.meta_path == before, sys.meta_path
import transformers.quantizers.auto as tables
assert "cutlass_ops" not in tables.AUTO_QUANTIZER_MAPPING
cutlass_ops.load_model({str(act_order)!r})  # registers by itself
assert "cutlass_ops" in tables.AUTO_QUANTIZER_MAPPING
""",
        hooks="0",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("act_quant", ["none", "block"])
def test_gpu_model(act_order: Path, act_quant: str) -> None:
    expected = logits(co.load_model(act_order, act_quant=act_quant))
    model = co.load_model(act_order, device="cuda", dtype=torch.float16, act_quant=act_quant)
    assert {layer.packed.device.type for layer in mixed(model).values()} == {"cuda"}
    with torch.inference_mode():
        found = model(input_ids=TOKENS.cuda()).logits.float().cpu()
    # x is rounded to 11 bits, and its codes may be neighbours
    assert (found - expected).norm() < 0.03 * expected.norm()
