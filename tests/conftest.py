"""Common to all tests: `gpu` tests are skipped, with the reason, where they cannot run, and each
run lists the versions of other packages that are not in constraints.txt.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"


@functools.cache
def why_no_gpu() -> str | None:
    """Return why kernels cannot run here, or None when they can."""
    from cutlass_ops import _C

    if not _C.built_with_cuda:
        return "cutlass_ops was built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    return None


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Reset torch.compile, which counts the compilations of a function in a process, after each
    test.
    """
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


def pytest_configure() -> None:
    """Leave the CPUs to all processes of pytest-xdist, with at least two threads each: torch would
    have all of them wait for each other.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1:
        torch.set_num_threads(max(2, len(os.sched_getaffinity(0)) // processes))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := why_no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def moved(constraints: str) -> Iterator[str]:
    """Yield the installed versions that differ from the constraints."""
    for pinned in map(Requirement, re.findall("^[^#].*", constraints, re.MULTILINE)):
        try:
            found = version(pinned.name)
        except PackageNotFoundError:
            continue
        if (pinned.marker is None or pinned.marker.evaluate()) and not pinned.specifier.contains(
            found, prereleases=True
        ):
            yield f"{pinned.name} {found}, not {str(pinned.specifier).removeprefix('==')}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the versions that may cause a failure: the package uses some private names of
    transformers and PEFT.
    """
    if versions := list(moved(CONSTRAINTS.read_text())):
        terminalreporter.section("versions other than in constraints.txt")
        for line in versions:
            terminalreporter.line(line)
