"""The specification of activations against cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cases import INF, NAN, TINY, int8, same

from cutlass_ops.reference import (
    activate,
    dequantize_activations,
    quantize_activations,
    quantize_weight,
)


@pytest.mark.parametrize(
    ("x", "codes", "scale"),
    [
        # amax 127: s = r = 1 and a code is the value rounded half to even.
        ([127, 0.5, 1.5, -2.5, -126.6, 0], [127, 0, 2, -2, -127, 0], 1.0),
        # amax 254: s = 2, r = 1/2; -1 / 2 and 3 / 2 are ties, -5 / 2 too.
        ([-254, -1, 3, -5, 253], [-127, 0, 2, -2, 126], 2.0),
        # amax 31.75: s = 1/4.
        ([31.75, -31.75, 0.25, 0.125], [127, -127, 1, 0], 0.25),
    ],
)
def test_symmetric_codes_by_hand(x: list[float], codes: list[int], scale: float) -> None:
    q, s, z = quantize_activations(torch.tensor([x], dtype=torch.float32), -1, symmetric=True)
    assert same(q, int8(codes))
    assert same(s, torch.tensor([[scale]]))
    assert z is None


@pytest.mark.parametrize(
    ("x", "codes", "zero", "scale"),
    [
        # hi - lo = 255: s = r = 1; z = rint(-128 + 55) = -73.
        ([-55, 200, 0.5, 1.5, 0], [-128, 127, -73, -71, -73], -73, 1.0),
        # z = rint(-128 + 54.5) = rint(-73.5) = -74; rint(-54.5) = -54, rint(200.5) = 200.
        ([-54.5, 200.5], [-128, 126], -74, 1.0),
        # z = rint(-126.5) = -126; rint(253.5) = 254 and 254 - 126 is clamped to 127.
        ([-1.5, 253.5, 2.5], [-128, 127, -124], -126, 1.0),
        # All positive: lo = 0, z = -128. s = 2: 51 / 2 = 25.5 rounds to 26.
        ([510, 51, 49], [127, -102, -104], -128, 2.0),
        # All negative: hi = 0, z = rint(-128 + 255) = 127.
        ([-255, -51], [-128, 76], 127, 1.0),
        # Constant blocks are exact: 63.75 = 255 / 4.
        ([63.75, 63.75], [127, 127], -128, 0.25),
        ([-63.75, -63.75], [-128, -128], 127, 0.25),
    ],
)
def test_asymmetric_codes_by_hand(
    x: list[float], codes: list[int], zero: int, scale: float
) -> None:
    q, s, z = quantize_activations(torch.tensor([x], dtype=torch.float32), -1, symmetric=False)
    assert same(q, int8(codes))
    assert same(s, torch.tensor([[scale]]))
    assert z is not None
    assert same(z, int8([zero]))


def test_each_operation_of_the_quantiser_rounds_separately() -> None:
    # In fp32, 127 / 33.75 is not (1 / 33.75) * 127, and x is 0.5 or more steps with
    # the first alone.
    x = float.fromhex("0x1.102042p-3")
    assert quantize_activations(torch.tensor([[33.75, x]]), -1, True)[0].tolist() == [[127, 1]]
    # 9 / 127 is not 9 * (1 / 127) = 0x1.224488p-4.
    assert quantize_activations(torch.tensor([[9.0]]), -1, True)[1].item() == float.fromhex(
        "0x1.22448ap-4"
    )
    # lo * r is rounded before it is subtracted from -128: fused, the zero points would be
    # -1, -11 and 101.
    for lo, hi, zero in (
        (-19.640625, 19.640625, 0),
        (-18.203125, 21.640625, -12),
        (-12.515625, 1.390625, 102),
    ):
        zeros = quantize_activations(torch.tensor([[lo, hi]]), -1, False)[2]
        assert zeros is not None
        assert zeros.item() == zero


def test_codes_are_clamped_below() -> None:
    # lo * r is just below -12.5, so -13; -128 - lo * r is rounded to the tie -115.5, so -116;
    # -13 - 116 is clamped.
    codes, _, zeros = quantize_activations(torch.tensor([[-11.25, 218.25]]), -1, False)
    assert zeros is not None
    assert zeros.item() == -116
    assert codes[0, 0] == -128


def test_each_block_has_a_scale_and_the_last_may_be_short() -> None:
    x = torch.tensor([[127.0, 3, 254, 2, -12.7]])
    codes, scales, _ = quantize_activations(x, 2, True)
    assert codes.tolist() == [[127, 3, 127, 1, -127]]
    expected = np.array([[1, 2, np.float32(12.7) / np.float32(127)]], dtype=np.float32)
    assert np.array_equal(scales.numpy(), expected)
    # One block a row: 254 rules.
    assert quantize_activations(x, -1, True)[0].tolist() == [[64, 2, 127, 1, -6]]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("largest", [0.0, TINY * (1 - 2**-20), -TINY * (1 - 2**-20)])
def test_a_zero_block_has_scale_one_and_codes_zero(symmetric: bool, largest: float) -> None:
    codes, scales, zeros = quantize_activations(torch.tensor([[0.0, largest]]), -1, symmetric)
    assert codes.tolist() == [[0, 0]]
    assert scales.tolist() == [[1.0]]
    assert zeros is None if symmetric else zeros is not None and zeros.tolist() == [[0]]


def test_the_smallest_range_is_quantised() -> None:
    codes, scales, _ = quantize_activations(torch.tensor([[TINY, -TINY / 2]]), -1, True)
    assert codes.tolist() == [[127, -64]]  # 63.5 is a tie
    assert scales.item() == np.float32(TINY) / np.float32(127)
    codes, _, zeros = quantize_activations(torch.tensor([[TINY, 0.0]]), -1, False)
    assert zeros is not None
    assert (codes - zeros).tolist() == [[-1, 0]]  # 255 in int8
    assert codes.tolist() == [[127, -128]]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_block_that_is_not_finite_has_a_nan_scale(symmetric: bool, bad: float) -> None:
    x = torch.tensor([[1.0, bad, 127, 5], [127, 1, 127, 5]])
    codes, scales, zeros = quantize_activations(x, 2, symmetric)
    good_codes, good_scales, good_zeros = quantize_activations(
        torch.tensor([[127.0, 1, 127, 5]]), 2, symmetric
    )
    assert codes[0, :2].tolist() == [0, 0]
    assert scales[0, 0].isnan()
    assert same(codes[0, 2:], good_codes[0, 2:])
    assert same(scales[0, 1:], good_scales[0, 1:])
    assert same(codes[1:], good_codes)
    assert same(scales[1:], good_scales)
    if zeros is not None and good_zeros is not None:
        assert zeros[0, 0] == 0
        assert same(zeros[1:], good_zeros)


def test_a_range_beyond_fp32_has_a_nan_scale() -> None:
    x = torch.tensor([[3e38, -3e38]])
    codes, scales, zeros = quantize_activations(x, -1, False)
    assert codes.tolist() == [[0, 0]]
    assert scales.isnan().all()
    assert zeros is not None
    assert zeros.item() == 0
    assert quantize_activations(x, -1, True)[0].tolist() == [[127, -127]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_activations_are_quantised_in_fp32(dtype: torch.dtype) -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    for symmetric in (True, False):
        for got, expected in zip(
            quantize_activations(x, 64, symmetric),
            quantize_activations(x.float(), 64, symmetric),
            strict=True,
        ):
            assert (got is None and expected is None) or same(got, expected)


def test_no_rows_and_strided_rows() -> None:
    codes, scales, zeros = quantize_activations(torch.empty(0, 40), 32, False)
    assert zeros is not None
    assert (codes.shape, scales.shape, zeros.shape) == ((0, 40), (0, 2), (0, 2))
    x = torch.arange(24.0).view(6, 4).t()
    assert same(
        quantize_activations(x, 4, True)[0], quantize_activations(x.contiguous(), 4, True)[0]
    )


def scalar_quantiser(x: list[np.float32], symmetric: bool) -> tuple[list[int], np.float32, int]:
    """One block, one number at a time, in numpy's fp32 scalars: each operation is an IEEE
    operation.
    """
    f = np.float32
    lo, hi = min(f(0), *x), max(f(0), *x)
    span = max(hi, -lo) if symmetric else hi - lo
    if span < f(TINY):
        return [0] * len(x), f(1), 0
    if symmetric:
        r = f(127) / span
        return [int(min(127, max(-127, np.rint(v * r)))) for v in x], span / f(127), 0
    r = f(255) / span
    z = int(min(127, max(-128, np.rint(f(-128) - lo * r))))
    return [int(min(127, max(-128, np.rint(v * r) + z))) for v in x], span / f(255), z


finite = st.floats(-(2.0**120), 2.0**120, width=32)

values = st.lists(
    finite | st.integers(-300, 300).map(float) | st.integers(-99, 99).map(lambda i: i / 2),
    min_size=2,
)


@given(values, st.booleans())
@settings(deadline=None, max_examples=300)
def test_codes_and_scales_are_those_of_scalar_arithmetic(x: list[float], symmetric: bool) -> None:
    codes, scales, zeros = quantize_activations(torch.tensor([x]), -1, symmetric)
    expected_codes, expected_scale, expected_zero = scalar_quantiser(
        [np.float32(v) for v in x], symmetric
    )
    assert codes[0].tolist() == expected_codes
    assert scales.numpy()[0, 0] == expected_scale
    assert (0 if zeros is None else zeros.item()) == expected_zero


@given(values, st.booleans(), st.sampled_from([2, 3, 32, -1]))
@settings(deadline=None)
def test_dequantised_activations_are_within_half_a_scale(
    x: list[float], symmetric: bool, block: int
) -> None:
    codes, scales, zeros = quantize_activations(torch.tensor([x]), block, symmetric)
    back = dequantize_activations(codes, scales, zeros, block).double()[0].tolist()
    for i, (value, approximation) in enumerate(zip(x, back, strict=True)):
        scale = scales[0, 0 if block == -1 else i // block].item()
        # A zero block is off by less than 2^-100; the rest is fp32's rounding of products of
        # up to 255 steps.
        assert abs(value - approximation) <= max(
            scale * (0.5 + 255 * 2**-22), TINY if scale == 1 else 0
        )
        if value == 0:
            assert approximation == 0


@given(st.floats(2.0**-90, 2.0**90, width=32), st.booleans())
def test_a_constant_block_is_exact(c: float, negative: bool) -> None:
    c = -c if negative else c
    codes, scales, zeros = quantize_activations(torch.full((1, 7), c), -1, False)
    assert zeros is not None
    assert set((codes.int() - zeros.int()).flatten().tolist()) == {-255 if negative else 255}
    # s itself is rounded
    assert abs(255 * scales.item() - c * (-1 if negative else 1)) <= abs(c) * 2**-24


@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_device_finds_the_same_codes(symmetric: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(6)
    x = (
        torch.randn(257, 1000, generator=g) * 10.0 ** torch.randint(-3, 4, (257, 1), generator=g)
    ).to(dtype)
    for block in (32, 128, -1):
        on_cpu = quantize_activations(x, block, symmetric)
        for here, there in zip(
            on_cpu, quantize_activations(x.cuda(), block, symmetric), strict=True
        ):
            assert (here is None and there is None) or same(here, there.cpu())
    on_cpu, on_gpu = (quantize_weight(w, 4, 64, symmetric) for w in (x, x.cuda()))
    assert same(on_cpu.codes, on_gpu.codes.cpu())
    assert same(on_cpu.scales, on_gpu.scales.cpu())


def test_dequantised_activations_by_hand() -> None:
    codes, scales = int8([3, -128, 7], [0, 1, 2]), torch.tensor([[0.5, 4.0], [1.0, -2.0]])
    assert dequantize_activations(codes, scales, None, 2).tolist() == [[1.5, -64, 28], [0, 1, -4]]
    zeros = int8([-1, 127], [1, -128])
    assert dequantize_activations(codes, scales, zeros, 2).tolist() == [
        [2, -63.5, -480],
        [-1, 0, -260],
    ]


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_a_functions_bits_depend_on_the_element_alone(name: str) -> None:
    """In any number of elements, by any number of threads."""
    x = 4 * torch.randn(70_001, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = torch.cat([activate(x[i : i + 7], name) for i in range(0, len(x), 7)])
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            for begin, end in ((0, 70_001), (3, 16_388), (5, 32_773), (0, 65_537), (9, 97)):
                assert torch.equal(activate(x[begin:end], name), expected[begin:end])
    finally:
        torch.set_num_threads(before)
