"""The command line, as a user runs it: its output, its exit status, its errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import model, run, run_json

import cutlass_ops
from cutlass_ops import _C, cli, load_packed

__all__ = ["model"]

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def test_from_a_checkpoint_to_a_verified_file(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.safetensors"
    done = run("reorder", model, "-o", out, "--bits", 4, "--group-size", 32, "--asymmetric")
    assert done.exit_code == 0, done.output
    assert "packed   2 weights (2 of 4 bits in groups of 32)" in done.stdout
    assert "copied   2 tensors" in done.stdout
    assert str(out) in done.stdout
    assert done.stderr == ""
    assert load_packed(out)[UP].zeros is not None
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
    assert after["layout"] == "cutlass_ops.slab64 version 2"
    assert after["sources"].keys() == {"m.safetensors"}
    assert next(t for t in after["tensors"] if t["name"] == UP)["parts"] == {
        "codes": "uint8",
        "scales": "float32",
    }
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
    assert "4 bits in groups of 128, symmetric, scales float32" in shown
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


def test_inspect_names_the_kernels(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.safetensors"
    run("reorder", model, "-o", out, "--bits", 4, "--group-size", 32, "--asymmetric")
    described = run_json("inspect", out, "--gpu", "sm_90", "--gpu", "sm_80")
    tensors = {tensor["name"]: tensor for tensor in described["tensors"]}
    up = tensors[UP]
    assert (up["bits"], up["group_size"], up["symmetric"], up["act_order"]) == (4, 32, False, False)
    weight = load_packed(out)[UP]
    assert isinstance(weight, cutlass_ops.PackedWeight)
    for gpu in ("sm_80", "sm_90"):
        for m in (1, 4096):
            assert up["kernels"][gpu][str(m)] == cutlass_ops.explain(m, weight, device=gpu).kernel
    norm = tensors["model.norm.weight"]
    assert (norm["kernels"], norm["bits"], norm["symmetric"]) == ({}, None, None)
    block = run_json("inspect", out, "--gpu", "sm_80", "--act-quant", "block")["tensors"]
    assert next(t for t in block if t["name"] == UP)["kernels"]["sm_80"]["4096"].endswith("a8")
    shown = run("inspect", out, "--gpu", "sm_80").stdout
    assert "sm_80" in shown
    assert "mma_gemm_a16" in shown
    assert "sm_90" not in shown
    assert "4 bits in groups of 32, zero points, scales float32" in shown


def test_inspect_says_why_no_kernel_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "p.safetensors"
    run("reorder", model, "-o", out, "--bits", 4)
    right = cutlass_ops.explain

    def explain(
        m: int, weight: cutlass_ops.PackedWeight, **options: Any
    ) -> cutlass_ops.Explanation:
        if weight.n == 48:
            raise ValueError("no row takes it")
        return right(m, weight, **options)

    monkeypatch.setattr(cli.describe, "explain", explain)
    tensors = run_json("inspect", out, "--gpu", "sm_90")["tensors"]
    assert next(t for t in tensors if t["name"] == UP)["kernels"] == {
        "sm_90": {"1": "none: no row takes it", "4096": "none: no row takes it"}
    }


@pytest.fixture
def directory(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    model.rename(tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    return tmp_path / "source"


def test_a_model_directory(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--bits", 4, "--group-size", 32, "--act-quant", "block", "--act-asymmetric")
    planned = run_json("reorder", directory, "-o", out, *options, "--dry-run")
    assert not planned["written"]
    assert not out.exists()
    done = run_json("reorder", directory, "-o", out, *options)
    assert done["written"]
    assert (done["files"], done["weights"], done["copied"]) == (
        planned["files"],
        planned["weights"],
        ["tokenizer.json"],
    )
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["act_quant"] == "block"
    assert config["quantization_config"]["act_symmetric"] is False
    again = run("reorder", directory, "-o", out, *options)
    assert "found    1 of 1 files finished by an earlier run" in again.stdout
    assert "copied   2 tensors, tokenizer.json" in again.stdout
    described = run_json("inspect", out)
    assert described["kind"] == "packed"
    assert described["files"] == done["files"]
    checked = run("verify", out, "--against", directory)
    assert checked.exit_code == 0, checked.output
    assert "checked  2 weights, 2 tensors" in checked.stdout


def test_a_directory_for_each_rank(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--bits", 4, "--group-size", 32, "--tp", 2)
    refused = run("reorder", directory, "-o", out, *options)  # down_proj has 48 input features
    assert refused.exit_code == 2
    assert "groups of 8" in refused.stderr
    done = run("reorder", directory, "-o", out, *options, "--tp-split", "down=replicate")
    assert done.exit_code == 0, done.output
    assert "split    1 colwise over 2 ranks" in done.stdout
    assert load_packed(out / "rank-1-of-2")[UP].n == 24
    assert run_json("inspect", out / "rank-1-of-2")["rank"] == "1 of 2"
    assert run_json("verify", out, "--against", directory)["weights"] == 4
    one = run("reorder", directory, "-o", tmp_path / "one.safetensors", *options)
    assert one.exit_code == 2
    assert "makes a directory for each rank" in one.stderr


def test_a_warning_names_an_option_that_matches_nothing(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.safetensors"
    told = "is 'lm_haed', of which no layer's name has a match"
    excluded = run_json("reorder", model, "-o", out, "--bits", 4, "--exclude", "lm_haed")
    assert excluded["warnings"] == [f"exclude {told}"]
    assert run_json("reorder", model, "-o", out, "--bits", 4, "--exclude", "down")["warnings"] == []
    included = run("reorder", model, "-o", out, "--bits", 4, "--include", "lm_haed")
    assert included.exit_code == 2
    assert f"there is no weight to pack; include {told}" in included.stderr


def test_diff(model: Path, tmp_path: Path) -> None:
    a, b, c = (tmp_path / f"{name}.safetensors" for name in "abc")
    run("reorder", model, "-o", a, "--bits", 4)
    run("reorder", model, "-o", b, "--bits", 4, "--jobs", 1)
    run("reorder", model, "-o", c, "--bits", 4, "--exclude", "down")
    same = run("diff", a, b)
    assert (same.exit_code, same.stdout) == (0, "4 equal, 0 differ\n")
    other = run("diff", a, c)
    assert other.exit_code == 1
    assert other.stdout.splitlines() == [
        f"only in {a}: {DOWN}",
        f"only in {c}: {DOWN}.weight",
        "3 equal, 0 differ",
    ]
    report = run("diff", a, c, "--json")
    assert report.exit_code == 1
    assert json.loads(report.stdout) == {
        "equal": False,
        "same": 3,
        "only_first": [DOWN],
        "only_second": [f"{DOWN}.weight"],
        "changed": {},
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["inspect", "{dir}/m.safetensors", "--gpu", "sm_70"], "device is 'sm_70'"),
        (["inspect", "{dir}/m.safetensors", "--act-quant", "row"], "act_quant is 'row'"),
        (["diff", "{dir}/m.safetensors", "{dir}/m.safetensors"], "not a packed file"),
        (
            [
                "reorder",
                "{dir}/m.safetensors",
                "-o",
                "{dir}/p",
                "--bits",
                "4",
                "--tp",
                "2",
                "--tp-split",
                "x",
            ],
            "REGEX=STYLE",
        ),
        (
            ["reorder", "{dir}/m.safetensors", "-o", "{dir}/p", "--bits", "4", "--act-quant", "x"],
            "act_quant is 'x'",
        ),
        (
            [
                "reorder",
                "{dir}/m.safetensors",
                "-o",
                "{dir}/p",
                "--bits",
                "4",
                "--zero-offset",
                "2",
            ],
            "auto, 0 and 1",
        ),
        (
            [
                "reorder",
                "{dir}/m.safetensors",
                "-o",
                "{dir}/p",
                "--bits",
                "4",
                "--zero-offset",
                "1",
            ],
            "has no such option",
        ),
        (
            ["reorder", "{dir}/m.safetensors", "-o", "{dir}", "--bits", "4"],
            "directory of the checkpoint itself",
        ),
        (["inspect", "{dir}/nothing"], "no such file or directory"),
        (["inspect", "{dir}/noise.gguf"], "starts with b'nois'"),
        (["inspect", "{dir}/noise.safetensors"], "not a valid safetensors file"),
        (["verify", "{dir}/m.safetensors"], "not a packed file"),
        (["verify", "{dir}/nothing"], "{dir}/nothing: no such file"),
        (["verify", "{dir}"], "{dir}: has no config.json"),
        (["reorder", "{dir}/m.safetensors", "-o", "{dir}/p"], "give bits (--bits 4 or --bits 8)"),
        (["reorder", "{dir}/m.safetensors", "-o", "{dir}/p", "--asymmetric"], "give --bits too"),
        (
            ["reorder", "{dir}/m.safetensors", "-o", "{dir}/p", "--group-size", "32"],
            "give --bits too",
        ),
        (
            ["reorder", "{dir}/m.safetensors", "-o", "{dir}/p", "--bits", "3"],
            "bits is 3; supported are 2, 4, 8",
        ),
        (
            ["reorder", "{dir}/m.safetensors", "-o", "{dir}/p", "--bits", "4", "--include", "["],
            "regular expression",
        ),
        (
            ["reorder", "{dir}/m.safetensors", "-o", "{dir}/no/p", "--bits", "4"],
            "there is no folder {dir}/no",
        ),
        (
            ["reorder", "{dir}/m.safetensors", "-o", "{dir}/m.safetensors", "--bits", "4"],
            "checkpoint itself",
        ),
        (["reorder", "{dir}/m.safetensors"], "--output"),
        (["reorder", "{dir}/m.safetensors", "-o", "{dir}/p", "--bits", "many"], "--bits"),
        (["nothing"], "nothing"),
    ],
)
def test_bad_input_is_reported_in_a_line(
    model: Path, tmp_path: Path, args: list[str], message: str
) -> None:
    for suffix in ("gguf", "safetensors"):
        (tmp_path / f"noise.{suffix}").write_bytes(b"noise")
    result = run(*(arg.format(dir=tmp_path) for arg in args))
    assert result.exit_code == 2, result.output
    assert message.format(dir=tmp_path) in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "p").exists()
    assert not isinstance(result.exception, (ValueError, OSError))


@pytest.mark.parametrize(
    "command", [[], ["inspect"], ["reorder"], ["verify"], ["diff"], ["doctor"], ["demo"]]
)
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
    assert facts["self_test"]["cpu"] == dict.fromkeys(cli.doctor._PRODUCTS, "ok")
    assert set(facts["kernels"]["cpu"].values()) == {_C.cpu_kernel()}
    shown = run("doctor")
    assert shown.exit_code == 0
    assert "W4A8 block" in shown.stdout


@pytest.mark.gpu
def test_doctor_multiplies_on_the_gpu() -> None:
    facts = run_json("doctor")
    assert facts["self_test"]["cuda:0"] == dict.fromkeys(cli.doctor._PRODUCTS, "ok")
    assert facts["cuda_driver"][0].isdigit()
    assert _C.cpu_kernel() not in facts["kernels"]["cuda:0"].values()


def test_doctor_fails_when_a_product_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cli.doctor.gemm.mixed_gemm
    monkeypatch.setattr(
        cli.doctor.gemm, "mixed_gemm", lambda *args, **options: right(*args, **options) * 1.001
    )
    result = run("doctor")
    assert result.exit_code == 1
    assert "wrong: relative error 0.001" in result.stdout


def test_doctor_without_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(cli.doctor, "import_module", missing)
    facts = run_json("doctor")
    assert (facts["cuda_driver"], facts["cuda_runtime"]) == ("unknown", "unknown")
    assert sum("pip install cuda-bindings" in line for line in facts["missing"]) == 1


@pytest.mark.parametrize(
    ("answer", "missing"),
    [
        (
            RuntimeError("Failed to dlopen libcuda.so.1"),
            "CUDA driver: Failed to dlopen libcuda.so.1",
        ),
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

    monkeypatch.setattr(cli.doctor, "import_module", lambda name: Library())
    monkeypatch.setattr(cli.doctor, "version", lambda name: "13.0")
    facts = run_json("doctor")
    if missing is None:
        assert facts["cuda_driver"] == "12.4 (cuda-bindings 13.0)"
    else:
        assert facts["cuda_driver"] == "not found"
        assert missing in facts["missing"]


# ---- as programs


def test_the_module_and_the_script(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    done = subprocess.run(
        [sys.executable, "-m", "cutlass_ops", "reorder", str(model), "-o", str(out), "--bits", "4"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert UP in load_packed(out)
    script = Path(__file__).parents[1] / "tools" / "reorder_weights.py"
    bad = subprocess.run(
        [sys.executable, str(script), "nothing", "-o", "x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert bad.returncode == 2
    assert bad.stderr == "error: nothing: no such file or directory\n"
