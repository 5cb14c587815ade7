"""Directories of quantised models that lie: a CheckpointError, or what the files say; the same for every dialect."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_cases import JSON, header_length, mutations, read_or_refuse
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from llm_checkpoints import AWQ_CONFIG, awq, ct_config, ct_weights, gptq, gptq_config, randint, randn, words
from safetensors.torch import save as to_safetensors
from torch import Tensor

from cutlass_ops import CheckpointError, QuantizedWeight, load_checkpoint
from cutlass_ops.reference import dequantize_weight

MANY = settings(
    deadline=None, max_examples=600, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

Model = tuple[dict[str, Tensor], dict[str, Any]]


def models() -> dict[str, Model]:
    """An honest model in each dialect: module ``m``, in groups of 32, with a bias, and a norm."""
    n, k = 8, 64
    codes, zeros, scales = randint(16, n, k), randint(14, n, 2, seed=2), randn(n, 2).half()
    other = {"m.bias": randn(n), "norm.weight": torch.ones(2)}
    order = torch.arange(k)[torch.randperm(k, generator=torch.Generator().manual_seed(3))] // 32
    override = {"dynamic": {"m": {"bits": 4, "group_size": 32}}}
    packed = {"m.weight_packed": words(codes, 4), "m.weight_shape": torch.tensor([n, k]), "m.weight_scale": scales}
    gemv = {
        "m.qweight": words(codes, 4),
        "m.qzeros": torch.zeros(n, 4, dtype=torch.int32),
        "m.scales": torch.ones(n, 32).half(),
    }
    eight = {"m.weight": randint(256, n, k).sub(128).to(torch.int8), "m.weight_scale": randn(n, 1)}
    weights = ct_weights(num_bits=8, strategy="channel", group_size=None)
    found: dict[str, Model] = {
        "awq gemm": (awq(codes, zeros, scales), AWQ_CONFIG),
        "awq gemv": (gemv, AWQ_CONFIG | {"version": "gemv"}),
        "gptq": (gptq(codes, torch.full((n, 2), 8), scales, 4, 1), gptq_config()),
        "gptq act order": (
            gptq(codes, zeros, scales, 4, 2) | {"m.g_idx": order.int()},
            gptq_config(sym=False, desc_act=True, checkpoint_format="gptq_v2") | override,
        ),
        "ct packed": (
            packed | {"m.weight_zero_point": words(zeros.t(), 4).t(), "m.weight_g_idx": order.int()},
            ct_config({"weights": ct_weights(symmetric=False)}),
        ),
        "ct int": (
            eight | {"m.weight_zero_point": torch.zeros(n, 1, dtype=torch.int8), "m.input_scale": torch.ones(1)},
            ct_config({"targets": ["re:.*n$"], "weights": ct_weights()}, {"targets": ["re:m+"], "weights": weights}),
        ),
    }
    return {
        name: ({key: t.contiguous() for key, t in (held | other).items()}, config) for name, (held, config) in found.items()
    }


MODELS = models()
FILES = {name: to_safetensors(tensors) for name, (tensors, _) in MODELS.items()}


def write(folder: Path, content: bytes | dict[str, Tensor], config: object) -> Path:
    if not isinstance(content, bytes):
        content = to_safetensors({name: tensor.contiguous() for name, tensor in content.items()})
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps({"quantization_config": config}))
    return folder


def equal(weight: QuantizedWeight, values: Tensor) -> bool:
    return torch.equal(dequantize_weight(weight, torch.float32).nan_to_num(), values.nan_to_num())


def read_all(path: Path, agree: Callable[[QuantizedWeight, Tensor], bool] = equal) -> int:
    """Read every tensor in every way; both ways to the values of a weight must agree. How many quantised weights there were."""
    checkpoint = load_checkpoint(path)
    for name, entry in checkpoint.entries.items():
        if entry.problem:
            with pytest.raises(CheckpointError):
                _ = checkpoint[name]
            continue
        values = entry.values()
        assert tuple(values.shape) == entry.shape
        assert values.dtype == entry.dtype
        if entry.quantized is not None:
            weight = checkpoint[name]
            assert weight.shape == entry.shape
            assert (weight.bits, weight.group_size) == (entry.quantized.bits, entry.quantized.group_size)
            parts = {part: getattr(weight, part) for part in ("scales", "zeros", "offsets", "bias", "perm", "book")}
            assert {part: t.dtype for part, t in parts.items() if t is not None} == entry.quantized.dtypes
            assert agree(weight, values)
    return len(checkpoint)


def refused_or_read(folder: Path) -> bool:
    return read_or_refuse(folder / "model.safetensors", lambda path: read_all(path.parent))


@pytest.mark.parametrize("name", MODELS)
def test_the_honest_models_are_read(tmp_path: Path, name: str) -> None:
    assert refused_or_read(write(tmp_path, FILES[name], MODELS[name][1]))
    checkpoint = load_checkpoint(tmp_path)
    assert list(checkpoint.entries) == ["m", "norm.weight"]
    assert checkpoint["m"].bias is not None


@MANY
@given(name=st.sampled_from(sorted(FILES)), data=st.data())
def test_a_damaged_file(tmp_path: Path, name: str, data: st.DataObject) -> None:
    content = data.draw(mutations(FILES[name], 8 + header_length(FILES[name])))
    refused_or_read(write(tmp_path, content, MODELS[name][1]))


def paths(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, item in items for inner in paths(item, (*path, key)))]


VALUES = st.one_of(
    JSON,
    st.integers(-2, 300),
    st.sampled_from(
        [0, 1, 2, 3, 8, 16, 48, 64, 128, -1, 1 << 31, 1 << 64, 10**400, 0.5, "", "4", "re:m", "re:(m+)+$", "re:[", True, None]
    ),
    st.sampled_from(["gptq", "gptq_v2", "awq", "gemm", "gemv", "compressed-tensors", "hqq", "torchao", "bitsandbytes"]),
)


@MANY
@given(name=st.sampled_from(sorted(MODELS)), data=st.data())
def test_a_config_with_another_value(tmp_path: Path, name: str, data: st.DataObject) -> None:
    config = copy.deepcopy(MODELS[name][1])
    where = data.draw(st.sampled_from(paths(config)))
    value = data.draw(VALUES)
    holder: Any = config
    if where:
        for key in where[:-1]:
            holder = holder[key]
        if data.draw(st.booleans()):
            holder[where[-1]] = value
        else:
            del holder[where[-1]]
    refused_or_read(write(tmp_path, FILES[name], config if where else value))


@MANY
@given(
    name=st.sampled_from(sorted(MODELS)),
    data=st.data(),
    dtype=st.sampled_from(
        [torch.int32, torch.int64, torch.int8, torch.uint8, torch.float16, torch.float32, torch.float8_e4m3fn]
    ),
    shape=st.lists(st.sampled_from([0, 1, 2, 4, 7, 8, 9, 16, 32, 64, 65]), max_size=3),
    fill=st.sampled_from([0, 1, 7, 8, 64, 127, -1, -128]),
)
def test_a_model_with_another_tensor(
    tmp_path: Path, name: str, data: st.DataObject, dtype: torch.dtype, shape: list[int], fill: int
) -> None:
    tensors, config = MODELS[name]
    tensors = dict(tensors)
    where = data.draw(st.sampled_from(sorted(tensors)))
    what = data.draw(st.sampled_from(["replace", "remove", "rename", "reshape"]))
    old = tensors.pop(where)
    if what == "replace":
        tensors[where] = torch.full(shape, fill).to(dtype)
    elif what == "rename":
        tensors[data.draw(st.sampled_from(sorted({key for held, _ in MODELS.values() for key in held})))] = old
    elif what == "reshape":
        tensors[where] = old.t() if old.dim() == 2 else old.reshape(1, -1)
    refused_or_read(write(tmp_path, tensors, config))


@pytest.mark.parametrize("size", [0, -1, -5, 1 << 31, 1 << 64, 10**400])
@pytest.mark.parametrize("name", ["ct packed", "gptq act order"])
def test_a_stated_size_that_fits_nothing(tmp_path: Path, name: str, size: int) -> None:
    """With act order a size is but a wish: the groups are those of the tensor."""
    config = copy.deepcopy(MODELS[name][1])
    holder = config["config_groups"]["group_0"]["weights"] if name == "ct packed" else config
    holder["group_size"] = size
    config.pop("dynamic", None)
    assert refused_or_read(write(tmp_path, FILES[name], config))


@MANY
@given(
    text=st.one_of(
        st.text(max_size=60), st.sampled_from(["[" * 100_000, "{", '{"a":' * 5000, "NaN", "1e999", "\x00", "[]", "3", ""])
    )
)
@example(text='{"quantization_config": 3}')
@example(text='{"quantization_config": {}}')
@example(text='{"text_config": {"quantization_config": []}}')
@example(text='{"compression_config": {"quant_method": {"a": []}}}')
def test_a_config_that_is_any_text(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path, FILES["gptq"], None)
    (folder / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    refused_or_read(folder)


# ---- shards


def sharded(folder: Path, name: str) -> dict[str, Any]:
    """The model with each tensor in a separate shard; returns the index."""
    tensors, config = MODELS[name]
    weight_map = {}
    for number, (key, tensor) in enumerate(tensors.items()):
        weight_map[key] = f"model-{number:05d}.safetensors"
        (folder / weight_map[key]).write_bytes(to_safetensors({key: tensor}))
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_of_a_module_may_lie_in_several_shards(tmp_path: Path, name: str) -> None:
    sharded(tmp_path, name)
    whole = tmp_path / "whole"
    whole.mkdir()
    write(whole, *MODELS[name])
    one, other = load_checkpoint(tmp_path), load_checkpoint(whole)
    assert torch.equal(one["m"].codes, other["m"].codes)
    assert torch.equal(one.entries["m"].values(), other.entries["m"].values())
    assert len(one.files) == len(MODELS[name][0])
    # One shard alone is no module: its parts are missing.
    with pytest.raises(CheckpointError, match="is missing"):
        load_checkpoint(tmp_path / "model-00000.safetensors")["m"]


@MANY
@given(name=st.sampled_from(sorted(MODELS)), data=st.data())
def test_an_index_with_another_place(tmp_path: Path, name: str, data: st.DataObject) -> None:
    index = sharded(tmp_path, name)
    key = data.draw(st.sampled_from([*index["weight_map"], "m.other", ""]))
    place = data.draw(
        st.one_of(
            JSON,
            st.sampled_from(
                [
                    *index["weight_map"].values(),
                    "../model-00000.safetensors",
                    "/etc/passwd",
                    "..",
                    ".safetensors",
                    "a/../model-00000.safetensors",
                    "model-00000.safetensors\0",
                    "x" * 300 + ".safetensors",
                    "config.json",
                    "~.safetensors",
                ]
            ),
        )
    )
    index["weight_map"][key] = place
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    honest = key in MODELS[name][0] and MODELS[name][0][key] is not None and place == sharded_place(name, key)
    assert read_or_refuse(tmp_path / "model.safetensors.index.json", lambda path: read_all(path.parent)) == honest


def sharded_place(name: str, key: str) -> str:
    return f"model-{list(MODELS[name][0]).index(key):05d}.safetensors"
