"""The ``quantization_config`` of ``from_pretrained``: options for float models, and the description
of packed ones.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..files.packed_config import QUANT_METHOD, weight_format
from ..nn.quantize_model import check_quantization

#: Keys that every description of a packed model has and options lack.
_DESCRIPTION = ("layout", "layout_version", "tensors")


class CutlassOpsConfig(QuantizationConfigMixin):
    """Quantise a float model of transformers when it is loaded.

        config = co.CutlassOpsConfig(bits=4, group_size=128)
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float16, device_map="cuda", quantization_config=config)

    The model is the one that :func:`cutlass_ops.quantize_model` makes of the loaded float model,
    bit for bit; the arguments are explained there. ``save_pretrained``, adapters of PEFT and
    ``dequantize`` work in the same way.

    On one device (``device_map="cuda"`` or "cpu", or without a ``device_map``) each layer is
    quantised there as soon as its tensors are read, so that at any time only one layer is there as
    floats, besides layers that stay floats and layers with tied weights. ``device_map="auto"``
    counts the memory of the float model. With several GPUs in ``device_map`` the float model is
    loaded to them first and then quantised, so that they need its memory; where it does not fit,
    ``cutlass-ops reorder --bits 4`` writes a directory that is loaded packed. A ``device_map`` that
    offloads to "disk", or to "cpu" from other devices, raises a ValueError.

    Raises:
        TypeError, ValueError: as :func:`cutlass_ops.quantize_model`, for an argument alone or with
            others. ``from_pretrained`` raises a ValueError for names in ``skip`` that the model
            lacks, and for a model that is quantised already.
    """

    def __init__(
        self,
        bits: int = 4,
        group_size: int = 128,
        symmetric: bool = False,
        act_quant: str = "none",
        skip: Collection[str] | None = None,
        book: str | Tensor | list[float] | None = None,
        clip: str | None = None,
        convs: bool = False,
        embeddings: bool = False,
    ) -> None:
        values = (
            torch.tensor(book, dtype=torch.float32, device="cpu")
            if isinstance(book, list)
            else book
        )
        check_quantization(
            bits, group_size, symmetric, act_quant, skip, values, clip, convs, embeddings
        )
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
        self.bits = bits
        self.group_size = group_size
        self.symmetric = symmetric
        self.act_quant = act_quant
        self.skip = None if skip is None else list(skip)
        self.book = values.tolist() if isinstance(values, Tensor) else values  # as JSON has it
        self.clip = clip
        self.convs = convs
        self.embeddings = embeddings

    def options(self) -> dict[str, Any]:
        """The arguments of :func:`cutlass_ops.quantize_model`."""
        book = (
            torch.tensor(self.book, dtype=torch.float32, device="cpu")
            if isinstance(self.book, list)
            else self.book
        )
        return {
            **{name: value for name, value in self.to_dict().items() if name != "quant_method"},
            "book": book,
        }

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """A configuration from a dictionary of these arguments, or from what ``config.json`` of a
        packed model says.
        """
        if any(key in config_dict for key in _DESCRIPTION):
            from_dict: Any = PackedModelConfig.from_dict  # transformers does not type it
            return from_dict(config_dict, return_unused_kwargs, **kwargs)
        from_dict = super().from_dict
        options = {key: value for key, value in config_dict.items() if key != "quant_method"}
        return from_dict(options, return_unused_kwargs, **kwargs)


class PackedModelConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a packed model, as ``packed_config.py`` describes it: each key
    an attribute.

    Raises:
        ValueError: an unknown layout, an invalid format, or another value of a wrong kind.
    """

    def __init__(self, **fields: Any) -> None:
        for key, kind in (
            ("modules", dict),
            ("modules_to_not_convert", list),
            ("embeddings", dict),
            ("act_symmetric", bool),
            ("act_quant", str),
        ):
            if not isinstance(fields.get(key, kind()), kind):
                raise ValueError(
                    f"quantization_config: {key} is {fields[key]!r:.100}; a "
                    f"{kind.__name__} is expected"
                )
        for name, layer in fields.get("embeddings", {}).items():
            if not isinstance(layer, str):
                raise ValueError(
                    f"quantization_config: embeddings has {layer!r:.100} for {name!r}; a "
                    "name is expected"
                )
        weight_format({**fields, "modules_to_not_convert": []}, "")
        self.__dict__.update(fields)
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
