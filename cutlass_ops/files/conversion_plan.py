"""The plan of a conversion: each tensor of a checkpoint becomes a packed weight or is copied."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from ..checkpoints import Checkpoint, Entry, Quantized
from ..nn.architecture import Architecture, architecture_of
from ..ops.quantize import quantize
from ..weights import formats
from ..weights.weight import CheckpointError, QuantizedWeight
from .checkpoint_experts import ExpertsLayer, StackedWeight, layers_of

#: Called with a tensor's name and the number of the source's bytes that are then done.
Progress: TypeAlias = "Callable[[str, int], None]"

_FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)

#: Float matrices that are no linear layers, or that suffer most from few bits, by a part of their
#: name.
DEFAULT_EXCLUDE = (
    r"(^|\.)(lm_head|wte|wpe|shared|ln_[^.]*|[^.]*norm[^.]*|[^.]*embed[^.]*|[^.]*_embd)(\.|"
    r"$)|^output(\.|$)"
)
#: Where the options of a packed file name the modules whose checkpoint stores them as
#: ``[in, out]``.
TRANSPOSED = "transposed"
#: Word embeddings, where the model is not known.
_TABLE = re.compile(r"(^|\.)(embed_tokens|word_embeddings|wte)$")


@dataclass(frozen=True)
class Step:
    """The result of one entry: a packed weight (if ``weight`` is set) or a copied tensor."""

    entry: Entry
    name: str
    weight: Quantized | StackedWeight | None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the model's tensors that it provides."""
        if self.weight is None:
            return (self.name,)
        if isinstance(self.weight, StackedWeight):
            return (self.name, *((f"{self.name}_bias",) if "bias" in self.weight.dtypes else ()))
        names = [
            f"{self.name}.{part}"
            for part in ("weight", "bias")
            if part == "weight" or part in self.weight.dtypes
        ]
        return (*names, f"{self.entry.tied_to}.weight") if self.entry.tied_to else tuple(names)


@dataclass(frozen=True)
class Plan:
    """The plan of a checkpoint.

    Attributes:
        steps: one or more for each entry, in the order of the checkpoint.
        kept: why matrices that the options choose stay plain tensors, by module name.
        transposed: modules that are packed and that the checkpoint stores as ``[in, out]``.
        warnings: for the user: an option that changes nothing.
    """

    steps: list[Step]
    kept: dict[str, str]
    transposed: list[str]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """What to pack, and how float matrices are quantised first.

    Attributes:
        bits: of the float matrices' codes, as in :func:`cutlass_ops.quantize`; None leaves them
            floats.
        group_size, symmetric: of float matrices.
        include: a regular expression, searched in module names: only these are packed; replaces
            ``DEFAULT_EXCLUDE``.
        exclude: a regular expression: these are not packed but stored as tensors.
        clip: of float matrices: None or "mse".

    Raises:
        ValueError: one that is out of range or not a regular expression.
    """

    bits: int | None = None
    group_size: int = 128
    symmetric: bool = True
    include: str | None = None
    exclude: str | None = None
    clip: str | None = None

    def __post_init__(self) -> None:
        if self.bits is not None:
            formats.check_bits(self.bits)
            formats.check_group_size(self.group_size)
        if self.clip not in (None, "mse"):
            raise ValueError(f"clip is {self.clip!r}; None and 'mse' are accepted")
        for option in ("include", "exclude"):
            pattern(option, getattr(self, option))


def pattern(option: str, text: str | None) -> re.Pattern[str] | None:
    """The regular expression that an option holds; ValueError if it holds another text."""
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(
            f"{option} is {text!r}, which is not a regular expression: {error}"
        ) from error


def plan(
    checkpoint: Checkpoint,
    options: Options,
    architecture: Architecture | None = None,
    *,
    for_model: bool = True,
    dtype: torch.dtype | None = None,
    or_floats: bool = False,
) -> Plan:
    """Plan the result of each entry, in the order of the checkpoint.

    Weights that the checkpoint quantised are packed as they are. Float matrices are quantised
    first, if ``options.bits`` is given: those of two dimensions named ``*.weight``, without
    embeddings, norms and output heads (``DEFAULT_EXCLUDE``, and what the model says); in a file of
    weights those of convolutions too, of three to five dimensions, unless a tap's few channels
    would take more bytes packed than as they are. A bias goes with its weight; what the model
    stores transposed is packed as ``[N, K]``.

    The experts of a layer whose module :class:`cutlass_ops.nn.MixedExperts` replaces become two
    weights, under the names of the model's parameters, if the options choose all of them and the
    experts of each product have one format. Otherwise they stay plain.

    A matrix that is neither a linear layer nor a word embedding of the model stays plain (see
    ``architecture.py``): a float matrix as it is, a quantised one as the values that its file gives
    it. Float embeddings are packed only where ``options.include`` names them. A quantised embedding
    that is the output head too is packed as the head, which has the embedding's rows as well; where
    the model's embedding cannot look them up there, its values become a table.

    Args:
        checkpoint, options: what to plan for.
        architecture: the model; None takes what ``checkpoint.config`` says.
        for_model: whether the result is loaded as a model. If not, it is a file of weights: every
            weight that the checkpoint quantised is packed, and a tied one is stored once.
        dtype: to which the values of quantised weights that stay plain are rounded; None keeps them
            in fp32.
        or_floats: whether a quantised checkpoint of which no weight can be packed has a plan of
            plain tensors.

    Raises:
        CheckpointError: a quantised tensor that cannot be packed and is not excluded.
        ValueError: nothing to pack.
    """
    architecture = architecture_of(checkpoint.config) if architecture is None else architecture
    is_chosen = _chooser(options, architecture)
    steps: list[Step] = []
    kept: dict[str, str] = {}
    transposed: list[str] = []
    biases = set()
    held_codes = False
    stacked, left = _experts(checkpoint, options, architecture)
    for entry in checkpoint.entries.values():
        if entry.name in stacked:
            steps += stacked[entry.name]
            continue
        module = entry.name.removesuffix(".weight")
        quantized = entry.quantized is not None or bool(entry.problem)
        held_codes |= quantized or bool(entry.decoded)
        if entry.decoded and is_chosen(entry, False):
            kept[module] = left.get(entry.name, entry.decoded)
        chosen = not entry.experts and is_chosen(
            entry, _is_linear(entry) or (not for_model and _is_convolution(entry))
        )
        reason = ""
        if for_model or not quantized:
            reason = left.get(entry.name) or (architecture.reason_to_keep(module) if chosen else "")
        if (
            chosen
            and not quantized
            and len(entry.shape) > 2
            and options.bits is not None
            and options.include is None
        ):
            reason = reason or _reason_against_taps(entry, options.bits)
        if chosen and for_model and architecture.model is None and _TABLE.search(module):
            reason = (
                reason or "its name is that of a word embedding, of which a model looks up rows"
            )
        if reason:
            kept[module] = reason
            chosen = False
        if quantized and for_model and architecture.is_transposed(module):
            raise CheckpointError(
                checkpoint.path,
                "is quantised, and a Conv1D of its model; such models are supported as floats",
                entry.source,
            )
        if entry.problem and (chosen or not entry.has_values):
            hint = (
                "; to store its values as floats, leave it out (--exclude)"
                if entry.has_values
                else ""
            )
            raise CheckpointError(checkpoint.path, f"{entry.problem}{hint}", entry.source)
        if not chosen:
            steps += (
                as_tensors(checkpoint.path, entry, dtype)
                if quantized
                else [Step(entry, entry.name, None)]
            )
        elif entry.quantized is not None:
            if (
                for_model
                and entry.tied_to
                and (reason := architecture.reason_against_rows(entry.tied_to))
            ):
                kept[entry.tied_to] = reason
                table = as_values(checkpoint.path, replace(entry, nbytes=0), dtype)
                steps.append(Step(table, f"{entry.tied_to}.weight", None))
                entry = replace(entry, tied_to="")
            steps.append(Step(entry, entry.name, entry.quantized))
        else:
            assert options.bits is not None
            if architecture.is_transposed(module):
                transposed.append(module)
                entry = as_transposed(entry)
            bias = checkpoint.entries.get(f"{module}.bias")
            if bias is None or bias.dtype not in _FLOAT_TYPES or bias.shape != entry.shape[:1]:
                bias = None
            else:
                biases.add(bias.name)
            weight = to_quantize(
                checkpoint.path,
                entry,
                bias,
                options.bits,
                options.group_size,
                options.symmetric,
                options.clip,
            )
            steps.append(Step(entry, module, weight))
    if not any(step.weight is not None for step in steps) and not (held_codes and or_floats):
        with_bits = _chooser(replace(options, bits=8), architecture)
        floats = options.bits is None and any(
            with_bits(entry, _is_linear(entry) or (not for_model and _is_convolution(entry)))
            and not architecture.reason_to_keep(entry.name.removesuffix(".weight"))
            for entry in checkpoint.entries.values()
        )
        which = "its other weights" if held_codes else "its weights"
        hint = (
            f"; {which} are floats: give bits (--bits 4 or --bits 8) to quantise them"
            if floats
            else ""
        )
        reasons = "".join(
            f"; {name} stays plain: {reason}" for name, reason in list(kept.items())[:3]
        )
        if unmatched := _unmatched("include", options.include, checkpoint):
            hint += f"; {unmatched}"
        raise ValueError(f"{checkpoint.path}: there is no weight to pack{hint}{reasons}")
    unmatched = _unmatched("exclude", options.exclude, checkpoint)
    return Plan(
        [step for step in steps if step.weight is not None or step.name not in biases],
        kept,
        transposed,
        (unmatched,) if unmatched else (),
    )


def _unmatched(option: str, text: str | None, checkpoint: Checkpoint) -> str:
    """What to say of an option that no layer's name has a match of; nothing of another."""
    regex = pattern(option, text)
    names = (name.removesuffix(".weight") for name in checkpoint.entries)
    if regex is None or any(map(regex.search, names)):
        return ""
    return f"{option} is {text!r}, of which no layer's name has a match"


def _chooser(options: Options, architecture: Architecture) -> Callable[[Entry, bool], bool]:
    """Whether the options choose an entry to be packed, if it is a matrix that can be."""
    include, exclude = pattern("include", options.include), pattern("exclude", options.exclude)
    default = re.compile(DEFAULT_EXCLUDE)

    def is_chosen(entry: Entry, is_matrix: bool) -> bool:
        module = entry.name.removesuffix(".weight")
        if not (include is None or include.search(module)) or (
            exclude is not None and exclude.search(module)
        ):
            return False
        if entry.quantized is not None or entry.problem or entry.experts:
            return True
        usual = include is not None or not (default.search(module) or architecture.is_head(module))
        return options.bits is not None and is_matrix and usual

    return is_chosen


def _experts(
    checkpoint: Checkpoint, options: Options, architecture: Architecture
) -> tuple[dict[str, tuple[Step, ...]], dict[str, str]]:
    """The steps of layers of experts, by the entries that they replace; and the reasons why other
    chosen layers stay plain.
    """
    is_chosen = _chooser(options, architecture)
    steps: dict[str, tuple[Step, ...]] = {}
    left: dict[str, str] = {}
    for layer in layers_of(checkpoint.entries.values(), architecture):
        weights = [entry for members in layer.members.values() for entry in members]
        chosen = [is_chosen(entry, entry.dtype in _FLOAT_TYPES) for entry in weights]
        problem = (
            layer.problem if all(chosen) else "others of its layer's experts are not to be packed"
        )
        if any(chosen) and problem:
            left |= {
                entry.name: f"the experts of its layer stay plain: {problem}" for entry in weights
            }
        elif any(chosen):
            steps |= _experts_steps(checkpoint.path, layer, options)
    return steps, left


def _experts_steps(
    path: Path, layer: ExpertsLayer, options: Options
) -> dict[str, tuple[Step, ...]]:
    """The steps of a layer of experts, by entry: one for each product, with the first of its
    entries.
    """
    steps: dict[str, tuple[Step, ...]] = {}
    for product, weights in layer.members.items():
        members = [*weights, *((layer.biases[product],) if product in layer.biases else ())]
        weight = stacked_weight(
            path, layer, product, options.bits, options.group_size, options.symmetric, options.clip
        )
        entry = replace(
            members[0],
            name=weight.name,
            shape=weight.shape,
            nbytes=sum(member.nbytes for member in members),
            decoded="",
        )
        steps |= {member.name: () for member in members}
        steps[members[0].name] = (Step(entry, weight.name, weight),)
    return steps


def stacked_weight(
    path: Path,
    layer: ExpertsLayer,
    product: str,
    bits: int | None,
    group_size: int,
    symmetric: bool,
    clip: str | None,
) -> StackedWeight:
    """A product of experts; matrices that are floats are quantised when they are read."""

    def matrix(entry: Entry, bias: Entry | None) -> Quantized:
        if entry.quantized is not None:
            return entry.quantized if bias is None else entry.quantized.with_bias(bias)
        assert bits is not None
        return to_quantize(path, entry, bias, bits, group_size, symmetric, clip)

    matrices = [[matrix(*part) for part in parts] for parts in layer.matrices[product]]
    return StackedWeight(f"{layer.name}.{product}", path, layer.form.shape(product), matrices)


def misfits(architecture: Architecture, tensors: Iterable[str]) -> list[str]:
    """Why a model with these tensors could not be loaded, one line each."""
    unexpected, missing = architecture.misfits(tensors)
    kind = type(architecture.model).__name__
    lines = []
    if unexpected:
        lines.append(
            f"{kind}, its model, has no place for {_listed(unexpected)}: take them out of "
            "the checkpoint"
        )
    if missing:
        lines.append(
            f"lacks {_listed(missing)} of {kind}, its model: is it a part of a checkpoint?"
        )
    return lines


def _listed(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _is_linear(entry: Entry) -> bool:
    matrix = (
        not (entry.quantized or entry.problem) and len(entry.shape) == 2 and 0 not in entry.shape
    )
    return matrix and entry.name.endswith(".weight") and entry.dtype in _FLOAT_TYPES


def _is_convolution(entry: Entry) -> bool:
    kernel = (
        not (entry.quantized or entry.problem)
        and 3 <= len(entry.shape) <= 5
        and 0 not in entry.shape
    )
    return kernel and entry.name.endswith(".weight") and entry.dtype in _FLOAT_TYPES


def _reason_against_taps(entry: Entry, bits: int) -> str:
    """Why a convolution of few channels stays plain: packed it is larger; "" if it is not."""
    _, channels, *kernel = entry.shape
    taps = math.prod(kernel)
    packed = formats.packed_bytes(entry.shape, bits)
    if packed < entry.nbytes:
        return ""
    return (
        f"its {taps} taps of {channels} channels take {packed} bytes packed, and "
        f"{entry.nbytes} as they are"
    )


def as_transposed(entry: Entry) -> Entry:
    """A float matrix ``[in, out]`` as ``[out, in]``."""
    return replace(entry, shape=entry.shape[::-1], values=lambda: entry.values().t().contiguous())


def as_values(path: Path, entry: Entry, dtype: torch.dtype | None) -> Entry:
    """A quantised weight as a plain tensor of its values, rounded to ``dtype`` if it is given."""
    if dtype in (None, entry.dtype):
        return entry

    def values() -> Tensor:
        exact = entry.values()
        rounded = exact.to(dtype)
        if not bool(rounded.isfinite().all()):
            raise CheckpointError(
                path,
                f"holds values up to {float(exact.abs().max()):.6g}; {dtype} has no such",
                entry.source,
            )
        return rounded

    assert dtype is not None
    bits = round(-math.log2(torch.finfo(dtype).eps))
    text = (
        f"values of codes, stored as {str(dtype).removeprefix('torch.')}, the model's, are rounded "
        f"to {bits + 1} bits"
    )
    return replace(entry, dtype=dtype, values=values, rounded=text)


def as_tensors(path: Path, entry: Entry, dtype: torch.dtype | None = None) -> list[Step]:
    """A quantised weight that is not packed: the values that its file gives it, and its bias."""
    name = entry.tied_to or entry.name
    steps = [Step(as_values(path, entry, dtype), f"{name}.weight", None)]
    if entry.quantized is not None and "bias" in entry.quantized.dtypes:
        read, stored = entry.quantized.read, entry.quantized.dtypes["bias"]

        def bias() -> Tensor:
            value = read().bias
            assert value is not None
            return value

        steps.append(
            Step(
                replace(entry, shape=entry.shape[:1], dtype=stored, nbytes=0, values=bias),
                f"{name}.bias",
                None,
            )
        )
    return steps


def to_quantize(
    path: Path,
    entry: Entry,
    bias: Entry | None,
    bits: int,
    group_size: int,
    symmetric: bool,
    clip: str | None,
) -> Quantized:
    """A float matrix as a quantised weight, made when it is read."""

    def read() -> QuantizedWeight:
        try:
            weight = quantize(entry.values(), bits, group_size, symmetric, clip=clip)
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(path, str(error), entry.source) from error
        return weight if bias is None else replace(weight, bias=bias.values())

    dtypes = {"scales": entry.dtype}
    if not symmetric:
        dtypes["zeros"] = torch.uint8
    if bias is not None:
        dtypes["bias"] = bias.dtype
    return Quantized(bits=bits, group_size=group_size, dtypes=dtypes, read=read)


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file, read in parts that fit into the cache."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 18))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()
