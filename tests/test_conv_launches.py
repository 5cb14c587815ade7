"""A convolution that is called again on a GPU repeats the launch that its first call found; here
without a GPU, whose calls are recorded.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import cutlass_ops as co
from cutlass_ops import _C
from cutlass_ops.ops import conv_gpu, kept, native

CHANNELS = 128


class Launched(NamedTuple):
    """What one call of ``_C.mixed_conv`` was given."""

    problem: _C.ImageProblem
    plan: _C.Plan
    x: int
    bias: int
    out: int
    workspace: int
    stream: int


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """Record launches instead of making them; the CPU passes for an H100."""
    launches: list[Launched] = []
    device = _C.Device(90, 132, 232448, 3352)
    monkeypatch.setattr(_C, "current_device", lambda: device)
    monkeypatch.setattr(_C, "mixed_conv", lambda *args: launches.append(Launched(*args)))
    monkeypatch.setattr(native, "on_device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(native, "current_stream", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    return launches


def packed_weight(bias: torch.Tensor | None = None) -> co.PackedWeight:
    weight = torch.randn(CHANNELS, CHANNELS, 3, 3)
    quantized = co.quantize(weight, bits=8, group_size=128)
    packed = co.reorder(dataclasses.replace(quantized, bias=bias))
    object.__setattr__(packed, "gpu", 0)
    return packed


def image(size: int = 6, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    x = torch.randn(2, CHANNELS, size, size).to(dtype)
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("act_quant", ["none", "token", "block", "tensor"])
def test_a_call_again_has_the_plan_and_other_tensors(
    launched: list[Launched], act_quant: str
) -> None:
    packed = packed_weight()
    calls = [(image(), torch.randn(CHANNELS)) for _ in range(2)]
    results = [co.mixed_conv2d(x, packed, b, 1, 1, act_quant=act_quant) for x, b in calls]
    first, again = launched
    assert again.plan is first.plan
    assert again.problem is first.problem
    assert [entry.x for entry in launched] == [x.data_ptr() for x, _ in calls]
    assert [entry.bias for entry in launched] == [b.data_ptr() for _, b in calls]
    assert [entry.out for entry in launched] == [y.data_ptr() for y in results]
    assert results[0].shape == results[1].shape == (2, CHANNELS, 6, 6)
    assert results[0].stride() == results[1].stride()
    assert results[0].dtype == results[1].dtype == torch.float16


def test_the_weights_bias_is_added_again(launched: list[Launched]) -> None:
    bias = torch.randn(CHANNELS)
    packed = packed_weight(bias)
    assert packed.bias is not None
    for _ in range(2):
        co.mixed_conv2d(image(), packed, None, 1, 1)
    assert launched[0].plan is launched[1].plan
    assert {entry.bias for entry in launched} == {packed.bias.data_ptr()}


def test_a_call_again_has_the_scales_that_were_written(
    launched: list[Launched], of_int8: list[Launched]
) -> None:
    """Where the kernels read a copy of them: groups are longer than a tap's channels."""
    packed = co.reorder(co.quantize(torch.randn(CHANNELS, CHANNELS, 3, 3), bits=8, group_size=256))
    object.__setattr__(packed, "gpu", 0)
    co.mixed_conv2d(image(), packed, None, 1, 1)
    copied = packed.matrix.scales
    assert copied is not packed.scales
    packed.scales.mul_(2)
    co.mixed_conv2d(image(), packed, None, 1, 1)
    assert torch.equal(copied, packed.scales)
    assert launched[0].problem is launched[1].problem


@pytest.mark.parametrize("part", ["codes", "scales", "bias"])
def test_tensors_that_lie_elsewhere_have_another_launch(
    launched: list[Launched], part: str
) -> None:
    packed = packed_weight(torch.randn(CHANNELS))
    for _ in range(2):
        co.mixed_conv2d(image(), packed, None, 1, 1)
    getattr(packed, part).data = getattr(packed, part).clone()
    for _ in range(2):
        co.mixed_conv2d(image(), packed, None, 1, 1)
    first, second, third, fourth = (entry.problem for entry in launched)
    assert first is second
    assert first is not third
    assert third is fourth
    assert packed.bias is not None
    assert launched[-1].bias == packed.bias.data_ptr()


OTHERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "stride": lambda w: co.mixed_conv2d(image(), w, None, 2, 1),
    "padding": lambda w: co.mixed_conv2d(image(), w, None, 1, 0),
    "dilation": lambda w: co.mixed_conv2d(image(), w, None, 1, 1, 2),
    "size": lambda w: co.mixed_conv2d(image(7), w, None, 1, 1),
    "dtype": lambda w: co.mixed_conv2d(image(dtype=torch.bfloat16), w, None, 1, 1),
    "bias": lambda w: co.mixed_conv2d(image(), w, torch.randn(CHANNELS), 1, 1),
    "activation": lambda w: co.mixed_conv2d(image(), w, None, 1, 1, activation="relu"),
    "bounds": lambda w: co.mixed_conv2d(image(), w, None, 1, 1, activation=("clamp", 0.0, 1.0)),
    "quantised": lambda w: co.mixed_conv2d(image(), w, None, 1, 1, act_quant="token"),
    "asymmetric": lambda w: co.mixed_conv2d(
        image(), w, None, 1, 1, act_quant="token", act_symmetric=False
    ),
    "out_dtype": lambda w: co.mixed_conv2d(image(), w, None, 1, 1, out_dtype=torch.float32),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_call_has_another_launch(launched: list[Launched], name: str) -> None:
    packed = packed_weight()
    y = co.mixed_conv2d(image(), packed, None, 1, 1)
    other = OTHERS[name](packed)
    assert launched[1].problem is not launched[0].problem
    assert len(packed.conv_launches) == 2
    assert (OTHERS[name](packed).shape, co.mixed_conv2d(image(), packed, None, 1, 1).shape) == (
        other.shape,
        y.shape,
    )
    assert launched[2].problem is launched[1].problem
    assert launched[3].problem is launched[0].problem


def test_unusual_calls_keep_no_launch(launched: list[Launched]) -> None:
    packed = packed_weight()
    copied = image().contiguous()  # in memory the channels come first
    residual = torch.randn(2, CHANNELS, 6, 6).half()
    grad = image().requires_grad_()
    for _ in range(2):
        co.mixed_conv2d(copied, packed, None, 1, 1)
        co.mixed_conv2d(image(), packed, None, 1, 1, residual=residual)
        with torch.autocast("cpu", torch.bfloat16):
            co.mixed_conv2d(image(), packed, None, 1, 1)
    assert packed.conv_launches == {}
    assert len({id(entry.problem) for entry in launched}) == len(launched) == 6
    # A list is one more way to write it, whose launch is not kept.
    co.mixed_conv2d(image(), packed, None, [1, 1], [1, 1])
    assert packed.conv_launches == {}
    co.mixed_conv2d(image(), packed, None, 1, 1)
    found, key = conv_gpu.repeat(grad, packed, None, ())
    assert found is None
    assert key is None


def row_scales(n: int, *kernel: int) -> co.PackedWeight:
    """int8 with one scale a row."""
    packed = co.reorder(co.quantize(torch.randn(n, CHANNELS, *kernel), bits=8, group_size=-1))
    object.__setattr__(packed, "gpu", 0)
    return packed


@pytest.fixture
def of_int8(launched: list[Launched], monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """Record launches of ``_C.conv_int8``, whose weights are kept, too."""
    launches: list[Launched] = []
    stream = types.SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(_C, "conv_int8", lambda *args: launches.append(Launched(*args)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    return launches


def test_a_launch_of_int8_is_found_until_codes_are_written_to(of_int8: list[Launched]) -> None:
    packed, options = row_scales(64, 3, 3), {"act_quant": "tensor"}
    calls = [(image(), torch.randn(64)) for _ in range(3)]
    for x, bias in calls[:2]:
        co.mixed_conv2d(x, packed, bias, 1, 1, **options)
    first, again = of_int8
    assert (again.problem, again.plan) == (first.problem, first.plan)
    assert [entry.x for entry in of_int8] == [x.data_ptr() for x, _ in calls[:2]]
    assert [entry.bias for entry in of_int8] == [bias.data_ptr() for _, bias in calls[:2]]
    packed.codes.zero_()
    co.mixed_conv2d(calls[2][0], packed, calls[2][1], 1, 1, **options)
    assert of_int8[2].problem is not first.problem
    (launch,) = packed.conv_launches.values()
    assert launch.problem is of_int8[2].problem
    assert len(launch.natural.codes.unique()) == 1


@pytest.mark.parametrize(
    ("n", "kernel", "symmetric", "expected"),
    [
        (64, (3, 3), True, True),
        (320, (3, 3), True, True),
        (128, (3, 3), True, True),
        (256, (1, 1), True, True),
        (64, (1, 1), True, False),
        (128, (3, 3), False, True),
        (64, (1, 1), False, True),
    ],
)
def test_int8_takes_what_it_is_faster_for(
    launched: list[Launched],
    of_int8: list[Launched],
    n: int,
    kernel: tuple[int, int],
    symmetric: bool,
    expected: bool,
) -> None:
    options: dict[str, Any] = {"act_quant": "tensor", "act_symmetric": symmetric}
    co.mixed_conv2d(image(), row_scales(n, *kernel), **options)
    assert (len(of_int8), len(launched)) == ((1, 0) if expected else (0, 1))


@pytest.mark.parametrize(
    "options",
    [
        {"out_dtype": torch.float32},
        {"activation": "silu"},
        {"residual": torch.zeros(2, 64, 4, 4).half()},
        {"act_quant": "token"},
    ],
)
def test_what_int8_does_not_take_are_products(
    launched: list[Launched], of_int8: list[Launched], options: dict[str, Any]
) -> None:
    packed = row_scales(64, 3, 3)
    co.mixed_conv2d(image(), packed, **{"act_quant": "tensor", **options})
    assert (len(of_int8), len(launched)) == (0, 1)
    assert packed.codes not in kept._FORMS, "a form that nothing reads"


def test_wrong_calls_are_refused_after_right_ones(launched: list[Launched]) -> None:
    packed = packed_weight()
    co.mixed_conv2d(image(), packed, None, 1, 1)
    for stride in (True, 1.0):
        with pytest.raises(ValueError, match="stride is"):
            co.mixed_conv2d(image(), packed, None, stride, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kernel"):
        co.mixed_conv1d(image()[..., 0], packed, None, 1, 1)
    with pytest.raises(TypeError, match="x is a"):
        co.mixed_conv2d(None, packed, None, 1, 1)  # type: ignore[arg-type]
    packed.scales.requires_grad_()
    with pytest.raises(RuntimeError, match="frozen"):
        co.mixed_conv2d(image(), packed, None, 1, 1)
    assert len(launched) == 1


def test_copies_of_a_weight_have_no_launches(launched: list[Launched]) -> None:
    packed = packed_weight()
    co.mixed_conv2d(image(), packed, None, 1, 1)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert other.conv_launches == {}
    assert len(packed.conv_launches) == len(launched) == 1


def test_few_launches_are_kept(launched: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_gpu, "_MOST_LAUNCHES", 3)
    packed = packed_weight()
    for size in range(4, 12):
        co.mixed_conv2d(image(size), packed, None, 1, 1)
        assert len(packed.conv_launches) <= 3
    assert len(launched) == 8
