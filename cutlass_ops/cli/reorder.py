"""``cutlass-ops reorder``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..files.conversion_plan import Options, plan
from ..files.model_directory import SHARD_BYTES, reorder_model
from ..files.packing import reorder_checkpoint
from ..files.tensor_parallel import STYLES, parse_overrides
from ..nn.progress import progress
from .common import (
    JsonOption,
    ZeroOffset,
    app,
    keep_freed_memory,
    make_console,
    print_json,
    read_checkpoint,
    reported,
    size_text,
)


@app.command("reorder")
def reorder_command(
    source: Annotated[
        Path,
        typer.Argument(help="A GGUF file, a safetensors file or index, or a model's directory."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="What to write: one file, if it is named *.safetensors, else a directory.",
        ),
    ],
    bits: Annotated[
        int | None,
        typer.Option(
            help="Quantise float weights to codes of 2, 4 or 8 bits. Without it they stay floats."
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Weights along K that share a scale: 16, 32, 64, a multiple of 128, or -1 for "
            "all.  [default: 128]"
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Without or with a zero point for each group.  [default: symmetric]",
        ),
    ] = None,
    clip: Annotated[
        str | None,
        typer.Option(
            metavar="mse", help="Search the range of each group that has the least squared error."
        ),
    ] = None,
    include: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="Pack only the layers whose name has a match."),
    ] = None,
    exclude: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX", help="Keep these layers as float tensors; overrides --include."
        ),
    ] = None,
    zero_offset: ZeroOffset = "auto",
    ranks: Annotated[
        int,
        typer.Option(
            "--tp", metavar="R", help="Split the layers over R GPUs: a directory for each."
        ),
    ] = 1,
    split: Annotated[
        list[str] | None,
        typer.Option(
            "--tp-split",
            metavar="REGEX=STYLE",
            help=f"Split these layers otherwise: {', '.join(STYLES)}. May be repeated.",
        ),
    ] = None,
    act_quant: Annotated[
        str | None,
        typer.Option(
            metavar="none|token|block",
            help="How config.json tells loaders to quantise activations.  [default: as the "
            "checkpoint says, else none]",
        ),
    ] = None,
    act_symmetric: Annotated[
        bool | None,
        typer.Option(
            "--act-symmetric/--act-asymmetric",
            help="And without or with zero points.  [default: symmetric]",
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs", "-j", min=1, help="Tensors to work on, and to hold in memory, at a time."
        ),
    ] = 2,
    shard_gb: Annotated[
        float | None,
        typer.Option(
            "--shard-size",
            metavar="GB",
            min=0.001,
            help="The most that a file of a directory holds.  [default: 5]",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Pack a checkpoint's linear layers, once, for every GPU, into one file or into a model's
    directory.

    Weights that the file quantised keep their codes and scales exactly, or it is said which are
    rounded, and by how much. Float weights are quantised if --bits is given, except embeddings,
    norms and the output head, unless --include names them; in one file, weights of convolutions
    too, where that makes them smaller. Everything else is copied; a directory's config.json says
    how to load it. A directory whose making was interrupted is completed by the same command.
    """
    one_file = output.suffix == ".safetensors"

    def kept() -> str:
        finished = (
            []
            if one_file or dry_run
            else [*output.glob("*.safetensors"), *output.glob("rank-*/*.safetensors")]
        )
        if not finished:
            return f": nothing is written to {output}"
        return (
            f": {len(finished)} finished files are kept in {output}; the same command "
            "makes the others"
        )

    with reported(kept):
        if bits is None and (group_size is not None or symmetric is not None or clip is not None):
            raise ValueError(
                "--group-size, --symmetric/--asymmetric and --clip say how to quantise float "
                "weights: give --bits too"
            )
        if one_file and ranks > 1:
            raise ValueError(
                f"--tp {ranks} makes a directory for each rank; {output} names one file"
            )
        given = {
            "--act-quant": act_quant,
            "--act-symmetric": act_symmetric,
            "--shard-size": shard_gb,
            "--tp-split": split,
        }
        if one_file and (useless := [name for name, value in given.items() if value is not None]):
            raise ValueError(f"{useless[0]} is for a model's directory; {output} names one file")
        if split and ranks == 1:
            raise ValueError("--tp-split says how layers are split over ranks: give --tp too")
        if not output.parent.is_dir():
            raise ValueError(f"{output}: there is no folder {output.parent}")
        if output.exists() and output.is_dir() == one_file:
            raise ValueError(
                f"{output} is a {'folder; a file' if one_file else 'file; a folder'} of that name "
                "is to be written"
            )
        options = Options(
            bits=bits,
            group_size=128 if group_size is None else group_size,
            symmetric=symmetric is not False,
            include=include,
            exclude=exclude,
            clip=clip,
        )
        start = time.perf_counter()
        keep_freed_memory()
        checkpoint = read_checkpoint(source, zero_offset)
        if bits is not None and not any(
            step.weight and not step.entry.quantized for step in plan(checkpoint, options).steps
        ):
            raise ValueError(
                f"--bits {bits} changes nothing: no float weight of {source} is to be "
                "packed; leave it out"
            )
        if (
            act_symmetric is not None
            and (act_quant or (checkpoint.activations or ("none",))[0]) == "none"
        ):
            raise ValueError(
                "--act-symmetric and --act-asymmetric say how activations are quantised: "
                "give --act-quant too"
            )
        total = sum(entry.nbytes for entry in checkpoint.entries.values()) + sum(
            f.stat().st_size for f in checkpoint.files
        )
        with progress("reordering", total) as advance:
            if one_file:
                done = reorder_checkpoint(
                    checkpoint,
                    output,
                    **asdict(options),
                    jobs=jobs,
                    dry_run=dry_run,
                    progress=advance,
                )
            else:
                done = reorder_model(
                    checkpoint,
                    output,
                    options,
                    ranks=ranks,
                    splits=parse_overrides(split or ()),
                    act_quant=act_quant,
                    act_symmetric=act_symmetric,
                    jobs=jobs,
                    shard_bytes=SHARD_BYTES if shard_gb is None else round(shard_gb * 1e9),
                    dry_run=dry_run,
                    progress=advance,
                )
        seconds = time.perf_counter() - start
    if as_json:
        fields = ("n", "k", "bits", "group_size")
        print_json(
            {
                "output": str(done.path),
                "written": not dry_run,
                "weights": {
                    name: dict(zip(fields, w, strict=True)) for name, w in done.weights.items()
                },
                "tensors": list(done.tensors),
                "files": [str(file) for file in done.files],
                "found": done.found,
                "copied": list(done.copied),
                "warnings": list(done.warnings),
                "styles": dict(done.styles),
                "kept": dict(done.kept),
                "rounded": dict(done.rounded),
                "source_bytes": done.source_bytes,
                "packed_bytes": done.packed_bytes,
                "seconds": round(seconds, 3),
            }
        )
        return
    formats = Counter((bits, group_size) for _, _, bits, group_size in done.weights.values())
    listed = ", ".join(
        f"{count} of {bits} bits in "
        f"{'one group a row' if group_size == -1 else f'groups of {group_size}'}"
        for (bits, group_size), count in formats.items()
    )
    lines = [
        f"packed   {len(done.weights)} weights ({listed})",
        f"copied   {len(done.tensors)} tensors" + "".join(f", {name}" for name in done.copied),
    ]
    lines += [
        f"kept     {len(names)} unpacked: {reason} ({_some(names)})"
        for reason, names in _by_reason(done.kept)
    ]
    lines += [
        f"rounded  {len(names)}: {how} ({_some(names)})" for how, names in _by_reason(done.rounded)
    ]
    if ranks > 1:
        styles = Counter(done.styles.values())
        lines.append(
            f"split    {', '.join(f'{count} {style}' for style, count in styles.items())} "
            f"over {ranks} ranks"
        )
    if done.found:
        lines.append(f"found    {done.found} of {len(done.files)} files finished by an earlier run")
    lines += [f"warning  {warning}" for warning in done.warnings]
    verb = "to write" if dry_run else "wrote   "
    files = "" if one_file else f" in {len(done.files)} file{'s' if len(done.files) > 1 else ''}"
    time_taken = "" if dry_run else f", in {seconds:.1f} s"
    lines.append(
        f"{verb} {done.path}: {size_text(done.packed_bytes)}{files}, from "
        f"{size_text(done.source_bytes)}{time_taken}"
    )
    console = make_console()
    for line in lines:
        console.print(escape(line), soft_wrap=True, highlight=False)


def _by_reason(reasons: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Each text, with the names that have it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return list(names.items())


def _some(names: list[str]) -> str:
    """The first of some names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
