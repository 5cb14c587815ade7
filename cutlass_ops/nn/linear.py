"""A linear layer over a packed weight, the replacement of a model's linear layers by it, and layers
that share one launch.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .. import _C, reference
from ..ops import gemm
from ..weights import formats
from ..weights.eights import gate_first
from ..weights.packed_weight import PackedWeight
from ..weights.reorder import join_gated, reorder
from ..weights.weight import rows_of
from .architecture import features
from .buffers import PackedState, WeightBuffers
from .conv import MixedConv
from .conv import MixedConv1d as MixedConv1d
from .conv import MixedConv2d as MixedConv2d
from .conv import MixedConv3d as MixedConv3d
from .embedding import MixedEmbedding as MixedEmbedding
from .embedding import TiedEmbedding as TiedEmbedding
from .experts import MixedExperts as MixedExperts
from .gated_mlp import GatedForm, become_gated, gated_form
from .quantizer_module import quantizer_module

_ACT_QUANT = ("none", "token", "block")

#: Layers with one parent that multiply the same x, by the name of the fused layer. These are the
#: names in the attention and the MLP of transformers' Llama, Qwen and Mistral models.
SHARED_INPUT = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class MixedLinear(WeightBuffers):
    """``y = act(x @ W.T + bias)`` with ``W`` packed: :func:`cutlass_ops.mixed_gemm` as a module.
    With a gated weight it is ``act(x @ gate.T + bias of gate) * (x @ up.T + bias of up)``.

    The packed tensors are buffers, so ``state_dict``, ``.to(device)`` and ``.cuda()`` treat them as
    any other. They keep their dtypes under ``.half()`` and ``.to(dtype)``: scales are part of the
    checkpoint, not of the computation. The product always uses the present buffers: a buffer may be
    written to, or replaced by a tensor of the same shape, by assignment,
    ``torch.func.functional_call`` or offloading hooks. ``bias`` may become None, or a tensor.

    Training: the output is differentiable in x, and the weight and its bias are frozen (see
    :func:`cutlass_ops.mixed_gemm`). There is no ``weight`` attribute; :meth:`dequantize` returns
    its values. torch.compile and torch.export record the layer, torch.jit refuses it.

    Attributes:
        in_features, out_features: K and N.
        act_quant: how x is quantised: "none", "token" or "block".
        act_symmetric: whether quantised activations have no zero point. Unused with "none". A layer
            that is made with False keeps its weight's column sums on Hopper, 4 bytes for 128
            weights (:meth:`cutlass_ops.PackedWeight.sum_codes`).
        activation: as in :func:`cutlass_ops.mixed_gemm`; applied after the bias.
        shared_by: names of the siblings whose work this layer does, and which alone call it
            (:func:`fuse_linears`); or none.

    Raises:
        TypeError: a weight that is not packed.
        ValueError: an ``act_quant`` that does not exist.
    """

    #: The codes that replaced the packed weight's, as of the last call.
    _other_codes: weakref.ref[Tensor] | None = None

    def __init__(
        self,
        packed: PackedWeight,
        act_quant: str = "none",
        act_symmetric: bool = True,
        activation: str | tuple[str, float, float] | None = None,
    ) -> None:
        super().__init__(packed)
        if act_quant not in _ACT_QUANT:
            raise ValueError(
                f"act_quant is {act_quant!r}; supported are {', '.join(map(repr, _ACT_QUANT))}"
            )
        if packed.kernel_size:
            raise ValueError(reference.CONVOLUTION.format(packed.kernel_size))
        self.out_features, self.in_features = packed.shape
        self.act_quant = act_quant
        self.act_symmetric = act_symmetric
        self.activation = activation
        self.shared_by: tuple[str, ...] = ()
        self._keep_sums()

    def view_buffers(self) -> None:
        """As its base class has it; and keep the column sums of a weight whose activations
        have zero points.
        """
        packed = self._packed
        super().view_buffers()
        # Captured graphs may read the sums, which must be those of the loaded tensors.
        self._packed.share_sums(packed)
        self._keep_sums()

    def _keep_sums(self) -> None:
        if self.act_quant != "none" and not self.act_symmetric:
            self._packed.sum_codes()

    @property
    def packed(self) -> PackedWeight:
        """The weight as this layer's buffers hold it now; it shares their memory.

        Raises:
            TypeError, ValueError: a buffer was replaced by one that does not fit; the
                message has the name.
        """
        buffers, packed = self._buffers, self._packed
        try:
            if (
                buffers["codes"] is packed.codes
                and buffers["scales"] is packed.scales
                and buffers["zeros"] is packed.zeros
                and buffers["offsets"] is packed.offsets
                and buffers["bias"] is packed.bias
                and buffers["perm"] is packed.perm
                and buffers["book"] is packed.book
            ):
                return packed
        except KeyError:  # a parameter was assigned to a buffer's name, or it was deleted
            pass
        found = self._from_buffers()
        if is_dynamo_compiling():  # traced tensors are not kept
            return found
        found.share_sums(packed)
        # An offloading hook brings new codes for each call, which must not be kept alive.
        known = None if self._other_codes is None else self._other_codes()
        if found.codes is packed.codes or found.codes is known:
            self._packed = found
        else:
            self._other_codes = weakref.ref(found.codes)
        return found

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles; weak references cannot be pickled.
        return {name: value for name, value in self.__dict__.items() if name != "_other_codes"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module: Any = super()  # torch has no types here
        module.__setstate__(state)
        self._keep_sums()

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError(
            f"{type(self).__name__} cannot be scripted by torch.jit.script; use "
            "torch.compile or torch.export"
        )

    def state_format(self) -> dict[str, Any]:
        """The base class's format, and whether the weight is gated."""
        form = super().state_format()
        if not self._packed.gated:
            return form
        return {**form, "layout_version": formats.GATED_VERSION, "gated": True}

    def forward(self, x: Tensor, factors: bool = False) -> Tensor:
        """Multiply x ``[..., K]`` by the weight; returns ``[..., N]`` of x's dtype.

        Args:
            x: fp16, bf16 or fp32.
            factors: of a gated weight, return ``[..., 2 * N]``: the sums of gate and then those of
                up, with their biases, before the activation.

        Raises:
            TypeError, ValueError: x or a replaced buffer does not fit; the message has its value.
            RuntimeError: as in :func:`cutlass_ops.mixed_gemm`.
        """
        packed, act_quant, act_symmetric = self._packed, self.act_quant, self.act_symmetric
        if factors:
            options = (None, None, act_quant, act_symmetric)
            return gate_first(gemm.mixed_gemm(x, self.packed.eights, *options), x.dim() - 1)
        if self.activation is None and not is_dynamo_compiling():
            # As in mixed_gemm, with the present buffers.
            if not act_symmetric:
                packed.check_sums()
            buffers = self._buffers
            product: Tensor | None = _C.product(packed, x, act_quant, act_symmetric, buffers)
            if product is not None:
                return product
        return gemm.mixed_gemm(x, self.packed, None, self.activation, act_quant, act_symmetric)

    def extra_repr(self) -> str:
        """Sizes, format and activation mode, as ``print(model)`` shows them."""
        kind = next(
            (name for name in ("zeros", "offsets", "book") if getattr(self, name) is not None),
            "symmetric",
        )
        parts = [
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}",
            f"bits={self._packed.bits}, group_size={self._packed.group_size}, {kind}, "
            f"act_quant={self.act_quant!r}",
        ]
        if self.act_quant != "none":
            parts.append(f"act_symmetric={self.act_symmetric}")
        if self.activation is not None:
            parts.append(f"activation={self.activation!r}")
        if self._packed.gated:
            parts.append("gated=True")
        return ", ".join(parts)


def replace_linears(
    model: nn.Module,
    packed: Mapping[str, PackedWeight],
    act_quant: str = "none",
    act_symmetric: bool = True,
) -> list[str]:
    """Put a :class:`MixedLinear` in the place of each linear layer that ``packed`` names.

    A layer's own bias is kept where the packed weight has none. Every name is checked before
    the first layer is replaced, so that an error leaves the model as it was. A packed weight
    stays on its device; move the model after. :func:`fuse_linears` then joins the layers that
    multiply the same x.

    The configuration of a model of transformers or diffusers names its packed layers, so that
    ``from_pretrained`` reads what ``save_pretrained`` writes; :func:`load_model` reads the former.

    Args:
        model: any module; changed in place.
        packed: weights by the layer's qualified name, as in ``model.named_modules()``:
            "model.layers.0.mlp.up_proj".
        act_quant, act_symmetric: as in :class:`MixedLinear`.

    Returns:
        The replaced names, in the order of ``packed``.

    Raises:
        ValueError: a name that the model does not have, a weight of another shape than the layer's,
            or a model of transformers or diffusers that another method quantised.
        TypeError: a named module that is neither ``torch.nn.Linear`` nor transformers' Conv1D, or a
            value that is not a PackedWeight.
    """
    quantizer = quantizer_module(model)
    modules = dict(model.named_modules())
    layers: dict[str, MixedLinear] = {}
    for name, weight in packed.items():
        if not isinstance(weight, PackedWeight):
            raise TypeError(
                f"{name!r}: the weight is a {type(weight).__name__}; a PackedWeight is expected"
            )
        weight.check_plain("replace_linears")
        linear = modules.get(name)
        if not name or linear is None:
            raise ValueError(f"{name!r}: the model has no module of that name inside it")
        if (shape := features(linear)) is None:
            raise TypeError(
                f"{name!r}: the module is a {type(linear).__name__}; torch.nn.Linear is expected"
            )
        if weight.shape != shape:
            raise ValueError(
                f"{name!r}: the packed weight is {list(weight.shape)}; the layer is {list(shape)}"
            )
        bias: Tensor | None = linear.bias
        if weight.bias is None and bias is not None:
            weight = replace(weight, bias=bias.detach().to(weight.device))
        layers[name] = MixedLinear(weight, act_quant, act_symmetric)
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        layer.train(modules[name].training)
        setattr(modules[parent], child, layer)
    if quantizer is not None and layers:
        quantizer.attach(model)
    return list(layers)


def set_activations(model: nn.Module, act_quant: str, act_symmetric: bool = True) -> None:
    """Change how every :class:`MixedLinear`, :class:`MixedExperts` and :class:`MixedConv` of a
    model treats its activations.

    Raises:
        ValueError: an ``act_quant`` that does not exist.
    """
    if act_quant not in _ACT_QUANT:
        raise ValueError(
            f"act_quant is {act_quant!r}; supported are {', '.join(map(repr, _ACT_QUANT))}"
        )
    for module in model.modules():
        if isinstance(module, MixedLinear | MixedExperts | MixedConv):
            module.act_quant, module.act_symmetric = act_quant, act_symmetric


# ---- layers that share x


class _Shared:
    """A layer that does the work of several layers, and its last result, of which each layer takes
    its part once.
    """

    layer: MixedLinear
    sizes: list[int]
    biased: list[bool]
    last: tuple[tuple[Tensor | None, ...], tuple[Any, ...], list[Tensor | None]] | None = None

    def __init__(self, layer: MixedLinear, sizes: Sequence[int], biased: Sequence[bool]) -> None:
        self.layer = layer
        self.sizes = list(sizes)
        self.biased = list(biased)

    def part(self, index: int, x: Tensor) -> Tensor:
        last, state = self.last, self._state(x)
        kept = (
            last is not None
            and all(map(operator.is_, last[0], self._tensors(x)))
            and last[1] == state
        )
        parts = last[2] if last is not None and kept else []
        y = parts[index] if kept else None
        if y is None:
            whole = self.layer(x, factors=True) if self.layer._packed.gated else self.layer(x)
            # One view each, so that each may be written to while gradients are recorded.
            starts = (sum(self.sizes[:i]) for i in range(len(self.sizes)))
            views = [
                whole.narrow(-1, start, size)
                for start, size in zip(starts, self.sizes, strict=True)
            ]
            # Hooks of the layer may have moved the weight.
            parts, y, state = [*views], views[index], self._state(x)
        parts[index] = None
        # Nothing is kept once all have their parts.
        self.last = (
            (self._tensors(x), state, parts) if any(part is not None for part in parts) else None
        )
        return y

    def _tensors(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """The input of a result."""
        return (x,) if torch.compiler.is_compiling() else (x, *self.layer._buffers.values())

    def _state(self, x: Tensor) -> tuple[Any, ...]:
        """The other things that a result depends on."""
        if torch.compiler.is_compiling():
            return ()
        layer, kind = self.layer, x.device.type
        tensors = (x, *(t for t in layer._buffers.values() if t is not None))
        return (
            # Inference tensors do not count in-place writes.
            [None if t.is_inference() else t._version for t in tensors],
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled() and x.requires_grad,
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            (layer.act_quant, layer.act_symmetric, layer.activation),
        )

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles begin without a result.
        return {"layer": self.layer, "sizes": self.sizes, "biased": self.biased}


class FusedPart(PackedState):
    """A linear layer whose work another one does, together with that of its siblings; made by
    :func:`fuse_linears`.

    The first sibling that is called with an x multiplies x by the weights of all; the others, when
    they are called with that same tensor, take their columns of the result. Called in another
    order, or alone, each still returns the right values, at the price of a product of all. In
    inference mode and in a compiled function x must not be written to between the siblings' calls.
    The parts are differentiable in x as :class:`MixedLinear` is, in one graph: calls of
    ``backward`` for one part after the other need ``retain_graph=True``.

    Attributes:
        in_features, out_features: of this part.
    """

    def __init__(self, shared: _Shared, index: int) -> None:
        super().__init__()
        # No submodule: the parent has the shared layer, once, for moves and state_dict.
        self._shared = shared
        self._index = index
        self.in_features, self.out_features = shared.layer.in_features, shared.sizes[index]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x ``[..., K]`` by this part of the weight; returns a view ``[..., N]`` of
        the shared result.
        """
        return self._shared.part(self._index, x)

    def marks(self) -> dict[str, dict[str, Any]]:
        """One mark, which says which rows of the shared layer's weight these are."""
        begin = sum(self._shared.sizes[: self._index])
        return {"weight": {"fused_rows": [begin, begin + self.out_features]}}

    @property
    def shared(self) -> MixedLinear:
        """The layer that does the work."""
        return self._shared.layer

    @property
    def has_bias(self) -> bool:
        """Whether this layer had a bias before it was fused."""
        return self._shared.biased[self._index]

    @property
    def packed(self) -> PackedWeight:
        """This part of the shared layer's weight: what the layer had before it was
        fused, bit for bit.
        """
        begin = sum(self._shared.sizes[: self._index])
        rows = _rows(self._shared.layer.packed, begin, begin + self.out_features)
        # Where only some parts had a bias, the others got one of -0.0.
        return rows if self.has_bias else replace(rows, bias=None)

    def extra_repr(self) -> str:
        """Sizes, as ``print(model)`` shows them."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


@dataclass(frozen=True)
class Fused:
    """What :func:`fuse_linears` did.

    Attributes:
        layers: qualified names of the new layers, with those of the layers whose work they do.
        refused: why others, which would have had these names, were left as they are.
    """

    layers: Mapping[str, tuple[str, ...]]
    refused: Mapping[str, str]


def fuse_linears(
    model: nn.Module, shared_input: Mapping[str, Sequence[str]] = SHARED_INPUT
) -> Fused:
    """Let one launch serve the layers of a model that multiply the same x: query, key and
    value; gate and up.

    Their weights are packed as one (:func:`cutlass_ops.reorder` of a list) in a
    :class:`MixedLinear` that the parent gets under a new name, and :class:`FusedPart` modules take
    their places, so that the model's code stays as it is. The values are those of the separate
    layers up to the order of fp32 sums.

    A parent that computes exactly ``down(activation(gate(x)) * up(x))``, as most MLPs of
    transformers do, becomes a :class:`GatedMLP`, if gate and up are the layers and their N is a
    multiple of 8. Its new layer has a gated weight, whose product is rounded once, where the
    model's code rounds gate's, the activation's and up's.
    ``state_dict`` has the new layer's tensors instead of the
    old ones'; ``save_pretrained`` of transformers' models writes the old ones', bit for bit.

    Layers are left alone, with the reason in the result, where one of them is no MixedLinear, or
    where they differ in something that one product must share: bits, group size, kind of zero
        point, act
    order, dtypes, device, treatment of x.

    Args:
        model: with layers of :func:`replace_linears`; changed in place.
        shared_input: names of layers with one parent that are always called with the same tensor,
            by the new layer's name.
    """
    layers: dict[str, tuple[str, ...]] = {}
    refused: dict[str, str] = {}
    for parent_name, parent in list(model.named_modules()):
        for new, children in shared_input.items():
            if not all(isinstance(getattr(parent, child, None), nn.Module) for child in children):
                continue
            name = f"{parent_name}.{new}" if parent_name else new
            parts = [getattr(parent, child) for child in children]
            reason = _reason_against(parent, new, dict(zip(children, parts, strict=True)))
            form = None if reason else _gated_form(parent, children, parts)
            if not reason:
                try:
                    packed = _as_one([part.packed for part in parts], gated=form is not None)
                except ValueError as error:
                    reason = str(error)
            if reason:
                refused[name] = reason
                continue
            first = parts[0]
            activation = form.activation if form else first.activation
            layer = MixedLinear(packed, first.act_quant, first.act_symmetric, activation)
            layer.train(first.training)
            layer.shared_by = tuple(children)
            shared = _Shared(
                layer,
                [part.out_features for part in parts],
                [part.bias is not None for part in parts],
            )
            setattr(parent, new, layer)
            for index, child in enumerate(children):
                setattr(parent, child, FusedPart(shared, index).train(first.training))
            if form:
                become_gated(parent, form, new)
            layers[name] = tuple(
                f"{parent_name}.{child}" if parent_name else child for child in children
            )
    return Fused(layers, refused)


def _rows(weight: PackedWeight, begin: int, end: int) -> PackedWeight:
    """Rows ``begin`` to ``end`` of the weight before packing: views where they are whole row
    panels.
    """
    in_panels = begin % formats.ROWS_PER_PANEL == 0 and (
        end % formats.ROWS_PER_PANEL == 0 or end == weight.n
    )
    if weight.gated or not in_panels:
        return reorder(rows_of(weight.unpack(), slice(begin, end)))
    return weight.row_panels(begin, end)


def _gated_form(
    parent: nn.Module, children: Sequence[str], parts: Sequence[MixedLinear]
) -> GatedForm | None:
    """The form of a parent that uses two layers as gate and up, if their weights can be packed as
    gated; else None.
    """
    if len(parts) != 2 or parts[0].activation is not None:
        return None
    sizes = {part.out_features for part in parts}
    if len(sizes) != 1 or parts[0].out_features % formats.GATED_ROWS:
        return None
    return gated_form(parent, *children)


def _as_one(weights: Sequence[PackedWeight], gated: bool) -> PackedWeight:
    """What :func:`cutlass_ops.reorder` makes of the list of canonical weights; ValueError if they
    cannot be packed as one.
    """
    first = weights[0]
    dtypes = {part: tensor.dtype for part, tensor in first.tensors().items()}
    alike = all(
        (w.k, w.bits, w.group_size, w.device)
        == (first.k, first.bits, first.group_size, first.device)
        and {part: tensor.dtype for part, tensor in w.tensors().items()} == dtypes
        and all(
            torch.equal(getattr(w, part), getattr(first, part))
            for part in ("perm", "book")
            if part in dtypes
        )
        for w in weights
    )
    if gated:
        return join_gated(*weights) if alike else reorder([w.unpack() for w in weights], gated=True)
    # Row panels are the outermost order, so whole ones need not be unpacked.
    if not alike or any(w.n % formats.ROWS_PER_PANEL for w in weights[:-1]):
        return reorder([w.unpack() for w in weights])
    joined: dict[str, Any] = {
        part: torch.cat([getattr(w, part) for w in weights], dim=-1)
        for part in dtypes
        if part not in ("perm", "book")
    }
    return replace(first, n=sum(w.n for w in weights), **joined)


def _reason_against(parent: nn.Module, new: str, parts: Mapping[str, nn.Module]) -> str:
    """Why these layers cannot be fused, apart from their weights; "" if they can."""
    if hasattr(parent, new):
        return f"its parent has a {new} already"
    for name, part in parts.items():
        if not isinstance(part, MixedLinear):
            return f"{name} is a {type(part).__name__}; a MixedLinear is expected"
        if part._packed.gated:
            return f"{name} has a gated weight"
        if part.codes.is_meta:
            return f"{name} is offloaded: its tensors are not in memory"
    options = {
        name: (part.act_quant, part.act_symmetric, part.activation) for name, part in parts.items()
    }
    if len(set(options.values())) > 1:
        return f"act_quant, act_symmetric and activation differ: {options}"
    return ""
