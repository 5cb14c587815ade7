"""Checkpoints that are packed while an engine loads them: the description and the tensors that
the engine gets.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from imports import import_or_skip

import cutlass_ops as co
from cutlass_ops.engines.checkpoint import described, is_checkpoint, packed_tensors
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.vllm import checkpoint as plugin

import_or_skip("transformers")
gguf = import_or_skip("gguf")

from engine_models import write_gguf  # noqa: E402


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a GGUF file whose embedding is tied, and ``packed``, what the command
    line makes of it.
    """
    folder = tmp_path_factory.mktemp("checkpoint") / "gguf"
    write_gguf(folder, tied=True)
    reorder_model(co.load_checkpoint(folder / "model.gguf"), folder / "packed")
    return folder


def test_the_description_is_that_of_a_packed_directory(files: Path, tmp_path: Path) -> None:
    checkpoint = co.load_checkpoint(files / "model.gguf")
    directory, notes = described(checkpoint, tmp_path / "cache")
    expected = {file.name: file.read_bytes() for file in (files / "packed").iterdir()}
    found = {file.name: file.read_bytes() for file in directory.iterdir()}
    assert found == {
        name: content
        for name, content in expected.items()
        if name not in ("model.safetensors", "README.md")
    }
    assert any("no tokenizer was written" in note for note in notes)  # the file has none
    assert described(checkpoint, tmp_path / "cache") == (directory, [])
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [directory.name]
    status = (files / "model.gguf").stat()
    os.utime(files / "model.gguf", ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    assert described(checkpoint, tmp_path / "cache")[0] != directory


def test_an_engine_gets_the_tensors_of_a_packed_directory(files: Path) -> None:
    from safetensors.torch import load_file

    expected = load_file(files / "packed" / "model.safetensors")
    found = dict(packed_tensors(co.load_checkpoint(files / "model.gguf"), torch.device("cpu")))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_files_and_directories_that_are_checkpoints(files: Path, tmp_path: Path) -> None:
    assert is_checkpoint(files)
    assert is_checkpoint(files / "model.gguf")
    assert is_checkpoint(files / "dense")
    assert not is_checkpoint(files / "packed")
    assert not is_checkpoint(Path("organisation/model"))


def arguments(model: Path, **changed: Any) -> SimpleNamespace:
    """vLLM's arguments, of those that the plugin looks at."""
    usual = {
        "quantization": None,
        "load_format": "auto",
        "served_model_name": None,
        "model_loader_extra_config": {},
    }
    return SimpleNamespace(**usual | {"model": str(model)} | changed)


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's method, wrapped."""
    monkeypatch.setattr(
        plugin, "envs", SimpleNamespace(VLLM_CACHE_ROOT=str(tmp_path)), raising=False
    )
    return plugin._wrapped(lambda self: self)


@pytest.mark.parametrize("asked", [{"quantization": "cutlass_ops"}, {"load_format": "cutlass_ops"}])
def test_vllm_serves_a_file_that_cutlass_ops_is_asked_to_pack(
    files: Path, asked: Any, configure: Any, tmp_path: Path
) -> None:
    file = files / "model.gguf"
    found = configure(arguments(file, **asked))
    assert Path(found.model).parent == tmp_path / "cutlass_ops"
    assert found.served_model_name == [str(file)]
    assert found.load_format == "cutlass_ops"
    assert found.model_loader_extra_config == {"checkpoint": str(file)}
    # again, in another process
    assert configure(arguments(Path(found.model), **asked)).model == found.model


def test_vllm_makes_random_weights_of_a_file(files: Path, configure: Any) -> None:
    found = configure(
        arguments(files / "model.gguf", quantization="cutlass_ops", load_format="dummy")
    )
    assert found.load_format == "dummy"
    assert found.model_loader_extra_config == {}


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("model.gguf", {}),
        ("model.gguf", {"quantization": "gguf"}),
        ("packed", {"quantization": "cutlass_ops"}),
    ],
)
def test_vllm_keeps_what_cutlass_ops_is_not_asked_to_pack(
    files: Path, model: str, asked: Any, configure: Any
) -> None:
    assert configure(arguments(files / model, **asked)) == arguments(files / model, **asked)


def test_contradicting_load_format_and_quantization_are_refused(
    files: Path, configure: Any
) -> None:
    for asked in (
        {"quantization": "gguf", "load_format": "cutlass_ops"},
        {"quantization": "cutlass_ops", "load_format": "pt"},
    ):
        with pytest.raises(
            ValueError,
            match=rf"load_format is '{asked['load_format']}' and quantization "
            rf"'{asked['quantization']}'",
        ):
            configure(arguments(files / "model.gguf", **asked))


def test_a_loader_without_a_checkpoint_says_so(files: Path) -> None:
    loader: Any = plugin._Loader()
    loader.load_config = SimpleNamespace(model_loader_extra_config={})
    with pytest.raises(
        ValueError, match=r"checkpoints on this machine that are not packed; this is some/model"
    ):
        loader.load_weights(None, SimpleNamespace(model="some/model"))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
def test_a_vllm_without_the_interface_keeps_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    plugin.take_checkpoints()
    assert (
        "cutlass_ops packs no checkpoints in this version of vLLM: No module named 'vllm'"
        in caplog.text
    )
