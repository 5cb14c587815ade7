"""GGUF models that are split into several files: any part, or their directory, opens the whole
model.
"""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from imports import import_or_skip

import cutlass_ops as co
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.verify import verify_packed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import_or_skip("transformers")

SIZE, WORDS = 64, 96
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
TENSORS = {"token_embd": (WORDS, SIZE), "output": (WORDS, SIZE), "output_norm": (SIZE,),
           "blk.0.attn_norm": (SIZE,),
           "blk.0.ffn_norm": (SIZE,),
           **{f"blk.0.{name}": (SIZE, SIZE) for name in MATRICES}}  # fmt: skip


def write(path: Path, part: int = 0, parts: int = 1, **keys: Any) -> Path:
    """One part of a llama of one layer: every ``parts``-th tensor."""
    writer = gguf.GGUFWriter(str(path), "llama")
    if part == 0:
        writer.add_context_length(128)
        writer.add_embedding_length(SIZE)
        writer.add_block_count(1)
        writer.add_feed_forward_length(SIZE)
        writer.add_head_count(4)
        writer.add_head_count_kv(4)
        writer.add_layer_norm_rms_eps(1e-5)
    stated = {"no": part, "count": parts, "tensors.count": len(TENSORS)} | keys
    if parts > 1:
        for name, value in stated.items():
            writer.add_uint32(f"split.{name}", value)
    for name, shape in list(TENSORS.items())[part::parts]:
        values = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) == 2 else None
        writer.add_tensor(
            f"{name}.weight",
            values if kind is None else gguf.quants.quantize(values, kind),
            raw_dtype=kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split(folder: Path, parts: int = 3) -> list[Path]:
    return [
        write(folder / f"m-{part + 1:05}-of-{parts:05}.gguf", part, parts) for part in range(parts)
    ]


def test_any_part_and_the_directory_are_the_whole_model(tmp_path: Path) -> None:
    (tmp_path / "split").mkdir()
    parts = split(tmp_path / "split")
    whole = co.load_checkpoint(write(tmp_path / "whole.gguf"))
    for path in (*parts, tmp_path / "split"):
        read = co.load_checkpoint(path)
        assert read.files == tuple(parts)
        assert read.config == whole.config
        assert read.entries.keys() == whole.entries.keys()
        assert all(
            torch.equal(read.entries[name].values(), whole.entries[name].values())
            for name in read.entries
        )


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
def test_a_split_model_is_packed_verified_and_loaded(tmp_path: Path) -> None:
    (tmp_path / "split").mkdir()
    split(tmp_path / "split")
    ids = torch.arange(8)[None]
    expected = co.load_model(write(tmp_path / "whole.gguf"), dtype=torch.float32)(ids).logits
    assert torch.equal(co.load_model(tmp_path / "split", dtype=torch.float32)(ids).logits, expected)
    checkpoint = co.load_checkpoint(tmp_path / "split")
    reorder_model(
        replace(checkpoint, config={**checkpoint.config, "dtype": "float32"}), tmp_path / "packed"
    )
    assert torch.equal(
        co.load_model(tmp_path / "packed", dtype=torch.float32)(ids).logits, expected
    )
    found = verify_packed(tmp_path / "packed", co.load_checkpoint(tmp_path / "split"))
    assert found.problems == []
    assert found.same_source is True


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    first, second, third = split(tmp_path)
    second.unlink()
    for path in (first, third, tmp_path):
        with pytest.raises(
            co.CheckpointError,
            match=r"one of 3 parts of a model; beside it there is no m-00002-of-00003\.gguf",
        ):
            co.load_checkpoint(path)


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    first, second, _ = split(tmp_path)
    with pytest.raises(
        co.CheckpointError, match=r"found by their names: NAME-00001-of-00003\.gguf"
    ):
        co.load_checkpoint(shutil.copy(first, tmp_path / "model.gguf"))
    shutil.copy(first, second)
    with pytest.raises(
        co.CheckpointError,
        match=r"m-00002-of-00003\.gguf: keys split\.no and split\.count are 0 and 3; .* 1 and 3",
    ):
        co.load_checkpoint(first)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"tensors.count": 13}, r"split\.tensors\.count is 13; the 2 parts have 12 tensors"),
        ({"count": 0}, r"split\.count is 0; a count of at least 1"),
        ({"count": 4_000_000_000}, "found by their names"),
    ],
)
def test_keys_that_contradict_the_parts_are_refused(
    tmp_path: Path, keys: dict[str, int], match: str
) -> None:
    write(tmp_path / "m-00002-of-00002.gguf", 1, 2)
    with pytest.raises(co.CheckpointError, match=match):
        co.load_checkpoint(write(tmp_path / "m-00001-of-00002.gguf", 0, 2, **keys))


def test_a_directory_of_several_models_needs_a_name(tmp_path: Path) -> None:
    split(tmp_path, 2)
    write(tmp_path / "other.gguf")
    with pytest.raises(
        co.CheckpointError,
        match=r"holds 2 GGUF models; name one of them: m-00001-of-00002\.gguf, other\.gguf",
    ):
        co.load_checkpoint(tmp_path)
