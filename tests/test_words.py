"""Codes in 32-bit words, as one code a byte; the C++ tests have every shape."""

from __future__ import annotations

import pytest
import torch

from cutlass_ops.checkpoints.words import (
    permute_columns,
    unpack_along_k,
    unpack_along_n,
    unpack_bytes,
    unpack_tiles,
)

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)


def test_golden_words() -> None:
    assert unpack_along_k(words(0x76543210)[None], 8, 4).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert unpack_along_k(words(0x03020100)[None], 3, 8).tolist() == [[0, 1, 2]]
    assert unpack_along_n(words(0x75316420)[None], AWQ).t().tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_golden_bytes() -> None:
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76]], dtype=torch.uint8)
    assert unpack_bytes(packed, 4, in_turn=True, high_first=False).tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7]
    ]
    assert unpack_bytes(packed, 4, in_turn=True, high_first=True).tolist() == [
        [1, 0, 3, 2, 5, 4, 7, 6]
    ]
    assert unpack_bytes(packed, 2, in_turn=False, high_first=False).tolist() == [
        [0, 2, 1, 3, 4, 6, 5, 7]
    ]
    assert unpack_bytes(packed, 4, in_turn=False, high_first=True).tolist() == [
        [1, 3, 5, 7, 0, 2, 4, 6]
    ]


@pytest.mark.parametrize(
    ("blocks", "size", "run"),
    [
        (1, 1, 1),
        (7, 18, 18),
        (5000, 16, 16),
        (3, 128, 32),
        (1, 200_001, 200_001),
        (2, 140_000, 70_000),
    ],
)
@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("high_first", [True, False])
def test_bytes_of_blocks(blocks: int, size: int, run: int, in_turn: bool, high_first: bool) -> None:
    whole = torch.randint(
        0, 256, (blocks, size + 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    packed = whole[:, 3:]
    halves = [packed >> 4, packed & 15] if high_first else [packed & 15, packed >> 4]
    expected = torch.stack(
        [half.reshape(blocks, -1, run) for half in halves], -1 if in_turn else 2
    ).reshape(blocks, 2 * size)
    assert torch.equal(unpack_bytes(packed, run, in_turn=in_turn, high_first=high_first), expected)


def test_views_are_read_where_they_lie() -> None:
    stored = torch.randint(-(2**31), 2**31, (6, 40), generator=torch.Generator().manual_seed(0)).to(
        torch.int32
    )
    for view in (stored.t(), stored[::2, 3:33:5], stored[:, :1]):
        assert torch.equal(
            unpack_along_k(view, 8 * view.shape[1], 4),
            unpack_along_k(view.clone(), 8 * view.shape[1], 4),
        )
        assert torch.equal(unpack_along_n(view, AWQ), unpack_along_n(view.clone(), AWQ))


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6, 7])
def test_codes_of_other_bits_are_dense(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (300, 45), generator=torch.Generator().manual_seed(bits))
    rows = [sum(code << (bits * place) for place, code in enumerate(row)) for row in codes.tolist()]
    count = -(-45 * bits // 32)
    packed = words(
        *(row >> (32 * word) & 0xFFFFFFFF for row in rows for word in range(count))
    ).view(300, count)
    assert torch.equal(unpack_along_k(packed, 45, bits), codes.to(torch.uint8))


def test_columns_are_permuted() -> None:
    codes = torch.randint(0, 256, (5, 70), dtype=torch.uint8)
    perm = torch.randperm(70)
    assert torch.equal(permute_columns(codes, perm), codes[:, perm])


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        unpack_along_k(torch.zeros(1, 1, dtype=torch.int64), 8, 4)
    with pytest.raises(TypeError, match=r"\[4\]"):
        unpack_along_n(torch.zeros(4, dtype=torch.int32), AWQ)
    with pytest.raises(ValueError, match="9 codes of 4 bits take 2 words"):
        unpack_along_k(torch.zeros(1, 1, dtype=torch.int32), 9, 4)
    with pytest.raises(ValueError, match="permutation"):
        unpack_along_n(torch.zeros(1, 1, dtype=torch.int32), (0,) * 8)
    with pytest.raises(TypeError, match="strides"):
        unpack_bytes(
            torch.zeros(4, 4, dtype=torch.uint8).t()[:, ::2], 1, in_turn=True, high_first=True
        )
    with pytest.raises(ValueError, match="run is 3"):
        unpack_bytes(torch.zeros(4, 4, dtype=torch.uint8), 3, in_turn=True, high_first=True)
    assert unpack_bytes(
        torch.zeros(0, 4, dtype=torch.uint8), 4, in_turn=True, high_first=True
    ).shape == (0, 8)
    with pytest.raises(TypeError, match=r"\[1, 1, 32, 3\]"):
        unpack_tiles(torch.zeros(1, 1, 32, 3, dtype=torch.int32))
