"""``cutlass-ops demo``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .common import JsonOption, app, make_console, print_json, reported


@app.command()
def demo(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A GGUF model. Without it, SmolLM2-135M-Instruct, fetched once (93 MB)."
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask the model.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to generate.")] = 48,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1; a GPU if there is one, when not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Reorder a real model, generate text with it in 4 bits, and compare with its
    dequantised self.
    """
    with reported():
        # Imported here because only this command needs it.
        from .run_demo import PROMPT, run_demo, show

        console = Console(stderr=True)
        result = run_demo(
            model,
            prompt=PROMPT if prompt is None else prompt,
            max_new_tokens=tokens,
            device=device,
            report=lambda step: console.print(f"{escape(step)} ...", highlight=False),
        )
    if as_json:
        print_json(asdict(result))
    else:
        show(result, make_console())
