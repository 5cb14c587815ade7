"""The specification of products and epilogues against exact integer arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cases import INF, NAN, int8, same
from torch import Tensor

from cutlass_ops import reference
from cutlass_ops.reference import (
    dequantize_activations,
    dequantize_weight,
    epilogue,
    gemm_quantized,
    mixed_gemm,
    natural_order,
    quantize_activations,
    quantize_weight,
    rms_norm,
    silu_mul,
)
from cutlass_ops.reference.activations import _sum_of_squares
from cutlass_ops.weights import formats
from cutlass_ops.weights.weight import QuantizedWeight

# ---- products


def weight_of_one_row(
    k: int, codes: dict[int, int], scales: list[float], group: int, **rest: object
) -> QuantizedWeight:
    """A 4-bit row of codes 8 except in ``codes``."""
    row = torch.full((1, k), 8, dtype=torch.uint8)
    for column, code in codes.items():
        row[0, column] = code
    return QuantizedWeight(row, torch.tensor([scales]), group_size=group, **rest)


def test_symmetric_product_by_hand() -> None:
    codes = torch.zeros(1, 64, dtype=torch.int8)
    codes[0, [0, 1, 32]] = int8([3, -2, 5])[0]
    qw = weight_of_one_row(64, {0: 10, 1: 7, 32: 15, 40: 1}, [0.25, -1.0], 32)
    # I = 3 * 2 + -2 * -1 = 8 and 5 * 7 = 35; y = 0.5 * 0.25 * 8 + 2 * -1 * 35
    y = gemm_quantized(codes, torch.tensor([[0.5, 2.0]]), None, 32, qw)
    assert same(y, torch.tensor([[-69.0]]))
    # One scale a row: 0.5 * (0.25 * 8 - 35)
    assert gemm_quantized(codes, torch.tensor([[0.5]]), None, -1, qw).item() == -16.5
    # One group a row: 0.25 * (0.5 * 8 + 2 * 35)
    qw = weight_of_one_row(64, {0: 10, 1: 7, 32: 15, 40: 1}, [0.25], -1)
    assert gemm_quantized(codes, torch.tensor([[0.5, 2.0]]), None, 32, qw).item() == 18.5
    # Neither: 0.5 * 0.25 * 43
    assert gemm_quantized(codes, torch.tensor([[0.5]]), None, -1, qw).item() == 5.375


def test_asymmetric_product_by_hand() -> None:
    codes = torch.full((1, 64), 1, dtype=torch.int8)
    codes[0, 32:] = -3
    codes[0, [0, 1, 40]] = int8([4, -128, 127])[0]
    scales, zeros = torch.tensor([[0.5, 2.0]]), int8([1, -3])
    qw = weight_of_one_row(
        64,
        {0: 5, 1: 15, 40: 0},
        [0.5, 0.25],
        32,
        zeros=torch.tensor([[2, 9]], dtype=torch.uint8),
    )
    # Where a code is its zero point the weight is of no account (here 8 - 2 and 8 - 9).
    # I = 3 * 3 + -129 * 13 = -1668 and 130 * -9 = -1170; y = 0.25 * -1668 + 0.5 * -1170
    assert gemm_quantized(codes, scales, zeros, 32, qw).item() == -1002
    # With offsets: I = 3 * -3 + -129 * 7 = -912 and 130 * -8 = -1040; 0.25 * -912 + 0.5 * -1040 =
    # -748. S = 0.5 * (3 - 129) = -63 and 2 * 130 = 260; 1.5 * -63 - 0.25 * 260 = -159.5
    qw = weight_of_one_row(
        64, {0: 5, 1: 15, 40: 0}, [0.5, 0.25], 32, offsets=torch.tensor([[1.5, -0.25]])
    )
    assert gemm_quantized(codes, scales, zeros, 32, qw).item() == -748 - 159.5


def test_mixed_gemm_quantises_by_block_or_token_by_hand() -> None:
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1], x[0, 32] = 127, 0.5, 254 * 4
    qw = weight_of_one_row(64, {0: 9, 1: 10, 32: 9}, [1.0, 1.0], 32)
    assert mixed_gemm(x, qw).item() == 127 + 1 + 1016
    # Blocks of 32: scale 1 for the first (0.5 is lost), 8 for the second.
    assert mixed_gemm(x, qw, act_quant="block").item() == 127 + 1016
    # One scale of 8: 127 / 8 = 15.875 is 16.
    assert mixed_gemm(x, qw, act_quant="token").item() == 128 + 1016
    # Asymmetric, by block: scales 127 / 255 and 1016 / 255; 0.5 is 1.004 steps, one step.
    y = mixed_gemm(
        x,
        qw,
        act_quant="block",
        act_symmetric=False,
        compute_dtype=torch.float64,
        out_dtype=torch.float64,
    )
    assert y.item() == pytest.approx(127 + 2 * 127 / 255 + 1016, rel=1e-7)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
def test_an_identity_gives_the_weight_bit_for_bit(bits: int, dtype: torch.dtype, kind: str) -> None:
    g = torch.Generator().manual_seed(bits)
    k, n, groups = 96, 40, 3
    qw = QuantizedWeight(
        torch.randint(0, 2**bits, (n, k), generator=g, dtype=torch.uint8),
        torch.randn(n, groups, generator=g).to(dtype),
        zeros=torch.randint(0, 2**bits, (n, groups), generator=g, dtype=torch.uint8)
        if kind == "zeros"
        else None,
        offsets=torch.randn(n, groups, generator=g) if kind == "offsets" else None,
        bits=bits,
        group_size=32,
        perm=torch.randperm(k, generator=g),
    )
    assert same(mixed_gemm(torch.eye(k), qw).t(), dequantize_weight(qw, torch.float32))
    assert same(mixed_gemm(torch.eye(k, dtype=dtype), qw).t(), dequantize_weight(qw, dtype))


@st.composite
def problems(draw: st.DrawFn) -> tuple[QuantizedWeight, Tensor, Tensor, Tensor | None, int]:
    """Random codes, power-of-two scales: everything about the product is an integer."""
    bits = draw(st.sampled_from([4, 8]))
    k = draw(st.sampled_from([1, 31, 32, 33, 100, 130, 192, 300]))
    group = draw(st.sampled_from([16, 32, 64, 128, 256, -1]))
    block = draw(st.sampled_from([16, 32, 64, 128, -1]))
    m, n = draw(st.integers(0, 3)), draw(st.sampled_from([1, 5, 150]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    groups, blocks = formats.group_count(k, group), formats.group_count(k, block)
    kind = draw(st.sampled_from(["symmetric", "zeros", "offsets"]))
    signs = torch.randint(0, 2, (n, groups), generator=g) * 2 - 1
    qw = QuantizedWeight(
        torch.randint(0, 2**bits, (n, k), generator=g, dtype=torch.uint8),
        (signs * 2 ** torch.randint(0, 2, (n, groups), generator=g)).to(torch.float16),
        zeros=torch.randint(0, 2**bits, (n, groups), generator=g, dtype=torch.uint8)
        if kind == "zeros"
        else None,
        offsets=torch.randint(-9, 10, (n, groups), generator=g).float()
        if kind == "offsets"
        else None,
        bits=bits,
        group_size=group,
    )
    codes = torch.randint(-128, 128, (m, k), generator=g).to(torch.int8)
    scales = 2.0 ** torch.randint(0, 2, (m, blocks), generator=g)
    zeros = (
        torch.randint(-128, 128, (m, blocks), generator=g).to(torch.int8)
        if draw(st.booleans())
        else None
    )
    return qw, codes, scales, zeros, block


def spread(vector: Tensor | None, size: int, k: int) -> np.ndarray:
    """A value for each column, int64."""
    if vector is None:
        return np.zeros((1, k), dtype=np.int64)
    return np.repeat(vector.numpy().astype(np.int64), k if size == -1 else size, axis=1)[:, :k]


@given(problems(), st.sampled_from([1, 1 << 20]))
@settings(deadline=None, max_examples=300)
def test_products_are_exact_in_integers(
    problem: tuple[QuantizedWeight, Tensor, Tensor, Tensor | None, int], chunk: int
) -> None:
    qw, codes, scales, zeros, block = problem
    k, group = qw.k, qw.group_size
    # The operands, column by column: no steps, no centred sums.
    a = spread(scales, block, k) * (codes.numpy().astype(np.int64) - spread(zeros, block, k))
    middle = spread(qw.zeros, group, k) if qw.zeros is not None else formats.midpoint(qw.bits)
    w = spread(qw.scales, group, k) * (qw.codes.numpy().astype(np.int64) - middle) + spread(
        qw.offsets, group, k
    )
    expected = a @ w.T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.blocks, "CHUNK", chunk)  # 1: rows in chunks of 64
        y = gemm_quantized(
            codes, scales, zeros, block, qw, compute_dtype=torch.float64, out_dtype=torch.float64
        )
        y32 = gemm_quantized(codes, scales, zeros, block, qw)
        x = torch.from_numpy(a).float()
        unquantised = mixed_gemm(x, qw, compute_dtype=torch.float64, out_dtype=torch.float64)
    assert y.dtype == torch.float64
    assert np.array_equal(y.numpy(), expected)
    assert np.array_equal(unquantised.numpy(), expected)
    # fp32 is exact as long as no sum can leave its integers.
    largest = (np.abs(a) @ (np.abs(w) + 2 * np.abs(spread(qw.offsets, group, k))).T).max(initial=0)
    if largest < 2**24:
        assert np.array_equal(y32.numpy(), expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("w_zeros", [False, True])
@pytest.mark.parametrize("x_zeros", [False, True])
def test_sums_beyond_fp32_are_still_exact(x_zeros: bool, w_zeros: bool, bits: int) -> None:
    # The fewest products of extreme codes that are above 2^24 together, and products of 1 that make
    # their sum odd: fp32 has only even numbers there.
    x, x_one, zero = (127, -127, -128) if x_zeros else (-128, -1, 0)
    w, w_one, w_zero = (2**bits - 1, 1, 0) if w_zeros else (0, 2 ** (bits - 1) - 1, 2 ** (bits - 1))
    largest, one = (x - zero) * (w - w_zero), (x_one - zero) * (w_one - w_zero)
    assert one == math.copysign(1, largest)
    count = 2**24 // abs(largest) + 1
    ones = 2 if count * largest % 2 else 1
    codes, matrix = (
        torch.tensor([[code] * count + [unit] * ones]) for code, unit in ((x, x_one), (w, w_one))
    )
    zeros = torch.tensor([[w_zero]], dtype=torch.uint8) if w_zeros else None
    qw = QuantizedWeight(
        matrix.to(torch.uint8), torch.ones(1, 1), zeros=zeros, bits=bits, group_size=-1
    )
    expected = count * largest + ones * one
    assert abs(expected) > 2**24
    assert expected % 2
    args = codes.to(torch.int8), torch.ones(1, 1), int8([zero]) if x_zeros else None, -1, qw
    kwargs = {"compute_dtype": torch.float64, "out_dtype": torch.float64}
    assert gemm_quantized(*args, **kwargs).item() == expected
    # In fp32 the exact integer is rounded once.
    assert gemm_quantized(*args).item() == float(np.float32(expected))


@pytest.mark.parametrize("act_quant", ["none", "block", "token"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 128, 256, -1])
def test_fp32_products_are_near_the_fp64_product_of_the_dequantised_operands(
    act_quant: str, symmetric: bool, group: int
) -> None:
    g = torch.Generator().manual_seed(3)
    m, n, k = 7, 192, 576
    x = torch.randn(m, k, generator=g)
    qw = quantize_weight(torch.randn(n, k, generator=g).to(torch.bfloat16), 4, group, symmetric)
    if act_quant == "none":
        operand = x.double()
    else:
        block = -1 if act_quant == "token" else min(group, 128) if group != -1 else 128
        codes, scales, zeros = quantize_activations(x, block, symmetric)
        integers = codes.double() - (
            0 if zeros is None else torch.from_numpy(spread(zeros, block, k))
        )
        width = k if block == -1 else block
        operand = integers * scales.double().repeat_interleave(width, 1)[:, :k]
    oracle = operand @ dequantize_weight(qw, torch.float64).t()
    y = mixed_gemm(x, qw, act_quant=act_quant, act_symmetric=symmetric)
    error, rms = y.double() - oracle, oracle.square().mean().sqrt()
    assert error.norm() <= 1e-6 * oracle.norm()
    assert error.abs().max() <= 1e-5 * rms
    kwargs = {"compute_dtype": torch.float64, "out_dtype": torch.float64}
    y64 = mixed_gemm(x, qw, act_quant=act_quant, act_symmetric=symmetric, **kwargs)
    assert (y64 - oracle).abs().max() <= 1e-13 * rms


@pytest.mark.parametrize("act_quant", ["block", "token"])
def test_activations_are_quantised_after_the_gather(act_quant: str) -> None:
    g = torch.Generator().manual_seed(4)
    x = torch.randn(3, 64, generator=g) * 10.0 ** torch.arange(-2, 2).repeat(16)
    perm = torch.arange(64).view(16, 4).t().flatten()  # columns of one size become neighbours
    qw = quantize_weight(torch.randn(8, 64, generator=g), 4, 32, False)
    ordered = QuantizedWeight(qw.codes, qw.scales, zeros=qw.zeros, group_size=32, perm=perm)
    gathered = mixed_gemm(x[:, perm], qw, act_quant=act_quant)
    assert same(mixed_gemm(x, ordered, act_quant=act_quant), gathered)
    if act_quant == "block":
        codes, scales, _ = quantize_activations(x, 32, True)
        assert not torch.allclose(gemm_quantized(codes[:, perm], scales, None, 32, qw), gathered)


@pytest.mark.parametrize("act_quant", ["none", "block", "token"])
@pytest.mark.parametrize("act_symmetric", [True, False])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("activation", [None, *reference.ACTIVATIONS, ("clamp", -1.0, 1.0)])
def test_a_row_with_nan_or_inf_is_nan_and_the_others_untouched(
    act_quant: str, act_symmetric: bool, bad: float, activation: reference.Activation
) -> None:
    g = torch.Generator().manual_seed(5)
    weight = torch.randn(40, 100, generator=g)
    weight[3] = 0  # even where every product is 0
    qw = quantize_weight(weight, 8, 32, True)
    x = torch.randn(4, 100, generator=g)
    kwargs = {"act_quant": act_quant, "act_symmetric": act_symmetric, "activation": activation}
    clean = mixed_gemm(x, qw, **kwargs)
    x[2, 77] = bad
    y = mixed_gemm(x, qw, **kwargs)
    assert y[2].isnan().all()
    assert same(y[[0, 1, 3]], clean[[0, 1, 3]])
    assert clean.isfinite().all()


@pytest.mark.parametrize("act_quant", ["none", "block", "token"])
def test_no_rows(act_quant: str) -> None:
    qw = quantize_weight(torch.ones(5, 40), 4, 32, True)
    y = mixed_gemm(torch.empty(0, 40, dtype=torch.bfloat16), qw, act_quant=act_quant)
    assert y.shape == (0, 5)
    assert y.dtype == torch.bfloat16


# ---- epilogue


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (None, [-7.0, -1.0, 0.0, 1.0, 8.0]),
        ("relu", [0.0, 0.0, 0.0, 1.0, 8.0]),
        ("relu6", [0.0, 0.0, 0.0, 1.0, 6.0]),
        (("clamp", -2.0, 0.5), [-2.0, -1.0, 0.0, 0.5, 0.5]),
        (("clamp", 0.5, 0.5), [0.5] * 5),
        # x * Phi(x), from a table of the normal distribution: Phi(1) = 0.8413447461,
        # Phi(-7) = 1.27981e-12
        ("gelu", [-8.95868780e-12, -0.1586552539, 0.0, 0.8413447461, 8.0]),
        # x / (1 + exp(-x)): e = 2.718281828, exp(7) = 1096.633158, exp(8) = 2980.957987
        ("silu", [-7 / 1097.633158, -1 / 3.718281828, 0.0, 1 / 1.3678794412, 8 / 1.00033546263]),
        # x / (1 + exp(-2 y)) of y = sqrt(2 / pi) * (x + 0.044715 * x^3): y(1) = 0.8335616
        ("gelu_tanh", [-2.3e-15, -0.158808009392, 0.0, 0.841191990608, 8.0]),
    ],
)
def test_activations_by_hand(activation: reference.Activation, expected: list[float]) -> None:
    total = torch.tensor([[-7.0, -1.0, 0.0, 1.0, 8.0]], dtype=torch.float64)
    assert epilogue(total, activation=activation, out_dtype=torch.float64)[
        0
    ].tolist() == pytest.approx(expected, rel=1e-8)
    assert epilogue(total.float(), activation=activation)[0].tolist() == pytest.approx(
        expected, rel=1e-6, abs=1e-8
    )


def test_bias_comes_before_the_activation_and_the_residual_after_it() -> None:
    total, bias = torch.tensor([[1.0, -3.0]]), torch.tensor([-2.0, 5.0], dtype=torch.bfloat16)
    residual = torch.tensor([[-0.5, -100.0]], dtype=torch.float16)
    assert epilogue(total, bias, "relu", residual).tolist() == [[-0.5, -98.0]]


def test_the_result_is_rounded_once() -> None:
    # fp16 has steps of 2 above 2048: 2049 + 2^-10 is nearer to 2050; 2049 alone is a tie
    # and becomes 2048.
    y = epilogue(
        torch.tensor([[2049.0]]), residual=torch.tensor([[2.0**-10]]), out_dtype=torch.float16
    )
    assert y.item() == 2050
    y = epilogue(
        torch.tensor([[2048.0]]), bias=torch.tensor([1.0 + 2.0**-10]), out_dtype=torch.float16
    )
    assert y.item() == 2050


@pytest.mark.parametrize("activation", [None, *reference.ACTIVATIONS, ("clamp", -1.0, 1.0)])
def test_a_sum_that_is_not_finite_is_nan_whatever_follows(activation: reference.Activation) -> None:
    total = torch.tensor([[NAN, INF, -INF, 0.5]])
    y = epilogue(total, torch.ones(4), activation, torch.ones(1, 4), torch.float16, saturate=True)
    assert y.isnan().tolist() == [[True, True, True, False]]


def test_overflow_gives_inf_or_saturates() -> None:
    total = torch.tensor([[65504.0, 65519.0, 65520.0, -1e6, NAN]])
    assert same(
        epilogue(total, out_dtype=torch.float16),
        torch.tensor([[65504.0, 65504.0, INF, -INF, NAN]], dtype=torch.float16),
    )
    assert same(
        epilogue(total, out_dtype=torch.float16, saturate=True),
        torch.tensor([[65504.0, 65504.0, 65504.0, -65504.0, NAN]], dtype=torch.float16),
    )
    assert epilogue(torch.tensor([[3.4e38]]), out_dtype=torch.bfloat16).item() == INF
    largest = torch.finfo(torch.bfloat16).max
    assert (
        epilogue(torch.tensor([[3.4e38]]), out_dtype=torch.bfloat16, saturate=True).item()
        == largest
    )


@pytest.mark.parametrize("act_quant", ["none", "block"])
def test_mixed_gemm_passes_every_option_to_the_epilogue(act_quant: str) -> None:
    qw = weight_of_one_row(32, {0: 9}, [1.0], 32)
    x = torch.zeros(1, 32, dtype=torch.float16)
    x[0, 0] = 127
    y = mixed_gemm(x, qw, act_quant=act_quant)
    assert y.dtype == torch.float16
    assert y.item() == 127
    assert mixed_gemm(x, qw, act_quant=act_quant, bias=torch.tensor([-200.0])).item() == -73
    assert (
        mixed_gemm(
            x, qw, act_quant=act_quant, bias=torch.tensor([-200.0]), activation="relu"
        ).item()
        == 0
    )
    biased = weight_of_one_row(32, {0: 9}, [1.0], 32, bias=torch.tensor([3.0]))
    assert mixed_gemm(x, biased, act_quant=act_quant).item() == 130
    residual = torch.tensor([[-1e6]])
    assert mixed_gemm(x, qw, act_quant=act_quant, residual=residual).item() == -INF
    assert mixed_gemm(x, qw, act_quant=act_quant, residual=residual, saturate=True).item() == -65504
    y = mixed_gemm(x, qw, act_quant=act_quant, residual=residual, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    assert y.item() == -999873


# ---- what decoders compute between two products


def test_rms_norm_by_hand() -> None:
    # The mean square is (9 + 16) / 4 = 6.25, beside which eps is nothing: r = 1 / 2.5 = 0.4.
    x = torch.tensor([[3.0, -4.0, 0.0, 0.0]]).half()
    weight = torch.tensor([2.0, 0.5, 1.0, 1.0]).half()
    y, total = rms_norm(x, weight, 1e-15)
    assert y.dtype == torch.float16
    assert total is x
    # 3 r in fp16 is 1.2001953125, -4 r is -1.599609375; then the weights.
    assert y.tolist() == [[2.400390625, -0.7998046875, 0.0, 0.0]]
    y, total = rms_norm(x - 1, weight, 1e-15, torch.ones_like(x))
    assert torch.equal(total, x)
    assert y.tolist() == [[2.400390625, -0.7998046875, 0.0, 0.0]]


def test_rms_norm_rounds_the_sum_and_the_quotient_to_the_dtype() -> None:
    # r is 0.4: 3 r in fp16 is 1.2001953125, and 1.5 of it is halfway between 1843 and 1844 steps;
    # 1.5 of 1.2 is nearer to 1843.
    y, _ = rms_norm(
        torch.tensor([[3.0, -4.0, 0.0, 0.0]]).half(), torch.full((4,), 1.5).half(), 1e-15
    )
    assert y[0, 0].item() == 1844 / 1024
    # 2048 + 1 is no fp16: the residual that goes on is 2048, and its norm is taken.
    x = torch.full((1, 8), 2048.0).half()
    y, total = rms_norm(x, torch.ones(8).half(), 1e-6, torch.ones_like(x))
    assert total.tolist() == [[2048.0] * 8]
    assert y.tolist() == [[1.0] * 8]


def test_squares_are_summed_in_the_order_that_is_specified() -> None:
    # fp32 forgets 1 beside 2^24. Column by column 2^24 + 1 + 1 + ... would stay 2^24; neighbours
    # in pairs do not.
    x = torch.ones(1, 1024)
    x[0, 0] = 4096.0
    # The pair (2^24, 1) loses its 1; all other pairs keep theirs, and every later sum is even.
    assert _sum_of_squares(x).item() == 2**24 + 1022
    x[0, 1] = 0.0
    assert _sum_of_squares(x).item() == 2**24 + 1022
    # Runs of 512 columns, 32 apart in the order of K: (2^24 + 1) + 1 loses both ones that 2^24 +
    # (1 + 1) would keep.
    runs = torch.zeros(1, 512 * 65)
    runs[0, 0] = 4096.0
    runs[0, 512 * 32] = runs[0, 512 * 64] = 1.0
    assert _sum_of_squares(runs).item() == 2**24
    # Which runs share a lane: those 32 apart and no others. Two ones of another lane are
    # added to a 2, which 2^24 of lane 0 does not lose.
    for first, second, total in (
        (16, 48, 2**24 + 2),
        (32, 96, 2**24),
        (31, 63, 2**24 + 2),
        (33, 65, 2**24 + 2),
    ):
        runs = torch.zeros(1, 512 * 97)
        runs[0, 0] = 4096.0
        runs[0, 512 * first] = runs[0, 512 * second] = 1.0
        assert _sum_of_squares(runs).item() == total, (first, second)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [1, 7, 576, 4096, 20000])
def test_rms_norm_is_near_the_exact_one(dtype: torch.dtype, k: int) -> None:
    random = torch.Generator().manual_seed(k)
    x, weight = (
        torch.randn(3, k, generator=random).to(dtype),
        torch.randn(k, generator=random).to(dtype),
    )
    y, _ = rms_norm(x, weight, 1e-5)
    exact = (
        x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    )
    unit = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-21}[dtype]
    assert ((y.double() - exact).abs() <= unit * exact.abs() + 1e-6).all()


def test_silu_mul() -> None:
    gate = torch.tensor([[0.0, 1.0, -1.0, 20.0, -100.0, 60000.0]]).half()
    up = torch.tensor([[5.0, 2.0, 2.0, 3.0, 3.0, 2.0]]).half()
    y = silu_mul(gate, up)
    # silu(1) = 0.73106: in fp16 0.73096; silu(-1) = -0.26894: -0.26904. The product of the last
    # column overflows.
    assert y.tolist() == [[0.0, 1.4619140625, -0.5380859375, 60.0, 0.0, INF]]
    assert y.dtype == torch.float16
    values = torch.randn(4, 999, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float16, torch.bfloat16):
        a, b = values.to(dtype), values.flip(0).to(dtype)
        assert torch.equal(silu_mul(a, b), torch.nn.functional.silu(a) * b)  # what models compute


# ---- errors


def simple() -> QuantizedWeight:
    return quantize_weight(torch.ones(2, 64), 4, 64, True)


def test_wrong_arguments_are_named() -> None:
    qw, x = simple(), torch.ones(3, 64)
    with pytest.raises(
        TypeError, match="x has dtype float64; supported are float16, bfloat16, float32"
    ):
        mixed_gemm(x.double(), qw)
    with pytest.raises(ValueError, match=r"x has shape \(64,\)"):
        mixed_gemm(x[0], qw)
    with pytest.raises(ValueError, match=r"63 columns; the weight \(2, 64\) takes 64"):
        mixed_gemm(x[:, 1:], qw)
    with pytest.raises(
        ValueError, match="act_quant is 'row'; supported are 'none', 'token' and 'block'"
    ):
        mixed_gemm(x, qw, act_quant="row")
    for activation in ("tanh", ("clamp", 1.0), ("relu", 0.0, 1.0)):
        with pytest.raises(ValueError, match=r"activation is .*; supported are None"):
            mixed_gemm(x, qw, activation=activation)
    for bounds in ((1.0, 0.0), (NAN, 1.0)):
        with pytest.raises(ValueError, match="lo <= hi"):
            mixed_gemm(x, qw, activation=("clamp", *bounds))
    for act_quant in ("none", "block"):
        with pytest.raises(ValueError, match=r"bias has shape \(1,\); \(2,\) is expected"):
            mixed_gemm(x, qw, bias=torch.ones(1), act_quant=act_quant)
        with pytest.raises(ValueError, match=r"residual has shape \(2,\); \(3, 2\) is expected"):
            mixed_gemm(x, qw, residual=torch.ones(2), act_quant=act_quant)
        biased = QuantizedWeight(qw.codes, qw.scales, group_size=64, bias=torch.ones(2))
        with pytest.raises(ValueError, match="the weight has one already"):
            mixed_gemm(x, biased, bias=torch.ones(2), act_quant=act_quant)
    with pytest.raises(ValueError, match="block is 0"):
        quantize_activations(x, 0, True)
    with pytest.raises(TypeError, match="weight has dtype int32"):
        quantize_weight(x.int(), 4, 64, True)


def test_wrong_quantised_activations_are_named() -> None:
    qw, codes = simple(), torch.zeros(3, 64, dtype=torch.int8)
    with pytest.raises(
        ValueError, match="block is 48 and group_size is 64; one must divide the other"
    ):
        gemm_quantized(codes, torch.ones(3, 2), None, 48, qw)
    with pytest.raises(ValueError, match=r"scales has shape \(3, 2\); \(3, 1\) is expected"):
        gemm_quantized(codes, torch.ones(3, 2), None, 64, qw)
    with pytest.raises(ValueError, match=r"zeros has shape \(1, 1\); \(3, 1\) is expected"):
        gemm_quantized(codes, torch.ones(3, 1), int8([0]), 64, qw)
    with pytest.raises(TypeError, match="scales has dtype float16; supported are float32"):
        gemm_quantized(codes, torch.ones(3, 1).half(), None, 64, qw)
    with pytest.raises(TypeError, match="codes has dtype uint8; supported are int8"):
        dequantize_activations(codes.to(torch.uint8), torch.ones(3, 1), None, 64)
    with pytest.raises(ValueError, match="ordered has 64 columns; K = 64 is padded to 128"):
        natural_order(codes, 64)
