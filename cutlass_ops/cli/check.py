"""``cutlass-ops verify`` and ``cutlass-ops diff``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..files.packed_file import packed_info
from ..files.verify import diff_packed, rank_directories, verify_packed
from ..nn.progress import progress
from .common import (
    FAILED,
    JsonOption,
    app,
    keep_freed_memory,
    make_console,
    print_json,
    read_checkpoint,
    reported,
)


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="A packed file, or a directory that reorder made.")],
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="The checkpoint it was made from, to compare every value with."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every bit of a packed model, by its checksums; with --against, that it still is its
    checkpoint, bit for bit.

    The largest difference is between values as the packed file gives them and as the checkpoint
    does: rounding of the last place at most, or, for weights that reorder quantised, the error of
    that. Exit status 1 if anything is wrong.
    """
    with reported():
        keep_freed_memory()
        parts = rank_directories(file) or [file]
        infos = [packed_info(part) for part in parts if part.exists() or len(parts) == 1]
        total = sum(shard.stat().st_size for info in infos for shard in info.files)
        checkpoint = None
        if against is not None:
            checkpoint = read_checkpoint(
                against, str(infos[0].options.get("zero_offset", "auto")) if infos else "auto"
            )
            total += len(infos) * sum(entry.nbytes for entry in checkpoint.entries.values())
        with progress("verifying", total) as advance:
            found = verify_packed(file, checkpoint, progress=advance)
    if as_json:
        print_json({"path": str(file), "ok": not found.problems, **asdict(found)})
    else:
        console = make_console()
        for problem in found.problems:
            console.print(f"[red]wrong[/red]    {escape(problem)}", soft_wrap=True, highlight=False)
        for note in found.notes:
            console.print(f"note     {escape(note)}", soft_wrap=True, highlight=False)
        console.print(f"checked  {found.weights} weights, {found.tensors} tensors", highlight=False)
        if against is not None:
            same = "has" if found.same_source else "does not have"
            console.print(
                f"source   {escape(str(against))} {same} the recorded sha256",
                soft_wrap=True,
                highlight=False,
            )
        if found.largest_difference is not None:
            console.print(
                f"values   differ by {found.largest_difference:.6g} at most, in "
                f"{escape(found.largest_at)}",
                soft_wrap=True,
                highlight=False,
            )
        console.print("[red]FAILED[/red]" if found.problems else "[green]ok[/green]")
    if found.problems:
        raise typer.Exit(FAILED)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A packed file, or a directory that reorder made.")],
    second: Annotated[Path, typer.Argument(help="Another.")],
    as_json: JsonOption = False,
) -> None:
    """Compare two packed models, bit for bit, however they are cut into files. Exit status 1 if
    they differ.
    """
    with reported():
        infos = [packed_info(path) for path in (first, second)]
        with progress(
            "comparing", sum(file.stat().st_size for info in infos for file in info.files)
        ) as advance:
            found = diff_packed(first, second, progress=advance)
    differ = bool(found.only_first or found.only_second or found.changed)
    if as_json:
        print_json({"equal": not differ, **asdict(found)})
    else:
        console = make_console()
        for path, names in ((first, found.only_first), (second, found.only_second)):
            for name in names:
                console.print(
                    f"only in {escape(str(path))}: {escape(name)}", soft_wrap=True, highlight=False
                )
        for name, changes in found.changed.items():
            console.print(
                f"{escape(name)}: {escape('; '.join(changes))}", soft_wrap=True, highlight=False
            )
        console.print(f"{found.same} equal, {len(found.changed)} differ", highlight=False)
    if differ:
        raise typer.Exit(FAILED)
