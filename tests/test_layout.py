"""The packed order of the codes, against a statement of it in numpy, and its inverse."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_ops import _C
from cutlass_ops.weights import formats
from cutlass_ops.weights.packed_weight import group_vector_positions

Codes = npt.NDArray[np.uint8]

POISON = 0xA5

# By nibble of a 4-bit word, lowest first: lane 4 * g + t holds row g + NIBBLE_ROW, and of the
# word's 16 k 2 * t + NIBBLE_K.
NIBBLE_ROW = np.array([0, 8, 0, 8, 0, 8, 0, 8])
NIBBLE_K = np.array([0, 0, 8, 8, 1, 1, 9, 9])
# By word of a lane's four, and by byte of a word, at 8 bits.
WORD_ROW = np.array([0, 8, 0, 8])
WORD_K = np.array([0, 0, 16, 16])
BYTE_K = np.array([0, 8, 1, 9])


def packed(codes: Codes, bits: int) -> Codes:
    """Pack with the package, into memory that held something else."""
    n, k = codes.shape
    out = np.full(_C.packed_bytes(n, k, bits), POISON, np.uint8)
    _C.pack(codes.ctypes.data, out.ctypes.data, n, k, bits)
    return out


def unpacked(packed_codes: Codes, n: int, k: int, bits: int) -> Codes:
    out = np.full((n, k), POISON, np.uint8)
    _C.unpack(packed_codes.ctypes.data, out.ctypes.data, n, k, bits)
    return out


def stated_order(codes: Codes, bits: int) -> Codes:
    """The expected result of `packed`: each place in memory has the code of its row and column."""
    n, k = codes.shape
    n_pad, k_pad = -(-n // 64) * 64, -(-k // 128) * 128
    centred = np.zeros((n_pad, k_pad), np.int16)  # padding is code 0 after centring
    centred[:n, :k] = codes.astype(np.int16) - 2 ** (bits - 1)
    panels, tiles = n_pad // 64, k_pad // 128
    if bits == 2:
        # as at 4 bits; of each nibble the lower two bits are of columns 64 before the upper two
        panel, tile, block, g, t, word, nibble, half = np.indices((panels, tiles, 4, 8, 4, 4, 8, 2))
        row = 64 * panel + 16 * block + g + NIBBLE_ROW[nibble]
        column = 128 * tile + 64 * half + 16 * word + 2 * t + NIBBLE_K[nibble]
        pairs = (centred[row, column].reshape(-1, 4) & 3).astype(np.uint8)
        return pairs[:, 0] | pairs[:, 1] << 2 | pairs[:, 2] << 4 | pairs[:, 3] << 6
    if bits == 4:
        # memory: panel, tile, row block, 64 k, lane group, lane in it, word, nibble
        panel, tile, block, unit, g, t, word, nibble = np.indices((panels, tiles, 4, 2, 8, 4, 4, 8))
        row = 64 * panel + 16 * block + g + NIBBLE_ROW[nibble]
        column = 128 * tile + 64 * unit + 16 * word + 2 * t + NIBBLE_K[nibble]
        nibbles = (centred[row, column].reshape(-1, 2) & 15).astype(np.uint8)
        return nibbles[:, 0] | nibbles[:, 1] << 4
    panel, tile, block, unit, g, t, word, byte = np.indices((panels, tiles, 4, 4, 8, 4, 4, 4))
    row = 64 * panel + 16 * block + g + WORD_ROW[word]
    column = 128 * tile + 32 * unit + WORD_K[word] + 2 * t + BYTE_K[byte]
    return (centred[row, column].reshape(-1) & 255).astype(np.uint8)


def random_codes(n: int, k: int, bits: int, seed: int = 0) -> Codes:
    return np.random.default_rng(seed).integers(0, 2**bits, (n, k), np.uint8)


@pytest.mark.parametrize("bits", formats.BITS)
@pytest.mark.parametrize(
    ("n", "k"), [(n, k) for k in (576, 10944, 7392, 8256) for n in (32, 192, 1000)] + [(49152, 576)]
)
def test_unpack_undoes_pack(n: int, k: int, bits: int) -> None:
    codes = random_codes(n, k, bits)
    packed_codes = packed(codes, bits)
    assert packed_codes.size == formats.padded_rows(n) * formats.padded_k(k) * bits // 8
    assert np.array_equal(unpacked(packed_codes, n, k, bits), codes)


@settings(deadline=None)
@given(
    n=st.integers(1, 200),
    k=st.integers(1, 400),
    bits=st.sampled_from(formats.BITS),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_order_is_the_stated_one(n: int, k: int, bits: int, seed: int) -> None:
    codes = random_codes(n, k, bits, seed)
    packed_codes = packed(codes, bits)
    assert np.array_equal(packed_codes, stated_order(codes, bits))
    assert np.array_equal(unpacked(packed_codes, n, k, bits), codes)


@pytest.mark.parametrize("bits", formats.BITS)
def test_a_single_code_by_hand(bits: int) -> None:
    # Row 77 is panel 1, row 13 of its block 0: g = 5, the upper half. Column 147 is k 19 of tile
    # 1: the second 16 k, 3 = 2 * 1 + 1 of them, so t = 1 and element 2 (after 2t and 2t + 8).
    # Lane 4 * 5 + 1 = 21.
    codes = np.full((128, 256), 2 ** (bits - 1), np.uint8)
    codes[77, 147] += 1
    expected = np.zeros(128 * 256 * bits // 8, np.uint8)
    if bits == 2:
        expected[3 * 2048 + 21 * 16 + 1 * 4 + 2] = 0x10  # the same nibble's lower two bits
    elif bits == 4:
        expected[3 * 4096 + 21 * 16 + 1 * 4 + 2] = 0x10  # word 1, nibble 5
    else:
        expected[3 * 8192 + 21 * 16 + 3 * 4 + 2] = 0x01  # word 3, byte 2
    assert np.array_equal(packed(codes, bits), expected)


def test_group_vectors_are_transposed_in_eights() -> None:
    rows = group_vector_positions(128, torch.device("cpu")).argsort()
    assert rows[:18].tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 1, 9, 17, 25, 33, 41, 49, 57, 2, 10]
    assert rows[64:].tolist() == [64 + 8 * j + g for g in range(8) for j in range(8)]


@pytest.mark.parametrize(
    ("n", "k", "bits", "message"),
    [
        (1, 1, 5, "bits is 5; accepted: 2, 4, 8"),
        (0, 1, 4, "n is 0; accepted: 1 to 2147483519"),
        (1, 2**31, 8, "k is 2147483648; accepted: 1 to 2147483519"),
    ],
)
def test_bad_sizes_are_refused_before_memory_is_touched(
    n: int, k: int, bits: int, message: str
) -> None:
    for function in (_C.pack, _C.unpack):
        with pytest.raises(ValueError, match=message):
            function(0, 0, n, k, bits)
