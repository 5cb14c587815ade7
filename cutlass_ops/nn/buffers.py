"""What modules over packed weights share: buffers that keep their bytes, and a
mark in their state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import gemm
from ..weights import formats
from ..weights.packed_weight import PackedWeight
from ..weights.weight import PARTS

#: More than any mark has; codes have more.
_MOST_BYTES = 1000


class PackedState(nn.Module):
    """A module whose ``state_dict`` has a mark under the name of the float layer's weight.

    The mark is a vector of bytes, JSON that says what the packed tensors are. ``load_state_dict``
    of the float layer refuses it, also with ``strict=False``, because its shape is not the
    weight's: a packed model that was saved as if it were a plain one is not loaded with random
    weights. A packed layer refuses marks of other formats and float weights. Modules on the meta
    device, which have no values, have no marks.
    """

    def marks(self) -> dict[str, dict[str, Any]]:
        """Names of the float layer's weights, and the content of their marks."""
        raise NotImplementedError

    def has_values(self) -> bool:
        """Whether the packed tensors are in memory."""
        return not any(buffer.is_meta for buffer in self.buffers())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.has_values():
            return
        for name, form in self.marks().items():
            text = json.dumps({"quant_method": formats.QUANT_METHOD, **form})
            destination[f"{prefix}{name}"] = torch.tensor(
                list(text.encode()), dtype=torch.uint8, device="cpu"
            )

    def _load_from_state_dict(
        self,
        state_dict: MutableMapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, form in self.marks().items():
            key = f"{prefix}{name}"
            if key not in state_dict:
                continue
            found = read_mark(state_dict.pop(key))
            if found is None:
                error_msgs.append(
                    f"{key} is a plain weight, and the layer is packed: load it before the "
                    "model is packed."
                )
            elif found != form:
                error_msgs.append(
                    f"{key} is of a packed weight that is {found}; the layer's is {form}."
                )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def read_mark(tensor: Tensor) -> dict[str, Any] | None:
    """What a mark in a ``state_dict`` says; None for other tensors."""
    if (
        tensor.dtype != torch.uint8
        or tensor.dim() != 1
        or len(tensor) > _MOST_BYTES
        or tensor.is_meta
    ):
        return None
    try:
        form = json.loads(bytes(tensor.tolist()))
    except ValueError:
        return None
    if not isinstance(form, dict) or form.pop("quant_method", None) != formats.QUANT_METHOD:
        return None
    return form


def marked(state: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """The marks in a ``state_dict``, by their keys."""
    forms = {key: read_mark(tensor) for key, tensor in state.items()}
    return {key: form for key, form in forms.items() if form is not None}


class PackedBuffers(PackedState):
    """A module whose buffers are the tensors of packed weights, which move and load as bytes, and
    whose dtypes stay.
    """

    _packed: Any

    def _from_buffers(self) -> Any:
        """The packed weights that the buffers hold now, checked."""
        raise NotImplementedError

    def state_format(self) -> dict[str, Any]:
        """Layout, sizes and parts."""
        packed = self._packed
        return {
            "layout": formats.LAYOUT_NAME,
            "layout_version": formats.LAYOUT_VERSION,
            "bits": packed.bits,
            "group_size": packed.group_size,
            "shape": list(packed.shape),
            "kernel_size": list(getattr(packed, "kernel_size", ())),
            "tensors": sorted(name for name, buffer in self._buffers.items() if buffer is not None),
        }

    def marks(self) -> dict[str, dict[str, Any]]:
        """One mark, of the weight."""
        return {"weight": self.state_format()}

    def view_buffers(self) -> None:
        """Make :attr:`packed` of the present buffers and check it; called after a load."""
        self._packed = self._from_buffers()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedBuffers:
        module: Any = super()  # torch has no types here
        # As bytes, tensors follow every move and keep their dtype.
        module._apply(lambda t: fn(t.view(torch.uint8)).view(t.dtype), recurse)
        self.view_buffers()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # load_state_dict(assign=True) puts other tensors in the buffers' places.
        self.view_buffers()


class WeightBuffers(PackedBuffers):
    """A module whose buffers are the tensors of one packed weight.

    Raises:
        TypeError: a weight that is not packed.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    offsets: Tensor | None
    bias: Tensor | None
    perm: Tensor | None
    book: Tensor | None
    _packed: PackedWeight

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        if not isinstance(packed, PackedWeight):
            raise TypeError(
                f"packed is a {type(packed).__name__}; a PackedWeight (see "
                "cutlass_ops.reorder) is expected"
            )
        for name in PARTS:
            self.register_buffer(name, getattr(packed, name))
        self._packed = packed

    @property
    def packed(self) -> PackedWeight:
        """The weight as this layer's buffers hold it now; it shares their memory.

        Raises:
            TypeError, ValueError: a buffer was replaced by one that does not fit; the
                message has the name.
        """
        packed = self._packed
        if all(self._buffers.get(name) is getattr(packed, name) for name in PARTS):
            return packed
        return self._from_buffers()

    def _from_buffers(self) -> PackedWeight:
        return replace(self._packed, **{name: getattr(self, name) for name in PARTS})

    def dequantize(self, dtype: torch.dtype = torch.float16) -> Tensor:
        """The weight's values in the shape of the float layer's weight, of ``dtype`` (fp16, bf16 or
        fp32), as a new tensor.

        Raises:
            TypeError: another dtype.
        """
        return gemm.dequantize(self.packed, dtype)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"{type(self).__name__} has no 'weight': its values are packed in 'codes' "
                "and 'scales'; "
                "dequantize() returns them"
            )
        return super().__getattr__(name)
