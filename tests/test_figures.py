"""tools/figures.py: the pages and pictures hold what results/ holds."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from imports import import_or_skip

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
        if re.match(r"\| W\dA[^|]* \| [\d.]+ \|", line)
    ]
    assert [line[0] for line in lines] == [
        "W4A16",
        "W8A16",
        "W4A8, scales for blocks",
        "W8A8, scales for blocks",
    ]
    assert "28672 x 4096, M = 1" in README
    picture = (ROOT / "results/one_row.svg").read_text()
    rows = {
        row["format"]: row
        for row in RESULT["rows"]
        if (row["n"], row["k"], row["m"]) == (28672, 4096, 1)
    }
    for line, name in zip(lines, ("w4a16", "w8a16", "w4a8-block", "w8a8-block"), strict=True):
        us, theirs = rows[name]["us"], rows[name]["peers_us"]["humming"]
        assert line[1:] == [f"{us:.1f}", f"{theirs:.1f} (humming)", f"{theirs / us:.2f}"]
        assert f">cutlass_ops {us:.1f}<" in picture
        assert f">humming {theirs:.1f}<" in picture


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
    }
    (tmp_path / "cpu.json").write_text(json.dumps(about | {"rows": rows}))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert "| W8A16 | 98.8 | 34.7 (humming) | 0.35 |" in figures.on_page_markdown(README, page=None)
    assert "humming in W8A16, 28672 x 4096, M = 1 (64.9 %)" in figures.behind()
    assert "| int4 A8 | 2 | 384 | 33.9 |" in figures.cpu()


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
        for r in json.loads((ROOT / "results/convolutions_h200.json").read_text())["mixed"]
        if r["layer"] == "sdxl 640"
    )
    ratio = stem["us"]["W4A16"] / stem["torch_fp16_us"]
    assert f">{ratio:.2f}<" in (ROOT / "results/heat_convolutions.svg").read_text()
