"""The command line: ``cutlass-ops inspect | reorder | verify | diff | doctor | demo``.

Results go to stdout, progress and errors to stderr. Exit status: 0 all is well, 1 a check failed, 2 bad usage
or bad input, 130 interrupted (Ctrl-C).
"""

from __future__ import annotations

import ctypes
import json
import math
import platform
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from safetensors import SafetensorError

from . import _C, __version__, ops, reference
from .checkpoints import Checkpoint, load_checkpoint
from .explain import explain
from .model_directory import SHARD_BYTES, reorder_model
from .packed_file import PACKED_DTYPES, PackedInfo, empty_packed, is_packed, packed_info
from .packing import reorder_checkpoint
from .plan import Options, plan
from .progress import progress as _progress
from .quantize import quantize
from .reorder import reorder
from .safetensors_files import spec_bytes
from .tensor_parallel import STYLES, parse_overrides
from .verify import diff_packed, rank_directories, verify_packed
from .weight import PackedWeight

_FAILED, _BAD_INPUT, _INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="cutlass-ops",
    help="Reorder quantised weights offline, into the order in which GPU kernels read them, and look after the files.",
    epilog="A first run: cutlass-ops inspect model.gguf; cutlass-ops reorder model.gguf -o model.safetensors; "
    "cutlass-ops verify model.safetensors --against model.gguf",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
_ZeroOffset = Annotated[
    str, typer.Option(metavar="auto|0|1", help="GPTQ: what to add to stored zero points, where its metadata lies.")
]


def main() -> None:
    """Run the command line; the entry point of the script ``cutlass-ops``."""
    app()


@contextmanager
def _reported(kept: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turn the errors that a user can cause into one line and an exit status; ``kept`` says what Ctrl-C left behind."""
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


def _console() -> Console:
    # A pipe has no width; rich would cut tables to 80 columns.
    return Console() if sys.stdout.isatty() else Console(width=240)


def _print_json(value: Any) -> None:
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    """``value`` with None for the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _version(_: bool) -> None:
    if _:
        print(f"cutlass_ops {__version__}")
        raise typer.Exit


def _keep_freed_memory() -> None:
    """Let one weight's memory serve the next: for commands that make and drop many large tensors.

    glibc gives a large block back to the system when it is freed, and the system clears every page of the next one: a
    quarter of the time that packing a model takes.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # <malloc.h>: M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX
        for parameter, value in ((-4, 0), (-1, (1 << 31) - 1), (-8, 1)):
            mallopt(parameter, value)


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


# ---- inspect


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint or a packed model: a GGUF or safetensors file, or a directory.")],
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="sm_NN", help="Name the kernels of this GPU; may be repeated.  [default: those here, or sm_80, sm_90]"
        ),
    ] = None,
    act_quant: Annotated[
        str, typer.Option(metavar="none|token|block", help="How the kernels' activations are quantised.")
    ] = "none",
    zero_offset: _ZeroOffset = "auto",
    as_json: _Json = False,
) -> None:
    """List what a checkpoint or a packed model holds, from headers alone, and which kernel would multiply by it.

    Kernels are given for one token and for 4096, and for each GPU, which need not be there. Tensors that differ but in the
    numbers in their names are shown as one, as in layers.{0..31}.mlp; --json lists each.
    """
    with _reported():
        if twice := [name for name, count in Counter(gpu or ()).items() if count > 1]:
            raise ValueError(f"--gpu {twice[0]} is given twice")
        gpus = gpu or _gpus_here() or ["sm_80", "sm_90"]
        described = _describe_packed(packed_info(path)) if is_packed(path) else _describe(_load(path, zero_offset))
        _add_kernels(described["tensors"], gpus, act_quant)
    if as_json:
        _print_json(described)
        return
    _show(_console(), described, gpus, act_quant)


def _show(console: Console, described: dict[str, Any], gpus: list[str], act_quant: str) -> None:
    """What inspect prints: facts of the whole, how many weights there are of each format, then the tensors."""

    def line(key: str, value: str) -> None:
        console.print(Padding(f"{key + ':':10}{escape(value)}", (0, 0)), highlight=False, soft_wrap=False)

    tensors, files = described["tensors"], len(described["files"])
    for key in ("path", "kind", "layout", "tool", "rank"):
        if described.get(key) is not None:
            line(key, str(described[key]))
    line("size", f"{_size(described['bytes'])} in {files} file{'s' if files > 1 else ''}")
    for key in ("sources", "tied", "metadata"):
        for name, value in described.get(key, {}).items():
            line(key, f"{name} = {value}")
    kinds: dict[tuple[bool, str], list[int]] = {}
    for tensor in tensors:
        packed = tensor["parts"] is not None
        what = tensor["note"] if packed else f"{tensor['type']}{': ' if tensor['note'] else ''}{tensor['note']}"
        kinds.setdefault((packed, what), []).append(tensor["bytes"])
    for (packed, what), sizes in sorted(kinds.items(), key=lambda item: not item[0][0]):
        line("weights" if packed else "others", f"{len(sizes)} ({_size(sum(sizes))}) {what}")
    if any(tensor["kernels"] for tensor in tensors):
        line("kernels", f"of {' and '.join(map(str, _TOKENS))} tokens, act_quant {act_quant!r}")
    for name, alike in _alike(tensors):
        first = alike[0]
        console.print(escape(name), highlight=False)
        each = f"{len(alike)} of " if len(alike) > 1 else ""
        words = [f"{each}{_shape(first['shape'])}", _size(first["bytes"]), first["type"], first["note"]]
        source = first.get("source", first["name"])
        if source != first["name"]:
            words.append(f"in the file: {source}")
        words += [f"{gpu}: {' / '.join(dict.fromkeys(first['kernels'][gpu].values()))}" for gpu in gpus if first["kernels"]]
        console.print(Padding(escape("; ".join(word for word in words if word)), (0, 0, 0, 4)), highlight=False)


def _alike(tensors: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Tensors that differ but in the numbers of their names, under one name that has those numbers in braces."""
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
        texts = iter([_ranges(values) for values in places])
        yield _NUMBER.sub(lambda _, texts=texts: next(texts), alike[0]["name"]), alike  # type: ignore[misc]


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


#: Tokens for which inspect names the kernels: one as a model generates, many as it reads a prompt.
_TOKENS = (1, 4096)


def _gpus_here() -> list[str]:
    if not (_C.built_with_cuda and torch.cuda.is_available()):
        return []
    found = (torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    return list(dict.fromkeys(f"sm_{major}{minor}" for major, minor in found))


def _add_kernels(tensors: list[dict[str, Any]], gpus: list[str], act_quant: str) -> None:
    """Give each tensor ``kernels``: by GPU and number of tokens, or {} if it is no packed weight."""
    # What every kernel takes: if this fails, the user's words are wrong.
    for name in gpus:
        explain(1, empty_packed(64, 128, 4, 128, {"scales": torch.float16}), act_quant=act_quant, device=name)
    known: dict[tuple[Any, ...], dict[str, dict[str, str]]] = {}
    for tensor in tensors:
        tensor["kernels"] = {}
        if tensor["parts"] is None or tensor.get("kernel_size"):
            continue
        shape, bits, group_size, parts = tensor["shape"], tensor["bits"], tensor["group_size"], tensor["parts"]
        key = (*shape, bits, group_size, *parts.items())
        if key not in known:
            dtypes = {part: getattr(torch, dtype) for part, dtype in parts.items() if part != "codes"}
            weight = empty_packed(shape[-2], shape[-1], bits, group_size, dtypes)  # one of the experts
            known[key] = {name: {str(m): _kernel(m, weight, act_quant, name) for m in _TOKENS} for name in gpus}
        tensor["kernels"] = known[key]


def _kernel(m: int, weight: PackedWeight, act_quant: str, device: str) -> str:
    try:
        return explain(m, weight, act_quant=act_quant, device=device).kernel
    except ValueError as error:
        return f"none: {error}"


def _note(bits: int, group_size: int, parts: dict[str, str]) -> str:
    group = "one group a row" if group_size == -1 else f"groups of {group_size}"
    kind = next((text for part, text in _KINDS.items() if part in parts), "symmetric")
    if bits == 8 and "book" in parts:
        kind = "e4m3 floats"
    words = [f"{bits} bits in {group}", kind, f"scales {parts['scales']}"]
    words += [text for part, text in (("bias", "bias"), ("perm", "act order")) if part in parts]
    return ", ".join(words)


#: How values are made of codes, by the tensor that says so.
_KINDS = {"zeros": "zero points", "offsets": "offsets", "book": "code book"}


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    tensors = []
    for entry in checkpoint.entries.values():
        weight, note, described = entry.quantized, entry.problem, _PLAIN
        if weight is not None:
            parts = {part: _dtype(PACKED_DTYPES.get(part, dtype)) for part, dtype in weight.dtypes.items()}
            described = _quantized_fields(weight.bits, weight.group_size, parts)
            note = _note(weight.bits, weight.group_size, parts)
        if entry.tied_to:
            note += f"; is also {entry.tied_to}"
        tensors.append(
            {
                "name": entry.name,
                "source": entry.source,
                "type": entry.kind,
                "shape": list(entry.shape),
                "bytes": entry.nbytes,
                "packable": weight is not None,
                "note": note,
                **described,
            }
        )
    return {
        "path": str(checkpoint.path),
        "kind": checkpoint.dialect,
        "bytes": sum(file.stat().st_size for file in checkpoint.files),
        "files": [str(file) for file in checkpoint.files],
        "metadata": dict(checkpoint.metadata),
        "tensors": tensors,
    }


_PLAIN = {"bits": None, "group_size": None, "symmetric": None, "act_order": None, "parts": None}


def _quantized_fields(bits: int, group_size: int, parts: dict[str, str]) -> dict[str, Any]:
    symmetric = not any(part in parts for part in _KINDS)
    return {"bits": bits, "group_size": group_size, "symmetric": symmetric, "act_order": "perm" in parts, "parts": parts}


def _describe_packed(info: PackedInfo) -> dict[str, Any]:
    tensors = []
    for name, (n, k, bits, group_size) in info.weights.items():
        parts = {part: _dtype(dtype) for part, (dtype, _) in info.parts[name].items()}
        kernel = list(info.kernels.get(name, ()))
        note = _note(bits, group_size, parts) + (f", kernel {'x'.join(map(str, kernel))}" if kernel else "")
        tensors.append(
            {
                "name": name,
                "type": "packed",
                "shape": [*info.experts[name], k] if name in info.experts else [n, k // math.prod(kernel), *kernel],
                "bytes": sum(map(spec_bytes, info.parts[name].values())),
                "note": note,
                "kernel_size": kernel,
                **_quantized_fields(bits, group_size, parts),
            }
        )
    for name, (dtype, shape) in info.tensors.items():
        tensors.append(
            {
                "name": name,
                "type": _dtype(dtype),
                "shape": list(shape),
                "bytes": spec_bytes((dtype, shape)),
                "note": "",
                **_PLAIN,
            }
        )
    return {
        "path": str(info.path),
        "kind": "packed",
        "bytes": sum(file.stat().st_size for file in info.files),
        "files": [str(file) for file in info.files],
        "layout": f"{info.layout[0]} version {info.layout[1]}",
        "tool": info.tool,
        "rank": None if info.slices is None else f"{info.slices.rank} of {info.slices.size}",
        "tied": dict(info.tied),
        "sources": dict(info.sources),
        "tensors": tensors,
    }


# ---- reorder


@app.command("reorder")
def reorder_command(
    source: Annotated[Path, typer.Argument(help="A GGUF file, a safetensors file or index, or a model's directory.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="What to write: one file, if it is named *.safetensors, else a directory.")
    ],
    bits: Annotated[
        int | None, typer.Option(help="Quantise float weights to codes of 4 or 8 bits. Without it they stay floats.")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Weights along K that share a scale: 32, 64, a multiple of 128, or -1 for all.  [default: 128]"),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="Without or with a zero point for each group.  [default: symmetric]"),
    ] = None,
    clip: Annotated[
        str | None, typer.Option(metavar="mse", help="Search the range of each group that has the least squared error.")
    ] = None,
    include: Annotated[str | None, typer.Option(metavar="REGEX", help="Pack only the layers whose name has a match.")] = None,
    exclude: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Keep these layers as float tensors; overrides --include.")
    ] = None,
    zero_offset: _ZeroOffset = "auto",
    ranks: Annotated[int, typer.Option("--tp", metavar="R", help="Split the layers over R GPUs: a directory for each.")] = 1,
    split: Annotated[
        list[str] | None,
        typer.Option(
            "--tp-split", metavar="REGEX=STYLE", help=f"Split these layers otherwise: {', '.join(STYLES)}. May be repeated."
        ),
    ] = None,
    act_quant: Annotated[
        str | None,
        typer.Option(
            metavar="none|token|block",
            help="How config.json tells loaders to quantise activations.  [default: as the checkpoint says, else none]",
        ),
    ] = None,
    act_symmetric: Annotated[
        bool | None,
        typer.Option("--act-symmetric/--act-asymmetric", help="And without or with zero points.  [default: symmetric]"),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Tensors to work on, and to hold in memory, at a time.")] = 2,
    shard_gb: Annotated[
        float | None,
        typer.Option("--shard-size", metavar="GB", min=0.001, help="The most that a file of a directory holds.  [default: 5]"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")] = False,
    as_json: _Json = False,
) -> None:
    """Pack a checkpoint's linear layers, once, for every GPU, into one file or into a model's directory.

    Weights that the file quantised keep their codes and scales exactly (GGUF's Q6_K may be rounded). Float weights
    are quantised if --bits is given, except embeddings, norms and the output head, unless --include names
    them; in one file, weights of convolutions too, where that makes them smaller. Everything else is copied; a
    directory's config.json says how to load it. A directory whose making was interrupted is completed by the same
    command.
    """
    one_file = output.suffix == ".safetensors"

    def kept() -> str:
        finished = [] if one_file or dry_run else [*output.glob("*.safetensors"), *output.glob("rank-*/*.safetensors")]
        if not finished:
            return f": nothing is written to {output}"
        return f": {len(finished)} finished files are kept in {output}; the same command makes the others"

    with _reported(kept):
        if bits is None and (group_size is not None or symmetric is not None or clip is not None):
            raise ValueError(
                "--group-size, --symmetric/--asymmetric and --clip say how to quantise float weights: give --bits too"
            )
        if one_file and ranks > 1:
            raise ValueError(f"--tp {ranks} makes a directory for each rank; {output} names one file")
        given = {"--act-quant": act_quant, "--act-symmetric": act_symmetric, "--shard-size": shard_gb, "--tp-split": split}
        if one_file and (useless := [name for name, value in given.items() if value is not None]):
            raise ValueError(f"{useless[0]} is for a model's directory; {output} names one file")
        if split and ranks == 1:
            raise ValueError("--tp-split says how layers are split over ranks: give --tp too")
        if not output.parent.is_dir():
            raise ValueError(f"{output}: there is no folder {output.parent}")
        if output.exists() and output.is_dir() == one_file:
            raise ValueError(
                f"{output} is a {'folder; a file' if one_file else 'file; a folder'} of that name is to be written"
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
        _keep_freed_memory()
        checkpoint = _load(source, zero_offset)
        if bits is not None and not any(step.weight and not step.entry.quantized for step in plan(checkpoint, options).steps):
            raise ValueError(f"--bits {bits} changes nothing: no float weight of {source} is to be packed; leave it out")
        if act_symmetric is not None and (act_quant or (checkpoint.activations or ("none",))[0]) == "none":
            raise ValueError("--act-symmetric and --act-asymmetric say how activations are quantised: give --act-quant too")
        total = sum(entry.nbytes for entry in checkpoint.entries.values()) + sum(f.stat().st_size for f in checkpoint.files)
        with _progress("reordering", total) as advance:
            if one_file:
                done = reorder_checkpoint(checkpoint, output, **asdict(options), jobs=jobs, dry_run=dry_run, progress=advance)
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
        _print_json(
            {
                "output": str(done.path),
                "written": not dry_run,
                "weights": {name: dict(zip(fields, w, strict=True)) for name, w in done.weights.items()},
                "tensors": list(done.tensors),
                "files": [str(file) for file in done.files],
                "found": done.found,
                "copied": list(done.copied),
                "warnings": list(done.warnings),
                "styles": dict(done.styles),
                "kept": dict(done.kept),
                "source_bytes": done.source_bytes,
                "packed_bytes": done.packed_bytes,
                "seconds": round(seconds, 3),
            }
        )
        return
    formats = Counter((bits, group_size) for _, _, bits, group_size in done.weights.values())
    listed = ", ".join(
        f"{count} of {bits} bits in {'one group a row' if group_size == -1 else f'groups of {group_size}'}"
        for (bits, group_size), count in formats.items()
    )
    lines = [
        f"packed   {len(done.weights)} weights ({listed})",
        f"copied   {len(done.tensors)} tensors" + "".join(f", {name}" for name in done.copied),
    ]
    unpacked: dict[str, list[str]] = {}
    for name, reason in done.kept.items():
        unpacked.setdefault(reason, []).append(name)
    for reason, names in unpacked.items():
        lines.append(f"kept     {len(names)} unpacked: {reason} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})")
    if ranks > 1:
        styles = Counter(done.styles.values())
        lines.append(f"split    {', '.join(f'{count} {style}' for style, count in styles.items())} over {ranks} ranks")
    if done.found:
        lines.append(f"found    {done.found} of {len(done.files)} files finished by an earlier run")
    lines += [f"warning  {warning}" for warning in done.warnings]
    verb = "to write" if dry_run else "wrote   "
    files = "" if one_file else f" in {len(done.files)} file{'s' if len(done.files) > 1 else ''}"
    time_taken = "" if dry_run else f", in {seconds:.1f} s"
    lines.append(f"{verb} {done.path}: {_size(done.packed_bytes)}{files}, from {_size(done.source_bytes)}{time_taken}")
    console = _console()
    for line in lines:
        console.print(escape(line), soft_wrap=True, highlight=False)


def _load(path: Path, zero_offset: str) -> Checkpoint:
    if zero_offset == "auto":
        return load_checkpoint(path)
    if zero_offset not in ("0", "1"):
        raise ValueError(f"--zero-offset is {zero_offset!r}; auto, 0 and 1 are accepted")
    return load_checkpoint(path, zero_offset=1 if zero_offset == "1" else 0)


# ---- verify


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="A packed file, or a directory that reorder made.")],
    against: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The checkpoint it was made from, to compare every value with.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Check every bit of a packed model, by its checksums; with --against, that it still is its checkpoint, bit for bit.

    The largest difference is between values as the packed file gives them and as the checkpoint does:
    rounding of the last place at most, or, for weights that reorder quantised, the error of that. Exit status
    1 if anything is wrong.
    """
    with _reported():
        _keep_freed_memory()
        parts = rank_directories(file) or [file]
        infos = [packed_info(part) for part in parts if part.exists() or len(parts) == 1]
        total = sum(shard.stat().st_size for info in infos for shard in info.files)
        checkpoint = None
        if against is not None:
            checkpoint = _load(against, str(infos[0].options.get("zero_offset", "auto")) if infos else "auto")
            total += len(infos) * sum(entry.nbytes for entry in checkpoint.entries.values())
        with _progress("verifying", total) as advance:
            found = verify_packed(file, checkpoint, progress=advance)
    if as_json:
        _print_json({"path": str(file), "ok": not found.problems, **asdict(found)})
    else:
        console = _console()
        for problem in found.problems:
            console.print(f"[red]wrong[/red]    {escape(problem)}", soft_wrap=True, highlight=False)
        for note in found.notes:
            console.print(f"note     {escape(note)}", soft_wrap=True, highlight=False)
        console.print(f"checked  {found.weights} weights, {found.tensors} tensors", highlight=False)
        if against is not None:
            same = "has" if found.same_source else "does not have"
            console.print(f"source   {escape(str(against))} {same} the recorded sha256", soft_wrap=True, highlight=False)
        if found.largest_difference is not None:
            console.print(
                f"values   differ by {found.largest_difference:.6g} at most, in {escape(found.largest_at)}",
                soft_wrap=True,
                highlight=False,
            )
        console.print("[red]FAILED[/red]" if found.problems else "[green]ok[/green]")
    if found.problems:
        raise typer.Exit(_FAILED)


# ---- diff


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A packed file, or a directory that reorder made.")],
    second: Annotated[Path, typer.Argument(help="Another.")],
    as_json: _Json = False,
) -> None:
    """Compare two packed models, bit for bit, however they are cut into files. Exit status 1 if they differ."""
    with _reported():
        infos = [packed_info(path) for path in (first, second)]
        with _progress("comparing", sum(file.stat().st_size for info in infos for file in info.files)) as advance:
            found = diff_packed(first, second, progress=advance)
    differ = bool(found.only_first or found.only_second or found.changed)
    if as_json:
        _print_json({"equal": not differ, **asdict(found)})
    else:
        console = _console()
        for path, names in ((first, found.only_first), (second, found.only_second)):
            for name in names:
                console.print(f"only in {escape(str(path))}: {escape(name)}", soft_wrap=True, highlight=False)
        for name, changes in found.changed.items():
            console.print(f"{escape(name)}: {escape('; '.join(changes))}", soft_wrap=True, highlight=False)
        console.print(f"{found.same} equal, {len(found.changed)} differ", highlight=False)
    if differ:
        raise typer.Exit(_FAILED)


# ---- doctor


@app.command()
def doctor(as_json: _Json = False) -> None:
    """Say what this machine has, which kernels can run on it, and multiply once to see that they do.

    A missing GPU, driver or package is reported and is no failure. Exit status 1 if a product is wrong.
    """
    facts = _facts()
    devices = ["cpu"]
    if _C.built_with_cuda and facts["gpus"]:
        devices += [f"cuda:{index}" for index in range(len(facts["gpus"]))]
    facts["kernels"] = {device: _kernels(device) for device in devices}
    facts["self_test"] = {device: _self_test(device) for device in devices}
    failed = [result for tests in facts["self_test"].values() for result in tests.values() if result != "ok"]
    facts["ok"] = not failed
    if as_json:
        _print_json(facts)
    else:
        console = _console()
        for key in ("cutlass_ops", "build", "cutlass", "python", "platform", "torch", "cuda_driver", "cuda_runtime"):
            console.print(f"{key:14}{escape(facts[key])}", soft_wrap=True, highlight=False)
        for index, gpu in enumerate(facts["gpus"] or ["none"]):
            console.print(f"{f'gpu {index}' if facts['gpus'] else 'gpu':14}{escape(gpu)}", soft_wrap=True, highlight=False)
        for note in facts["missing"]:
            console.print(f"{'missing':14}[yellow]{escape(note)}[/yellow]", soft_wrap=True, highlight=False)
        for device in devices:
            for name, kernel in facts["kernels"][device].items():
                result = facts["self_test"][device].get(name, "")
                colour = "green" if result == "ok" else "red"
                console.print(
                    f"{device:14}{name:12}{escape(kernel)}  [{colour}]{escape(result)}[/{colour}]",
                    soft_wrap=True,
                    highlight=False,
                )
    if failed:
        raise typer.Exit(_FAILED)


#: The products that doctor tries: bits of the weights and act_quant.
_PRODUCTS = {
    "W4A16": (4, "none"),
    "W4A8 block": (4, "block"),
    "W4A8 token": (4, "token"),
    "W8A16": (8, "none"),
    "W8A8 block": (8, "block"),
    "W8A8 token": (8, "token"),
}


def _facts() -> dict[str, Any]:
    missing: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        # torch warns of a driver that is too old, and says that there is no GPU.
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    missing += [str(warning.message).strip() for warning in caught]
    gpus = []
    if available:
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            gpus.append(
                f"{found.name}, sm_{found.major}{found.minor}, {found.multi_processor_count} multiprocessors, "
                f"{_size(found.total_memory)}"
            )
    elif not _C.built_with_cuda:
        missing.append("CUDA kernels: the package was built without nvcc; products run on the CPU")
    if torch.version.cuda is None:
        missing.append("CUDA in torch: this torch is for the CPU alone")
    elif not available:
        missing.append("a GPU that torch can use")
    build = f"CUDA for {_C.cuda_architectures}" if _C.built_with_cuda else "CPU alone"
    return {
        "cutlass_ops": __version__,
        "build": build,
        "cutlass": _C.cutlass_version or "not in this build",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "cuda_driver": _cuda_version("driver", "cuDriverGetVersion", missing),
        "cuda_runtime": _cuda_version("runtime", "cudaRuntimeGetVersion", missing),
        "gpus": gpus,
        "missing": missing,
    }


def _cuda_version(module: str, function: str, missing: list[str]) -> str:
    """The highest CUDA version that the driver, or the runtime, knows; from cuda-python."""
    try:
        package = version("cuda-bindings")
        error, number = getattr(import_module(f"cuda.bindings.{module}"), function)()
    except (ImportError, PackageNotFoundError):
        if "cuda-python" not in " ".join(missing):
            missing.append("cuda-python: pip install cuda-bindings tells the versions of driver and runtime")
        return "unknown"
    except Exception as failure:  # cuda-python raises what it likes when it does not find a library
        missing.append(f"CUDA {module}: {failure}")
        return "not found"
    if int(error) != 0:
        missing.append(f"CUDA {module}: {function} returned {error}")
        return "not found"
    if number == 0:
        missing.append(f"CUDA {module}: not installed")
        return "not found"
    return f"{number // 1000}.{number % 1000 // 10} (cuda-bindings {package})"


def _kernels(device: str) -> dict[str, str]:
    """What would run for one token and for many, of each product."""
    names = {}
    for name, (bits, act_quant) in _PRODUCTS.items():
        weight = reorder(quantize(torch.zeros(64, 128), bits=bits)).to(device)
        found = []
        for m in (1, 4096):
            try:
                found.append(explain(m, weight, act_quant=act_quant).kernel)
            except (ValueError, RuntimeError) as error:
                found.append(f"none ({error})")
        names[name] = " / ".join(dict.fromkeys(found))
    return names


def _self_test(device: str) -> dict[str, str]:
    """Each product on odd sizes, against the reference in fp64 on the CPU: "ok" or what is wrong."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(192, 576, generator=generator)
    x = torch.randn(17, 576, generator=generator).half()
    results = {}
    for name, (bits, act_quant) in _PRODUCTS.items():
        quantized = quantize(weight, bits=bits, group_size=64, symmetric=False)
        expected = reference.mixed_gemm(x, quantized, act_quant=act_quant, out_dtype=torch.float32, compute_dtype=torch.float64)
        try:
            packed = reorder(quantized).to(device)
            y = ops.mixed_gemm(x.to(device), packed, act_quant=act_quant, out_dtype=torch.float32).cpu()
        except (ValueError, RuntimeError) as error:
            results[name] = f"failed: {error}"
            continue
        relative = float((y - expected).norm() / expected.norm())
        results[name] = "ok" if relative <= 1e-5 else f"wrong: relative error {relative:.3g}"
    return results


# ---- demo


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Argument(help="A GGUF model. Without it, SmolLM2-135M-Instruct, fetched once (93 MB).")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask the model.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to generate.")] = 48,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; a GPU if there is one, when not given.")] = None,
    as_json: _Json = False,
) -> None:
    """Reorder a real model, generate text with it in 4 bits, and compare with its dequantised self."""
    with _reported():
        # It imports nothing heavy itself, but belongs to this command alone.
        from .demo import PROMPT, run_demo, show

        console = Console(stderr=True)
        result = run_demo(
            model,
            prompt=PROMPT if prompt is None else prompt,
            max_new_tokens=tokens,
            device=device,
            report=lambda step: console.print(f"{escape(step)} ...", highlight=False),
        )
    if as_json:
        _print_json(asdict(result))
    else:
        show(result, _console())
