"""The public weight quantiser: valid and invalid arguments; its numbers are tested with the
specification.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import cutlass_ops as co
from cutlass_ops import reference
from cutlass_ops.ops import quantize as module
from cutlass_ops.ops.quantize import quantize
from cutlass_ops.reference import dequantize_weight
from cutlass_ops.weights.weight import QuantizedWeight


def test_defaults_are_four_bits_groups_of_128_symmetric() -> None:
    w = torch.zeros(2, 300, dtype=torch.bfloat16)
    w[0, 0], w[1, 299] = 7, -14
    qw = quantize(w)
    assert (qw.bits, qw.group_size, qw.symmetric, qw.shape, qw.groups) == (
        4,
        128,
        True,
        (2, 300),
        3,
    )
    assert qw.scales.dtype == torch.bfloat16
    assert qw.scales.tolist() == [[1, 1, 1], [1, 1, 2]]
    assert qw.codes[0, 0] == 15
    assert qw.codes[1, 299] == 1
    assert torch.equal(dequantize_weight(qw, torch.bfloat16), w)


def equal(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    zeros = (a.zeros is None and b.zeros is None) or (
        a.zeros is not None and b.zeros is not None and torch.equal(a.zeros, b.zeros)
    )
    return torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) and zeros


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_weight_quantised_in_pieces_equals_the_weight_quantised_whole(
    symmetric: bool, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = torch.randn(50, 192, generator=torch.Generator().manual_seed(0))
    whole = quantize(w, bits, 64, symmetric)
    for piece in (1, 192 * 7):
        monkeypatch.setattr(module, "_PIECE_IN_CACHE", piece)
        assert equal(quantize(w, bits, 64, symmetric), whole)


def heavy_tailed(n: int, k: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(2)
    return torch.randn(n, k, generator=random) * torch.randn(n, k, generator=random).exp()


def test_clipping_by_hand() -> None:
    # Thirty-one weights of 3.5 beside one of 7: with a scale of 1 the many are off by a half each
    # (rint(3.5) is 4). With 35/40 of it they are exact, and the one is off by 7 / 8.
    w = torch.full((1, 32), 3.5)
    w[0, 5] = 7
    assert quantize(w, group_size=32).scales.item() == 1
    clipped = quantize(w, group_size=32, clip="mse")
    assert clipped.scales.item() == 0.875
    assert clipped.codes.tolist() == [[12] * 5 + [15] + [12] * 26]
    # Ten of the large ones make that too dear, 10 * 0.875^2, and 38/40 best: 10 * 0.35^2 + 22 *
    # 0.3^2, against 22 / 4.
    w[0, :10] = 7
    assert quantize(w, group_size=32, clip="mse").scales.item() == pytest.approx(0.95)


def test_the_widest_of_ranges_with_equal_errors_is_taken() -> None:
    # 38/40 and 37/40 of a step of 12 / 15 have the same error to the last bit, and all
    # others a larger one.
    w = torch.tensor([[-5.0, -2.0, -2.0, -0.5, 3.5, 6.0, 6.5, 7.0]])
    found = quantize(w, group_size=32, symmetric=False, clip="mse")
    assert found.scales.item() == pytest.approx(0.76, rel=1e-6)
    assert found.codes.tolist() == [[0, 3, 3, 5, 11, 14, 15, 15]]
    # Squares beyond fp32 are infinite with every range, so the whole range is taken.
    for symmetric in (True, False):
        w = torch.tensor([[7e25, 0.4e25]])
        assert equal(quantize(w, 4, 32, symmetric, clip="mse"), quantize(w, 4, 32, symmetric))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, -1), (8, 128)])
def test_no_other_range_has_a_smaller_error(
    dtype: torch.dtype, symmetric: bool, bits: int, group_size: int
) -> None:
    w = heavy_tailed(6, 300).to(dtype)
    found = quantize(w, bits, group_size, symmetric, clip="mse")
    size = 300 if group_size == -1 else group_size
    clipped = False
    for row in range(6):
        for group in range(found.groups):
            x = w[row, group * size : (group + 1) * size].double()
            ours = dequantize_weight(found, torch.float64)[row, group * size : (group + 1) * size]
            errors = []
            for i in range(40, 19, -1):
                lo, hi = min(0.0, float(x.min())) * i / 40, max(0.0, float(x.max())) * i / 40
                steps = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
                span = torch.tensor(
                    (max(hi, -lo) if symmetric else hi - lo) / steps, dtype=torch.float64
                )
                scale = span.to(dtype)
                if dtype != torch.float32 and scale < span:  # they are rounded up
                    scale = (scale.view(torch.int16) + 1).view(dtype)
                scale = scale.double()
                zero = 0.0 if symmetric else (-lo / scale).round()
                low, high = (-steps, steps) if symmetric else (-zero, steps - zero)
                errors.append(
                    float((x - scale * (x / scale).round().clamp(low, high)).square().sum())
                )
            error = float((x - ours).square().sum())
            assert error <= min(errors) * (1 + 1e-4) + 1e-12
            clipped |= error < errors[0] * 0.99
    assert clipped or bits == 8


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_clipped_weight_quantised_in_pieces_equals_the_weight_quantised_whole(
    symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = heavy_tailed(50, 192)
    whole = quantize(w, 4, 64, symmetric, clip="mse")
    for piece in (1, 192 * 7):
        monkeypatch.setattr(module, "_PIECE_IN_CACHE", piece)
        assert equal(quantize(w, 4, 64, symmetric, clip="mse"), whole)


def test_clipping_leaves_zeros_and_refuses_nan() -> None:
    w = torch.zeros(2, 64)
    assert equal(quantize(w, 4, 32, False, clip="mse"), quantize(w, 4, 32, False))
    w[1, 40] = torch.nan
    with pytest.raises(ValueError, match="row 1, group 1"):
        quantize(w, 4, 32, clip="mse")


def test_how_clip_is_refused() -> None:
    with pytest.raises(ValueError, match="clip is 'mae'; None and 'mse'"):
        quantize(torch.zeros(1, 32), clip="mae")
    with pytest.raises(ValueError, match="both book and clip"):
        quantize(torch.zeros(1, 32), book="nf4", clip="mse")


@pytest.mark.parametrize("symmetric", [True, False])
def test_one_code_at_a_time(symmetric: bool) -> None:
    """Every code of a small weight, by scalar fp32 arithmetic."""
    f = np.float32
    w = torch.randn(4, 70, generator=torch.Generator().manual_seed(1))
    qw = quantize(w, 4, 64, symmetric)
    for row in range(4):
        for group, columns in enumerate((range(64), range(64, 70))):
            values = [f(w[row, c].item()) for c in columns]
            lo, hi = min(f(0), *values), max(f(0), *values)
            scale = max(hi, -lo) / f(7) if symmetric else (hi - lo) / f(15)
            zero = 8 if symmetric else int(np.rint(-lo / scale))
            assert qw.scales[row, group].item() == scale
            assert (
                qw.zeros is None
                if symmetric
                else qw.zeros is not None and qw.zeros[row, group] == zero
            )
            codes = [min(15, max(0, int(np.rint(v / scale)) + zero)) for v in values]
            assert qw.codes[row, list(columns)].tolist() == codes


def test_strided_weights_and_parameters() -> None:
    w = torch.randn(64, 40, generator=torch.Generator().manual_seed(2))
    assert equal(quantize(torch.nn.Parameter(w.t()), 8, 32), quantize(w.t().contiguous(), 8, 32))
    assert not quantize(torch.nn.Parameter(w), 8, 32).scales.requires_grad


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_weight_that_is_not_finite_is_refused(
    bad: float, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = torch.ones(5, 100)
    w[3, 70] = bad
    monkeypatch.setattr(module, "_PIECE_IN_CACHE", 200)
    with pytest.raises(
        ValueError, match="weight has NaN, inf or a range beyond fp32 in row 3, group 2"
    ):
        quantize(w, 4, 32, symmetric)


def test_a_range_beyond_fp32_is_refused() -> None:
    w = torch.tensor([[3e38, -3e38]])
    assert quantize(w, symmetric=True).codes.tolist() == [[15, 1]]
    with pytest.raises(ValueError, match="range beyond fp32 in row 0, group 0"):
        quantize(w, symmetric=False)


@pytest.mark.parametrize(
    ("weight", "options", "error", "message"),
    [
        ([[1.0]], {}, TypeError, "weight is a list; a torch.Tensor is expected"),
        (
            torch.ones(2, 2).double(),
            {},
            TypeError,
            "weight has dtype float64; supported are float16, bfloat16, float32",
        ),
        (torch.ones(2, 2).int(), {}, TypeError, "weight has dtype int32"),
        (torch.ones(4), {}, ValueError, r"weight has shape \(4,\)"),
        (torch.ones(0, 4), {}, ValueError, r"weight has shape \(0, 4\)"),
        (torch.ones(4, 0), {}, ValueError, r"weight has shape \(4, 0\)"),
        (torch.ones(2, 2), {"bits": 5}, ValueError, "bits is 5"),
        (torch.ones(2, 2), {"group_size": 100}, ValueError, "group_size is 100"),
    ],
)
def test_wrong_arguments_are_refused(
    weight: torch.Tensor, options: dict[str, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quantize(weight, **options)


# ---- groups longer than K


@pytest.mark.parametrize("group_size", [1024, 1 << 24, 1 << 40])
@pytest.mark.parametrize("k", [64, 576])
def test_a_group_longer_than_k_is_all_of_k_and_needs_no_more_memory(
    k: int, group_size: int, tmp_path: Path
) -> None:
    weight = torch.randn(64, k, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(1))
    for options in (
        {},
        {"symmetric": False},
        {"clip": "mse"},
        {"book": "nf4"},
        {"bits": 8},
        {"bits": 8, "book": "e4m3"},
    ):
        found, whole = (
            co.quantize(weight, **{"group_size": size, **options}) for size in (group_size, -1)
        )
        assert found.group_size == group_size
        assert equal(found, whole)
        assert torch.equal(co.dequantize(found), co.dequantize(whole))
        packed, expected = co.reorder(found), co.reorder(whole)
        assert packed.nbytes == expected.nbytes
        co.save_packed(tmp_path / "packed.safetensors", {"m": packed})
        packed = co.load_packed(tmp_path / "packed.safetensors")["m"]
        assert packed.group_size == group_size
        for mode in ("none",) if "book" in options else ("none", "token", "block"):
            y = co.mixed_gemm(x, packed, act_quant=mode)
            assert torch.equal(y, co.mixed_gemm(x, expected, act_quant=mode))
            exact = reference.mixed_gemm(x, found, act_quant=mode)
            assert torch.equal(exact, reference.mixed_gemm(x, whole, act_quant=mode))
            assert str(co.explain(300, packed, mode, device="sm_90")) == str(
                co.explain(300, expected, mode, device="sm_90")
            )


def test_a_group_longer_than_a_taps_channels_needs_no_more_memory() -> None:
    weight = torch.randn(8, 32, 3, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 32, 9, generator=torch.Generator().manual_seed(1))
    long, own = (co.reorder(co.quantize(weight, 4, size)) for size in (1 << 24, 32))
    assert long.scales.shape == (3, 64)  # a group for each tap
    for mode in ("none", "token", "tensor"):
        assert torch.equal(
            co.mixed_conv1d(x, long, act_quant=mode), co.mixed_conv1d(x, own, act_quant=mode)
        )
