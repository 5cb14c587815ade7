"""Models of bitsandbytes, HQQ, torchao and MNN with false metadata: a CheckpointError, or the
values in the files.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_cases import MANY, header_length, mutations, read_or_refuse
from hostile_dialects import (
    BLOB,
    GRAPH,
    HEADER,
    MODELS,
    NESTED,
    STATE,
    as_json,
    saved,
    write,
    write_mnn,
)
from hostile_directories import VALUES, paths
from hostile_directories import read_all as read_directory
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cutlass_ops import CheckpointError, QuantizedWeight, load_checkpoint
from cutlass_ops.checkpoints.directory import CODES
from cutlass_ops.reference import dequantize_weight

FILES = {name: saved(name, tensors) for name, tensors in MODELS.items()}


def close(weight: QuantizedWeight, values: Tensor) -> bool:
    """Whether both ways to the values agree, up to the rounding of fp32."""
    ours = dequantize_weight(weight, torch.float32)
    size = weight.scales.float().abs() * 2.0**weight.bits
    if weight.offsets is not None:
        size = size + weight.offsets.float().abs()
    group = torch.arange(weight.k) // (weight.k if weight.group_size == -1 else weight.group_size)
    limit = size[:, group] * 2.0**-20
    regular = ours.isfinite() & values.isfinite() & limit.isfinite()
    return bool(((ours - values).abs() <= limit)[regular].all())


def read_all(path: Path) -> int:
    return read_directory(path, close)


@pytest.mark.parametrize(("name", "weights"), [("hqq", 3), ("bitsandbytes", 3), ("torchao", 4)])
def test_the_undamaged_models_are_read(tmp_path: Path, name: str, weights: int) -> None:
    path = write(tmp_path, name, FILES[name])
    assert read_all(path) == weights
    checkpoint = load_checkpoint(path)
    assert not checkpoint.others
    assert all(
        any(part.endswith(CODES) for part in entry.parts) for entry in checkpoint.entries.values()
    )
    (tmp_path / "config.json").unlink()  # recognised by their tensors, too
    assert read_all(path) == weights


@MANY
@given(name=st.sampled_from(sorted(FILES)), data=st.data())
def test_a_damaged_file(tmp_path: Path, name: str, data: st.DataObject) -> None:
    content = data.draw(mutations(FILES[name], 8 + header_length(FILES[name])))
    read_or_refuse(write(tmp_path, name, content), read_all)


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
            torch.bool,
        ]
    ),
    shape=st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 9, 16, 32, 64, 65]), max_size=4),
    fill=st.sampled_from([0, 1, 2, 3, 5, 7, 8, 16, 32, 33, 48, 64, 127, 255, -1, -128]),
)
def test_a_model_with_another_tensor(
    tmp_path: Path, name: str, data: st.DataObject, dtype: torch.dtype, shape: list[int], fill: int
) -> None:
    tensors = dict(MODELS[name])
    where = data.draw(st.sampled_from(sorted(tensors)))
    what = data.draw(st.sampled_from(["replace", "refill", "remove", "rename", "reshape", "view"]))
    old = tensors.pop(where)
    if what == "replace":
        tensors[where] = torch.full(shape, fill).to(dtype)
    elif what == "refill":
        tensors[where] = torch.full(old.shape, fill).to(old.dtype)
    elif what == "rename":
        tensors[
            data.draw(st.sampled_from(sorted({key for held in MODELS.values() for key in held})))
        ] = old
    elif what == "reshape":
        tensors[where] = old.t() if old.dim() == 2 else old.reshape(1, -1)
    elif what == "view":
        other = data.draw(st.sampled_from([torch.uint8, torch.int8, torch.float16, torch.float32]))
        raw = old.reshape(-1).view(torch.uint8)
        tensors[where] = raw[: raw.numel() // other.itemsize * other.itemsize].view(other)
    read_or_refuse(write(tmp_path, name, saved(name, tensors)), read_all)


def edited(value: Any, data: st.DataObject) -> Any:
    """A copy with one item, at any depth, replaced or removed."""
    value = copy.deepcopy(value)
    where = data.draw(st.sampled_from(paths(value)))
    new = data.draw(VALUES)
    if not where:
        return new
    holder = value
    for key in where[:-1]:
        holder = holder[key]
    if data.draw(st.booleans()):
        holder[where[-1]] = new
    else:
        del holder[where[-1]]
    return value


@MANY
@given(data=st.data(), nested=st.booleans())
def test_a_quant_state_with_another_value(
    tmp_path: Path, data: st.DataObject, nested: bool
) -> None:
    key = (
        "m.weight.quant_state.bitsandbytes__nf4"
        if nested
        else "f.weight.quant_state.bitsandbytes__fp4"
    )
    state = as_json(edited(NESTED if nested else STATE, data))
    content = saved("bitsandbytes", {**MODELS["bitsandbytes"], key: state})
    read_or_refuse(write(tmp_path, "bitsandbytes", content), read_all)


def test_a_quant_state_that_is_no_text(tmp_path: Path) -> None:
    state = {"m.weight.quant_state.bitsandbytes__nf4": torch.zeros(8)}
    path = write(
        tmp_path, "bitsandbytes", saved("bitsandbytes", {**MODELS["bitsandbytes"], **state})
    )
    with pytest.raises(CheckpointError, match="is F32 of 32 bytes; U8 of 1000000 at most"):
        read_all(path)


@MANY
@given(
    data=st.data(),
    key=st.sampled_from(sorted(HEADER)),
    kind=st.sampled_from(sorted({k for k, _ in HEADER.values()})),
)
def test_a_description_with_another_value(
    tmp_path: Path, data: st.DataObject, key: str, kind: str
) -> None:
    old, content = HEADER[key]
    kind = data.draw(st.sampled_from([old, old, old, kind]))
    header = {**HEADER, key: (kind, edited(content, data))}
    read_or_refuse(
        write(tmp_path, "torchao", saved("torchao", MODELS["torchao"], header)), read_all
    )


def test_the_undamaged_mnn_model_is_read(tmp_path: Path) -> None:
    path = write_mnn(tmp_path, GRAPH, BLOB)
    assert read_all(path) == 3
    assert sorted(load_checkpoint(path).others) == ["h.weight", "n.beta", "n.gamma"]


@MANY
@given(data=st.data())
def test_an_mnn_model_with_another_value(tmp_path: Path, data: st.DataObject) -> None:
    read_or_refuse(write_mnn(tmp_path, edited(GRAPH, data), BLOB), read_all)


@MANY
@given(blob=mutations(BLOB, 40))
def test_a_damaged_mnn_weight(tmp_path: Path, blob: bytes) -> None:
    read_or_refuse(write_mnn(tmp_path, GRAPH, blob), read_all)


def test_an_mnn_weight_of_five_values(tmp_path: Path) -> None:
    blob = BLOB[:5] + b"\5" + BLOB[6:]  # after the number of dimensions, and two of them
    with pytest.raises(CheckpointError, match="its weight has 5 values; 9 to 16"):
        read_all(write_mnn(tmp_path, GRAPH, blob))


def test_every_truncation_of_an_mnn_weight(tmp_path: Path) -> None:
    for size in range(len(BLOB)):
        assert not read_or_refuse(write_mnn(tmp_path, GRAPH, BLOB[:size]), read_all), size
