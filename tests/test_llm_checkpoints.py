"""AWQ, GPTQ and compressed-tensors directories through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from llm_checkpoints import carried, gptq, gptq_config, randint, randn, save
from typer.testing import CliRunner

from cutlass_ops import cli


def run(*args: object) -> Any:
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def test_from_a_directory_to_a_verified_one(tmp_path: Path) -> None:
    """Act order, a bias and whatever is not quantised, from a GPTQ model to a packed one
    that is equal to it.
    """
    index = torch.arange(64).flip(0) // 32
    index[[0, 40]] = index[[40, 0]]
    tensors = gptq(randint(16, 32, 64), randint(16, 32, 2, seed=3), randn(32, 2).half(), 4, 2) | {
        "m.g_idx": index.int()
    }
    config = gptq_config(sym=False, desc_act=True, checkpoint_format="gptq_v2")
    source = save(
        tmp_path / "source",
        tensors | {"m.bias": randn(32).half(), "norm.weight": torch.ones(2)},
        config,
    )
    shown = json.loads(run("inspect", source, "--json").stdout)
    assert shown["kind"] == "gptq"
    assert shown["metadata"]["zero_offset"] == "0 in 1 modules"
    assert {tensor["name"] for tensor in shown["tensors"]} == {"m", "norm.weight"}
    done = run("reorder", source, "-o", tmp_path / "packed")
    assert done.exit_code == 0, done.output
    verified = run("verify", tmp_path / "packed", "--against", source)
    assert verified.exit_code == 0, verified.output


def test_zero_points_as_the_user_says(tmp_path: Path) -> None:
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
