"""Mixed convolutions on a GPU: products whose rows of x are the pixels under the kernel, read from
the image without a tensor of them.

Depthwise convolutions, whose products would have one column a tap, have a kernel that sums in
registers. Those with one scale for x and one for each row of an int8 weight have the kernel of
static int8 convolutions. Where no kernel takes a convolution (few output channels a group, fp32 x
as it is, a scale for all groups and a result of another dtype than x), and where few channels would
leave much of the kernels' tiles empty, torch convolves the dequantised x with the dequantised
weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled

from .. import _C
from ..reference.conv import Geometry
from ..weights import formats
from ..weights.packed_weight import PackedWeight
from . import arguments, kept, native, natural_weight, products
from .call import Call
from .natural_weight import Natural

#: The alignment of pixels, in bytes, that copies need.
_VECTOR = 16
#: Channels of a tap and of the result are padded to multiples of this in the kernels' tiles.
_TILE_CHANNELS = 128
#: Below this used share of the tiles torch's convolution is faster: with 3 or 64 channels, and with
#: 320 of 320 and 960, it takes 1.0 to 1.3 times as long as with fp16 weights on an H100, and the
#: kernels 1.4 to 30 times. The share is smaller for int8, whose tiles take half as long and whose
#: codes torch needs as values, one more pass over x.
_LEAST_SHARE, _LEAST_INT8_SHARE = 0.8, 0.4
#: With fewer multiplications in the tiles the kernels are faster than torch's convolution and the
#: launches around it.
LEAST_TORCH_PRODUCTS = 8 * 10**9
_INT8_RESULTS = {torch.float16: _C.ConvOutput.float16, torch.bfloat16: _C.ConvOutput.bfloat16}
#: Launches that a weight keeps.
_MOST_LAUNCHES = 64


class Launch(NamedTuple):
    """One product that computes a whole convolution, without a copy of x.

    Attributes:
        problem, plan: with the pointers of the call that found them.
        bias: the address of the weight's bias, or 0.
        shape, dtype: of the result, channels last.
        natural, version: what was made of the weight's codes, and the version of these.
        matrix: the weight that the problem points to, if it is not ``natural``.
    """

    problem: _C.ImageProblem | _C.ConvProblem
    plan: _C.Plan | _C.ConvPlan
    bias: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    natural: Natural | None = None
    version: int = 0
    matrix: _C.PackedWeight | None = None


def repeat(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, call: tuple[Any, ...]
) -> tuple[Tensor | None, Any]:
    """The result of a convolution ``[B, *out, N]`` by the launch that an earlier call found: the
    checks and the choice of a kernel take several times as long.

    Args:
        call: the other arguments of the call.

    Returns:
        The result and None; or None and the key of this call in the weight's ``conv_launches``,
        None where torch's modes or the tensors are unusual.
    """
    if type(x) not in arguments.TENSORS or not arguments.runs_directly(x, bias):
        return None, None
    if arguments.modes_are_active() or arguments.any_autocast():
        return None, None
    if bias is not None and (bias.get_device() != weight.gpu or not bias.is_contiguous()):
        return None, None
    if is_grad_enabled():
        if x.requires_grad or (bias is not None and bias.requires_grad):
            return None, None
        arguments.check_frozen(weight)
    own = None if bias is None else (bias.dtype, bias.shape)
    key = (x.shape, x.stride(), x.dtype, x.get_device(), own, call)
    try:
        launch: Launch | None = weight.conv_launches.get(key)
    except TypeError:  # a list among the arguments
        return None, None
    start = x.data_ptr()
    if launch is None or start % _VECTOR or torch.cuda.current_device() != weight.gpu:
        return None, key
    if launch.natural is not None and launch.version != weight.codes._version:
        return None, key
    if launch.matrix is not None and not launch.matrix.is_current():
        return None, key
    weight.update_copies()
    y = torch.empty(launch.shape, dtype=launch.dtype, device=weight.device)
    address = launch.bias if bias is None else bias.data_ptr()
    _run(launch.problem, launch.plan, start, address, y)
    return y, None


def _run(
    problem: _C.ImageProblem | _C.ConvProblem,
    plan: _C.Plan | _C.ConvPlan,
    x: int,
    bias: int,
    y: Tensor,
) -> None:
    """Write the problem's result for x and bias at these addresses to y."""
    size = plan.workspace
    workspace = torch.empty(size, dtype=torch.uint8, device=y.device) if size else None
    run: Any = _C.mixed_conv if isinstance(problem, _C.ImageProblem) else _C.conv_int8
    run(
        problem,
        plan,
        x,
        bias,
        y.data_ptr(),
        native.pointer(workspace),
        native.current_stream(y.get_device()),
    )


def convolve(
    x: Tensor,
    weight: PackedWeight,
    geometry: Geometry,
    call: Call,
    key: Any = None,
) -> Tensor | None:
    """What :func:`cutlass_ops.reference.conv.mixed_conv` computes, ``[B, *out, N]``, or None if no
    kernel takes it.

    The call's residual is ``[B, *out, N]``. `key`: where the weight keeps the launch of this call,
    if it is one product (:func:`repeat`).
    """
    shape = (x.shape[0], *geometry.out(x.shape[2:], weight.kernel_size), weight.n)
    y = torch.empty(shape, dtype=call.out_dtype, device=x.device)
    if y.numel() == 0:
        return y
    if _by_int8(x, weight, geometry, y, call, key):
        return y
    share = _LEAST_SHARE if call.act_quant == "none" else _LEAST_INT8_SHARE
    if x.dtype == call.out_dtype and _is_narrow(weight, geometry, y.numel() // weight.n, share):
        return None
    call = _contiguous(call, weight)
    of_all_groups = geometry.groups > 1 and call.act_quant in ("token", "tensor")
    if weight.k > weight.taps and of_all_groups and x.dtype == call.out_dtype:
        # A scale covers the channels of all groups, but each group is a separate product: the
        # products take the dequantised values.
        x = dequantized_pixels(x, weight, geometry.groups, call, x.dtype)
        call = call._replace(act_quant="none")
    if weight.k == weight.taps:
        _depthwise(x, weight, geometry, y, call)
    elif not _by_products(x, weight, geometry, y, call, key):
        return None
    return y


def _contiguous(call: Call, weight: PackedWeight) -> Call:
    """The call with its bias, or else the weight's, and its residual as a matrix, as
    kernels read them.
    """
    bias = call.bias_of(weight)
    return call._replace(
        bias=None if bias is None else bias.contiguous(),
        residual=None if call.residual is None else native.row_matrix(call.residual),
    )


def _is_narrow(weight: PackedWeight, geometry: Geometry, pixels: int, share: float) -> bool:
    """Whether less than a share of the kernels' tiles would be products of the convolution, so that
    torch's own is faster.
    """
    channels, n = weight.k // weight.taps, weight.n // geometry.groups
    in_tiles = (
        -(-channels // _TILE_CHANNELS) * _TILE_CHANNELS * -(-n // _TILE_CHANNELS) * _TILE_CHANNELS
    )
    large = pixels * geometry.groups * weight.taps * in_tiles >= LEAST_TORCH_PRODUCTS
    return large and min(channels, weight.taps) > 1 and channels * n < share * in_tiles


def dequantized_pixels(
    x: Tensor, weight: PackedWeight, groups: int, call: Call, dtype: torch.dtype
) -> Tensor:
    """:func:`cutlass_ops.reference.conv.dequantized_pixels`' values, rounded to a dtype, with the
    channels last in memory.
    """
    images = x.permute(0, *range(2, x.dim()), 1).contiguous()
    values = torch.empty(images.shape, dtype=dtype, device=x.device)
    columns = x.shape[1] if call.act_quant == "token" else x.shape[1] // groups
    block = formats.activation_block(weight.group_size) if call.act_quant == "block" else -1
    span = (
        torch.empty(2, dtype=torch.int32, device=x.device) if call.act_quant == "tensor" else None
    )
    types = native.DATA_TYPES[x.dtype], native.DATA_TYPES[dtype]
    rows = x.numel() // columns
    with native.on_device(weight.device):
        stream = native.current_stream(weight.gpu)
        _C.quantized_values(
            images.data_ptr(),
            values.data_ptr(),
            *types,
            rows,
            columns,
            block,
            call.act_symmetric,
            native.pointer(span),
            stream,
        )
    return values.movedim(-1, 1)


def finish(sums: Tensor, weight: PackedWeight, call: Call) -> None:
    """Bias, activation and residual for torch's 16-bit sums ``[B, *out, N]``, in place.

    As in the kernels, sums that are not finite become NaN if any of the three is applied.
    """
    call = _contiguous(call, weight)
    epilogue = call.epilogue(call.bias, call.residual)
    if epilogue is None:
        return
    pixels = sums.view(-1, 1, 1, 1, weight.n)
    unit = Geometry((1, 1, 1), (0, 0, 0), (1, 1, 1), 1)
    problem = _problem(pixels, 0, weight.matrix, weight.matrix, unit, pixels, epilogue)
    with native.on_device(weight.device):
        _C.finish_sums(problem, sums.data_ptr(), native.current_stream(weight.gpu))


def _three(extents: tuple[int, ...] | list[int], filling: int) -> list[int]:
    """Depth, height and width."""
    return [filling] * (3 - len(extents)) + list(extents)


def _pixels(x: Tensor, groups: int, pads: bool) -> Tensor:
    """x with its channels last, ``[B, *space, groups * C]``; if ``pads``, with zeros behind a
    group's up to whole vectors.
    """
    images = x.permute(0, *range(2, x.dim()), 1)
    missing = -(x.shape[1] // groups) % (_VECTOR // x.element_size()) if pads else 0
    if missing:
        # F.pad() of four or five dimensions keeps a memory order in which the channels are not
        # last.
        images = (
            F.pad(images.view(*images.shape[:-1], groups, -1), (0, missing))
            .contiguous()
            .flatten(-2)
        )
    images = images.contiguous()
    return images.clone() if images.data_ptr() % _VECTOR else images


def _first(pixels: Tensor, group: int, groups: int) -> int:
    """The address of a group's first channel in the first pixel."""
    return pixels.data_ptr() + group * (pixels.shape[-1] // groups) * pixels.element_size()


def _problem(
    pixels: Tensor,
    group: int,
    weight: PackedWeight,
    matrix: PackedWeight,
    geometry: Geometry,
    y: Tensor,
    epilogue: _C.Epilogue | None,
    act_quant: str = "none",
    act_symmetric: bool = True,
) -> _C.ImageProblem:
    """One of the groups of :func:`_pixels`, convolved with its rows ``matrix`` of the weight."""
    batch, *space, of_groups = pixels.shape
    channels = of_groups // geometry.groups
    return _C.ImageProblem(
        matrix.native,
        _first(pixels, group, geometry.groups),
        native.DATA_TYPES[pixels.dtype],
        of_groups,
        batch,
        channels,
        _three(space, 1),
        _three(weight.kernel_size, 1),
        _three(y.shape[1:-1], 1),
        _three(geometry.stride, 1),
        _three(geometry.padding, 0),
        _three(geometry.dilation, 1),
        native.CONV_ACT_QUANT[act_quant],
        act_symmetric,
        epilogue,
        y.data_ptr(),
        native.DATA_TYPES[y.dtype],
    )


def _depthwise(x: Tensor, weight: PackedWeight, geometry: Geometry, y: Tensor, call: Call) -> None:
    """Write the result to y; each group of the convolution has one input channel."""
    if call.act_quant != "none":
        x = dequantized_pixels(x, weight, geometry.groups, call, torch.float32)
    pixels = _pixels(x, geometry.groups, False)
    epilogue = call.epilogue(call.bias, call.residual)
    # A code book's values are rounded to x's dtype.
    book_type = None if weight.book is None else x.dtype
    name = ("taps", weight.n, weight.kernel_size, weight.group_size, book_type)
    with native.on_device(weight.device):
        parts = ("scales", "zeros", "offsets", "book")
        (taps,) = kept.form(weight, parts, name, lambda: _tap_values(weight, book_type))
        problem = _problem(pixels, 0, weight, weight, geometry, y, epilogue)
        _C.depthwise_conv(problem, taps.data_ptr(), native.current_stream(weight.gpu))


def _tap_values(weight: PackedWeight, book_type: torch.dtype | None) -> tuple[Tensor]:
    """The values of a depthwise weight, fp32 ``[taps, N]``, with zeros behind them up
    to whole vectors.
    """
    weight = weight if book_type is None else products.rounded_book(weight, book_type)
    values = products.run_dequantize(weight, torch.float32).view(weight.n, weight.taps)
    return (F.pad(values.t(), (0, -weight.n % _C.tap_vector)).contiguous(),)


def _is_faster_by_int8(weight: PackedWeight, symmetric: bool) -> bool:
    """Whether the kernel of int8 convolutions is faster than products, where both take it.

    A product of one tap and one tile of channels quantises x as it reads it, if x has no zero
    points, and writes no codes.
    """
    return not symmetric or weight.taps > 1 or weight.n > _TILE_CHANNELS


def _by_int8(
    x: Tensor, weight: PackedWeight, geometry: Geometry, y: Tensor, call: Call, key: Any
) -> bool:
    """Write the result to y by a kernel of int8 convolutions, which takes one scale for all of x
    and one for each row of the weight; False if none takes it.
    """
    one_scale = call.act_quant == "tensor" and weight.bits == 8 and weight.group_size == -1
    if not one_scale or y.dtype not in _INT8_RESULTS or call.saturate:
        return False
    others = (weight.zeros, weight.offsets, weight.perm, weight.book, call.residual)
    space = len(weight.kernel_size)
    if any(other is not None for other in others) or geometry.groups > 1 or space > 2:
        return False
    if natural_weight.natural_order(weight.n, weight, 1) != _C.ConvOrder.by_channels:
        return False
    if not _is_faster_by_int8(weight, call.act_symmetric):
        return False
    call = _contiguous(call, weight)
    images = _pixels(x, 1, False)
    front = (1,) * (2 - space)

    def problem_of(natural: Natural | None) -> _C.ConvProblem:
        return _C.ConvProblem(
            natural_weight.conv_weight(natural, weight, weight.n, 1),
            images.data_ptr(),
            False,
            native.DATA_TYPES[images.dtype],
            call.act_symmetric,
            (images.shape[0], *front, *images.shape[1:]),
            front + geometry.stride,
            (0,) * len(front) + geometry.padding,
            front + geometry.dilation,
            geometry.groups,
            native.pointer(call.bias),
            False,
            native.data_type(call.bias),
            y.data_ptr(),
            _INT8_RESULTS[y.dtype],
            1.0,
            0,
            1.0,
            0,
            native.ACTIVATIONS[call.activation],
            call.low,
            call.high,
        )

    with native.on_device(weight.device):
        # The weight is unpacked only where a kernel takes it.
        plans = problem_of(None).supported_plans(_C.current_device())
        if not plans:
            return False
        natural = natural_weight.in_activation_order(weight)
        problem = problem_of(natural)
        _run(problem, plans[0], images.data_ptr(), native.pointer(call.bias), y)
        if key is not None and images.data_ptr() == x.data_ptr() and kept.keeps(weight, ()):
            bias, version = native.pointer(weight.bias), weight.codes._version
            _keep(
                weight,
                key,
                Launch(problem, plans[0], bias, tuple(y.shape), y.dtype, natural, version),
            )
    return True


def _keep(weight: PackedWeight, key: Any, launch: Launch) -> None:
    """What :func:`repeat` finds by this key."""
    launches = weight.conv_launches
    if len(launches) >= _MOST_LAUNCHES:
        launches.clear()
    launches[key] = launch


def _by_products(
    x: Tensor, weight: PackedWeight, geometry: Geometry, y: Tensor, call: Call, key: Any
) -> bool:
    """Write the result to y, a product for each group of the convolution; False if no
    kernel takes one.
    """
    groups, n = geometry.groups, weight.n // geometry.groups
    if groups > 1 and (n % formats.ROWS_PER_PANEL or call.act_quant in ("token", "tensor")):
        return False
    images = _pixels(x, groups, call.act_quant == "none")
    with native.on_device(weight.device):
        device = _C.current_device()
        for group, matrix in enumerate(weight.group_matrices(groups)):
            features = slice(group * n, group * n + n)
            own_y = y if groups == 1 else y.new_empty(*y.shape[:-1], n)
            own_bias = None if call.bias is None else call.bias[features]
            own_residual = None if call.residual is None else call.residual[:, features]
            epilogue = call.epilogue(own_bias, own_residual)
            problem = _problem(
                images,
                group,
                weight,
                matrix,
                geometry,
                own_y,
                epilogue,
                call.act_quant,
                call.act_symmetric,
            )
            plan = problem.plan(device)
            if plan is None:
                return False
            _run(problem, plan, _first(images, group, groups), native.pointer(own_bias), own_y)
            if own_y is not y:
                y[..., features] = own_y
            elif (
                key is not None
                and images.data_ptr() == x.data_ptr()
                and weight.matrix is matrix  # which the launch reads, and the weight keeps
            ):
                bias = native.pointer(weight.bias)
                launch = Launch(problem, plan, bias, tuple(y.shape), y.dtype, matrix=matrix.native)
                _keep(weight, key, launch)
    return True
