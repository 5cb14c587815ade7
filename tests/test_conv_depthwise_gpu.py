"""Convolutions of one input channel a group on a GPU: the reference's values within the rounding of
fp32 sums, graphs, streams and weights that are written to.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conv_gpu_cases import FORMATS, check
from conv_gpu_cases import by_kernels as by_kernels
from conv_gpu_cases import seeded as seeded

import cutlass_ops as co
from cutlass_ops.reference import conv as reference_conv
from cutlass_ops.reference.conv import Geometry

pytestmark = pytest.mark.gpu

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
#: A group lies in one tap, and has one weight here; a row has all taps.
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
