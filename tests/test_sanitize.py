"""tools/sanitize.py: its verdict on the output of compute-sanitizer and the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "tools/sanitize.py"


def sanitize(folder: Path, printed: str, status: int) -> subprocess.CompletedProcess[str]:
    """Run the script on pytest under racecheck, with a compute-sanitizer that prints and
    returns what is given.
    """
    fake = folder / "compute-sanitizer"
    fake.write_text(
        f"#!{sys.executable}\nimport sys\nsys.stdout.write({printed!r})\nsys.exit({status})\n"
    )
    fake.chmod(0o755)
    command = [sys.executable, str(SCRIPT), "--tool", "racecheck", "--only", "python"]
    return subprocess.run(
        command, env={**os.environ, "PATH": str(folder)}, capture_output=True, text=True
    )


COPY = (
    "cute::SM90_BULK_COPY_G2S::copy(const void *, unsigned long *, void *, int)+0x7e40 in "
    "copy_sm90_tma.hpp:1450"
)
MULTICAST = (
    "cutlass_ops::bulk_copy_multicast(const void *, unsigned long *, unsigned short, void *, "
    "int)+0x4 in hopper.cuh:47"
)
X_ROWS = (
    "void cutlass_ops::hopper::prepare_x_rows<cutlass_ops::<unnamed>::Config<(int)8>>(int)+0x8 in "
    "hopper_producers.cuh:267"
)
PIXELS = (
    "void cutlass_ops::hopper::prepare_pixels<cutlass_ops::<unnamed>::Config<(int)8>>(int)+0x8 in "
    "hopper_producers.cuh:268"
)
WEIGHTS = "cutlass_ops::<unnamed>::RawWeights<cutlass_ops::<unnamed>::Config<(int)8>>"
CODES = f"{WEIGHTS}::load_vectors(int)+0x8 in promotion.cuh:112"
SCALES = (
    "cutlass_ops::hopper::StoredScales::load(const unsigned char *, cutlass_ops::DataType)+0xcd0 "
    "in hopper_tiles.cuh:310"
)
OTHER = "cutlass_ops::other(int)+0x10 in other.cuh:1"


def races(*places: tuple[str, str, str]) -> str:
    """Reports of a first access and of another, of a kind, and their summary."""
    report = (
        "========= Error: Race reported between Write access at {}\n=========     and {} access at "
        "{} [8 hazards]\n"
    )
    lines = [report.format(*place) for place in places]
    return (
        "".join(lines)
        + f"========= RACECHECK SUMMARY: {len(lines)} hazards displayed ({len(lines)} "
        "errors, 0 warnings)\n"
    )


NOTHING = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
RACE = "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n"


@pytest.mark.parametrize(
    ("printed", "status", "verdict"),
    [
        ("3 passed, 1 skipped in 2s\n" + NOTHING, 0, "clean"),
        ("3 passed in 2s\n" + RACE, 86, "FOUND SOMETHING"),
        ("3 passed in 2s\n" + races((COPY, "Read", SCALES), (COPY, "Read", SCALES)), 86, "clean"),
        (
            "3 passed in 2s\n"
            + races((MULTICAST, "Read", CODES), (PIXELS, "Read", SCALES), (X_ROWS, "Read", SCALES)),
            86,
            "clean",
        ),
        (
            "3 passed in 2s\n"
            + races((CODES, "Write", COPY)).replace("between Write", "between Read"),
            86,
            "clean",
        ),
        ("1 failed in 2s\n" + races((COPY, "Read", SCALES)), 1, "tests failed (exit status 1)"),
        (
            "3 passed in 2s\n" + races((COPY, "Read", SCALES), (COPY, "Read", OTHER)),
            86,
            "FOUND SOMETHING",
        ),
        ("3 passed in 2s\n" + races((COPY, "Write", SCALES)), 86, "FOUND SOMETHING"),
        ("3 passed in 2s\n" + races((OTHER, "Read", SCALES)), 86, "FOUND SOMETHING"),
        ("1 failed, 2 passed in 2s\n" + NOTHING, 1, "tests failed (exit status 1)"),
        ("5 skipped in 2s\n" + NOTHING, 0, "no test was executed"),
        (
            "========= Error: Device not supported\n",
            255,
            "the tool gave no summary (exit status 255)",
        ),
    ],
)
def test_verdict(tmp_path: Path, printed: str, status: int, verdict: str) -> None:
    done = sanitize(tmp_path, printed, status)
    assert done.stdout.splitlines()[-1].endswith(f"  {verdict}")
    assert done.returncode == (verdict != "clean")


def test_without_the_tool(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(
        command, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert (done.returncode, "compute-sanitizer is not on PATH" in done.stderr) == (2, True)
