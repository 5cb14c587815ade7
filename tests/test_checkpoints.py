"""Readers of safetensors checkpoints, and files that are no checkpoint."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cutlass_ops import CheckpointError, load_checkpoint
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import verify_packed

# ---- safetensors


def test_a_single_file(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(3, 5),
        "n": torch.arange(3),
        "s": torch.tensor(2.0),
        "e": torch.zeros(0, 2),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    for path in (tmp_path / "m.safetensors", tmp_path):
        checkpoint = load_checkpoint(path)
        assert len(checkpoint) == 0
        plain = dict(checkpoint.plain())
        assert plain.keys() == tensors.keys()
        assert all(torch.equal(plain[name], value) for name, value in tensors.items())


@pytest.mark.parametrize(
    "now", [{"b": torch.zeros(2)}, {"a": torch.zeros(3)}, {"a": torch.zeros(2).half()}]
)
def test_a_file_that_changes_while_it_is_read(tmp_path: Path, now: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    checkpoint = load_checkpoint(path)
    save_file(now, path)
    with pytest.raises(CheckpointError, match=r"tensor 'a': the file changed"):
        list(checkpoint.plain())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model-1.safetensors")
    save_file(
        {"b.weight": torch.zeros(3, 3), "c": torch.arange(2)}, tmp_path / "model-2.safetensors"
    )
    weight_map = {
        "a.weight": "model-1.safetensors",
        "b.weight": "model-2.safetensors",
        "c": "model-2.safetensors",
    }
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return tmp_path


def test_shards(sharded: Path) -> None:
    for path in (sharded, sharded / "model.safetensors.index.json"):
        checkpoint = load_checkpoint(path)
        assert [file.name for file in checkpoint.files] == [
            "model-1.safetensors",
            "model-2.safetensors",
        ]
        assert {name: tuple(value.shape) for name, value in checkpoint.plain()} == {
            "a.weight": (2, 2),
            "b.weight": (3, 3),
            "c": (2,),
        }
    done = reorder_checkpoint(
        load_checkpoint(sharded), sharded / "packed.out", bits=4, group_size=32
    )
    assert sorted(done.weights) == ["a", "b"]
    assert verify_packed(sharded / "packed.out", load_checkpoint(sharded)).problems == []


def test_the_file_of_a_directory_that_is_read(tmp_path: Path) -> None:
    """model.safetensors among several, the only index, and
    model.safetensors.index.json among several.
    """
    for name in ("model", "consolidated", "adapter"):
        save_file({f"{name}.weight": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    assert list(load_checkpoint(tmp_path).entries) == ["model.weight"]
    for name, shard in (
        ("gptq_model-4bit", "consolidated"),
        ("model", "adapter"),
        ("other", "model"),
    ):
        index = {"weight_map": {f"{shard}.weight": f"{shard}.safetensors"}}
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps(index))
        if name == "gptq_model-4bit":
            assert list(load_checkpoint(tmp_path).entries) == ["consolidated.weight"]
    assert list(load_checkpoint(tmp_path).entries) == ["adapter.weight"]
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"2 json files and no model\.safetensors\.index\.json"
    ):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quantization_config": 3}, "quantization_config is 3; an object is expected"),
        ({"text_config": {"compression_config": []}}, r"compression_config is \[\]; an object"),
        (
            {"quantization_config": {"quant_method": "fbgemm_fp8"}},
            "is quantised by 'fbgemm_fp8'; known are awq, ",
        ),
        ([], "is a JSON list; an object is expected"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: object, match: str) -> None:
    """Above all: tensors that some method quantised never pass for plain ones."""
    save_file({"a.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(tmp_path)


def test_the_config_is_handed_on(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": None})
    )
    for path in (tmp_path, tmp_path / "model.safetensors"):
        checkpoint = load_checkpoint(path)
        assert checkpoint.config["model_type"] == "llama"
        assert checkpoint.metadata == {"format": "pt"}
        assert checkpoint.others["a.weight"].values().tolist() == [1.0]


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        change(content)
        index.write_text(json.dumps(content))

    return apply


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (
            lambda folder: (folder / "model-1.safetensors").unlink(),
            r"'model-1\.safetensors', which is not there",
        ),
        (edit(lambda c: c["weight_map"].pop("c")), "tensor 'c': the index does not name it"),
        (edit(lambda c: c["weight_map"].update(d="model-2.safetensors")), "tensor 'd': is not in"),
        (
            edit(lambda c: c["weight_map"].update(c="model-1.safetensors")),
            "tensor 'c': the index places it in",
        ),
        (edit(lambda c: c["weight_map"].update(c="../x.safetensors")), "of the same directory"),
        (edit(lambda c: c["weight_map"].update(c="/etc/passwd")), "of the same directory"),
        (edit(lambda c: c["weight_map"].update(c="x\0.safetensors")), "of the same directory"),
        (edit(lambda c: c["weight_map"].update(c=3)), 'no "weight_map"'),
        (edit(lambda c: c.clear()), 'no "weight_map"'),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "not JSON"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("[" * 100_000),
            "not JSON",
        ),
        (lambda folder: (folder / "model.safetensors.index.json").write_bytes(b"\xff"), "not JSON"),
        (
            lambda folder: (folder / "model-2.safetensors").write_bytes(b"x" * 64),
            "not a valid safetensors file",
        ),
    ],
)
def test_an_index_with_false_shards(
    sharded: Path, damage: Callable[[Path], object], match: str
) -> None:
    damage(sharded)
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(sharded)


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    # Allowed by the format; the library no longer writes it.
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b.weight": {"dtype": "F32", "shape": [1, 2], "data_offsets": [1, 9]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\1" + struct.pack("<2f", 1.5, -2.0))
    plain = dict(load_checkpoint(path).plain())
    assert plain["b.weight"].tolist() == [[1.5, -2.0]]
    assert plain["b.weight"].data_ptr() % 4 == 0


# ---- files that are no checkpoint


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("m.gguf", b"", "empty"),
        ("m.gguf", b"GGU", "starts with b'GGU'"),
        ("m.gguf", b"GGUF\3\0\0\0", "ends at byte 8"),
        ("m.bin", b"PK\3\4", "not a checkpoint of a known kind"),
        ("m.safetensors", b"", "not a valid safetensors file"),
        ("m.safetensors", b"\xff" * 8, "not a valid safetensors file"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=match) as raised:
        load_checkpoint(path)
    assert raised.value.path == str(path)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        load_checkpoint(tmp_path / "nothing.gguf")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_checkpoint(tmp_path)
    for name in ("a", "b"):
        save_file({}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "consolidated.00.pth"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(
            CheckpointError, match="pickles run code when they are opened, and never are"
        ):
            load_checkpoint(path)


def test_a_packed_file_is_no_checkpoint(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "m.safetensors")
    reorder_checkpoint(
        load_checkpoint(tmp_path / "m.safetensors"), tmp_path / "p.safetensors", bits=4
    )
    with pytest.raises(CheckpointError, match="packed model already"):
        load_checkpoint(tmp_path / "p.safetensors")
