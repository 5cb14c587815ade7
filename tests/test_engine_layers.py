"""A packed weight in the place of an engine's layer."""

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.engines.layers import checked_settings, keep, product, reason_of_format


def test_rows_have_the_same_bits_in_any_batch_where_the_engine_is_batch_invariant() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Module()
    weight = co.quantize(torch.randn(96, 256, generator=generator), 4, 64)
    layer.codes = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    keep(layer, ["codes"], weight, "none", True)
    x = torch.randn(512, 256, generator=generator)
    alone = torch.cat([product(layer, row, None, True) for row in x.split(1)])
    assert torch.equal(product(layer, x, None, True), alone)
    assert not torch.equal(product(layer, x, None, False), alone)  # sums have another order


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((256, 256, 128, True, torch.float16), None),
        ((256, 256, -1, False, torch.bfloat16), None),
        ((256, 256, 128, False, torch.float32), "activations are torch.float32"),
        ((256, 256, 8, False, torch.float16), "group_size is 8"),
        ((192, 384, 128, False, torch.float16), "192 input features are not whole groups of 128"),
        (
            (128, 256, 128, True, torch.float16),
            "act order and its input features are split over ranks",
        ),
    ],
)
def test_the_reason_why_a_layer_cannot_be_packed(
    arguments: tuple[int, int, int, bool, torch.dtype], reason: str | None
) -> None:
    found = reason_of_format(*arguments)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("found", "error"),
    [
        ([], r"source has \[\] for cutlass_ops; an object is expected"),
        ({"speed": 1}, "source has 'speed' for cutlass_ops; known are act_quant"),
        (
            {"act_quant": "row"},
            "cutlass_ops' act_quant is 'row'; supported are 'none', 'token', 'block'",
        ),
    ],
)
def test_wrong_settings_are_errors(found: object, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        checked_settings(found, "source")
