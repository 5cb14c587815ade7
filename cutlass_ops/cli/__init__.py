"""The command line: ``cutlass-ops inspect | reorder | verify | diff | doctor | demo``.

Results go to stdout, progress and errors to stderr. Exit status: 0 all is well, 1 a check failed, 2
bad usage or bad input, 130 interrupted (Ctrl-C).
"""

from __future__ import annotations

from typing import Annotated

import typer

from ..version import __version__

# Help lists the commands in this order.
# isort: off
from . import inspect as inspect
from . import reorder as reorder
from . import check as check
from . import doctor as doctor
from . import demo as demo

# isort: on
from .common import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; the entry point of the script ``cutlass-ops``."""
    app()


def _version(_: bool) -> None:
    if _:
        print(f"cutlass_ops {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
