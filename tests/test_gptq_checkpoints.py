"""GPTQ directories against golden words, plain loops and the format's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llm_checkpoints import (
    AWQ_CONFIG,
    awq,
    carried,
    check,
    expected,
    gptq,
    gptq_config,
    gptq_zeros,
    randint,
    randn,
    save,
    words,
)
from torch import Tensor

from cutlass_ops import CheckpointError, load_checkpoint
from cutlass_ops.checkpoints import Checkpoint
from cutlass_ops.reference import dequantize_weight


def test_gptq_golden_words(tmp_path: Path) -> None:
    tensors = {
        "m.qweight": torch.tensor([[0x76543210]] * 4, dtype=torch.int64)
        .to(torch.int32)
        .expand(4, 8),
        "m.qzeros": torch.tensor([[0x77777777]], dtype=torch.int32),
        "m.scales": torch.ones(1, 8, dtype=torch.float16),
    }
    weight = load_checkpoint(save(tmp_path, tensors, gptq_config()))["m"]
    assert weight.codes.tolist() == [[*range(8)] * 4] * 8
    assert weight.symmetric
    tensors["m.qweight"] = torch.tensor([[0x03020100]], dtype=torch.int32).expand(8, 4)
    tensors["m.qzeros"] = torch.tensor([[0x7F7F7F7F]], dtype=torch.int32)
    tensors["m.scales"] = torch.ones(1, 4, dtype=torch.float16)
    weight = load_checkpoint(save(tmp_path, tensors, gptq_config(bits=8)))["m"]
    assert weight.codes.tolist() == [[*range(4)] * 8] * 4
    assert (weight.bits, weight.symmetric) == (8, True)


def test_gptq_zero_points_carry(tmp_path: Path) -> None:
    z = [3, 0, 5, 6, 7, 8, 9, 10]
    for word, version in ((0xA9876503, "gptq_v2"), (0x987653F2, "gptq"), (0x987653F2, None)):
        zeros = load_checkpoint(carried(tmp_path, word, checkpoint_format=version))["m"].zeros
        assert zeros is not None
        assert zeros[:, 0].tolist() == z
    assert gptq_zeros(torch.tensor(z)[:, None], 4, 1).tolist() == [[0x987653F2 - (1 << 32)]]


@pytest.mark.parametrize("word", [0xFFFFFFF2, 0xFFFFFFFF, 0xFF000000])
def test_zero_points_that_autogptq_destroyed_are_refused(tmp_path: Path, word: int) -> None:
    checkpoint = load_checkpoint(carried(tmp_path, word))
    assert "1 words of qzeros end in two codes of all ones" in checkpoint.entries["m"].problem
    with pytest.raises(CheckpointError, match="zero_offset=1"):
        checkpoint["m"]
    with pytest.raises(CheckpointError, match="zero_offset=1"):
        checkpoint.entries["m"].values()
    # As the user says: with the carry, as GPTQModel would.
    zeros = load_checkpoint(carried(tmp_path, word), zero_offset=1)["m"].zeros
    assert zeros is not None
    if word == 0xFFFFFFF2:
        assert zeros[:, 0].tolist() == [3, 0, 1, 1, 1, 1, 1, 1]
    # In version 2 these are zero points of 15.
    zeros = load_checkpoint(carried(tmp_path, word, checkpoint_format="gptq_v2"))["m"].zeros
    assert zeros is not None
    assert zeros[7, 0] == 15


@pytest.mark.parametrize("place", range(32))
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_point_that_autogptq_wrote_over_others(
    tmp_path: Path, bits: int, place: int
) -> None:
    """As AutoGPTQ packs: one less, as uint32, shifted and joined; codes that straddle
    words are masked.
    """
    z = [2] * 32
    z[place] = 0
    packed = [0] * bits
    harmed = False
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        stored = (z[i] - 1) & 0xFFFFFFFF
        packed[word] |= stored << shift & 0xFFFFFFFF
        if shift + bits > 32:
            packed[word + 1] |= (stored & ((1 << bits) - 1)) >> (32 - shift)
        elif i == place:
            harmed = shift + bits < 32
    tensors = {
        "m.qweight": words(randint(1 << bits, 32, 32), bits).t(),
        "m.qzeros": torch.tensor([packed], dtype=torch.int64).to(torch.int32),
        "m.scales": torch.ones(1, 32, dtype=torch.float16),
    }
    checkpoint = load_checkpoint(save(tmp_path, tensors, gptq_config(bits=bits, sym=False)))
    assert ("1 words of qzeros" in checkpoint.entries["m"].problem) == harmed
    if not harmed:
        zeros = checkpoint["m"].zeros
        assert zeros is not None
        assert (zeros[:, 0].long() - {2: 0, 3: 4, 4: 0, 8: 0}[bits]).tolist() == z


@pytest.mark.parametrize("stored", [7, 8])
@pytest.mark.parametrize("stated", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("sym", [True, None, False])
def test_gptq_metadata_that_contradicts_the_tensors(
    tmp_path: Path, stored: int, stated: str | None, sym: bool | None
) -> None:
    """Stored zero points that are all 7 or all 8 are believed before the metadata, unless it
    says asymmetric.
    """
    tensors = gptq(randint(16, 8, 64), torch.full((8, 2), stored), randn(8, 2).half(), 4, 2)
    path = save(tmp_path, tensors, gptq_config(checkpoint_format=stated, sym=sym))
    by_metadata = stored + (stated != "gptq_v2")
    checkpoint = load_checkpoint(path)
    z = by_metadata if sym is False else 8
    check(checkpoint, "m", expected(randint(16, 8, 64), randn(8, 2).half(), z, 32))
    assert checkpoint["m"].symmetric == (z == 8)
    assert ("by their values" in checkpoint.metadata["zero_offset"]) == (by_metadata != z)
    for offset in (0, 1):  # the user's option takes precedence
        weight = load_checkpoint(path, zero_offset=offset)["m"]
        assert torch.equal(
            dequantize_weight(weight, torch.float32),
            expected(randint(16, 8, 64), randn(8, 2).half(), stored + offset, 32),
        )


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [32, 128, -1])
def test_gptq_asymmetric(tmp_path: Path, bits: int, version: int, size: int) -> None:
    n, k = 32, 192
    groups = -(-k // size) if size > 0 else 1
    codes, zeros = randint(1 << bits, n, k), randint(1 << bits, n, groups, seed=3)
    # among the last of the words: a 0 there would be ambiguous
    for row in (9, 10, 15, 20, 21, 30, 31):
        zeros[row] = 2
    scales = randn(n, groups).half()
    config = gptq_config(
        bits=bits, sym=False, group_size=size, checkpoint_format=("gptq", "gptq_v2")[version - 1]
    )
    for name in ("config.json", "quantize_config.json"):
        tensors = gptq(codes, zeros, scales, bits, version)
        held = (
            config
            if name == "config.json"
            else {k: v for k, v in config.items() if k != "quant_method"}
        )
        checkpoint = load_checkpoint(save(tmp_path / name, tensors, held, name))
        assert checkpoint.dialect == "gptq"
        weight = check(checkpoint, "m", expected(codes, scales, zeros, size if size > 0 else k))
        assert weight.bits == {2: 2, 3: 4, 4: 4, 8: 8}[bits]


def act_order(
    tmp_path: Path, index: Tensor, size: int, sym: bool = False
) -> tuple[Checkpoint, Tensor]:
    k, groups = len(index), int(index.max()) + 1
    codes, zeros, scales = (
        randint(16, 16, k),
        randint(16, 16, groups, seed=3),
        randn(16, groups).half(),
    )
    if sym:
        zeros = torch.full((16, groups), 8)
    tensors = gptq(codes, zeros, scales, 4, 2) | {"m.g_idx": index.int()}
    config = gptq_config(sym=sym, desc_act=True, group_size=size, checkpoint_format="gptq_v2")
    return load_checkpoint(save(tmp_path, tensors, config)), expected(codes, scales, zeros, index)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(("k", "size"), [(128, 32), (256, 64), (320, 128), (192, 96), (576, 128)])
def test_gptq_act_order(tmp_path: Path, k: int, size: int, sym: bool) -> None:
    shuffled = torch.randperm(k, generator=torch.Generator().manual_seed(4))
    index = torch.empty(k, dtype=torch.int64)
    index[shuffled] = torch.arange(k) // size
    checkpoint, values = act_order(tmp_path, index, size, sym)
    weight = check(checkpoint, "m", values)
    assert weight.perm is not None
    # Stable: inside a group the inputs keep their order.
    assert weight.perm.tolist() == sorted(range(k), key=lambda i: (int(index[i]), i))


def test_gptq_order_of_whole_groups_needs_no_permutation(tmp_path: Path) -> None:
    index = torch.tensor([2, 0, 3, 1]).repeat_interleave(64)
    checkpoint, values = act_order(tmp_path, index, 64)
    assert check(checkpoint, "m", values).perm is None
    checkpoint, values = act_order(tmp_path, torch.arange(256) // 64, 64)
    assert check(checkpoint, "m", values).perm is None


@pytest.mark.parametrize("size", [64, -1])
def test_gptq_needs_an_index_of_more_than_one_group_only(tmp_path: Path, size: int) -> None:
    codes, scales = randint(16, 16, 64), randn(16, 1).half()
    config = gptq_config(sym=True, desc_act=True, group_size=size, checkpoint_format="gptq_v2")
    tensors = gptq(codes, torch.full((16, 1), 8), scales, 4, 2)
    assert (
        check(
            load_checkpoint(save(tmp_path, tensors, config)), "m", expected(codes, scales, 8, 64)
        ).perm
        is None
    )
    two = gptq(codes, torch.full((16, 2), 8), randn(16, 2).half(), 4, 2)
    with pytest.raises(CheckpointError, match=r"m\.g_idx': is missing; the config says desc_act"):
        load_checkpoint(save(tmp_path, two, {**config, "group_size": 32}))


def test_gptq_groups_of_other_lengths(tmp_path: Path) -> None:
    # 64, 32 and 96 inputs: groups of 32 say it.
    index = torch.tensor([0] * 64 + [1] * 32 + [2] * 96)[
        torch.randperm(192, generator=torch.Generator().manual_seed(4))
    ]
    checkpoint, values = act_order(tmp_path, index, 64)
    assert check(checkpoint, "m", values).group_size == 32
    # 64 and 192 inputs: the size that is stated, if it serves.
    checkpoint, values = act_order(tmp_path, (torch.arange(256) >= 64).long(), 32)
    assert check(checkpoint, "m", values).group_size == 32
    checkpoint, values = act_order(tmp_path, (torch.arange(256) >= 64).long(), 128)
    assert check(checkpoint, "m", values).group_size == 64
    # 63 and 65 inputs: nothing does.
    checkpoint, values = act_order(tmp_path, (torch.arange(128) >= 63).long(), 64)
    assert "groups of inputs that are not multiples of 16" in checkpoint.entries["m"].problem
    assert torch.equal(checkpoint.entries["m"].values(), values)


def test_gptq_dynamic_overrides(tmp_path: Path) -> None:
    """Bits and groups of each module are those of its tensors; a skipped module stays unchanged."""
    one = (randint(16, 32, 64), randint(16, 32, 2, seed=3) // 2, randn(32, 2).half())
    two = (randint(256, 32, 320), randint(256, 32, 3, seed=3) // 2, randn(32, 3).half())
    tensors = gptq(*one, 4, 1) | {k.replace("m.", "n."): v for k, v in gptq(*two, 8, 1).items()}
    tensors["o.weight"] = randn(4, 4).half()
    eight = {"bits": 8, "group_size": 128}
    for overrides in ({"dynamic": {"+:n.*": eight, "-:o": None}}, {"extra_config": {"n": eight}}):
        checkpoint = load_checkpoint(save(tmp_path, tensors, gptq_config(sym=False, **overrides)))
        assert check(checkpoint, "m", expected(*one[::2], one[1], 32)).bits == 4
        assert check(checkpoint, "n", expected(*two[::2], two[1], 128)).bits == 8
        assert list(checkpoint.others) == ["o.weight"]


def test_auto_round(tmp_path: Path) -> None:
    """AutoRound's names for the formats of others."""
    config = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "autoround_version": "0.9",
    }
    codes, scales = randint(16, 8, 64), randn(8, 2).half()
    extra = {
        "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
        "packing_format": "auto_round:auto_gptq",
    }
    tensors = gptq(codes, torch.full((8, 2), 8), scales, 4, 1)
    checkpoint = load_checkpoint(save(tmp_path / "gptq", tensors, config | extra))
    assert check(checkpoint, "m", expected(codes, scales, 8, 32)).symmetric
    zeros = randint(16, 8, 2)
    for packing, offset in {
        "auto_round:auto_gptq": 1,
        "auto_round": 0,
        "auto_round:gptqmodel": 0,
    }.items():
        tensors = gptq(codes, zeros, scales, 4, offset)
        checkpoint = load_checkpoint(
            save(tmp_path / "gptq", tensors, config | {"packing_format": packing, "sym": False})
        )
        check(checkpoint, "m", expected(codes, scales, zeros, 32))
    config["packing_format"] = "auto_round:auto_awq"
    checkpoint = load_checkpoint(save(tmp_path / "awq", awq(codes, zeros, scales), config))
    check(checkpoint, "m", expected(codes, scales, zeros, 32))
    config["packing_format"] = "auto_round:llm_compressor"
    with pytest.raises(
        CheckpointError,
        match="is quantised by 'auto-round' in the packing_format 'auto_round:llm_compressor'",
    ):
        load_checkpoint(save(tmp_path / "other", awq(codes, zeros, scales), config))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"checkpoint_format": "marlin"},
            "checkpoint_format is 'marlin'; known are 'gptq', 'gptq_v2'",
        ),
        ({"checkpoint_format": ["gptq"]}, "checkpoint_format is"),
        ({"sym": 1}, "sym is 1"),
        ({"bits": 4.0}, "bits is 4.0"),
        ({"dynamic": [1]}, "dynamic is"),
        ({"dynamic": {"m": 3}}, "dynamic has 3 for 'm'"),
    ],
)
def test_gptq_settings_that_are_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    tensors = gptq(randint(16, 8, 64), torch.full((8, 2), 8), randn(8, 2).half(), 4, 1)
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(save(tmp_path, tensors, gptq_config(**change)))


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"m.qzeros": torch.zeros(2, 2, dtype=torch.int32)}, "do not fit each other"),
        ({"m.qweight": torch.zeros(8, 9, dtype=torch.int32)}, "do not fit each other"),
        ({"m.qweight": torch.zeros(8, 8)}, r"F32 \[8, 8\]; int32 is expected"),
        ({"m.scales": torch.zeros(2, 8, dtype=torch.int32)}, "float16 or bfloat16 or float32"),
        ({"m.g_idx": torch.full((64,), 2, dtype=torch.int32)}, "holds groups 2 to 2; there are 2"),
        ({"m.g_idx": torch.full((64,), -1, dtype=torch.int32)}, "holds groups -1 to -1"),
        ({"m.g_idx": torch.zeros(64)}, "int32 or int64"),
        ({"m.g_idx": torch.zeros(40, dtype=torch.int32)}, "do not fit each other"),
        ({"n.qweight": torch.zeros(8, 8, dtype=torch.int32)}, r"'n.qzeros': is missing"),
        ({"n.qzeros": torch.zeros(8, 8, dtype=torch.int32)}, r"'n.qweight': is missing"),
    ],
)
def test_gptq_tensors_that_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], match: str
) -> None:
    honest = gptq(randint(16, 8, 64), torch.full((8, 2), 8), randn(8, 2).half(), 4, 1)
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(save(tmp_path, honest | tensors, gptq_config()))


def test_an_option_of_another_dialect(tmp_path: Path) -> None:
    path = save(
        tmp_path, awq(randint(16, 8, 64), randint(16, 8, 2), randn(8, 2).half()), AWQ_CONFIG
    )
    with pytest.raises(ValueError, match="the dialect 'awq' has no such option"):
        load_checkpoint(path, zero_offset=1)
    with pytest.raises(ValueError, match="zero_offset is 2; 'auto', 0 and 1 are accepted"):
        load_checkpoint(path, zero_offset=2)
