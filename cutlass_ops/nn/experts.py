"""A layer of experts over packed weights, in the place of transformers' experts modules."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..ops import native
from ..ops.experts import check_down, mixed_moe
from ..reference.experts import check_gate
from ..weights.packed_experts import PackedExperts, in_eights
from ..weights.weight import PARTS
from .buffers import PackedBuffers, PackedState, read_mark


class ExpertWeights(PackedBuffers):
    """The weights of one product of :class:`MixedExperts`: their tensors as buffers, which
    keep their dtypes.

    Raises:
        TypeError: weights that are not packed.
    """

    _packed: PackedExperts

    def __init__(self, packed: PackedExperts) -> None:
        super().__init__()
        if not isinstance(packed, PackedExperts):
            raise TypeError(
                f"packed is a {type(packed).__name__}; PackedExperts (see "
                "cutlass_ops.reorder_experts) are expected"
            )
        tensors = packed.tensors()
        for name in PARTS:
            self.register_buffer(name, tensors.get(name))
        self._packed = packed

    @property
    def packed(self) -> PackedExperts:
        """The weights as the buffers hold them now; they share their memory.

        Raises:
            TypeError, ValueError: a buffer was replaced by one that does not fit; the
                message has the name.
        """
        kept = self._packed
        if self._buffers["perm"] is kept.perm and all(
            self._buffers[part] is getattr(kept.weight, part) for part in PARTS if part != "perm"
        ):
            return kept
        return self._from_buffers()

    def put_in_eights(self) -> None:
        """Bring the rows of gate and up, which the buffers hold in the order of earlier versions,
        into that of ``gated``.
        """
        self._packed = in_eights(replace(self.packed, gated=False))
        self._buffers.update(self._packed.tensors())

    def marks(self) -> dict[str, dict[str, Any]]:
        """None: :class:`MixedExperts` writes the marks, as transformers' experts modules
        own the parameters.
        """
        return {}

    def _from_buffers(self) -> PackedExperts:
        e, n, k = self._packed.shape
        packed = self._packed
        return PackedExperts.of_parts(
            dict(self._buffers), e, n, k, packed.bits, packed.group_size, packed.gated
        )

    def state_format(self) -> dict[str, Any]:
        """The format of other weights, and whether rows are of gate and up in eights."""
        return {**super().state_format(), "gated": self._packed.gated}

    def forward(self) -> PackedExperts:
        """:attr:`packed`; called as a module, so that hooks that bring offloaded tensors run."""
        return self.packed

    def extra_repr(self) -> str:
        """Sizes and format, as ``print(model)`` shows them."""
        kind = next(
            (name for name in ("zeros", "offsets", "book") if self._buffers[name] is not None),
            "symmetric",
        )
        experts, n, k = self._packed.shape
        return (
            f"experts={experts}, out_features={n}, in_features={k}, "
            f"bits={self._packed.bits}, group_size={self._packed.group_size}, {kind}"
        )


class MixedExperts(PackedState):
    """The experts of a layer with packed weights: :func:`cutlass_ops.mixed_moe` as a module.

    It takes the place of the experts modules of transformers 5 whose experts compute
    ``down(act(gate(x)) * up(x))``, as those of Mixtral, Qwen3-MoE and DeepSeek-V3, and of
    gpt-oss's. The packed tensors, biases among them, are buffers of the children ``gate_up_proj``
    and ``down_proj``.

    Attributes:
        num_experts, hidden_dim, intermediate_dim: E, H and I.
        activation: as in :func:`cutlass_ops.mixed_moe`.
        act_quant: how activations are quantised: "none", "token" or "block".
        act_symmetric: whether quantised activations have no zero point. Unused with "none".

    Args:
        gate_up: ``[E, 2 * I, H]``. If it was packed without ``gated=True``, the module holds a
            copy in that order.
        down: ``[E, H, I]``.

    Raises:
        TypeError: weights that are not packed.
        ValueError: weights whose shapes do not fit each other, ``down`` packed with ``gated=True``,
            or an option that does not exist.
    """

    gate_up_proj: ExpertWeights
    down_proj: ExpertWeights

    def __init__(
        self,
        gate_up: PackedExperts,
        down: PackedExperts,
        activation: reference.Activation = "silu",
        act_quant: str = "none",
        act_symmetric: bool = True,
    ) -> None:
        super().__init__()
        if act_quant not in native.ACT_QUANT:
            raise ValueError(
                f"act_quant is {act_quant!r}; supported are "
                f"{', '.join(map(repr, native.ACT_QUANT))}"
            )
        check_gate(activation)
        self.gate_up_proj, self.down_proj = ExpertWeights(gate_up), ExpertWeights(down)
        self.num_experts, self.hidden_dim, self.intermediate_dim = down.shape
        if gate_up.shape != (self.num_experts, 2 * self.intermediate_dim, self.hidden_dim):
            raise ValueError(
                f"gate_up is {list(gate_up.shape)} and down {list(down.shape)}; [E, 2 * I, H] and "
                "[E, H, I] are expected"
            )
        check_down(down)
        if not gate_up.gated:
            self.gate_up_proj = ExpertWeights(in_eights(gate_up))
        self.activation = activation
        self.act_quant = act_quant
        self.act_symmetric = act_symmetric

    def marks(self) -> dict[str, dict[str, Any]]:
        """One mark for each product's weights."""
        return {name: getattr(self, name).state_format() for name in ("gate_up_proj", "down_proj")}

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any
    ) -> None:
        for name, form in self.marks().items():
            mark = state_dict.get(f"{prefix}{name}")
            # Marks of earlier versions do not say "gated", and their rows of gate come
            # before those of up.
            if mark is None or read_mark(mark) != {
                key: value for key, value in form.items() if key != "gated"
            }:
                continue
            del state_dict[f"{prefix}{name}"]
            if form["gated"]:
                own = getattr(self, name).packed
                parts = {part: state_dict.get(f"{prefix}{name}.{part}") for part in PARTS}
                e, n, k = own.shape
                packed = in_eights(PackedExperts.of_parts(parts, e, n, k, own.bits, own.group_size))
                state_dict.update(
                    {f"{prefix}{name}.{part}": tensor for part, tensor in packed.tensors().items()}
                )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send each token through its experts and add up what they return, by weight.

        Args:
            hidden_states: ``[M, H]``.
            top_k_index: integers ``[M, top]``: each token's experts. E, by which transformers marks
                the experts of other ranks, and -1 add nothing.
            top_k_weights: floating ``[M, top]``.

        Returns:
            ``[M, H]`` of the dtype of ``hidden_states``.

        Raises:
            TypeError, ValueError, RuntimeError: as in :func:`cutlass_ops.mixed_moe`.
        """
        ids = top_k_index.to(torch.int64)
        ids = ids.where(ids != self.num_experts, -1)
        gate_up, down = self.gate_up_proj(), self.down_proj()
        options = (self.activation, self.act_quant, self.act_symmetric)
        return mixed_moe(hidden_states, gate_up, down, ids, top_k_weights, *options)

    def extra_repr(self) -> str:
        """Activation and treatment of x, as ``print(model)`` shows them."""
        symmetric = "" if self.act_quant == "none" else f", act_symmetric={self.act_symmetric}"
        return f"activation={self.activation!r}, act_quant={self.act_quant!r}{symmetric}"
