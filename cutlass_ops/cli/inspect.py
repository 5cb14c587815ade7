"""``cutlass-ops inspect``."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from .. import _C
from ..files.packed_file import is_packed, packed_info
from .common import (
    JsonOption,
    ZeroOffset,
    app,
    make_console,
    print_json,
    read_checkpoint,
    reported,
    shape_text,
    size_text,
)
from .describe import ROWS_OF_X, add_kernels, describe_checkpoint, describe_packed


@app.command()
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint or a packed model: a GGUF or safetensors file, or a directory."
        ),
    ],
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="sm_NN",
            help="Name the kernels of this GPU; may be repeated.  [default: those here, or "
            "sm_80, sm_90]",
        ),
    ] = None,
    act_quant: Annotated[
        str,
        typer.Option(
            metavar="none|token|block", help="How the kernels' activations are quantised."
        ),
    ] = "none",
    zero_offset: ZeroOffset = "auto",
    as_json: JsonOption = False,
) -> None:
    """List what a checkpoint or a packed model holds, from headers alone, and which kernel would
    multiply by it.

    Kernels are given for one row of x and for 4096, and for each GPU, which need not be there.
    Tensors that differ but in the numbers in their names are shown as one, as in
    layers.{0..31}.mlp; --json lists each.
    """
    with reported():
        if twice := [name for name, count in Counter(gpu or ()).items() if count > 1]:
            raise ValueError(f"--gpu {twice[0]} is given twice")
        gpus = gpu or _gpus_here() or ["sm_80", "sm_90"]
        described = (
            describe_packed(packed_info(path))
            if is_packed(path)
            else describe_checkpoint(read_checkpoint(path, zero_offset))
        )
        add_kernels(described["tensors"], gpus, act_quant)
    if as_json:
        print_json(described)
        return
    show(make_console(), described, gpus, act_quant)


def show(console: Console, described: dict[str, Any], gpus: list[str], act_quant: str) -> None:
    """Print facts of the whole, counts of weights by format, then the tensors."""

    def line(key: str, value: str) -> None:
        console.print(
            Padding(f"{key + ':':10}{escape(value)}", (0, 0)), highlight=False, soft_wrap=False
        )

    tensors, files = described["tensors"], len(described["files"])
    for key in ("path", "kind", "layout", "tool", "rank"):
        if described.get(key) is not None:
            line(key, str(described[key]))
    line("size", f"{size_text(described['bytes'])} in {files} file{'s' if files > 1 else ''}")
    for key in ("sources", "tied", "metadata"):
        for name, value in described.get(key, {}).items():
            line(key, f"{name} = {value}")
    for warning in described.get("warnings", ()):
        line("warning", warning)
    kinds: dict[tuple[bool, str], list[int]] = {}
    for tensor in tensors:
        packed = tensor["parts"] is not None
        what = (
            tensor["note"]
            if packed
            else f"{tensor['type']}{': ' if tensor['note'] else ''}{tensor['note']}"
        )
        kinds.setdefault((packed, what), []).append(tensor["bytes"])
    for (packed, what), sizes in sorted(kinds.items(), key=lambda item: not item[0][0]):
        line("weights" if packed else "others", f"{len(sizes)} ({size_text(sum(sizes))}) {what}")
    if any(tensor["kernels"] for tensor in tensors):
        line(
            "kernels", f"of {' and '.join(map(str, ROWS_OF_X))} rows of x, act_quant {act_quant!r}"
        )
    for name, alike in _alike(tensors):
        first = alike[0]
        console.print(escape(name), highlight=False)
        each = f"{len(alike)} of " if len(alike) > 1 else ""
        words = [
            f"{each}{shape_text(first['shape'])}",
            size_text(first["bytes"]),
            first["type"],
            first["note"],
        ]
        source = first.get("source", first["name"])
        if source != first["name"]:
            words.append(f"in the file: {source}")
        words += [
            f"{gpu}: {' / '.join(dict.fromkeys(first['kernels'][gpu].values()))}"
            for gpu in gpus
            if first["kernels"]
        ]
        console.print(
            Padding(escape("; ".join(word for word in words if word)), (0, 0, 0, 4)),
            highlight=False,
        )


def _alike(tensors: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Group tensors that differ only in the numbers of their names, put in braces."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for tensor in tensors:
        facts = [str(tensor[key]) for key in ("type", "shape", "bytes", "note", "kernels")]
        groups.setdefault((*_NUMBER.split(tensor["name"])[::2], *facts), []).append(tensor)
    for alike in groups.values():
        numbers = [[int(text) for text in _NUMBER.findall(tensor["name"])] for tensor in alike]
        places = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        if math.prod(map(len, places)) != len(alike):  # not every combination is there
            yield from ((tensor["name"], [tensor]) for tensor in alike)
            continue
        between = _NUMBER.split(alike[0]["name"])[::2]
        texts = [*(_ranges(values) for values in places), ""]
        yield "".join(map("".join, zip(between, texts, strict=True))), alike


#: A number that is a part of a name between dots.
_NUMBER = re.compile(r"(?<![^.])([0-9]{1,9})(?![^.])")


def _ranges(values: list[int]) -> str:
    """Sorted numbers as "3" or "{0..3,7}"."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    text = ",".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
    return text if len(values) == 1 else f"{{{text}}}"


def _gpus_here() -> list[str]:
    if not (_C.built_with_cuda and torch.cuda.is_available()):
        return []
    found = (torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    return list(dict.fromkeys(f"sm_{major}{minor}" for major, minor in found))
