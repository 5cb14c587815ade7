"""Packed weights and the files that hold them: exact, complete or absent, and bounded in memory."""

from __future__ import annotations

import json
import math
import os
import signal
import stat
import struct
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cutlass_ops import (
    CheckpointError,
    PackedWeight,
    QuantizedWeight,
    dequantize,
    load_packed,
    mixed_gemm,
    reorder,
    save_packed,
)
from cutlass_ops.checkpoints import load_checkpoint
from cutlass_ops.checkpoints.safetensors_files import stream_safetensors
from cutlass_ops.files import packing
from cutlass_ops.files.conversion_plan import DEFAULT_EXCLUDE, sha256
from cutlass_ops.files.packed_file import is_packed, packed_info
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import diff_packed, verify_packed
from cutlass_ops.weights import formats

PARTS = ("codes", "scales", "zeros", "offsets", "bias", "perm")


def random_weight(
    n: int,
    k: int,
    bits: int = 4,
    group_size: int = 32,
    kind: str = "symmetric",
    dtype: torch.dtype = torch.float16,
    extras: bool = False,
    seed: int = 0,
) -> QuantizedWeight:
    random = torch.Generator().manual_seed(seed)
    groups = formats.group_count(k, group_size)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 1 << bits, shape, generator=random, dtype=torch.uint8)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    return QuantizedWeight(
        codes=codes(n, k),
        scales=floats(n, groups),
        zeros=codes(n, groups) if kind == "zeros" else None,
        offsets=floats(n, groups).float() if kind == "offsets" else None,
        bits=bits,
        group_size=group_size,
        bias=floats(n) if extras else None,
        perm=torch.randperm(k, generator=random) if extras else None,
    )


def assert_same(a: QuantizedWeight | PackedWeight, b: QuantizedWeight | PackedWeight) -> None:
    assert a.shape == b.shape
    assert (a.bits, a.group_size) == (b.bits, b.group_size)
    for part in PARTS:
        x, y = getattr(a, part), getattr(b, part)
        assert (x is None) == (y is None), part
        if x is not None:
            assert x.dtype == y.dtype, part
            assert torch.equal(x, y), part


# ---- reorder


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 200),
    k=st.integers(1, 400),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([32, 64, 128, 256, -1]),
    kind=st.sampled_from(["symmetric", "zeros", "offsets"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    extras=st.booleans(),
)
def test_unpack_undoes_reorder(n: int, k: int, bits: int, group_size: int, kind: str, dtype: torch.dtype, extras: bool) -> None:
    weight = random_weight(n, k, bits, group_size, kind, dtype, extras)
    assert_same(reorder(weight).unpack(), weight)


def test_group_vectors_stand_where_lanes_read_them() -> None:
    n, k = 70, 130  # two row panels and two K tiles, both short; groups of 64: 3 of 4
    weight = random_weight(n, k, group_size=64, kind="zeros")
    packed = reorder(weight)
    assert packed.scales.shape == (4, 128)
    assert packed.zeros is not None
    assert packed.zeros.dtype == torch.int8
    seen = torch.zeros(4, 128, dtype=torch.bool)
    for row in range(n):
        panel, i, h, g = row // 64, row % 64 // 16, row % 16 // 8, row % 8
        position = 64 * panel + 8 * g + 2 * i + h
        for group in range(3):
            seen[group, position] = True
            assert packed.scales[group, position] == weight.scales[row, group]
            assert weight.zeros is not None
            assert int(packed.zeros[group, position]) == int(weight.zeros[row, group]) - 8
    assert not packed.scales[~seen].any()
    assert not packed.zeros[~seen].any()


def test_zero_points_of_8_bits_stay_in_int8() -> None:
    codes = torch.zeros(2, 32, dtype=torch.uint8)
    weight = QuantizedWeight(
        codes, torch.ones(2, 1), zeros=torch.tensor([[0], [255]], dtype=torch.uint8), bits=8, group_size=32
    )
    packed = reorder(weight)
    assert packed.zeros is not None
    assert (int(packed.zeros[0, 0]), int(packed.zeros[0, 8])) == (-128, 127)


def test_reorder_takes_views() -> None:
    wide = random_weight(40, 96)
    view = QuantizedWeight(wide.codes[::2, 32:], wide.scales[::2, 1:], group_size=32)
    copy = QuantizedWeight(wide.codes[::2, 32:].clone(), wide.scales[::2, 1:].clone(), group_size=32)
    assert_same(reorder(view), reorder(copy))


def test_reorder_refuses_other_things() -> None:
    with pytest.raises(TypeError, match="weight is a Tensor"):
        reorder(torch.zeros(4, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_packed_as_one_part_by_slicing(bits: int, kind: str) -> None:
    rows = [70, 1, 129, 64]  # no part but the first starts where a row panel does
    parts = [random_weight(n, 200, bits, 64, kind, extras=True, seed=n) for n in rows]
    parts = [replace(part, perm=parts[0].perm) for part in parts]
    packed = reorder(parts)
    assert packed.shape == (sum(rows), 200)
    start = 0
    whole = packed.unpack()
    for part in parts:
        here = slice(start, start + part.n)
        cut = {name: getattr(whole, name)[here] for name in PARTS if name != "perm" and getattr(whole, name) is not None}
        assert_same(replace(whole, **cut), part)
        start += part.n
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    for act_quant in ("none", "block"):
        found = mixed_gemm(x, packed, act_quant=act_quant).split(rows, dim=-1)
        for y, part in zip(found, parts, strict=True):
            expected = mixed_gemm(x, reorder(part), act_quant=act_quant)
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_a_missing_bias_among_others_changes_no_sum() -> None:
    with_bias = random_weight(8, 32, extras=True)
    without = replace(random_weight(5, 32, seed=1), perm=with_bias.perm)
    for order in ([with_bias, without], [without, with_bias]):
        bias = reorder(order).bias
        assert bias is not None
        assert bias.dtype == torch.float16
        start = 8 if order[1] is without else 0
        assert torch.equal(bias[start : start + 5].view(torch.int16), torch.full((5,), -(1 << 15), dtype=torch.int16))  # -0.0
    assert reorder([without, without]).bias is None


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (random_weight(8, 96), "codes is uint8 of 96 columns on cpu and uint8 of 64 columns on cpu"),
        (random_weight(8, 64, bits=8), "bits is 8 and 4"),
        (random_weight(8, 64, group_size=64), "group_size is 64 and 32"),
        (random_weight(8, 64, kind="zeros"), "zeros is uint8 of 2 columns on cpu and None"),
        (random_weight(8, 64, kind="offsets"), "offsets is float32 of 2 columns on cpu and None"),
        (random_weight(8, 64, dtype=torch.bfloat16), "scales is bfloat16 .* and float16 "),
        (random_weight(8, 64, extras=True), "perm is int64 on cpu and None"),
    ],
)
def test_weights_that_differ_are_not_packed_as_one(other: QuantizedWeight, match: str) -> None:
    with pytest.raises(ValueError, match=r"weights\[1\] .*cannot be packed as one: .*" + match):
        reorder([random_weight(8, 64), other])


def test_weights_of_other_act_orders_or_biases_are_not_packed_as_one() -> None:
    first = random_weight(8, 64, extras=True)
    with pytest.raises(ValueError, match="their act orders"):
        reorder([first, random_weight(8, 64, extras=True, seed=1)])
    assert first.bias is not None
    with pytest.raises(ValueError, match="bias is float32 on cpu and float16 on cpu"):
        reorder([first, replace(first, bias=first.bias.float())])
    with pytest.raises(ValueError, match="no weight"):
        reorder([])
    with pytest.raises(TypeError, match=r"weights\[1\] is a PackedWeight"):
        reorder([first, reorder(first)])  # type: ignore[list-item]


@pytest.mark.gpu
def test_reorder_keeps_the_device() -> None:
    weight = random_weight(70, 130, kind="zeros", extras=True)
    packed = reorder(weight.to("cuda"))
    assert packed.device.type == "cuda"
    assert_same(packed.to("cpu"), reorder(weight))
    assert_same(packed.unpack().to("cpu"), weight)


# ---- packed files


def contents() -> dict[str, PackedWeight | torch.Tensor]:
    return {
        "a.up": reorder(random_weight(70, 130, kind="zeros", extras=True)),
        "a.down": reorder(random_weight(1, 1, 8, -1, "offsets", torch.bfloat16)),
        "a.gate": reorder(random_weight(64, 256, 4, 128)),
        "norm.weight": torch.randn(33),
        "counts": torch.arange(3),
        "flag": torch.tensor(True),
        "empty": torch.zeros(0, 4),
        "odd": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(5, 3).bfloat16().t(),
    }


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    saved = contents()
    save_packed(path, saved, tied={"a.up": "embedding"}, sources={"x.gguf": "00"})
    loaded = load_packed(path)
    assert loaded.keys() == saved.keys()
    for name, value in saved.items():
        other = loaded[name]
        if isinstance(value, PackedWeight):
            assert isinstance(other, PackedWeight)
            assert_same(value, other)
        else:
            assert isinstance(other, torch.Tensor)
            assert other.dtype == value.dtype
            assert torch.equal(value, other)
    info = packed_info(path)
    assert info.tied == {"a.up": "embedding"}
    assert info.sources == {"x.gguf": "00"}
    assert info.weights["a.up"] == (70, 130, 4, 32)
    assert is_packed(path)


def test_the_file_is_ordinary_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_packed(path, contents())
    assert load_file(path)["a.up.codes"].dtype == torch.uint8
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert metadata["format"] == "pt"
    assert (metadata["layout"], metadata["layout_version"]) == ("cutlass_ops.slab64", "2")
    assert json.loads(metadata["weights"])["a.down"] == {"n": 1, "k": 1, "bits": 8, "group_size": -1}
    # Every tensor starts at a multiple of its element's size, in memory too: a mapped file starts at a page.
    sizes = {"U8": 1, "I8": 1, "BOOL": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}
    for name, entry in header.items():
        assert (8 + length + entry["data_offsets"][0]) % sizes[entry["dtype"]] == 0, name
    assert all((8 + length + header[f"{w}.codes"]["data_offsets"][0]) % 64 == 0 for w in ("a.up", "a.down", "a.gate"))


def test_a_file_without_weights(tmp_path: Path) -> None:
    save_packed(tmp_path / "w.safetensors", {})
    assert load_packed(tmp_path / "w.safetensors") == {}


@pytest.mark.parametrize(
    ("tensors", "error", "match"),
    [
        ({"w": 3}, TypeError, "'w' is a int"),
        ({"w": "weight", "w.scales": torch.zeros(1)}, ValueError, r"tensor 'w\.scales' cannot keep its name"),
        ({"w": "weight", "w.bias": torch.zeros(2)}, ValueError, r"tensor 'w\.bias' cannot keep its name"),
        ({"__metadata__": torch.zeros(1)}, ValueError, "__metadata__"),
        ({"w": torch.zeros(1, dtype=torch.complex128)}, ValueError, "complex128"),
    ],
)
def test_save_refuses(tmp_path: Path, tensors: dict[str, object], error: type[Exception], match: str) -> None:
    path = tmp_path / "w.safetensors"
    weight = reorder(random_weight(2, 32))
    with pytest.raises(error, match=match):
        save_packed(path, {name: weight if value == "weight" else value for name, value in tensors.items()})  # type: ignore[misc]
    assert not list(tmp_path.iterdir())


def test_save_refuses_to_tie_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'lm_head'"):
        save_packed(tmp_path / "w.safetensors", {}, tied={"lm_head": "x"})


def test_loaded_tensors_survive_the_replacement_of_their_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_packed(path, {"x": torch.ones(1 << 16)})
    loaded = load_packed(path)["x"]
    save_packed(path, {"x": torch.zeros(1 << 16)})
    assert isinstance(loaded, torch.Tensor)
    assert bool((loaded == 1).all())


# ---- complete or absent


def interrupted(path: Path) -> None:
    with stream_safetensors(path, {"x": (torch.float32, (4,)), "y": (torch.float32, (4,))}, {}) as write:
        write("x", torch.zeros(4))
        raise KeyboardInterrupt


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        interrupted(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("written", "match"),
    [
        ([], "never written: x"),
        ([("y", torch.zeros(4))], "not announced"),
        ([("x", torch.zeros(5))], "announced was"),
        ([("x", torch.zeros(4).half())], "announced was"),
        ([("x", torch.zeros(4)), ("x", torch.zeros(4))], "written before"),
    ],
)
def test_the_writer_takes_what_was_announced_once(tmp_path: Path, written: list[tuple[str, torch.Tensor]], match: str) -> None:
    def run() -> None:
        with stream_safetensors(tmp_path / "w", {"x": (torch.float32, (4,))}, {}) as write:
            for name, tensor in written:
                write(name, tensor)

    with pytest.raises(ValueError, match=match):
        run()
    assert not list(tmp_path.iterdir())


def test_a_killed_run_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"old")
    code = textwrap.dedent(f"""
        import time, torch
        from cutlass_ops.checkpoints.safetensors_files import stream_safetensors
        with stream_safetensors({str(path)!r}, {{"x": (torch.float32, (4,))}}, {{}}) as write:
            write("x", torch.zeros(4))
            print("written", flush=True)
            time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    assert path.read_bytes() == b"old"


def test_new_files_have_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    save_packed(tmp_path / "w", {})
    assert stat.S_IMODE((tmp_path / "w").stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save_packed(tmp_path / "link", {"x": torch.zeros(2)})
    assert (tmp_path / "link").is_symlink()
    assert "x" in load_packed(tmp_path / "real")


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
    assert all(torch.equal(loaded[name], plain[name]) for name in rest)  # type: ignore[arg-type]
    assert sorted(seen) == sorted(["m.safetensors", *done.weights, *done.tensors])
    assert packed_info(tmp_path / "p.safetensors").sources == {"m.safetensors": sha256(tmp_path / "m.safetensors")}
    found = verify_packed(tmp_path / "p.safetensors", source)
    assert found.problems == []
    assert found.same_source
    differences = {
        name: float((dequantize(loaded[name], torch.float32) - plain[f"{name}.weight"].float()).abs().max())  # type: ignore[arg-type]
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
def test_include_and_exclude(tmp_path: Path, include: str | None, exclude: str | None, packed: list[str]) -> None:
    source = load_checkpoint(float_checkpoint(tmp_path / "m.safetensors"))
    done = reorder_checkpoint(source, tmp_path / "p.safetensors", bits=4, include=include, exclude=exclude)
    assert sorted(done.weights) == sorted(packed)
    assert verify_packed(tmp_path / "p.safetensors", source).problems == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "give bits"),
        ({"bits": 4, "exclude": "."}, "there is no weight to pack"),
        ({"bits": 5}, "bits is 5"),
        ({"bits": 4, "group_size": 48}, "group_size is 48"),
        ({"bits": 4, "include": "("}, "not a regular expression"),
    ],
)
def test_reorder_checkpoint_refuses(tmp_path: Path, options: dict[str, object], match: str) -> None:
    source = load_checkpoint(float_checkpoint(tmp_path / "m.safetensors"))
    with pytest.raises(ValueError, match=match):
        reorder_checkpoint(source, tmp_path / "p.safetensors", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "p.safetensors").exists()


def test_a_checkpoint_does_not_overwrite_itself(tmp_path: Path) -> None:
    path = float_checkpoint(tmp_path / "m.safetensors")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="itself"):
        reorder_checkpoint(load_checkpoint(path), path, bits=4)
    assert path.read_bytes() == before


@pytest.mark.parametrize("link", ["symbolic", "hard", "through a directory", "dangling"])
def test_a_link_to_the_checkpoint_does_not_overwrite_it(tmp_path: Path, link: str) -> None:
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


@pytest.mark.parametrize("bias", [torch.zeros(71), torch.zeros(69), torch.zeros(70, 1), torch.zeros(70, dtype=torch.int32)])
def test_a_bias_that_does_not_fit_its_weight_is_named(tmp_path: Path, bias: torch.Tensor) -> None:
    path = float_checkpoint(tmp_path / "m.safetensors", **{f"{UP}.bias": bias})
    with pytest.raises(CheckpointError, match=rf"tensor '{UP}\.bias' cannot keep its name"):
        reorder_checkpoint(load_checkpoint(path), tmp_path / "p.safetensors", bits=4)
    assert not (tmp_path / "p.safetensors").exists()
    # It is not the weight's: with the weight left as it is, so is the bias.
    source = load_checkpoint(path)
    reorder_checkpoint(source, tmp_path / "p.safetensors", bits=4, exclude="up_proj")
    assert torch.equal(load_packed(tmp_path / "p.safetensors")[f"{UP}.bias"], bias)  # type: ignore[arg-type]
    assert verify_packed(tmp_path / "p.safetensors", source).problems == []


def test_matrices_without_elements_stay_as_they_are(tmp_path: Path) -> None:
    empty = {"a.weight": torch.zeros(0, 32), "b.weight": torch.zeros(4, 0), "c.weight": torch.zeros(4, 0, 3)}
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
    ["lm_head", "model.embed_tokens", "transformer.wte", "a.norm1", "h.0.ln_1", "shared", "output", "token_embd"],
)
def test_what_is_no_linear_layer_by_name(name: str) -> None:
    import re

    assert re.search(DEFAULT_EXCLUDE, name)
    for linear in ("attention.output.dense", "mlp.shared_experts.up_proj", "model.layers.0.self_attn.q_proj"):
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
def test_verify_sees_one_wrong_bit(packed_pair: tuple[Path, Path], name: str, position: int | None, problem: str) -> None:
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


def test_verify_sees_what_is_too_much(packed_pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, packed = packed_pair
    other = tmp_path / "other.safetensors"
    tensors = load_file(source)
    del tensors["positions"]
    save_file(tensors, other)
    found = verify_packed(packed, load_checkpoint(other))
    assert found.problems == ["positions: not in the checkpoint"]
    assert found.same_source is False


def test_the_first_difference_that_is_no_number_stays_the_largest(packed_pair: tuple[Path, Path]) -> None:
    """Names in order: down_proj before up_proj."""
    source, packed = packed_pair
    checkpoint = load_checkpoint(source)
    down, whole = "model.layers.0.mlp.down_proj", verify_packed(packed, checkpoint)
    assert list(packed_info(packed).weights) == [down, UP]
    rewrite(packed, f"{UP}.codes", 0)
    # Copies, as older safetensors write into the file that the loaded tensors are a map of.
    facts, tensors = metadata_of(packed), {name: value.clone() for name, value in load_file(packed).items()}
    for damaged, largest_at in (([UP], UP), ([down], down), ([down, UP], down)):
        changed = {name: value.clone() for name, value in tensors.items()}
        for name in damaged:
            changed[f"{name}.scales"][0, 0] = torch.nan
        save_file(changed, packed, facts)
        found = verify_packed(packed, checkpoint)
        assert found.largest_difference is not None
        assert math.isnan(found.largest_difference)
        assert found.largest_at == largest_at
        assert [p for p in found.problems if p.endswith("is nan")] == [f"{name}: scales[0, 0] is nan" for name in damaged]
    assert whole.largest_difference is not None
    assert not math.isnan(whole.largest_difference)


# ---- memory and time


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    largest = 4096 * 1024 * 4
    path = tmp_path / "m.safetensors"
    save_file({f"layers.{i}.weight": torch.randn(4096, 1024) for i in range(24)}, path)
    code = textwrap.dedent(f"""
        import sys, threading
        import torch
        from cutlass_ops import quantize, reorder
        from cutlass_ops.checkpoints import load_checkpoint
        from cutlass_ops.files.packing import reorder_checkpoint

        def anonymous():
            # The pages of a mapped file are the system's to drop; what was allocated is not.
            lines = open("/proc/self/status").read().splitlines()
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

        torch.set_num_threads(1)
        reorder(quantize(torch.randn(64, 128)))
        before, peak, done = anonymous(), 0, threading.Event()

        def watch():
            global peak
            while not done.wait(0.001):
                peak = max(peak, anonymous())

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        reorder_checkpoint(load_checkpoint({str(path)!r}), {str(tmp_path / "p.safetensors")!r}, bits=8)
        done.set()
        thread.join()
        print(peak - before)
    """)
    if not Path("/proc/self/status").exists() or "RssAnon" not in Path("/proc/self/status").read_text():
        pytest.skip("this system does not tell anonymous memory from mapped files")
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    # The quantiser has a few copies of one tensor; all 24 of them would be 24 times the largest.
    assert int(run.stdout) < 12 * largest


def test_packing_a_large_layer_is_fast_and_small() -> None:
    weight = QuantizedWeight(torch.randint(0, 16, (8192, 8192), dtype=torch.uint8), torch.ones(8192, 64, dtype=torch.float16))
    begin = time.perf_counter()
    packed = reorder(weight)
    assert time.perf_counter() - begin < 20  # it takes 0.1 s; this is no benchmark
    assert packed.nbytes == 8192 * 8192 // 2 + 8192 * 64 * 2


def test_the_directory_is_not_littered(tmp_path: Path) -> None:
    save_packed(tmp_path / "w", {"x": torch.zeros(3)})
    assert os.listdir(tmp_path) == ["w"]
