"""Runs of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from cutlass_ops import cli


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def run_json(*args: object) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    random = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(8, 64, generator=random),
        "model.layers.0.mlp.up_proj.weight": torch.randn(48, 64, generator=random),
        "model.layers.0.mlp.down_proj.weight": torch.randn(64, 48, generator=random),
        "model.norm.weight": torch.ones(64),
    }
    save_file(tensors, path)
    return path
