"""Static int8 convolutions and products on a GPU: every kernel has the reference's bits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C
from cutlass_ops.ops import conv_int8, native, natural_weight
from cutlass_ops.ops.call import Call
from cutlass_ops.reference import conv as reference_conv
from cutlass_ops.reference.conv import Geometry

pytestmark = pytest.mark.gpu

INT8 = (torch.int8, torch.uint8)
#: The GPU as it is; as one of sm_80, which has the portable kernels; and as one of few SMs, so that
#: a CTA has many tiles.
DEVICES: dict[str, tuple[int, int, int] | None] = {
    "own": None,
    "portable": (80, 108, 166912),
    "of 3 SMs": (90, 3, 232448),
}

# Channels of a group, output channels, groups; kernel, stride, padding, dilation; image.
CONVOLUTIONS: dict[str, tuple[tuple[int, int, int], Any, Any, Any, Any, tuple[int, int]]] = {
    "stem": ((3, 17, 1), (7, 7), (2, 2), (3, 3), (1, 1), (33, 29)),
    "stem of whole vectors": ((3, 32, 1), (7, 7), (2, 2), (3, 3), (1, 1), (33, 29)),
    "stem of lines": ((3, 64, 1), (3, 3), (2, 2), (1, 1), (1, 1), (40, 290)),
    "stem of one channel": ((1, 72, 1), (5, 3), (1, 1), (2, 1), (2, 1), (9, 10)),
    "stem of 8 channels": ((8, 130, 1), (4, 5), (3, 1), (5, 6), (1, 1), (7, 5)),
    "stem of an image of one pixel": ((4, 16, 1), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
    "stem with dilated columns": ((3, 24, 1), (3, 3), (1, 1), (2, 2), (1, 2), (9, 10)),
    "odd channels": ((20, 65, 1), (3, 3), (1, 1), (1, 1), (1, 1), (9, 8)),
    "one output": ((200, 1, 1), (3, 2), (1, 2), (2, 1), (1, 2), (13, 11)),
    "16 channels": ((16, 200, 1), (3, 3), (1, 1), (1, 1), (1, 1), (17, 19)),
    "64 channels": ((64, 64, 1), (3, 3), (1, 1), (1, 1), (1, 1), (28, 28)),
    "96 channels": ((96, 128, 1), (3, 3), (2, 2), (1, 1), (1, 1), (28, 27)),
    "128 channels": ((128, 128, 1), (3, 3), (1, 1), (0, 0), (1, 1), (20, 20)),
    "320 channels": ((320, 320, 1), (3, 3), (1, 1), (1, 1), (1, 1), (32, 31)),
    "1 x 1": ((64, 256, 1), (1, 1), (1, 1), (0, 0), (1, 1), (30, 30)),
    "slices of channels": ((600, 72, 1), (3, 3), (1, 1), (1, 1), (1, 1), (9, 8)),
    "slices of two groups": ((288, 130, 2), (3, 3), (2, 1), (1, 1), (1, 1), (8, 9)),
    "slices of the last channels": ((310, 64, 1), (1, 3), (1, 1), (0, 1), (1, 1), (5, 6)),
    "1 x 1 of odd channels": ((21, 40, 1), (1, 1), (1, 1), (0, 0), (1, 1), (9, 15)),
    "1 x 1 of groups": ((144, 96, 3), (1, 1), (1, 1), (0, 0), (1, 1), (12, 13)),
    "1 x 1 with steps": ((256, 72, 1), (1, 1), (2, 3), (0, 1), (1, 1), (15, 16)),
    "a line": ((80, 48, 1), (1, 3), (1, 2), (0, 1), (1, 1), (1, 300)),
    "dilated": ((48, 40, 1), (3, 3), (1, 1), (4, 6), (4, 3), (12, 13)),
    "an image of one pixel": ((32, 64, 1), (3, 3), (1, 1), (3, 3), (1, 1), (1, 1)),
    "padding beyond the image": ((16, 24, 1), (3, 3), (1, 2), (5, 2), (3, 2), (2, 1)),
    "uneven cuts": ((48, 40, 1), (5, 2), (2, 1), (2, 1), (1, 2), (7, 6)),
    "5 x 5": ((32, 72, 1), (5, 5), (1, 1), (2, 2), (1, 1), (6, 20)),
    "9 x 9": ((16, 24, 1), (9, 9), (1, 1), (4, 4), (1, 1), (9, 8)),
    "steps beyond TMA's": ((16, 24, 1), (2, 2), (9, 9), (1, 0), (1, 1), (40, 40)),
    "taps beyond TMA's": ((16, 24, 1), (3, 1), (1, 1), (150, 0), (150, 1), (20, 5)),
    "more taps than masks": ((16, 24, 1), (33, 1), (1, 1), (16, 0), (1, 1), (20, 5)),
    "groups": ((32, 96, 3), (3, 3), (1, 1), (1, 1), (1, 1), (11, 12)),
    "groups of odd outputs": ((32, 15, 3), (3, 3), (1, 1), (1, 1), (1, 1), (5, 6)),
    "groups of odd channels": ((5, 28, 4), (3, 3), (2, 1), (1, 1), (1, 1), (11, 12)),
    "groups of more than a tile": ((144, 600, 2), (3, 3), (1, 1), (1, 1), (1, 1), (6, 7)),
    "depthwise": ((1, 96, 96), (3, 3), (1, 1), (1, 1), (1, 1), (14, 15)),
    "depthwise with steps": ((1, 32, 32), (3, 3), (2, 2), (1, 1), (1, 1), (14, 15)),
    "depthwise of 7 x 7": ((1, 20, 20), (7, 7), (1, 1), (3, 3), (1, 1), (9, 10)),
    "depthwise and dilated": ((1, 24, 24), (5, 4), (1, 1), (2, 3), (2, 3), (16, 17)),
    "depthwise, long": ((1, 144, 144), (3, 3), (1, 1), (1, 1), (1, 1), (41, 9)),
    "depthwise, long, with steps": ((1, 144, 144), (3, 3), (2, 2), (0, 1), (1, 1), (41, 19)),
    "depthwise of 5 x 5": ((1, 12, 12), (5, 5), (1, 1), (2, 2), (1, 1), (11, 6)),
    "depthwise of 5 x 5 with steps": ((1, 144, 144), (5, 5), (2, 2), (2, 0), (1, 1), (18, 13)),
    "depthwise of 7 x 7 with steps": ((1, 4, 4), (7, 7), (2, 2), (3, 3), (1, 1), (23, 17)),
    "depthwise of 3 x 3 with uneven steps": ((1, 12, 12), (3, 3), (1, 2), (1, 1), (1, 1), (9, 10)),
    "depthwise of one pixel": ((1, 4, 4), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
    "depthwise, padding beyond the image": ((1, 12, 12), (3, 3), (2, 2), (4, 5), (1, 1), (2, 1)),
    "depthwise of 7 x 7, padding beyond the image": (
        (1, 12, 12),
        (7, 7),
        (1, 1),
        (9, 8),
        (1, 1),
        (1, 2),
    ),
    "depthwise, odd": ((1, 7, 7), (3, 3), (1, 1), (1, 1), (1, 1), (8, 9)),
    "depthwise with multiples": ((1, 48, 16), (3, 3), (1, 1), (1, 1), (1, 1), (8, 9)),
}
ACTIVATIONS: list[Any] = [None, "relu", "relu6", ("clamp", -1.5, 3.0)]
NO_GEOMETRY = Geometry((), (), (), 1)
#: Rows, K and N. TMA stores rows of the result where N is a multiple of 16.
PRODUCTS = [
    (1, 1, 1), (17, 70, 65), (300, 512, 1000), (129, 4097, 17), (64, 4096, 4096), (1000, 1024, 264),
    (1, 16, 16), (17, 33, 48), (63, 1000, 64), (130, 70, 208), (257, 300, 144), (515, 512, 1024),
]  # fmt: skip


def codes(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    info = torch.iinfo(dtype)
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(
        info.min, info.max + 1, shape, generator=generator, dtype=dtype, device="cuda"
    )


def packed(
    w: Tensor, scales: Tensor, bias: Tensor | None = None, zeros: Tensor | None = None
) -> co.PackedWeight:
    """int8 ``[N, C, *kernel]``, or a matrix, with one scale a row, and uint8 zero points of
    ``w + 128``, one a row.
    """
    weight = co.QuantizedWeight(
        (w.movedim(1, -1).flatten(1).int() + 128).to(torch.uint8),
        scales[:, None],
        zeros=None if zeros is None else zeros[:, None],
        bits=8,
        group_size=-1,
        bias=bias,
        kernel_size=tuple(w.shape[2:]),
    )
    return co.reorder(weight)


def near(zeros: Tensor, *shape: int) -> Tensor:
    """A weight int8 ``[N, ...]`` whose differences from these zero points of
    ``w + 128`` fit int8.
    """
    n = len(zeros)
    differences = codes(torch.int8, n, *shape, seed=31).short()
    return ((zeros.short().view(n, *[1] * len(shape)) + differences).clamp(0, 255) - 128).to(
        torch.int8
    )


def both(
    x: Tensor,
    weight: co.PackedWeight,
    geometry: Geometry,
    device: str = "own",
    *,
    x_scale: float = 0.03,
    x_zero_point: int = 0,
    bias: Tensor | None = None,
    y_scale: float = 1.0,
    y_zero_point: int = 0,
    activation: Any = None,
    out_dtype: torch.dtype = torch.int8,
) -> Tensor:
    """The result; every plan of the kernels must give it, and it must be the reference's."""
    known = DEVICES[device]
    scales = conv_int8.Scales(x_scale, x_zero_point, y_scale, y_zero_point)
    call = Call(bias, *native.split_activation(activation), out_dtype=out_dtype)
    as_device = _C.current_device() if known is None else _C.Device(*known)
    results: list[tuple[str, Tensor]] = []
    while True:
        plans: list[_C.ConvPlan] = []

        def choose(problem: _C.ConvProblem, plans: list[_C.ConvPlan] = plans) -> _C.ConvPlan:
            plans.extend(problem.plans(as_device))
            assert problem.plan(as_device).kernel == plans[0].kernel
            return plans[len(results)]

        found = conv_int8.launch(x, weight, geometry, scales, call, choose)
        plan = plans[len(results)]
        form = f"{plan.block_m} {plan.block_n} {plan.cluster_size} {plan.windows} {plan.turns}"
        results.append((f"{plan.kernel} {form}", found))
        if len(results) == len(plans):
            break
    expected = reference_conv.conv_int8(
        x,
        weight.unpack(),
        geometry,
        x_scale=x_scale,
        x_zero_point=x_zero_point,
        bias=bias,
        y_scale=y_scale,
        y_zero_point=y_zero_point,
        activation=activation,
        out_dtype=out_dtype,
    )
    for plan_name, y in results:
        assert y.shape == expected.shape
        wrong = (y != expected).nonzero()
        assert len(wrong) == 0, (
            f"{plan_name}: {len(wrong)} of {y.numel()} outputs differ, the first at "
            f"{wrong[0].tolist()}"
        )
    return results[0][1]


def spread(weight: co.PackedWeight, x_scale: float = 0.03) -> float:
    """A scale of y at which most results are inside of the limits."""
    return float(weight.scales.float().mean()) * x_scale * 73 * 73 * weight.k**0.5 / 40


def test_launches_follow_each_other() -> None:
    """CTAs of a cluster end at different times: none may leave before its neighbour's last
    arrivals.
    """
    weight = packed(codes(torch.int8, 256, 64, 1, 1), torch.rand(256, device="cuda") * 0.01)
    x = codes(torch.int8, 32, 64, 56, 56)
    scales = conv_int8.Scales(0.03, 0, spread(weight), 0)
    call = Call(None, out_dtype=torch.int8)
    count = None
    results: list[Tensor] = []
    while count is None or len(results) < count:
        plans: list[_C.ConvPlan] = []

        def choose(problem: _C.ConvProblem, plans: list[_C.ConvPlan] = plans) -> _C.ConvPlan:
            plans[:] = problem.plans(_C.current_device())
            return plans[len(results)]

        for _ in range(50):
            y = conv_int8.launch(
                x, weight, Geometry((1, 1), (0, 0), (1, 1), 1), scales, call, choose
            )
        count = len(plans)
        results.append(y)
        torch.cuda.synchronize()
    for y in results[1:]:
        assert torch.equal(y, results[0])


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_bits_are_the_references(kind: str, device: str) -> None:
    (c, n, groups), kernel, stride, padding, dilation, space = CONVOLUTIONS[kind]
    weight = packed(codes(torch.int8, n, c, *kernel), torch.rand(n, device="cuda") * 0.01 + 1e-3)
    geometry = Geometry(stride, padding, dilation, groups)
    bias = torch.randint(-9000, 9000, (n,), dtype=torch.int32, device="cuda")
    for case, (x_dtype, out_dtype) in enumerate(itertools.product(INT8, (*INT8, torch.int32))):
        x = codes(x_dtype, 3, groups * c, *space, seed=case + 1)
        zero, y_zero = (
            int(codes(x_dtype, 1, seed=case + 9)),
            int(codes(torch.int8, 1, seed=case + 20)),
        )
        options: dict[str, Any] = {"y_scale": spread(weight), "out_dtype": out_dtype, "bias": bias}
        if out_dtype != torch.int32:
            options["y_zero_point"] = y_zero % 256 if out_dtype == torch.uint8 else y_zero
            options["activation"] = ACTIVATIONS[case % 4]
        y = both(x, weight, geometry, device, x_zero_point=zero, **options)
        assert torch.equal(y, both(x, weight, geometry, device, x_zero_point=zero, **options))
        both(x, weight, geometry, device, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INT8)
def test_products(device: str, dtype: torch.dtype) -> None:
    """Products of x at any address, with and without a zero point, a bias of each kind, each
    activation and type of the result.
    """
    for case, (m, k, n) in enumerate(PRODUCTS):
        weight = packed(codes(torch.int8, n, k), torch.rand(n, device="cuda") * 0.01 + 1e-3)
        x = codes(dtype, m * k + 1, seed=1)[case % 2 :][: m * k].view(m, k)
        bias = torch.randint(-9000, 9000, (n,), dtype=torch.int32, device="cuda")
        for option, (zero, out_dtype) in enumerate(itertools.product((0, 77), INT8)):
            both(
                x,
                weight,
                NO_GEOMETRY,
                device,
                x_zero_point=zero,
                bias=(None, bias, bias * 3e-6)[(case + option) % 3],
                y_scale=spread(weight),
                y_zero_point=zero // 7,
                activation=ACTIVATIONS[(case + option) % 4],
                out_dtype=out_dtype,
            )
        both(x, weight, NO_GEOMETRY, device, x_zero_point=77, bias=bias, out_dtype=torch.int32)
    assert co.linear_int8(x[:0], weight, x_scale=1.0, y_scale=1.0).shape == (0, n)


@pytest.mark.parametrize("device", DEVICES)
def test_sums_beyond_int32_wrap(device: str) -> None:
    """Instructions that saturate would leave the largest numbers, and sums that leave int32 and
    come back would differ too.
    """
    x, w = (
        torch.full((3, 140_000), 255, dtype=torch.uint8),
        torch.full((16, 140_000), -128, dtype=torch.int8),
    )
    w[1::2, 70_000:] = 127
    weight = packed(w.cuda(), torch.ones(16, device="cuda"))
    both(x.cuda(), weight, NO_GEOMETRY, device, x_scale=1.0, y_scale=2e7)
    both(x.cuda(), weight, NO_GEOMETRY, device, x_scale=1.0, out_dtype=torch.int32)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("fits", [True, False])
def test_weights_with_zero_points(kind: str, fits: bool) -> None:
    """Zero points whose differences from the codes all fit int8, so that kernels read these, and
    zero points where they do not, which sums of windows compensate.
    """
    (c, n, groups), kernel, stride, padding, dilation, space = CONVOLUTIONS[kind]
    zeros = codes(torch.uint8, n, seed=30)
    w = near(zeros, c, *kernel) if fits else codes(torch.int8, n, c, *kernel)
    if not fits:  # whatever the kernel's size
        w.view(n, -1)[0, 0], zeros[0] = 127, 0
    geometry = Geometry(stride, padding, dilation, groups)
    bias = torch.randint(-9000, 9000, (n,), dtype=torch.int32, device="cuda")
    for device, scales_dtype in zip(
        DEVICES, (torch.float32, torch.float16, torch.bfloat16), strict=True
    ):
        weight = packed(
            w, (torch.rand(n, device="cuda") * 0.01 + 1e-3).to(scales_dtype), zeros=zeros
        )
        assert (natural_weight.operand(weight, groups).rest is None) == fits
        for case, (x_dtype, out_dtype) in enumerate(itertools.product(INT8, (*INT8, torch.int32))):
            x, zero = (
                codes(x_dtype, 3, groups * c, *space, seed=case + 1),
                int(codes(x_dtype, 1, seed=case + 9)),
            )
            options: dict[str, Any] = {"y_scale": 2 * spread(weight), "out_dtype": out_dtype}
            if out_dtype != torch.int32:
                options |= {"y_zero_point": 3, "activation": ACTIVATIONS[case % 4]}
            both(x, weight, geometry, device, x_zero_point=zero, bias=bias, **options)
            both(x, weight, geometry, device, bias=bias * 3e-6, **options)


@pytest.mark.parametrize("fits", [True, False])
def test_products_with_zero_points(fits: bool) -> None:
    for m, k, n in PRODUCTS:
        zeros = codes(torch.uint8, n, seed=30)
        w = near(zeros, k) if fits else codes(torch.int8, n, k)
        weight = packed(w, torch.rand(n, device="cuda") * 0.01 + 1e-3, zeros=zeros)
        x = codes(torch.uint8, m, k, seed=1)
        both(
            x,
            weight,
            NO_GEOMETRY,
            x_zero_point=77,
            y_scale=2 * spread(weight),
            out_dtype=torch.uint8,
        )


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("warm", [True, False])
def test_graphs_with_zero_points(fits: bool, warm: bool) -> None:
    """Captured, with another x, and after codes and zero points were written to. Nothing waits
    while it is captured.
    """
    zeros = codes(torch.uint8, 64, seed=30)
    w = near(zeros, 48, 3, 3) if fits else codes(torch.int8, 64, 48, 3, 3)
    weight = packed(w, torch.rand(64, device="cuda") * 0.01 + 1e-3, zeros=zeros)
    static = codes(torch.int8, 2, 48, 15, 15)
    options: dict[str, Any] = {
        "padding": 1,
        "x_scale": 0.03,
        "x_zero_point": 4,
        "y_scale": 2 * spread(weight),
    }
    if warm:
        co.conv2d_int8(static, weight, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = co.conv2d_int8(static, weight, **options)
    for seed in (5, 6):
        static.copy_(codes(torch.int8, 2, 48, 15, 15, seed=seed))
        graph.replay()
        assert torch.equal(y, co.conv2d_int8(static, weight, **options))
    assert weight.zeros is not None
    before = y.clone()
    other = packed(w.flip(0), torch.ones(64, device="cuda"), zeros=zeros.flip(0))
    assert other.zeros is not None
    weight.codes.copy_(other.codes)
    weight.zeros.copy_(other.zeros)
    after = co.conv2d_int8(static, weight, **options)
    assert not torch.equal(before, after)
    geometry = Geometry((1, 1), (1, 1), (1, 1), 1)
    both(static, weight, geometry, x_zero_point=4, y_scale=2 * spread(weight))
    if warm:
        graph.replay()
        assert torch.equal(y, after)


def test_zero_points_of_one_weight_do_not_change_another() -> None:
    """Weights may share their codes, and none waits once its operand is kept."""
    weight = packed(
        codes(torch.int8, 64, 48),
        torch.ones(64, device="cuda"),
        zeros=codes(torch.uint8, 64, seed=30),
    )
    assert weight.zeros is not None
    others = [
        weight,
        replace(weight, zeros=weight.zeros.flip(1).contiguous()),
        replace(weight, zeros=None),
    ]
    x = codes(torch.int8, 9, 48)
    for other in others * 2:
        both(x, other, NO_GEOMETRY, x_zero_point=-7, out_dtype=torch.int32)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for other in others:
            co.linear_int8(x, other, x_scale=0.1, y_scale=1.0)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize(
    ("c", "n", "kernel", "size", "batch"),
    [
        (64, 64, 3, 56, 8),
        (64, 64, 3, 57, 17),
        (64, 256, 1, 56, 8),
        (200, 128, 3, 41, 21),
        (512, 512, 3, 7, 64),
        (320, 320, 3, 64, 2),
        (256, 256, 3, 40, 16),
        (3, 64, 7, 99, 4),
    ],
)
@pytest.mark.parametrize("zero", [0, 128])
def test_layers_of_models(c: int, n: int, kernel: int, size: int, batch: int, zero: int) -> None:
    weight = packed(
        codes(torch.int8, n, c, kernel, kernel), torch.rand(n, device="cuda") * 0.01 + 1e-3
    )
    x = codes(torch.uint8, batch, c, size, size, seed=1).contiguous(
        memory_format=torch.channels_last
    )
    geometry = Geometry((1, 1), (kernel // 2,) * 2, (1, 1), 1)
    both(
        x,
        weight,
        geometry,
        x_zero_point=zero,
        y_scale=spread(weight),
        y_zero_point=3,
        activation="relu",
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 32])
def test_numbers_at_their_limits(device: str, groups: int) -> None:
    """Halves, products beyond every integer and that are NaN, sums that wrap,
    biases of every type.
    """
    n, geometry = 32, Geometry((1, 1), (1, 1), (1, 1), groups)
    ones = torch.ones(n, 32 // groups, 1, 1, dtype=torch.int8, device="cuda")
    unit = packed(ones, torch.ones(n, device="cuda"))
    x = codes(torch.int8, 2, 32, 5, 5)
    for y_zero in (0, 1, -3):
        both(x, unit, geometry, device, x_scale=1.0, y_scale=2.0, y_zero_point=y_zero)
    for x_scale, y_scale in ((3e38, 1.2e-38), (1.2e-38, 3e38), (1.0, 1e-30)):
        for w_scale in (1.0, 1e30, -1.0, 0.0):
            weight = packed(ones, torch.full((n,), w_scale, device="cuda"))
            for y_zero, dtype in ((7, torch.int8), (-128, torch.int8), (255, torch.uint8)):
                both(
                    x,
                    weight,
                    geometry,
                    device,
                    x_scale=x_scale,
                    y_scale=y_scale,
                    y_zero_point=y_zero,
                    out_dtype=dtype,
                )
    ends = torch.tensor([2**31 - 1, -(2**31), 5, -5] * 8, dtype=torch.int32, device="cuda")
    both(x, unit, geometry, device, bias=ends, x_zero_point=5, out_dtype=torch.int32)
    both(x, unit, geometry, device, bias=ends, x_zero_point=5, x_scale=1e-7)
    floats = torch.randn(n, device="cuda") * 30
    floats[3], floats[4], floats[5] = 1e38, float("inf"), float("nan")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        both(x, unit, geometry, device, bias=floats.to(dtype))
        weight = packed(ones, (torch.rand(n, device="cuda") + 0.1).to(dtype), floats.to(dtype))
        both(x, weight, geometry, device, x_zero_point=-9)


@pytest.mark.parametrize("groups", [1, 48])
def test_x_of_any_strides(groups: int) -> None:
    weight = packed(
        codes(torch.int8, 48, 48 // groups, 3, 3), torch.rand(48, device="cuda") * 0.01 + 1e-3
    )
    geometry = Geometry((1, 1), (1, 1), (1, 1), groups)
    memory = codes(torch.uint8, 4 * 48 * 12 * 11 + 3)
    for start in (0, 1, 3):
        x = memory[start : start + 4 * 48 * 12 * 11].view(4, 12, 11, 48).movedim(-1, 1)
        both(x, weight, geometry, x_zero_point=9, y_scale=spread(weight))
        both(x[1:3, :, ::2, 1:], weight, geometry, x_zero_point=9, y_scale=spread(weight))
        both(x.contiguous(), weight, geometry, x_zero_point=9, y_scale=spread(weight))
    y = co.conv2d_int8(
        memory[:0].view(0, 48, 12, 11), weight, padding=1, groups=groups, x_scale=1.0, y_scale=1.0
    )
    assert y.shape == (0, 48, 12, 11)


@pytest.mark.parametrize("groups", [1, 64])
@pytest.mark.parametrize("warm", [True, False])
def test_graphs(groups: int, warm: bool) -> None:
    """Captured with a weight that was used before, or not; replayed with another x."""
    weight = packed(
        codes(torch.int8, 64, 64 // groups, 3, 3), torch.rand(64, device="cuda") * 0.01 + 1e-3
    )
    static = codes(torch.int8, 2, 64, 15, 15)
    options: dict[str, Any] = {
        "padding": 1,
        "groups": groups,
        "x_scale": 0.03,
        "x_zero_point": 4,
        "y_scale": spread(weight),
    }
    if warm:
        co.conv2d_int8(static, weight, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = co.conv2d_int8(static, weight, **options)
    for seed in (5, 6):
        static.copy_(codes(torch.int8, 2, 64, 15, 15, seed=seed))
        graph.replay()
        assert torch.equal(y, co.conv2d_int8(static, weight, **options))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = co.conv2d_int8(static, weight, **options)
    stream.synchronize()
    assert torch.equal(y, other)


def test_codes_that_are_written_to() -> None:
    first, second = (
        packed(codes(torch.int8, 64, 48, 3, 3, seed=s), torch.ones(64, device="cuda"))
        for s in (1, 2)
    )
    x = codes(torch.int8, 2, 48, 9, 9)
    options: dict[str, Any] = {"x_scale": 0.03, "y_scale": 50.0}
    before, after = (co.conv2d_int8(x, weight, **options) for weight in (first, second))
    assert not torch.equal(before, after)
    first.codes.copy_(second.codes)
    assert torch.equal(co.conv2d_int8(x, first, **options), after)
    with torch.inference_mode():
        weight = packed(codes(torch.int8, 64, 48, 3, 3, seed=2), torch.ones(64, device="cuda"))
        assert torch.equal(co.conv2d_int8(x, weight, **options), after)


def test_compiled() -> None:
    weight = packed(codes(torch.int8, 32, 16, 3, 3), torch.rand(32, device="cuda") * 0.01 + 1e-3)
    matrix = packed(codes(torch.int8, 8, 32), torch.rand(8, device="cuda") * 0.01 + 1e-3)

    def layers(x: Tensor) -> Tensor:
        y = co.conv2d_int8(x, weight, x_scale=0.1, x_zero_point=3, y_scale=2.0, padding=1)
        return co.linear_int8(y.movedim(1, -1), matrix, x_scale=2.0, y_scale=3.0, activation="relu")

    torch._dynamo.reset()
    compiled = torch.compile(layers, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (8, 5, 11):
        x = codes(torch.int8, 2, 16, size, size + 1)
        assert torch.equal(compiled(x), layers(x))
