"""The command line refuses what would have no effect, says what Ctrl-C leaves, and fits its
list into a console.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import model, run, run_json
from hostile_directories import FILES, MODELS, write
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file

from cutlass_ops import cli
from cutlass_ops.files import packing

__all__ = ["model"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("-o", "{dir}/p.safetensors", "--bits", 4, "--act-quant", "token"),
            "--act-quant is for a model's directory",
        ),
        (
            ("-o", "{dir}/p.safetensors", "--bits", 4, "--act-asymmetric"),
            "--act-symmetric is for a model's directory",
        ),
        (
            ("-o", "{dir}/p.safetensors", "--bits", 4, "--shard-size", 1),
            "--shard-size is for a model's directory",
        ),
        (
            ("-o", "{dir}/p.safetensors", "--bits", 4, "--tp-split", "a=colwise"),
            "--tp-split is for a model's directory",
        ),
        (("-o", "{dir}/p", "--bits", 4, "--tp-split", "a=colwise"), "give --tp too"),
        (("-o", "{dir}/p", "--bits", 4, "--act-asymmetric"), "give --act-quant too"),
        (
            ("-o", "{dir}/p", "--bits", 4, "--act-asymmetric", "--act-quant", "none"),
            "give --act-quant too",
        ),
        (
            ("-o", "{dir}/p", "--bits", 4, "--clip", "mse", "--include", "nothing"),
            "there is no weight to pack",
        ),
        (("-o", "{dir}/a/b/p", "--bits", 4), "there is no folder {dir}/a/b"),
        (("-o", "{dir}/a/p.safetensors", "--bits", 4), "there is no folder {dir}/a"),
        (("-o", "{dir}/m.safetensors.txt", "--bits", 4), "is a file; a folder of that name"),
        (("-o", "{dir}/folder.safetensors", "--bits", 4), "is a folder; a file of that name"),
    ],
)
def test_options_without_effect(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
    message: str,
) -> None:
    (tmp_path / "m.safetensors.txt").touch()
    (tmp_path / "folder.safetensors").mkdir()
    monkeypatch.setattr(packing, "sha256", None)  # no file is read before options are refused
    result = run("reorder", model, *(str(option).format(dir=tmp_path) for option in options))
    assert result.exit_code == 2, result.output
    assert message.format(dir=tmp_path) in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "p").exists()


def test_bits_have_no_effect_on_quantised_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = write(tmp_path / "source", FILES["gptq"], MODELS["gptq"][1])
    refused = run("reorder", source, "-o", tmp_path / "out", "--bits", 8)
    assert refused.exit_code == 2
    assert "--bits 8 changes nothing" in refused.stderr
    assert not (tmp_path / "out").exists()
    save_file(
        {"x.weight": torch.ones(64, 64)} | MODELS["gptq"][0],
        tmp_path / "source" / "model.safetensors",
    )
    assert run("reorder", source, "-o", tmp_path / "out", "--bits", 8).exit_code == 0


def test_the_same_gpu_twice(model: Path) -> None:
    refused = run("inspect", model, "--gpu", "sm_90", "--gpu", "sm_80", "--gpu", "sm_90")
    assert refused.exit_code == 2
    assert "--gpu sm_90 is given twice" in refused.stderr


# ---- errors that are not the user's


def test_ctrl_c_says_what_is_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = packing.stream_safetensors, []

    def interrupted(path: Path, *args: Any) -> Any:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(path, *args)

    random = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{i}.up.weight": torch.randn(1024, 1024, generator=random).half() for i in range(3)
    }
    save_file(tensors, model)
    monkeypatch.setattr(packing, "stream_safetensors", interrupted)
    out = tmp_path / "out"
    stopped = run("reorder", model, "-o", out, "--bits", 8, "--shard-size", 0.001)
    assert stopped.exit_code == 130, stopped.output
    assert (
        f"interrupted: 1 finished files are kept in {out}; the same command makes the others"
        in stopped.stderr
    )
    assert run_json("reorder", model, "-o", out, "--bits", 8, "--shard-size", 0.001)["found"] == 1
    calls[:] = [model]
    stopped = run("reorder", model, "-o", tmp_path / "one.safetensors", "--bits", 8)
    assert stopped.exit_code == 130
    assert "interrupted: nothing is written" in stopped.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors", "out"]


@pytest.mark.parametrize("error", [SafetensorError("bad"), MemoryError()])
def test_no_error_of_a_library_escapes(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr(cli.inspect, "is_packed", fail)
    result = run("inspect", model)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


# ---- inspect


def test_inspect_fits_into_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {}
    for layer in range(12):
        for name in ("self_attn.q_proj", "mlp.up_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(64, 128).half()
        tensors[f"model.layers.{layer}.norm.weight"] = torch.ones(64 if layer not in (3, 7) else 32)
    for expert in range(3):
        tensors[f"model.layers.1.parts.{expert}.{'a' * 90}.weight"] = torch.randn(64, 128).half()
    source, out = tmp_path / "m.safetensors", tmp_path / "p.safetensors"
    save_file(tensors, source)
    assert (
        run("reorder", source, "-o", out, "--bits", 4, "--exclude", r"layers\.0\..*up").exit_code
        == 0
    )
    text = io.StringIO()
    monkeypatch.setattr(cli.inspect, "make_console", lambda: Console(file=text, width=80))
    assert run("inspect", out, "--gpu", "sm_80", "--gpu", "sm_90").exit_code == 0
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 50
    joined = " ".join(line.strip() for line in lines)
    assert "weights:  26 (" in joined
    assert "others:   13 (" not in joined
    assert lines.index("model.layers.{0..11}.self_attn.q_proj") > next(
        i for i, line in enumerate(lines) if "others:" in line
    )
    for name in (
        "model.layers.{1..11}.mlp.up_proj",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.{3,7}.norm.weight",
    ):
        assert name in lines
    assert "model.layers.{0..2,4..6,8..11}.norm.weight" in lines
    assert "12 of 64 x 128" in joined
    assert "sm_90: " in joined
    assert f"model.layers.1.parts.{{0..2}}.{'a' * 90}" in text.getvalue().replace("\n", "")
    assert len(json.loads(run("inspect", out, "--json").stdout)["tensors"]) == len(tensors)


def test_names_whose_numbers_are_not_all_combinations() -> None:
    facts = {"type": "F16", "shape": [1], "bytes": 2, "note": "", "kernels": {}}
    names = ["l.0.e.0.w", "l.0.e.1.w", "l.1.e.0.w", "x.5.w", "x.7.w", "x.8.w", "b"]
    found = [name for name, _ in cli.inspect._alike([{"name": name, **facts} for name in names])]
    assert found == [*names[:3], "x.{5,7..8}.w", "b"]
    both = [
        name
        for name, _ in cli.inspect._alike(
            [{"name": f"l.{i}.e.{j}.w2", **facts} for i in range(2) for j in range(3)]
        )
    ]
    assert both == ["l.{0..1}.e.{0..2}.w2"]
