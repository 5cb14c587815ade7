"""Ids of the Hub: read from a cache that was written here; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from imports import import_or_skip

import cutlass_ops as co
from cutlass_ops.checkpoints.hub import local_path
from cutlass_ops.files import Options

constants = import_or_skip("huggingface_hub.constants")


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache has the files of "someone/tiny-model.v1"."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "hub" / "models--someone--tiny-model.v1"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    files = repository / "snapshots" / commit
    files.mkdir(parents=True)
    (files / "config.json").write_text("{}")
    return files


def test_an_id_is_its_snapshot(snapshot: Path) -> None:
    assert local_path("someone/tiny-model.v1") == snapshot


def test_an_existing_name_is_a_path(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "someone" / "tiny-model.v1").mkdir(parents=True)
    assert local_path("someone/tiny-model.v1") == Path("someone/tiny-model.v1")


@pytest.mark.parametrize(
    "name", ["one", "a/b/c", "./a/b", "/a/b", "../b", "a/b.gguf", "a/b.safetensors", "a/"]
)
def test_a_name_that_is_no_valid_id_is_a_path(name: str, snapshot: Path) -> None:
    assert local_path(name) == Path(name)


def test_an_id_that_is_not_there_is_refused(snapshot: Path) -> None:
    with pytest.raises(
        co.CheckpointError,
        match="someone/else: there is no such directory, and the Hub gives no model",
    ):
        local_path("someone/else")


def test_load_model_takes_an_id(snapshot: Path) -> None:
    transformers = import_or_skip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(snapshot)
    loaded = co.load_model("someone/tiny-model.v1", options=Options(bits=8, group_size=32))
    tokens = torch.arange(8)[None]
    with torch.inference_mode():
        expected, found = model(tokens).logits, loaded(tokens).logits
    assert isinstance(loaded.get_submodule("model.layers.0.self_attn.o_proj"), co.MixedLinear)
    assert (found - expected).norm() <= 0.03 * expected.norm()
