"""Rooms of the package: a module imports its room and those below, and the top level stays short."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "cutlass_ops"

# From the ground up; docs/contributing.md says what each holds. Rooms of one line do not import each other.
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
    return {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}


def imported(path: Path) -> set[str]:
    """Rooms and modules of the top level that a module imports, lazily too; the package itself is "" (``_C``)."""
    found = set()
    inside = path.relative_to(PACKAGE.parent).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            start = inside[: len(inside) - node.level + 1] if node.level else ()
            module = (*start, *(node.module.split(".") if node.module else ()))
            names = [(*module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cutlass_ops."):
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
                f"{path.name} of {room} imports {to}" for to in imported(path) if to != room and height[to] >= height[room]
            ]
    assert wrong == []
