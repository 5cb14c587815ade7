"""Damaged files, and what readers may do with them."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from cutlass_ops import CheckpointError, QuantizedWeight, load_checkpoint, reorder, save_packed

#: For tests that damage files. Where CI is set, Hypothesis draws the same examples in every run, so
#: fewer do; elsewhere it draws others each time.
MANY = settings(
    deadline=None,
    max_examples=200 if os.environ.get("CI") else 600,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def text(value: str | bytes, size: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if size is None else size) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(
    name: str, dims: tuple[int, ...], kind: int, offset: int, count: int | None = None
) -> bytes:
    count = len(dims) if count is None else count
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


KEYS = (
    key("general.architecture", 8, text("llama")),
    key("llama.attention.head_count", 4, struct.pack("<I", 2)),
    key("flag", 7, b"\1"),
    key("numbers", 9, struct.pack("<IQ3f", 6, 3, 1.0, 2.0, 3.0)),
    key("words", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("")),
)

TENSORS = (
    tensor("token_embd.weight", (32, 4), 8, 0),  # Q8_0: 136 bytes
    tensor("blk.0.attn_q.weight", (32, 4), 2, 160),  # Q4_0: 72 bytes
    tensor("blk.0.ffn_up.weight", (64, 2), 3, 256),  # Q4_1: 80 bytes
    tensor("output_norm.weight", (7,), 0, 352),  # F32: 28 bytes
    tensor("scalar", (1,), 30, 384),  # BF16: 2 bytes
)

DATA = bytes(range(256)) + bytes(130)


def gguf_file(
    keys: tuple[bytes, ...] = KEYS,
    tensors: tuple[bytes, ...] = TENSORS,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    data: bytes = DATA,
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def read_all(path: Path) -> None:
    """Read every tensor in every way."""
    checkpoint = load_checkpoint(path)
    for name in checkpoint:
        assert isinstance(checkpoint[name], QuantizedWeight)
    for name, value in checkpoint.plain():
        assert tuple(value.shape) == checkpoint.entries[name].shape
    for entry in checkpoint.entries.values():
        assert tuple(entry.values().shape) == entry.shape


def read_or_refuse(path: Path, read: Callable[[Path], object] = read_all) -> bool:
    """Whether the file was read; anything but a CheckpointError that names the
    file is a failure.
    """
    refusal = None
    begin = time.perf_counter()
    try:
        read(path)
    except CheckpointError as error:
        refusal = error
    assert time.perf_counter() - begin < 30
    assert refusal is None or str(path.parent) in str(refusal)
    return refusal is None


def mutations(whole: bytes, header: int) -> st.SearchStrategy[bytes]:
    """``whole`` with bytes of the header, mostly, set, cut out, put in, or with its end cut off."""
    position = st.one_of(st.integers(0, header), st.integers(0, len(whole) - 1))
    interesting = st.sampled_from(
        [b"\0", b"\xff", b"\x7f", b"\x80", b"\1", b"\xff" * 8, b"\0" * 8, b"\0\0\0\x80", b'"']
    )
    insert = st.one_of(interesting, st.binary(min_size=1, max_size=9))
    edit = st.tuples(position, insert, st.integers(0, 9))

    def apply(edits: list[tuple[int, bytes, int]]) -> bytes:
        content = whole
        for offset, new, removed in edits:
            # Mostly in place, so that what follows stays where it is.
            cut = len(new) if removed > 3 else removed
            content = content[:offset] + new + content[offset + cut :]
        return content

    return st.lists(edit, min_size=1, max_size=3).map(apply)


def raw_safetensors(
    header: dict[str, Any] | bytes, data: bytes, length: int | None = None
) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def header_length(content: bytes) -> int:
    return int(struct.unpack("<Q", content[:8])[0])


def packed_file(tmp_path: Path) -> bytes:
    random = torch.Generator().manual_seed(0)
    weight = QuantizedWeight(
        torch.randint(0, 16, (3, 40), generator=random, dtype=torch.uint8),
        torch.randn(3, 2, generator=random).half(),
        zeros=torch.randint(0, 16, (3, 2), generator=random, dtype=torch.uint8),
        group_size=32,
        bias=torch.randn(3, generator=random),
        perm=torch.randperm(40, generator=random),
    )
    save_packed(
        tmp_path / "p.safetensors",
        {"w": reorder(weight), "norm": torch.ones(3)},
        tied={"w": "e"},
        sources={"a": "b"},
    )
    return (tmp_path / "p.safetensors").read_bytes()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
