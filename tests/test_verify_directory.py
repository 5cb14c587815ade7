"""Model directories verified and compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_directories import DOWN0, OPTIONS, Q0, flip, listing, source
from safetensors.torch import load_file, save_file

from cutlass_ops import CheckpointError, PackedWeight, load_checkpoint, load_packed
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.packed_file import packed_info
from cutlass_ops.files.verify import diff_packed, verify_packed

__all__ = ["source"]


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
    assert (equal.same, equal.only_first, equal.only_second, equal.changed) == (
        len(info.names),
        [],
        [],
        {},
    )
    # Byte 0 holds rows 0 and 8 of column 0, row 0 in its low half; scales are fp16.
    for tensor, position, part, difference in (
        (f"{DOWN0}.codes", 0, "codes", r"codes: 1 of \d+ differ, the first at [0, 0]"),
        (f"{DOWN0}.scales", 3, "scales", "scales: 1 of"),
        (
            "model.layers.0.input_layernorm.weight",
            9,
            "",
            "values: 1 of 128 differ, the first at [4]",
        ),
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
    assert verify_packed(tmp_path / "of-1", checkpoint).problems == [
        "rank-0-of-1: holds rank 0 of 2"
    ]
    problems = [f"rank-{rank}-of-3: holds rank {rank % 2} of 2" for rank in range(3)]
    assert verify_packed(tmp_path / "of-3", checkpoint).problems == problems
    reorder_model(checkpoint, tmp_path / "whole", OPTIONS)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "rank-0-of-1").symlink_to(tmp_path / "whole")
    assert verify_packed(tmp_path / "none", checkpoint).problems == ["rank-0-of-1: holds no rank"]


def test_verify_sees_that_ranks_are_of_different_sources(source: Path, tmp_path: Path) -> None:
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
    assert (
        found.changed[Q0] == ["zeros only in the first"]
        or found.changed[Q0][-1] == "zeros only in the first"
    )
    assert "model.layers.0.self_attn.v_proj" in found.only_first
    assert "model.layers.0.self_attn.v_proj.weight" in found.only_second
    assert found.same == 3  # the embedding and the norms
    c = tmp_path / "c"
    reorder_model(checkpoint, c, Options(bits=8, group_size=32))
    assert diff_packed(b, c).changed[Q0] == ["bits is 4 and 8"]
