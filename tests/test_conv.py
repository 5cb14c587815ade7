"""Convolutions of floats and of quantised activations: values, layouts, refusals, operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.ops import library
from cutlass_ops.ops.conv import OF_CONV
from cutlass_ops.weights import formats

TORCH: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
MIXED: dict[int, Callable[..., Tensor]] = {
    1: co.mixed_conv1d,
    2: co.mixed_conv2d,
    3: co.mixed_conv3d,
}
KERNELS = {1: (4,), 2: (3, 2), 3: (2, 3, 1)}
#: Stride, padding, dilation.
GEOMETRIES = {1: (2, 3, 2), 2: ((2, 1), (1, 2), (1, 2)), 3: (2, (1, 0, 2), (2, 1, 1))}
QUANTISED = [*itertools.product(("token", "block", "tensor"), (True, False)), ("none", True)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weight(n: int, c: int, kernel: tuple[int, ...], **options: Any) -> co.QuantizedWeight:
    """A quantised weight, by default of 4 bits in groups of 64 with zero points."""
    values = torch.randn(n, c, *kernel, generator=generator(n + c))
    return co.quantize(values, **{"bits": 4, "group_size": 64, "symmetric": False, **options})


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values whose blocks have different ranges, and more positive ones than negative."""
    x = torch.randn(shape, generator=generator(sum(shape)))
    return (
        x * torch.rand(shape[:2], generator=generator(7)).view(*shape[:2], *[1] * (len(shape) - 2))
        + 0.3
    ).to(dtype)


def quantised_values(x: Tensor, groups: int, block: int, act_quant: str, symmetric: bool) -> Tensor:
    """x after quantisation, by the operator that quantises the rows of matrices."""
    if act_quant == "none":
        return x.double()
    if act_quant == "tensor":
        return (
            co.quantize_activations(x.reshape(1, -1), -1, symmetric)
            .dequantize()
            .view(x.shape)
            .double()
        )
    pixels = x.movedim(1, -1)
    if act_quant == "token":
        values = co.quantize_activations(pixels, -1, symmetric).dequantize()
    else:
        parts = pixels.chunk(groups, -1)
        values = torch.cat(
            [co.quantize_activations(part, block, symmetric).dequantize() for part in parts], -1
        )
    return values.movedim(-1, 1).double()


def assert_close(y: Tensor, expected: Tensor) -> None:
    """fp32 sums of fp64's, element by element."""
    assert y.shape == expected.shape
    error, rms = (y.double() - expected).abs(), expected.square().mean().sqrt()
    assert error.norm() <= 1e-6 * expected.norm()
    assert (error <= 1e-5 * rms).all()


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("act_quant", "symmetric"), QUANTISED)
@pytest.mark.parametrize("group_size", [16, 32, 64, 256, -1])
def test_the_result_is_torchs_convolution_of_the_dequantised_operands(
    dims: int, groups: int, act_quant: str, symmetric: bool, group_size: int
) -> None:
    n, c = 15, 70
    qw = weight(n, c, KERNELS[dims], group_size=group_size)
    x, geometry = image(2, groups * c, *(9, 8, 7)[:dims]), GEOMETRIES[dims]
    y = MIXED[dims](
        x, co.reorder(qw), None, *geometry, groups, act_quant=act_quant, act_symmetric=symmetric
    )
    values = quantised_values(x, groups, formats.activation_block(group_size), act_quant, symmetric)
    assert_close(
        y,
        TORCH[dims](
            values, co.reference.dequantize_weight(qw, torch.float64), None, *geometry, groups
        ),
    )
    assert y.movedim(1, -1).is_contiguous()


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 8},
        {"symmetric": True},
        {"book": "nf4", "symmetric": True},
        {"book": "e4m3", "bits": 8, "group_size": 128, "symmetric": True},
    ],
    ids=str,
)
def test_weights_of_other_formats(options: dict[str, Any]) -> None:
    qw = weight(6, 40, (3, 3), **{"group_size": 32, **options})
    x = image(1, 40, 5, 6)
    y = co.mixed_conv2d(x, co.reorder(qw), padding=1)
    assert_close(
        y, F.conv2d(x.double(), co.reference.dequantize_weight(qw, torch.float64), padding=1)
    )


def test_offsets() -> None:
    qw = weight(6, 40, (3, 3), group_size=32, symmetric=True)
    qw = co.QuantizedWeight(
        qw.codes,
        qw.scales,
        offsets=torch.randn(qw.scales.shape),
        group_size=32,
        kernel_size=qw.kernel_size,
    )
    x = image(1, 40, 5, 6)
    for act_quant in ("none", "block"):
        y = co.mixed_conv2d(x, co.reorder(qw), padding=1, act_quant=act_quant, act_symmetric=False)
        values = quantised_values(x, 1, 32, act_quant, False)
        assert_close(
            y, F.conv2d(values, co.reference.dequantize_weight(qw, torch.float64), padding=1)
        )


@pytest.mark.parametrize("act_quant", ["none", "token", "block", "tensor"])
def test_a_code_book_takes_floats(act_quant: str) -> None:
    packed = co.reorder(weight(6, 64, (3, 3), book="fp4", symmetric=True))
    x = image(1, 64, 5, 6, dtype=torch.float16)
    if act_quant != "none":
        with pytest.raises(ValueError, match=f"act_quant is '{act_quant}'"):
            co.mixed_conv2d(x, packed, act_quant=act_quant)
        return
    # The book's values are rounded to x's dtype.
    values = packed.unpack()
    rounded = co.QuantizedWeight(
        values.codes,
        values.scales,
        group_size=64,
        kernel_size=(3, 3),
        book=values.book.half().float(),
    )
    expected = F.conv2d(x.double(), co.reference.dequantize_weight(rounded, torch.float64))
    assert_close(co.mixed_conv2d(x, packed, out_dtype=torch.float32), expected)


@pytest.mark.parametrize("act_quant", ["none", "token", "block", "tensor"])
def test_depthwise(act_quant: str) -> None:
    qw = weight(54, 1, (3, 3), bits=8, group_size=-1)
    x = image(2, 27, 9, 8)
    y = co.mixed_conv2d(
        x, co.reorder(qw), None, 2, 1, groups=27, act_quant=act_quant, act_symmetric=False
    )
    values = quantised_values(x, 27, 128, act_quant, False)
    assert_close(
        y, F.conv2d(values, co.reference.dequantize_weight(qw, torch.float64), None, 2, 1, 1, 27)
    )


@pytest.mark.parametrize("act_quant", ["none", "token", "tensor"])
def test_integers_are_exact(act_quant: str) -> None:
    """Where scales are powers of two every sum is an integer that fp32 holds."""
    codes = torch.randint(0, 16, (9, 27 * 20), generator=generator(1), dtype=torch.uint8)
    qw = co.QuantizedWeight(
        codes, torch.full((9, 1), 0.25), bits=4, group_size=-1, kernel_size=(3, 3, 3)
    )
    x = torch.randint(-127, 128, (2, 20, 5, 6, 7), generator=generator(2)).float()
    x[:, 0] = 127.0  # the scale of each pixel is 1
    y = co.mixed_conv3d(x, co.reorder(qw), None, 1, 2, 2, act_quant=act_quant)
    expected = F.conv3d(
        x.double(), co.reference.dequantize_weight(qw, torch.float64), None, 1, 2, 2
    )
    assert torch.equal(y.double(), expected)


@pytest.mark.parametrize("act_quant", ["token", "block", "tensor"])
def test_missing_pixels_are_zero_though_there_are_zero_points(act_quant: str) -> None:
    """Far from zero, x has zero points of -128; the border would show a padding with another
    value than zero.
    """
    packed = co.reorder(weight(4, 32, (3, 3), bits=8, group_size=32))
    x = torch.full((1, 32, 3, 3), 51.0)
    y = co.mixed_conv2d(x, packed, padding=2, act_quant=act_quant, act_symmetric=False)
    assert_close(y, F.conv2d(x.double(), co.dequantize(packed, torch.float32).double(), padding=2))


def test_bias_activation_and_residual_of_a_convolution() -> None:
    packed = co.reorder(weight(10, 33, (2, 3)))
    x, bias = image(2, 33, 6, 7), torch.randn(10)
    total = F.conv2d(x.double(), co.dequantize(packed, torch.float32).double(), bias.double())
    residual = torch.randn(total.shape)
    for activation in (None, *co.reference.ACTIVATIONS, ("clamp", -0.5, 2.0)):
        y = co.mixed_conv2d(x, packed, bias, activation=activation, residual=residual)
        assert_close(y, co.reference.activate(total, activation) + residual.double())
    own = co.reorder(co.QuantizedWeight(**{**vars(packed.unpack()), "bias": bias}))
    assert torch.equal(co.mixed_conv2d(x, own), co.mixed_conv2d(x, packed, bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    packed = co.reorder(weight(10, 33, (2, 3)))
    x = image(2, 33, 6, 7, dtype=dtype)
    for act_quant in ("none", "token"):
        exact = co.mixed_conv2d(x, packed, act_quant=act_quant, out_dtype=torch.float32)
        assert torch.equal(co.mixed_conv2d(x, packed, act_quant=act_quant), exact.to(dtype))


def test_any_memory_format() -> None:
    packed = co.reorder(weight(10, 33, (2, 3)))
    x = image(2, 33, 6, 7)
    expected = co.mixed_conv2d(x, packed, act_quant="block")
    wide = torch.zeros(2, 40, 6, 9)
    wide[:, 3:36, :, 1:8] = x
    for same in (x.to(memory_format=torch.channels_last), wide[:, 3:36, :, 1:8]):
        assert_close(co.mixed_conv2d(same, packed, act_quant="block"), expected.double())
    assert expected.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(
        co.mixed_conv2d(x, packed, stride=(2,)), co.mixed_conv2d(x, packed, stride=[2, 2])
    )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("act_quant", ["none", "token"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("first_mode", [torch.no_grad, torch.inference_mode])
def test_vectors_that_are_written_to(
    groups: int, act_quant: str, mode: Any, first_mode: Any
) -> None:
    """Groups that are longer than a tap's channels, and those of a part of the output channels,
    are copies for the kernels.
    """
    with mode():
        first, other = (
            co.reorder(
                co.quantize(torch.randn(256, 100, 3, 3), bits=4, group_size=256, symmetric=False)
            )
            for _ in range(2)
        )
        x = torch.randn(1, 100 * groups, 5, 5)
        options: dict[str, Any] = {"groups": groups, "act_quant": act_quant}
        with first_mode():
            co.mixed_conv2d(x, first, **options)
        for part in ("codes", "scales", "zeros"):
            getattr(first, part).copy_(getattr(other, part))
        expected = co.mixed_conv2d(x, other, **options)
        assert torch.equal(co.mixed_conv2d(x, first, **options), expected)
        assert torch.equal(co.dequantize(first), co.dequantize(other))


def test_no_images() -> None:
    packed = co.reorder(weight(10, 33, (2, 3)))
    for act_quant in ("none", "token", "block", "tensor"):
        assert co.mixed_conv2d(torch.zeros(0, 33, 6, 7), packed, act_quant=act_quant).shape == (
            0,
            10,
            5,
            5,
        )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("act_quant", ["none", "token", "block", "tensor"])
def test_pixels_that_see_a_value_that_is_not_finite_are_nan(bad: float, act_quant: str) -> None:
    packed = co.reorder(weight(4, 32, (3, 3)))
    x = image(1, 32, 8, 9)
    clean = co.mixed_conv2d(x, packed, padding=1, act_quant=act_quant)
    x[0, 5, 2, 4] = bad
    y = co.mixed_conv2d(x, packed, padding=1, act_quant=act_quant, activation="relu")
    if act_quant == "tensor":
        assert y.isnan().all()
        return
    assert y[..., 1:4, 3:6].isnan().all()
    y[..., 1:4, 3:6] = clean[..., 1:4, 3:6].relu()
    assert torch.equal(y, clean.relu())


# ---- refusals


def test_invalid_arguments_are_refused_with_their_values() -> None:
    packed = co.reorder(weight(6, 32, (3, 3)))
    x = image(1, 32, 8, 8)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"stride": 0}, ValueError, "stride is 0; an integer of at least 1"),
        ({"stride": (1, 2, 3)}, ValueError, r"stride is \(1, 2, 3\)"),
        ({"stride": True}, ValueError, "stride is True"),
        ({"padding": -1}, ValueError, "padding is -1; an integer of at least 0"),
        ({"padding": "same"}, ValueError, "padding is 'same'"),
        ({"dilation": (1, 0)}, ValueError, r"dilation is \(1, 0\)"),
        ({"groups": 4}, ValueError, "groups is 4; a divisor of the weight's 6"),
        ({"groups": 0}, ValueError, "groups is 0"),
        ({"groups": 2}, ValueError, r"x has shape \(1, 32, 8, 8\); \[B, 64, H, W\] is expected"),
        ({"x": image(1, 33, 8, 8)}, ValueError, r"x has shape \(1, 33, 8, 8\); \[B, 32, H, W\]"),
        ({"x": image(1, 32, 8)}, ValueError, r"x has shape \(1, 32, 8\)"),
        (
            {"x": x[..., :2]},
            ValueError,
            r"x has \(8, 2\) pixels, \(8, 2\) with padding=\(0, 0\); .* at least \(3, 3\)",
        ),
        ({"dilation": 4}, ValueError, r"dilation=\(4, 4\) takes at least \(9, 9\)"),
        ({"x": x[..., :0], "padding": 2}, ValueError, r"x has \(8, 0\) pixels"),
        ({"x": x.double()}, TypeError, "x has dtype float64"),
        ({"x": x.to("meta")}, ValueError, "x is on meta; the weight is on cpu"),
        ({"x": [1.0]}, TypeError, "x is a list"),
        ({"weight": packed.unpack()}, TypeError, "weight is a QuantizedWeight"),
        (
            {"weight": co.reorder(co.quantize(torch.randn(6, 32)))},
            ValueError,
            "has no kernel; one of 2 dimensions",
        ),
        ({"weight": co.reorder(weight(6, 32, (3,)))}, ValueError, r"has a kernel of \(3,\)"),
        ({"act_quant": "row"}, ValueError, "act_quant is 'row'"),
        ({"activation": "tanh"}, ValueError, "activation is 'tanh'"),
        ({"bias": torch.zeros(5)}, ValueError, r"bias has shape \(5,\)"),
        ({"bias": torch.zeros(6, device="meta")}, ValueError, "bias is on meta"),
        (
            {"residual": torch.zeros(1, 6, 8, 8)},
            ValueError,
            r"residual has shape \(1, 6, 8, 8\); \(1, 6, 6, 6\)",
        ),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype is torch.int8"),
    ]
    for changed, error, message in refused:
        with pytest.raises(error, match=message):
            co.mixed_conv2d(**{"x": x, "weight": packed, **changed})


def test_traces_transforms_and_gradients_of_the_weight_are_refused() -> None:
    packed = co.reorder(weight(6, 32, (3, 3)))
    x = image(1, 32, 8, 8)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
        torch.jit.trace(lambda x: co.mixed_conv2d(x, packed), (x,))
    with pytest.raises(RuntimeError, match="transforms of torch"):
        torch.func.vmap(lambda x: co.mixed_conv2d(x, packed))(x[None])
    packed.scales.requires_grad_()
    with pytest.raises(RuntimeError, match="scales of the packed weight requires a gradient"):
        co.mixed_conv2d(x, packed)


def test_autocast() -> None:
    packed = co.reorder(weight(6, 32, (3, 3)))
    x = image(1, 32, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = co.mixed_conv2d(x, packed)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, co.mixed_conv2d(x.bfloat16(), packed))


# ---- gradients


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("activation", [None, *co.reference.ACTIVATIONS, ("clamp", -0.5, 1.0)])
def test_the_gradient_is_that_of_torchs_convolution(dims: int, activation: Any) -> None:
    qw = weight(15, 20, KERNELS[dims])
    packed, geometry = co.reorder(qw), (*GEOMETRIES[dims], 3)
    x, bias = (
        image(2, 60, *(9, 8, 7)[:dims]).requires_grad_(),
        torch.randn(15).half().requires_grad_(),
    )
    y = MIXED[dims](x, packed, bias, *geometry, activation=activation)
    residual = torch.randn_like(y.detach()).bfloat16().requires_grad_()
    grad = torch.randn_like(y.detach())
    y = MIXED[dims](x, packed, bias, *geometry, activation=activation, residual=residual)
    found = torch.autograd.grad(y, (x, bias, residual), grad)

    x64, bias64 = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    z = TORCH[dims](x64, co.reference.dequantize_weight(qw, torch.float64), bias64, *geometry)
    expected = torch.autograd.grad(
        co.reference.activate(z, activation), (x64, bias64), grad.double()
    )
    assert_close(found[0], expected[0])
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[1], expected[1].half(), rtol=2**-10, atol=1e-5)
    assert torch.equal(found[2], grad.bfloat16())


def test_quantised_activations_pass_their_gradient_straight_through() -> None:
    packed = co.reorder(weight(6, 32, (3, 3)))
    x = image(2, 32, 8, 8).requires_grad_()
    grad = torch.randn(2, 6, 6, 6)
    (expected,) = torch.autograd.grad(co.mixed_conv2d(x, packed), x, grad)
    for act_quant in ("token", "block", "tensor"):
        (found,) = torch.autograd.grad(co.mixed_conv2d(x, packed, act_quant=act_quant), x, grad)
        assert torch.equal(found, expected)


def test_gradients_of_first_order_for_inputs_that_require_them() -> None:
    packed = co.reorder(weight(6, 32, (3, 3)))
    x, bias = image(2, 32, 8, 8), torch.zeros(6, requires_grad=True)
    y = co.mixed_conv2d(x, packed, bias, activation="silu")
    y.sum().backward()
    assert bias.grad is not None
    with torch.no_grad():
        assert not co.mixed_conv2d(x, packed, bias).requires_grad
    empty = torch.zeros(0, 32, 8, 8, requires_grad=True)
    co.mixed_conv2d(empty, packed).sum().backward()
    assert empty.grad is not None
    y = co.mixed_conv2d(x.requires_grad_(), packed)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradient of their gradient"):
        first.sum().backward()


@pytest.mark.parametrize("activation", [None, "silu"])
def test_compiled_gradients(activation: str | None) -> None:
    packed = co.reorder(weight(6, 32, (3, 3)))

    def loss(x: Tensor) -> Tensor:
        return co.mixed_conv2d(x * 2, packed, padding=1, activation=activation).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (8, 11):
        x = image(2, 32, size, 9).requires_grad_()
        torch.testing.assert_close(
            torch.autograd.grad(compiled(x), x), torch.autograd.grad(loss(x), x)
        )


# ---- torch.library


def sample(act_quant: str) -> tuple[Any, ...]:
    packed = co.reorder(weight(6, 32, (3, 3)))
    x, residual = image(1, 32, 8, 8), torch.zeros(1, 6, 4, 4)
    end = (torch.zeros(6), "clamp", -1.0, 1.0, residual, torch.float16, act_quant, False)
    return (x, *library.weight_fields(packed), [3, 3], [2, 2], [1, 1], [1, 1], 1, *end)


@pytest.mark.parametrize("act_quant", ["none", "block"])
def test_opcheck(act_quant: str) -> None:
    torch.library.opcheck(torch.ops.cutlass_ops.mixed_conv.default, sample(act_quant))
    x, *rest = sample(act_quant)
    torch.library.opcheck(torch.ops.cutlass_ops.mixed_conv.default, (x.requires_grad_(), *rest))
    fields, call = OF_CONV.split(rest)
    end = OF_CONV.values(call._replace(residual=None))
    for wanted in ([True, True], [False, True]):
        args = (
            torch.zeros(1, 6, 4, 4),
            image(1, 32, 8, 8),
            *fields,
            torch.float16,
            [1, 32, 8, 8],
            wanted,
            *end,
        )
        torch.library.opcheck(torch.ops.cutlass_ops.mixed_conv_backward.default, args)


@pytest.mark.parametrize("act_quant", ["none", "token", "block", "tensor"])
def test_compile_with_any_size(act_quant: str) -> None:
    packed = co.reorder(weight(6, 32, (3, 3)))

    def layer(x: Tensor) -> Tensor:
        y = co.mixed_conv2d(
            x * 2, packed, stride=(2, 1), padding=1, activation="silu", act_quant=act_quant
        )
        return F.max_pool2d(y, 2) + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 8, 9), (3, 8, 7), (5, 12, 11)):
        x = image(shape[0], 32, *shape[1:])
        assert torch.equal(compiled(x), layer(x))
