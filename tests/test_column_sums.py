"""Column sums of a weight: their values, and that results do not depend on whether they were kept,
made by the product, or stale.
"""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import (
    BFLOAT,
    FLOAT,
    GPU,
    HALF,
    Format,
    compensates,
    make_floats,
    make_weight,
    same_bits,
)
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C
from cutlass_ops.ops import gemm_library
from cutlass_ops.weights import formats

ASYMMETRIC: dict[str, Any] = {"act_quant": "block", "act_symmetric": False}


# ---- kept sums, and when they are read


def small_weight(bits: int = 8, seed: int = 0) -> co.PackedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << bits, (64, 256), generator=generator).to(torch.uint8)
    return co.reorder(
        co.QuantizedWeight(codes, torch.rand(64, 2, generator=generator).half() + 0.5, bits=bits)
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CPU weights that take sums, and the addresses that sums are written to, in order."""
    addresses: list[int] = []
    monkeypatch.setattr(_C, "weight_colsum", lambda _, address, stream: addresses.append(address))
    stream = type("Stream", (), {"cuda_stream": 0, "synchronize": lambda self: None})()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(co.PackedWeight, "takes_sums", True)
    return addresses


def seen_by_kernels(weight: co.PackedWeight) -> int | None:
    """The address of the sums that kernels get; None if a product makes its own."""
    _ = weight.native
    if not weight._reads_sums:
        return None
    assert weight._sums is not None
    return weight._sums.memory.data_ptr()


def reads(weight: co.PackedWeight) -> int | None:
    """The same after a product."""
    co.mixed_gemm(torch.zeros(1, weight.k).half(), weight, **ASYMMETRIC)
    return seen_by_kernels(weight)


def test_a_weight_on_a_cpu_keeps_no_sums() -> None:
    packed = small_weight()
    packed.sum_codes()
    assert not packed.takes_sums
    assert reads(packed) is None


def test_sums_are_kept_once_they_are_needed(made: list[int]) -> None:
    packed = small_weight()
    x = torch.randn(200, 256).half()
    co.mixed_gemm(x, packed, **ASYMMETRIC)
    assert (made, reads(packed)) == ([], None)  # products change no weight
    packed.sum_codes()
    packed.sum_codes()
    assert len(made) == 1
    assert reads(packed) == made[0]


@pytest.mark.parametrize("part", ["codes", "scales", "zeros"])
@pytest.mark.parametrize("inference", [False, True])
def test_sums_of_other_values_are_not_read(made: list[int], part: str, inference: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (64, 256), generator=generator).to(torch.uint8)
    zeros = torch.randint(16, (64, 2), generator=generator).to(torch.uint8)
    packed = co.reorder(co.QuantizedWeight(codes, torch.rand(64, 2).half(), zeros))
    packed.sum_codes()
    with torch.inference_mode(inference):
        tensor = getattr(packed, part)
        tensor[0].copy_(tensor[0].flip(-1) if part != "codes" else tensor[1])
    assert reads(packed) is None
    packed.sum_codes()
    assert made == [made[0]] * 2  # in the memory that captured graphs read
    assert reads(packed) == made[0]


def test_a_copy_keeps_nothing_of_its_original(made: list[int]) -> None:
    packed = small_weight()
    size = len(pickle.dumps(packed))
    packed.sum_codes()
    assert len(pickle.dumps(packed)) == size
    for other in (
        copy.deepcopy(packed),
        pickle.loads(pickle.dumps(packed)),
        packed.row_panels(0, 64),
    ):
        if other.codes.data_ptr() != packed.codes.data_ptr():
            assert reads(other) is None
        other.scales.mul_(2)
        assert reads(other) is None


@pytest.mark.parametrize("inference", [False, True])
def test_weights_made_in_inference_mode_keep_no_column_sums(
    monkeypatch: pytest.MonkeyPatch, inference: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with torch.inference_mode(inference):
        packed = small_weight()
    object.__setattr__(packed, "gpu", 0)
    assert packed.takes_sums != inference  # torch would not record writes


def test_compiled_products_follow_values_that_are_written_to(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = small_weight()
    seen: list[int | None] = []
    for name, place in (("gemm_floats", 2), ("gemm_quantized", 1)):
        run = getattr(gemm_library, name)
        monkeypatch.setattr(
            gemm_library,
            name,
            lambda *args, run=run, place=place: [
                seen.append(seen_by_kernels(args[place])),
                run(*args),
            ][1],
        )
    x = torch.randn(5, 256).half()
    qa = co.quantize_activations(x, 128, False)

    def products(x: Tensor) -> tuple[Tensor, Tensor]:
        return co.mixed_gemm(x, packed, **ASYMMETRIC), co.mixed_gemm(qa, packed)

    torch._dynamo.reset()
    compiled = torch.compile(products, fullgraph=True, backend="aot_eager")
    compiled(x)
    packed.sum_codes()
    compiled(x)
    packed.codes[0] ^= 1
    y, z = compiled(x)
    assert seen == [None, None, made[0], made[0], None, None]
    assert torch.equal(y, z)
    assert torch.equal(y, co.mixed_gemm(x, copy.deepcopy(packed), **ASYMMETRIC))


def test_a_layer_keeps_sums_where_its_activations_have_zero_points(made: list[int]) -> None:
    for options in ({}, {"act_quant": "block"}, {"act_quant": "none", "act_symmetric": False}):
        assert reads(co.MixedLinear(small_weight(), **options).packed) is None
    assert made == []
    layer = co.MixedLinear(small_weight(), **ASYMMETRIC)
    assert reads(layer.packed) == made[0]
    assert layer.packed._sums is not None
    kept = weakref.ref(layer.packed._sums)
    layer.load_state_dict(co.MixedLinear(small_weight(seed=1)).state_dict())
    assert layer.packed._sums is kept()  # where captured graphs read the codes and sums of before
    assert made == [made[0]] * 2
    assert reads(layer.packed) == made[0]
    assert reads(copy.deepcopy(layer).packed) == made.pop() != made[0]
    layer.bias = torch.zeros(64)
    assert reads(layer.packed) == made[0]
    layer.scales = layer.scales.clone()
    assert reads(layer.packed) is None
    layer.double()  # no tensor changes, but each is another object
    assert reads(layer.packed) == made[-1]


@pytest.mark.parametrize("act_quant", ["token", "block"])
def test_the_kernel_does_not_depend_on_what_is_kept(made: list[int], act_quant: str) -> None:
    options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": False, "device": "sm_90"}
    packed = co.reorder(
        co.QuantizedWeight(
            torch.zeros(4160, 2200, dtype=torch.uint8), torch.ones(4160, 18).half(), bits=8
        )
    )
    makes = co.explain(200, packed, **options)
    packed.sum_codes()
    read = co.explain(200, packed, **options)
    assert "correction" in makes.why
    quantizer, *rest = read.launches
    assert makes.launches == (quantizer, "weight_colsum", *rest)
    assert makes.workspace > read.workspace
    assert replace(makes, launches=read.launches, workspace=read.workspace) == read
    packed.scales.mul_(2)
    assert co.explain(200, packed, **options) == makes
    few = co.explain(128, packed, **options)
    assert "weight_colsum" not in few.launches


# ---- on a GPU


def stored_sums(packed: co.PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """The stored column sums in the order of zero_compensation.h: fp16 parts, scales and the
    sum over all of K.
    """
    assert packed._sums is not None
    memory, n_pad = packed._sums.memory, formats.padded_rows(packed.n)
    size = n_pad * packed.scales.element_size()
    parts = memory[: len(memory) - size - 4 * n_pad]
    return (
        parts.view(HALF),
        memory[len(parts) : len(parts) + size].view(packed.scales.dtype),
        memory[-4 * n_pad :].view(FLOAT),
    )


def power_of_two(exponent: Tensor) -> Tensor:
    """Exact, for -126 .. 127."""
    return ((exponent + 127) << 23).to(torch.int32).view(FLOAT)


def expected_sums(packed: co.PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain torch."""
    n_pad, k_pad, bits = formats.padded_rows(packed.n), formats.padded_k(packed.k), packed.bits
    tiles = k_pad // 128
    codes = torch.zeros(n_pad, k_pad, dtype=torch.int32, device=GPU)
    plain = packed.unpack()
    codes[: packed.n, : packed.k] = plain.codes.int() - (1 << (bits - 1))
    rows = torch.arange(n_pad, device=GPU)
    position = rows // 64 * 64 + 8 * (rows % 8) + rows % 64 // 8  # of a row in a group vector
    group = (
        torch.arange(tiles, device=GPU)
        * 128
        // (k_pad if packed.group_size == -1 else packed.group_size)
    )
    scales = packed.scales[group][:, position].t().float()
    integers = codes.view(n_pad, tiles, 128).sum(2)
    unit = 16
    if packed.zeros is not None:
        integers -= 128 * packed.zeros[group][:, position].t().int()
    if packed.zeros is not None or bits == 8:
        unit = 1
    sums = (-unit * integers).float() * scales
    half = packed.scales.dtype == HALF
    exponent = (sums.abs().amax(1).view(torch.int32) >> 23) - 127 - 13
    exponent = exponent.clamp(-24 if half else -126, 15 if half else 126)
    total = ((0.0 - sums.double().sum(1)) / unit).float()
    window = 4 * bits
    windows = -(-tiles // window)
    scaled = torch.zeros(n_pad, windows * window, device=GPU)
    scaled[:, :tiles] = sums * power_of_two(-exponent)[:, None]
    first = scaled.half()
    second = (scaled - first.float()).half()
    # Rows are 16 * warp + 8 * h + g, tiles 16 * sixteen + 8 * a + 2 * t + b; lane 4 * g + t holds
    # these in the order a, h, b.
    parts = torch.stack((first, second)).view(
        2, n_pad // 64, 4, 2, 8, windows, window // 16, 2, 4, 2
    )
    parts = parts.permute(1, 5, 2, 6, 0, 4, 8, 7, 3, 9).reshape(-1)
    by_position = torch.empty_like(position).scatter_(0, position, rows)
    powers = power_of_two(exponent).to(packed.scales.dtype)
    return parts, powers[by_position], total[by_position]


WEIGHTS = [
    Format(4),
    Format(8),
    Format(4, "zeros"),
    Format(4, "zeros", 256, BFLOAT),
    Format(8, "symmetric", -1, FLOAT),
    Format(4, "symmetric", 512, FLOAT),
]


@pytest.fixture
def hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("column sums are for sm_90a")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
# Tiles of K: one; a short window; a window of int4, and of int8; more than four sets of warps take.
@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 1), (200, 576), (130, 2048), (64, 4096), (192, 4224), (70, 11008), (1000, 20000)],
)
@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_sums_are_those_of_plain_torch_bit_for_bit(fmt: Format, n: int, k: int) -> None:
    for exact in (True, False):
        packed = co.reorder(make_weight(fmt, n, k, exact=exact))
        packed.sum_codes()
        for stored, expected in zip(stored_sums(packed), expected_sums(packed), strict=True):
            assert same_bits(stored, expected)


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    return graph, y


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("act_quant", ["token", "block"])
@pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
def test_results_do_not_depend_on_where_column_sums_come_from(fmt: Format, act_quant: str) -> None:
    m, n, k = 300, 17000, 4300
    qw = make_weight(fmt, n, k, exact=False)
    x = make_floats(m, k, HALF)
    options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": False}
    kept = co.reorder(qw)
    kept.sum_codes()
    assert compensates(m, kept, act_quant) == (act_quant == "block" or fmt.group_size != -1)
    y = co.mixed_gemm(x, kept, **options)
    qa = co.quantize_activations(x, -1 if act_quant == "token" else 128, False)
    fresh = co.reorder(qw)
    graph, first = captured(lambda: co.mixed_gemm(x, fresh, **options))  # its first use
    graph.replay()
    assert same_bits(first, y)
    assert fresh._sums is None
    assert same_bits(co.mixed_gemm(x, fresh, **options), y)
    # graphs of the other formats count, since the function is compiled again for each
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: co.mixed_gemm(x, fresh, **options), fullgraph=True, backend="aot_eager"
    )
    assert same_bits(compiled(x), y)
    # neither the quantiser nor the conversion of zero points lets the product overtake the sums
    for _ in range(20):
        assert same_bits(co.mixed_gemm(qa, fresh), y)
    fresh.sum_codes()
    for _ in range(3):
        assert same_bits(co.mixed_gemm(x, fresh, **options), y)
        assert same_bits(co.mixed_gemm(qa, fresh), y)
    assert same_bits(compiled(x), y)
    graph, again = captured(lambda: co.mixed_gemm(x, fresh, **options))
    graph.replay()
    assert same_bits(again, y)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("act_quant", ["token", "block"])
def test_results_follow_values_that_are_written_to(act_quant: str) -> None:
    m, n, k = 300, 17000, 4096
    x = make_floats(m, k, HALF)
    options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": False}
    packed = co.reorder(make_weight(Format(4, "zeros"), n, k, exact=False))
    packed.sum_codes()
    for part in ("codes", "scales", "zeros"):
        tensor = getattr(packed, part)
        tensor.copy_(tensor.flip(-1))
        torch.cuda.synchronize()
        assert same_bits(
            co.mixed_gemm(x, packed, **options), co.mixed_gemm(x, copy.deepcopy(packed), **options)
        )
    layer = co.MixedLinear(packed, **options)
    other = co.MixedLinear(co.reorder(make_weight(Format(4, "zeros"), n, k, exact=True)), **options)
    graph, y = captured(lambda: layer(x))
    layer.load_state_dict(other.state_dict())
    torch.cuda.synchronize()
    assert same_bits(layer(x), other(x))
    graph.replay()  # it reads sums that were kept, in whose memory those of the new values are now
    assert same_bits(y, other(x))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_formats_without_such_products_take_no_sums() -> None:
    for unfit in (Format(4, "offsets"), Format(8, "zeros"), Format(4, "symmetric", 64)):
        weight = co.reorder(make_weight(unfit, 200, 576, exact=False))
        weight.sum_codes()
        assert weight._sums is None
