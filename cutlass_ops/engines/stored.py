"""An engine's linear layers with the parameters of a checkpoint's files.

A method that an engine has for such layers gets another class: its parameters and their loaders
stay the engine's, and the layer is packed and multiplied by our kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..weights.weight import QuantizedWeight
from .layers import MODULE, Engine, keep, product, reason_of_format, stored_weight


@dataclass(frozen=True)
class Form:
    """How a layer's weight is stored.

    Attributes:
        group_size: -1 is all input features.
        act_order: whether the groups' features are in another order.
        names: the parameters, the codes first.
        read: the weight that they hold.
        act_quant: how x is quantised unless the user says otherwise.
        symmetric: whether quantised activations have no zero point.
        amx: whether SGLang has a kernel for it on CPUs with AMX.
    """

    group_size: int
    act_order: bool
    names: tuple[str, ...]
    read: Callable[[], QuantizedWeight]
    act_quant: str = "none"
    symmetric: bool = True
    amx: bool = False


class StoredLinear:
    """Overrides of an engine's method for linear layers, for layers that can be packed."""

    engine: ClassVar[Engine]
    form: Form | None
    batch_invariant: bool

    def form_of(self, layer: Any) -> Form | str:
        """How the layer's weight is stored, or why we do not take the layer."""
        raise NotImplementedError

    def reason_against(self, form: Form) -> str | None:
        """Why the engine keeps such a layer; None if it does not."""
        raise NotImplementedError

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Let the engine make the parameters, and check whether we take the layer; if not, the
        reason is logged once.
        """
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        super().create_weights(  # type: ignore[misc]
            layer, *sizes, params_dtype, **extra_weight_attrs
        )
        self.batch_invariant = self.engine.batch_invariant()
        found = self.form_of(layer)
        reason: str | None
        if isinstance(found, Form):
            form = (found.group_size, found.act_order, params_dtype)
            reason = self.reason_against(found) or reason_of_format(
                input_size_per_partition, input_size, *form
            )
            self.form = found if reason is None else None
        else:
            reason, self.form = found, None
        if reason is not None:
            n = sum(output_partition_sizes)
            k, name = input_size_per_partition, self.engine.name
            line = "cutlass_ops leaves linear layers of %d x %d to %s's kernels: %s"
            self.engine.logger.info_once(line, n, k, name, reason)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the layer's parameters on their device, and free them.

        Raises:
            ValueError: values that cannot be packed; the message says which.
        """
        if self.form is None:
            super().process_weights_after_loading(layer)  # type: ignore[misc]
        elif MODULE not in layer._modules:  # engines may call it again
            form = self.form
            act_quant = self.engine.settings().get("act_quant", form.act_quant)
            keep(layer, form.names, form.read(), act_quant, form.symmetric)
            self.engine.logger.info_once("Using cutlass_ops for %s", type(self).__name__)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x ``[..., K]`` times the layer's weight, plus bias: ``[..., N]`` of x's dtype."""
        if self.form is None:
            y: Tensor = super().apply(layer, x, bias)  # type: ignore[misc]
            return y
        return product(layer, x, bias, self.batch_invariant)


def awq_form(layer: Any, bits: int, group_size: int) -> Form | str:
    """How a layer of AWQ is stored, or why it cannot be packed."""
    if bits != 4:
        return f"AWQ codes have {bits} bits; supported are 4"

    def read() -> QuantizedWeight:
        parts = (layer.qweight.data, layer.scales.data, layer.qzeros.data)
        return stored_weight(*parts, 4, group_size, columns_first=True, awq=True)

    return Form(group_size, False, ("qweight", "scales", "qzeros"), read, amx=True)
