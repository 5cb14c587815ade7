"""Blocks of GGUF, written by hand, and the weights that are read from them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf

from cutlass_ops import load_checkpoint, reference


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def one_block(tmp_path: Path, kind: Type, raw: bytes, group_size: int = 32) -> torch.Tensor:
    path = write_gguf(
        tmp_path / "m.gguf", {"w": (np.frombuffer(raw, np.uint8)[None], kind)}, "other"
    )
    weight = load_checkpoint(path)["w"]
    assert weight.shape == (1, gguf.GGML_QUANT_SIZES[kind][0])
    assert weight.group_size == group_size
    return weight


# elements 0..15 are 0..15, elements 16..31 are 15..0
NIBBLES = bytes(i | (15 - i) << 4 for i in range(16))

NIBBLE_CODES = [*range(16), *range(15, -1, -1)]


def test_a_q4_0_block_by_hand(tmp_path: Path) -> None:
    weight: Any = one_block(tmp_path, Type.Q4_0, half(-0.5) + NIBBLES)
    assert weight.codes[0].tolist() == NIBBLE_CODES
    assert weight.scales.tolist() == [[-0.5]]
    assert weight.symmetric
    assert reference.dequantize_weight(weight, torch.float32)[0].tolist() == [
        -0.5 * (q - 8) for q in NIBBLE_CODES
    ]


def test_a_q4_1_block_by_hand(tmp_path: Path) -> None:
    weight: Any = one_block(tmp_path, Type.Q4_1, half(0.25) + half(-3.5) + NIBBLES)
    assert weight.codes[0].tolist() == NIBBLE_CODES
    assert weight.scales.tolist() == [[0.25]]
    assert weight.offsets.dtype == torch.float32
    assert weight.offsets.tolist() == [[-3.5 + 8 * 0.25]]
    assert reference.dequantize_weight(weight, torch.float32)[0].tolist() == [
        0.25 * q - 3.5 for q in NIBBLE_CODES
    ]


def test_a_q8_0_block_by_hand(tmp_path: Path) -> None:
    values = [-128, -127, -1, 0, 1, 127, *range(26)]
    weight: Any = one_block(tmp_path, Type.Q8_0, half(0.125) + struct.pack("32b", *values))
    assert weight.bits == 8
    assert weight.codes[0].tolist() == [value + 128 for value in values]
    assert reference.dequantize_weight(weight, torch.float32)[0].tolist() == [
        0.125 * value for value in values
    ]


FIFTH = struct.pack("<I", 0x8000_0001)  # of elements 0 and 31

FIFTH_CODES = [16, *range(1, 16), *range(15, 0, -1), 16]


def test_a_q5_0_block_by_hand(tmp_path: Path) -> None:
    weight: Any = one_block(tmp_path, Type.Q5_0, half(-0.5) + FIFTH + NIBBLES)
    assert weight.bits == 8
    assert weight.codes[0].tolist() == [q - 16 + 128 for q in FIFTH_CODES]
    assert reference.dequantize_weight(weight, torch.float32)[0].tolist() == [
        -0.5 * (q - 16) for q in FIFTH_CODES
    ]


def test_a_q5_1_block_by_hand(tmp_path: Path) -> None:
    weight: Any = one_block(tmp_path, Type.Q5_1, half(0.25) + half(-3.5) + FIFTH + NIBBLES)
    assert weight.bits == 8
    assert weight.codes[0].tolist() == [q + 128 for q in FIFTH_CODES]
    assert weight.offsets.dtype == torch.float16
    assert weight.offsets.tolist() == [[-3.5]]
    assert reference.dequantize_weight(weight, torch.float32)[0].tolist() == [
        0.25 * q - 3.5 for q in FIFTH_CODES
    ]


# Groups 0 .. 7 have sc 1, 2, 3, 63, 4, 16, 32, 63 and mn 10, 0, 1, 5, 6, 63, 48, 17, of 6 bits
# each.
SCALES_OF_A_K_BLOCK = bytes(
    [
        1,
        2 | 1 << 6,
        3 | 2 << 6,
        63 | 3 << 6,
        10,
        0 | 3 << 6,
        1 | 3 << 6,
        5 | 1 << 6,
        4 | 6 << 4,
        15 << 4,
        0,
        15 | 1 << 4,
    ]
)

SC, MN = [1, 2, 3, 63, 4, 16, 32, 63], [10, 0, 1, 5, 6, 63, 48, 17]


def test_a_q4_k_block_by_hand(tmp_path: Path) -> None:
    halves = bytes(i % 16 | (15 - i % 16) << 4 for i in range(32))  # of each two groups
    weight: Any = one_block(
        tmp_path, Type.Q4_K, half(-0.5) + half(0.25) + SCALES_OF_A_K_BLOCK + halves * 4
    )
    codes = [[i % 16 for i in range(32)], [15 - i % 16 for i in range(32)]] * 4
    assert weight.bits == 4
    assert weight.codes.view(8, 32).tolist() == codes
    assert weight.scales.tolist() == [[-0.5 * sc for sc in SC]]
    assert weight.offsets.tolist() == [
        [8 * -0.5 * sc - 0.25 * mn for sc, mn in zip(SC, MN, strict=True)]
    ]
    values = [-0.5 * SC[g] * q - 0.25 * MN[g] for g in range(8) for q in codes[g]]
    assert reference.dequantize_weight(weight, torch.float32)[0].tolist() == values


def test_a_q5_k_block_by_hand(tmp_path: Path) -> None:
    # element 0 of groups 0, 5, 7; element 31 of group 7
    fifth = bytes([0b1010_0001] + [0] * 30 + [0b1000_0000])
    weight: Any = one_block(
        tmp_path,
        Type.Q5_K,
        half(-0.5) + half(0.25) + SCALES_OF_A_K_BLOCK + fifth + bytes(range(128)),
    )
    codes = [[(32 * (g // 2) + i) >> 4 * (g % 2) & 15 for i in range(32)] for g in range(8)]
    for group, element in ((0, 0), (5, 0), (7, 0), (7, 31)):
        codes[group][element] += 16
    assert weight.codes.view(8, 32).tolist() == [[q + 128 for q in group] for group in codes]
    values = [-0.5 * SC[g] * q - 0.25 * MN[g] for g in range(8) for q in codes[g]]
    assert reference.dequantize_weight(weight, torch.float32)[0].tolist() == values


def q6_k_block(scales: list[int]) -> bytes:
    """Every q of 6 bits four times, elements in order: 32 low halves and 32 high
    ones share bytes.
    """
    q = [element % 64 for element in range(256)]
    low = [q[128 * h + i] & 15 | (q[128 * h + 64 + i] & 15) << 4 for h in (0, 1) for i in range(64)]
    high = [
        sum((q[128 * h + 32 * j + i] >> 4) << 2 * j for j in range(4))
        for h in (0, 1)
        for i in range(32)
    ]
    return bytes(low) + bytes(high) + struct.pack("16b", *scales) + half(-0.5)


def test_a_q6_k_block_by_hand(tmp_path: Path) -> None:
    of_16 = [7, 7, -7, 7, 2, 8, -3, 1, -128, 127, 0, 0, 9, 12, 0, 5]
    weight: Any = one_block(tmp_path, Type.Q6_K, q6_k_block(of_16), 16)
    assert weight.scales.dtype is torch.float32
    assert weight.scales.tolist() == [[-0.5 * sc for sc in of_16]]
    assert weight.codes[0].tolist() == [i % 64 + 96 for i in range(256)]
    values = [-0.5 * of_16[i // 16] * (i % 64 - 32) for i in range(256)]
    assert reference.dequantize_weight(weight, torch.float32)[0].tolist() == values


def test_q6_k_scales_are_exact(tmp_path: Path) -> None:
    """11 bits of d, also below its normal numbers, times 7 of sc: fp16 would not hold them."""
    for bits in (0x0001, 0x03FF, 0x3BFF, 0x7BFF, 0xFBFF):
        d = float(np.array(bits, np.uint16).view(np.float16))
        block = q6_k_block([127, -128, 65, -127] * 4)[:208] + struct.pack("<H", bits)
        weight: Any = one_block(tmp_path, Type.Q6_K, block, 16)
        assert weight.scales[0, :4].double().tolist() == [d * sc for sc in (127, -128, 65, -127)]
        values = [d * (127, -128, 65, -127)[i // 16 % 4] * (i % 64 - 32) for i in range(256)]
        assert reference.dequantize_weight(weight, torch.float32)[0].double().tolist() == values


def test_q4_1_offsets_are_not_rounded_to_fp16(tmp_path: Path) -> None:
    # 8 d is exact in fp32 and below fp16's last place of m.
    weight: Any = one_block(tmp_path, Type.Q4_1, half(2**-12) + half(-1.0) + NIBBLES)
    assert weight.offsets.tolist() == [[-1.0 + 2**-9]]
    weight = one_block(tmp_path, Type.Q4_1, half(2**-16) + half(-1.0) + NIBBLES)
    assert weight.offsets.tolist() == [[-1.0 + 2**-13]]
