"""Whole model directories: what is written, what is read back, interrupted and split."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import struct
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cutlass_ops import CheckpointError, PackedWeight, dequantize, load_checkpoint, load_packed, quantize, reorder
from cutlass_ops.checkpoints.safetensors_files import opened
from cutlass_ops.files import model_directory, packing
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.packed_config import GUARD, WeightFormat, quantization_config, weight_format
from cutlass_ops.files.packed_file import is_packed, packed_info
from cutlass_ops.files.tensor_parallel import (
    check_heads,
    parse_overrides,
    slice_tensor,
    slice_weight,
    sliced_format,
    split_style,
)
from cutlass_ops.files.verify import diff_packed, verify_packed
from cutlass_ops.weights import formats

FOUR = WeightFormat(4, 128, (("scales", torch.float16), ("zeros", torch.int8)))
EIGHT = WeightFormat(8, -1, (("bias", torch.bfloat16), ("scales", torch.float32)))


def test_the_config_gives_every_module_its_format() -> None:
    config = quantization_config({"a": FOUR, "b": FOUR, "c": EIGHT}, ["lm_head"])
    config = json.loads(json.dumps(config))
    assert config["quant_method"] == "cutlass_ops"
    assert (config["bits"], config["group_size"], config["tensors"]) == (4, 128, {"scales": "float16", "zeros": "int8"})
    assert config["modules"].keys() == {"c"}
    assert [weight_format(config, name) for name in ("a", "b", "c", "lm_head")] == [FOUR, FOUR, EIGHT, None]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layout": "other"}, "layout 'other', version 2; known is"),
        ({"layout_version": 4}, "version 4; known is 'cutlass_ops.slab64', versions 1 to 3"),
        ({"bits": 3}, "bits is 3"),
        ({"group_size": 48}, "group_size is 48"),
        ({"tensors": {"scales": "Tensor"}}, "'scales' has dtype 'Tensor'"),
        ({"tensors": {"scales": 5}}, "'scales' has dtype 5"),
        ({"tensors": None}, "tensors are expected"),
    ],
)
def test_a_config_that_means_nothing(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        weight_format({**quantization_config({"a": FOUR}), **change}, "a")


# ---- a directory

LINEARS = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (192, 128),
    "mlp.up_proj": (192, 128),
    "mlp.down_proj": (128, 192),
}
CONFIG = {
    "architectures": ["ToyForCausalLM"],  # of which transformers knows no tensors
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "quantization_config": {},
}


def float_tensors(layers: int = 2, bias: bool = True) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    tensors = {"model.embed_tokens.weight": torch.randn(96, 128, generator=random).half()}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = torch.randn(128, generator=random).half()
        for name, shape in LINEARS.items():
            tensors[f"{prefix}.{name}.weight"] = torch.randn(*shape, generator=random).half()
            if bias and name in ("self_attn.q_proj", "self_attn.o_proj"):
                tensors[f"{prefix}.{name}.bias"] = torch.randn(shape[0], generator=random).half()
    return tensors


def save_model(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A model's directory in two shards, with what usually lies beside them."""
    path.mkdir()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[: len(names) // 2]}
    halves["model-00002-of-00002.safetensors"] = names[len(names) // 2 :]
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, path / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "generation_config.json", "quantize_config.json", "pytorch_model.bin", ".hidden"):
        (path / name).write_text("{}")
    (path / "original").mkdir()
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_model(tmp_path / "source", float_tensors())


OPTIONS = Options(bits=4, group_size=32, symmetric=False, exclude="layers.1.*up_proj")


def listing(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def test_a_model_becomes_a_directory(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    seen: list[tuple[str, int]] = []
    done = reorder_model(
        load_checkpoint(source), out, OPTIONS, shard_bytes=60_000, jobs=2, progress=lambda *args: seen.append(args)
    )
    shards = [file.name for file in done.files]
    assert len(shards) > 2
    assert shards == [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    small = ["README.md", "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert listing(out) == sorted([*shards, *small])
    assert done.copied == ("generation_config.json", "tokenizer.json")
    assert done.packed_bytes == sum((out / name).stat().st_size for name in shards)
    assert len(done.weights) == 13
    assert {name for name, _ in seen} == {*done.weights, *done.tensors, *(f.name for f in load_checkpoint(source).files)}
    # Each shard is small, and a packed file by itself.
    for name in shards:
        tensors = load_packed(out / name)
        assert sum(t.nbytes for t in tensors.values()) <= 60_000 or len(tensors) == 1
    # The index is what transformers reads.
    index = json.loads((out / "model.safetensors.index.json").read_text())
    stored = {name: file for file in shards for name in load_file(out / file)}
    assert index["weight_map"] == stored
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in shards for t in load_file(out / file).values())
    # Values: those of each matrix quantised by itself; everything else as it was.
    packed, plain = load_packed(out), float_tensors()
    assert is_packed(out)
    for name in done.weights:
        weight = packed[name]
        assert isinstance(weight, PackedWeight)
        expected = quantize(plain[f"{name}.weight"], bits=4, group_size=32, symmetric=False)
        assert torch.equal(weight.unpack().codes, expected.codes)
        assert torch.equal(weight.unpack().scales, expected.scales)
        assert (weight.bias is not None) == (f"{name}.bias" in plain)
    assert all(torch.equal(packed[name], plain[name]) for name in done.tensors)  # type: ignore[arg-type]
    found = verify_packed(out, load_checkpoint(source))
    assert (found.problems, found.same_source) == ([], True)


def test_config_says_what_the_directory_holds(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reorder_model(load_checkpoint(source), out, OPTIONS, act_quant="block", act_symmetric=False)
    assert listing(out) == ["README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    config = json.loads((out / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config.pop("transformers_weights") == GUARD
    assert config == {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    assert quantization["quant_method"] == "cutlass_ops"
    assert (quantization["act_quant"], quantization["act_symmetric"]) == ("block", False)
    assert quantization["modules_to_not_convert"] == ["lm_head", "model.embed_tokens", "model.layers.1.mlp.up_proj"]
    for name, weight in load_packed(out).items():
        if isinstance(weight, PackedWeight):
            expected = {part: tensor.dtype for part, tensor in weight.tensors().items() if part != "codes"}
            found = weight_format(quantization, name)
            assert found is not None
            assert (found.bits, found.group_size, dict(found.tensors)) == (4, 32, expected)
    assert weight_format(quantization, "model.layers.1.mlp.up_proj") is None


def test_checksums_of_the_source_are_in_the_order_of_its_files(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is read first: another order would be another header, and a run that goes on would write it all again."""
    checkpoint = load_checkpoint(source)
    first, second = checkpoint.files
    second_is_read = threading.Event()

    def sha256(path: Path) -> str:
        if path == first:
            assert second_is_read.wait(10)
        return path.name

    monkeypatch.setattr(packing, "sha256", sha256)
    seen: list[str] = []

    def progress(name: str, nbytes: int) -> None:
        assert nbytes == (source / name).stat().st_size
        seen.append(name)
        second_is_read.set()

    assert list(packing.source_checksums(checkpoint, 2, progress)) == [first.name, second.name]
    assert seen == [second.name, first.name]


def test_the_card_names_the_base_model_and_the_formats(tmp_path: Path) -> None:
    source = tmp_path / "models--some--model-7b" / "snapshots" / "0123"
    source.parent.mkdir(parents=True)
    save_model(source, float_tensors())
    (source / "README.md").write_text("---\nlicense: mit\nlanguage:\n- en\n---\n# The model\n\nIts text.\n")
    done = reorder_model(load_checkpoint(source), tmp_path / "out", OPTIONS, act_quant="block")
    assert "README.md" not in done.copied
    card = (tmp_path / "out" / "README.md").read_text()
    front = [
        "base_model: some/model-7b",
        "base_model_relation: quantized",
        "library_name: transformers",
        "tags:",
        "- cutlass_ops",
    ]
    assert card.startswith("\n".join(["---", *front, "license: mit", "---", "", "# some/model-7b, packed by cutlass_ops"]))
    assert "13 of 4 bits in groups of 32" in card
    assert 'one scale a block ("block")' in card
    assert card.endswith("## Card of the base model\n\n# The model\n\nIts text.\n")
    # A directory that is not the hub's has no name there.
    reorder_model(load_checkpoint(save_model(tmp_path / "mine", float_tensors())), tmp_path / "other", OPTIONS)
    card = (tmp_path / "other" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- cutlass_ops\n---\n\n# mine, packed by cutlass_ops")
    assert "base_model" not in card


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    planned = reorder_model(load_checkpoint(source), tmp_path / "out", OPTIONS, shard_bytes=60_000, dry_run=True)
    assert not (tmp_path / "out").exists()
    done = reorder_model(load_checkpoint(source), tmp_path / "out", OPTIONS, shard_bytes=60_000)
    assert (planned.files, planned.weights, planned.tensors) == (done.files, done.weights, done.tensors)


# ---- complete or absent

RUN = """
    import os, signal, sys
    from cutlass_ops import load_checkpoint
    from cutlass_ops.files.model_directory import reorder_model
    from cutlass_ops.files.conversion_plan import Options
    left = int(sys.argv[3])
    def progress(name, nbytes):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    options = Options(bits=4, group_size=32, symmetric=False, exclude="layers.1.*up_proj")
    reorder_model(
        load_checkpoint(sys.argv[1]), sys.argv[2], options, ranks=int(sys.argv[4]), shard_bytes=60_000, progress=progress
    )
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_is_resumed(source: Path, tmp_path: Path, ranks: int) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    reorder_model(load_checkpoint(source), whole, OPTIONS, ranks=ranks, shard_bytes=60_000)
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(source), str(out), "12", str(ranks)]
    killed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors") if file.name[0] != "."}
    assert finished
    assert list(out.rglob("*.partial"))
    assert not list(out.rglob("*.json"))  # neither an index nor a config: it does not look whole
    for directory in {file.parent for file in finished}:
        with pytest.raises(CheckpointError, match="interrupted"):
            packed_info(directory)
    done = reorder_model(load_checkpoint(source), out, OPTIONS, ranks=ranks, shard_bytes=60_000)
    assert done.found == len(finished) > 0
    assert done.found < len(done.files)
    assert all(file.stat().st_mtime_ns == time for file, time in finished.items())
    assert listing(out) == listing(whole)
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in listing(whole))
    again = reorder_model(load_checkpoint(source), out, OPTIONS, ranks=ranks, shard_bytes=60_000)
    assert again.found == len(again.files)
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in listing(whole))


def test_a_lost_shard_is_made_again_and_meanwhile_nothing_looks_whole(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = reorder_model(load_checkpoint(source), out, OPTIONS, shard_bytes=60_000)
    before = done.files[1].read_bytes()
    done.files[1].unlink()

    def stop(name: str, nbytes: int) -> None:
        if name == "model.layers.1.self_attn.o_proj":
            assert not (out / "config.json").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reorder_model(load_checkpoint(source), out, OPTIONS, shard_bytes=60_000, progress=stop)
    assert not (out / "config.json").exists()
    assert not list(out.glob(".*"))
    reorder_model(load_checkpoint(source), out, OPTIONS, shard_bytes=60_000)
    assert done.files[1].read_bytes() == before


def test_a_shard_that_one_rank_lost_is_made_again(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = reorder_model(load_checkpoint(source), out, OPTIONS, ranks=2)
    for file in done.files:
        before = file.read_bytes()
        file.unlink()
        again = reorder_model(load_checkpoint(source), out, OPTIONS, ranks=2)
        assert again.found == 0
        assert file.read_bytes() == before


def test_what_a_run_refuses(source: Path, tmp_path: Path) -> None:
    checkpoint, out = load_checkpoint(source), tmp_path / "out"
    with pytest.raises(ValueError, match="directory of the checkpoint itself"):
        reorder_model(checkpoint, source, OPTIONS)
    with pytest.raises(ValueError, match="ranks is 0"):
        reorder_model(checkpoint, out, OPTIONS, ranks=0)
    with pytest.raises(ValueError, match="act_quant is 'tensor'"):
        reorder_model(checkpoint, out, OPTIONS, act_quant="tensor")
    with pytest.raises(FileNotFoundError):
        reorder_model(checkpoint, tmp_path / "no" / "out", OPTIONS)
    assert not out.exists()
    reorder_model(checkpoint, out, OPTIONS)
    before = {name: (out / name).read_bytes() for name in listing(out)}
    for change in ({"bits": 8}, {"exclude": None}, {"symmetric": True}):
        other = Options(**{**OPTIONS.__dict__, **change})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"model\.safetensors is of another checkpoint, other options"):
            reorder_model(checkpoint, out, other)
    with pytest.raises(ValueError, match="is of another"):
        reorder_model(checkpoint, out, OPTIONS, shard_bytes=60_000)
    with pytest.raises(ValueError, match=r"model\.safetensors is of another"):
        reorder_model(checkpoint, out, OPTIONS, ranks=2)
    reorder_model(checkpoint, tmp_path / "split", OPTIONS, ranks=2)
    with pytest.raises(ValueError, match="rank-0-of-2 is of another"):
        reorder_model(checkpoint, tmp_path / "split", OPTIONS)
    changed = float_tensors()
    changed["model.embed_tokens.weight"][3, 5] += 1
    with pytest.raises(ValueError, match="is of another checkpoint"):
        reorder_model(load_checkpoint(save_model(tmp_path / "changed", changed)), out, OPTIONS)
    assert {name: (out / name).read_bytes() for name in listing(out)} == before
    (out / "model.safetensors").write_bytes(before["model.safetensors"][:-1])
    with pytest.raises(ValueError, match="is of another"):
        reorder_model(checkpoint, out, OPTIONS)
    code = f"import fcntl, os, sys; fcntl.flock(os.open({str(out)!r}, os.O_RDONLY), 1); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other_process:
        assert other_process.stdout is not None
        other_process.stdout.readline()
        with pytest.raises(ValueError, match="being written by another process"):
            reorder_model(checkpoint, out, OPTIONS)
        other_process.communicate()


def test_a_directory_that_lies(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = reorder_model(load_checkpoint(source), out, OPTIONS, shard_bytes=60_000)
    index = out / "model.safetensors.index.json"
    text = index.read_text()

    def refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            packed_info(out)
        with pytest.raises(CheckpointError, match=match):
            load_packed(out)

    content = json.loads(text)
    name, place = next(iter(content["weight_map"].items()))
    for change, match in (
        ({**content["weight_map"], name: done.files[-1].name}, f"is placed in '{done.files[-1].name}'; it is in '{place}'"),
        ({**content["weight_map"], "more": place}, "tensor 'more': is placed in"),
        ({**content["weight_map"], name: "../x.safetensors"}, "of the same directory is expected"),
        ({}, "names no file"),
    ):
        index.write_text(json.dumps({"weight_map": change}))
        refused(match)
    index.write_text(text)
    other = tmp_path / "other"
    reorder_model(load_checkpoint(source), other, Options(bits=4, group_size=32, symmetric=False, exclude="norm|up_proj"))
    assert packed_info(out).weights
    done.files[0].write_bytes((other / "model.safetensors").read_bytes())
    refused("was not written with")
    done.files[0].unlink()
    refused("no such file")
    (out / "config.json").unlink()
    refused(r"has no config\.json")


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("[]", "'tensor_parallel' is a JSON list"),
        ('{"rank": 2, "size": 2, "styles": {}}', "a rank below size"),
        ('{"rank": -1, "size": 2, "styles": {}}', "a rank below size"),
        ('{"rank": true, "size": 2, "styles": {}}', "a rank below size"),
        ('{"rank": 0, "size": 2, "styles": {"m": 3}}', "a rank below size"),
        ('{"rank": 0, "size": 2, "styles": {"m": "rows"}}', "a rank below size"),
    ],
)
def test_slices_that_mean_nothing(tmp_path: Path, value: str, match: str) -> None:
    path = tmp_path / "p.safetensors"
    layout = {"layout": "cutlass_ops.slab64", "layout_version": "1", "weights": "{}"}
    save_file({"x": torch.zeros(2)}, path, {**layout, "tensor_parallel": value})
    with pytest.raises(CheckpointError, match=match):
        packed_info(path)


# ---- verify and diff


def flip(path: Path, tensor: str, position: int = 0) -> None:
    """Flip the lowest bit of one byte of a tensor."""
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    begin = json.loads(content[8 : 8 + length])[tensor]["data_offsets"][0]
    content[8 + length + begin + position] ^= 1
    path.write_bytes(content)


Q0, DOWN0 = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("ranks", [1, 2])
def test_verify_and_diff_see_one_flipped_bit(source: Path, tmp_path: Path, ranks: int) -> None:
    checkpoint, out, same = load_checkpoint(source), tmp_path / "out", tmp_path / "same"
    for path, shard_bytes in ((out, 60_000), (same, 10**9)):
        reorder_model(checkpoint, path, OPTIONS, ranks=ranks, shard_bytes=shard_bytes)
    assert verify_packed(out, checkpoint).problems == []
    rank, prefix = (out, "") if ranks == 1 else (out / "rank-1-of-2", "rank-1-of-2: ")
    other = same if ranks == 1 else same / "rank-1-of-2"
    info = packed_info(rank)
    equal = diff_packed(rank, other)
    assert (equal.same, equal.only_first, equal.only_second, equal.changed) == (len(info.names), [], [], {})
    # Byte 0 holds rows 0 and 8 of column 0, row 0 in its low half; scales are fp16.
    for tensor, position, part, difference in (
        (f"{DOWN0}.codes", 0, "codes", r"codes: 1 of \d+ differ, the first at [0, 0]"),
        (f"{DOWN0}.scales", 3, "scales", "scales: 1 of"),
        ("model.layers.0.input_layernorm.weight", 9, "", "values: 1 of 128 differ, the first at [4]"),
    ):
        name = tensor.removesuffix(f".{part}") if part else tensor
        place = info.places[tensor]
        flip(place, tensor, position)
        found = verify_packed(out, checkpoint)
        assert found.problems == [
            f"{prefix}{name}: {part or 'the tensor'} does not have its checksum",
            f"{prefix}{name}: {f'{part} ' if part else ''}differs from the checkpoint's",
        ]
        assert found.same_source
        changed = diff_packed(rank, other).changed
        assert changed.keys() == {name}
        words = difference.split(r"\d+")
        assert changed[name][0].startswith(words[0])
        assert words[-1] in changed[name][0]
        flip(place, tensor, position)
    assert verify_packed(out, checkpoint).problems == []


def test_verify_knows_groups_that_the_ranks_made_shorter(source: Path, tmp_path: Path) -> None:
    checkpoint, out = load_checkpoint(source), tmp_path / "out"
    reorder_model(checkpoint, out, Options(bits=4, group_size=64), ranks=2)
    down = load_packed(out / "rank-1-of-2")[DOWN0]
    assert isinstance(down, PackedWeight)
    assert (down.k, down.group_size) == (96, 32)
    assert verify_packed(out, checkpoint).problems == []


def test_verify_misses_no_rank(source: Path, tmp_path: Path) -> None:
    checkpoint, out = load_checkpoint(source), tmp_path / "out"
    reorder_model(checkpoint, out, OPTIONS, ranks=2)
    (out / "rank-1-of-2").rename(tmp_path / "kept")
    assert verify_packed(out, checkpoint).problems == ["rank-1-of-2: is not there"]
    (tmp_path / "kept").rename(out / "rank-1-of-2")
    for name in listing(out / "rank-0-of-2"):
        (out / "rank-1-of-2" / name).write_bytes((out / "rank-0-of-2" / name).read_bytes())
    assert verify_packed(out, checkpoint).problems == ["rank-1-of-2: holds rank 0 of 2"]
    (out / "rank-0-of-3").mkdir()
    with pytest.raises(CheckpointError, match="ranks of 2 and of 3"):
        verify_packed(out)


def test_verify_sees_ranks_of_another_size(source: Path, tmp_path: Path) -> None:
    checkpoint, out = load_checkpoint(source), tmp_path / "out"
    reorder_model(checkpoint, out, OPTIONS, ranks=2)
    for name in ("rank-0-of-1", "rank-0-of-3", "rank-1-of-3", "rank-2-of-3"):
        folder = tmp_path / name[-4:]
        folder.mkdir(exist_ok=True)
        (folder / name).symlink_to(out / f"rank-{name[5] if name[5] != '2' else 0}-of-2")
    assert verify_packed(tmp_path / "of-1", checkpoint).problems == ["rank-0-of-1: holds rank 0 of 2"]
    problems = [f"rank-{rank}-of-3: holds rank {rank % 2} of 2" for rank in range(3)]
    assert verify_packed(tmp_path / "of-3", checkpoint).problems == problems
    reorder_model(checkpoint, tmp_path / "whole", OPTIONS)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "rank-0-of-1").symlink_to(tmp_path / "whole")
    assert verify_packed(tmp_path / "none", checkpoint).problems == ["rank-0-of-1: holds no rank"]


def test_ranks_of_two_sources_are_not_of_the_same(source: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    reorder_model(load_checkpoint(source), out, OPTIONS, ranks=2)
    shard = source / "model-00001-of-00002.safetensors"
    save_file(load_file(shard), shard, {"format": "pt"})  # other bytes of the same tensors
    checkpoint = load_checkpoint(source)
    reorder_model(checkpoint, other, OPTIONS, ranks=2)
    for path, same in ((other, True), (out, False)):
        found = verify_packed(path, checkpoint)
        assert (found.problems, found.same_source) == ([], same)
    for rank in (0, 1):  # whichever of the two it is
        mixed = tmp_path / f"mixed-{rank}"
        mixed.mkdir()
        for name, folder in ((f"rank-{rank}-of-2", out), (f"rank-{1 - rank}-of-2", other)):
            (mixed / name).symlink_to(folder / name)
        assert verify_packed(mixed, checkpoint).same_source is False


def test_diff_of_different_files(source: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(source)
    a, b = tmp_path / "a", tmp_path / "b"
    reorder_model(checkpoint, a, OPTIONS)
    reorder_model(checkpoint, b, Options(bits=4, group_size=32, include="mlp|q_proj|k_proj"))
    found = diff_packed(a, b)
    assert found.changed[Q0] == ["zeros only in the first"] or found.changed[Q0][-1] == "zeros only in the first"
    assert "model.layers.0.self_attn.v_proj" in found.only_first
    assert "model.layers.0.self_attn.v_proj.weight" in found.only_second
    assert found.same == 3  # the embedding and the norms
    c = tmp_path / "c"
    reorder_model(checkpoint, c, Options(bits=8, group_size=32))
    assert diff_packed(b, c).changed[Q0] == ["bits is 4 and 8"]


# ---- tensor parallelism


def test_which_layer_is_split_how() -> None:
    for name, style in (
        ("model.layers.0.self_attn.q_proj", "colwise"),
        ("model.layers.0.mlp.experts.7.gate_proj", "colwise"),
        ("block_sparse_moe.experts.0.w2", "rowwise"),
        ("model.layers.0.mlp.down_proj", "rowwise"),
        ("lm_head", "replicate"),
        ("model.layers.0.mlp.gate", "replicate"),
    ):
        assert split_style(name) == style
    overrides = parse_overrides(["lm_head=colwise", "layers.0=replicate"])
    assert split_style("lm_head", overrides) == "colwise"
    assert split_style("model.layers.0.mlp.down_proj", overrides) == "replicate"
    assert split_style("model.layers.1.mlp.down_proj", overrides) == "rowwise"
    with pytest.raises(ValueError, match="several layers in one"):
        split_style("h.0.qkv_proj")
    assert split_style("h.0.qkv_proj", parse_overrides(["qkv=replicate"])) == "replicate"
    for text, match in (("lm_head", "REGEX=STYLE"), ("a=rows", "REGEX=STYLE"), ("(=colwise", "no regular expression")):
        with pytest.raises(ValueError, match=match):
            parse_overrides([text])


@pytest.mark.parametrize(
    ("k", "group_size", "size", "expected"),
    [
        (512, 128, 2, 128),
        (576, 128, 2, 32),
        (11008, 128, 4, 64),
        (1024, 256, 8, 128),
        (96, -1, 3, -1),
        (384, 384, 1, 384),
        (1152, 384, 2, 64),  # 192 divides 384 and 576, and is no size of a group
        (768, 384, 4, 64),
        (3072, 384, 4, 384),
        (1536, 768, 4, 384),
        (640, 640, 2, 64),
        (480, 480, 3, 32),
    ],
)
def test_groups_where_ranks_part(k: int, group_size: int, size: int, expected: int) -> None:
    formats.check_group_size(expected)
    assert sliced_format(8, k, group_size, "rowwise", size) == (8, k // size, expected)


@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets", "book"])
@pytest.mark.parametrize(("k", "group_size"), [(192, 32), (576, 128), (320, -1), (1152, 384)])
def test_slices_are_slices_of_the_values(kind: str, k: int, group_size: int) -> None:
    random = torch.Generator().manual_seed(k)
    weight = quantize(torch.randn(24, k, generator=random), 4, group_size, symmetric=kind != "zeros")
    extras: dict[str, Any] = {"bias": torch.randn(24, generator=random)}
    if kind == "offsets":
        extras["offsets"] = torch.randn(weight.scales.shape, generator=random)
    if kind == "book":
        extras["book"] = torch.randn(16, generator=random)
    weight = type(weight)(**{**{f: getattr(weight, f) for f in weight.__dataclass_fields__}, **extras})
    values, bias = dequantize(weight, torch.float32), weight.bias
    assert bias is not None
    rows = [slice_weight(weight, "colwise", rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([dequantize(part, torch.float32) for part in rows]), values)
    assert torch.equal(torch.cat([part.bias for part in rows]), bias)  # type: ignore[misc]
    columns = [slice_weight(weight, "rowwise", rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([dequantize(part, torch.float32) for part in columns], dim=1), values)
    assert torch.equal(sum(part.bias for part in columns), bias)  # type: ignore[arg-type, misc]
    for part in (*rows, *columns):
        assert torch.equal(reorder(part).unpack().codes, part.codes)


def test_biases_of_float_layers_are_split_with_them(source: Path, tmp_path: Path) -> None:
    checkpoint, out = load_checkpoint(source), tmp_path / "out"
    done = reorder_model(checkpoint, out, Options(bits=4, group_size=32, exclude="q_proj|o_proj"), ranks=2)
    parts = [load_packed(out / f"rank-{rank}-of-2") for rank in range(2)]
    plain = dict(checkpoint.plain())
    o0 = "model.layers.0.self_attn.o_proj"
    assert (done.styles[f"{Q0}.bias"], done.styles[f"{o0}.bias"]) == ("colwise", "rowwise")
    assert torch.equal(torch.cat([part[f"{Q0}.bias"] for part in parts]), plain[f"{Q0}.bias"])  # type: ignore[misc]
    assert torch.equal(parts[0][f"{o0}.bias"], plain[f"{o0}.bias"])  # type: ignore[arg-type]
    assert not parts[1][f"{o0}.bias"].any()  # type: ignore[union-attr]
    assert verify_packed(out, checkpoint).problems == []


def test_no_rank_has_a_part_of_an_attention_head() -> None:
    config = {"num_attention_heads": 12, "num_key_value_heads": 4}
    for name, key in (
        ("q_proj", "num_attention_heads 12"),
        ("k_proj", "num_key_value_heads 4"),
        ("v_proj", "num_key_value_heads 4"),
    ):
        heads = int(key.split()[1])
        for size in range(1, 13):
            if heads % size == 0:
                check_heads(f"layers.0.{name}", config, size)
                continue
            with pytest.raises(ValueError, match=f"over {size} ranks: config.json has {key}; .*=replicate'"):
                check_heads(f"layers.0.{name}", config, size)
    check_heads("layers.0.o_proj", config, 5)
    check_heads("layers.0.q_proj", {"num_attention_heads": "12"}, 5)


def test_the_bias_of_a_rowwise_layer_is_added_once_with_its_sign() -> None:
    """-0.0 changes no sum, and 0.0 would turn a bias of -0.0 into 0.0."""
    bias = torch.tensor([-0.0, 0.0, 1.5, -2.0])
    weight = replace(quantize(torch.randn(4, 96), 4, 32), bias=bias)
    slices = [slice_weight(weight, "rowwise", rank, 3).bias for rank in range(3)]
    floats = [slice_tensor(bias, "rowwise", rank, 3) for rank in range(3)]
    for parts in (slices, floats):
        total = parts[0] + parts[1] + parts[2]  # type: ignore[operator]
        assert torch.equal(total.view(torch.int32), bias.view(torch.int32))
        assert torch.equal(parts[0], bias)  # type: ignore[arg-type]
        assert [part.tolist() for part in parts[1:]] == [[0.0] * 4] * 2  # type: ignore[union-attr]


def test_ranks_hold_slices_of_the_unsplit_model(source: Path, tmp_path: Path) -> None:
    checkpoint, out = load_checkpoint(source), tmp_path / "out"
    reorder_model(checkpoint, tmp_path / "whole", OPTIONS)
    done = reorder_model(checkpoint, out, OPTIONS, ranks=2, splits=(("k_proj", "replicate"),))
    assert is_packed(out)
    with pytest.raises(CheckpointError, match=r"name one: rank-0-of-2, rank-1-of-2"):
        load_packed(out)
    whole = load_packed(tmp_path / "whole")
    parts = [load_packed(out / f"rank-{rank}-of-2") for rank in range(2)]
    kept = 0
    for name, value in whole.items():
        a, b = (part[name] for part in parts)
        if isinstance(value, PackedWeight):
            assert isinstance(a, PackedWeight)
            assert isinstance(b, PackedWeight)
            x, y = dequantize(a, torch.float32), dequantize(b, torch.float32)
            value, bias = dequantize(value, torch.float32), value.bias
            row = name.endswith(("o_proj", "down_proj"))
            if bias is not None:
                assert a.bias is not None
                assert b.bias is not None
                assert torch.equal(a.bias + b.bias if row else torch.cat([a.bias, b.bias]), bias)
        else:
            assert isinstance(a, torch.Tensor)
            assert isinstance(b, torch.Tensor)
            x, y, row = a, b, False
        if name.endswith(("k_proj", "norm.weight", "embed_tokens.weight")):
            assert torch.equal(x, value)
            assert torch.equal(y, value)
            kept += 1
        else:
            assert torch.equal(torch.cat([x, y], dim=1 if row else 0), value)
            style = "rowwise" if row else "colwise"
            assert done.styles[name] == style
    assert kept == 5  # two k_proj, two norms, the embedding
    assert whole["model.layers.1.mlp.up_proj.weight"].shape == (192, 128)
    assert parts[0]["model.layers.1.mlp.up_proj.weight"].shape == (96, 128)  # floats are split too
    assert parts[0][DOWN0].group_size == 32  # type: ignore[union-attr]
    for rank in range(2):
        config = json.loads((out / f"rank-{rank}-of-2" / "config.json").read_text())["quantization_config"]
        assert config["tensor_parallel"] == {"rank": rank, "size": 2, "styles": dict(done.styles)}
        slices = packed_info(out / f"rank-{rank}-of-2").slices
        assert slices is not None
        assert (slices.rank, slices.size, slices.styles) == (rank, 2, done.styles)
        assert (out / f"rank-{rank}-of-2" / "tokenizer.json").is_file()


def test_the_advice_to_replicate_holds(source: Path, tmp_path: Path) -> None:
    checkpoint, splits, advice = load_checkpoint(source), [], []
    for _ in range(3):
        try:
            reorder_model(checkpoint, tmp_path / "out", OPTIONS, ranks=4, splits=parse_overrides(splits), dry_run=True)
            break
        except ValueError as error:
            advice += re.findall(r"--tp-split '(.*?)'", str(error))
            splits = [*advice, "down=replicate"]
    else:
        pytest.fail(str(advice))
    assert advice == ["k_proj|v_proj=replicate"]
    with pytest.raises(ValueError, match="--tp-split 'qkv_proj=replicate'"):
        split_style("h.0.qkv_proj")
    with pytest.raises(ValueError, match="--tp-split 'q_proj=replicate'"):
        check_heads("q_proj", {"num_attention_heads": 3}, 2)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_full_disk_is_named(name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out"
    if name == "config.json":
        monkeypatch.setattr(model_directory, "_config", lambda *_: monkeypatch.setattr(os, "fsync", full) or {})
    else:
        monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{out / name}'"):
        reorder_model(load_checkpoint(source), out, OPTIONS)


def test_a_file_that_may_not_be_read_is_said_to_be_there(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    shard = min(source.glob("*.safetensors"))
    monkeypatch.setattr(Path, "open", refuse)  # tests may run as root, whom no mode keeps out
    with pytest.raises(CheckpointError, match=rf"{shard}: Permission denied"), opened(shard):
        pass


def test_what_cannot_be_split(source: Path, tmp_path: Path) -> None:
    checkpoint, out = load_checkpoint(source), tmp_path / "out"
    with pytest.raises(ValueError, match=r"k_proj' cannot be split over 3 ranks: config\.json has num_key_value_heads 2"):
        reorder_model(checkpoint, out, OPTIONS, ranks=3)
    with pytest.raises(ValueError, match="num_key_value_heads 2"):
        reorder_model(checkpoint, out, OPTIONS, ranks=4, splits=(("down", "replicate"),))
    with pytest.raises(ValueError, match=r"down_proj' cannot be rowwise: .* groups of 8"):
        reorder_model(checkpoint, out, OPTIONS, ranks=8, splits=(("_attn|gate|up", "replicate"),))
    with pytest.raises(ValueError, match="5 ranks"):
        reorder_model(checkpoint, out, OPTIONS, ranks=5, splits=(("_attn", "replicate"),))
    assert not out.exists()
    weight = quantize(torch.randn(8, 64), 4, 32)
    ordered = type(weight)(weight.codes, weight.scales, group_size=32, perm=torch.randperm(64))
    with pytest.raises(ValueError, match="act order"):
        slice_weight(ordered, "rowwise", 0, 2)
    assert slice_weight(ordered, "colwise", 1, 2).perm is ordered.perm


# ---- the dialects


def words_along(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes ``[R, C]`` to words ``[R, C / 8]``, the first in the lowest bits."""
    places = 4 * torch.arange(8)
    return (codes.long().view(codes.shape[0], -1, 8) << places).sum(-1).to(torch.int32)


def quantized_tensors(dialect: str, act_order: bool = False) -> dict[str, torch.Tensor]:
    """The model in AWQ's or GPTQ's tensors, every linear layer of random codes in groups of 32."""
    random = torch.Generator().manual_seed(5)
    awq = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    tensors: dict[str, torch.Tensor] = {}
    for name, value in float_tensors().items():
        if ".layers." not in name or name.endswith("norm.weight") or value.dim() == 1:
            tensors[name] = value
            continue
        (n, k), module = value.shape, name.removesuffix(".weight")
        codes = torch.randint(0, 16, (n, k), generator=random)
        zeros = torch.randint(1, 16, (k // 32, n), generator=random)
        tensors[f"{module}.scales"] = torch.randn(k // 32, n, generator=random).half()
        if dialect == "awq":
            tensors[f"{module}.qweight"] = words_along(codes.t().reshape(k, -1, 8)[:, :, awq].reshape(k, n))
            tensors[f"{module}.qzeros"] = words_along(zeros.view(-1, n // 8, 8)[:, :, awq].reshape(-1, n))
        else:
            tensors[f"{module}.qweight"] = words_along(codes).t().contiguous()
            tensors[f"{module}.qzeros"] = words_along(zeros - 1)
            index = torch.arange(k) // 32
            tensors[f"{module}.g_idx"] = (index[torch.randperm(k, generator=random)] if act_order else index).int()
    return tensors


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, "checkpoint_format": "gptq"}


def save_quantized(path: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> Path:
    save_model(path, tensors)
    (path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    return path


@pytest.mark.parametrize("dialect", ["awq", "gptq"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_quantised_models(tmp_path: Path, dialect: str, ranks: int) -> None:
    config = AWQ if dialect == "awq" else GPTQ
    checkpoint = load_checkpoint(save_quantized(tmp_path / "source", quantized_tensors(dialect), config))
    done = reorder_model(checkpoint, tmp_path / "out", ranks=ranks, jobs=2, shard_bytes=60_000)
    assert len(done.weights) == 14
    found = verify_packed(tmp_path / "out", checkpoint)
    assert (found.problems, found.weights, found.same_source) == ([], 14 * ranks, True)
    assert found.largest_difference == 0
    directories = {file.parent for file in done.files}
    assert len(directories) == ranks
    for directory in directories:
        written = json.loads((directory / "config.json").read_text())["quantization_config"]
        assert (written["bits"], written["group_size"]) == (4, 32)
        assert written["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]


def test_act_order_is_not_split_along_k(tmp_path: Path) -> None:
    source = save_quantized(tmp_path / "source", quantized_tensors("gptq", act_order=True), GPTQ | {"desc_act": True})
    checkpoint, out = load_checkpoint(source), tmp_path / "out"
    with pytest.raises(ValueError, match=r"down_proj' cannot be rowwise: it has an act order"):
        reorder_model(checkpoint, out, ranks=2)
    assert not out.exists()
    done = reorder_model(checkpoint, out, ranks=2, splits=(("o_proj|down_proj", "replicate"),))
    assert set(done.styles.values()) == {"colwise"}
    assert verify_packed(out, checkpoint).problems == []
    whole = checkpoint[DOWN0]
    for rank in range(2):
        down = load_packed(out / f"rank-{rank}-of-2")[DOWN0]
        assert isinstance(down, PackedWeight)
        assert down.perm is not None
        assert torch.equal(dequantize(down, torch.float32), dequantize(whole, torch.float32))


@pytest.mark.parametrize(
    ("activations", "expected"),
    [
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": False}, ("token", False)),
        ({"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128, "dynamic": True}, ("block", True)),
        ({"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}, ("none", True)),
        ({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, ("none", True)),
        (None, ("none", True)),
    ],
)
def test_activations_as_the_checkpoint_was_made_for(
    tmp_path: Path, activations: dict[str, Any] | None, expected: tuple[str, bool]
) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    tensors = {"m.weight": torch.ones(8, 32, dtype=torch.int8), "m.weight_scale": torch.ones(8, 1)}
    checkpoint = load_checkpoint(save_quantized(tmp_path / "source", {**tensors, "norm.weight": torch.ones(2)}, config))
    reorder_model(checkpoint, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (written["act_quant"], written["act_symmetric"]) == expected
    reorder_model(checkpoint, tmp_path / "other", act_quant="block", act_symmetric=False)
    written = json.loads((tmp_path / "other" / "config.json").read_text())["quantization_config"]
    assert (written["act_quant"], written["act_symmetric"]) == ("block", False)
