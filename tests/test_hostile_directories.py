"""Directories of quantised models with false metadata: a CheckpointError, or the values in the
files; the same for every dialect.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_cases import JSON, MANY, header_length, mutations, read_or_refuse
from hostile_directories import FILES, MODELS, VALUES, paths, read_all, write
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save as to_safetensors

from cutlass_ops import CheckpointError, load_checkpoint


def refused_or_read(folder: Path) -> bool:
    return read_or_refuse(folder / "model.safetensors", lambda path: read_all(path.parent))


@pytest.mark.parametrize("name", MODELS)
def test_the_undamaged_models_are_read(tmp_path: Path, name: str) -> None:
    assert refused_or_read(write(tmp_path, FILES[name], MODELS[name][1]))
    checkpoint = load_checkpoint(tmp_path)
    assert list(checkpoint.entries) == ["m", "norm.weight"]
    assert checkpoint["m"].bias is not None


@MANY
@given(name=st.sampled_from(sorted(FILES)), data=st.data())
def test_a_damaged_file(tmp_path: Path, name: str, data: st.DataObject) -> None:
    content = data.draw(mutations(FILES[name], 8 + header_length(FILES[name])))
    refused_or_read(write(tmp_path, content, MODELS[name][1]))


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
        [
            torch.int32,
            torch.int64,
            torch.int8,
            torch.uint8,
            torch.float16,
            torch.float32,
            torch.float8_e4m3fn,
        ]
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
        tensors[
            data.draw(st.sampled_from(sorted({key for held, _ in MODELS.values() for key in held})))
        ] = old
    elif what == "reshape":
        tensors[where] = old.t() if old.dim() == 2 else old.reshape(1, -1)
    refused_or_read(write(tmp_path, tensors, config))


@pytest.mark.parametrize("size", [0, -1, -5, 1 << 31, 1 << 64, 10**400])
@pytest.mark.parametrize("name", ["ct packed", "gptq act order"])
def test_a_stated_size_that_matches_no_tensor(tmp_path: Path, name: str, size: int) -> None:
    """With act order the stated group size is only a hint: the groups are those of the tensor."""
    config = copy.deepcopy(MODELS[name][1])
    holder = config["config_groups"]["group_0"]["weights"] if name == "ct packed" else config
    holder["group_size"] = size
    config.pop("dynamic", None)
    assert refused_or_read(write(tmp_path, FILES[name], config))


@MANY
@given(
    text=st.one_of(
        st.text(max_size=60),
        st.sampled_from(
            ["[" * 100_000, "{", '{"a":' * 5000, "NaN", "1e999", "\x00", "[]", "3", ""]
        ),
    )
)
@example(text='{"quantization_config": 3}')
@example(text='{"quantization_config": {}}')
@example(text='{"text_config": {"quantization_config": []}}')
@example(text='{"compression_config": {"quant_method": {"a": []}}}')
def test_a_config_of_random_text(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path, FILES["gptq"], None)
    (folder / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    refused_or_read(folder)


def sharded(folder: Path, name: str) -> dict[str, Any]:
    """The model with each tensor in a separate shard; returns the index. Shards that are there are
    not written again.
    """
    tensors, config = MODELS[name]
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for number, (key, tensor) in enumerate(tensors.items()):
        weight_map[key] = f"model-{number:05d}.safetensors"
        if not (folder / weight_map[key]).exists():
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
    folder = tmp_path / name
    index = sharded(folder, name)
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
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    honest = (
        key in MODELS[name][0]
        and MODELS[name][0][key] is not None
        and place == sharded_place(name, key)
    )
    assert (
        read_or_refuse(folder / "model.safetensors.index.json", lambda path: read_all(path.parent))
        == honest
    )


def sharded_place(name: str, key: str) -> str:
    return f"model-{list(MODELS[name][0]).index(key):05d}.safetensors"
