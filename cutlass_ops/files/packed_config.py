"""The ``config.json`` of a packed model.

``quantization_config`` says enough to make the modules before any tensor is read:

========================  ==========================================================================
``quant_method``          "cutlass_ops"
``layout``                "cutlass_ops.slab64"
``layout_version``        2, 3 if there are packed experts, or 1 in directories that older versions
                          wrote
``bits``, ``group_size``  of most weights
``tensors``               dtypes of most weights' tensors beside the codes:
                          ``{"scales": "float16", ...}``
``modules``               ``{name: {"bits", "group_size", "tensors"}}`` of the weights that differ
                          from those, and of each product of packed experts
                          ("model.layers.0.mlp.experts.gate_up_proj")
``modules_to_not_convert``  names of the linear layers that are not packed; all others are
``embeddings``            where word embeddings are packed: ``{name: name of the module that has the
                          weight}``, which is the output head if they are tied, else itself
``act_quant``             how activations are quantised unless the user says otherwise: "none"
``act_symmetric``         whether quantised activations have no zero point: true
``tensor_parallel``       where layers are split over ranks:
                          ``{"rank", "size", "styles": {module: style}}``
========================  ==========================================================================

``transformers_weights`` of ``config.json`` holds a sentence in place of a file's name (``GUARD``),
so that transformers refuses the directory where cutlass_ops was not imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..checkpoints.gguf_models import exceeds_fp16
from ..weights import formats

QUANT_METHOD = formats.QUANT_METHOD
#: A key of ``config.json`` by which transformers finds the weights' file, and its value in a packed
#: directory: transformers refuses it, with this text, unless cutlass_ops removes it (see
#: ``hf_quantizer.py``). Without this key, transformers alone would only warn of an unknown
#: quantisation and load random weights.
GUARD_KEY = "transformers_weights"
GUARD = (
    "this model is packed by cutlass_ops: install it and import cutlass_ops before from_pretrained"
)
#: Where the options of a packed file say which ``act_quant`` and ``act_symmetric`` its checkpoint
#: was made for.
ACTIVATIONS = "activations"


@dataclass(frozen=True)
class WeightFormat:
    """The format of a packed weight, independent of N and K.

    Attributes:
        bits, group_size: as in :class:`cutlass_ops.PackedWeight`.
        tensors: names and dtypes of its tensors, without the codes, sorted:
            ``(("scales", torch.float16), ...)``.
    """

    bits: int
    group_size: int
    tensors: tuple[tuple[str, torch.dtype], ...]

    def to_json(self) -> dict[str, Any]:
        """As it stands in ``config.json``."""
        tensors = {name: str(dtype).removeprefix("torch.") for name, dtype in self.tensors}
        return {"bits": self.bits, "group_size": self.group_size, "tensors": tensors}

    @classmethod
    def from_json(cls, value: Any) -> WeightFormat:
        """The inverse of :meth:`to_json`; other keys are ignored.

        Raises:
            ValueError: another value; the message has it.
        """
        if (
            not isinstance(value, dict)
            or not {"bits", "group_size"} <= value.keys()
            or not isinstance(value.get("tensors"), dict)
        ):
            raise ValueError(
                f"{value!r} is no weight's format: bits, group_size and tensors are expected"
            )
        tensors = []
        for name, text in sorted(value["tensors"].items()):
            dtype = getattr(torch, text, None) if isinstance(text, str) else None
            if not isinstance(dtype, torch.dtype):
                raise ValueError(
                    f"tensor {name!r} has dtype {text!r}; a name like 'float16' is expected"
                )
            tensors.append((name, dtype))
        bits, group_size = (
            formats.check_bits(value["bits"]),
            formats.check_group_size(value["group_size"]),
        )
        return cls(bits, group_size, tuple(tensors))


def quantization_config(
    weights: Mapping[str, WeightFormat],
    not_converted: Iterable[str] = (),
    act_quant: str = "none",
    act_symmetric: bool = True,
    experts: Collection[str] = (),
    embeddings: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The ``quantization_config`` of a directory with these packed weights, by module name.

    Args:
        weights: at least one.
        not_converted: names of the linear layers that stay as they are.
        act_quant, act_symmetric: what a loader takes if its user names nothing else.
        experts: which of the weights are products of experts.
        embeddings: the packed word embeddings, and for each the module that has its weight.
    """
    common = Counter(weights.values()).most_common(1)[0][0]
    return {
        "quant_method": QUANT_METHOD,
        "layout": formats.LAYOUT_NAME,
        "layout_version": formats.GATED_EXPERTS_VERSION if experts else formats.LAYOUT_VERSION,
        **common.to_json(),
        "modules": {
            name: weight.to_json()
            for name, weight in weights.items()
            if weight != common or name in experts
        },
        "modules_to_not_convert": sorted(not_converted),
        **({"embeddings": dict(embeddings)} if embeddings else {}),
        "act_quant": act_quant,
        "act_symmetric": act_symmetric,
    }


def weight_format(config: Mapping[str, Any], module: str) -> WeightFormat | None:
    """The format of linear layer ``module`` by a ``quantization_config``; None if it is not packed.

    Raises:
        ValueError: an unknown layout or an invalid format; the message names it.
    """
    formats.check_layout(config.get("layout"), config.get("layout_version"))
    if module in config.get("modules_to_not_convert", ()):
        return None
    return WeightFormat.from_json(config.get("modules", {}).get(module, config))


def experts_format(config: Mapping[str, Any], product: str) -> WeightFormat | None:
    """The format of a product of experts ("model.layers.0.mlp.experts.down_proj"); None if
    it is not packed.

    Raises:
        ValueError: as in :func:`weight_format`.
    """
    return weight_format(config, product) if product in config.get("modules", {}) else None


def has_plain_rows(config: Mapping[str, Any]) -> bool:
    """Whether an earlier version packed the experts, which did not put rows of gate
    and up in eights.
    """
    return int(config["layout_version"]) < formats.GATED_EXPERTS_VERSION


def model_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a model's floats by its ``config.json``; fp16 or bf16 where it says none."""
    plain = plain_config(config)
    inner = plain.get("text_config")
    for holder in (plain, inner if isinstance(inner, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            name = str(holder.get(key)).removeprefix("torch.")
            if name in ("float16", "bfloat16", "float32"):
                return cast(torch.dtype, getattr(torch, name))
    return torch.bfloat16 if exceeds_fp16(str(config.get("model_type", ""))) else torch.float16


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` without what it says of the checkpoint's own quantisation and file names; and
    with bf16 in place of fp16 for a model that exceeds its range.

    Tools that quantise models convert them to fp16, whatever they are.
    """
    left_out = ("quantization_config", "compression_config", GUARD_KEY)
    plain = {key: value for key, value in config.items() if key not in left_out}
    if exceeds_fp16(str(config.get("model_type", ""))):
        plain |= {
            key: "bfloat16" for key in ("dtype", "torch_dtype") if plain.get(key) == "float16"
        }
    if isinstance(inner := plain.get("text_config"), dict):
        plain["text_config"] = plain_config(inner)
    return plain
