"""Packing and unpacking on a GPU: the host's bits."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from packed_cases import random_weight

import cutlass_ops as co
from cutlass_ops import _C
from cutlass_ops.weights import formats
from cutlass_ops.weights.packed_weight import PackedWeight, pack_codes, unpack_codes
from cutlass_ops.weights.weight import PARTS, QuantizedWeight

pytestmark = pytest.mark.gpu

NS = (1, 32, 70, 192, 1000)
KS = (1, 33, 128, 576, 10944)


def assert_same(
    found: PackedWeight | QuantizedWeight,
    expected: PackedWeight | QuantizedWeight,
    device: str = "cuda:0",
) -> None:
    """The same parts, bit for bit, the first ones on a device."""
    assert (found.shape, found.bits, found.group_size) == (
        expected.shape,
        expected.bits,
        expected.group_size,
    )
    for name in PARTS:
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert str(ours.device) == device, name
            assert ours.dtype == theirs.dtype, name
            assert torch.equal(ours.cpu(), theirs), name


def book_weight(n: int, k: int, group_size: int) -> QuantizedWeight:
    return replace(random_weight(n, k, 4, group_size, extras=True), book=torch.tensor(formats.NF4))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("n", NS)
def test_codes_of_any_shape(n: int, k: int, bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    on_gpu = pack_codes(codes.cuda(), bits)
    assert on_gpu.is_cuda
    assert torch.equal(on_gpu.cpu(), packed)
    unpacked = unpack_codes(on_gpu, n, k, bits)
    assert unpacked.is_cuda
    assert torch.equal(unpacked.cpu(), codes)


@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 256, -1])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("n", "k"), [(1, 33), (192, 576), (1000, 300)])
def test_every_part(n: int, k: int, bits: int, kind: str, group_size: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        weight = random_weight(n, k, bits, group_size, kind, dtype, extras=True)
        packed = co.reorder(weight.to("cuda"))
        assert_same(packed, co.reorder(weight))
        assert_same(packed.unpack(), weight)


@pytest.mark.parametrize("group_size", [16, 32, 128, -1])
def test_code_books(group_size: int) -> None:
    weight = book_weight(70, 576, group_size)
    packed = co.reorder(weight.to("cuda"))
    assert_same(packed, co.reorder(weight))
    assert_same(packed.unpack(), weight)


def test_several_weights_as_one() -> None:
    weights = [
        replace(random_weight(n, 576, kind="zeros", seed=n), bias=None) for n in (192, 32, 33)
    ]
    weights[1] = replace(weights[1], bias=torch.randn(32))
    assert_same(co.reorder([w.to("cuda") for w in weights]), co.reorder(weights))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_of_any_strides_and_address(bits: int) -> None:
    whole = torch.randint(0, 1 << bits, (200, 800), dtype=torch.uint8, device="cuda")
    for codes in (
        whole[:, 16:592],
        whole[:, 1:577],
        whole[3:, ::2],
        whole.t(),
        whole[:1].expand(70, -1),
    ):
        assert torch.equal(pack_codes(codes, bits).cpu(), pack_codes(codes.cpu(), bits))


def test_packed_codes_of_any_address() -> None:
    codes = torch.randint(0, 16, (70, 130), dtype=torch.uint8)
    packed = pack_codes(codes, 4)
    shifted = torch.zeros(len(packed) + 1, dtype=torch.uint8, device="cuda")[1:]
    shifted.copy_(packed)
    assert torch.equal(unpack_codes(shifted, 70, 130, 4).cpu(), codes)


def test_another_stream() -> None:
    codes = torch.randint(0, 16, (4096, 4096), dtype=torch.uint8, device="cuda")
    expected = pack_codes(codes.cpu(), 4)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(codes)
        # on any other stream the codes would be packed before they are there
        torch.cuda._sleep(50_000_000)
        late.copy_(codes)
        packed = pack_codes(late, 4)
        unpacked = unpack_codes(packed, *codes.shape, 4)
    stream.synchronize()
    assert torch.equal(packed.cpu(), expected)
    assert torch.equal(unpacked, codes)


def test_nothing_waits_for_codes() -> None:
    codes = torch.randint(0, 16, (70, 576), dtype=torch.uint8, device="cuda")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        unpack_codes(pack_codes(codes, 4), 70, 576, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_more_memory_than_the_result_is_allocated() -> None:
    weight = random_weight(1024, 8192, group_size=128, kind="zeros").to("cuda")
    weight = replace(weight, codes=weight.codes.t().contiguous().t())  # of other strides
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    packed = co.reorder(weight)
    assert torch.cuda.max_memory_allocated() - before < packed.nbytes + weight.codes.nbytes // 8


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU alone")
def test_another_device_than_the_current() -> None:
    weight = random_weight(192, 576, kind="zeros", extras=True)
    packed = co.reorder(weight.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert_same(packed, co.reorder(weight), "cuda:1")
    assert_same(packed.unpack(), weight, "cuda:1")


def test_quantize_model_stays_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(576, 192), torch.nn.Linear(192, 70)).half().cuda()
    expected = [co.reorder(co.quantize(layer.weight, symmetric=False)) for layer in model]

    def refuse(*_: object) -> None:
        raise AssertionError("codes were packed on the host")

    monkeypatch.setattr(_C, "pack", refuse)
    monkeypatch.setattr(_C, "unpack", refuse)
    co.quantize_model(model, skip=())
    for layer, weight in zip(model, expected, strict=True):
        assert layer.codes.is_cuda
        assert torch.equal(layer.codes, weight.codes)
