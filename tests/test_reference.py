"""The specification of weights against cases worked out by hand and exact integer arithmetic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cases import INF, NAN, TINY, same

from cutlass_ops.reference import (
    activation_order,
    dequantize_weight,
    mixed_gemm,
    natural_order,
    quantize_weight,
)
from cutlass_ops.weights import formats
from cutlass_ops.weights.weight import QuantizedWeight

# ---- kernel order


def test_kernel_order_by_hand() -> None:
    codes = torch.arange(-64, 64, dtype=torch.int8)[None]
    ordered = activation_order(codes, None, 128)
    expected = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    assert (ordered[0, :16] + 64).tolist() == expected
    assert (ordered[0, 112:] + 64).tolist() == [112 + k for k in expected]
    assert same(natural_order(ordered, 128), codes)


@pytest.mark.parametrize(
    ("k", "block", "blocks", "padding"),
    [
        (130, 128, 2, [42] * 126),  # the second block reaches to the end
        (130, 32, 5, [42] * 30 + [0] * 96),  # columns 160.. have no block
        (130, -1, 1, [42] * 126),
        (128, 32, 4, []),
    ],
)
def test_padding_holds_the_zero_point_of_its_block(
    k: int, block: int, blocks: int, padding: list[int]
) -> None:
    codes = torch.full((2, k), 5, dtype=torch.int8)
    zeros = torch.full((2, blocks), 3, dtype=torch.int8)
    zeros[:, -1] = torch.tensor([42, -42])
    ordered = activation_order(codes, zeros, block)
    natural = natural_order(ordered, k)
    assert same(natural, codes)
    whole = natural_order(ordered, ordered.shape[1])
    assert whole[0, k:].tolist() == padding
    assert whole[1, k:].tolist() == [-p for p in padding]
    assert not natural_order(activation_order(codes, None, block), ordered.shape[1])[:, k:].any()


@given(st.integers(0, 3), st.integers(1, 400))
def test_natural_order_inverts_kernel_order(m: int, k: int) -> None:
    codes = torch.randint(-128, 128, (m, k)).to(torch.int8)
    ordered = activation_order(codes, None, -1)
    assert ordered.shape == (m, formats.padded_k(k))
    assert same(natural_order(ordered, k), codes)


# ---- weights


@pytest.mark.parametrize(
    ("bits", "w", "codes", "scale"),
    [
        # amax 7: s = 1; ties to even: -3.5 is -4, 0.5 is 0, 1.5 is 2. Codes are 8 higher.
        (4, [7, -3.5, 0.5, 1.5, -7], [15, 4, 8, 10, 1], 1.0),
        # amax 14 on the negative side: s = 2; 7 / 2 = 3.5 is 4, code 12.
        (4, [-14, 7, 0], [1, 12, 8], 2.0),
        (8, [127, -127, 0.5, -1.5], [255, 1, 128, 126], 1.0),
        (8, [-63.5, 1], [1, 130], 0.5),
    ],
)
def test_symmetric_weights_by_hand(
    bits: int, w: list[float], codes: list[int], scale: float
) -> None:
    qw = quantize_weight(torch.tensor([w], dtype=torch.float32), bits, 32, True)
    assert qw.codes.tolist() == [codes]
    assert qw.scales.tolist() == [[scale]]
    assert qw.symmetric


@pytest.mark.parametrize(
    ("bits", "w", "codes", "zero", "scale"),
    [
        # hi - lo = 15: s = 1, z = 5; 0.5 is 0, 1.5 is 2.
        (4, [-5, 10, 0, 0.5, 1.5], [0, 15, 5, 5, 7], 5, 1.0),
        # z = rint(1.5) = 2; rint(13.5) = 14 and 14 + 2 is clamped to 15.
        (4, [-1.5, 13.5], [0, 15], 2, 1.0),
        # All positive: zero is in the range, z = 0. s = 2: 5 / 2 is 2.
        (4, [30, 5], [15, 2], 0, 2.0),
        # All negative: z = 15.
        (4, [-15, -4], [0, 11], 15, 1.0),
        (8, [-100, 155, 0.5], [0, 255, 100], 100, 1.0),
    ],
)
def test_asymmetric_weights_by_hand(
    bits: int, w: list[float], codes: list[int], zero: int, scale: float
) -> None:
    qw = quantize_weight(torch.tensor([w], dtype=torch.float32), bits, 32, False)
    assert qw.codes.tolist() == [codes]
    assert qw.scales.tolist() == [[scale]]
    assert qw.zeros is not None
    assert qw.zeros.tolist() == [[zero]]


def test_weight_scales_are_rounded_up_to_the_stored_dtype() -> None:
    # 1/7 = 1170.29 / 2^13, and fp16 has steps of 2^-13 there; bf16 has steps of 2^-10:
    # 1/7 = 146.29 / 2^10.
    for dtype, scale in ((torch.float16, 1171 / 2**13), (torch.bfloat16, 147 / 2**10)):
        qw = quantize_weight(torch.tensor([[1.0, 0.5 * 1171 / 2**13]], dtype=dtype), 4, 32, True)
        assert qw.scales.dtype == dtype
        assert qw.scales.item() == scale
        assert qw.codes[0, 0] == 15
    # A scale that the dtype holds is not changed.
    assert (
        quantize_weight(torch.tensor([[0.875]], dtype=torch.float16), 4, 32, True).scales.item()
        == 0.125
    )
    # fp16's smallest number is 2^-24: a seventh of it is not 0. 10/7 of it is 2; with 1, 10
    # would be clamped.
    for largest, scale, code in ((1, 1, 9), (10, 2, 13)):
        w = torch.tensor([[largest * 2.0**-24]], dtype=torch.float16)
        qw = quantize_weight(w, 4, 32, True)
        assert qw.scales.item() == scale * 2.0**-24
        assert qw.codes.item() == code
    # Codes are those of the stored scale: w / s is a tie with s = 147 / 1024, but more
    # than 0.5 with 1/7.
    w = torch.tensor([[1.0, 147 / 2048]], dtype=torch.bfloat16)
    assert quantize_weight(w, 4, 32, True).codes.tolist() == [[15, 8]]


@pytest.mark.parametrize("symmetric", [True, False])
def test_weight_groups_zero_short_and_not_finite(symmetric: bool) -> None:
    w = torch.zeros(2, 100)
    w[0, 32:64] = 15.0
    w[0, 99] = -30
    w[1, 5] = NAN
    w[1, 40] = INF
    w[1, 64:96] = TINY / 2
    qw = quantize_weight(w, 4, 32, symmetric)
    assert qw.scales.shape == (2, 4)
    assert qw.scales.isnan().tolist() == [[False] * 4, [True, True, False, False]]
    assert qw.scales[0, 0] == 1
    assert qw.scales[1, 2:].tolist() == [1, 1]
    values = dequantize_weight(qw, torch.float32)
    assert values[1, 64:].eq(0).all()
    assert values[0, :32].eq(0).all()
    assert values[0, 96:99].eq(0).all()
    assert values[0, 40] == pytest.approx(15, rel=1e-6)
    assert values[0, 99] == pytest.approx(-30, rel=1e-6)
    assert values[1, :64].isnan().all()
    middle = 8 if symmetric else 0
    assert qw.codes[1].eq(middle).all()
    assert qw.zeros is None if symmetric else qw.zeros is not None and not qw.zeros[1].any()


@given(
    st.lists(
        st.floats(-60000, 60000, width=16) | st.integers(-9, 9).map(lambda i: i * 2.0**-24),
        min_size=1,
    ),
    st.sampled_from([4, 8]),
    st.booleans(),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from([32, 64, -1]),
)
@settings(deadline=None, max_examples=300)
def test_quantised_weights_are_within_half_a_scale(
    w: list[float], bits: int, symmetric: bool, dtype: torch.dtype, group: int
) -> None:
    weight = torch.tensor([w]).to(dtype)
    qw = quantize_weight(weight, bits, group, symmetric)
    back = dequantize_weight(qw, torch.float64)
    scales = qw.scales.double()[0, torch.arange(len(w)) // (len(w) if group == -1 else group)]
    assert (scales > 0).all()
    # fp32 rounds w / s, at most 255, and s itself if that is its dtype.
    assert ((back - weight.double()).abs() <= scales * (0.5 + 255 * 2**-22)).all()
    assert back[weight == 0].eq(0).all()


def test_dequantised_weights_by_hand() -> None:
    codes = torch.zeros(2, 34, dtype=torch.uint8)
    codes[:, 0], codes[:, 33] = 15, 3
    scales = torch.tensor([[0.5, -2.0], [1.0, 4.0]], dtype=torch.float16)
    rows = dequantize_weight(QuantizedWeight(codes, scales, group_size=32), torch.float32)
    # (15 - 8) * 0.5, (0 - 8) * 0.5, (0 - 8) * -2, (3 - 8) * -2
    assert rows[0, [0, 1, 32, 33]].tolist() == [3.5, -4, 16, 10]
    assert rows[1, [0, 1, 32, 33]].tolist() == [7, -8, -32, -20]
    zeros = torch.tensor([[15, 0], [1, 7]], dtype=torch.uint8)
    rows = dequantize_weight(
        QuantizedWeight(codes, scales, zeros=zeros, group_size=32), torch.float64
    )
    assert rows[0, [0, 1, 32, 33]].tolist() == [0, -7.5, 0, -6]
    assert rows[1, [0, 1, 32, 33]].tolist() == [14, -1, -28, -16]
    offsets = torch.tensor([[0.25, 1.0], [0.0, -3.0]])
    rows = dequantize_weight(
        QuantizedWeight(codes, scales, offsets=offsets, group_size=32), torch.float32
    )
    assert rows[0, [0, 1, 32, 33]].tolist() == [3.75, -3.75, 17, 11]
    assert rows[1, [0, 1, 32, 33]].tolist() == [7, -8, -35, -23]
    # 8 bits: zero points down to 0 and up to 255.
    codes8, zeros8 = (
        torch.tensor([[255, 0]], dtype=torch.uint8),
        torch.tensor([[0]], dtype=torch.uint8),
    )
    one = torch.ones(1, 1)
    assert dequantize_weight(
        QuantizedWeight(codes8, one, zeros=zeros8, bits=8), torch.float32
    ).tolist() == [[255, 0]]
    assert dequantize_weight(QuantizedWeight(codes8, one, bits=8), torch.float32).tolist() == [
        [127, -128]
    ]


def test_dequantising_undoes_the_act_order() -> None:
    # values 1, 2, 3 of input features 2, 0, 1
    codes = torch.tensor([[9, 10, 11]], dtype=torch.uint8)
    qw = QuantizedWeight(codes, torch.ones(1, 1), perm=torch.tensor([2, 0, 1]))
    assert dequantize_weight(qw, torch.float16).tolist() == [[2, 3, 1]]
    assert mixed_gemm(torch.tensor([[10.0, 100.0, 1000.0]]), qw).tolist() == [[1000 + 20 + 300]]
