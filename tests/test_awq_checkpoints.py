"""AWQ directories against golden words, plain loops and the format's own writer."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_checkpoints import AWQ_CONFIG, awq, check, expected, randint, randn, save, words

from cutlass_ops import CheckpointError, load_checkpoint


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
    codes, zeros, scales = (
        randint(16, n, k),
        randint(16, n, groups, seed=2),
        randn(n, groups).to(dtype),
    )
    zeros[:, 0] = 0
    tensors = awq(codes, zeros, scales) | {"m.bias": randn(n).half()}
    for config, name in (
        (AWQ_CONFIG | {"group_size": size}, "config.json"),
        (
            {"zero_point": True, "q_group_size": size, "w_bit": 4, "version": "GEMM"},
            "quant_config.json",
        ),
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
    [
        (128, 128, 1),
        (1152, 128, 2),
        (128, 64, 2),
        (1088, 64, 4),
        (64, 32, 4),
        (1056, 32, 8),
        (64, -1, 2),
    ],
)
def test_awq_gemv(tmp_path: Path, k: int, size: int, width: int) -> None:
    n, groups = 5, k // size if size > 0 else 1
    codes, zeros, scales = (
        randint(16, n, k),
        randint(16, n, groups, seed=2),
        randn(n, groups).half(),
    )
    padding = (0, 8 * width - groups)
    tensors = {
        "m.qweight": words(codes, 4),
        # its contents are unused
        "m.qzeros": words(torch.nn.functional.pad(zeros, padding, value=7), 4),
        "m.scales": torch.nn.functional.pad(scales, padding, value=float("nan")),
    }
    config = AWQ_CONFIG | {"version": "gemv", "group_size": size}
    checkpoint = load_checkpoint(save(tmp_path, tensors, config))
    check(checkpoint, "m", expected(codes, scales, zeros, size if size > 0 else k))


def autoawq(monkeypatch: pytest.MonkeyPatch, version: str) -> Any:
    """A layer of AutoAWQ's. Its package imports what this module of it does not need:
    it is passed by.
    """
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
def test_awq_as_the_package_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, k: int, size: int
) -> None:
    layers = autoawq(monkeypatch, version)
    n = 32
    codes, zeros, scales = (
        randint(16, n, k),
        randint(16, n, k // size, seed=2),
        randn(n, k // size).half().abs() + 0.5,
    )
    linear = torch.nn.Linear(k, n)
    with torch.no_grad():
        linear.weight.copy_(expected(codes, scales, zeros, size))
    if version == "gemm":
        layer = layers.WQLinear_GEMM.from_linear(
            linear, 4, size, False, scales.t().contiguous(), zeros.t().contiguous()
        )
    else:
        layer = layers.WQLinear_GEMV.from_linear(linear, 4, size, False, scales, zeros)
    config = AWQ_CONFIG | {"version": version, "group_size": size}
    checkpoint = load_checkpoint(
        save(tmp_path, {f"m.{name}": t for name, t in layer.state_dict().items()}, config)
    )
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
    """Groups of 96 are groups of 32, three of which share a scale; groups of 8 are nothing."""
    codes, zeros, scales = randint(16, 8, 192), randint(16, 8, 2), randn(8, 2).half()
    checkpoint = load_checkpoint(
        save(tmp_path, awq(codes, zeros, scales), AWQ_CONFIG | {"group_size": 96})
    )
    weight = check(checkpoint, "m", expected(codes, scales, zeros, 96))
    assert (weight.group_size, weight.groups) == (32, 6)

    codes, zeros, scales = randint(16, 8, 32), randint(16, 8, 4), randn(8, 4).half()
    checkpoint = load_checkpoint(
        save(tmp_path, awq(codes, zeros, scales), AWQ_CONFIG | {"group_size": 8})
    )
    assert "groups of 8; supported are 16, 32, 64" in checkpoint.entries["m"].problem
    assert torch.equal(checkpoint.entries["m"].values(), expected(codes, scales, zeros, 8))
    with pytest.raises(CheckpointError, match="groups of 8"):
        checkpoint["m"]
