"""Whole model directories: written and read back, in every dialect, and interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from model_directories import CONFIG, DOWN0, OPTIONS, float_tensors, listing, save_model, source
from safetensors.torch import load_file, save_file

from cutlass_ops import (
    CheckpointError,
    PackedWeight,
    dequantize,
    load_checkpoint,
    load_packed,
    quantize,
)
from cutlass_ops.files import packing
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.packed_config import GUARD, WeightFormat, quantization_config, weight_format
from cutlass_ops.files.packed_file import is_packed, packed_info
from cutlass_ops.files.verify import verify_packed

__all__ = ["source"]

FOUR = WeightFormat(4, 128, (("scales", torch.float16), ("zeros", torch.int8)))

EIGHT = WeightFormat(8, -1, (("bias", torch.bfloat16), ("scales", torch.float32)))


def test_the_config_gives_every_module_its_format() -> None:
    config = quantization_config({"a": FOUR, "b": FOUR, "c": EIGHT}, ["lm_head"])
    config = json.loads(json.dumps(config))
    assert config["quant_method"] == "cutlass_ops"
    assert (config["bits"], config["group_size"], config["tensors"]) == (
        4,
        128,
        {"scales": "float16", "zeros": "int8"},
    )
    assert config["modules"].keys() == {"c"}
    assert [weight_format(config, name) for name in ("a", "b", "c", "lm_head")] == [
        FOUR,
        FOUR,
        EIGHT,
        None,
    ]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layout": "other"}, "layout 'other', version 2; known is"),
        ({"layout_version": 5}, "version 5; known is 'cutlass_ops.slab64', versions 1 to 4"),
        ({"bits": 3}, "bits is 3"),
        ({"group_size": 48}, "group_size is 48"),
        ({"tensors": {"scales": "Tensor"}}, "'scales' has dtype 'Tensor'"),
        ({"tensors": {"scales": 5}}, "'scales' has dtype 5"),
        ({"tensors": None}, "tensors are expected"),
    ],
)
def test_an_invalid_config(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        weight_format({**quantization_config({"a": FOUR}), **change}, "a")


# ---- a directory


def test_a_model_becomes_a_directory(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    seen: list[tuple[str, int]] = []
    done = reorder_model(
        load_checkpoint(source),
        out,
        OPTIONS,
        shard_bytes=60_000,
        jobs=2,
        progress=lambda *args: seen.append(args),
    )
    shards = [file.name for file in done.files]
    assert len(shards) > 2
    assert shards == [
        f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)
    ]
    small = [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert listing(out) == sorted([*shards, *small])
    assert done.copied == ("generation_config.json", "tokenizer.json")
    assert done.packed_bytes == sum((out / name).stat().st_size for name in shards)
    assert len(done.weights) == 13
    assert {name for name, _ in seen} == {
        *done.weights,
        *done.tensors,
        *(f.name for f in load_checkpoint(source).files),
    }
    # Each shard is small, and a packed file by itself.
    for name in shards:
        tensors = load_packed(out / name)
        assert sum(t.nbytes for t in tensors.values()) <= 60_000 or len(tensors) == 1
    # The index is what transformers reads.
    index = json.loads((out / "model.safetensors.index.json").read_text())
    stored = {name: file for file in shards for name in load_file(out / file)}
    assert index["weight_map"] == stored
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for file in shards for t in load_file(out / file).values()
    )
    # Values: those of each matrix quantised separately; everything else is unchanged.
    packed, plain = load_packed(out), float_tensors()
    assert is_packed(out)
    for name in done.weights:
        weight = packed[name]
        assert isinstance(weight, PackedWeight)
        expected = quantize(plain[f"{name}.weight"], bits=4, group_size=32, symmetric=False)
        assert torch.equal(weight.unpack().codes, expected.codes)
        assert torch.equal(weight.unpack().scales, expected.scales)
        assert (weight.bias is not None) == (f"{name}.bias" in plain)
    assert all(torch.equal(packed[name], plain[name]) for name in done.tensors)
    found = verify_packed(out, load_checkpoint(source))
    assert (found.problems, found.same_source) == ([], True)


def test_config_says_what_the_directory_holds(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reorder_model(load_checkpoint(source), out, OPTIONS, act_quant="block", act_symmetric=False)
    assert listing(out) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    config = json.loads((out / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config.pop("transformers_weights") == GUARD
    assert config == {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    assert quantization["quant_method"] == "cutlass_ops"
    assert (quantization["act_quant"], quantization["act_symmetric"]) == ("block", False)
    assert quantization["modules_to_not_convert"] == [
        "lm_head",
        "model.embed_tokens",
        "model.layers.1.mlp.up_proj",
    ]
    for name, weight in load_packed(out).items():
        if isinstance(weight, PackedWeight):
            expected = {
                part: tensor.dtype for part, tensor in weight.tensors().items() if part != "codes"
            }
            found = weight_format(quantization, name)
            assert found is not None
            assert (found.bits, found.group_size, dict(found.tensors)) == (4, 32, expected)
    assert weight_format(quantization, "model.layers.1.mlp.up_proj") is None


def test_checksums_of_the_source_are_in_the_order_of_its_files(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever is read first: another order would be another header, and a run that goes on would
    write it all again.
    """
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
    (source / "README.md").write_text(
        "---\nlicense: mit\nlanguage:\n- en\n---\n# The model\n\nIts text.\n"
    )
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
    assert card.startswith(
        "\n".join(
            ["---", *front, "license: mit", "---", "", "# some/model-7b, packed by cutlass_ops"]
        )
    )
    assert "13 of 4 bits in groups of 32" in card
    assert 'one scale a block ("block")' in card
    assert card.endswith("## Card of the base model\n\n# The model\n\nIts text.\n")
    # A directory that is not the hub's has no name there.
    reorder_model(
        load_checkpoint(save_model(tmp_path / "mine", float_tensors())), tmp_path / "other", OPTIONS
    )
    card = (tmp_path / "other" / "README.md").read_text()
    assert card.startswith(
        "---\nlibrary_name: transformers\ntags:\n- cutlass_ops\n---\n\n# mine, packed by "
        "cutlass_ops"
    )
    assert "base_model" not in card


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    planned = reorder_model(
        load_checkpoint(source), tmp_path / "out", OPTIONS, shard_bytes=60_000, dry_run=True
    )
    assert not (tmp_path / "out").exists()
    done = reorder_model(load_checkpoint(source), tmp_path / "out", OPTIONS, shard_bytes=60_000)
    assert (planned.files, planned.weights, planned.tensors) == (
        done.files,
        done.weights,
        done.tensors,
    )


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
        load_checkpoint(sys.argv[1]), sys.argv[2], options,
        ranks=int(sys.argv[4]), shard_bytes=60_000, progress=progress,
    )
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_is_resumed(source: Path, tmp_path: Path, ranks: int) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    reorder_model(load_checkpoint(source), whole, OPTIONS, ranks=ranks, shard_bytes=60_000)
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(source), str(out), "12", str(ranks)]
    killed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = {
        file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors") if file.name[0] != "."
    }
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


def test_a_lost_shard_is_written_again_and_until_then_the_directory_is_incomplete(
    source: Path, tmp_path: Path
) -> None:
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


def test_a_run_refuses_invalid_options(source: Path, tmp_path: Path) -> None:
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
        other = Options(**{**OPTIONS.__dict__, **change})
        with pytest.raises(
            ValueError, match=r"model\.safetensors is of another checkpoint, other options"
        ):
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
    code = (
        f"import fcntl, os, sys; fcntl.flock(os.open({str(out)!r}, os.O_RDONLY), 1); print(1, "
        "flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other_process:
        assert other_process.stdout is not None
        other_process.stdout.readline()
        with pytest.raises(ValueError, match="being written by another process"):
            reorder_model(checkpoint, out, OPTIONS)
        other_process.communicate()


def test_a_directory_with_false_metadata(source: Path, tmp_path: Path) -> None:
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
        (
            {**content["weight_map"], name: done.files[-1].name},
            f"is placed in '{done.files[-1].name}'; it is in '{place}'",
        ),
        ({**content["weight_map"], "more": place}, "tensor 'more': is placed in"),
        ({**content["weight_map"], name: "../x.safetensors"}, "of the same directory is expected"),
        ({}, "names no file"),
    ):
        index.write_text(json.dumps({"weight_map": change}))
        refused(match)
    index.write_text(text)
    other = tmp_path / "other"
    reorder_model(
        load_checkpoint(source),
        other,
        Options(bits=4, group_size=32, symmetric=False, exclude="norm|up_proj"),
    )
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
def test_invalid_slices(tmp_path: Path, value: str, match: str) -> None:
    path = tmp_path / "p.safetensors"
    layout = {"layout": "cutlass_ops.slab64", "layout_version": "1", "weights": "{}"}
    save_file({"x": torch.zeros(2)}, path, {**layout, "tensor_parallel": value})
    with pytest.raises(CheckpointError, match=match):
        packed_info(path)


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
            tensors[f"{module}.qweight"] = words_along(
                codes.t().reshape(k, -1, 8)[:, :, awq].reshape(k, n)
            )
            tensors[f"{module}.qzeros"] = words_along(
                zeros.view(-1, n // 8, 8)[:, :, awq].reshape(-1, n)
            )
        else:
            tensors[f"{module}.qweight"] = words_along(codes).t().contiguous()
            tensors[f"{module}.qzeros"] = words_along(zeros - 1)
            index = torch.arange(k) // 32
            tensors[f"{module}.g_idx"] = (
                index[torch.randperm(k, generator=random)] if act_order else index
            ).int()
    return tensors


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": False,
    "desc_act": False,
    "checkpoint_format": "gptq",
}


def save_quantized(
    path: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]
) -> Path:
    save_model(path, tensors)
    (path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    return path


@pytest.mark.parametrize("dialect", ["awq", "gptq"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_quantised_models(tmp_path: Path, dialect: str, ranks: int) -> None:
    config = AWQ if dialect == "awq" else GPTQ
    checkpoint = load_checkpoint(
        save_quantized(tmp_path / "source", quantized_tensors(dialect), config)
    )
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
    source = save_quantized(
        tmp_path / "source", quantized_tensors("gptq", act_order=True), GPTQ | {"desc_act": True}
    )
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
        (
            {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "dynamic": True,
                "symmetric": False,
            },
            ("token", False),
        ),
        (
            {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128, "dynamic": True},
            ("block", True),
        ),
        (
            {
                "num_bits": 8,
                "type": "int",
                "strategy": "tensor",
                "dynamic": False,
                "symmetric": True,
            },
            ("none", True),
        ),
        ({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, ("none", True)),
        (None, ("none", True)),
    ],
)
def test_activations_as_the_checkpoint_was_made_for(
    tmp_path: Path, activations: dict[str, Any] | None, expected: tuple[str, bool]
) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
    }
    tensors = {"m.weight": torch.ones(8, 32, dtype=torch.int8), "m.weight_scale": torch.ones(8, 1)}
    checkpoint = load_checkpoint(
        save_quantized(tmp_path / "source", {**tensors, "norm.weight": torch.ones(2)}, config)
    )
    reorder_model(checkpoint, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (written["act_quant"], written["act_symmetric"]) == expected
    reorder_model(checkpoint, tmp_path / "other", act_quant="block", act_symmetric=False)
    written = json.loads((tmp_path / "other" / "config.json").read_text())["quantization_config"]
    assert (written["act_quant"], written["act_symmetric"]) == ("block", False)
