"""The two forms of a weight: valid and invalid tensors, and the order of the packed one."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cutlass_ops.weights import formats
from cutlass_ops.weights.packed_weight import PackedWeight, group_vector_positions
from cutlass_ops.weights.weight import CheckpointError, QuantizedWeight, format_of, not_finite

# ---- formats


def test_sizes_by_hand() -> None:
    assert [formats.midpoint(bits) for bits in (4, 8)] == [8, 128]
    assert [formats.padded_rows(n) for n in (1, 64, 65, 192)] == [64, 64, 128, 192]
    assert [formats.padded_k(k) for k in (1, 128, 129, 576)] == [128, 128, 256, 640]
    assert [formats.group_count(576, g) for g in (16, 32, 64, 128, 256, 1024, -1)] == [
        36,
        18,
        9,
        5,
        3,
        1,
        1,
    ]
    # Groups of 16, 32 and 64 fill the padded K of 640; longer ones have no padding group.
    assert [formats.padded_groups(576, g) for g in (16, 32, 64, 128, 256, 1024, -1)] == [
        40,
        20,
        10,
        5,
        3,
        1,
        1,
    ]
    blocks = [formats.activation_block(g) for g in (16, 32, 64, 128, 256, -1)]
    assert blocks == [16, 32, 64, 128, 128, 128]


@pytest.mark.parametrize("bits", [0, 3, 5, 16, -4])
def test_unsupported_bits(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits is {bits}; supported are 2, 4, 8"):
        formats.check_bits(bits)


@pytest.mark.parametrize("value", [[7] * 100_000, "7" * 100_000, (10**4000,) * 3])
def test_a_message_does_not_hold_all_of_a_value(value: Any) -> None:
    checks: list[Any] = [
        formats.check_bits,
        formats.check_group_size,
        formats.check_flat_block_size,
        formats.check_quant_type,
    ]
    for check in (*checks, lambda size: formats.check_kernel_size(size, 64)):
        with pytest.raises(ValueError, match=r"supported are|expected|does not divide") as error:
            check(value if check is not formats.check_quant_type else str(value)[:4000])
        assert len(str(error.value)) < 400


@pytest.mark.parametrize("group_size", [0, 1, 8, 48, 96, 192, -2, -128])
def test_unsupported_group_sizes(group_size: int) -> None:
    with pytest.raises(
        ValueError, match=f"group_size is {group_size}; supported are 16, 32, 64, multiples of 128"
    ):
        formats.check_group_size(group_size)


def test_supported_group_sizes() -> None:
    assert [formats.check_group_size(g) for g in (16, 32, 64, 128, 256, 384, -1)] == [
        16,
        32,
        64,
        128,
        256,
        384,
        -1,
    ]


# ---- the canonical form


def arguments(n: int = 3, k: int = 100, groups: int = 4, **changed: object) -> Any:
    given: dict[str, object] = {
        "codes": torch.zeros(n, k, dtype=torch.uint8),
        "scales": torch.ones(n, groups),
        "group_size": 32,
    }
    return given | changed


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("group_size", "groups"), [(32, 4), (64, 2), (128, 1), (256, 1), (-1, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_valid_weight(bits: int, group_size: int, groups: int, dtype: torch.dtype) -> None:
    scales = torch.full((3, groups), -0.5, dtype=dtype)
    qw = QuantizedWeight(**arguments(scales=scales, bits=bits, group_size=group_size))
    assert (qw.n, qw.k, qw.shape, qw.groups, qw.symmetric) == (3, 100, (3, 100), groups, True)
    assert qw.device == torch.device("cpu")
    assert qw.scales is scales
    largest = torch.full((3, groups), 2**bits - 1, dtype=torch.uint8)
    codes = torch.full((3, 100), 2**bits - 1, dtype=torch.uint8)
    for extra in ({"zeros": largest}, {"offsets": scales}):
        qw = QuantizedWeight(
            **arguments(codes=codes, scales=scales, bits=bits, group_size=group_size, **extra),
            bias=torch.ones(3, dtype=dtype),
            perm=torch.arange(99, -1, -1),
        )
        assert not qw.symmetric


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"bits": 3}, ValueError, "bits is 3"),
        ({"group_size": 8}, ValueError, "group_size is 8"),
        ({"codes": [[1]]}, TypeError, "codes is a list; a torch.Tensor is expected"),
        ({"codes": torch.zeros(3, 100)}, TypeError, "codes has dtype float32; supported are uint8"),
        ({"codes": torch.zeros(3, 100, dtype=torch.int8)}, TypeError, "codes has dtype int8"),
        ({"codes": torch.zeros(100, dtype=torch.uint8)}, ValueError, r"codes has shape \(100,\)"),
        (
            {"codes": torch.zeros(0, 100, dtype=torch.uint8)},
            ValueError,
            r"codes has shape \(0, 100\)",
        ),
        ({"codes": torch.zeros(3, 0, dtype=torch.uint8)}, ValueError, r"codes has shape \(3, 0\)"),
        (
            {"codes": torch.full((3, 100), 16, dtype=torch.uint8)},
            ValueError,
            "codes holds 16; with bits=4",
        ),
        ({"scales": None}, TypeError, "scales is a NoneType"),
        (
            {"scales": torch.ones(3, 3)},
            ValueError,
            r"scales has shape \(3, 3\); \(3, 4\) is expected",
        ),
        ({"scales": torch.ones(3, 4).double()}, TypeError, "scales has dtype float64"),
        ({"group_size": -1}, ValueError, r"scales has shape \(3, 4\); \(3, 1\) is expected"),
        ({"zeros": torch.zeros(3, 4)}, TypeError, "zeros has dtype float32; supported are uint8"),
        ({"zeros": torch.zeros(3, 5, dtype=torch.uint8)}, ValueError, r"zeros has shape \(3, 5\)"),
        (
            {"zeros": torch.full((3, 4), 99, dtype=torch.uint8)},
            ValueError,
            "zeros holds 99; with bits=4",
        ),
        ({"offsets": torch.zeros(4, 3)}, ValueError, r"offsets has shape \(4, 3\)"),
        ({"offsets": torch.zeros(3, 4, dtype=torch.int32)}, TypeError, "offsets has dtype int32"),
        (
            {"zeros": torch.zeros(3, 4, dtype=torch.uint8), "offsets": torch.zeros(3, 4)},
            ValueError,
            "both zeros and offsets",
        ),
        ({"bias": torch.zeros(4)}, ValueError, r"bias has shape \(4,\); \(3,\) is expected"),
        ({"bias": torch.zeros(3, dtype=torch.int8)}, TypeError, "bias has dtype int8"),
        ({"perm": torch.arange(99)}, ValueError, r"perm has shape \(99,\)"),
        ({"perm": torch.arange(100).float()}, TypeError, "perm has dtype float32"),
        ({"perm": torch.arange(100) % 99}, ValueError, r"perm is not a permutation of 0 \.\. 99"),
        ({"perm": torch.arange(1, 101)}, ValueError, "perm is not a permutation"),
        (
            {"scales": torch.ones(3, 4, device="meta")},
            ValueError,
            "scales is on meta; the codes are on cpu",
        ),
    ],
)
def test_invalid_weights_are_refused(
    changed: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        QuantizedWeight(**arguments(**changed))


def test_moving_a_weight_keeps_everything() -> None:
    given = arguments(
        offsets=torch.randn(3, 4).half(),
        bias=torch.randn(3),
        perm=torch.randperm(100),
        bits=8,
    )
    moved = QuantizedWeight(**given).to("cpu")
    for name, value in given.items():
        kept = getattr(moved, name)
        assert torch.equal(kept, value) if isinstance(value, Tensor) else kept == value
    assert moved.zeros is None


def test_a_weight_is_frozen() -> None:
    with pytest.raises(AttributeError):
        QuantizedWeight(**arguments()).bits = 8


# ---- the packed form


def test_rows_of_a_group_vector_by_hand() -> None:
    rows = group_vector_positions(128, torch.device("cpu")).argsort().tolist()
    # Lane group 0 owns rows 0 and 8 of each of the four blocks of 16, then lane group 1 rows 1 and
    # 9.
    assert rows[:10] == [0, 8, 16, 24, 32, 40, 48, 56, 1, 9]
    assert rows[56:64] == [7, 15, 23, 31, 39, 47, 55, 63]
    assert rows[64:66] == [64, 72]
    assert sorted(rows) == list(range(128))


def packed(**changed: object) -> PackedWeight:
    """N = 65, K = 130, 4 bits, groups of 32: padded to 128 x 256 and 8 groups."""
    given: dict[str, object] = {
        "codes": torch.zeros(128 * 256 // 2, dtype=torch.uint8),
        "scales": torch.zeros(8, 128, dtype=torch.float16),
        "zeros": None,
        "offsets": None,
        "bias": None,
        "perm": None,
        "n": 65,
        "k": 130,
        "bits": 4,
        "group_size": 32,
    }
    return PackedWeight(**(given | changed))


def test_a_valid_packed_weight() -> None:
    bias, perm = torch.zeros(65), torch.arange(130, dtype=torch.int32)
    pw = packed(zeros=torch.zeros(8, 128, dtype=torch.int8), bias=bias, perm=perm)
    assert pw.shape == (65, 130)
    assert pw.device == torch.device("cpu")
    assert list(pw.tensors()) == ["codes", "scales", "zeros", "bias", "perm"]
    assert pw.nbytes == 16384 + 2048 + 1024 + 260 + 520
    assert pw.to("cpu") is pw
    moved = packed(offsets=torch.zeros(8, 128)).to("meta")
    assert moved.device == torch.device("meta")
    assert moved.offsets is not None
    assert moved.zeros is None
    assert (moved.n, moved.k, moved.bits, moved.group_size) == (65, 130, 4, 32)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"bits": 5}, ValueError, "bits is 5"),
        ({"group_size": 33}, ValueError, "group_size is 33"),
        ({"n": 0}, ValueError, r"shape is \(0, 130\)"),
        ({"k": 0}, ValueError, r"shape is \(65, 0\)"),
        ({"codes": b""}, TypeError, "codes is a bytes"),
        ({"bits": 8}, ValueError, r"codes has shape \(16384,\); \(32768,\) is expected"),
        ({"n": 129}, ValueError, r"codes has shape \(16384,\); \(24576,\) is expected"),
        (
            {"codes": torch.zeros(128 * 256 // 2, dtype=torch.int8)},
            TypeError,
            "codes has dtype int8",
        ),
        (
            {"scales": torch.zeros(5, 128)},
            ValueError,
            r"scales has shape \(5, 128\); \(8, 128\) is expected",
        ),
        ({"group_size": 128}, ValueError, r"scales has shape \(8, 128\); \(2, 128\) is expected"),
        (
            {"zeros": torch.zeros(8, 128, dtype=torch.uint8)},
            TypeError,
            "zeros has dtype uint8; supported are int8",
        ),
        ({"offsets": torch.zeros(8, 65)}, ValueError, r"offsets has shape \(8, 65\)"),
        (
            {"zeros": torch.zeros(8, 128, dtype=torch.int8), "offsets": torch.zeros(8, 128)},
            ValueError,
            "both zeros and offsets",
        ),
        ({"bias": torch.zeros(128)}, ValueError, r"bias has shape \(128,\); \(65,\) is expected"),
        ({"perm": torch.arange(130)}, TypeError, "perm has dtype int64; supported are int32"),
        ({"scales": torch.zeros(128, 8).t()}, ValueError, r"scales has strides \(1, 8\)"),
        ({"offsets": torch.zeros(8, 128, device="meta")}, ValueError, "offsets is on meta"),
    ],
)
def test_invalid_packed_weights_are_refused(
    changed: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        packed(**changed)


def place(n: int, k: int, bits: int) -> tuple[int, int]:
    """Byte and shift of a code in a weight of at most 128 columns, built up from the
    fragments' picture.
    """
    panel, block, row = n // 64, n % 64 // 16, n % 16
    g, half = row % 8, row // 8
    unit_columns = {2: 128, 4: 64, 8: 32}[bits]
    unit, chunk = k // unit_columns, k % unit_columns // 16
    # Lane t of a group has columns 2t, 2t + 8, 2t + 1, 2t + 9 of each 16, in this order.
    t, element = next(
        (t, e) for t in range(4) for e, c in enumerate((0, 8, 1, 9)) if 2 * t + c == k % 16
    )
    start = ((panel * 4 + block) * (128 // unit_columns) + unit) * 512 + (4 * g + t) * 16
    if bits == 2:  # chunks 4 to 7 are above those of 0 to 3
        return start + 4 * (chunk % 4) + element, 4 * half + 2 * (chunk // 4)
    if bits == 4:
        return start + 4 * chunk + element, 4 * half
    return start + 4 * (2 * chunk + half) + element, 0


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_unpacking_by_the_picture_of_the_layout(bits: int) -> None:
    n, k, g = 70, 100, torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (n, k), generator=g, dtype=torch.uint8)
    data = [0] * (128 * 128 * bits // 8)
    for i in range(n):
        for j in range(k):
            byte, shift = place(i, j, bits)
            data[byte] |= (int(codes[i, j]) - 2 ** (bits - 1)) % 2**bits << shift
    rows = group_vector_positions(128, torch.device("cpu")).argsort()
    scales, zeros = (
        torch.randn(4, 128, generator=g),
        torch.randint(-min(8, 2 ** (bits - 1)), min(8, 2 ** (bits - 1)), (4, 128), generator=g).to(
            torch.int8
        ),
    )
    perm = torch.randperm(k, generator=g)
    pw = PackedWeight(
        codes=torch.tensor(data, dtype=torch.uint8),
        scales=scales[:, rows].contiguous(),
        zeros=zeros[:, rows].contiguous(),
        offsets=None,
        bias=torch.arange(n).float(),
        perm=perm.int(),
        n=n,
        k=k,
        bits=bits,
        group_size=32,
    )
    qw = pw.unpack()
    assert torch.equal(qw.codes, codes)
    assert torch.equal(qw.scales, scales[:, :n].t())
    assert qw.zeros is not None
    assert torch.equal(qw.zeros.int(), zeros[:, :n].t().int() + 2 ** (bits - 1))
    assert qw.offsets is None
    assert qw.bias is not None
    assert torch.equal(qw.bias, torch.arange(n).float())
    assert qw.perm is not None
    assert torch.equal(qw.perm, perm)
    real = replace(pw, zeros=None, offsets=scales[:, rows].half()).unpack()
    assert real.offsets is not None
    assert torch.equal(real.offsets, scales[:, :n].t().half())


# ---- errors


def test_checkpoint_errors_name_file_and_tensor() -> None:
    error = CheckpointError("a/b.gguf", "needs 3 bytes; 2 are left", tensor="blk.0")
    assert str(error) == "a/b.gguf: tensor 'blk.0': needs 3 bytes; 2 are left"
    assert (error.path, error.tensor) == ("a/b.gguf", "blk.0")
    assert isinstance(error, ValueError)
    error = CheckpointError("b.gguf", "is not a GGUF file")
    assert str(error) == "b.gguf: is not a GGUF file"
    assert error.tensor is None


@pytest.mark.parametrize(
    "field", [{"bits": 4.0}, {"bits": True}, {"group_size": 32.0}, {"group_size": "32"}]
)
def test_sizes_are_integers(field: dict[str, object]) -> None:
    arguments: dict[str, object] = {"bits": 4, "group_size": 32} | field
    with pytest.raises(ValueError, match=next(iter(field))):
        QuantizedWeight(torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, 1), **arguments)


def test_a_checkpoint_error_survives_copies_and_pickles() -> None:
    error = pickle.loads(pickle.dumps(CheckpointError("model.gguf", "is cut off", tensor="blk.0")))
    assert (error.path, error.tensor, str(error)) == (
        "model.gguf",
        "blk.0",
        "model.gguf: tensor 'blk.0': is cut off",
    )


def test_formats_of_as_many_bits_are_known_by_their_books(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twice = tuple(2 * value for value in formats.E4M3)
    other = formats.Format("other", "other floats", 8, has_book=True, book=twice, nan=0x7C)
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, other))
    for book, name in ((formats.E4M3, "e4m3"), (twice, "other")):
        assert format_of(8, torch.tensor(book)).name == name
    codes = torch.tensor([[0x7B, 0xFC]], dtype=torch.uint8)
    weight = QuantizedWeight(
        codes, torch.ones(1, 1), bits=8, group_size=-1, book=torch.tensor(twice)
    )
    assert not_finite(weight) == "codes[0, 1] is 0xfc, the NaN of other"
    with pytest.raises(ValueError, match="and other, which codes of 8 bits"):
        format_of(8, torch.zeros(256))
