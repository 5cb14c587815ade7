"""Whole checkpoints packed, and verified."""

from __future__ import annotations

import json
import math
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import cutlass_ops as co
from cutlass_ops import (
    CheckpointError,
    PackedWeight,
    dequantize,
    load_packed,
)
from cutlass_ops.checkpoints import load_checkpoint
from cutlass_ops.files import packing
from cutlass_ops.files.conversion_plan import DEFAULT_EXCLUDE, sha256
from cutlass_ops.files.packed_file import packed_info
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import diff_packed, verify_packed

# ---- whole checkpoints


UP = "model.layers.0.mlp.up_proj"


def float_checkpoint(path: Path, **more: torch.Tensor) -> Path:
    random = torch.Generator().manual_seed(1)
    tensors = {
        "model.embed_tokens.weight": torch.randn(50, 96, generator=random).half(),
        "model.layers.0.mlp.up_proj.weight": torch.randn(70, 96, generator=random).half(),
        "model.layers.0.mlp.up_proj.bias": torch.randn(70, generator=random),
        "model.layers.0.mlp.down_proj.weight": torch.randn(96, 70, generator=random).bfloat16(),
        "model.layers.0.input_layernorm.weight": torch.randn(96, generator=random).half(),
        "model.layers.0.post_norm_proj.weight": torch.randn(4, 4, generator=random),
        "lm_head.weight": torch.randn(50, 96, generator=random).half(),
        "positions": torch.arange(8),
        **more,
    }
    save_file(tensors, path)
    return path


def test_float_weights_are_quantised_on_the_way(tmp_path: Path) -> None:
    source = load_checkpoint(float_checkpoint(tmp_path / "m.safetensors"))
    seen: list[str] = []
    done = reorder_checkpoint(
        source,
        tmp_path / "p.safetensors",
        bits=8,
        group_size=64,
        symmetric=False,
        progress=lambda name, _: seen.append(name),
    )
    assert done.weights == {
        "model.layers.0.mlp.up_proj": (70, 96, 8, 64),
        "model.layers.0.mlp.down_proj": (96, 70, 8, 64),
    }
    loaded = load_packed(tmp_path / "p.safetensors")
    up = loaded["model.layers.0.mlp.up_proj"]
    assert isinstance(up, PackedWeight)
    assert up.zeros is not None
    assert up.bias is not None
    plain = dict(source.plain())
    assert torch.equal(up.bias, plain["model.layers.0.mlp.up_proj.bias"])
    assert up.scales.dtype == torch.float16
    rest = {name for name in plain if "mlp" not in name}
    assert {name for name, value in loaded.items() if isinstance(value, torch.Tensor)} == rest
    assert all(torch.equal(loaded[name], plain[name]) for name in rest)
    assert sorted(seen) == sorted(["m.safetensors", *done.weights, *done.tensors])
    assert packed_info(tmp_path / "p.safetensors").sources == {
        "m.safetensors": sha256(tmp_path / "m.safetensors")
    }
    found = verify_packed(tmp_path / "p.safetensors", source)
    assert found.problems == []
    assert found.same_source
    differences = {
        name: float(
            (dequantize(loaded[name], torch.float32) - plain[f"{name}.weight"].float()).abs().max()
        )
        for name in done.weights
    }
    # Half a step of 8 bits over a range of about 6; of the two weights, the larger one.
    assert 0.005 < differences[found.largest_at] < 0.03
    assert found.largest_difference == differences[found.largest_at] == max(differences.values())
    assert len(set(differences.values())) == 2


@pytest.mark.parametrize(
    ("include", "exclude", "packed"),
    [
        (None, "down", ["model.layers.0.mlp.up_proj"]),
        ("up_proj$|lm_head", None, ["model.layers.0.mlp.up_proj", "lm_head"]),
        ("proj", "up|norm", ["model.layers.0.mlp.down_proj"]),
    ],
)
def test_include_and_exclude(
    tmp_path: Path, include: str | None, exclude: str | None, packed: list[str]
) -> None:
    source = load_checkpoint(float_checkpoint(tmp_path / "m.safetensors"))
    done = reorder_checkpoint(
        source, tmp_path / "p.safetensors", bits=4, include=include, exclude=exclude
    )
    assert sorted(done.weights) == sorted(packed)
    assert verify_packed(tmp_path / "p.safetensors", source).problems == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "give bits"),
        ({"bits": 4, "exclude": "."}, "there is no weight to pack"),
        ({"exclude": "."}, "there is no weight to pack$"),
        ({"bits": 5}, "bits is 5"),
        ({"bits": 4, "group_size": 48}, "group_size is 48"),
        ({"bits": 4, "include": "("}, "not a regular expression"),
    ],
)
def test_reorder_checkpoint_refuses(tmp_path: Path, options: dict[str, object], match: str) -> None:
    source = load_checkpoint(float_checkpoint(tmp_path / "m.safetensors"))
    with pytest.raises(ValueError, match=match):
        reorder_checkpoint(source, tmp_path / "p.safetensors", **options)
    assert not (tmp_path / "p.safetensors").exists()


def test_a_checkpoint_does_not_overwrite_itself(tmp_path: Path) -> None:
    path = float_checkpoint(tmp_path / "m.safetensors")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="itself"):
        reorder_checkpoint(load_checkpoint(path), path, bits=4)
    assert path.read_bytes() == before


@pytest.mark.parametrize("link", ["symbolic", "hard", "through a directory", "dangling"])
def test_writing_through_a_link_does_not_overwrite_the_checkpoint(
    tmp_path: Path, link: str
) -> None:
    path = float_checkpoint(tmp_path / "m.safetensors")
    before = path.read_bytes()
    out = tmp_path / "p.safetensors"
    if link == "symbolic":
        out.symlink_to(path)
    elif link == "hard":
        out.hardlink_to(path)
    elif link == "through a directory":
        (tmp_path / "d").symlink_to(tmp_path)
        out = tmp_path / "d" / path.name
    else:
        out.symlink_to(tmp_path / "new")
    if link == "dangling":
        reorder_checkpoint(load_checkpoint(path), out, bits=4)
        assert packed_info(tmp_path / "new").weights
    else:
        for dry_run in (False, True):
            with pytest.raises(ValueError, match="is a file of the checkpoint itself"):
                reorder_checkpoint(load_checkpoint(path), out, bits=4, dry_run=dry_run)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "bias",
    [torch.zeros(71), torch.zeros(69), torch.zeros(70, 1), torch.zeros(70, dtype=torch.int32)],
)
def test_a_bias_that_does_not_fit_its_weight_is_named(tmp_path: Path, bias: torch.Tensor) -> None:
    path = float_checkpoint(tmp_path / "m.safetensors", **{f"{UP}.bias": bias})
    with pytest.raises(CheckpointError, match=rf"tensor '{UP}\.bias' cannot keep its name"):
        reorder_checkpoint(load_checkpoint(path), tmp_path / "p.safetensors", bits=4)
    assert not (tmp_path / "p.safetensors").exists()
    # It is not the weight's: with the weight left as it is, so is the bias.
    source = load_checkpoint(path)
    reorder_checkpoint(source, tmp_path / "p.safetensors", bits=4, exclude="up_proj")
    assert torch.equal(load_packed(tmp_path / "p.safetensors")[f"{UP}.bias"], bias)
    assert verify_packed(tmp_path / "p.safetensors", source).problems == []


def test_matrices_without_elements_stay_as_they_are(tmp_path: Path) -> None:
    empty = {
        "a.weight": torch.zeros(0, 32),
        "b.weight": torch.zeros(4, 0),
        "c.weight": torch.zeros(4, 0, 3),
    }
    source = load_checkpoint(float_checkpoint(tmp_path / "m.safetensors", **empty))
    for include in (None, "."):
        done = reorder_checkpoint(source, tmp_path / "p.safetensors", bits=4, include=include)
        assert not empty.keys() & {f"{name}.weight" for name in done.weights}
        loaded = load_packed(tmp_path / "p.safetensors")
        assert all(loaded[name].shape == value.shape for name, value in empty.items())
        assert verify_packed(tmp_path / "p.safetensors", source).problems == []


def test_a_weight_that_cannot_be_quantised_is_named(tmp_path: Path) -> None:
    bad = torch.zeros(4, 32)
    bad[2, 3] = torch.nan
    path = float_checkpoint(tmp_path / "m.safetensors", **{"bad.weight": bad})
    (tmp_path / "p.safetensors").write_bytes(b"old")
    with pytest.raises(CheckpointError, match=r"tensor 'bad\.weight'.*NaN"):
        reorder_checkpoint(load_checkpoint(path), tmp_path / "p.safetensors", bits=4)
    assert (tmp_path / "p.safetensors").read_bytes() == b"old"


def test_names_that_clash_in_the_packed_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a.weight": torch.zeros(4, 32), "a.scales": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match=r"tensor 'a\.scales' cannot keep its name"):
        reorder_checkpoint(load_checkpoint(path), tmp_path / "p.safetensors", bits=4)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head",
        "model.embed_tokens",
        "transformer.wte",
        "a.norm1",
        "h.0.ln_1",
        "shared",
        "output",
        "token_embd",
    ],
)
def test_names_that_are_not_linear_layers(name: str) -> None:
    import re

    assert re.search(DEFAULT_EXCLUDE, name)
    for linear in (
        "attention.output.dense",
        "mlp.shared_experts.up_proj",
        "model.layers.0.self_attn.q_proj",
    ):
        assert not re.search(DEFAULT_EXCLUDE, linear)


def test_the_first_error_leaves_the_other_tensors_alone() -> None:
    started = []

    def run(item: int) -> None:
        started.append(item)
        if item == 0:
            raise CheckpointError("m.safetensors", "broken")
        time.sleep(0.05)

    for jobs in (1, 2):
        started.clear()
        with pytest.raises(CheckpointError, match="broken"):
            packing._each(run, range(40), jobs, lambda item, result: None)
        assert len(started) < 20


# ---- verify


@pytest.fixture
def packed_pair(tmp_path: Path) -> tuple[Path, Path]:
    source = float_checkpoint(tmp_path / "m.safetensors")
    packed = tmp_path / "p.safetensors"
    reorder_checkpoint(load_checkpoint(source), packed, bits=4, symmetric=False)
    return source, packed


def metadata_of(path: Path) -> dict[str, str]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    metadata: dict[str, str] = json.loads(raw[8 : 8 + length])["__metadata__"]
    return metadata


def rewrite(path: Path, name: str, position: int | None) -> None:
    """Flip a bit of byte ``position`` of a tensor, or drop the tensor."""
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    metadata = metadata_of(path)
    metadata["layout_version"] = "1"  # without checksums, what else verify compares has to find it
    if position is None:
        del tensors[name]
    else:
        flat = tensors[name].reshape(-1).view(torch.uint8)
        flat[position] ^= 1
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("name", "position", "problem"),
    [
        (f"{UP}.codes", 0, f"{UP}: codes differs"),
        (f"{UP}.scales", 1, f"{UP}: scales differs"),
        (f"{UP}.zeros", 0, f"{UP}: zeros differs"),
        (f"{UP}.bias", 3, f"{UP}: bias differs"),
        ("lm_head.weight", 5, "lm_head.weight: differs"),
        ("lm_head.weight", None, "lm_head.weight: in the checkpoint"),
    ],
)
def test_verify_sees_one_wrong_bit(
    packed_pair: tuple[Path, Path], name: str, position: int | None, problem: str
) -> None:
    source, packed = packed_pair
    rewrite(packed, name, position)
    found = verify_packed(packed, load_checkpoint(source))
    assert [p for p in found.problems if p.startswith(problem)]
    assert len(found.problems) <= 2  # a code of the padding shows twice


def test_verify_sees_padding(packed_pair: tuple[Path, Path]) -> None:
    _, packed = packed_pair
    assert verify_packed(packed).problems == []
    rewrite(packed, f"{UP}.codes", -1)  # rows 70 to 127 are padding
    assert verify_packed(packed).problems == [f"{UP}: codes has padding that is not zero"]


def test_diff_sees_padding(packed_pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, packed = packed_pair
    other = tmp_path / "other.safetensors"
    other.write_bytes(packed.read_bytes())
    assert diff_packed(packed, other).changed == {}
    rewrite(other, f"{UP}.codes", -1)
    for pair in ((packed, other), (other, packed)):
        assert diff_packed(*pair).changed == {UP: ["the padding differs"]}


def test_diff_of_weights_with_one_group_a_row(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for path in paths:
        co.save_packed(path, {"w": co.reorder(co.quantize(torch.randn(64, 128), group_size=-1))})
    changed = diff_packed(*paths).changed
    assert list(changed) == ["w"]
    assert any(text.startswith("scales: 64 of 64 differ") for text in changed["w"])


def test_verify_sees_what_is_too_much(packed_pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, packed = packed_pair
    other = tmp_path / "other.safetensors"
    tensors = load_file(source)
    del tensors["positions"]
    save_file(tensors, other)
    found = verify_packed(packed, load_checkpoint(other))
    assert found.problems == ["positions: not in the checkpoint"]
    assert found.same_source is False


def test_a_difference_that_is_nan_stays_the_largest(
    packed_pair: tuple[Path, Path],
) -> None:
    """Names in order: down_proj before up_proj."""
    source, packed = packed_pair
    checkpoint = load_checkpoint(source)
    down, whole = "model.layers.0.mlp.down_proj", verify_packed(packed, checkpoint)
    assert list(packed_info(packed).weights) == [down, UP]
    rewrite(packed, f"{UP}.codes", 0)
    # Copies, as older safetensors write into the file that the loaded tensors are a map of.
    facts, tensors = (
        metadata_of(packed),
        {name: value.clone() for name, value in load_file(packed).items()},
    )
    for damaged, largest_at in (([UP], UP), ([down], down), ([down, UP], down)):
        changed = {name: value.clone() for name, value in tensors.items()}
        for name in damaged:
            changed[f"{name}.scales"][0, 0] = torch.nan
        save_file(changed, packed, facts)
        found = verify_packed(packed, checkpoint)
        assert found.largest_difference is not None
        assert math.isnan(found.largest_difference)
        assert found.largest_at == largest_at
        assert [p for p in found.problems if p.endswith("is nan")] == [
            f"{name}: scales[0, 0] is nan" for name in damaged
        ]
    assert whole.largest_difference is not None
    assert not math.isnan(whole.largest_difference)
