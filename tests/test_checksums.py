"""Damage that shows without the checkpoint: checksums, values that are not finite, and files that
transformers saved.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from cli_runs import run, run_json
from hostile_cases import gguf_file, header_length, packed_file, tensor
from model_directories import OPTIONS, float_tensors, save_model
from safetensors.torch import load_file, save_file

from cutlass_ops import (
    CheckpointError,
    PackedWeight,
    QuantizedWeight,
    load_checkpoint,
    load_packed,
    quantize,
    reorder,
    save_packed,
)
from cutlass_ops.checkpoints.safetensors_files import is_written, stream_safetensors
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.packed_config import quantization_config, weight_format
from cutlass_ops.files.packed_file import is_packed, packed_info, weights_metadata
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import diff_packed, verify_packed


def is_sound(path: Path) -> bool:
    try:
        return verify_packed(path).problems == []
    except CheckpointError:
        return False


def as_version_1(path: Path) -> None:
    """Rewrite a packed file as older versions of the package wrote it."""
    content = path.read_bytes()
    length = header_length(content)
    facts = json.loads(content[8 : 8 + length])["__metadata__"]
    del facts["checksums"], facts["header_sha256"]
    save_file(load_file(path), path, facts | {"layout_version": "1"})


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    whole = packed_file(tmp_path)
    path = tmp_path / "p.safetensors"
    assert verify_packed(path).problems == []
    assert verify_packed(path).notes == []
    begin = 8 + header_length(whole)
    places = [(byte, byte * 5 % 8) for byte in range(0, begin, 2)] + [
        (byte, bit) for bit in range(8) for byte in range(begin, len(whole), 331)
    ]
    for byte, bit in places:
        damaged = bytearray(whole)
        damaged[byte] ^= 1 << bit
        path.write_bytes(damaged)
        assert not is_sound(path), (byte, bit)


def test_verifys_message_for_a_flipped_bit(tmp_path: Path) -> None:
    whole = bytearray(packed_file(tmp_path))
    path = tmp_path / "p.safetensors"
    damaged = bytearray(whole)
    damaged[8 + header_length(whole)] ^= 1
    path.write_bytes(damaged)
    assert verify_packed(path).problems == ["w: codes does not have its checksum"]
    failed = run("verify", path)
    assert failed.exit_code == 1
    assert "w: codes does not have its checksum" in failed.stdout
    damaged = whole.replace(b"cutlass_ops 0.", b"cutlass_ops 1.")
    assert damaged != whole
    path.write_bytes(damaged)
    assert verify_packed(path).problems == ["p.safetensors: the header does not have its checksum"]


def test_a_checksum_for_every_tensor(tmp_path: Path) -> None:
    whole = packed_file(tmp_path)
    path = tmp_path / "p.safetensors"
    facts = json.loads(whole[8 : 8 + header_length(whole)])["__metadata__"]
    sums = json.loads(facts["checksums"])
    assert sums.keys() == load_file(path).keys()
    for changed, problem in (
        (
            {name: value for name, value in sums.items() if name != "norm"},
            "norm: the tensor does not have its checksum",
        ),
        ({**sums, "more": "0"}, "more: has a checksum, and is not there"),
    ):
        save_file(load_file(path), path, facts | {"checksums": json.dumps(changed)})
        assert problem in verify_packed(path).problems
    save_file(load_file(path), path, facts | {"checksums": "[]"})
    with pytest.raises(CheckpointError, match="'checksums' is a JSON list"):
        load_packed(path)


def test_version_1_is_read_and_has_no_checksums(tmp_path: Path) -> None:
    packed_file(tmp_path)
    path = tmp_path / "p.safetensors"
    new = load_packed(path)["w"]
    as_version_1(path)
    old = load_packed(path)["w"]
    assert isinstance(new, PackedWeight)
    assert isinstance(old, PackedWeight)
    assert all(torch.equal(value, old.tensors()[part]) for part, value in new.tensors().items())
    found = verify_packed(path)
    assert found.problems == []
    assert found.notes == [f"{path}: has layout version 1, which has no checksums"]
    shown = run("verify", path)
    assert shown.exit_code == 0
    assert "has layout version 1, which has no checksums" in shown.stdout


@pytest.mark.parametrize("old", [0, -1])
def test_one_shard_of_version_1_leaves_the_directory_without_checksums(
    tmp_path: Path, old: int
) -> None:
    checkpoint = load_checkpoint(save_model(tmp_path / "source", float_tensors(1)))
    path = tmp_path / "packed"
    done = reorder_model(checkpoint, path, OPTIONS, shard_bytes=60_000)
    assert len(done.files) == 2
    assert packed_info(path).checksums is not None
    before = load_packed(path)
    as_version_1(done.files[old])
    info = packed_info(path)
    assert (info.layout[1], info.checksums) == ("1", None)
    found = verify_packed(path, checkpoint)
    assert found.problems == []
    assert found.notes == [f"{path}: has layout version 1, which has no checksums"]
    for name, value in load_packed(path).items():
        same = before[name]
        if isinstance(value, PackedWeight) and isinstance(same, PackedWeight):
            assert torch.equal(value.codes, same.codes)
        else:
            assert torch.equal(value, same)


def test_the_header_is_written_last_and_recognised_again(tmp_path: Path) -> None:
    specs = {"x": (torch.float32, (4,)), "y": (torch.int8, (3,))}
    path = tmp_path / "w.safetensors"
    with stream_safetensors(path, specs, {"a": "b"}) as write:
        write("y", torch.ones(3, dtype=torch.int8))
        (partial,) = tmp_path.iterdir()
        assert partial.read_bytes()[:8] == bytes(8)
        write("x", torch.zeros(4))
    assert is_written(path, specs, {"a": "b"})
    assert not is_written(path, specs, {"a": "c"})
    assert not is_written(path, {"x": specs["x"]}, {"a": "b"})
    whole = path.read_bytes()
    for damaged in (
        whole[:-1],
        whole.replace(b"header_sha256", b"header_sha255"),
        whole.replace(b"checksums", b"checksumz"),
    ):
        path.write_bytes(damaged)
        assert not is_written(path, specs, {"a": "b"})
    assert not is_written(tmp_path / "nothing", specs, {})


def test_every_version_in_a_config() -> None:
    packed = reorder(quantize(torch.randn(64, 128)))
    config = quantization_config({"a": weight_format_of(packed)})
    assert config["layout_version"] == 2
    for version in (1, 2, 3, 4):
        assert weight_format({**config, "layout_version": version}, "a") == weight_format_of(packed)
    for wrong in (0, 5, True, 2.0, None, [1], {}):
        with pytest.raises(ValueError, match=r"known is 'cutlass_ops\.slab64', versions 1 to 4"):
            weight_format({**config, "layout_version": wrong}, "a")


def weight_format_of(packed: PackedWeight):
    from cutlass_ops.files.packed_config import WeightFormat

    dtypes = sorted(
        (part, value.dtype) for part, value in packed.tensors().items() if part != "codes"
    )
    return WeightFormat(packed.bits, packed.group_size, tuple(dtypes))


# ---- values that are not finite


@pytest.mark.parametrize("part", ["scales", "offsets", "book"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_reorder_refuses_what_is_not_finite(part: str, value: float) -> None:
    parts = {"scales": torch.ones(6, 2)}
    if part != "scales":
        parts[part] = torch.ones(6, 2) if part == "offsets" else torch.ones(16)
    place = (4, 1) if part != "book" else (9,)
    parts[part][place] = value
    weight = QuantizedWeight(torch.zeros(6, 64, dtype=torch.uint8), **parts, group_size=32)
    with pytest.raises(ValueError, match=rf"{part}\[{', '.join(map(str, place))}\] is {value}"):
        reorder(weight)


def test_an_infinite_bias_is_kept(tmp_path: Path) -> None:
    bias = torch.tensor([0.0, -math.inf])
    packed = reorder(
        QuantizedWeight(
            torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, 1), group_size=32, bias=bias
        )
    )
    save_packed(tmp_path / "p.safetensors", {"w": packed})
    assert verify_packed(tmp_path / "p.safetensors").problems == []


def test_a_file_whose_scale_is_not_finite(tmp_path: Path) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "p.safetensors"
    block = bytes.fromhex("007c") + bytes(16)  # Q4_0 with an infinite scale
    path.write_bytes(gguf_file((), (tensor("w", (32, 2), 2, 0),), data=bytes(18) + block))
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'w': scales\[1, 0\] is inf"):
        reorder_checkpoint(load_checkpoint(path), out)
    assert not out.exists()


def test_verify_reports_what_is_not_finite(tmp_path: Path) -> None:
    packed_file(tmp_path)
    path = tmp_path / "p.safetensors"
    as_version_1(path)
    tensors, whole = load_file(path), path.read_bytes()
    facts = json.loads(whole[8 : 8 + header_length(whole)])["__metadata__"]
    tensors["w.scales"][1, 16] = math.nan  # position 16 of a row panel holds row 2
    save_file(tensors, path, facts)
    assert isinstance(load_packed(path)["w"], PackedWeight)  # values are not read
    assert verify_packed(path).problems == ["w: scales[2, 1] is nan"]


# ---- what save_pretrained of transformers writes: shards without our metadata, parts of a
# weight in two of them


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """A directory that reorder made, and the same model as transformers would save it."""
    packed, target = tmp_path / "packed", tmp_path / "saved"
    reorder_model(
        load_checkpoint(save_model(tmp_path / "source", float_tensors(1))), packed, OPTIONS
    )
    target.mkdir()
    tensors = load_file(packed / "model.safetensors")
    metadata = {"format": "pt", "weights": weights_metadata(packed_info(packed).weights)}
    names = sorted(tensors)
    shards = {f"model-0000{i}-of-00003.safetensors": names[i - 1 :: 3] for i in (1, 2, 3)}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, target / file, metadata)
    placed = {name: file for file, held in shards.items() for name in held}
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": placed})
    )
    (target / "config.json").write_bytes((packed / "config.json").read_bytes())
    return packed, target


Q = "model.layers.0.self_attn.q_proj"


def test_a_saved_directory_is_recognised(saved: tuple[Path, Path]) -> None:
    packed, target = saved
    assert is_packed(target)
    found = verify_packed(target)
    assert found.problems == []
    assert found.notes == [f"{target}: was written by save_pretrained, which keeps no checksums"]
    assert diff_packed(packed, target).changed == {}
    assert diff_packed(packed, target).same == len(packed_info(packed).names)
    assert packed_info(target).weights == packed_info(packed).weights
    weight, same = load_packed(target)[Q], load_packed(packed)[Q]
    assert isinstance(weight, PackedWeight)
    assert isinstance(same, PackedWeight)
    assert torch.equal(weight.unpack().codes, same.unpack().codes)
    described = run_json("inspect", target)
    assert described["kind"] == "packed"
    assert next(t for t in described["tensors"] if t["name"] == Q)["shape"] == [128, 128]
    assert run("verify", target).exit_code == 0
    assert run("diff", packed, target).exit_code == 0
    refused = run("reorder", target, "-o", target.parent / "again")
    assert refused.exit_code == 2
    assert "is a packed model already" in refused.stderr


def test_a_saved_directory_that_is_damaged(saved: tuple[Path, Path]) -> None:
    _, target = saved
    file = packed_info(target).places[f"{Q}.scales"]
    tensors = load_file(file)
    facts = {"format": "pt", "weights": weights_metadata(packed_info(target).weights)}
    original = tensors[f"{Q}.scales"].clone()
    tensors[f"{Q}.scales"][0, 1] = math.inf
    save_file(tensors, file, facts)
    assert verify_packed(target).problems == [f"{Q}: scales[8, 0] is inf"]
    tensors[f"{Q}.scales"] = original.reshape(-1)
    save_file(tensors, file, facts)
    with pytest.raises(CheckpointError, match=rf"'{Q}\.scales': has shape \[512\]"):
        verify_packed(target)
    without = {name: value for name, value in json.loads(facts["weights"]).items() if name != Q}
    for shard in target.glob("*.safetensors"):
        save_file(load_file(shard), shard, {"format": "pt", "weights": json.dumps(without)})
    with pytest.raises(CheckpointError, match=f"'{Q}'.*make no packed weight"):
        verify_packed(target)
    del tensors[f"{Q}.scales"]
    save_file(tensors, file, facts)
    for command in ("verify", "inspect"):
        assert run(command, target).exit_code == 2


def test_sizes_that_only_the_bias_and_the_act_order_determine(tmp_path: Path) -> None:
    honest = packed_file(tmp_path)  # N = 3, K = 40, with both
    assert honest
    config = quantization_config(
        {"w": weight_format_of(load_packed(tmp_path / "p.safetensors")["w"])}
    )
    tensors = load_file(tmp_path / "p.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "p.safetensors").unlink()
    assert len(verify_packed(tmp_path).notes) == 1
    assert packed_info(tmp_path).weights["w"] == (3, 40, 4, 32)
    assert packed_info(tmp_path / "model.safetensors").weights["w"] == (3, 40, 4, 32)
    assert verify_packed(tmp_path).problems == []
    tensors["w.codes"][-1] = 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert verify_packed(tmp_path).problems == ["w: codes has padding that is not zero"]


@pytest.mark.parametrize(("part", "size"), [("bias", 65), ("bias", 0), ("perm", 129), ("perm", 0)])
def test_sizes_that_the_padding_contradicts(tmp_path: Path, part: str, size: int) -> None:
    """N of 3 is padded to 64 and K of 40 to 128: a bias or an act order of other sizes says
    neither N nor K.
    """
    packed_file(tmp_path)
    config = quantization_config(
        {"w": weight_format_of(load_packed(tmp_path / "p.safetensors")["w"])}
    )
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    tensors = load_file(tmp_path / "p.safetensors")
    tensors[f"w.{part}"] = torch.zeros(size, dtype=tensors[f"w.{part}"].dtype)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    n, k = (64, 40) if part == "bias" else (3, 128)
    with pytest.raises(
        CheckpointError, match=rf"'w\.{part}': has shape \[{size}\]; n={n}, k={k}, "
    ):
        packed_info(tmp_path)
    # A weight without them has the sizes of its padding.
    del tensors[f"w.{part}"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert packed_info(tmp_path).weights["w"] == (n, k, 4, 32)
    assert packed_info(tmp_path).rounded == ("w",)


def test_sizes_that_are_rounded_up(saved: tuple[Path, Path]) -> None:
    """Directories that were saved before the sizes were kept."""
    _, target = saved
    for file in target.glob("*.safetensors"):
        save_file(load_file(file), file, {"format": "pt"})
    info = packed_info(target)
    assert info.weights["model.layers.0.mlp.down_proj"] == (128, 256, 4, 32)  # K is 192
    found = verify_packed(target)
    assert found.problems == []
    assert (
        found.notes[1] == f"{target}: keeps no N and K of 7 weights; their padding cannot be "
        "distinguished from their values"
    )


def test_a_config_may_leave_out_that_a_layer_has_a_bias(saved: tuple[Path, Path]) -> None:
    """The model's own configuration says whether there is a bias; a stated dtype must be the
    bias's.
    """
    packed, _ = saved
    config = json.loads((packed / "config.json").read_text())
    quantization = config["quantization_config"]
    form = quantization["modules"].get(
        Q, {key: quantization[key] for key in ("bits", "group_size", "tensors")}
    )
    dtype = form["tensors"].pop("bias")
    for stated, problems in (
        ({}, []),
        ({"bias": dtype}, []),
        ({"bias": "float32"}, [f"config.json: does not describe {Q} as the files have it"]),
    ):
        quantization["modules"][Q] = {**form, "tensors": form["tensors"] | stated}
        (packed / "config.json").write_text(json.dumps(config))
        assert verify_packed(packed).problems == problems


def test_a_config_that_does_not_describe_its_files(saved: tuple[Path, Path]) -> None:
    packed, _ = saved
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["modules"][Q] = {
        **config["quantization_config"],
        "bits": 8,
        "modules": {},
    }
    (packed / "config.json").write_text(json.dumps(config))
    assert verify_packed(packed).problems == [
        f"config.json: does not describe {Q} as the files have it"
    ]
    (packed / "config.json").write_text("{}")
    assert verify_packed(packed).problems == ["config.json: has no quantization_config"]
