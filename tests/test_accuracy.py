"""tools/accuracy.py: its measures on numbers worked out by hand, and the order of the errors in the
committed results.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from imports import import_or_skip
from torch import nn

ROOT = Path(__file__).parent.parent
import_or_skip("transformers")


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "tools" / "accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_measures_by_hand(accuracy: ModuleType) -> None:
    # odds 1:3, 1:1; the last predicts nothing
    expected = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0], [7.0, 8.0]]])
    found = torch.tensor([[[0.0, 0.0], [math.log(3.0), 0.0], [7.0, 8.0]]])
    row = accuracy.compared(found, expected, torch.tensor([[0, 1, 0]]), causal=True)
    assert row["perplexity"] == pytest.approx(math.sqrt(2 * 4 / 3), abs=1e-4)  # chances 1/2 and 3/4
    # KL(1/4, 3/4 | 1/2, 1/2) and KL(1/2, 1/2 | 3/4, 1/4), halved
    first, second = (
        0.75 * math.log(1.5) + 0.25 * math.log(0.5),
        0.5 * math.log(2 / 3) + 0.5 * math.log(2),
    )
    assert row["divergence"] == pytest.approx((first + second) / 2, rel=1e-3)
    assert row["same_top_token"] == 0.5  # of two equal logits the first is the top
    assert row["error"] == pytest.approx(
        math.sqrt(2 * math.log(3) ** 2 / (math.log(3) ** 2 + 49 + 64)), rel=1e-4
    )
    assert accuracy.compared(found, expected, torch.tensor([[0, 1, 0]]), causal=False).keys() == {
        "error"
    }


def test_an_outlier_affects_the_error_of_its_block_only(accuracy: ModuleType) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(256, 32, bias=False)])

        def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            x = torch.sin(torch.arange(256.0) + input_ids[..., None])
            x[..., 5] = 100.0
            return Output(last_hidden_state=self.layers[0](x))

    class Output(dict[str, torch.Tensor]):
        last_hidden_state = property(lambda self: self["last_hidden_state"])

    torch.manual_seed(0)
    model = Model()
    linears = {"layers.0.mlp.up_proj": model.layers[0]}
    (kind,) = accuracy.kinds_of_layers(model, linears, torch.arange(64).view(2, 32), rows=64)
    assert (kind["kind"], kind["layers"], kind["k"]) == ("mlp.up_proj", 1, 256)
    assert kind["largest_peak_over_rms"] == pytest.approx(
        100 / math.sqrt((100**2 + 255 / 2) / 256), rel=0.01
    )
    assert kind["errors"]["x block 32"] < 0.5 * kind["errors"]["x token"]
    rows = accuracy.whole_model(
        model, {"layers.0": model.layers[0]}, {}, torch.arange(64).view(2, 32), causal=False
    )
    assert rows[0]["error"] == 0
    errors = {
        (row["bits"], row["group_size"], row["activations"]): row["error"]
        for row in rows[1:]
        if row.get("symmetric") and "clip" not in row
    }
    assert errors[8, 32, "8 block"] < errors[8, 32, "8 token"]
    assert errors[8, 32, "16"] < 0.2 * errors[4, 32, "16"]
    searched = {
        (row["symmetric"], row["group_size"]): row["error"] for row in rows[1:] if "clip" in row
    }
    assert searched.keys() == {
        (symmetric, group) for symmetric in (True, False) for group in (32, 64, 128)
    }
    assert searched[True, 128] < 1.2 * errors[4, 128, "16"]
    assert [accuracy.label(row) for row in rows if "book" in row] == [
        f"NF4, groups of {group}" for group in (32, 64, 128)
    ]
    assert isinstance(model.layers[0], nn.Linear)  # the model is left as it was


def test_smaller_blocks_have_smaller_errors_in_the_committed_results() -> None:
    results = json.loads((ROOT / "results" / "accuracy.json").read_text())
    causal, encoder = results["models"]
    assert causal["compared"] == "logits"
    assert encoder["compared"] == "last hidden states"
    for model in (causal, encoder):
        for kind in model["kinds"]:
            assert (
                kind["errors"]["x block 32"]
                < kind["errors"]["x block 128"]
                < kind["errors"]["x token"]
            )
