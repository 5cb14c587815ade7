"""The public weight quantiser: what it accepts and refuses; its numbers are tested with the specification."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from cutlass_ops.quantize import quantize
from cutlass_ops.reference import dequantize_weight
from cutlass_ops.weight import QuantizedWeight

module = importlib.import_module("cutlass_ops.quantize")  # the package gives its name to the function


def test_defaults_are_four_bits_groups_of_128_symmetric() -> None:
    w = torch.zeros(2, 300, dtype=torch.bfloat16)
    w[0, 0], w[1, 299] = 7, -14
    qw = quantize(w)
    assert (qw.bits, qw.group_size, qw.symmetric, qw.shape, qw.groups) == (4, 128, True, (2, 300), 3)
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
@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_in_pieces_is_the_same_weight(symmetric: bool, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(50, 192, generator=torch.Generator().manual_seed(0))
    whole = quantize(w, bits, 64, symmetric)
    for piece in (1, 192 * 7):
        monkeypatch.setattr(module, "_PIECE", piece)
        assert equal(quantize(w, bits, 64, symmetric), whole)


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
            assert qw.zeros is None if symmetric else qw.zeros is not None and qw.zeros[row, group] == zero
            codes = [min(15, max(0, int(np.rint(v / scale)) + zero)) for v in values]
            assert qw.codes[row, list(columns)].tolist() == codes


def test_strided_weights_and_parameters() -> None:
    w = torch.randn(64, 40, generator=torch.Generator().manual_seed(2))
    assert equal(quantize(torch.nn.Parameter(w.t()), 8, 32), quantize(w.t().contiguous(), 8, 32))
    assert not quantize(torch.nn.Parameter(w), 8, 32).scales.requires_grad


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_weight_that_is_not_finite_is_refused(bad: float, symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.ones(5, 100)
    w[3, 70] = bad
    monkeypatch.setattr(module, "_PIECE", 200)
    with pytest.raises(ValueError, match="weight has NaN, inf or a range beyond fp32 in row 3, group 2"):
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
        (torch.ones(2, 2).double(), {}, TypeError, "weight has dtype float64; supported are float16, bfloat16, float32"),
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
