"""Packed weights and the files that hold them: exact, complete or absent, and bounded in memory."""

from __future__ import annotations

import json
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
from packed_cases import random_weight
from safetensors.torch import load_file, save_file

from cutlass_ops import (
    PackedWeight,
    QuantizedWeight,
    load_packed,
    mixed_gemm,
    reorder,
    save_packed,
)
from cutlass_ops.checkpoints.safetensors_files import stream_safetensors
from cutlass_ops.files.packed_file import is_packed, packed_info

PARTS = ("codes", "scales", "zeros", "offsets", "bias", "perm")


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
    group_size=st.sampled_from([16, 32, 64, 128, 256, -1]),
    kind=st.sampled_from(["symmetric", "zeros", "offsets"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    extras=st.booleans(),
)
def test_unpack_undoes_reorder(
    n: int, k: int, bits: int, group_size: int, kind: str, dtype: torch.dtype, extras: bool
) -> None:
    weight = random_weight(n, k, bits, group_size, kind, dtype, extras)
    assert_same(reorder(weight).unpack(), weight)


def test_group_vectors_are_in_the_order_in_which_lanes_read_them() -> None:
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
        codes,
        torch.ones(2, 1),
        zeros=torch.tensor([[0], [255]], dtype=torch.uint8),
        bits=8,
        group_size=32,
    )
    packed = reorder(weight)
    assert packed.zeros is not None
    assert (int(packed.zeros[0, 0]), int(packed.zeros[0, 8])) == (-128, 127)


def test_reorder_takes_views() -> None:
    wide = random_weight(40, 96)
    view = QuantizedWeight(wide.codes[::2, 32:], wide.scales[::2, 1:], group_size=32)
    copy = QuantizedWeight(
        wide.codes[::2, 32:].clone(), wide.scales[::2, 1:].clone(), group_size=32
    )
    assert_same(reorder(view), reorder(copy))


def test_reorder_refuses_other_things() -> None:
    with pytest.raises(TypeError, match="weight is a Tensor"):
        reorder(torch.zeros(4, 4))


@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
@pytest.mark.parametrize("bits", [2, 4, 8])
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
        cut = {
            name: getattr(whole, name)[here]
            for name in PARTS
            if name != "perm" and getattr(whole, name) is not None
        }
        assert_same(replace(whole, **cut), part)
        start += part.n
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    for act_quant in ("none", "block"):
        found = mixed_gemm(x, packed, act_quant=act_quant).split(rows, dim=-1)
        for y, part in zip(found, parts, strict=True):
            expected = mixed_gemm(x, reorder(part), act_quant=act_quant)
            torch.testing.assert_close(
                y, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())
            )


def test_a_missing_bias_among_others_changes_no_sum() -> None:
    with_bias = random_weight(8, 32, extras=True)
    without = replace(random_weight(5, 32, seed=1), perm=with_bias.perm)
    for order in ([with_bias, without], [without, with_bias]):
        bias = reorder(order).bias
        assert bias is not None
        assert bias.dtype == torch.float16
        start = 8 if order[1] is without else 0
        # -0.0
        assert torch.equal(
            bias[start : start + 5].view(torch.int16),
            torch.full((5,), -(1 << 15), dtype=torch.int16),
        )
    assert reorder([without, without]).bias is None


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            random_weight(8, 96),
            "codes is uint8 of 96 columns on cpu and uint8 of 64 columns on cpu",
        ),
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
        reorder([first, reorder(first)])


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


def test_saved_weights_are_loaded(tmp_path: Path) -> None:
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
    assert json.loads(metadata["weights"])["a.down"] == {
        "n": 1,
        "k": 1,
        "bits": 8,
        "group_size": -1,
    }
    # Every tensor starts at a multiple of its element's size, in memory too: a mapped file
    # starts at a page.
    sizes = {"U8": 1, "I8": 1, "BOOL": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}
    for name, entry in header.items():
        assert (8 + length + entry["data_offsets"][0]) % sizes[entry["dtype"]] == 0, name
    assert all(
        (8 + length + header[f"{w}.codes"]["data_offsets"][0]) % 64 == 0
        for w in ("a.up", "a.down", "a.gate")
    )


def test_a_file_without_weights(tmp_path: Path) -> None:
    save_packed(tmp_path / "w.safetensors", {})
    assert load_packed(tmp_path / "w.safetensors") == {}


@pytest.mark.parametrize(
    ("tensors", "error", "match"),
    [
        ({"w": 3}, TypeError, "'w' is a int"),
        (
            {"w": "weight", "w.scales": torch.zeros(1)},
            ValueError,
            r"tensor 'w\.scales' cannot keep its name",
        ),
        (
            {"w": "weight", "w.bias": torch.zeros(2)},
            ValueError,
            r"tensor 'w\.bias' cannot keep its name",
        ),
        ({"__metadata__": torch.zeros(1)}, ValueError, "__metadata__"),
        ({"w": torch.zeros(1, dtype=torch.complex128)}, ValueError, "complex128"),
    ],
)
def test_save_refuses(
    tmp_path: Path, tensors: dict[str, object], error: type[Exception], match: str
) -> None:
    path = tmp_path / "w.safetensors"
    weight = reorder(random_weight(2, 32))
    with pytest.raises(error, match=match):
        save_packed(
            path, {name: weight if value == "weight" else value for name, value in tensors.items()}
        )
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
    with stream_safetensors(
        path, {"x": (torch.float32, (4,)), "y": (torch.float32, (4,))}, {}
    ) as write:
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
def test_the_writer_takes_what_was_announced_once(
    tmp_path: Path, written: list[tuple[str, torch.Tensor]], match: str
) -> None:
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
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    assert path.read_bytes() == b"old"


def test_new_files_have_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    save_packed(tmp_path / "w", {})
    assert stat.S_IMODE((tmp_path / "w").stat().st_mode) == stat.S_IMODE(
        (tmp_path / "other").stat().st_mode
    )


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save_packed(tmp_path / "link", {"x": torch.zeros(2)})
    assert (tmp_path / "link").is_symlink()
    assert "x" in load_packed(tmp_path / "real")


# ---- memory and time


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    largest = 1536 * 1024 * 4
    path = tmp_path / "m.safetensors"
    save_file({f"layers.{i}.weight": torch.randn(1536, 1024) for i in range(24)}, path)
    code = textwrap.dedent(f"""
        import sys, threading
        import torch
        from cutlass_ops import quantize, reorder
        from cutlass_ops.checkpoints import load_checkpoint
        from cutlass_ops.files.packing import reorder_checkpoint

        def anonymous():
            # The pages of a mapped file are the system's to drop; what was allocated is not.
            lines = open("/proc/self/status").read().splitlines()
            (line,) = [line for line in lines if line.startswith("RssAnon:")]
            return 1024 * int(line.split()[1])

        torch.set_num_threads(1)
        reorder(quantize(torch.randn(64, 128)))
        before, peak, done = anonymous(), 0, threading.Event()

        def watch():
            global peak
            while not done.wait(0.001):
                peak = max(peak, anonymous())

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        packed = {str(tmp_path / "p.safetensors")!r}
        reorder_checkpoint(load_checkpoint({str(path)!r}), packed, bits=8)
        done.set()
        thread.join()
        print(peak - before)
    """)
    if (
        not Path("/proc/self/status").exists()
        or "RssAnon" not in Path("/proc/self/status").read_text()
    ):
        pytest.skip("this system does not tell anonymous memory from mapped files")
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    # The quantiser has a few copies of one tensor; all 24 of them would be 24 times the largest.
    assert int(run.stdout) < 12 * largest


def test_packing_a_large_layer_is_fast_and_small() -> None:
    weight = QuantizedWeight(
        torch.randint(0, 16, (8192, 8192), dtype=torch.uint8),
        torch.ones(8192, 64, dtype=torch.float16),
    )
    begin = time.perf_counter()
    packed = reorder(weight)
    assert time.perf_counter() - begin < 20  # it takes 0.1 s; this is no benchmark
    assert packed.nbytes == 8192 * 8192 // 2 + 8192 * 64 * 2


def test_the_directory_is_not_littered(tmp_path: Path) -> None:
    save_packed(tmp_path / "w", {"x": torch.zeros(3)})
    assert os.listdir(tmp_path) == ["w"]
