"""The reader of MNN's per-block weights, on files written by hand.

The meaning of ``aMin`` and ``readType`` was taken from MNN 3.6.1, which read such a file (4 bits;
aMin 1, 0 and -8; readType 1 and 16): its 1 x 1 convolution of the identity's columns gave exactly
the values of ``test_the_rules_of_the_offset``.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cutlass_ops import CheckpointError, load_checkpoint, load_packed, reference
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import verify_packed

RANDOM = torch.Generator().manual_seed(9)


def head(n: int, k: int, values: range | list[int], wide: bool = False) -> bytes:
    return struct.pack("<B2I" if wide else "<B2H", 2, n, k) + struct.pack(
        f"B{len(values)}b", len(values) % 256, *values
    )


def packed(codes: Tensor, bits: int) -> bytes:
    flat = codes.flatten().tolist()
    if bits == 8:
        return bytes(flat)
    flat += [0] * (len(flat) % 2)
    return bytes(a << 4 | b for a, b in zip(flat[::2], flat[1::2], strict=True))


def convolution(
    name: str, n: int, k: int, external: list[int], quan: dict[str, Any] | None, **common: int
) -> dict[str, Any]:
    main = {
        "common": {
            "kernelX": 1,
            "kernelY": 1,
            "group": 1,
            "outputCount": n,
            "inputCount": k,
            **common,
        },
        "external": external,
    }
    return {
        "type": "Convolution",
        "name": name,
        "main": main if quan is None else {**main, "quanParameter": quan},
    }


QUAN = {
    "type": 1,
    "quantScale": 1.0,
    "has_scaleInt": False,
    "shapeInt32": False,
    "aMaxOrBits": 4,
    "aMin": 1,
    "readType": 1,
}


def write(folder: Path, operators: list[dict[str, Any]], blob: bytes, name: str = "llm") -> Path:
    path = folder / f"{name}.mnn.json"
    path.write_text(
        json.dumps({"bizCode": "MNN", "oplists": [{"type": "Input", "main": None}, *operators]})
    )
    (folder / f"{name}.mnn.weight").write_bytes(blob)
    return path


def one(
    folder: Path,
    codes: Tensor,
    alpha: Tensor,
    *,
    bits: int = 4,
    bias: Tensor | None = None,
    values: range | list[int] | None = None,
    wide: bool = False,
    **quan: Any,
) -> Path:
    """A model with one layer, whose data starts at byte 3."""
    n, k = codes.shape
    listed = range(-(1 << bits - 1), 1 << bits - 1) if values is None else values
    weight = head(n, k, listed, wide) + packed(codes, bits)
    parts = [weight, alpha.numpy().tobytes(), b"" if bias is None else bias.numpy().tobytes()]
    external = [3, *map(len, parts), 0]
    operator = convolution(
        "/layers.3/mlp/up_proj/Linear", n, k, external, {**QUAN, "shapeInt32": wide, **quan}
    )
    return write(folder, [operator], b"abc" + b"".join(parts))


NAME = "model.layers.3.mlp.up_proj"


def check(path: Path, values: Tensor, *, exact: bool = True) -> Any:
    checkpoint = load_checkpoint(path)
    assert checkpoint.dialect == "mnn"
    weight = checkpoint[NAME]
    ours = reference.dequantize_weight(weight, torch.float32)
    if exact:
        assert torch.equal(ours, values)
    else:
        torch.testing.assert_close(ours, values, rtol=0, atol=float(values.abs().max()) * 2.0**-22)
    assert torch.equal(checkpoint.entries[NAME].values(), ours)
    quantized = checkpoint.entries[NAME].quantized
    assert quantized is not None
    parts = {"scales": weight.scales, "offsets": weight.offsets, "bias": weight.bias}
    assert quantized.dtypes == {
        part: value.dtype for part, value in parts.items() if value is not None
    }
    assert (quantized.bits, quantized.group_size) == (weight.bits, weight.group_size)
    return weight


def test_bytes_by_hand(tmp_path: Path) -> None:
    # [1, 32], values -8 .. 7
    blob = b"\2" + b"\1\0" + b"\x20\0" + b"\x10" + bytes(range(0xF8, 0x100)) + bytes(range(8))
    blob += bytes([0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]) * 2
    blob += struct.pack("<2f", 10.0, 0.5)  # the offset before the scale
    blob += struct.pack("<f", 3.0)
    operator = convolution("/lm/lm_head/Linear", 1, 32, [0, 38, 8, 4, 0], QUAN)
    checkpoint = load_checkpoint(write(tmp_path, [operator], blob))
    weight = checkpoint["lm_head"]
    assert weight.codes.tolist() == [[*range(16)] * 2]
    assert weight.scales.tolist() == [[0.5]]
    assert weight.offsets is not None
    assert weight.offsets.tolist() == [[10.0]]
    assert weight.bias is not None
    assert weight.bias.tolist() == [3.0]
    assert reference.dequantize_weight(weight, torch.float32).tolist() == [
        [(q - 8) * 0.5 + 10 for q in range(16)] * 2
    ]
    assert checkpoint.metadata == {"bizCode": "MNN"}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("low", [1, 0, -8, -128, 7])
@pytest.mark.parametrize("read_type", [1, 16])
def test_the_rules_of_the_offset(tmp_path: Path, bits: int, low: int, read_type: int) -> None:
    codes = torch.randint(0, 1 << bits, (8, 96), generator=RANDOM, dtype=torch.uint8)
    alpha = torch.randn(8, 3, 2, generator=RANDOM)
    path = one(tmp_path, codes, alpha, bits=bits, aMin=low, readType=read_type, aMaxOrBits=bits)
    clamp = 0 if low > 0 else -128 if low == 0 else low
    scale, offset = alpha[..., 1:], alpha[..., :1] - clamp * alpha[..., 1:]
    values = (codes.float() - (1 << bits - 1)).view(8, 3, 32) * scale + offset
    weight = check(path, values.view(8, 96))
    assert torch.equal(weight.codes, codes)
    assert torch.equal(weight.scales, alpha[..., 1])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "blocks"), [(5, 64, 2), (3, 33, 1), (1, 128, 1), (7, 576, 9)])
def test_symmetric(tmp_path: Path, bits: int, n: int, k: int, blocks: int) -> None:
    codes = torch.randint(0, 1 << bits, (n, k), generator=RANDOM, dtype=torch.uint8)
    scales = torch.randn(n, blocks, generator=RANDOM)  # of either sign, as from GGUF
    path = one(
        tmp_path,
        codes,
        scales,
        bits=bits,
        readType=0,
        aMin=0,
        bias=torch.randn(n, generator=RANDOM),
    )
    values = (codes.float() - (1 << bits - 1)).view(n, blocks, -1) * scales[..., None]
    weight = check(path, values.view(n, k))
    assert weight.symmetric
    assert weight.group_size == (-1 if blocks == 1 else k // blocks)
    checkpoint = load_checkpoint(path)
    reorder_checkpoint(checkpoint, tmp_path / "p.safetensors")
    assert set(load_packed(tmp_path / "p.safetensors")) == {NAME}
    assert verify_packed(tmp_path / "p.safetensors", checkpoint).problems == []


def test_half_scales_and_wide_shapes(tmp_path: Path) -> None:
    codes = torch.randint(0, 16, (2, 128), generator=RANDOM, dtype=torch.uint8)
    alpha = torch.randn(2, 4, 2, generator=RANDOM).half()
    weight = check(
        one(tmp_path, codes, alpha, scaleStorage="FP16", wide=True),
        ((codes.float() - 8).view(2, 4, 32) * alpha[..., 1:].float() + alpha[..., :1].float()).view(
            2, 128
        ),
    )
    assert weight.scales.dtype == weight.offsets.dtype == torch.float16
    # 5 x 65536 inputs need 32 bits each.
    codes = torch.randint(0, 16, (1, 5 << 16), generator=RANDOM, dtype=torch.uint8)
    check(one(tmp_path, codes, torch.ones(1, 1), wide=True, readType=0), codes.float() - 8)


def test_quant_scale(tmp_path: Path) -> None:
    codes = torch.randint(0, 16, (2, 64), generator=RANDOM, dtype=torch.uint8)
    alpha = torch.randn(2, 2, 2, generator=RANDOM)
    values = (codes.float() - 8).view(2, 2, 32) * (alpha[..., 1:] * 0.3) + alpha[..., :1] * 0.3
    check(one(tmp_path, codes, alpha, quantScale=0.3), values.view(2, 64), exact=False)
    values = (codes.float() - 8).view(2, 2, 32) * alpha[..., 1:] + alpha[..., :1]
    check(one(tmp_path, codes, alpha, quantScale=0.3, has_scaleInt=True), values.view(2, 64))


def test_values_that_are_no_range(tmp_path: Path) -> None:
    # As MNN sorts them: index 0 is the smallest.
    values = [7, -8, 0, 3, -1, 1, 2, -2, 5]
    codes = torch.randint(0, 9, (2, 32), generator=RANDOM, dtype=torch.uint8)
    expected = torch.tensor(sorted(values))[codes.int()].float()
    weight = check(one(tmp_path, codes, torch.ones(2, 1), values=values, readType=0), expected)
    assert weight.bits == 4
    values = [-100, -8, 0, 3, -1, 1, 2, -2, 5, 99]
    expected = torch.tensor(sorted(values))[codes.int()].float()
    weight = check(one(tmp_path, codes, torch.ones(2, 1), values=values, readType=0), expected)
    assert weight.bits == 8
    codes[0, 0] = 9  # the last value there is
    check(
        one(tmp_path, codes, torch.ones(2, 1), values=values, readType=0),
        torch.tensor(sorted(values))[codes.int()].float(),
    )
    # -7 .. 7: fifteen values in four bits.
    codes = torch.randint(0, 15, (2, 32), generator=RANDOM, dtype=torch.uint8)
    check(
        one(tmp_path, codes, torch.ones(2, 1), values=range(-7, 8), readType=0), codes.float() - 7
    )


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("values", "bits"),
    [
        ([-100, -8, 0, 3, -1, 1, 2, -2, 5, 99], 4),
        (range(-7, 8), 4),
        (range(-4, 5), 4),
        (range(-127, 128), 8),
        ([*range(-128, 0), 9], 8),
    ],
)
def test_an_index_beyond_the_values_is_refused(
    tmp_path: Path, values: range | list[int], bits: int, index: int
) -> None:
    count = len(values)
    codes = torch.zeros(2, 32, dtype=torch.uint8)
    codes[1, 31] = min(count + index, (1 << bits) - 1)
    path = one(tmp_path, codes, torch.ones(2, 1), bits=bits, values=values, readType=0)
    with pytest.raises(CheckpointError, match=f"holds index {int(codes.max())} of {count} values"):
        load_checkpoint(path)[NAME]
    with pytest.raises(CheckpointError, match=f"holds index {int(codes.max())} of {count} values"):
        load_checkpoint(path).entries[NAME].values()
    codes[1, 31] = count - 1
    check(
        one(tmp_path, codes, torch.ones(2, 1), bits=bits, values=values, readType=0),
        torch.tensor(sorted(values))[codes.int()].float(),
    )


def test_the_other_tensors(tmp_path: Path) -> None:
    gamma, beta, half, full = (
        torch.randn(6),
        torch.randn(6),
        torch.randn(3, 4).half(),
        torch.randn(2, 5),
    )
    bias, other = torch.randn(2), torch.randn(3)
    blob = b"".join(
        value.numpy().tobytes()
        for value in (gamma, beta, half, full, bias, half, other, half, other)
    )
    operators = [
        {"type": "LayerNorm", "name": "norm", "main": {"external": [0, 24, 24]}},
        {"type": "LayerNorm", "name": "inside", "main": {"gamma": [1.0]}},
        convolution("fp16", 3, 4, [48, 24, 0, 0, 0], {"type": 3}),
        convolution("fp32", 2, 5, [72, 40, 8], None),
        # The bias is behind an alpha, which is empty, or without one in its place.
        convolution("biased", 3, 4, [120, 24, 0, 12, 0], {"type": 3}),
        convolution("without", 3, 4, [156, 24, 12], {"type": 3}),
    ]
    plain = dict(load_checkpoint(write(tmp_path, operators, blob)).plain())
    expected = {
        "norm.gamma": gamma,
        "norm.beta": beta,
        "fp16.weight": half,
        "fp32.weight": full,
        "fp32.bias": bias,
    }
    expected |= {
        "biased.weight": half,
        "biased.bias": other,
        "without.weight": half,
        "without.bias": other,
    }
    assert plain.keys() == expected.keys()
    assert all(
        torch.equal(plain[name], value) and plain[name].dtype == value.dtype
        for name, value in expected.items()
    )


def test_experts_are_in_subgraphs(tmp_path: Path) -> None:
    operator = convolution("/expert/0_1/gate", 1, 8, [0, 32, 0], None)
    path = write(tmp_path, [], bytes(32))
    path.write_text(json.dumps({"oplists": [], "subgraphs": [{"nodes": [operator]}]}))
    assert list(load_checkpoint(path).entries) == ["/expert/0_1/gate.weight"]


def test_every_name_of_the_model_opens_it(tmp_path: Path) -> None:
    path = one(tmp_path, torch.zeros(1, 32, dtype=torch.uint8), torch.ones(1, 1, 2))
    (tmp_path / "llm.mnn").write_bytes(b"flat")
    for name in ("llm.mnn", "llm.mnn.weight", "llm.mnn.json", ""):
        assert list(load_checkpoint(tmp_path / name)) == [NAME]
    path.unlink()
    with pytest.raises(CheckpointError, match=r"llm\.mnn\.json: no such file; MNNConvert"):
        load_checkpoint(tmp_path / "llm.mnn")


@pytest.mark.parametrize(
    ("operator", "match"),
    [
        (convolution("c", 1, 32, [0, 38, 8, 0], QUAN, kernelX=3), "is a convolution"),
        (convolution("c", 1, 32, [0, 38, 8, 0], QUAN, group=32), "is a convolution"),
        (convolution("c", 1, 32, [0, 38, 8, 0], {**QUAN, "type": 4}), "quanParameter of type 4"),
        (convolution("c", 1, 32, [0, 38, 32, 0], QUAN), "group_size is 8"),
    ],
)
def test_tensors_that_cannot_be_packed_are_refused(
    tmp_path: Path, operator: dict[str, Any], match: str
) -> None:
    blob = head(1, 32, range(-8, 8)) + bytes(16) + struct.pack("<8f", *(0, 1) * 4)
    with pytest.raises(CheckpointError, match=f"'c': .*{match}"):
        load_checkpoint(write(tmp_path, [operator], blob))["c"]


def lie(
    external: list[int] | None = None, common: dict[str, Any] | None = None, **quan: Any
) -> dict[str, Any]:
    operator = convolution(
        "c", 1, 32, [0, 38, 8, 4] if external is None else external, {**QUAN, **quan}
    )
    operator["main"]["common"].update(common or {})
    return operator


@pytest.mark.parametrize(
    ("operator", "match"),
    [
        (lie([0, 38, 8]), "a position and three sizes"),
        (lie([0, 38]), "a position and two sizes or more"),
        (lie([0, 38, 8, -4]), "within 62 bytes"),
        (lie([0, 38, 8, 4.0]), "within 62 bytes"),
        (lie([20, 38, 8, 4]), "within 62 bytes"),
        (lie([0, 38, 1 << 70, 4]), "within 62 bytes"),
        (lie([0, 37, 8, 4]), r"takes 37 bytes; \[1, 32\] of 4 bits take 38"),
        (lie([0, 3, 8, 4]), "has 2 dimensions in 3 bytes"),
        (lie([0, 0, 8, 4]), "has 0 dimensions in 0 bytes"),
        (lie([1, 38, 8, 4]), "its weight says|dimensions"),
        (lie([0, 38, 12, 4]), "has 12 bytes of alpha"),
        (lie([0, 38, 24, 0]), "has 24 bytes of alpha"),
        (lie([0, 38, 8, 8]), "has 8 bytes of bias; 1 floats take 4"),
        (lie(common={"outputCount": 2}), r"its weight says \[1, 32\], its layer \[2, 32\]"),
        (lie(common={"outputCount": 0}), "has 0 outputs"),
        (lie(common={"outputCount": "1"}), "outputCount is '1'"),
        (lie(common={"inputCount": 1 << 40}), "inputCount is"),
        (lie(shapeInt32=True), "its weight says|dimensions"),
        (lie(quantScale=0.0), "quantScale is 0.0"),
        (lie(quantScale=10**400), "quantScale is 1000"),
        (lie(quantScale="1"), "quantScale is '1'"),
        (lie(scaleStorage="BF16"), "scaleStorage is 'BF16'"),
        (lie(aMin=1.5), r"aMin is 1\.5"),
        (lie(readType=None), "readType is None"),
        (lie(type="INT8"), "type is 'INT8'"),
        ({**lie(), "name": None}, "has the name None"),
        ({"type": "LayerNorm", "name": "c", "main": {"external": [0, 5, 0]}}, "has 5 bytes"),
    ],
)
def test_json_that_contradicts_the_data(
    tmp_path: Path, operator: dict[str, Any], match: str
) -> None:
    blob = head(1, 32, range(-8, 8)) + bytes(16) + struct.pack("<2f", 0, 1) + bytes(4) + bytes(12)
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(write(tmp_path, [operator], blob))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"oplists": 3}',
        '{"oplists": [3]}',
        '{"oplists": [], "subgraphs": [{}]}',
        "[" * 9999,
    ],
)
def test_json_that_is_no_model(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, [], b"")
    path.write_text(text)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)


def test_two_layers_of_one_name(tmp_path: Path) -> None:
    operator = convolution("fp32", 1, 1, [0, 4, 0], None)
    with pytest.raises(CheckpointError, match=r"'fp32\.weight': appears twice"):
        load_checkpoint(write(tmp_path, [operator, operator], bytes(4)))


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    path = one(tmp_path, torch.zeros(1, 32, dtype=torch.uint8), torch.ones(1, 1, 2))
    checkpoint = load_checkpoint(path)
    (tmp_path / "llm.mnn.weight").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="the file changed while it was read"):
        checkpoint[NAME]
    (tmp_path / "llm.mnn.weight").unlink()
    with pytest.raises(CheckpointError, match=r"'/layers.3/mlp/up_proj/Linear': No such file"):
        checkpoint[NAME]
