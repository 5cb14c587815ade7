"""Rooms of the package: a module imports its room and those below, and the top
level stays short.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "cutlass_ops"

# From the ground up; docs/contributing.md says what each holds. Rooms of one line do not
# import each other.
FLOORS = (
    ("version", "weights"),
    ("reference",),
    ("checkpoints", "ops"),
    ("nn",),
    ("files",),
    ("integrations",),
    ("engines",),
    ("sglang", "vllm"),
    ("cli",),
    ("__main__",),
)


def top_level() -> set[str]:
    return {
        path.stem
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }


def imported(path: Path) -> set[str]:
    """Rooms and modules of the top level that a module imports, lazily too; the package
    itself is "" (``_C``).
    """
    found = set()
    inside = path.relative_to(PACKAGE.parent).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            start = inside[: len(inside) - node.level + 1] if node.level else ()
            module = (*start, *(node.module.split(".") if node.module else ()))
            names = [(*module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("cutlass_ops.")
        ):
            names = [tuple(node.value.split("."))]  # for import_module
        else:
            continue
        found |= {name[1] for name in names if name[0] == "cutlass_ops" and name[1] in top_level()}
    return found


def test_rooms_import_only_what_is_below_them() -> None:
    height = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    assert top_level() == {*height, "__init__"}
    assert len(top_level()) <= 14
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if room != "__init__":
            wrong += [
                f"{path.name} of {room} imports {to}"
                for to in imported(path)
                if to != room and height[to] >= height[room]
            ]
    assert wrong == []


# Folders of csrc, from the ground up; ``include`` is the public API, "cutlass_ops/NAME.h".
FOLDERS = ("include", "formats", "dispatch", "host", "cpu", "device", "kernels", "bindings")


def test_folders_of_csrc_include_only_what_is_below_them() -> None:
    csrc, wrong = PACKAGE.parent / "csrc", []
    for path in sorted(csrc.rglob("*")):
        if path.suffix not in {".h", ".cuh", ".cpp", ".cu", ".inc"}:
            continue
        folder = path.relative_to(csrc).parts[0]
        for header in re.findall(r'#include "([^"/]+)/', path.read_text()):
            below = "include" if header == "cutlass_ops" else header
            if below in FOLDERS and FOLDERS.index(below) > FOLDERS.index(folder):
                wrong.append(f"{path.relative_to(csrc)} includes {below}")
    assert wrong == []


def test_the_guide_names_files_that_exist() -> None:
    """Each path in docs/contributing.md, from the repository's root or the package's; a name alone,
    anywhere in the sources.
    """
    root = PACKAGE.parent
    named = re.findall(r"`([\w./*-]+)`", (root / "docs" / "contributing.md").read_text())
    files = [
        name for name in named if "/" in name or name.endswith((".py", ".h", ".cpp", ".cu", ".md"))
    ]
    paths = [name for name in files if "NAME" not in name]
    assert len(paths) > 60
    missing = []
    for path in paths:
        anywhere = (
            [] if "/" in path else [f"{folder}/**/{path}" for folder in ("csrc", "cutlass_ops")]
        )
        if not any(
            next(root.glob(pattern), None) for pattern in (path, f"cutlass_ops/{path}", *anywhere)
        ):
            missing.append(path)
    assert missing == []
