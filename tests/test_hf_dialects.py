"""load_model of every dialect, written by hand."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import (
    CT8,
    DIALECTS,
    MOE,
    SIZES,
    assert_same_logits,
    compressed_tensors_int8,
    ct_config,
    linears,
    logits,
    mixed,
    tiny,
    write_dialect,
)
from imports import import_or_skip
from safetensors.torch import load_file, save_file
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.packing import reorder_checkpoint

transformers = import_or_skip("transformers")


def assert_loads(source: Path, scratch: Path, expected: Any) -> None:
    """load_model, and from_pretrained after reordering, give the dequantised model's results."""
    model = co.load_model(source, dtype=torch.float32)
    assert_same_logits(model, expected)
    assert any(name.endswith("qkv_proj") for name in mixed(model))
    reorder_model(co.load_checkpoint(source), scratch)
    model = transformers.AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32)
    assert mixed(model).keys() == linears(expected).keys()
    assert_same_logits(model, expected)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect(dialect: str, tmp_path: Path) -> None:
    model = write_dialect(tmp_path / "source", dialect)
    assert_loads(tmp_path / "source", tmp_path / "packed", model)


def test_quantised_routers_become_their_values(tmp_path: Path) -> None:
    """A checkpoint of quantised experts and routers: transformers has stacked and bare
    parameters for them.
    """
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**SIZES, **MOE})).save_pretrained(
        tmp_path / "values"
    )
    values = load_file(tmp_path / "values" / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, value in values.items():
        module = name.removesuffix(".weight")
        if value.dim() == 2 and module not in ("lm_head", "model.embed_tokens"):
            parts, values[name] = compressed_tensors_int8(value)
            tensors.update({f"{module}.{part}": tensor for part, tensor in parts.items()})
        else:
            tensors[name] = value
    save_file(values, tmp_path / "values" / "model.safetensors", metadata={"format": "pt"})
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "values")
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    config = {**expected.config.to_dict(), "quantization_config": ct_config("int-quantized", CT8)}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    assert_loads(tmp_path / "source", tmp_path / "packed", expected)
    # A file of weights, which other engines read, has the router packed; load_model
    # takes its values.
    reorder_checkpoint(co.load_checkpoint(tmp_path / "source"), tmp_path / "packed.safetensors")
    assert isinstance(
        co.load_packed(tmp_path / "packed.safetensors")["model.layers.0.block_sparse_moe.gate"],
        co.PackedWeight,
    )
    assert_same_logits(
        co.load_model(tmp_path / "packed.safetensors", config=expected.config), expected
    )


def test_load_model_and_from_pretrained_quantise_activations_as_the_checkpoint_says(
    tmp_path: Path,
) -> None:
    model = tiny(num_hidden_layers=1)
    tensors = dict(model.state_dict())
    for name, linear in linears(model).items():
        parts, _ = compressed_tensors_int8(linear.weight.detach())
        del tensors[f"{name}.weight"]
        tensors.update({f"{name}.{part}": tensor for part, tensor in parts.items()})
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    quantization = ct_config("int-quantized", CT8)
    tokens = {
        "num_bits": 8,
        "type": "int",
        "symmetric": False,
        "strategy": "token",
        "dynamic": True,
    }
    quantization["config_groups"]["group_0"]["input_activations"] = tokens
    (source / "config.json").write_text(
        json.dumps({**model.config.to_dict(), "quantization_config": quantization})
    )
    checkpoint = co.load_checkpoint(source)
    assert checkpoint.activations == ("token", False)
    reorder_model(checkpoint, tmp_path / "packed")
    reorder_checkpoint(checkpoint, tmp_path / "packed.safetensors")
    loaded = [
        co.load_model(path, fuse=False, config=model.config)
        for path in (source, tmp_path / "packed.safetensors")
    ]
    loaded += [co.load_model(tmp_path / "packed", fuse=False)]
    for found in loaded:
        assert {(layer.act_quant, layer.act_symmetric) for layer in mixed(found).values()} == {
            ("token", False)
        }
        assert torch.equal(logits(found), logits(loaded[0]))
    assert {
        layer.act_quant for layer in mixed(co.load_model(source, act_quant="none")).values()
    } == {"none"}


def test_torchao(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao = import_or_skip("torchao.quantization")
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    model = tiny()
    source = copy.deepcopy(model)
    form = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32))
    torchao.quantize_(source, form, lambda module, name: name in linears(model))
    with torch.no_grad():
        for name, linear in linears(model).items():
            linear.weight.copy_(source.get_submodule(name).weight.dequantize())
    flat, metadata = flatten_tensor_state_dict(source.state_dict())
    (tmp_path / "source").mkdir()
    flat = {name: tensor.contiguous() for name, tensor in flat.items()}
    save_file(
        flat, tmp_path / "source" / "model.safetensors", metadata={"format": "pt", **metadata}
    )
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    assert_loads(tmp_path / "source", tmp_path / "packed", model)
