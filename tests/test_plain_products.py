"""The native module's fast path for plain products: the calls that it takes, the calls that take
the checked path in Python, and that both have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from op_cases import K, N, activations, weight
from torch import Tensor
from torch.autograd import forward_ad

import cutlass_ops as co
from cutlass_ops import _C, reference


def packed_weight(**form: Any) -> co.PackedWeight:
    packed = co.reorder(weight(**form))
    assert packed.native is not None  # products before it is made are not plain
    return packed


def taken(
    x: Any, packed: Any, act_quant: Any = "none", symmetric: Any = True, buffers: Any = None
) -> bool:
    return _C.product(packed, x, act_quant, symmetric, buffers) is not None


#: Views of x [8, K], and whether the fast path takes them.
VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "vector": (lambda x: x[3], True),
    "one row": (lambda x: x[5:6], True),
    "ones among the sizes": (lambda x: x.view(1, 2, 1, 4, 1, -1), True),
    "every other row": (lambda x: x.view(2, 4, -1)[:, ::2], True),
    "the same row": (lambda x: x[2].expand(3, -1), False),
    "transposed": (lambda x: x.view(2, 4, -1).transpose(0, 1), False),
    "columns apart": (lambda x: x.t().contiguous().t(), False),
    "no row": (lambda x: x[:0], False),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
def test_plain_products_are_those_of_every_other_call(
    act_quant: str, dtype: torch.dtype, view: str
) -> None:
    make, is_taken = VIEWS[view]
    for symmetric in (True, False):
        packed = packed_weight(kind="zeros", bias=True)
        x = make(activations(8, K, dtype=dtype))
        assert taken(x, packed, act_quant, symmetric) == is_taken
        y = co.mixed_gemm(x, packed, act_quant=act_quant, act_symmetric=symmetric)
        assert (y.shape, y.dtype) == ((*x.shape[:-1], N), dtype)
        others: list[dict[str, Any]] = [{"out_dtype": dtype}]
        if co.explain(x, packed, act_quant, act_symmetric=symmetric).exact:
            others.append({"exact": True})
        for options in others:
            other = co.mixed_gemm(
                x, packed, act_quant=act_quant, act_symmetric=symmetric, **options
            )
            assert torch.equal(y, other)


def test_many_rows_are_left_to_torch() -> None:
    packed = packed_weight()
    for m, act_quant, is_taken in (
        (_C.cpu_panel_rows - 1, "none", True),
        (_C.cpu_panel_rows, "none", False),
        (_C.cpu_panel_rows, "block", True),
    ):
        assert taken(activations(m, K), packed, act_quant) == is_taken


class Labelled(Tensor):
    """A tensor that is not one of torch's own."""


@pytest.mark.parametrize(
    ("x", "act_quant", "symmetric"),
    [
        (activations(3, K - 1), "none", True),
        (torch.tensor(1.0), "none", True),
        (activations(3, K).double(), "none", True),
        (activations(3, K).int(), "block", True),
        (torch.empty(3, K, device="meta"), "none", True),
        (activations(3, K).as_subclass(Labelled), "none", True),
        (activations(3, K).tolist(), "none", True),
        (None, "none", True),
        (activations(3, K), "row", True),
        (activations(3, K), None, True),
        (activations(3, K), "block", 1),
    ],
)
def test_unusual_arguments_take_the_checked_path(x: Any, act_quant: Any, symmetric: Any) -> None:
    packed = packed_weight()
    assert taken(activations(3, K), packed)
    assert not taken(x, packed, act_quant, symmetric)


def test_unusual_weights_take_the_checked_path() -> None:
    x = activations(3, K)
    fresh = co.reorder(weight())
    assert not taken(x, fresh)
    assert not taken(x, object.__new__(co.PackedWeight))
    book = co.reorder(reference.quantize_weight_book(torch.randn(N, K), 64, "nf4"))
    assert book.native is not None
    assert taken(x, book)
    assert not taken(x, book, "block")
    with pytest.raises(TypeError, match="by position; 2 are given"):
        _C.product(fresh, x)


@contextmanager
def transform() -> Iterator[None]:
    """One of torch.func's."""
    with torch._functorch.eager_transforms.grad_increment_nesting():
        yield


#: Modes of torch in which the fast path takes no call.
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "forward-mode differentiation": forward_ad.dual_level,
    "a transform of torch.func": transform,
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_torch_take_the_checked_path(mode: str) -> None:
    packed, x = packed_weight(), activations(3, K)
    with MODES[mode]():
        assert not taken(x, packed)
    assert taken(x, packed)


def test_traces_take_the_checked_path() -> None:
    packed, x = packed_weight(), activations(3, K)
    found = []

    def traced(x: Tensor) -> Tensor:
        found.append(taken(x, packed))
        return x

    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.trace"):
        torch.jit.trace(traced, x, check_trace=False)
    assert found
    assert not any(found)


def test_autocast_of_fp32_takes_the_checked_path() -> None:
    packed, x = packed_weight(), activations(3, K)
    with torch.autocast("cpu", torch.bfloat16):
        assert not taken(x, packed)
        assert not taken(x, packed, "block")
        assert taken(x.half(), packed)
        assert co.mixed_gemm(x, packed).dtype == torch.bfloat16
    assert co.mixed_gemm(x, packed).dtype == torch.float32


def test_calls_with_gradients_take_the_checked_path() -> None:
    packed, x = packed_weight(kind="offsets", bias=True), activations(3, K)
    assert packed.bias is not None
    assert packed.offsets is not None
    assert taken(x, packed)
    x.requires_grad_()
    assert not taken(x, packed)
    assert co.mixed_gemm(x, packed).requires_grad
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert taken(x, packed)
            assert not co.mixed_gemm(x, packed).requires_grad
    x = x.detach()
    for part in (packed.scales, packed.offsets, packed.bias):
        part.requires_grad_()
        assert not taken(x, packed)
        with pytest.raises(RuntimeError, match="of the packed weight requires a gradient"):
            co.mixed_gemm(x, packed)
        with torch.no_grad():
            assert taken(x, packed)
        part.requires_grad_(False)
    assert taken(x, packed)


def test_buffers_must_be_the_weights_tensors() -> None:
    module = co.MixedLinear(packed_weight(kind="zeros", bias=True))
    packed, buffers, x = module.packed, module._buffers, activations(3, K)
    assert taken(x, packed, buffers=buffers)
    for name, value in list(buffers.items()):
        for other in (torch.zeros(1), None) if value is not None else (torch.zeros(1),):
            buffers[name] = other
            assert not taken(x, packed, buffers=buffers)
        del buffers[name]
        assert not taken(x, packed, buffers=buffers)
        buffers[name] = value
    assert taken(x, packed, buffers=buffers)


def test_a_default_device_does_not_move_results() -> None:
    packed, x = packed_weight(), activations(3, K)
    expected = co.mixed_gemm(x, packed)
    for mode in (torch.device("meta"), nullcontext()):
        with mode:
            assert taken(x, packed)
            assert torch.equal(co.mixed_gemm(x, packed), expected)
