"""Convolution layers over packed weights, and the replacement of a model's convolutions by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from .. import reference
from ..ops.conv import ACT_QUANT, Extents, check_geometry, mixed_conv1d, mixed_conv2d, mixed_conv3d
from ..weights.packed_weight import PackedWeight
from .buffers import WeightBuffers
from .quantizer_module import quantizer_module


class MixedConv(WeightBuffers):
    """What :class:`MixedConv1d`, :class:`MixedConv2d` and :class:`MixedConv3d` share.

    The packed tensors are buffers, so ``state_dict``, ``.to(device)`` and ``.cuda()`` treat them as
    any other. They keep their dtypes under ``.half()`` and ``.to(dtype)``: scales are part of the
    checkpoint, not of the computation. A buffer may be replaced by a tensor of the same shape.

    Attributes:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups: as in
            ``torch.nn.Conv2d``.
        act_quant: how x is quantised: "none", "token", "block" or "tensor".
        act_symmetric: whether quantised activations have no zero point. Unused with "none".
        activation: as in :func:`cutlass_ops.mixed_gemm`; applied after the bias.

    Args:
        packed: the weight.
        stride, padding, dilation, groups, act_quant, act_symmetric, activation: as in
            :func:`cutlass_ops.mixed_conv2d`.

    Raises:
        TypeError: a weight that is not packed.
        ValueError: a weight whose kernel has another number of dimensions, or an option
            that does not exist.
    """

    #: Dimensions of space, and the function that computes.
    _dims: ClassVar[int]
    _convolve: ClassVar[Callable[..., Tensor]]

    def __init__(
        self,
        packed: PackedWeight,
        stride: Extents = 1,
        padding: Extents = 0,
        dilation: Extents = 1,
        groups: int = 1,
        act_quant: str = "none",
        act_symmetric: bool = True,
        activation: reference.Activation = None,
    ) -> None:
        super().__init__(packed)
        if len(packed.kernel_size) != self._dims:
            raise ValueError(
                f"the weight's kernel_size is {packed.kernel_size}; {type(self).__name__} takes "
                f"one of {self._dims} dimensions"
            )
        if act_quant not in ACT_QUANT:
            raise ValueError(
                f"act_quant is {act_quant!r}; supported are {', '.join(map(repr, ACT_QUANT))}"
            )
        reference.check_activation(activation)
        geometry = check_geometry(packed.kernel_size, packed.n, stride, padding, dilation, groups)
        self.stride, self.padding, self.dilation, self.groups = geometry
        self.in_channels, self.out_channels = packed.k // packed.taps * groups, packed.n
        self.kernel_size = packed.kernel_size
        self.act_quant = act_quant
        self.act_symmetric = act_symmetric
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x ``[B, in_channels, *space]``; returns ``[B, out_channels, *out]`` of x's
        dtype, channels last in memory.

        Raises:
            TypeError, ValueError: x or a replaced buffer does not fit; the message has its value.
            RuntimeError: as in :func:`cutlass_ops.mixed_conv2d`.
        """
        return type(self)._convolve(
            x,
            self.packed,
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            activation=self.activation,
            act_quant=self.act_quant,
            act_symmetric=self.act_symmetric,
        )

    def extra_repr(self) -> str:
        """Sizes, format and activation mode, as ``print(model)`` shows them."""
        kind = next(
            (name for name in ("zeros", "offsets", "book") if getattr(self, name) is not None),
            "symmetric",
        )
        parts = [
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, "
            f"bias={self.bias is not None}",
            f"bits={self._packed.bits}, group_size={self._packed.group_size}, {kind}, "
            f"act_quant={self.act_quant!r}",
        ]
        if self.act_quant != "none":
            parts.append(f"act_symmetric={self.act_symmetric}")
        if self.activation is not None:
            parts.append(f"activation={self.activation!r}")
        return ", ".join(parts)


class MixedConv1d(MixedConv):
    """:func:`cutlass_ops.mixed_conv1d` as a module; see :class:`MixedConv`."""

    _dims = 1
    _convolve = mixed_conv1d


class MixedConv2d(MixedConv):
    """:func:`cutlass_ops.mixed_conv2d` as a module; see :class:`MixedConv`."""

    _dims = 2
    _convolve = mixed_conv2d


class MixedConv3d(MixedConv):
    """:func:`cutlass_ops.mixed_conv3d` as a module; see :class:`MixedConv`."""

    _dims = 3
    _convolve = mixed_conv3d


_LAYERS: dict[type[Any], type[MixedConv]] = {
    nn.Conv1d: MixedConv1d,
    nn.Conv2d: MixedConv2d,
    nn.Conv3d: MixedConv3d,
}
#: The convolutions that can be packed.
CONVOLUTIONS = tuple(_LAYERS)


def mixed_conv(conv: Any, packed: PackedWeight, act_quant: str, act_symmetric: bool) -> MixedConv:
    """The packed layer for one of torch's convolutions, with this weight.

    Raises:
        ValueError: a padding that :func:`cutlass_ops.mixed_conv2d` does not have.
    """
    layer = next(layer for kind, layer in _LAYERS.items() if isinstance(conv, kind))
    return layer(
        packed, conv.stride, padding_of(conv), conv.dilation, conv.groups, act_quant, act_symmetric
    )


def replace_convs(
    model: nn.Module,
    packed: Mapping[str, PackedWeight],
    act_quant: str = "none",
    act_symmetric: bool = True,
) -> list[str]:
    """Put a :class:`MixedConv` in the place of each convolution that ``packed`` names.

    A layer's own bias is kept where the packed weight has none. Every name is checked before the
    first layer is replaced, so that an error leaves the model as it was. A packed weight stays on
    its device; move the model after. Models of transformers and diffusers are saved and loaded with
    their packed convolutions.

    Args:
        model: any module; changed in place.
        packed: weights by the layer's qualified name, as in ``model.named_modules()``.
        act_quant, act_symmetric: as in :class:`MixedConv`.

    Returns:
        The replaced names, in the order of ``packed``.

    Raises:
        ValueError: a name that the model does not have, a weight of another shape than the layer's,
            or a padding that :func:`cutlass_ops.mixed_conv2d` does not have: of another mode than
            "zeros", or "same" where that is not the same on both sides; a model of transformers or
            diffusers that another method quantised, or whose packed layers differ in ``act_quant``
            or ``act_symmetric`` once these are in place.
        TypeError: a named module that is no ``torch.nn.Conv1d``, ``Conv2d`` or ``Conv3d``, or a
            value that is not a PackedWeight.
    """
    quantizer = quantizer_module(model)
    modules = dict(model.named_modules())
    layers = {}
    for name, weight in packed.items():
        if not isinstance(weight, PackedWeight):
            raise TypeError(
                f"{name!r}: the weight is a {type(weight).__name__}; a PackedWeight is expected"
            )
        conv: Any = modules.get(name)
        if not name or conv is None:
            raise ValueError(f"{name!r}: the model has no module of that name inside it")
        if not isinstance(conv, CONVOLUTIONS):
            raise TypeError(
                f"{name!r}: the module is a {type(conv).__name__}; torch.nn.Conv1d, Conv2d or "
                "Conv3d is expected"
            )
        shape = [weight.n, weight.k // weight.taps, *weight.kernel_size]
        if shape != list(conv.weight.shape):
            raise ValueError(
                f"{name!r}: the packed weight is {shape}; the layer's is {list(conv.weight.shape)}"
            )
        if weight.bias is None and conv.bias is not None:
            weight = replace(weight, bias=conv.bias.detach().to(weight.device))
        try:
            layers[name] = mixed_conv(conv, weight, act_quant, act_symmetric)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from error
    for name, replacement in layers.items():
        parent, _, child = name.rpartition(".")
        replacement.train(modules[name].training)
        setattr(modules[parent], child, replacement)
    if layers and quantizer is not None:
        quantizer.attach(model)
    return list(layers)


def padding_of(conv: Any) -> tuple[int, ...]:
    """The padding of one of torch's convolutions, which may be "valid" or "same", in pixels.

    Raises:
        ValueError: one that :func:`cutlass_ops.mixed_conv2d` does not have.
    """
    if conv.padding_mode != "zeros":
        raise ValueError(f"padding_mode is {conv.padding_mode!r}; 'zeros' is supported")
    if conv.padding == "valid":
        return (0,) * len(conv.kernel_size)
    if conv.padding != "same":
        return tuple(conv.padding)
    missing = [
        dilation * (extent - 1)
        for dilation, extent in zip(conv.dilation, conv.kernel_size, strict=True)
    ]
    if any(pixels % 2 for pixels in missing):
        raise ValueError(
            f"padding is 'same' with kernel_size {conv.kernel_size} and dilation {conv.dilation}, "
            "which pads one side more "
            "than the other; the same on both is supported"
        )
    return tuple(pixels // 2 for pixels in missing)
