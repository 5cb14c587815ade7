"""Files with false headers: each is refused with a CheckpointError, or read as its header says;
never a crash, a hang or an excess of memory.
"""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_cases import (
    DATA,
    JSON,
    KEYS,
    MANY,
    TENSORS,
    gguf_file,
    header_length,
    key,
    mutations,
    packed_file,
    raw_safetensors,
    read_all,
    read_or_refuse,
    tensor,
    text,
)
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save as to_safetensors

from cutlass_ops import (
    CheckpointError,
    PackedWeight,
    load_checkpoint,
    load_packed,
    quantize,
    reorder,
    save_packed,
)
from cutlass_ops.checkpoints import gguf_header, safetensors_files
from cutlass_ops.files.packed_file import packed_info
from cutlass_ops.files.verify import verify_packed

# ---- GGUF, written by hand so that every field can be false


def test_the_undamaged_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file())
    checkpoint = load_checkpoint(path)
    assert list(checkpoint) == [
        "lm_head",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.up_proj",
    ]
    assert read_or_refuse(path)
    path.write_bytes(gguf_file(version=2))
    assert read_or_refuse(path)


HUGE = (1 << 64) - 1

LIES: dict[str, tuple[bytes, str]] = {
    "magic": (gguf_file(magic=b"GGML"), "starts with b'GGML'"),
    "version 1": (gguf_file(version=1), "version 1; versions 2 and 3"),
    "big-endian": (gguf_file(version=3 << 24), "big-endian"),
    "key count": (gguf_file(key_count=HUGE), "claims 18446744073709551615 keys"),
    "tensor count": (gguf_file(tensor_count=HUGE), "claims 18446744073709551615 tensors"),
    "one key too many": (gguf_file(key_count=6), "the name of tensor 0 takes"),
    "length of a key's name": (
        gguf_file((text("k", HUGE),)),
        "the name of key 0 takes 18446744073709551615 bytes",
    ),
    "length of a string": (gguf_file((key("k", 8, text("v", 1 << 62)),)), "key 'k' takes"),
    "type of a key": (gguf_file((key("k", 13, b""),)), "key 'k' has type 13"),
    "array of arrays": (gguf_file((key("k", 9, struct.pack("<IQ", 9, 1)),)), "array of type 9"),
    "length of an array": (
        gguf_file((key("k", 9, struct.pack("<IQ", 10, HUGE)),)),
        "key 'k' takes",
    ),
    "length of an array of strings": (
        gguf_file((key("k", 9, struct.pack("<IQ", 8, HUGE)),)),
        "key 'k' has 1844",
    ),
    "length of a string in an array": (
        gguf_file((key("k", 9, struct.pack("<IQ", 8, 3) + text("a", 1 << 63)),)),
        "inside key 'k'",
    ),
    "length of the last string of all": (
        gguf_file((key("k", 9, struct.pack("<IQ", 8, 1) + text("a", 1 << 40)),), (), data=b""),
        "inside key 'k'",
    ),
    "key twice": (gguf_file((KEYS[0], KEYS[0])), "key 'general.architecture' appears twice"),
    "key that is not UTF-8": (gguf_file((key("k", 8, text(b"\xff")),)), "key 'k' is not UTF-8"),
    "alignment 0": (gguf_file((key("general.alignment", 4, bytes(4)),)), "general.alignment is 0"),
    "alignment 24": (
        gguf_file((key("general.alignment", 4, b"\x18\0\0\0"),)),
        "general.alignment is 24",
    ),
    "alignment of text": (
        gguf_file((key("general.alignment", 8, text("32")),)),
        "general.alignment is '32'",
    ),
    "alignment beyond the file": (
        gguf_file((key("general.alignment", 4, b"\0\0\0\x80"),), TENSORS[3:4]),
        "multiple",
    ),
    "name that is not UTF-8": (
        gguf_file((), (tensor("x", (1,), 0, 0).replace(b"x", b"\xff"),)),
        "not UTF-8",
    ),
    "tensor twice": (
        gguf_file((), (tensor("x", (1,), 0, 0), tensor("x", (1,), 0, 32))),
        "'x': appears twice",
    ),
    "no dimensions": (gguf_file((), (tensor("x", (), 0, 0),)), "'x': has 0 dimensions"),
    "five dimensions": (gguf_file((), (tensor("x", (1,) * 5, 0, 0),)), "'x': has 5 dimensions"),
    "many dimensions": (
        gguf_file((), (tensor("x", (1,), 0, 0, count=(1 << 32) - 1),)),
        "'x': has 4294967295",
    ),
    "size 0": (gguf_file((), (tensor("x", (32, 0), 2, 0),)), r"'x': has shape \[0, 32\]"),
    "size of 2^63": (gguf_file((), (tensor("x", (1 << 63,), 0, 0),)), "'x': F32"),
    # A product of 2^64 elements is 0 in 64 bits.
    "sizes that overflow": (gguf_file((), (tensor("x", (1 << 32, 1 << 32), 0, 0),)), "'x': F32"),
    "rows of a part of a block": (gguf_file((), (tensor("x", (33, 32), 2, 0),)), "'x': has shape"),
    "unknown type": (gguf_file((), (tensor("x", (32,), 999, 0),)), "'x': has type 999"),
    "retired type": (gguf_file((), (tensor("x", (32,), 4, 0),)), "'x': has type 4"),
    "offset beyond the file": (gguf_file((), (tensor("x", (1,), 0, 1 << 20),)), "'x': F32"),
    "offset that overflows": (gguf_file((), (tensor("x", (1,), 0, HUGE - 31),)), "'x': F32"),
    "offset out of line": (gguf_file((), (tensor("x", (1,), 0, 4),)), "'x': starts at 4"),
    "overlap": (
        gguf_file((), (tensor("x", (16,), 0, 0), tensor("y", (1,), 0, 32))),
        "'y': overlaps tensor 'x'",
    ),
    "the same place": (
        gguf_file((), (tensor("x", (1,), 0, 0), tensor("y", (1,), 0, 0))),
        "overlaps tensor",
    ),
    "data cut short": (gguf_file()[:-200], "takes"),
    "nothing but a header": (gguf_file(data=b""), "the file ends at"),
    "two names that become one": (
        gguf_file(
            (KEYS[0],), (tensor("output.weight", (1,), 0, 0), tensor("lm_head.weight", (1,), 0, 32))
        ),
        "has the same name as 'output.weight'",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_gguf_with_false_sizes(tmp_path: Path, lie: str) -> None:
    content, match = LIES[lie]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=match):
            load_checkpoint(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_every_truncation_of_a_gguf(tmp_path: Path) -> None:
    whole = gguf_file()
    path = tmp_path / "m.gguf"
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        # The last tensor is 2 bytes long; the bytes behind it are unused.
        assert read_or_refuse(path) == (size >= len(whole) - len(DATA) + 386), size


@MANY
@given(content=mutations(gguf_file(), len(gguf_file()) - len(DATA)))
@example(content=b"")
def test_a_damaged_gguf_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    read_or_refuse(path)


@MANY
@given(
    kind=st.sampled_from([2, 3, 6, 7, 8, 12, 13, 14]), data=st.binary(min_size=272, max_size=272)
)
def test_a_gguf_block_of_any_bytes_is_some_weight(tmp_path: Path, kind: int, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file((), (tensor("w", (256,), kind, 0),), data=data))
    assert load_checkpoint(path).entries["w"].problem  # one dimension
    path.write_bytes(gguf_file((), (tensor("w", (256, 1), kind, 0),), data=data))
    values = load_checkpoint(path).entries["w"].values()
    if values.isfinite().all():
        assert reorder(load_checkpoint(path)["w"]).shape == (1, 256)
        assert read_or_refuse(path)
    else:
        with pytest.raises(
            CheckpointError, match=r"'w': (scales|offsets)\[0, \d\] is (nan|-?inf)$"
        ):
            load_checkpoint(path)["w"]


@MANY
@given(content=st.binary(max_size=200))
def test_noise_is_refused(tmp_path: Path, content: bytes) -> None:
    for name in ("m.gguf", "m.safetensors", "m.safetensors.index.json"):
        path = tmp_path / name
        path.write_bytes(b"GGUF\3\0\0\0" + content if name == "m.gguf" else content)
        read_or_refuse(path)


# ---- safetensors


PLAIN = to_safetensors(
    {"a.weight": torch.ones(2, 3), "b": torch.arange(5), "c": torch.ones(3).bfloat16()}
)


def float_entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        raw_safetensors({"x": float_entry(0, 8, [2])}, b"1234"),
        raw_safetensors({"x": float_entry(0, 8, [3])}, b"12345678"),
        raw_safetensors({"x": float_entry(4, 8, [1])}, b"12345678"),
        raw_safetensors({"x": float_entry(0, 4, [1])}, b"12345678"),
        raw_safetensors({"x": float_entry(0, 8, [2]), "y": float_entry(4, 8, [1])}, b"12345678"),
        raw_safetensors({"x": float_entry(8, 0, [2])}, b"12345678"),
        raw_safetensors({"x": float_entry(0, 8, [1 << 63, 1 << 63])}, b"12345678"),
        raw_safetensors({"x": float_entry(0, 8, [-2])}, b"12345678"),
        raw_safetensors({"x": float_entry(0, 8, [2], "F7")}, b"12345678"),
        raw_safetensors({"x": float_entry(0, 8, [2], "F8_E8M0")}, b"12345678"),
        raw_safetensors({"x": float_entry(0, 8, [16], "F4")}, b"12345678"),
        raw_safetensors({"x": 3}, b""),
        raw_safetensors(b"[]", b""),
        raw_safetensors(b"{" + b'"x":{' * 1000, b""),
        raw_safetensors({}, b"", length=(1 << 64) - 1),
        raw_safetensors({}, b"", length=100),
        raw_safetensors(b'{"__metadata__": {"a": 3}}', b""),
    ],
)
def test_a_safetensors_file_with_a_false_header(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_all(path)


@MANY
@given(content=mutations(PLAIN, 8 + header_length(PLAIN)))
def test_a_damaged_safetensors_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    read_or_refuse(path)


# ---- packed files


def changed(content: bytes, change: Callable[[dict[str, Any], bytearray], object]) -> bytes:
    """The file with its header and data changed, and the header's length put right."""
    length = header_length(content)
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    change(header, data)
    return sealed(header, bytes(data))


def sealed(header: dict[str, Any], data: bytes) -> bytes:
    """The packed file with the checksums that its content should have."""
    facts = header.get("__metadata__")
    sums = {}
    for name, value in header.items():
        if name != "__metadata__":
            where = value.get("data_offsets")
            fits = (
                isinstance(where, list)
                and len(where) == 2
                and all(type(offset) is int and offset >= 0 for offset in where)
            )
            sums[name] = hashlib.sha256(data[slice(*where)] if fits else b"").hexdigest()
    if not isinstance(facts, dict):
        return raw_safetensors(header, data)
    facts |= {"checksums": json.dumps(sums), "header_sha256": "0" * 64}
    whole = raw_safetensors(json.dumps(header, separators=(",", ":")).encode(), data)
    head = whole[: len(whole) - len(data)]
    facts["header_sha256"] = hashlib.sha256(head).hexdigest()
    return raw_safetensors(json.dumps(header, separators=(",", ":")).encode(), data)


def metadata(**values: Any) -> Callable[[dict[str, Any], bytearray], None]:
    return lambda header, _: header["__metadata__"].update(values)


def fields(**values: Any) -> Callable[[dict[str, Any], bytearray], None]:
    return metadata(
        weights=json.dumps({"w": {"n": 3, "k": 40, "bits": 4, "group_size": 32, **values}})
    )


def renamed(old: str, new: str) -> Callable[[dict[str, Any], bytearray], None]:
    return lambda header, _: header.update({new: header.pop(old)})


def entry(name: str, **values: Any) -> Callable[[dict[str, Any], bytearray], None]:
    return lambda header, _: header[name].update(values)


def byte(name: str, value: int) -> Callable[[dict[str, Any], bytearray], None]:
    return lambda header, data: data.__setitem__(header[name]["data_offsets"][0], value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            metadata(layout="cutlass_ops.slab128"),
            "layout 'cutlass_ops.slab128'.*known is 'cutlass_ops.slab64', versions 1 to 4",
        ),
        (metadata(layout_version="5"), "version '5'; known is"),
        (lambda header, _: header["__metadata__"].pop("layout_version"), "version None; known is"),
        (lambda header, _: header["__metadata__"].pop("layout"), "not a packed file"),
        (lambda header, _: header.pop("__metadata__"), "not a packed file"),
        (metadata(weights="{"), "'weights' is not JSON"),
        (metadata(weights="[" * 100_000), "'weights' is not JSON"),
        (metadata(weights="[]"), "'weights' is a JSON list"),
        (metadata(weights='{"w": 1, "w": 2}'), "'weights' is not JSON: a name appears twice"),
        (metadata(weights='{"w": 1}'), "tensor 'w': the metadata says 1"),
        (metadata(weights="{}", tied="{}"), None),
        (metadata(tied='{"v": "e"}'), "ties 'v'"),
        (metadata(tied='{"w": 1}'), "'tied' has 1 for 'w'"),
        (metadata(sources="3"), "'sources' is a JSON int"),
        (fields(n=0), "n=0, k=40; both are at least 1"),
        (fields(k=-1), "k=-1; both are at least 1"),
        (fields(n=True), "integers n, k"),
        (fields(n=3.0), "integers n, k"),
        (fields(n="3"), "integers n, k"),
        (fields(n=None), "integers n, k"),
        (fields(n=65), r"tensor 'w\.codes': has shape"),
        (fields(k=129), r"tensor 'w\.codes': has shape"),
        (fields(k=41), r"tensor 'w\.perm': has shape \[40\].*\[41\]"),
        (fields(n=4), r"tensor 'w\.bias': has shape"),
        (fields(n=10**400), r"tensor 'w\.codes': has shape"),
        (fields(bits=8), r"tensor 'w\.codes': has shape"),
        (fields(bits=3), "bits is 3"),
        (fields(group_size=64), r"tensor 'w\.scales': has shape"),
        (fields(group_size=48), "group_size is 48"),
        (fields(group_size=0), "group_size is 0"),
        (renamed("w.codes", "w.code"), r"w\.codes is not in the file"),
        (renamed("w.scales", "x"), r"w\.scales is not in the file"),
        (renamed("w.zeros", "w.offsets"), "tensor 'w': offsets has dtype int8"),
        (entry("w.codes", dtype="I8"), "tensor 'w': codes has dtype int8"),
        (entry("w.scales", dtype="I16"), "tensor 'w': scales has dtype int16"),
        (entry("w.perm", dtype="F32"), "tensor 'w': perm has dtype float32"),
        (entry("w.bias", dtype="I32"), "tensor 'w': bias has dtype int32"),
        (entry("w.scales", shape=[64, 4]), r"tensor 'w\.scales': has shape"),
        (entry("w.codes", shape=[2, 2048]), r"tensor 'w\.codes': has shape"),
        (byte("w.perm", 255), r"tensor 'w\.perm': is not a permutation of 0 \.\. 39"),
        (byte("w.zeros", 8), r"tensor 'w\.zeros': holds values outside of -8"),
    ],
)
def test_a_packed_file_with_false_metadata(
    tmp_path: Path, change: Callable[[dict[str, Any], bytearray], object], match: str | None
) -> None:
    honest = packed_file(tmp_path)
    path = tmp_path / "p.safetensors"
    path.write_bytes(changed(honest, change))
    if match is None:  # nothing claims to be a weight, and all tensors are tensors
        assert "w.codes" in load_packed(path)
        return
    with pytest.raises(CheckpointError, match=match):
        load_packed(path)
    with pytest.raises(CheckpointError, match=match):
        verify_packed(path)


@pytest.mark.parametrize(("bits", "middle"), [(2, 2), (4, 8)])
def test_zero_points_beyond_the_bits_of_codes(tmp_path: Path, bits: int, middle: int) -> None:
    packed = reorder(quantize(torch.randn(64, 128), bits, symmetric=False))
    assert packed.zeros is not None
    for zero in (-middle, middle - 1, -middle - 1, middle):
        packed.zeros[0, 0] = zero
        save_packed(tmp_path / "p.safetensors", {"w": packed})
        if -middle <= zero < middle:
            load_packed(tmp_path / "p.safetensors")
            continue
        outside = rf"outside of -{middle} \.\. {middle - 1}, the zero points of {bits} bits"
        with pytest.raises(CheckpointError, match=outside):
            load_packed(tmp_path / "p.safetensors")


def test_two_kinds_of_zero_point(tmp_path: Path) -> None:
    packed_file(tmp_path)
    path = tmp_path / "p.safetensors"

    def both(header: dict[str, Any], data: bytearray) -> None:
        begin = len(data)
        data += bytes(1024)
        header["w.offsets"] = float_entry(begin, begin + 1024, [4, 64])

    path.write_bytes(changed(path.read_bytes(), both))
    with pytest.raises(CheckpointError, match="both zeros and offsets"):
        load_packed(path)


def test_every_truncation_of_a_packed_header(tmp_path: Path) -> None:
    honest = packed_file(tmp_path)
    path = tmp_path / "t.safetensors"
    for size in (*range(8 + header_length(honest) + 16), len(honest) - 1):
        path.write_bytes(honest[:size])
        with pytest.raises(CheckpointError):
            load_packed(path)


def load_all(path: Path) -> None:
    for value in load_packed(path).values():
        if isinstance(value, PackedWeight):
            assert value.unpack().shape == value.shape
    packed_info(path)
    verify_packed(path)


@pytest.fixture(scope="module")
def honest_packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return packed_file(tmp_path_factory.mktemp("packed"))


@MANY
@given(data=st.data())
def test_a_damaged_packed_file_is_read_or_refused(
    tmp_path: Path, honest_packed: bytes, data: st.DataObject
) -> None:
    path = tmp_path / "p.safetensors"
    path.write_bytes(data.draw(mutations(honest_packed, 8 + header_length(honest_packed))))
    read_or_refuse(path, load_all)


@MANY
@given(
    where=st.sampled_from(
        [
            "n",
            "k",
            "bits",
            "group_size",
            "weights",
            "tied",
            "sources",
            "shape",
            "dtype",
            "data_offsets",
        ]
    ),
    value=st.one_of(
        JSON, st.sampled_from([1, 2, 4, 8, 32, 64, 128, -1, 1 << 31, 1 << 63, 1 << 64])
    ),
)
def test_a_packed_header_with_another_value(
    tmp_path: Path, honest_packed: bytes, where: str, value: object
) -> None:
    path = tmp_path / "p.safetensors"
    if where in ("n", "k", "bits", "group_size"):
        change = fields(**{where: value})
    elif where in ("weights", "tied", "sources"):
        change = metadata(**{where: json.dumps(value)})
    else:
        change = entry("w.scales", **{where: value})
    path.write_bytes(changed(honest_packed, change))
    read_or_refuse(path, load_all)


def test_messages_stay_short(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    path.write_bytes(changed(packed_file(tmp_path), fields(n=list(range(100_000)))))
    with pytest.raises(CheckpointError) as raised:
        load_packed(path)
    assert len(str(raised.value)) < 2000


def test_more_tensors_than_any_model_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a smaller limit: each tensor's header takes tens of microseconds to read."""
    for module, limit in (safetensors_files, "_MAX_TENSORS"), (gguf_header, "_MAX_COUNT"):
        assert getattr(module, limit) == 500_000
        monkeypatch.setattr(module, limit, 500)
    names = [f"layers.{i}.w" for i in range(501)]
    header = json.dumps(
        {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
    ).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    for read in (load_checkpoint, packed_info):
        with pytest.raises(
            CheckpointError, match=r"m\.safetensors: has 501 tensors; at most 500 are read"
        ):
            read(path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "m.safetensors")}))
    with pytest.raises(CheckpointError, match="has 501 tensors; at most 500"):
        load_checkpoint(index)
    empty = tmp_path / "m.gguf"
    empty.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(names), 0) + bytes(32 * len(names)))
    with pytest.raises(CheckpointError, match="has 501 tensors; at most 500"):
        load_checkpoint(empty)
