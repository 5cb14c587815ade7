"""tools/plot.py: the picture of a results file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from imports import import_or_skip

import_or_skip("matplotlib")

SCRIPT = Path(__file__).parent.parent / "tools/plot.py"


def row(name: str, n: int, m: int, us: float, **peers: float | None) -> dict[str, Any]:
    return {
        "format": name,
        "n": n,
        "k": 512,
        "m": m,
        "us": us,
        "floor_us": us / 3,
        "peers_us": {"torch fp16": 1.0, **peers},
    }


def plot(results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(results), *arguments], capture_output=True, text=True
    )


def test_the_picture_shows_every_format_and_the_best_peer(tmp_path: Path) -> None:
    rows = [
        row("w4a16", 1024, 16, 5.25, swift=4.0, slow=9.0),
        row("w4a16", 1024, 1, 4.5, swift=9.0, slow=8.0),  # not in the order of M
        row("w8a8-block", 1024, 1, 4.125, swift=None),  # only torch's fp16 product is left
        row("w4a16", 2048, 1, 8.0, swift=20.0),
    ]
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"device": "a GPU", "torch": "2.x", "rows": rows}))
    done = plot(results)
    assert done.returncode == 0, done.stderr
    picture = (tmp_path / "results.svg").read_text()
    for text in (
        "a GPU, torch 2.x",
        "w4a16, 1024 x 512",
        "w8a8-block, 1024 x 512",
        "w4a16, 2048 x 512",
    ):
        assert text in picture
    for us in ("5.25", "4.5", "4.12", "8"):  # this package's
        assert f">{us}<" in picture
    assert "best peer: slow, swift" in picture
    assert "best peer: torch fp16" in picture

    assert plot(results, "--out", str(tmp_path / "again.svg")).returncode == 0
    assert (tmp_path / "again.svg").read_text() == picture  # neither a date nor names drawn by lot


@pytest.mark.parametrize(
    ("content", "message"), [("{", "Expecting"), ("{}", "has no rows"), ("[1]", "has no rows")]
)
def test_a_file_that_holds_no_results_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    results = tmp_path / "results.json"
    results.write_text(content)
    done = plot(results)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
