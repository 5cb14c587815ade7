"""The application that the commands register with, and what they share: errors, output, options."""

from __future__ import annotations

import ctypes
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from safetensors import SafetensorError

from ..checkpoints import Checkpoint, load_checkpoint

FAILED, _BAD_INPUT, _INTERRUPTED = 1, 2, 130
app = typer.Typer(
    name="cutlass-ops",
    help="Reorder quantised weights offline, into the order in which GPU kernels read them, and "
    "look after the files.",
    epilog="A first run: cutlass-ops inspect model.gguf; cutlass-ops reorder model.gguf -o "
    "model.safetensors; "
    "cutlass-ops verify model.safetensors --against model.gguf",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ZeroOffset = Annotated[
    str,
    typer.Option(
        metavar="auto|0|1", help="GPTQ: what to add to stored zero points, where its metadata lies."
    ),
]


@contextmanager
def reported(kept: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turn user errors into a line and an exit status; ``kept`` says what Ctrl-C left behind."""
    console = Console(stderr=True)
    try:
        yield
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, SafetensorError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(_BAD_INPUT) from None
    except MemoryError:
        console.print("[red]error:[/red] out of memory", highlight=False)
        raise typer.Exit(_BAD_INPUT) from None
    except KeyboardInterrupt:
        console.print(f"[red]interrupted[/red]{escape(kept())}", soft_wrap=True, highlight=False)
        raise typer.Exit(_INTERRUPTED) from None


def make_console() -> Console:
    """The console of results."""
    # A pipe has no width; rich would cut tables to 80 columns.
    return Console() if sys.stdout.isatty() else Console(width=240)


def print_json(value: Any) -> None:
    """Print one JSON value."""
    print(json.dumps(json_value(value), indent=2, allow_nan=False))


def json_value(value: Any) -> Any:
    """``value`` with None for the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def size_text(nbytes: float) -> str:
    """``1.23 MB`` and the like."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"


def shape_text(shape: tuple[int, ...]) -> str:
    """``4096 x 4096`` and the like."""
    return " x ".join(map(str, shape)) or "scalar"


def dtype_name(dtype: torch.dtype) -> str:
    """``float16`` and the like."""
    return str(dtype).removeprefix("torch.")


def keep_freed_memory() -> None:
    """Let one weight's memory serve the next: for commands that make and drop many large tensors.

    glibc gives a large block back to the system when it is freed, and the system clears every page
    of the next one: a quarter of the time that packing a model takes.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # <malloc.h>: M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX
        for parameter, value in ((-4, 0), (-1, (1 << 31) - 1), (-8, 1)):
            mallopt(parameter, value)


def read_checkpoint(path: Path, zero_offset: str) -> Checkpoint:
    """The checkpoint, read as ``--zero-offset`` says."""
    if zero_offset == "auto":
        return load_checkpoint(path)
    if zero_offset not in ("0", "1"):
        raise ValueError(f"--zero-offset is {zero_offset!r}; auto, 0 and 1 are accepted")
    return load_checkpoint(path, zero_offset=1 if zero_offset == "1" else 0)
