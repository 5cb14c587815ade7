"""The command line, as a user runs it: what it prints, its exit status, its errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import cutlass_ops
from cutlass_ops import cli, load_packed


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def run_json(*args: object) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    random = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(8, 64, generator=random),
        "model.layers.0.mlp.up_proj.weight": torch.randn(48, 64, generator=random),
        "model.layers.0.mlp.down_proj.weight": torch.randn(64, 48, generator=random),
        "model.norm.weight": torch.ones(64),
    }
    save_file(tensors, path)
    return path


UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def test_from_a_checkpoint_to_a_verified_file(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.safetensors"
    done = run("reorder", model, "-o", out, "--bits", 4, "--group-size", 32, "--asymmetric")
    assert done.exit_code == 0, done.output
    assert "packed   2 weights (2 of 4 bits in groups of 32)" in done.stdout
    assert "copied   2 tensors" in done.stdout
    assert str(out) in done.stdout
    assert done.stderr == ""
    assert load_packed(out)[UP].zeros is not None  # type: ignore[union-attr]
    checked = run("verify", out, "--against", model)
    assert checked.exit_code == 0, checked.output
    assert "checked  2 weights, 2 tensors" in checked.stdout
    assert "has the recorded sha256" in checked.stdout
    assert checked.stdout.rstrip().endswith("ok")


def test_json(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.safetensors"
    before = run_json("inspect", model)
    assert before["kind"] == "safetensors"
    assert [t["name"] for t in before["tensors"]] == sorted(t["name"] for t in before["tensors"])
    done = run_json("reorder", model, "-o", out, "--bits", 8, "--exclude", "down")
    assert done["weights"] == {UP: {"n": 48, "k": 64, "bits": 8, "group_size": 128}}
    assert done["packed_bytes"] == out.stat().st_size
    after = run_json("inspect", out)
    assert after["kind"] == "packed"
    assert after["layout"] == "cutlass_ops.slab64 version 1"
    assert after["sources"].keys() == {"m.safetensors"}
    assert next(t for t in after["tensors"] if t["name"] == UP)["parts"] == {"codes": "uint8", "scales": "float32"}
    assert {t["name"] for t in after["tensors"]} == {UP, *done["tensors"]}
    found = run_json("verify", out, "--against", model)
    assert found["ok"]
    assert found["same_source"]
    assert found["largest_at"] == UP
    assert 0 < found["largest_difference"] < 0.02


def test_inspect_shows_names_and_shapes(model: Path, tmp_path: Path) -> None:
    shown = run("inspect", model).stdout
    assert f"{UP}.weight" in shown
    assert "48 x 64" in shown
    out = tmp_path / "p.safetensors"
    run("reorder", model, "-o", out, "--bits", 4)
    shown = run("inspect", out).stdout
    assert "4 bits in groups of 128, scales float32" in shown
    assert "sources:  m.safetensors = " in shown


def test_include_takes_what_the_defaults_leave(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.safetensors"
    done = run_json("reorder", model, "-o", out, "--bits", 4, "--include", "embed|up_proj")
    assert sorted(done["weights"]) == ["model.embed_tokens", UP]


def test_a_wrong_file_fails_verification(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.safetensors"
    run("reorder", model, "-o", out, "--bits", 4)
    content = bytearray(out.read_bytes())
    length = int.from_bytes(content[:8], "little")
    begin = json.loads(content[8 : 8 + length])[f"{UP}.codes"]["data_offsets"][0]
    content[8 + length + begin] ^= 1
    out.write_bytes(content)
    failed = run("verify", out, "--against", model)
    assert failed.exit_code == 1
    assert f"{UP}: codes differs from the checkpoint's" in failed.stdout
    assert "FAILED" in failed.stdout
    report = run("verify", out, "--against", model, "--json")
    assert report.exit_code == 1
    assert json.loads(report.stdout)["ok"] is False


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["inspect", "{dir}/nothing"], "no such file or directory"),
        (["inspect", "{dir}/noise.gguf"], "starts with b'nois'"),
        (["inspect", "{dir}/noise.safetensors"], "not a valid safetensors file"),
        (["verify", "{dir}/m.safetensors"], "not a packed file"),
        (["verify", "{dir}/nothing"], "{dir}/nothing: no such file"),
        (["verify", "{dir}"], "{dir}: has no config.json"),
        (["reorder", "{dir}/m.safetensors", "-o", "{dir}/p"], "give bits (--bits 4 or --bits 8)"),
        (["reorder", "{dir}/m.safetensors", "-o", "{dir}/p", "--asymmetric"], "give --bits too"),
        (["reorder", "{dir}/m.safetensors", "-o", "{dir}/p", "--group-size", "32"], "give --bits too"),
        (["reorder", "{dir}/m.safetensors", "-o", "{dir}/p", "--bits", "3"], "bits is 3; supported are 4, 8"),
        (["reorder", "{dir}/m.safetensors", "-o", "{dir}/p", "--bits", "4", "--include", "["], "regular expression"),
        (["reorder", "{dir}/m.safetensors", "-o", "{dir}/no/p", "--bits", "4"], "No such file or directory"),
        (["reorder", "{dir}/m.safetensors", "-o", "{dir}/m.safetensors", "--bits", "4"], "checkpoint itself"),
        (["reorder", "{dir}/m.safetensors"], "--output"),
        (["reorder", "{dir}/m.safetensors", "-o", "{dir}/p", "--bits", "many"], "--bits"),
        (["nothing"], "nothing"),
    ],
)
def test_bad_input_is_told_in_a_line(model: Path, tmp_path: Path, args: list[str], message: str) -> None:
    for suffix in ("gguf", "safetensors"):
        (tmp_path / f"noise.{suffix}").write_bytes(b"noise")
    result = run(*(arg.format(dir=tmp_path) for arg in args))
    assert result.exit_code == 2, result.output
    assert message.format(dir=tmp_path) in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "p").exists()
    assert not isinstance(result.exception, (ValueError, OSError))


@pytest.mark.parametrize("command", [[], ["inspect"], ["reorder"], ["verify"], ["doctor"], ["demo"]])
def test_help(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_version() -> None:
    assert run("--version").stdout == f"cutlass_ops {cutlass_ops.__version__}\n"


# ---- doctor


def test_doctor_multiplies() -> None:
    facts = run_json("doctor")
    assert facts["ok"]
    assert facts["torch"].startswith(torch.__version__)
    assert facts["self_test"]["cpu"] == dict.fromkeys(cli._PRODUCTS, "ok")
    assert set(facts["kernels"]["cpu"].values()) == {"reference"}
    shown = run("doctor")
    assert shown.exit_code == 0
    assert "W4A8 block" in shown.stdout


@pytest.mark.gpu
def test_doctor_multiplies_on_the_gpu() -> None:
    facts = run_json("doctor")
    assert facts["self_test"]["cuda:0"] == dict.fromkeys(cli._PRODUCTS, "ok")
    assert facts["cuda_driver"][0].isdigit()
    assert "reference" not in facts["kernels"]["cuda:0"].values()


def test_doctor_fails_when_a_product_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cli.ops.mixed_gemm
    monkeypatch.setattr(cli.ops, "mixed_gemm", lambda *args, **options: right(*args, **options) * 1.001)
    result = run("doctor")
    assert result.exit_code == 1
    assert "wrong: relative error 0.001" in result.stdout


def test_doctor_without_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(cli, "import_module", missing)
    facts = run_json("doctor")
    assert (facts["cuda_driver"], facts["cuda_runtime"]) == ("unknown", "unknown")
    assert sum("pip install cuda-bindings" in line for line in facts["missing"]) == 1


@pytest.mark.parametrize(
    ("answer", "missing"),
    [
        (RuntimeError("Failed to dlopen libcuda.so.1"), "CUDA driver: Failed to dlopen libcuda.so.1"),
        ((35, 0), "CUDA driver: cuDriverGetVersion returned 35"),
        ((0, 0), "CUDA driver: not installed"),
        ((0, 12040), None),
    ],
)
def test_doctor_with_an_old_driver_or_none(
    monkeypatch: pytest.MonkeyPatch, answer: Exception | tuple[int, int], missing: str | None
) -> None:
    class Library:
        def __getattr__(self, name: str) -> Any:
            def call() -> tuple[int, int]:
                if isinstance(answer, Exception):
                    raise answer
                return answer

            return call

    monkeypatch.setattr(cli, "import_module", lambda name: Library())
    monkeypatch.setattr(cli, "version", lambda name: "13.0")
    facts = run_json("doctor")
    if missing is None:
        assert facts["cuda_driver"] == "12.4 (cuda-bindings 13.0)"
    else:
        assert facts["cuda_driver"] == "not found"
        assert missing in facts["missing"]


# ---- as programs


def test_the_module_and_the_script(model: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "tools" / "reorder_weights.py"
    for index, command in enumerate(([sys.executable, "-m", "cutlass_ops", "reorder"], [sys.executable, str(script)])):
        out = tmp_path / f"{index}.safetensors"
        done = subprocess.run(
            [*command, str(model), "-o", str(out), "--bits", "4"], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert UP in load_packed(out)
    bad = subprocess.run([sys.executable, str(script), "nothing", "-o", "x"], capture_output=True, text=True, cwd=tmp_path)
    assert bad.returncode == 2
    assert "Traceback" not in bad.stderr
