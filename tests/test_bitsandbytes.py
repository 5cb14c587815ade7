"""The reader of bitsandbytes, against the package's own files and dequantisers, and against bytes
written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from safetensors.torch import save_file
from torch import Tensor

from cutlass_ops import CheckpointError, load_checkpoint, load_packed, reference
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import verify_packed
from cutlass_ops.weights import formats

RANDOM = torch.Generator().manual_seed(5)


@pytest.fixture(scope="module")
def bnb() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # it compiles plain torch at every new shape
        return import_or_skip("bitsandbytes")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RANDOM)


def json_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [2, 64]}
# Codes 0 .. 15 in turn, eight times, in two rows of 64: one block a row.
BY_HAND = {
    "m.weight": torch.tensor(
        [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF] * 8, dtype=torch.uint8
    ).view(-1, 1),
    "m.weight.absmax": torch.tensor([0.5, -2.0]),
    "m.weight.quant_map": torch.tensor(formats.NF4),
    "m.weight.quant_state.bitsandbytes__nf4": json_tensor(STATE),
}
NESTED = {
    "m.weight.absmax": torch.tensor([3, 200], dtype=torch.uint8),
    "m.weight.nested_absmax": torch.tensor([4.0]),
    "m.weight.nested_quant_map": torch.arange(256) / 256,
    "m.weight.quant_state.bitsandbytes__nf4": json_tensor(
        {**STATE, "nested_blocksize": 256, "nested_offset": 0.25}
    ),
}
INT8 = {
    "m.weight": torch.tensor([[-127, 0, 1], [127, -128, 64]], dtype=torch.int8),
    "m.SCB": torch.tensor([127.0, 254.0]),
    "m.weight_format": torch.tensor(0, dtype=torch.uint8),
}


def write(folder: Path, tensors: dict[str, Tensor | None]) -> Path:
    save_file(
        {name: value for name, value in tensors.items() if value is not None},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "bitsandbytes"}})
    )
    return folder


# ---- by hand


def test_codes_and_blocks_by_hand(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write(tmp_path, BY_HAND))
    weight = checkpoint["m"]
    assert weight.codes.tolist() == [[*range(16)] * 4] * 2
    assert weight.scales.tolist() == [[0.5], [-2.0]]
    book = torch.tensor(formats.NF4)
    assert weight.book is not None
    assert torch.equal(weight.book, book)
    values = torch.stack([book.repeat(4) * 0.5, book.repeat(4) * -2.0])
    assert torch.equal(reference.dequantize_weight(weight, torch.float32), values)
    assert torch.equal(checkpoint.entries["m"].values(), values)
    assert not checkpoint.others


def test_values_of_more_codes_than_are_read_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ten blocks of 32 and codes of five blocks at a time, with a nibble and a short
    # block at the end
    shape = (3, 97)
    random = torch.Generator().manual_seed(0)
    state = {
        "m.weight": torch.randint(0, 256, (146,), generator=random).to(torch.uint8),
        "m.weight.absmax": torch.arange(10) + 1.0,
        "m.weight.quant_state.bitsandbytes__nf4": json_tensor(
            {**STATE, "blocksize": 32, "shape": shape}
        ),
    }
    codes = torch.stack([state["m.weight"] >> 4, state["m.weight"] & 15], 1).flatten()[:291].int()
    expected = (
        torch.tensor(formats.NF4)[codes] * state["m.weight.absmax"].repeat_interleave(32)[:291]
    )
    entry = load_checkpoint(write(tmp_path, {**BY_HAND, **state})).entries["m"]
    for count in (1 << 20, 160, 32):
        monkeypatch.setattr("cutlass_ops.checkpoints.bitsandbytes._CODES_AT_A_TIME", count)
        assert torch.equal(entry.values(), expected.view(shape))


def test_nested_absmax_by_hand(tmp_path: Path) -> None:
    weight = load_checkpoint(write(tmp_path, {**BY_HAND, **NESTED}))["m"]
    assert weight.scales.tolist() == [[3 / 256 * 4 + 0.25], [200 / 256 * 4 + 0.25]]


def test_a_short_last_block_of_nested_absmax(tmp_path: Path) -> None:
    nested = {
        **NESTED,
        "m.weight": torch.zeros(96, dtype=torch.uint8),
        "m.weight.absmax": torch.tensor([64, 128, 192], dtype=torch.uint8),
        "m.weight.nested_absmax": torch.tensor([4.0, 8.0]),
        "m.weight.quant_state.bitsandbytes__nf4": json_tensor(
            {**STATE, "shape": [3, 64], "nested_blocksize": 2, "nested_offset": -0.5}
        ),
    }
    weight = load_checkpoint(write(tmp_path, {**BY_HAND, **nested}))["m"]
    assert weight.scales.tolist() == [[0.25 * 4 - 0.5], [0.5 * 4 - 0.5], [0.75 * 8 - 0.5]]


def test_the_code_book_is_that_of_the_file(tmp_path: Path) -> None:
    book = torch.arange(16) / 8 - 1
    weight = load_checkpoint(write(tmp_path, {**BY_HAND, "m.weight.quant_map": book}))["m"]
    assert torch.equal(reference.dequantize_weight(weight, torch.float32)[0, :16], book * 0.5)


def test_blocks_that_straddle_rows(tmp_path: Path) -> None:
    # Three rows of 32 in blocks of 64: the second block has half of the second row's neighbour.
    state = {**STATE, "shape": [4, 32]}
    weight = load_checkpoint(
        write(tmp_path, {**BY_HAND, "m.weight.quant_state.bitsandbytes__nf4": json_tensor(state)})
    )["m"]
    assert weight.group_size == -1
    assert weight.scales.tolist() == [[0.5], [0.5], [-2.0], [-2.0]]
    state = {**STATE, "shape": [8, 16]}
    assert (
        load_checkpoint(
            write(
                tmp_path, {**BY_HAND, "m.weight.quant_state.bitsandbytes__nf4": json_tensor(state)}
            )
        )["m"]
        .scales.flatten()
        .tolist()
        == [0.5] * 4 + [-2.0] * 4
    )


def test_int8_by_hand(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write(tmp_path, {**INT8, "m.bias": torch.ones(2)}))
    weight = checkpoint["m"]
    assert weight.bits == 8
    assert weight.group_size == -1
    assert weight.codes.tolist() == [[1, 128, 129], [255, 0, 192]]
    assert weight.scales.tolist() == [[1.0], [2.0]]
    assert weight.bias is not None
    assert reference.dequantize_weight(weight, torch.float32).tolist() == [
        [-127, 0, 1],
        [254, -256, 128],
    ]
    assert checkpoint.entries["m"].nbytes == 6 + 8 + 1 + 8
    assert not checkpoint.others


# ---- files of the package

SHAPES = [
    (48, 256, 64),
    (8, 192, 64),
    (3, 160, 64),
    (5, 33, 1024),
    (1, 77, 64),
    (64, 32, 4096),
    (7, 96, 32),
    (12, 2048, 512),
]


def quantised(
    bnb: Any,
    n: int,
    k: int,
    blocksize: int,
    kind: str,
    nested: bool,
    storage: torch.dtype = torch.uint8,
) -> Any:
    return bnb.functional.quantize_4bit(
        randn(n, k),
        blocksize=blocksize,
        compress_statistics=nested,
        quant_type=kind,
        quant_storage=storage,
    )


def dequantised(bnb: Any, packed: Tensor, state: Any) -> Tensor:
    """By the package, as one row: its CPU kernel of 0.50 starts a new block in every row."""
    shape, state.shape = state.shape, torch.Size((1, state.shape.numel()))
    values: Tensor = bnb.functional.dequantize_4bit(packed, state).view(shape)
    state.shape = shape
    return values


def tensors_of(packed: Tensor, state: Any, module: str = "m") -> dict[str, Tensor | None]:
    parts = {f"{module}.weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    return {f"{module}.weight": packed, **parts}


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("n", "k", "blocksize"), SHAPES)
def test_four_bits(
    tmp_path: Path, bnb: Any, kind: str, nested: bool, n: int, k: int, blocksize: int
) -> None:
    packed, state = quantised(bnb, n, k, blocksize, kind, nested)
    theirs = dequantised(bnb, packed, state)
    checkpoint = load_checkpoint(
        write(tmp_path, {**tensors_of(packed, state), "m.bias": torch.ones(n)})
    )
    assert checkpoint.dialect == "bitsandbytes"
    assert checkpoint.entries["m"].kind == kind.upper() + (", nested" if nested else "")
    assert torch.equal(checkpoint.entries["m"].values(), theirs)
    if n > 1 and blocksize % k and k % 16:  # pieces of rows that no group has
        with pytest.raises(CheckpointError, match="blocks straddle rows"):
            checkpoint["m"]
        return
    weight = checkpoint["m"]
    assert torch.equal(reference.dequantize_weight(weight, torch.float32), theirs)
    reorder_checkpoint(checkpoint, tmp_path / "p.safetensors")
    assert set(load_packed(tmp_path / "p.safetensors")) == {"m"}
    assert verify_packed(tmp_path / "p.safetensors", checkpoint).problems == []


def test_an_odd_number_of_elements(tmp_path: Path, bnb: Any) -> None:
    packed, state = quantised(bnb, 1, 77, 64, "nf4", False)
    assert packed.numel() == 39
    weight = load_checkpoint(write(tmp_path, tensors_of(packed, state)))["m"]
    assert weight.shape == (1, 77)
    assert weight.group_size == 64
    packed, state = quantised(bnb, 5, 33, 1024, "nf4", False)  # one block for all: 165 elements
    assert load_checkpoint(write(tmp_path, tensors_of(packed, state))).entries[
        "m"
    ].values().shape == (5, 33)


def test_one_absmax_in_rows_of_any_length(tmp_path: Path) -> None:
    state = {**STATE, "shape": [3, 1], "blocksize": 64}
    tensors = {
        "m.weight": torch.tensor([[0x0F], [0x70]], dtype=torch.uint8),
        "m.weight.absmax": torch.tensor([3.0]),
        "m.weight.quant_map": torch.tensor(formats.NF4),
        "m.weight.quant_state.bitsandbytes__nf4": json_tensor(state),
    }
    checkpoint = load_checkpoint(write(tmp_path, tensors))
    assert reference.dequantize_weight(checkpoint["m"], torch.float32).tolist() == [
        [-3.0],
        [3.0],
        [0.0],
    ]


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
def test_bytes_that_are_stored_as_another_type(
    tmp_path: Path, bnb: Any, storage: torch.dtype
) -> None:
    packed, state = quantised(bnb, 16, 128, 64, "nf4", True, storage)
    assert packed.dtype == storage
    theirs = bnb.functional.dequantize_4bit(packed, state)
    weight = load_checkpoint(write(tmp_path, tensors_of(packed, state)))["m"]
    assert torch.equal(reference.dequantize_weight(weight, torch.float32), theirs)


def test_the_older_shape(tmp_path: Path, bnb: Any) -> None:
    packed, state = quantised(bnb, 16, 128, 64, "fp4", False)
    weight = load_checkpoint(write(tmp_path, tensors_of(packed.view(1, -1), state)))["m"]
    theirs = bnb.functional.dequantize_4bit(packed, state)
    assert torch.equal(reference.dequantize_weight(weight, torch.float32), theirs)


def test_a_module_of_the_package(tmp_path: Path, bnb: Any) -> None:
    linear = bnb.nn.Linear4bit(128, 24, quant_type="nf4", compute_dtype=torch.float32)
    linear.load_state_dict({"weight": randn(24, 128), "bias": randn(24)})
    linear.to("cpu")
    tensors = {f"a.b.{name}": value for name, value in linear.state_dict().items()}
    checkpoint = load_checkpoint(write(tmp_path, tensors))
    assert list(checkpoint) == ["a.b"]
    assert not checkpoint.others
    theirs = bnb.functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)
    assert torch.equal(reference.dequantize_weight(checkpoint["a.b"], torch.float32), theirs)
    assert torch.equal(checkpoint["a.b"].bias, linear.bias)


def test_int8_of_the_package(tmp_path: Path, bnb: Any) -> None:
    linear = bnb.nn.Linear8bitLt(96, 40, has_fp16_weights=False)
    linear.load_state_dict({"weight": randn(40, 96).half(), "bias": randn(40).half()})
    linear.to("cpu")
    state = linear.state_dict()
    if state["weight"].dtype != torch.int8:
        pytest.skip("this version of bitsandbytes does not quantise to int8 on the CPU")
    checkpoint = load_checkpoint(
        write(tmp_path, {f"m.{name}": value for name, value in state.items()})
    )
    theirs = bnb.functional.int8_vectorwise_dequant(state["weight"], state["SCB"])
    assert torch.equal(checkpoint.entries["m"].values(), theirs)
    ours = reference.dequantize_weight(checkpoint["m"], torch.float32)
    # SCB / 127 and the product, against SCB's product and that with a rounded 1/127.
    assert bool(((ours - theirs).abs() <= theirs.abs() * 2.0**-22).all())


# ---- refusals


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"m.weight.quant_state.bitsandbytes__nf4": None},
            r"'m\.weight': has 0 tensors quant_state",
        ),
        (
            {"m.weight.quant_state.bitsandbytes__fp4": json_tensor(STATE)},
            r"'m\.weight': has 2 tensors quant_state",
        ),
        ({"m.weight": None}, r"'m\.weight': is missing"),
        ({"m.weight.absmax": None}, r"'m\.weight\.absmax': is missing"),
        ({"m.weight.absmax": torch.ones(3)}, r"'m\.weight\.absmax': is F32 \[3\]; .* 2 of them"),
        ({"m.weight.absmax": torch.ones(2).int()}, r"'m\.weight\.absmax': is I32"),
        ({"m.weight.quant_map": torch.ones(17)}, r"'m\.weight\.quant_map': is F32 \[17\]"),
        (
            {"m.weight": torch.zeros(65, dtype=torch.uint8)},
            r"'m\.weight': has 65 bytes; \[2, 64\] codes of 4 bits take 64",
        ),
        ({**NESTED, "m.weight.nested_absmax": None}, r"nested_absmax': is missing"),
        (
            {**NESTED, "m.weight.nested_absmax": torch.ones(2)},
            r"nested_absmax': is F32 \[2\]; .* 1 of them",
        ),
        (
            {**NESTED, "m.weight.nested_quant_map": torch.ones(16)},
            r"nested_quant_map': is F32 \[16\]",
        ),
        ({"m.weight.absmax": NESTED["m.weight.absmax"]}, "nested_blocksize is None"),
    ],
)
def test_a_state_that_contradicts_itself(
    tmp_path: Path, change: dict[str, Tensor | None], match: str
) -> None:
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(write(tmp_path, {**BY_HAND, **change}))


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({**STATE, "shape": [2, 65]}, "take 65"),
        ({**STATE, "shape": [1 << 39, 1 << 39]}, "has 64 bytes"),
        ({**STATE, "shape": [2, -64]}, r"shape is \[2, -64\]"),
        ({**STATE, "shape": [2, 64.0]}, r"shape is \[2, 64.0\]"),
        ({**STATE, "shape": None}, "shape is None"),
        ({**STATE, "blocksize": 48}, "blocksize is 48; accepted: 32, 64"),
        ({**STATE, "blocksize": True}, "blocksize is True"),
        ([], "is a JSON list"),
    ],
)
def test_json_with_false_sizes(tmp_path: Path, state: Any, match: str) -> None:
    with pytest.raises(
        CheckpointError, match=rf"bitsandbytes__nf4': .*{match}|'m.weight': .*{match}"
    ):
        load_checkpoint(
            write(
                tmp_path, {**BY_HAND, "m.weight.quant_state.bitsandbytes__nf4": json_tensor(state)}
            )
        )


@pytest.mark.parametrize(
    ("nested", "match"),
    [
        ({"nested_blocksize": 256}, "nested_offset is None"),
        ({"nested_blocksize": 0, "nested_offset": 0.5}, "nested_blocksize is 0"),
        ({"nested_blocksize": 256, "nested_offset": 10**400}, "nested_offset is 1000"),
        ({"nested_blocksize": 256, "nested_offset": "1"}, "nested_offset is '1'"),
    ],
)
def test_nested_json_with_false_sizes(tmp_path: Path, nested: dict[str, Any], match: str) -> None:
    state = json_tensor({**STATE, **nested})
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(
            write(tmp_path, {**BY_HAND, **NESTED, "m.weight.quant_state.bitsandbytes__nf4": state})
        )


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_state_that_is_no_json(tmp_path: Path, content: bytes) -> None:
    state = torch.tensor(list(content), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="not JSON"):
        load_checkpoint(
            write(tmp_path, {**BY_HAND, "m.weight.quant_state.bitsandbytes__nf4": state})
        )


def test_files_without_a_config(tmp_path: Path) -> None:
    write(
        tmp_path, {**BY_HAND, **{name.replace("m.", "i."): value for name, value in INT8.items()}}
    )
    (tmp_path / "config.json").unlink()
    checkpoint = load_checkpoint(tmp_path)
    assert sorted(checkpoint) == ["i", "m"]
    assert not checkpoint.others


def test_a_weight_of_three_dimensions(tmp_path: Path) -> None:
    state = json_tensor({**STATE, "shape": [2, 2, 32]})
    checkpoint = load_checkpoint(
        write(tmp_path, {**BY_HAND, "m.weight.quant_state.bitsandbytes__nf4": state})
    )
    with pytest.raises(CheckpointError, match=r"has shape \[2, 2, 32\]"):
        checkpoint["m"]
    assert checkpoint.entries["m"].values().shape == (2, 2, 32)


def test_int8_in_another_order(tmp_path: Path) -> None:
    turing = {**INT8, "m.weight_format": torch.tensor(2, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match="weight_format 2, an order of older GPUs"):
        load_checkpoint(write(tmp_path, turing))["m"]
    with pytest.raises(CheckpointError, match=r"'m\.weight': is missing"):
        load_checkpoint(write(tmp_path, {**INT8, "m.weight": None}))
    with pytest.raises(CheckpointError, match=r"'m\.SCB': is F32 \[3\]"):
        load_checkpoint(write(tmp_path, {**INT8, "m.SCB": torch.ones(3)}))
