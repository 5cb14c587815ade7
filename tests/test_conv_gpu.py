"""Convolutions on a GPU: the reference's values, static int8 bit for bit, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conv_gpu_cases import FORMATS, check, check_rounded
from conv_gpu_cases import by_kernels as by_kernels
from conv_gpu_cases import seeded as seeded

import cutlass_ops as co
from cutlass_ops.ops import conv_gpu, conv_torch
from cutlass_ops.reference.conv import Geometry

pytestmark = pytest.mark.gpu

KERNELS = {1: (4,), 2: (3, 2), 3: (2, 3, 1)}


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


@pytest.mark.parametrize("act_quant", ["none", "token", "block", "tensor"])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1)])
def test_a_call_again_has_the_bits_of_a_first(kernel: tuple[int, int], act_quant: str) -> None:
    """It repeats the launch of the first, with other tensors."""
    weight = co.quantize(torch.randn(192, 128, *kernel) / 30, bits=8, group_size=128)
    again, first = (co.reorder(weight).to("cuda") for _ in range(2))
    padding = kernel[0] // 2
    for call in range(3):
        x = torch.randn(2, 128, 15, 17, device="cuda").half()
        x = x.contiguous(memory_format=torch.channels_last)
        bias = torch.randn(192, device="cuda")
        y = co.mixed_conv2d(x, again, bias, 1, padding, act_quant=act_quant, activation="relu")
        assert len(again.conv_launches) == 1
        if call == 2:
            want = co.mixed_conv2d(
                x, first, bias, 1, padding, act_quant=act_quant, activation="relu"
            )
            assert torch.equal(y, want)
            assert y.stride() == want.stride()


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


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("act_quant", ["token", "block", "tensor"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "c"), [(24, 64), (64, 256), (112, 200), (300, 136), (256, 64)])
def test_kernels_of_one_pixel(act_quant: str, bits: int, n: int, c: int) -> None:
    """Tiles that quantise x, with features for one warpgroup or both, and matrices as images."""
    quantized = co.quantize(torch.randn(n, c, 1, 1) / 10, bits=bits, group_size=128)
    x = torch.randn(2, c, 100, 97).half()
    check_rounded(quantized, x, Geometry((1, 1), (0, 0), (1, 1), 1), act_quant=act_quant)


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
def test_strides_and_paddings_beyond_tmas_im2col_mode(kind: str) -> None:
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
    packed = co.reorder(co.quantize(model[0].weight.detach(), bits=8, group_size=32))
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
