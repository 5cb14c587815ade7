"""Activations by their names: one that does not exist is refused wherever it is chosen, by
operators and by what they call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cutlass_ops as co
from cutlass_ops import _C, nn, reference
from cutlass_ops.nn.experts import MixedExperts
from cutlass_ops.ops import gradients, products
from cutlass_ops.ops.call import Call
from cutlass_ops.reference import conv as reference_conv
from cutlass_ops.reference import experts as reference_experts

X = torch.ones(3, 64)
MATRIX = co.reorder(co.quantize(torch.ones(64, 64), 4, 32))
KERNEL = co.reorder(co.quantize(torch.ones(8, 32, 3), 4, 32))
STATIC = co.reorder(co.quantize(torch.ones(8, 64), 8, -1))
GATE_UP = co.reorder_experts([co.quantize(torch.ones(128, 64), 4, 32)], gated=True)
DOWN = co.reorder_experts([co.quantize(torch.ones(64, 64), 4, 32)])
IDS, SHARES = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)


def call(activation: Any) -> Call:
    return Call(activation=activation)


PLACES: dict[str, Callable[[Any], Any]] = {
    "mixed_gemm": lambda a: co.mixed_gemm(X, MATRIX, activation=a),
    "mixed_conv1d": lambda a: co.mixed_conv1d(torch.ones(1, 32, 5), KERNEL, activation=a),
    "linear_int8": lambda a: co.linear_int8(
        X.to(torch.int8), STATIC, x_scale=1.0, y_scale=1.0, activation=a
    ),
    "grouped_gemm": lambda a: co.grouped_gemm(X, DOWN, co.route(IDS, 1), activation=a),
    "mixed_moe": lambda a: co.mixed_moe(X, GATE_UP, DOWN, IDS, SHARES, activation=a),
    "MixedLinear": lambda a: nn.MixedLinear(MATRIX, activation=a)(X),
    "MixedExperts": lambda a: MixedExperts(GATE_UP, DOWN, activation=a),
    "explain": lambda a: co.explain(X, MATRIX, activation=a),
    "a product in host memory": lambda a: products.gemm_floats(X, 3, MATRIX, (3, 64), call(a)),
    "the gradient": lambda a: gradients.through_activation(X, X, call(a)),
    "the reference": lambda a: reference.activate(X, a),
    "the reference's epilogue": lambda a: reference.epilogue(X, activation=a),
    "the reference of experts": lambda a: reference_experts.gated(X, a, torch.float32),
    "the limits of static int8": lambda a: reference_conv.limits(a, 1.0, 0, torch.int8),
}


@pytest.mark.parametrize(
    "activation", ["swish", "", "gelu_new", "Relu", ("swish", 0.0, 1.0), ("clamp", 0.0), 0, True]
)
@pytest.mark.parametrize("place", PLACES)
def test_an_unknown_activation_is_refused(place: str, activation: Any) -> None:
    with pytest.raises(ValueError, match="activation is"):
        PLACES[place](activation)


def test_the_extension_has_every_activation_and_no_other() -> None:
    named = {
        name
        for name in vars(_C.Activation)
        if isinstance(getattr(_C.Activation, name), _C.Activation)
    }
    assert named == {"none", *reference.ACTIVATIONS, "clamp", "clamped_swiglu"}


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_every_activation_has_a_gradient(activation: str) -> None:
    x = torch.linspace(-3.9, 8.1, 64)[None].requires_grad_()  # at no bound
    eye = co.reorder(
        co.QuantizedWeight(8 + torch.eye(64, dtype=torch.uint8), torch.ones(64, 1), group_size=-1)
    )
    (expected,) = torch.autograd.grad(reference.activate(x, activation).sum(), x)
    (found,) = torch.autograd.grad(co.mixed_gemm(x, eye, activation=activation).sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "activation", [name for name in reference.ACTIVATIONS if name not in reference.CLAMPS]
)
def test_static_int8_refuses_those_that_are_no_clamps(activation: str) -> None:
    for place in ("linear_int8", "the limits of static int8"):
        with pytest.raises(
            ValueError,
            match=f"activation is '{activation}'; static int8 takes None, 'relu', 'relu6'",
        ):
            PLACES[place](activation)
