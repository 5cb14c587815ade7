"""tools/figures.py: the pages and pictures hold what results/ holds."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from imports import import_or_skip

Row = dict[str, Any]

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULT = json.loads((ROOT / "results/h200.json").read_text())


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import figures

    return figures


def test_every_page_holds_the_results(figures: ModuleType) -> None:
    """`tools/figures.py` writes them."""
    filled = {page.name for page in figures.PAGES if figures.BLOCK.search(page.read_text())}
    assert filled == {"README.md", "performance.md", "accuracy.md", "vllm.md"}
    for page in figures.PAGES:
        assert figures.fill(page.read_text()) == page.read_text(), (
            f"{page} is not what results/ says: run tools/figures.py"
        )


def test_the_numbers_of_the_readme_are_the_files() -> None:
    """Read here without the tool's help: the shape and formats that the text names, and the
    picture's numbers too.
    """
    lines = [
        line.strip("| ").split(" | ")
        for line in README.splitlines()
        if re.match(r"\| (W\dA|NF4)[^|]* \| [\d.]+ \| [^|]+ \(\w+\) \|", line)
    ]
    assert [line[0] for line in lines] == [
        "W4A16",
        "W8A16",
        "W4A8, scales for blocks",
        "W8A8, scales for blocks",
        "NF4, groups of 64",
    ]
    assert "28672 x 4096, M = 1" in README
    picture = (ROOT / "results/one_row.svg").read_text()
    rows = {
        row["format"]: row
        for row in RESULT["rows"]
        if (row["n"], row["k"], row["m"]) == (28672, 4096, 1)
    }
    for line, name in zip(
        lines, ("w4a16", "w8a16", "w4a8-block", "w8a8-block", "nf4"), strict=True
    ):
        peer = "bitsandbytes" if name == "nf4" else "humming"
        us, theirs = rows[name]["us"], rows[name]["peers_us"][peer]
        assert line[1:4] == [f"{us:.1f}", f"{theirs:.1f} ({peer})", f"{theirs / us:.2f}"]
        assert f">cutlass_ops {us:.1f}<" in picture
        assert f">{peer} {theirs:.1f}<" in picture


def test_the_perplexity_of_the_readme_is_that_of_the_accuracy_page() -> None:
    found = re.findall(r"(?m)^\| W\dA.* ([\d.]+) \|$", README)
    accuracy = (ROOT / "docs" / "accuracy.md").read_text()
    rows = re.findall(r"(?m)^\| (\d) bits, symmetric, groups of 128 \| (.*) \|$", accuracy)
    cells = {
        bits: [f"{float(cell.split(' ')[0]):.1f}" for cell in line.split(" | ")]
        for bits, line in rows
    }
    assert found[:4] == [cells["4"][0], cells["8"][0], cells["4"][2], cells["8"][2]]


def test_the_pictures_are_those_of_the_results(figures: ModuleType) -> None:
    picture = (ROOT / "results/h200.svg").read_text()
    for row in RESULT["rows"]:
        if row["m"] in figures.plot.TICKS:
            assert f">{row['us']:.0f}<" in picture or f">{row['us']:.3g}<" in picture
    models = json.loads((ROOT / "results/accuracy.json").read_text())["models"]
    for model in models:
        assert f"{model['model']}: the whole model" in (ROOT / "results/accuracy.svg").read_text()


def test_other_results_give_other_pages(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a build of the site sees them; a file of a CPU's times has a table as
    soon as it is there.
    """
    for path in (ROOT / "results").glob("*.json"):
        shutil.copy(path, tmp_path)
    other = json.loads(json.dumps(RESULT))
    (row,) = (
        row for row in other["rows"] if (row["format"], row["n"], row["m"]) == ("w8a16", 28672, 1)
    )
    row["us"] = 98.76
    (tmp_path / "h200.json").write_text(json.dumps(other))
    rows = [{"threads": 2, "name": "int4 A8", "prompt_tokens_per_s": 384.1, "tokens_per_s": 33.87}]
    about = {
        "machine": "x86_64",
        "cores": 2,
        "load_average": 0.1,
        "kernels": "avx2",
        "torch": "2.x",
        "model": "m",
        "prompt": 9,
        "commit": "0123456789",
    }
    (tmp_path / "cpu_m.json").write_text(json.dumps(about | {"rows": rows}))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    name, us = min(row["peers_us"].items(), key=lambda peer: peer[1])
    want = f"| W8A16 | 98.8 | {us:.1f} ({name}) | {us / 98.76:.2f} |"
    assert want in figures.on_page_markdown(README, page=None)
    behind = f"{1 - us / 98.76:.1%}".replace("%", " %")
    assert f"{name} in W8A16, 28672 x 4096, M = 1 ({behind})" in figures.behind()
    assert "| int4 A8 | 2 | 384 | 33.9 |" in figures.cpu()


def test_products_on_a_cpu_are_shown_beside_peers_of_the_same_arithmetic(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert figures.cpu_products() == "Not in `results/` yet."
    us = {"ours A8": 300.0, "ours A16": 500.0, "ONNX Runtime A8": 150.0, "torch dense A16": 1000.0}
    rows = [
        {"group_size": 32, "threads": 1, "m": 1, "us": us | {"llama.cpp Q4_0 A8": 120.0}},
        {"group_size": 128, "threads": 1, "m": 1, "us": us},
        {"group_size": 128, "threads": 2, "m": 1, "us": {"ours A8": 7.5}},
    ]
    heading = {"machine": "AMD EPYC", "flags": "avx2 avx512f", "load_average": 0.1, "torch": "2.x"}
    heading |= {"kernels": "cpu_avx2", "openvino": "2026.4.1", "commit": "0123456789", "n": 8}
    (tmp_path / "cpu-products-epyc.json").write_text(json.dumps(heading | {"k": 9, "rows": rows}))
    assert [line for line in figures.cpu_products().splitlines() if line] == [
        "`results/cpu-products-epyc.json`: 8 x 9; AMD EPYC (avx2 avx512f), load 0.1, cpu_avx2, "
        "torch 2.x, openvino 2026.4.1, commit `0123456`.",
        "One thread, microseconds of CPU time:",
        "| product | g32, M = 1 | g128, M = 1 |",
        "| --- | ---: | ---: |",
        "| ours A8 | 300 | 300 |",
        "| ours A16 | 500 | 500 |",
        "| ONNX Runtime A8 | 150 | 150 |",
        "| torch dense A16 | 1000 | 1000 |",
        "| llama.cpp Q4_0 A8 | 120 |  |",
        "Times over the best peer's in the same arithmetic, slower above 1:",
        "| x | g32, M = 1 | g128, M = 1 |",
        "| --- | ---: | ---: |",
        "| A8 | 2.50 (llama.cpp Q4_0) | 2.00 (ONNX Runtime) |",
        "| A16 | 0.50 (torch dense) | 0.50 (torch dense) |",
        "2 threads, microseconds:",
        "| product | g128, M = 1 |",
        "| --- | ---: |",
        "| ours A8 | 7.50 |",
        "Times over the best peer's in the same arithmetic, slower above 1:",
        "| x | g128, M = 1 |",
        "| --- | ---: |",
        "| A8 |  |",
    ]
    assert figures.cpu() == "Not in `results/` yet."


def engine_run(kernel: str, decode_ms: dict[str, float], prompts: int, **more: object) -> Row:
    """A row as tools/bench_engine.py writes it."""
    ours = kernel.startswith("ours")
    return {
        "model": "Llama-3.1-8B",
        "checkpoint": "AWQ int4",
        "kernel": kernel,
        "kernels": "cutlass_ops" if ours else "vLLM",
        "act_quant": kernel.partition("-")[2] or "none",
        "tensor_parallel": 1,
        "layers": 0,
        "commit": "0123456789",
        "linear_kernel": "CutlassOpsLinearKernel" if ours else "MacheteLinearKernel",
        "weights_s": 1.5,
        "engines_started_together": 3,
        "start_s": 60.25,
        "decode_ms": decode_ms,
        "prefill_tokens_per_s": prompts,
        **more,
    }


def write_engines(folder: Path, *rows: Row, card: str = "H200") -> None:
    heading = {"device": f"NVIDIA {card} 80GB", "vllm": "0.26.0", "torch": "2.x"}
    (folder / f"{card.lower()}-vllm.json").write_text(json.dumps(heading | {"rows": rows}))


def test_tables_of_engines_leave_out_what_did_not_run(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer is the fastest of vLLM's kernels for a model and checkpoint, in a file a card."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    experts = {"model": "Qwen3-30B-A3B", "experts_kernel": "MARLIN"}
    write_engines(
        tmp_path,
        engine_run("ours", {"1": 2.0, "16": 3.0, "64": 8.0}, 50_000),
        engine_run("stock", {"1": 4.0, "16": 3.3}, 40_000),
        engine_run("marlin", {"1": 3.0, "16": 6.0}, 20_000, linear_kernel="MarlinLinearKernel"),
        engine_run("ours-block", {"1": 6.0}, 80_000),
        engine_run("stock", {"1": 4.5}, 45_000, **experts),
        engine_run("ours", {"1": 1.0}, 90_000, tensor_parallel=2),
    )
    write_engines(
        tmp_path,
        engine_run("stock", {"1": 4.0}, 10_000, layers=2),
        engine_run("ours", {"1": 1.0}, 10_000, layers=2),
        card="H100",
    )
    table = figures.engines().splitlines()
    begin = "`results/h200-vllm.json`: NVIDIA H200 80GB, vllm 0.26.0, torch 2.x, commit `0123456`."
    assert table[table.index(begin) + 2 :] == [
        "| model | checkpoint | kernels | batch 1, ms a token | batch 16 | batch 64 "
        "| prompts, tokens a second | weights, s | start, s |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| Llama-3.1-8B | AWQ int4 | cutlass_ops, act_quant none "
        "| 2.00 | 3.00 | 8.00 | 50,000 | 1.50 | 60.2 (3) |",
        "| Llama-3.1-8B | AWQ int4 | MacheteLinearKernel (vLLM's choice) "
        "| 4.00 | 3.30 |  | 40,000 | 1.50 | 60.2 (3) |",
        "| Llama-3.1-8B | AWQ int4 | MarlinLinearKernel "
        "| 3.00 | 6.00 |  | 20,000 | 1.50 | 60.2 (3) |",
        "| Llama-3.1-8B | AWQ int4 | cutlass_ops, act_quant block "
        "| 6.00 |  |  | 80,000 | 1.50 | 60.2 (3) |",
        "| Qwen3-30B-A3B | AWQ int4 | MacheteLinearKernel, experts MARLIN (vLLM's choice) "
        "| 4.50 |  |  | 45,000 | 1.50 | 60.2 (3) |",
        "| Llama-3.1-8B, 2 GPUs | AWQ int4 | cutlass_ops, act_quant none "
        "| 1.00 |  |  | 90,000 | 1.50 | 60.2 (3) |",
    ]
    assert figures.engine_speed().splitlines() == [
        "- Llama-3.1-8B, 2 layers on NVIDIA H100 80GB: 4.00 to 4.00 times, batches of 1 to 1",
        "- Llama-3.1-8B on NVIDIA H200 80GB: 1.10 to 1.50 times, batches of 1 to 16",
    ]
    figures.draw_engines(tmp_path / "map.svg")
    assert re.findall(r">([^<>]+)</text>", (tmp_path / "map.svg").read_text()) == [
        *("1 text", "16", "64", "prompts"),
        "H100: Llama-3.1-8B, 2 layers",
        *("AWQ, x as it is", "0.25", "1.00"),
        "H200: Llama-3.1-8B",
        *("AWQ, x as it is", "0.67", "0.91", "0.80"),
        *("AWQ, x int8 blocks", "2.00", "0.50"),
    ]
    (tmp_path / "h100-vllm.json").unlink()
    write_engines(tmp_path, engine_run("ours", {"1": 2.0}, 50_000))
    figures.draw_engines(tmp_path / "map.svg")
    assert re.findall(r">([^<>]+)</text>", (tmp_path / "map.svg").read_text()) == ["prompts"]
    assert figures.engine_speed() == ""


def test_every_results_file_is_of_one_commit(figures: ModuleType) -> None:
    """Including the files that only costs are fitted to."""
    for path in (ROOT / "results").glob("*.json"):
        (commit,) = figures.commits(json.loads(path.read_text()))
        assert figures.COMMIT.fullmatch(commit), path.name


def test_nothing_is_drawn_from_files_of_several_commits(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (ROOT / "results").glob("*.json"):
        result = json.loads(path.read_text())
        rows = result["models"] if "models" in result else result["rows"]
        of_one_row = rows[-1] if isinstance(rows[-1], dict) else result
        of_one_row["other_commit"] = "fedcba9876543210"
        (tmp_path / path.name).write_text(json.dumps(result))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    pictures = {
        name: functools.partial(draw, tmp_path / name)
        for name, draw in figures.PICTURES.items()
        if not name.startswith("kernel_")
    }
    for make in (figures.TABLES | pictures).values():
        with pytest.raises(ValueError, match="every results file is of one commit"):
            make()


@pytest.mark.parametrize(
    ("commits", "said"),
    [
        (("0123456", "89abcde"), "0123456, 89abcde"),
        (("0123456", None), "0123456, None"),
        ((None,), "None"),
        (("0123456, and before",), "0123456, and before"),
    ],
)
def test_results_without_one_commit_are_refused(
    figures: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    commits: tuple[str | None, ...],
    said: str,
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    rows = [engine_run("stock", {"1": 4.0}, 40_000) for _ in commits]
    for row, commit in zip(rows, commits, strict=True):
        del row["commit"]
        row.update({"commit": commit} if commit else {})
    write_engines(tmp_path, *rows)
    with pytest.raises(ValueError, match=f"results/h200-vllm.json is of {said}; every"):
        figures.engines()


def test_an_unknown_table_is_refused(figures: ModuleType) -> None:
    with pytest.raises(ValueError, match="there is no table 'sevn'; there are products, "):
        figures.fill("<!-- results: sevn -->\n<!-- end -->")


def test_the_site_draws_its_pictures(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_or_skip("matplotlib")
    monkeypatch.delitem(figures.PICTURES, "h200.svg")  # takes seconds
    (tmp_path / "results").mkdir()
    figures.on_post_build(config={"site_dir": str(tmp_path)})
    for name in figures.PICTURES:
        drawn, kept = (folder / "results" / name for folder in (tmp_path, ROOT))
        assert re.findall(r"<text[^>]*>([^<]+)", drawn.read_text()) == re.findall(
            r"<text[^>]*>([^<]+)", kept.read_text()
        )


def test_a_slower_cell_of_a_heat_map_is_framed_and_every_cell_has_its_number(
    figures: ModuleType, tmp_path: Path
) -> None:
    figures.heatmap.draw(
        ["1", "16"], [("a", [0.5, 1.25]), ("b", [1.004, None])], tmp_path / "map.svg"
    )
    picture = (tmp_path / "map.svg").read_text()
    assert re.findall(r">([\d.]+)</text>", picture) == ["1", "16", "0.50", "1.25", "1.00"]
    assert picture.count("stroke=") == picture.count("bold") == 1


def test_heat_maps_are_those_of_the_results() -> None:
    """Read here without the tool's help, for one cell of each."""
    experts = json.loads((ROOT / "results/experts_h200.json").read_text())["rows"]
    cell = ("qwen3-30b", 1024, "w4a16")
    us = {
        row["peer"]: row["us"] for row in experts if (row["shape"], row["m"], row["format"]) == cell
    }
    ours = us.pop("ours")
    assert f">{ours / min(us.values()):.2f}<" in (ROOT / "results/heat_experts.svg").read_text()
    (stem,) = (
        r
        for r in json.loads((ROOT / "results/mixed_convolutions_h200.json").read_text())["rows"]
        if r["layer"] == "sdxl 640"
    )
    ratio = stem["us"]["W4A16"] / stem["torch_fp16_us"]
    assert f">{ratio:.2f}<" in (ROOT / "results/heat_convolutions.svg").read_text()
