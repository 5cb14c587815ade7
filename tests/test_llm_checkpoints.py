"""AWQ, GPTQ and compressed-tensors directories, against golden words, plain loops and the formats' own writers."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

import cutlass_ops
from cutlass_ops import CheckpointError, QuantizedWeight, cli, load_checkpoint
from cutlass_ops.checkpoints import Checkpoint
from cutlass_ops.reference import dequantize_weight
from cutlass_ops.weights.reorder import reorder

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def randint(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Integers ``[R, C]`` to int32 words along the last axis, each row one long run of bits."""
    rows, columns = codes.shape
    count = -(-columns * bits // 32)
    places = range(columns) if order is None else [at // 8 * 8 + order[at % 8] for at in range(columns)]
    runs = [sum(row[place] << (bits * at) for at, place in enumerate(places)) for row in codes.tolist()]
    out = [[run >> (32 * word) & 0xFFFFFFFF for word in range(count)] for run in runs]
    return torch.tensor(out, dtype=torch.int64).view(rows, count).to(torch.int32)


def save(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None, name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / name).write_text(json.dumps({"quantization_config": config} if name == "config.json" else config))
    return folder


def expected(codes: Tensor, scales: Tensor, zeros: Tensor | int, group: Tensor | int) -> Tensor:
    """Value by value: ``[N, K]`` codes, ``[N, G]`` scales and zero points, the group of each k or their size."""
    index = torch.arange(codes.shape[1]) // group if isinstance(group, int) else group
    z = zeros[:, index] if isinstance(zeros, Tensor) else zeros
    return (codes - z).float() * scales.float()[:, index]


def check(checkpoint: Checkpoint, name: str, values: Tensor) -> QuantizedWeight:
    """The weight, whose values are these bit for bit, by the reference and by the entry, and which is as announced."""
    weight, entry = checkpoint[name], checkpoint.entries[name]
    assert torch.equal(dequantize_weight(weight, torch.float32), values)
    assert torch.equal(entry.values(), values)
    assert entry.shape == weight.shape == tuple(values.shape)
    assert entry.quantized is not None
    assert (entry.quantized.bits, entry.quantized.group_size) == (weight.bits, weight.group_size)
    parts = ("scales", "zeros", "offsets", "bias", "perm", "book")
    assert dict(entry.quantized.dtypes) == {p: getattr(weight, p).dtype for p in parts if getattr(weight, p) is not None}
    unpacked = reorder(weight).unpack()
    assert torch.equal(unpacked.codes, weight.codes)
    assert torch.equal(unpacked.scales, weight.scales)
    return weight


# ---- AWQ


def awq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    return {
        "m.qweight": words(codes.t(), 4, AWQ),
        "m.qzeros": words(zeros.t(), 4, AWQ),
        "m.scales": scales.t(),
        "norm.weight": torch.ones(3),
    }


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def test_awq_golden_word(tmp_path: Path) -> None:
    tensors = {
        "m.qweight": torch.tensor([[0x75316420]], dtype=torch.int32),
        "m.qzeros": torch.tensor([[0x75316420]], dtype=torch.int32),
        "m.scales": torch.ones(1, 8, dtype=torch.float16),
    }
    weight = load_checkpoint(save(tmp_path, tensors, AWQ_CONFIG | {"group_size": -1}))["m"]
    assert weight.codes.t().tolist() == [list(range(8))]
    assert weight.zeros is not None
    assert weight.zeros.t().tolist() == [list(range(8))]  # 0 among them, as it is


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("k", "size"), [(64, 32), (128, 64), (256, 128), (96, -1), (40, 32)])
def test_awq(tmp_path: Path, k: int, size: int, dtype: torch.dtype) -> None:
    n, groups = 24, -(-k // size) if size > 0 else 1
    codes, zeros, scales = randint(16, n, k), randint(16, n, groups, seed=2), randn(n, groups).to(dtype)
    zeros[:, 0] = 0
    tensors = awq(codes, zeros, scales) | {"m.bias": randn(n).half()}
    for config, name in (
        (AWQ_CONFIG | {"group_size": size}, "config.json"),
        ({"zero_point": True, "q_group_size": size, "w_bit": 4, "version": "GEMM"}, "quant_config.json"),
    ):
        checkpoint = load_checkpoint(save(tmp_path / name, tensors, config, name))
        assert checkpoint.dialect == "awq"
        assert list(checkpoint) == ["m"]
        assert list(checkpoint.others) == ["norm.weight"]
        weight = check(checkpoint, "m", expected(codes, scales, zeros, size if size > 0 else k))
        assert weight.bias is not None
        assert torch.equal(weight.bias, tensors["m.bias"])
        assert checkpoint.entries["m"].nbytes == sum(t.nbytes for t in tensors.values()) - 12


@pytest.mark.parametrize(
    ("k", "size", "width"),
    # ceil(groups / 8) words, to a multiple of 1, 2, 4 for groups of 128, 64, 32.
    [(128, 128, 1), (1152, 128, 2), (128, 64, 2), (1088, 64, 4), (64, 32, 4), (1056, 32, 8), (64, -1, 2)],
)
def test_awq_gemv(tmp_path: Path, k: int, size: int, width: int) -> None:
    n, groups = 5, k // size if size > 0 else 1
    codes, zeros, scales = randint(16, n, k), randint(16, n, groups, seed=2), randn(n, groups).half()
    padding = (0, 8 * width - groups)
    tensors = {
        "m.qweight": words(codes, 4),
        "m.qzeros": words(torch.nn.functional.pad(zeros, padding, value=7), 4),  # what it holds is nobody's
        "m.scales": torch.nn.functional.pad(scales, padding, value=float("nan")),
    }
    config = AWQ_CONFIG | {"version": "gemv", "group_size": size}
    checkpoint = load_checkpoint(save(tmp_path, tensors, config))
    check(checkpoint, "m", expected(codes, scales, zeros, size if size > 0 else k))


def autoawq(monkeypatch: pytest.MonkeyPatch, version: str) -> Any:
    """A layer of AutoAWQ's. Its package imports what this module of it does not need: it is passed by."""
    found = importlib.util.find_spec("awq")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the package autoawq")
    for name in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(found.submodule_search_locations[0], *name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, package)
    try:
        return importlib.import_module(f"awq.modules.linear.{version}")
    except ImportError as error:
        pytest.skip(f"autoawq's layer cannot be imported: {error}")


@pytest.mark.filterwarnings("ignore")  # autoawq's own: it is no longer kept up
@pytest.mark.parametrize("version", ["gemm", "gemv"])
@pytest.mark.parametrize(("k", "size"), [(256, 128), (128, 64), (96, 32)])
def test_awq_as_the_package_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, k: int, size: int) -> None:
    layers = autoawq(monkeypatch, version)
    n = 32
    codes, zeros, scales = randint(16, n, k), randint(16, n, k // size, seed=2), randn(n, k // size).half().abs() + 0.5
    linear = torch.nn.Linear(k, n)
    with torch.no_grad():
        linear.weight.copy_(expected(codes, scales, zeros, size))
    if version == "gemm":
        layer = layers.WQLinear_GEMM.from_linear(linear, 4, size, False, scales.t().contiguous(), zeros.t().contiguous())
    else:
        layer = layers.WQLinear_GEMV.from_linear(linear, 4, size, False, scales, zeros)
    config = AWQ_CONFIG | {"version": version, "group_size": size}
    checkpoint = load_checkpoint(save(tmp_path, {f"m.{name}": t for name, t in layer.state_dict().items()}, config))
    weight = check(checkpoint, "m", expected(codes, scales, zeros, size))
    assert torch.equal(weight.codes, codes.to(torch.uint8))
    assert weight.bias is not None
    assert torch.equal(weight.bias, linear.bias.detach().half())


def test_awq_without_a_config(tmp_path: Path) -> None:
    codes, zeros, scales = randint(16, 8, 64), randint(16, 8, 2), randn(8, 2).half()
    checkpoint = load_checkpoint(save(tmp_path, awq(codes, zeros, scales), None))
    assert checkpoint.dialect == "awq"
    check(checkpoint, "m", expected(codes, scales, zeros, 32))
    check(load_checkpoint(tmp_path / "model.safetensors"), "m", expected(codes, scales, zeros, 32))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bits": 3}, "AWQ with 3 bits"),
        ({"bits": "4"}, "bits is '4'"),
        ({"version": "marlin"}, "version is 'marlin'"),
        ({"version": "gemv"}, "not the shapes of gemv"),
        ({"version": {}}, "version is {}"),
        ({"group_size": 1.5}, "group_size is 1.5"),
        ({"group_size": 64}, r"is \[2, 8\] for \[8, 64\] codes in groups of 64"),
        ({"quant_method": "awk"}, "is quantised by 'awk'; known are awq"),
        ({"quant_method": []}, "is quantised by"),
    ],
)
def test_awq_settings_that_are_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    tensors = awq(randint(16, 8, 64), randint(16, 8, 2), randn(8, 2).half())
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(save(tmp_path, tensors, AWQ_CONFIG | change))


def test_groups_that_the_kernels_lack(tmp_path: Path) -> None:
    """Groups of 96 are groups of 32, three of which share a scale; groups of 16 are nothing."""
    codes, zeros, scales = randint(16, 8, 192), randint(16, 8, 2), randn(8, 2).half()
    checkpoint = load_checkpoint(save(tmp_path, awq(codes, zeros, scales), AWQ_CONFIG | {"group_size": 96}))
    weight = check(checkpoint, "m", expected(codes, scales, zeros, 96))
    assert (weight.group_size, weight.groups) == (32, 6)

    codes, zeros, scales = randint(16, 8, 32), randint(16, 8, 2), randn(8, 2).half()
    checkpoint = load_checkpoint(save(tmp_path, awq(codes, zeros, scales), AWQ_CONFIG | {"group_size": 16}))
    assert "groups of 16; sizes of 32, 64" in checkpoint.entries["m"].problem
    assert torch.equal(checkpoint.entries["m"].values(), expected(codes, scales, zeros, 16))
    with pytest.raises(CheckpointError, match="groups of 16"):
        checkpoint["m"]


# ---- GPTQ


def gptq_zeros(zeros: Tensor, bits: int, version: int) -> Tensor:
    """Zero points ``[N, G]`` as GPTQModel stores them: version 1 is one less in each code, subtracted from the word."""
    if bits == 3:
        return words((zeros.t() - (2 - version)) % 8, 3)
    packed = words(zeros.t(), bits).long()
    ones = sum(1 << at for at in range(0, 32, bits))
    return (packed - ones if version == 1 else packed).to(torch.int32)


def gptq(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, version: int) -> dict[str, Tensor]:
    return {
        "m.qweight": words(codes, bits).t(),
        "m.qzeros": gptq_zeros(zeros, bits, version),
        "m.scales": scales.t(),
    }


def gptq_config(**changes: Any) -> dict[str, Any]:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    return config | {"checkpoint_format": "gptq"} | changes


def test_gptq_golden_words(tmp_path: Path) -> None:
    tensors = {
        "m.qweight": torch.tensor([[0x76543210]] * 4, dtype=torch.int64).to(torch.int32).expand(4, 8),
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


def carried(folder: Path, word: int, **config: Any) -> Path:
    tensors = {
        "m.qweight": words(randint(16, 8, 32), 4).t(),
        "m.qzeros": torch.tensor([[word]], dtype=torch.int64).to(torch.int32),
        "m.scales": torch.ones(1, 8, dtype=torch.float16),
    }
    return save(folder, tensors, gptq_config(sym=False, **config))


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
    # By the user's word: with the carry, as GPTQModel would.
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
def test_a_zero_point_that_autogptq_wrote_over_others(tmp_path: Path, bits: int, place: int) -> None:
    """As AutoGPTQ packs: one less, as uint32, shifted and joined; codes that straddle words are masked."""
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
        assert (zeros[:, 0].long() - {2: 6, 3: 4, 4: 0, 8: 0}[bits]).tolist() == z


@pytest.mark.parametrize("stored", [7, 8])
@pytest.mark.parametrize("stated", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("sym", [True, None, False])
def test_gptq_metadata_that_lies(tmp_path: Path, stored: int, stated: str | None, sym: bool | None) -> None:
    """Stored zero points that are all 7 or all 8 are believed before the metadata, unless it says asymmetric."""
    tensors = gptq(randint(16, 8, 64), torch.full((8, 2), stored), randn(8, 2).half(), 4, 2)
    path = save(tmp_path, tensors, gptq_config(checkpoint_format=stated, sym=sym))
    by_metadata = stored + (stated != "gptq_v2")
    checkpoint = load_checkpoint(path)
    z = by_metadata if sym is False else 8
    check(checkpoint, "m", expected(randint(16, 8, 64), randn(8, 2).half(), z, 32))
    assert checkpoint["m"].symmetric == (z == 8)
    assert ("by their values" in checkpoint.metadata["zero_offset"]) == (by_metadata != z)
    for offset in (0, 1):  # what the user says comes first
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
    for row in (9, 10, 15, 20, 21, 30, 31):  # among the last of the words: a 0 there would be ambiguous
        zeros[row] = 2
    scales = randn(n, groups).half()
    config = gptq_config(bits=bits, sym=False, group_size=size, checkpoint_format=("gptq", "gptq_v2")[version - 1])
    for name in ("config.json", "quantize_config.json"):
        tensors = gptq(codes, zeros, scales, bits, version)
        held = config if name == "config.json" else {k: v for k, v in config.items() if k != "quant_method"}
        checkpoint = load_checkpoint(save(tmp_path / name, tensors, held, name))
        assert checkpoint.dialect == "gptq"
        weight = check(checkpoint, "m", expected(codes, scales, zeros, size if size > 0 else k))
        assert weight.bits == (8 if bits == 8 else 4)


def act_order(tmp_path: Path, index: Tensor, size: int, sym: bool = False) -> tuple[Checkpoint, Tensor]:
    k, groups = len(index), int(index.max()) + 1
    codes, zeros, scales = randint(16, 16, k), randint(16, 16, groups, seed=3), randn(16, groups).half()
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
    assert check(load_checkpoint(save(tmp_path, tensors, config)), "m", expected(codes, scales, 8, 64)).perm is None
    two = gptq(codes, torch.full((16, 2), 8), randn(16, 2).half(), 4, 2)
    with pytest.raises(CheckpointError, match=r"m\.g_idx': is missing; the config says desc_act"):
        load_checkpoint(save(tmp_path, two, {**config, "group_size": 32}))


def test_gptq_groups_of_other_lengths(tmp_path: Path) -> None:
    # 64, 32 and 96 inputs: groups of 32 say it.
    index = torch.tensor([0] * 64 + [1] * 32 + [2] * 96)[torch.randperm(192, generator=torch.Generator().manual_seed(4))]
    checkpoint, values = act_order(tmp_path, index, 64)
    assert check(checkpoint, "m", values).group_size == 32
    # 64 and 192 inputs: the size that is stated, if it serves.
    checkpoint, values = act_order(tmp_path, (torch.arange(256) >= 64).long(), 32)
    assert check(checkpoint, "m", values).group_size == 32
    checkpoint, values = act_order(tmp_path, (torch.arange(256) >= 64).long(), 128)
    assert check(checkpoint, "m", values).group_size == 64
    # 63 and 65 inputs: nothing does.
    checkpoint, values = act_order(tmp_path, (torch.arange(128) >= 63).long(), 64)
    assert "groups of inputs that are not multiples of 32" in checkpoint.entries["m"].problem
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
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "autoround_version": "0.9"}
    codes, scales = randint(16, 8, 64), randn(8, 2).half()
    extra = {"extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}, "packing_format": "auto_round:auto_gptq"}
    tensors = gptq(codes, torch.full((8, 2), 8), scales, 4, 1)
    checkpoint = load_checkpoint(save(tmp_path / "gptq", tensors, config | extra))
    assert check(checkpoint, "m", expected(codes, scales, 8, 32)).symmetric
    zeros = randint(16, 8, 2)
    for packing, offset in {"auto_round:auto_gptq": 1, "auto_round": 0, "auto_round:gptqmodel": 0}.items():
        tensors = gptq(codes, zeros, scales, 4, offset)
        checkpoint = load_checkpoint(save(tmp_path / "gptq", tensors, config | {"packing_format": packing, "sym": False}))
        check(checkpoint, "m", expected(codes, scales, zeros, 32))
    config["packing_format"] = "auto_round:auto_awq"
    checkpoint = load_checkpoint(save(tmp_path / "awq", awq(codes, zeros, scales), config))
    check(checkpoint, "m", expected(codes, scales, zeros, 32))
    config["packing_format"] = "auto_round:llm_compressor"
    with pytest.raises(CheckpointError, match="is quantised by 'auto-round' in the packing_format 'auto_round:llm_compressor'"):
        load_checkpoint(save(tmp_path / "other", awq(codes, zeros, scales), config))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; known are 'gptq', 'gptq_v2'"),
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
def test_gptq_tensors_that_are_refused(tmp_path: Path, tensors: dict[str, Tensor], match: str) -> None:
    honest = gptq(randint(16, 8, 64), torch.full((8, 2), 8), randn(8, 2).half(), 4, 1)
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(save(tmp_path, honest | tensors, gptq_config()))


def test_an_option_of_another_dialect(tmp_path: Path) -> None:
    path = save(tmp_path, awq(randint(16, 8, 64), randint(16, 8, 2), randn(8, 2).half()), AWQ_CONFIG)
    with pytest.raises(ValueError, match="the dialect 'awq' has no such option"):
        load_checkpoint(path, zero_offset=1)
    with pytest.raises(ValueError, match="zero_offset is 2; 'auto', 0 and 1 are accepted"):
        load_checkpoint(path, zero_offset=2)  # type: ignore[arg-type]


# ---- compressed-tensors


def ct_weights(**changes: Any) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | changes


def ct_config(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    config["config_groups"] = {f"group_{i}": {"targets": ["Linear"]} | group for i, group in enumerate(groups)}
    return config | changes


def test_compressed_tensors_golden_word(tmp_path: Path) -> None:
    """Codes -8 .. -1 are stored as 0 .. 7; K = 5 leaves the rest of the word to anything."""
    tensors = {
        "m.weight_packed": torch.tensor([[0x76543210]], dtype=torch.int32),
        "m.weight_shape": torch.tensor([1, 5]),
        "m.weight_scale": torch.full((1, 1), 0.5),
    }
    checkpoint = load_checkpoint(save(tmp_path, tensors, ct_config({"weights": ct_weights()})))
    assert checkpoint["m"].codes.tolist() == [[0, 1, 2, 3, 4]]
    assert dequantize_weight(checkpoint["m"], torch.float32).tolist() == [[-4.0, -3.5, -3.0, -2.5, -2.0]]
    assert checkpoint["m"].symmetric


def scheme(weights: dict[str, Any], **more: Any) -> Any:
    ct = import_or_skip("compressed_tensors.quantization")
    return ct.QuantizationScheme(targets=["Linear"], weights=ct.QuantizationArgs(**weights), **more)


def ct_write(kind: str, weight: Tensor, weights: dict[str, Any], dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of one module as the package compresses it, and the values that the package reads from them."""
    made = scheme(weights)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    n, k = weight.shape
    size = {"group": weights.get("group_size") or k, "channel": k, "tensor": k}[weights["strategy"]]
    blocks = torch.nn.functional.pad(weight, (0, -k % size)).view(n, -1, size)
    if weights["strategy"] == "tensor":
        blocks = weight.view(1, 1, -1)
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), made.weights)
    state = {"weight": weight.to(dtype), "weight_scale": scale.to(dtype), "weight_zero_point": zero.to(torch.int8)}
    if weights["strategy"] == "tensor":
        state = state | {name: state[name].view(1) for name in ("weight_scale", "weight_zero_point")}
    compressor = BaseCompressor.get_value_from_registry(kind)
    compressed = compressor.compress(state, made)
    values = compressor.decompress(dict(compressed), made)["weight"]
    return {f"m.{name}": value for name, value in compressed.items()}, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape", "weights"),
    [
        ("pack-quantized", (24, 128), ct_weights()),
        ("pack-quantized", (20, 192), ct_weights(group_size=64)),  # zero points of 20 rows do not fill their word
        ("pack-quantized", (5, 36), ct_weights(strategy="channel", group_size=None)),  # nor do codes of 36 columns
        ("pack-quantized", (8, 128), ct_weights(num_bits=8, group_size=128)),
        ("pack-quantized", (6, 70), ct_weights(num_bits=8, strategy="channel", group_size=None)),
        ("pack-quantized", (6, 100), ct_weights(num_bits=3, strategy="channel", group_size=None)),
        ("pack-quantized", (9, 96), ct_weights(num_bits=5)),
        ("pack-quantized", (8, 64), ct_weights(strategy="tensor", group_size=None)),
        ("int-quantized", (24, 72), ct_weights(num_bits=8, strategy="channel", group_size=None)),  # W8A8
        ("int-quantized", (8, 40), ct_weights(num_bits=8, strategy="tensor", group_size=None)),
        ("int-quantized", (16, 128), ct_weights(group_size=64)),  # W4A8
        ("int-quantized", (16, 96), ct_weights(strategy="channel", group_size=None)),
    ],
)
def test_compressed_tensors_as_the_package_writes_them(
    tmp_path: Path, kind: str, shape: tuple[int, int], weights: dict[str, Any], symmetric: bool, dtype: torch.dtype
) -> None:
    weights = weights | {"symmetric": symmetric}
    tensors, theirs = ct_write(kind, randn(*shape), weights, dtype)
    group = scheme(weights).model_dump(mode="json")  # as the package writes its config
    checkpoint = load_checkpoint(save(tmp_path, tensors, ct_config(group, format=kind)))
    weight = checkpoint["m"]
    assert weight.shape == shape
    assert weight.bits == (4 if weights["num_bits"] <= 4 else 8)
    assert weight.symmetric == symmetric
    if dtype == torch.float32:
        check(checkpoint, "m", theirs)
    else:
        # The package rounds to its dtype at the end; in 16 bits it subtracts exactly too.
        check(checkpoint, "m", dequantize_weight(weight, torch.float32))
        assert torch.equal(dequantize_weight(weight, dtype), theirs)
    assert list(checkpoint.others) == []


MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}


def test_compressed_tensors_mxfp4_golden_bytes(tmp_path: Path) -> None:
    """Each E2M1 code, the first of a byte in the low nibble, times the scales 2^(126 - 127) and 2^(0 - 127)."""
    pairs = torch.tensor([[2 * i | (2 * i + 1) << 4 for i in range(8)] * 4], dtype=torch.uint8)
    tensors = {"m.weight_packed": pairs, "m.weight_scale": torch.tensor([[126, 0]], dtype=torch.uint8)}
    checkpoint = load_checkpoint(save(tmp_path, tensors, ct_config({"weights": MXFP4}, format="mxfp4-pack-quantized")))
    weight = checkpoint["m"]
    assert (weight.shape, weight.group_size, weight.scales.tolist()) == ((1, 64), 32, [[0.5, 2.0**-127]])
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    found = dequantize_weight(weight, torch.float32)
    assert torch.equal(found[0, :32], values.repeat(2) / 2)
    assert torch.equal(found[0, 32:], values.repeat(2) * 2.0**-127)
    packed = reorder(weight)
    assert torch.equal(cutlass_ops.dequantize(packed, torch.float32), found)


@pytest.mark.parametrize("shape", [(24, 128), (3, 96)])
def test_compressed_tensors_mxfp4_as_the_package_writes_it(tmp_path: Path, shape: tuple[int, int]) -> None:
    made = scheme(MXFP4)
    from compressed_tensors.compressors import BaseCompressor

    values = randn(*shape)
    mine = cutlass_ops.quantize(values, group_size=32, book="mxfp4")
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    compressed = compressor.compress({"weight": values, "weight_scale": mine.scales.float()}, made)
    theirs = compressor.decompress(dict(compressed), made)["weight"]
    tensors = {f"m.{name}": value for name, value in compressed.items()}
    config = ct_config(made.model_dump(mode="json"), format="mxfp4-pack-quantized")
    checkpoint = load_checkpoint(save(tmp_path, tensors, config))
    check(checkpoint, "m", theirs.float())
    assert torch.equal(checkpoint["m"].scales, mine.scales)
    # Their rounding to E2M1 is this package's.
    assert torch.equal(dequantize_weight(mine, torch.float32), theirs.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m.weight_scale": torch.full((4, 2), 255, dtype=torch.uint8)}, r"\[0, 0\] is 255, which is NaN"),
        ({"m.weight_scale": torch.ones(4, 1, dtype=torch.uint8)}, r"U8 \[4, 1\]; uint8 \[4, 2\] is expected"),
        ({"m.weight_scale": torch.ones(4, 2)}, "F32"),
        ({"m.weight_global_scale": torch.ones(1)}, "holds nvfp4, which is not supported"),
        ({"m.weight_zero_point": torch.ones(4, 2, dtype=torch.uint8)}, "zero points, which is not supported"),
    ],
)
def test_compressed_tensors_refuses_what_is_not_mxfp4(tmp_path: Path, change: dict[str, Tensor], message: str) -> None:
    tensors = {"m.weight_packed": randint(256, 4, 32).to(torch.uint8), "m.weight_scale": torch.ones(4, 2, dtype=torch.uint8)}
    config = ct_config({"weights": MXFP4}, format="mxfp4-pack-quantized")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(save(tmp_path, tensors | change, config))["m"]


def test_compressed_tensors_of_mixed_precision(tmp_path: Path) -> None:
    """Groups of targets by name, expression and class; the head is ignored and stays a float."""
    import_or_skip("compressed_tensors")
    kinds = {
        "model.layers.0.q": ("int-quantized", ct_weights(num_bits=8, strategy="channel", group_size=None)),
        "model.layers.0.k": ("int-quantized", ct_weights(strategy="channel", group_size=None)),
        "model.layers.1.k": ("int-quantized", ct_weights(strategy="channel", group_size=None)),
        "model.layers.0.up": ("pack-quantized", ct_weights(num_bits=8, group_size=64)),
        "model.layers.0.down": ("pack-quantized", ct_weights(symmetric=False)),
    }
    tensors: dict[str, Tensor] = {"lm_head.weight": randn(3, 8), "model.norm.weight": torch.ones(2)}
    theirs = {}
    for seed, (module, (kind, weights)) in enumerate(kinds.items()):
        written, theirs[module] = ct_write(kind, randn(16, 64, seed=seed), weights, torch.float32)
        tensors |= {name.replace("m.", f"{module}.", 1): value for name, value in written.items()}
    tensors["model.layers.0.q.input_scale"] = torch.ones(1)
    tensors["model.layers.0.q.input_zero_point"] = torch.zeros(1, dtype=torch.int8)
    config = ct_config(
        {"weights": kinds["model.layers.0.q"][1], "format": "int-quantized"},
        {"targets": [r"re:.*\.k$"], "weights": kinds["model.layers.0.k"][1], "format": "int-quantized"},
        {"targets": ["model.layers.0.up"], "weights": kinds["model.layers.0.up"][1], "format": "pack-quantized"},
        {"targets": ["re:.*down$"], "weights": kinds["model.layers.0.down"][1], "format": "pack-quantized"},
        format="mixed-precision",
    )
    checkpoint = load_checkpoint(save(tmp_path, tensors, config))
    assert checkpoint.dialect == "compressed-tensors"
    assert sorted(checkpoint) == sorted(kinds)
    for module, (_, weights) in kinds.items():
        assert check(checkpoint, module, theirs[module]).bits == weights["num_bits"]
    assert sorted(checkpoint.others) == ["lm_head.weight", "model.norm.weight"]


def test_compressed_tensors_as_a_whole_model_is_saved(tmp_path: Path) -> None:
    """A model that the package quantises and compresses itself, with its own config."""
    ct = import_or_skip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = torch.nn.Sequential()
    model.add_module("up", torch.nn.Linear(64, 32))
    model.add_module("down", torch.nn.Linear(32, 64, bias=False))
    model.add_module("lm_head", torch.nn.Linear(64, 8, bias=False))
    made = scheme(ct_weights(symmetric=False))
    config = QuantizationConfig(config_groups={"group_0": made}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in (model.up, model.down):
        module.weight_scale.data = randn(*module.weight_scale.shape).abs() / 10
        module.weight_zero_point.data = randint(16, *module.weight_zero_point.shape).sub(8).to(torch.int8)
    compressor = ct.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    settings = json.loads(json.dumps(compressor.quantization_config.model_dump(mode="json")))
    checkpoint = load_checkpoint(save(tmp_path, dict(model.state_dict()), settings))
    assert list(checkpoint.others) == ["lm_head.weight"]
    biases = {name: checkpoint[name].bias for name in checkpoint}
    assert biases["down"] is None
    assert torch.equal(biases["up"], model.up.bias)  # type: ignore[arg-type]
    compressor.decompress_model(model)
    for name in ("up", "down"):
        check(checkpoint, name, model.get_submodule(name).weight)


@pytest.mark.parametrize("sorted_groups", [True, False])
def test_compressed_tensors_g_idx(tmp_path: Path, sorted_groups: bool) -> None:
    n, k, size = 16, 128, 32
    codes, zeros, scales = randint(16, n, k), randint(16, n, 4, seed=3), randn(n, 4)
    index = torch.arange(k) // size
    if not sorted_groups:
        index = index[torch.randperm(k, generator=torch.Generator().manual_seed(5))]
    tensors = {
        "m.weight_packed": words(codes, 4),
        "m.weight_shape": torch.tensor([n, k]),
        "m.weight_scale": scales,
        "m.weight_zero_point": words(zeros.t(), 4).t(),
        "m.weight_g_idx": index.int(),
    }
    config = ct_config({"weights": ct_weights(actorder="group", symmetric=False)})
    checkpoint = load_checkpoint(save(tmp_path, tensors, config))
    weight = check(checkpoint, "m", expected(codes, scales, zeros, index))
    assert (weight.perm is None) == sorted_groups
    # What was never set is no order.
    tensors["m.weight_g_idx"] = torch.full((k,), -1, dtype=torch.int32)
    check(load_checkpoint(save(tmp_path, tensors, config)), "m", expected(codes, scales, zeros, size))
    tensors["m.weight_g_idx"] = torch.full((k,), 4, dtype=torch.int32)
    with pytest.raises(CheckpointError, match="holds groups 4 to 4; there are 4"):
        load_checkpoint(save(tmp_path, tensors, config))


def test_compressed_tensors_in_blocks(tmp_path: Path) -> None:
    """A scale for each 32 x 64 weights, the last of them short both ways."""
    n, k = 40, 160
    codes, scales = randint(256, n, k), randn(2, 3)
    tensors = {"m.weight": (codes - 128).to(torch.int8), "m.weight_scale": scales}
    weights = ct_weights(num_bits=8, strategy="block", block_structure=[32, 64], group_size=None)
    checkpoint = load_checkpoint(save(tmp_path, tensors, ct_config({"weights": weights}, format="int-quantized")))
    check(checkpoint, "m", expected(codes, scales.repeat_interleave(32, 0)[:n], 128, 64))
    # Blocks beyond the weight end with it.
    weights["block_structure"] = [1 << 40, 1 << 70]
    tensors["m.weight_scale"] = scales[:1, :1]
    checkpoint = load_checkpoint(save(tmp_path, tensors, ct_config({"weights": weights}, format="int-quantized")))
    check(checkpoint, "m", expected(codes, scales[:1, :1].expand(n, 1), 128, k))


def ct_module(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor | None] = {
        "m.weight_packed": words(randint(16, 8, 64), 4),
        "m.weight_shape": torch.tensor([8, 64]),
        "m.weight_scale": randn(8, 2),
    }
    return {name: value for name, value in {**tensors, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "config", "match"),
    [
        (ct_module(**{"m.weight_shape": None}), {}, "'m.weight_shape': is missing"),
        (ct_module(**{"m.weight_packed": None}), {}, "'m.weight_packed': is missing"),
        (ct_module(**{"m.weight_scale": None}), {}, "'m.weight_scale': is missing"),
        (ct_module(**{"m.weight_shape": torch.tensor([8, 1 << 40])}), {}, "fits no bits of its config"),
        (ct_module(**{"m.weight_shape": torch.tensor([9, 64])}), {}, r"is \[9, 64\]; the codes are \[8, 8\]"),
        (ct_module(**{"m.weight_shape": torch.tensor([8, -64])}), {}, r"is \[8, -64\]"),
        (ct_module(**{"m.weight_shape": torch.tensor([8, 72])}), {}, "fits no bits of its config"),
        (ct_module(**{"m.weight_scale": randn(8, 3)}), {}, "no known size of groups fits"),
        (ct_module(**{"m.weight_scale": randn(7, 2)}), {}, r"\[N, G\] or \[1\] is expected"),
        (ct_module(**{"m.weight_zero_point": torch.zeros(2, 2, dtype=torch.int32)}), {}, r"int32 \[1, 2\] is expected"),
        (ct_module(**{"m.weight_zero_point": torch.zeros(8, 2, dtype=torch.uint8)}), {}, r"int8 \[8, 2\] is expected"),
        (ct_module(), {"config_groups": []}, "config_groups is"),
        (ct_module(), {"config_groups": {"g": []}}, "'g' has no list of targets"),
        (ct_module(), {"config_groups": {"g": {"targets": [1]}}}, "'g' has no list of targets"),
        (ct_module(), {"config_groups": {"g": {"targets": [], "weights": {"num_bits": "4"}}}}, "num_bits is '4'"),
        (
            ct_module(),
            {"config_groups": {"g": {"targets": [], "weights": {"num_bits": 8}}}},
            r"fits no bits of its config \(8\)",
        ),
        (ct_module(), {"sparsity_config": {"format": "sparse-bitmask"}}, "sparse weights are not supported"),
        (ct_module(), {"transform_config": {"config_groups": {"R1": {}}}}, "rotated activations are not supported"),
        ({"m.weight": torch.full((4, 32), 8, dtype=torch.int8), "m.weight_scale": randn(4, 1)}, {}, "holds 8 to 8; 4 bits"),
    ],
)
def test_compressed_tensors_that_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], match: str
) -> None:
    path = save(tmp_path, tensors, ct_config({"weights": ct_weights()}) | config)
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(path)["m"]


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        (
            {"m.weight": torch.zeros(4, 4).to(torch.float8_e5m2), "m.weight_scale": randn(4, 1)},
            "holds F8_E5M2 beside a scale",
        ),
        (
            ct_module(**{"m.weight_packed": torch.zeros(8, 32, dtype=torch.uint8), "m.weight_global_scale": torch.ones(1)}),
            "holds nvfp4, which is not supported",
        ),
        (ct_module(**{"m.weight_packed": torch.zeros(2, 8, 8, dtype=torch.int32)}), "3 dimensions"),
        ({"m.weight": torch.zeros(2, 2, 2, dtype=torch.int8), "m.weight_scale": randn(1)}, r"is \[2, 2, 2\]"),
    ],
)
def test_compressed_tensors_without_a_kernel(tmp_path: Path, tensors: dict[str, Tensor], match: str) -> None:
    checkpoint = load_checkpoint(save(tmp_path, tensors, ct_config({"weights": ct_weights()})))
    assert list(checkpoint.entries) == ["m"]
    with pytest.raises(CheckpointError, match=match):
        checkpoint["m"]
    with pytest.raises(CheckpointError, match=match):
        checkpoint.entries["m"].values()


@pytest.mark.parametrize(
    "target",
    [
        "re:(a+)+$",
        "re:.*.*.*.*x",
        "re:" + "(?:a|aa)" * 38,
        "re:" + "a?" * 38 + "a" * 180 + "b",
        "re:(?x)(?:a|aa) *b",
        "re:" + "a" * 2000,
        "re:(",
        "re:[b-a]",
        "re:a{99999999999}",
    ],
)
def test_expressions_that_are_refused(tmp_path: Path, target: str) -> None:
    """A file's own expressions run on its own names; none of them may run for ever."""
    module = "a" * 200
    tensors = {f"{module}.weight": torch.zeros(4, 32, dtype=torch.int8), f"{module}.weight_scale": randn(4, 1)}
    config = ct_config({"targets": [target], "weights": ct_weights()}, {"weights": ct_weights(num_bits=8)})
    with pytest.raises(CheckpointError, match=r"the target"):
        load_checkpoint(save(tmp_path, tensors, config))


@pytest.mark.parametrize(
    "target",
    [
        r"re:model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj$",
        r"re:.*layers\.(0|1|2|3|4|5|6|7|8|9|10|11|12|13|14|15)\..*\.(q|k|v|o|gate|up|down)_proj.*",
        r"re:(?!.*lm_head).*\.layers\..*self_attn.*",
    ],
)
def test_expressions_as_models_have_them(tmp_path: Path, target: str) -> None:
    module = "model.layers.11.self_attn.q_proj"
    tensors = {f"{module}.weight": torch.full((4, 32), 7, dtype=torch.int8), f"{module}.weight_scale": randn(4, 1)}
    config = ct_config(
        {"targets": [target], "weights": ct_weights()}, {"targets": ["Linear"], "weights": ct_weights(num_bits=8)}
    )
    assert load_checkpoint(save(tmp_path, tensors, config))[module].bits == 4


# ---- through the command line


def run(*args: object) -> Any:
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def test_from_a_directory_to_a_verified_one(tmp_path: Path) -> None:
    """Act order, a bias and whatever is not quantised, from a GPTQ model to a packed one that is equal to it."""
    index = torch.arange(64).flip(0) // 32
    index[[0, 40]] = index[[40, 0]]
    tensors = gptq(randint(16, 32, 64), randint(16, 32, 2, seed=3), randn(32, 2).half(), 4, 2) | {"m.g_idx": index.int()}
    config = gptq_config(sym=False, desc_act=True, checkpoint_format="gptq_v2")
    source = save(tmp_path / "source", tensors | {"m.bias": randn(32).half(), "norm.weight": torch.ones(2)}, config)
    shown = json.loads(run("inspect", source, "--json").stdout)
    assert shown["kind"] == "gptq"
    assert shown["metadata"]["zero_offset"] == "0 in 1 modules"
    assert {tensor["name"] for tensor in shown["tensors"]} == {"m", "norm.weight"}
    done = run("reorder", source, "-o", tmp_path / "packed")
    assert done.exit_code == 0, done.output
    verified = run("verify", tmp_path / "packed", "--against", source)
    assert verified.exit_code == 0, verified.output


def test_zero_points_by_the_users_word(tmp_path: Path) -> None:
    source = carried(tmp_path / "source", 0xFFFFFFF2)
    assert "1 words of qzeros" in run("inspect", source, "--json").stdout
    refused = run("reorder", source, "-o", tmp_path / "packed")
    assert refused.exit_code == 2
    assert "--zero-offset 1" in refused.output.replace("\n", " ")
    assert "1 words of qzeros" not in run("inspect", source, "--zero-offset", 1, "--json").stdout
    done = run("reorder", source, "-o", tmp_path / "packed", "--zero-offset", 1)
    assert done.exit_code == 0, done.output
    verified = run("verify", tmp_path / "packed", "--against", source)
    assert verified.exit_code == 0, verified.output
