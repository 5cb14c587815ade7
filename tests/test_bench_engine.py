"""tools/bench_engine.py: how it reads vLLM's log, and the file that it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
# Lines of the logs of vLLM 0.26, shortened.
LOADED = """
INFO [compressed_tensors_wNa16.py:137] Using {kernel} for CompressedTensorsWNA16
INFO [cuda.py:482] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].
INFO [flash_attn.py:776] Using FlashAttention version 3
INFO [gpu_model_runner.py:5347] Model loading took 15.55 GiB memory and 1.719898 seconds
INFO [monitor.py:53] torch.compile took 34.19 s in total
INFO [gpu_model_runner.py:6844] Graph capturing finished in 2 secs, took 0.14 GiB
"""
EXPERTS = """
INFO [compressed_tensors_moe.py:175] Using CompressedTensorsWNA16MarlinMoEMethod
INFO [int_wna16.py:206] Using 'MARLIN' WNA16 MoE backend.
"""
OUR_EXPERTS = """
INFO [experts.py:198] Using cutlass_ops.mixed_moe for CompressedTensorsWNA16MarlinMoEMethod
"""
OURS = LOADED.format(kernel="CutlassOpsLinearKernel")
MACHETE = LOADED.format(kernel="MacheteLinearKernel")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import bench_engine

    return bench_engine


def test_the_last_line_of_a_run_and_the_log_of_vllm_are_read(bench: ModuleType) -> None:
    lines = [
        bench.MARK + json.dumps({"start_s": 89.55, "decode_ms": {"1": 4.5, **more}})
        for more in ({}, {"16": 8.1})
    ]
    assert bench.from_log(MACHETE + EXPERTS + "\n".join([*lines, "shut down"])) == {
        "linear_kernel": "MacheteLinearKernel",
        "experts_kernel": "MARLIN",
        "attention": "FLASH_ATTN",
        "weights_gib": 15.55,
        "weights_s": 1.719898,
        "compile_s": 34.19,
        "graphs_s": 2.0,
        "start_s": 89.55,
        "decode_ms": {"1": 4.5, "16": 8.1},
    }


def test_all_kernels_of_a_log_are_named_once(bench: ModuleType) -> None:
    found = bench.from_log(MACHETE + OURS + MACHETE + EXPERTS + OUR_EXPERTS)
    assert found["linear_kernel"] == "MacheteLinearKernel, CutlassOpsLinearKernel"
    assert found["experts_kernel"] == "MARLIN, cutlass_ops.mixed_moe"
    assert bench.from_log("Killed") == {}


@pytest.mark.parametrize(
    ("model", "kernel", "log", "reason"),
    [
        ("llama-3.1-8b", "stock", MACHETE, None),
        ("llama-3.1-8b", "machete", MACHETE, None),
        ("llama-3.1-8b", "ours-block", OURS, None),
        ("qwen3-30b-a3b", "stock", MACHETE + EXPERTS, None),
        ("qwen3-30b-a3b", "ours", OURS + EXPERTS + OUR_EXPERTS, None),
        (
            *("llama-3.1-8b", "marlin", MACHETE),
            "linear layers ran on ['MacheteLinearKernel'], and not on MarlinLinearKernel alone",
        ),
        (
            *("llama-3.1-8b", "ours", OURS + MACHETE),
            "linear layers ran on ['CutlassOpsLinearKernel', 'MacheteLinearKernel'], and not on "
            "CutlassOpsLinearKernel alone",
        ),
        ("llama-3.1-8b", "stock", OURS, "cutlass_ops took some layers"),
        ("qwen3-30b-a3b", "stock", MACHETE + OUR_EXPERTS, "cutlass_ops took some layers"),
        ("qwen3-30b-a3b", "ours", OURS + EXPERTS, "experts ran on vLLM's kernels"),
    ],
)
def test_a_run_on_other_kernels_is_found(
    bench: ModuleType, model: str, kernel: str, log: str, reason: str | None
) -> None:
    options = bench.parse(["--model", model, "--kernel", kernel])
    options.model, options.kernel = model, kernel
    assert bench.wrong_kernel(options, log) == reason


def test_a_row_takes_the_place_of_the_same_run(bench: ModuleType, tmp_path: Path) -> None:
    heading = {"device": "NVIDIA H200", "vllm": "0.26.0"}
    path = tmp_path / "h200-vllm.json"

    def row(kernel: str, start_s: float, tensor_parallel: int = 1) -> dict[str, object]:
        run = {"model": "m", "checkpoint": "c", "kernel": kernel, "layers": 0}
        return run | {"tensor_parallel": tensor_parallel, "start_s": start_s}

    rows = [row("stock", 90.0), row("ours", 60.0), row("ours", 70.0, tensor_parallel=2)]
    for one in rows:
        bench.add(path, heading, one)
    assert json.loads(path.read_text()) == heading | {"rows": rows}
    bench.add(path, heading, row("stock", 1.0))
    assert json.loads(path.read_text())["rows"] == [*rows[1:], row("stock", 1.0)]


def test_a_row_of_another_device_or_version_is_refused(bench: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "h200-vllm.json"
    run = dict.fromkeys(bench.KEYS, "one")
    bench.add(path, {"device": "NVIDIA H200", "vllm": "0.26.0"}, run)
    before = path.read_text()
    with pytest.raises(ValueError, match=r"h200-vllm.json has vllm 0\.26\.0, not 0\.33\.0$"):
        bench.add(path, {"device": "NVIDIA H200", "vllm": "0.33.0"}, run)
    assert path.read_text() == before


#: In place of an engine: says how many had started when its turn came, and fails if two have it.
ENGINE = """#!/bin/sh
case "$*" in *awq*) sleep 0.5 ;; esac
touch "$ENGINES/$$" "$3/started"
while [ ! -e "$3/turn" ]; do sleep 0.02; done
mkdir "$ENGINES.turn" || exit 3
sleep 0.2
echo 'bench_engine: {"device": "d", "vllm": "v", "torch": "t", "transformers": "f", "start_s": '\
"$(ls "$ENGINES" | wc -l)}"
rmdir "$ENGINES.turn"
touch "$3/done"
sleep 60
"""


@pytest.mark.parametrize(("at_once", "started"), [(1, [1, 2, 3]), (2, [2, 2, 3])])
def test_engines_that_start_together_are_timed_in_turn(
    bench: ModuleType,
    at_once: int,
    started: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, results = tmp_path / "engine", tmp_path / "results.json"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    (tmp_path / "engines").mkdir()
    monkeypatch.setenv("ENGINES", str(tmp_path / "engines"))
    monkeypatch.setattr(bench, "version", lambda _: "1")
    monkeypatch.setattr(bench, "entry_points", lambda **_: [SimpleNamespace(name="cutlass_ops")])
    runs = ["--quant", "compressed-tensors", "awq", "gptq", "--kernel", "stock"]
    files = ["--logs", str(tmp_path), "--json", str(results), "--commit", "c"]
    monkeypatch.setattr(sys, "argv", ["bench", *runs, *files, "--at-once", str(at_once)])
    monkeypatch.setattr(sys, "executable", str(engine))
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert not end.value.code
    rows = json.loads(results.read_text())["rows"]
    assert [row["start_s"] for row in rows] == started
    assert [row["engines_started_together"] for row in rows] == [at_once] * 3
