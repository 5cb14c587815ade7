"""The costs by which dispatch chooses: fitted to the results files, and C++ chooses by them
as the fit does.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutlass_ops import _C

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("fit_costs", ROOT / "tools" / "fit_costs.py")
assert spec is not None
assert spec.loader is not None
fit_costs = importlib.util.module_from_spec(spec)
sys.modules["fit_costs"] = fit_costs
spec.loader.exec_module(fit_costs)

TILES, DECODE = fit_costs.MODELS
#: Any address that is a multiple of 16: plans read no memory.
SOME = 1 << 20


def test_tables_are_what_the_script_makes() -> None:
    for path, text in fit_costs.tables():
        assert path.read_text() == text


def test_times_of_another_card_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "h100-tile-costs.json").write_text('{"device": "NVIDIA H200"}')
    monkeypatch.setattr(fit_costs, "RESULTS", tmp_path)
    with pytest.raises(
        ValueError, match=r"h100-tile-costs.json was measured on 'NVIDIA H200', no H100"
    ):
        TILES.results("H100")


def planned(row: dict[str, Any], quantized_before: bool, device: _C.Device) -> _C.Plan:
    """The plan of a product as tools/time_tiles.cpp has it."""
    name = row["format"]
    book = SOME if name.startswith("nf4") else 0
    group_size = 64 if book else 128
    for word, size in {"channel": -1, "g16": 16, "g32": 32}.items():
        if word in name:
            group_size = size
    half, none = _C.DataType.float16, _C.DataType.none
    scale_type = _C.DataType.float32 if "wide" in name else half
    offsets = SOME if "offsets" in name else 0
    kind = getattr(_C.Format, "codebook" if book else f"int{row['bits']}")
    weight = _C.PackedWeight(
        SOME, SOME, SOME if "-zp" in name else 0, offsets, 0, book,
        row["n"], row["k"], kind, group_size, scale_type, scale_type if offsets else none, False,
        0, none, None, 0, {},
    )  # fmt: skip
    symmetric = "asym" not in name
    if not symmetric:
        weight.set_sums(SOME)
    modes = {"block": _C.ActQuant.block, "token": _C.ActQuant.token, "channel": _C.ActQuant.token}
    mode = next((mode for word, mode in modes.items() if word in name), _C.ActQuant.none)
    quantized = None
    if quantized_before and mode != _C.ActQuant.none:
        block = -1 if mode == _C.ActQuant.token else min(group_size, 128)
        stride, rows = -(-row["m"] // 16) * 16, -(-row["m"] // 256) * 256
        quantized = _C.QuantizedActivations(
            SOME, SOME, 0 if symmetric else SOME, block, stride, rows
        )
        mode = _C.ActQuant.none
    return _C.plan(
        weight,
        row["m"],
        half,
        SOME,
        half,
        row["k"],
        quantized,
        mode,
        symmetric,
        False,
        0,
        False,
        device,
    )


def is_tile(row: dict[str, Any], plan: _C.Plan) -> bool:
    return bool(row["block_n"] == plan.block_n and row["compensates"] == plan.compensates)


def is_decode(row: dict[str, Any], plan: _C.Plan) -> bool:
    if row["kernel"] == "decode_gemm":
        return True
    # Four warpgroups and a producer have an SM to themselves.
    return bool(
        row["quantizes"] == plan.quantizes and (row["ctas_per_sm"] == 1) == (plan.threads > 512)
    )


@pytest.mark.parametrize("card", fit_costs.CARDS)
@pytest.mark.parametrize(
    ("model", "is_chosen", "mean", "mean_of_a_format"),
    [(TILES, is_tile, 0.005, 0.02), (DECODE, is_decode, 0.012, 0.04)],
    ids=["tiles", "decode"],
)
def test_chosen_candidates_are_close_to_the_best(
    model: Any, is_chosen: Callable[..., bool], mean: float, mean_of_a_format: float, card: str
) -> None:
    results = model.results(card)
    device = _C.Device(90, results["multiprocessors"], 232448, results["memory_bandwidth"])
    losses: dict[str, list[float]] = defaultdict(list)
    for values in results["rows"]:
        row = dict(zip(results["columns"], values, strict=True))
        candidates = [
            dict(zip(results["candidate_columns"], c, strict=True)) for c in row["candidates"]
        ]
        plan = planned(row, model is TILES, device)
        times = [
            c["us"]
            for c in candidates
            if c["kernel"] == plan.kernel and c["block_m"] == plan.block_m and is_chosen(c, plan)
        ]
        # A portable kernel is no choice by costs, and tiles for few rows are in the other file.
        decodes = "decode" in plan.kernel
        if plan.kernel.startswith("mma_gemm") or decodes != (model is DECODE):
            continue
        assert len(times) == 1, (
            row["format"],
            row["n"],
            row["k"],
            row["m"],
            plan.kernel,
            plan.block_m,
        )
        losses[row["format"]].append(
            times[0] / min(c["us"] for c in candidates if c.get("applies", True)) - 1
        )
    for name, of_format in losses.items():
        assert sum(of_format) / len(of_format) < mean_of_a_format, name
    every = [loss for of_format in losses.values() for loss in of_format]
    assert len(every) > 1000
    assert sum(every) / len(every) < mean
