"""Convolutions of quantised activations on a CPU: products of rows of pixels, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C, reference
from cutlass_ops.ops import conv_cpu
from cutlass_ops.reference import conv as reference_conv
from cutlass_ops.reference.conv import Geometry
from cutlass_ops.weights import formats

MIXED: dict[int, Any] = {1: co.mixed_conv1d, 2: co.mixed_conv2d, 3: co.mixed_conv3d}
#: Kernels, extents of x, and geometries, of which some have padding beyond the image.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Geometry]] = {
    "3x3": ((3, 3), (9, 7), Geometry((1, 1), (1, 1), (1, 1), 1)),
    "strides": ((3, 2), (9, 8), Geometry((2, 3), (1, 2), (1, 2), 1)),
    "padding": ((2, 3), (2, 1), Geometry((1, 2), (4, 3), (3, 1), 1)),
    "1x1": ((1, 1), (5, 6), Geometry((1, 2), (0, 1), (1, 1), 1)),
    "1-D": ((4,), (20,), Geometry((2,), (3,), (2,), 1)),
    "3-D": ((2, 3, 1), (5, 4, 6), Geometry((2, 1, 1), (1, 0, 2), (1, 1, 1), 1)),
    "groups": ((3, 3), (6, 5), Geometry((1, 1), (1, 1), (1, 1), 2)),
}
QUANTISED = [*itertools.product(("token", "block", "tensor"), (True, False))]


@pytest.fixture(params=_C.cpu_instruction_sets(), autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    _C.use_cpu_instruction_set(request.param)
    yield
    _C.use_cpu_instruction_set(_C.cpu_instruction_sets()[0])


def rows_of_pixels(values: Tensor, kernel: tuple[int, ...], geometry: Geometry) -> Tensor:
    """Values of pixels ``[B, *space, V]`` under each tap, ``[places, taps, V]``; zero for missing
    pixels.
    """
    space = values.shape[1:-1]
    pads = [pad for pad in reversed(geometry.padding) for _ in range(2)]
    padded = F.pad(values, (0, 0, *pads))
    taps = []
    for tap in itertools.product(*map(range, kernel)):
        part = padded
        for i, extent in enumerate(geometry.out(space, kernel)):
            first = tap[i] * geometry.dilation[i]
            positions = torch.arange(extent) * geometry.stride[i] + first
            part = part.index_select(1 + i, positions)
        taps.append(part.flatten(0, -2))
    return torch.stack(taps, 1)


def specified(
    x: Tensor,
    packed: co.PackedWeight,
    geometry: Geometry,
    act_quant: str,
    symmetric: bool,
    **options: Any,
) -> Tensor:
    """The reference's product of rows of pixels, ``[B, N, *out]``."""
    groups, kernel, space = geometry.groups, packed.kernel_size, x.shape[2:]
    channels, qw = packed.k // packed.taps, packed.matrix.unpack()
    columns = qw.k // packed.taps
    block = formats.activation_block(packed.group_size)
    found = reference_conv.quantize_pixels(x, groups, act_quant, symmetric, block)
    blocks = -(-columns // block)
    results = []
    for group in range(groups):
        codes, scales, zeros = (
            None if part is None else part[:, group].view(x.shape[0], *space, -1) for part in found
        )
        assert codes is not None
        assert scales is not None
        codes = F.pad(codes, (0, columns - channels))
        rows = [rows_of_pixels(codes, kernel, geometry)]
        for part in (scales, zeros):
            if part is None:
                continue
            part = part.expand(*part.shape[:-1], blocks) if part.shape[-1] == 1 else part
            part = F.pad(part, (0, blocks - part.shape[-1]))
            rows.append(rows_of_pixels(part, kernel, geometry))
        if zeros is not None:  # of padding, for values of zero
            of_columns = rows[2].repeat_interleave(block, -1)[..., :columns]
            inside = torch.arange(columns) < channels
            rows[0] = torch.where(inside, rows[0], of_columns)
        n = packed.n // groups
        of_group = slice(group * n, (group + 1) * n)
        part_qw = co.QuantizedWeight(
            qw.codes[of_group],
            qw.scales[of_group],
            zeros=None if qw.zeros is None else qw.zeros[of_group],
            bits=qw.bits,
            group_size=qw.group_size,
        )
        own = {
            name: None if value is None else value[..., of_group]
            for name, value in options.items()
            if name in ("bias", "residual")
        }
        if "residual" in own:
            own["residual"] = options["residual"].movedim(1, -1).flatten(0, -2)[:, of_group]
        results.append(
            reference.gemm_quantized(
                rows[0].flatten(1),
                rows[1].flatten(1),
                None if zeros is None else rows[2].flatten(1),
                block,
                part_qw,
                **{**options, **own},
            )
        )
    out = torch.cat(results, 1).view(x.shape[0], *geometry.out(space, kernel), -1)
    return out.movedim(-1, 1)


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) + 0.3).to(dtype)


def packed_weight(
    n: int, c: int, kernel: tuple[int, ...], bits: int = 4, group_size: int = 64
) -> co.PackedWeight:
    values = torch.randn(n, c, *kernel, generator=torch.Generator().manual_seed(n + c))
    return co.reorder(co.quantize(values, bits, group_size, symmetric=False))


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(
        found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("act_quant", "symmetric"), QUANTISED)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (8, -1)])
def test_a_convolution_is_the_references_product_of_rows_of_pixels(
    case: str, act_quant: str, symmetric: bool, bits: int, group_size: int
) -> None:
    kernel, space, geometry = CASES[case]
    n = 256 * geometry.groups
    packed = packed_weight(n, 128, kernel, bits, group_size)
    x = image(2, 128 * geometry.groups, *space)
    assert conv_cpu.takes(x.shape, packed, geometry, act_quant)
    options = {"act_quant": act_quant, "act_symmetric": symmetric}
    found = MIXED[len(space)](x, packed, None, *geometry, **options)
    assert_same_bits(found, specified(x, packed, geometry, act_quant, symmetric))
    assert found.movedim(1, -1).is_contiguous()


@pytest.mark.parametrize("case", ["3x3", "1x1"])
@pytest.mark.parametrize("channels", [100, 200, 360])
@pytest.mark.parametrize("group_size", [32, 64, 256, -1])
@pytest.mark.parametrize("act_quant", ["token", "block"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_padded_channels_add_nothing(
    case: str, channels: int, group_size: int, act_quant: str, symmetric: bool
) -> None:
    kernel, space, geometry = CASES[case]
    packed = packed_weight(130, channels, kernel, group_size=group_size)
    x = image(1, channels, *space)
    assert conv_cpu.takes(x.shape, packed, geometry, act_quant)
    options = {"act_quant": act_quant, "act_symmetric": symmetric}
    found = co.mixed_conv2d(x, packed, None, *geometry, **options)
    assert_same_bits(found, specified(x, packed, geometry, act_quant, symmetric))


@pytest.mark.parametrize("groups", [1, 2])
def test_bias_activation_and_residual_of_several_chunks(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, space, geometry = CASES["3x3"]
    geometry = geometry._replace(groups=groups)
    packed = packed_weight(128 * groups, 128, kernel)
    monkeypatch.setattr(conv_cpu, "_GATHERED_BYTES", 33 * 9 * 128)  # 32 of 63 rows
    x, bias = image(1, 128 * groups, *space, dtype=torch.bfloat16), image(128 * groups)
    residual = image(1, 128 * groups, *space)
    options = {"bias": bias, "residual": residual, "activation": "relu"}
    found = co.mixed_conv2d(
        x, packed, bias, *geometry, act_quant="block", residual=residual, activation="relu"
    )
    expected = specified(x, packed, geometry, "block", True, **options, out_dtype=torch.bfloat16)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("act_quant", ["token", "block", "tensor"])
def test_threads_change_no_bits(act_quant: str) -> None:
    packed, x = packed_weight(256, 128, (3, 3)), image(1, 128, 30, 31)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(
                co.mixed_conv2d(x, packed, padding=1, act_quant=act_quant, activation="relu")
            )
    finally:
        torch.set_num_threads(before)
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


def test_no_images_and_values_that_are_not_finite() -> None:
    packed = packed_weight(128, 128, (3, 3))
    empty = co.mixed_conv2d(image(0, 128, 5, 6), packed, padding=1, act_quant="block")
    assert empty.shape == (0, 128, 5, 6)
    x = image(2, 128, 5, 6)
    x[0, 3, 0, 0] = torch.inf
    found = co.mixed_conv2d(x, packed, padding=1, act_quant="block")
    touched = torch.zeros(2, 1, 5, 6, dtype=torch.bool)
    touched[0, 0, :2, :2] = True
    assert torch.equal(found.isnan(), touched.expand_as(found))


@pytest.mark.parametrize(
    ("n", "channels", "groups", "act_quant", "bits", "batch"),
    [
        (128, 128, 1, "none", 4, 1),
        (64, 128, 1, "block", 4, 1),
        (128, 128, 1, "block", 8, 1),
        (128, 64, 1, "block", 4, 1),
        (128, 3, 1, "token", 4, 1),
        (128, 100, 1, "tensor", 4, 1),
        (256, 100, 2, "token", 4, 1),
        (2 * 130, 128, 2, "block", 4, 1),
        (256, 128, 1, "block", 8, 13),
    ],
)
def test_what_torch_convolves(
    n: int, channels: int, groups: int, act_quant: str, bits: int, batch: int
) -> None:
    packed = packed_weight(n, channels, (3, 3), bits)
    geometry = Geometry((1, 1), (1, 1), (1, 1), groups)
    x = image(batch, channels * groups, 4, 5)
    assert not conv_cpu.takes(x.shape, packed, geometry, act_quant)
    found = co.mixed_conv2d(x, packed, None, *geometry, act_quant=act_quant)
    expected = reference_conv.mixed_conv(x, packed.unpack(), geometry, act_quant=act_quant)
    torch.testing.assert_close(found.movedim(1, -1), expected, rtol=1e-5, atol=1e-4)
