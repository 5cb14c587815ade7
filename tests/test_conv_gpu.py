"""Convolutions on a GPU: the reference's values, static int8 bit for bit, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.ops import conv_gpu, conv_torch
from cutlass_ops.reference import conv as reference_conv
from cutlass_ops.reference.conv import Geometry

pytestmark = pytest.mark.gpu

FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"bits": 4, "group_size": 128},
    "int4 with zero points": {"bits": 4, "group_size": 32, "symmetric": False},
    "int4 in long groups": {"bits": 4, "group_size": 256, "symmetric": False},
    "int8": {"bits": 8, "group_size": -1},
    "int8 in groups of 16": {"bits": 8, "group_size": 16},
    "int8 with zero points": {"bits": 8, "group_size": 64, "symmetric": False},
}
KERNELS = {1: (4,), 2: (3, 2), 3: (2, 3, 1)}
CONVOLUTIONS = {1: co.mixed_conv1d, 2: co.mixed_conv2d, 3: co.mixed_conv3d}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def check(
    quantized: co.QuantizedWeight, x: torch.Tensor, geometry: Geometry, **options: Any
) -> None:
    """Two runs with fp32 results, each element within the rounding of fp32 sums."""
    convolve, packed = CONVOLUTIONS[len(quantized.kernel_size)], co.reorder(quantized).to("cuda")
    y = convolve(x.cuda(), packed, None, *geometry, out_dtype=torch.float32, **options)
    assert torch.equal(
        y, convolve(x.cuda(), packed, None, *geometry, out_dtype=torch.float32, **options)
    )
    assert y.movedim(1, -1).is_contiguous()
    expected = (
        reference_conv.mixed_conv(x.float(), quantized, geometry, **options).movedim(-1, 1).double()
    )
    error, rms = (y.cpu().double() - expected).abs(), expected.square().mean().sqrt()
    assert error.norm() <= 1e-6 * expected.norm()
    # No kernel takes groups whose scale is that of all channels, or blocks of 16, where the
    # result is not of x's type: torch's order of sums.
    act_quant = options.get("act_quant")
    by_torch = geometry.groups > 1 and act_quant in ("token", "tensor")
    by_torch |= quantized.group_size == 16 and act_quant == "block"
    assert (error <= (4e-5 if by_torch else 1e-5) * rms).all()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("act_quant", ["none", "token", "block", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_values_are_the_references(
    kind: str, dims: int, groups: int, act_quant: str, symmetric: bool
) -> None:
    if act_quant == "none" and not symmetric:
        return
    quantized = co.quantize(torch.randn(128, 140, *KERNELS[dims]) / 30, **FORMATS[kind])
    geometry = Geometry((2, 1, 3)[:dims], (1, 0, 2)[:dims], (1, 2, 1)[:dims], groups)
    x = (torch.randn(2, 140 * groups, *(9, 8, 7)[:dims]) + 0.3).half()
    check(quantized, x, geometry, act_quant=act_quant, act_symmetric=symmetric, activation="silu")


#: The error that weights rounded once to x's type leave: (of |y|, of y's rms).
ROUNDED = {torch.float16: (2.0**-10, 1.2e-3), torch.bfloat16: (2.0**-7, 1e-2)}


def check_rounded(
    quantized: co.QuantizedWeight,
    x: torch.Tensor,
    geometry: Geometry,
    *,
    rounds_sums: bool = False,
    **options: Any,
) -> None:
    """A result of x's 16-bit type within the bounds of operands rounded once to it; the same bits
    in a second run.

    `rounds_sums`: the sums are rounded, too, before what comes after them.
    """
    convolve, packed = CONVOLUTIONS[len(quantized.kernel_size)], co.reorder(quantized).to("cuda")
    bias = options.pop("bias", None)
    y = convolve(x.cuda(), packed, bias, *geometry, **options)
    assert torch.equal(y, convolve(x.cuda(), packed, bias, *geometry, **options))
    options["bias"] = bias
    options = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    if "residual" in options:
        options["residual"] = options["residual"].movedim(1, -1)
    expected = reference_conv.mixed_conv(
        x, quantized, geometry, out_dtype=torch.float32, **options
    ).movedim(-1, 1)
    relative, absolute = ROUNDED[x.dtype]
    if options.get("act_quant", "none") != "none":
        absolute *= 2  # the values of x are rounded, too
    # The rms of the sums: an activation may leave little of them.
    sums = reference_conv.mixed_conv(x, quantized, geometry, out_dtype=torch.float32)
    error = (y.cpu().float() - expected).abs()
    bound = relative * expected.abs() + absolute * sums.square().mean().sqrt()
    if rounds_sums:
        bound += relative * sums.movedim(-1, 1).abs()
    assert (error <= bound).all()


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take the convolution; torch's would be an error."""

    def refuse(*args: Any) -> torch.Tensor:
        raise AssertionError("no kernel took it")

    monkeypatch.setattr(conv_torch, "convolve", refuse)
    monkeypatch.setattr(conv_gpu, "LEAST_TORCH_PRODUCTS", 10**18)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("act_quant", "symmetric"),
    [("none", True), ("token", False), ("block", True), ("tensor", True)],
)
def test_results_of_16_bits(
    kind: str, dims: int, dtype: torch.dtype, act_quant: str, symmetric: bool
) -> None:
    n, c = (192, 200) if dims == 2 else (65, 140)
    quantized = co.quantize(torch.randn(n, c, *KERNELS[dims]) / 30, **FORMATS[kind])
    geometry = Geometry((2, 1, 3)[:dims], (1, 0, 2)[:dims], (1, 2, 1)[:dims], 1)
    x = (torch.randn(3, c, *((400,), (23, 21), (9, 8, 7))[dims - 1]) + 0.3).to(dtype)
    bias = torch.randn(n)
    check_rounded(
        quantized,
        x,
        geometry,
        act_quant=act_quant,
        act_symmetric=symmetric,
        bias=bias.cuda(),
        activation="relu",
    )


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("c", [3, 8, 20, 64, 320])
@pytest.mark.parametrize("n", [1, 17, 320])
def test_channels_and_sizes(c: int, n: int) -> None:
    quantized = co.quantize(torch.randn(n, c, 3, 3) / 10, bits=8, group_size=128)
    for shape, geometry in (
        ((1, 1, 1), ((1, 1), (1, 1), (1, 1))),  # one pixel, all but one tap beyond it
        ((2, 5, 7), ((1, 2), (4, 3), (1, 1))),  # padding of more than the kernel
        ((1, 70, 65), ((1, 1), (0, 2), (3, 2))),
        ((2, 33, 20), ((8, 5), (2, 2), (1, 1))),
    ):
        x = torch.randn(shape[0], c, *shape[1:]).half()
        check_rounded(quantized, x, Geometry(*geometry, 1), act_quant="none")
        check_rounded(quantized, x, Geometry(*geometry, 1), act_quant="block")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "c", "groups"), [(64, 64, 1), (17, 3, 1), (384, 160, 2)])
def test_torch_convolves_few_channels_of_many_pixels(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, n: int, c: int, groups: int
) -> None:
    monkeypatch.setattr(
        conv_gpu, "LEAST_TORCH_PRODUCTS", 2 * 33 * 34 * 9 * 128 * -(-n // 128) * -(-c // 128) * 128
    )
    by_torch = []
    convolve = conv_torch.convolve
    monkeypatch.setattr(
        conv_torch, "convolve", lambda *args, **end: by_torch.append(args) or convolve(*args, **end)
    )
    quantized = co.quantize(torch.randn(n, c, 3, 3) / math.sqrt(9 * c), **FORMATS[kind])
    geometry = Geometry((1, 1), (1, 1), (1, 1), groups)
    x = (torch.randn(2, c * groups, 33, 34) + 0.3).to(dtype)
    bias, residual = torch.randn(n, device="cuda"), torch.randn(2, n, 33, 34, device="cuda")
    for end in (
        {},
        {"bias": bias},
        {"activation": "silu"},
        {"bias": bias, "activation": "relu6", "residual": residual},
    ):
        check_rounded(quantized, x, geometry, rounds_sums=True, **end)
    assert len(by_torch) == 8
    check_rounded(quantized, x[:, :, :20], geometry)  # fewer pixels
    assert len(by_torch) == 8


@pytest.mark.parametrize("act_quant", ["token", "block", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "c"), [(64, 64), (17, 3)])
def test_torch_convolves_the_values_of_few_channels_codes(
    monkeypatch: pytest.MonkeyPatch, n: int, c: int, symmetric: bool, act_quant: str
) -> None:
    monkeypatch.setattr(conv_gpu, "LEAST_TORCH_PRODUCTS", 1)
    monkeypatch.setattr(conv_gpu, "_by_products", None)
    quantized = co.quantize(torch.randn(n, c, 3, 3) / math.sqrt(9 * c), bits=8, group_size=128)
    x = (torch.randn(2, c, 33, 34) + 0.3).half()
    end = {
        "bias": torch.randn(n, device="cuda"),
        "activation": "silu",
        "act_quant": act_quant,
        "act_symmetric": symmetric,
    }
    check_rounded(quantized, x, Geometry((1, 1), (1, 1), (1, 1), 1), rounds_sums=True, **end)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("kind", ["int4", "int4 with zero points", "int8"])
def test_what_tmas_im2col_mode_cannot_collect(kind: str) -> None:
    quantized = co.quantize(torch.randn(70, 72, 2, 3) / 10, **FORMATS[kind])
    x = torch.randn(2, 72, 40, 300).half()
    for geometry in (
        ((9, 16), (0, 0), (1, 1)),
        ((1, 1), (0, 200), (1, 130)),
        ((1, 3), (129, 0), (1, 1)),
    ):
        for act_quant in ("none", "token"):
            check_rounded(quantized, x, Geometry(*geometry, 1), act_quant=act_quant)


@pytest.mark.usefixtures("by_kernels")
def test_groups_and_residual() -> None:
    quantized = co.quantize(torch.randn(256, 40, 3, 3) / 20, bits=4, group_size=32)
    x, residual = torch.randn(2, 80, 20, 18).half(), torch.randn(2, 256, 20, 18).half()
    for act_quant in ("none", "block", "token"):
        options = {"residual": residual.cuda(), "activation": "silu", "act_quant": act_quant}
        check_rounded(quantized, x, Geometry((1, 1), (1, 1), (1, 1), 2), **options)


@pytest.mark.usefixtures("by_kernels")
def test_few_pixels_of_many_channels() -> None:
    quantized = co.quantize(torch.randn(1280, 1280, 3, 3) / 100, bits=4, group_size=128)
    check_rounded(quantized, torch.randn(2, 1280, 8, 8).half(), Geometry((1, 1), (1, 1), (1, 1), 1))


def test_pixels_that_are_not_finite() -> None:
    packed = co.reorder(co.quantize(torch.randn(64, 64, 3, 3), bits=4, group_size=64)).to("cuda")
    x = torch.randn(1, 64, 20, 20).half().cuda()
    for act_quant in ("none", "token", "block"):
        clean = co.mixed_conv2d(x, packed, padding=1, act_quant=act_quant)
        bad = x.clone()
        bad[0, 5, 2, 4] = torch.inf
        y = co.mixed_conv2d(bad, packed, padding=1, act_quant=act_quant, activation="relu")
        assert y[..., 1:4, 3:6].isnan().all()
        y[..., 1:4, 3:6] = clean[..., 1:4, 3:6].relu()
        assert torch.equal(y, clean.relu())


# ---- one input channel a group

#: Input channels, multiplier; image, kernel, stride, padding, dilation.
DEPTHWISE: dict[str, tuple[int, int, tuple[int, ...], tuple[int, ...], Any, Any, Any]] = {
    "3 x 3": (144, 1, (56, 56), (3, 3), (1, 1), (1, 1), (1, 1)),
    "3 x 3 with steps": (96, 1, (29, 30), (3, 3), (2, 2), (1, 1), (1, 1)),
    "3 x 3 of many lines": (12, 1, (301, 19), (3, 3), (1, 1), (2, 0), (1, 1)),
    "3 x 3 of many lines with steps": (12, 1, (301, 18), (3, 3), (2, 2), (0, 2), (1, 1)),
    "3 x 3 with steps along the height": (16, 1, (29, 30), (3, 3), (2, 1), (1, 1), (1, 1)),
    "3 x 3 of a volume's planes": (16, 1, (4, 9, 8), (1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1)),
    "5 x 5 with steps": (72, 1, (28, 27), (5, 5), (2, 1), (2, 2), (1, 1)),
    "7 x 7": (192, 1, (28, 28), (7, 7), (1, 1), (3, 3), (1, 1)),
    "8 channels": (8, 1, (33, 65), (3, 3), (1, 1), (1, 1), (1, 1)),
    "20 channels": (20, 1, (15, 13), (3, 3), (1, 1), (1, 1), (1, 1)),
    "200 channels": (200, 1, (9, 70), (5, 5), (1, 1), (2, 2), (1, 1)),
    "1 x 9": (144, 1, (11, 40), (1, 9), (1, 1), (0, 4), (1, 1)),
    "dilated": (40, 1, (30, 31), (3, 3), (1, 1), (2, 2), (2, 2)),
    "dilated along the height": (40, 1, (30, 31), (3, 3), (1, 1), (2, 1), (2, 1)),
    "dilated far": (24, 1, (1, 400), (1, 3), (1, 1), (0, 128), (1, 128)),
    "padding beyond the kernel": (24, 1, (5, 6), (3, 3), (1, 2), (7, 9), (1, 1)),
    "one pixel": (32, 1, (1, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
    "steps beyond the kernel": (16, 1, (40, 50), (2, 2), (9, 16), (1, 0), (1, 1)),
    "one tap": (64, 1, (12, 12), (1, 1), (1, 1), (0, 0), (1, 1)),
    "31 x 31": (16, 1, (35, 36), (31, 31), (1, 1), (15, 15), (1, 1)),
    "twice as many outputs": (24, 2, (14, 15), (3, 3), (1, 1), (1, 1), (1, 1)),
    "three times as many outputs": (20, 3, (14, 15), (3, 3), (2, 2), (1, 1), (1, 1)),
    "one group": (1, 20, (14, 15), (3, 3), (1, 1), (1, 1), (1, 1)),
    "a line": (48, 1, (300,), (5,), (1,), (2,), (1,)),
    "a line with holes": (48, 1, (300,), (3,), (1,), (64,), (64,)),
    "a volume": (24, 1, (5, 9, 8), (3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1)),
    "a dilated volume": (16, 2, (7, 9, 8), (2, 2, 3), (2, 1, 2), (2, 0, 1), (3, 1, 2)),
}
#: A group is of one tap, and has one weight here; a row has all taps.
DEPTHWISE_FORMATS: dict[str, dict[str, Any]] = {
    **FORMATS,
    "int4 in rows": {"bits": 4, "group_size": -1},
    "int4 in rows with zero points": {"bits": 4, "group_size": -1, "symmetric": False},
    "int8 in rows with zero points": {"bits": 8, "group_size": -1, "symmetric": False},
}
PIXELS = (torch.float16, torch.bfloat16, torch.float32)


def depthwise(name: str, **options: Any) -> tuple[co.QuantizedWeight, torch.Tensor, Geometry]:
    """A weight, an image and a geometry."""
    c, multiplier, size, kernel, *steps = DEPTHWISE[name]
    quantized = co.quantize(torch.randn(c * multiplier, 1, *kernel), **options)
    return quantized, torch.randn(3, c, *size) + 0.3, Geometry(*steps, c)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("name", DEPTHWISE)
@pytest.mark.parametrize("dtype", PIXELS)
def test_depthwise(name: str, dtype: torch.dtype) -> None:
    quantized, x, geometry = depthwise(name, bits=8, group_size=-1)
    check(quantized, x.to(dtype), geometry)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("kind", DEPTHWISE_FORMATS)
@pytest.mark.parametrize(
    "name", ["20 channels", "dilated far", "twice as many outputs", "a volume"]
)
def test_depthwise_weights(kind: str, name: str) -> None:
    quantized, x, geometry = depthwise(name, **DEPTHWISE_FORMATS[kind])
    check(quantized, x.half(), geometry, activation="silu")


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("book", ["nf4", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_depthwise_weights_of_a_code_book(book: str, dtype: torch.dtype) -> None:
    quantized, x, geometry = depthwise(
        "3 x 3", bits=4 if book == "nf4" else 8, group_size=-1, book=book
    )
    packed, x = co.reorder(quantized).to("cuda"), x.to(dtype)
    y = co.mixed_conv2d(x.cuda(), packed, None, *geometry, out_dtype=torch.float32)
    expected = reference_conv.mixed_conv(x, quantized, geometry, out_dtype=torch.float32).movedim(
        -1, 1
    )
    assert (y.cpu() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("act_quant", ["token", "block", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_depthwise_of_quantised_pixels(act_quant: str, symmetric: bool) -> None:
    quantized, x, geometry = depthwise("20 channels", bits=4, group_size=32)
    check(quantized, x.half(), geometry, act_quant=act_quant, act_symmetric=symmetric)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("name", ["3 x 3 with steps", "20 channels", "dilated far", "one group"])
@pytest.mark.parametrize("dtype", PIXELS)
@pytest.mark.parametrize("out_dtype", PIXELS)
@pytest.mark.parametrize("activation", ["relu", "gelu", ("clamp", -0.5, 1.5)])
def test_depthwise_epilogues(
    name: str, dtype: torch.dtype, out_dtype: torch.dtype, activation: Any
) -> None:
    quantized, x, geometry = depthwise(name, bits=8, group_size=128)
    packed, x = co.reorder(quantized).to("cuda"), x.to(dtype)
    bias = torch.randn(quantized.n).half()
    size = (3, quantized.n, *geometry.out(x.shape[2:], quantized.kernel_size))
    residual = torch.randn(size).bfloat16()
    y = co.mixed_conv2d(
        x.cuda(),
        packed,
        bias.cuda(),
        *geometry,
        activation=activation,
        residual=residual.cuda(),
        out_dtype=out_dtype,
    )
    assert y.dtype == out_dtype
    options: dict[str, Any] = {"bias": bias, "activation": activation, "out_dtype": torch.float32}
    expected = reference_conv.mixed_conv(
        x, quantized, geometry, residual=residual.movedim(1, -1), **options
    ).movedim(-1, 1)
    relative = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8, torch.float32: 1e-6}[out_dtype]
    rms = expected.square().mean().sqrt()
    assert ((y.cpu().float() - expected).abs() <= relative * expected.abs() + 1e-5 * rms).all()


@pytest.mark.parametrize("name", ["3 x 3", "3 x 3 with steps", "20 channels", "dilated far"])
def test_a_pixel_that_is_not_finite_is_seen_by_its_outputs_alone(name: str) -> None:
    quantized, x, geometry = depthwise(name, bits=8, group_size=-1)
    packed, x = co.reorder(quantized).to("cuda"), x.half().cuda()
    clean = co.mixed_conv2d(x, packed, None, *geometry)
    seen = torch.zeros_like(x)
    seen[1, 5, x.shape[2] // 2, 3] = 1
    ones = torch.ones(quantized.n, 1, *quantized.kernel_size, dtype=x.dtype, device="cuda")
    seen = torch.nn.functional.conv2d(seen, ones, None, *geometry) > 0
    assert seen.any()
    for value in (torch.nan, torch.inf):
        bad = x.clone()
        bad[1, 5, x.shape[2] // 2, 3] = value
        y = co.mixed_conv2d(bad, packed, None, *geometry, activation="relu")
        assert torch.equal(y.isnan(), seen)
        assert torch.equal(y[~seen], clean[~seen].relu())


def test_depthwise_images_in_any_memory() -> None:
    quantized, x, geometry = depthwise("20 channels", bits=8, group_size=-1)
    packed = co.reorder(quantized).to("cuda")
    x = x.half().cuda()
    expected = co.mixed_conv2d(x, packed, None, *geometry)
    assert torch.equal(
        co.mixed_conv2d(x.to(memory_format=torch.channels_last), packed, None, *geometry), expected
    )
    memory = torch.randn(x.numel() + 1).half().cuda()
    shifted = memory[1:].view(3, 15, 13, 20).movedim(-1, 1)
    shifted.copy_(x)
    assert torch.equal(co.mixed_conv2d(shifted, packed, None, *geometry), expected)
    assert co.mixed_conv2d(x[:0], packed, None, *geometry).shape == (0, *expected.shape[1:])


@pytest.mark.parametrize("warm", [True, False])
def test_depthwise_in_graphs_and_on_streams(warm: bool) -> None:
    quantized, x, geometry = depthwise("3 x 3", bits=4, group_size=64, symmetric=False)
    packed, x = co.reorder(quantized).to("cuda"), x.half().cuda()
    if warm:
        co.mixed_conv2d(x, packed, None, *geometry)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = co.mixed_conv2d(x, packed, None, *geometry)
    for _ in range(2):
        x.copy_(torch.randn(x.shape))
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, co.mixed_conv2d(x, packed, None, *geometry))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = co.mixed_conv2d(x, packed, None, *geometry)
    stream.synchronize()
    assert torch.equal(y, other)


@pytest.mark.parametrize("part", ["codes", "scales", "zeros"])
def test_depthwise_weights_that_are_written_to(part: str) -> None:
    (first, x, geometry), (second, _, _) = (
        depthwise("3 x 3", bits=8, group_size=32, symmetric=False) for _ in range(2)
    )
    packed, other = (co.reorder(quantized).to("cuda") for quantized in (first, second))
    x = x.half().cuda()
    before = co.mixed_conv2d(x, packed, None, *geometry)
    getattr(packed, part).copy_(getattr(other, part))
    fresh = packed.to("cpu")
    after = co.mixed_conv2d(x, packed, None, *geometry)
    assert not torch.equal(before, after)
    assert torch.equal(after, co.mixed_conv2d(x, fresh.to("cuda"), None, *geometry))
    with torch.inference_mode():
        assert torch.equal(after, co.mixed_conv2d(x, fresh.to("cuda"), None, *geometry))


def test_depthwise_weights_wait_for_the_gpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, x, geometry = depthwise("3 x 3", bits=8, group_size=-1)
    packed, x = co.reorder(quantized).to("cuda"), x.half().cuda()
    co.mixed_conv2d(x, packed, None, *geometry)

    def refuse(stream: torch.cuda.Stream) -> None:
        raise AssertionError("waited for the GPU")

    monkeypatch.setattr(torch.cuda.Stream, "synchronize", refuse)
    torch.cuda.set_sync_debug_mode("error")
    try:
        co.mixed_conv2d(x, packed, None, *geometry)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_depthwise() -> None:
    quantized, x, geometry = depthwise("3 x 3", bits=8, group_size=-1)
    packed, x = co.reorder(quantized).to("cuda"), x.half().cuda()
    compiled = torch.compile(lambda t: co.mixed_conv2d(t, packed, None, *geometry), fullgraph=True)
    assert torch.equal(compiled(x), co.mixed_conv2d(x, packed, None, *geometry))


def test_a_captured_convolution_reads_its_input_again() -> None:
    packed = co.reorder(co.quantize(torch.randn(128, 128, 3, 3) / 30, bits=4, group_size=128)).to(
        "cuda"
    )
    x = torch.randn(2, 128, 16, 16).half().cuda().to(memory_format=torch.channels_last)
    for act_quant in ("none", "token", "tensor"):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            co.mixed_conv2d(x, packed, padding=1, act_quant=act_quant)
            with torch.cuda.graph(graph, stream=stream):
                y = co.mixed_conv2d(x, packed, padding=1, act_quant=act_quant)
        torch.cuda.current_stream().wait_stream(stream)
        x.copy_(torch.randn(2, 128, 16, 16))
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, co.mixed_conv2d(x, packed, padding=1, act_quant=act_quant))


def test_compiled() -> None:
    packed = co.reorder(co.quantize(torch.randn(128, 64, 3, 3) / 30, bits=4, group_size=64)).to(
        "cuda"
    )
    x = torch.randn(2, 64, 16, 16).half().cuda()
    compiled = torch.compile(
        lambda t: co.mixed_conv2d(t, packed, padding=1, act_quant="token"), fullgraph=True
    )
    assert torch.equal(compiled(x), co.mixed_conv2d(x, packed, padding=1, act_quant="token"))


@pytest.mark.parametrize("act_quant", ["none", "token"])
@pytest.mark.parametrize(("n", "groups"), [(54, 27), (96, 3)])
def test_groups_of_few_output_channels(act_quant: str, n: int, groups: int) -> None:
    quantized = co.quantize(torch.randn(n, 54 // groups, 3, 3), bits=8, group_size=-1)
    check(
        quantized,
        torch.randn(2, 54, 9, 8).half(),
        Geometry((2, 2), (1, 1), (1, 1), groups),
        act_quant=act_quant,
    )


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("groups", [1, 2])
def test_fp32_as_it_is(kind: str, groups: int) -> None:
    quantized = co.quantize(torch.randn(128, 140, 3, 2) / 30, **FORMATS[kind])
    geometry = Geometry((2, 1), (1, 0), (1, 2), groups)
    check(quantized, torch.randn(2, 140 * groups, 9, 8) + 0.3, geometry, activation="silu")


def test_many_pixels() -> None:
    quantized = co.quantize(torch.randn(192, 64, 3, 3) / 24, bits=4, group_size=64)
    check(
        quantized,
        torch.randn(3, 64, 40, 41).half(),
        Geometry((1, 1), (1, 1), (1, 1), 1),
        act_quant="block",
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_dequantize(kind: str) -> None:
    quantized = co.quantize(torch.randn(70, 140, 3, 2), **FORMATS[kind])
    packed = co.reorder(quantized).to("cuda")
    assert torch.equal(co.dequantize(packed).cpu(), co.dequantize(quantized))
    assert torch.equal(packed.unpack().codes.cpu(), quantized.codes)


@pytest.mark.parametrize("out_dtype", [torch.int8, torch.uint8, torch.int32])
def test_static_int8(out_dtype: torch.dtype) -> None:
    x = torch.randint(0, 256, (2, 36, 19, 18), dtype=torch.uint8)
    bias = torch.randint(-9000, 9000, (24,), dtype=torch.int32)
    numbers: dict[str, Any] = {
        "x_scale": 0.03,
        "x_zero_point": 77,
        "y_scale": 1.3,
        "y_zero_point": 5,
        "out_dtype": out_dtype,
    }
    for groups in (1, 3, 12):
        packed = co.reorder(co.quantize(torch.randn(24, 36 // groups, 3, 2), bits=8, group_size=-1))
        geometry: dict[str, Any] = {
            "stride": (1, 2),
            "padding": (2, 1),
            "dilation": (1, 2),
            "groups": groups,
        }
        y = co.conv2d_int8(x.cuda(), packed.to("cuda"), bias.cuda(), **geometry, **numbers)
        assert torch.equal(y.cpu(), co.conv2d_int8(x, packed, bias, **geometry, **numbers))
    packed = co.reorder(co.quantize(torch.randn(24, 18), bits=8, group_size=-1))
    y = co.linear_int8(x.cuda(), packed.to("cuda"), bias.cuda(), **numbers)
    assert torch.equal(y.cpu(), co.linear_int8(x, packed, bias, **numbers))


def test_gradients() -> None:
    packed = co.reorder(co.quantize(torch.randn(64, 40, 3, 3) / 20, bits=4, group_size=32))
    x = torch.randn(2, 40, 9, 8).half()
    grad = torch.randn(2, 64, 9, 8).half()
    found = []
    for device in ("cuda", "cpu"):
        own = x.to(device).requires_grad_()
        y = co.mixed_conv2d(own, packed.to(device), padding=1, activation="silu")
        found.append(torch.autograd.grad(y, own, grad.to(device))[0].float().cpu())
    assert (found[0] - found[1]).norm() <= 2e-3 * found[1].norm()


def test_a_layer_moves() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(40, 64, 3))
    packed = co.reorder(co.quantize(model[0].weight.detach(), bits=8, group_size=32))  # type: ignore[arg-type]
    co.replace_convs(model, {"0": packed})
    x = torch.randn(1, 40, 9, 8).half()
    with torch.no_grad():
        expected = model(x).float()
        y = model.cuda()(x.cuda()).float().cpu()
    assert (y - expected).norm() <= 2e-3 * expected.norm()


def test_refusals() -> None:
    packed = co.reorder(co.quantize(torch.randn(64, 40, 3, 3), bits=8, group_size=-1))
    x = torch.randn(1, 40, 9, 8)
    with pytest.raises(ValueError, match="x is on cuda:0; the weight is on cpu"):
        co.mixed_conv2d(x.half().cuda(), packed)
    with pytest.raises(ValueError, match="x is on cpu; the weight is on cuda:0"):
        co.conv2d_int8(x.to(torch.int8), packed.to("cuda"), x_scale=1.0, y_scale=1.0)
