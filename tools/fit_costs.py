#!/usr/bin/env python3
"""Fit the costs of tiles, by which dispatch chooses among them, to measured times.

    build/.../time_tiles > results/h200-tile-costs.json      on the GPU
    tools/fit_costs.py results/h200-tile-costs.json          writes csrc/dispatch/costs_sm90.inc

A predicted time is linear in a tile's costs (csrc/dispatch/cost.cpp), so they are first a least-squares fit of relative errors.
Then they are moved, one at a time, as long as the tiles that they choose take less time in the mean, relative to the best tile
of each product. ``--check`` says how good the choices of the present table are, and whether the table is this script's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TABLE = Path(__file__).parents[1] / "csrc" / "dispatch" / "costs_sm90.inc"
KINDS = ("k4096", "row_scales", "whole_rows")
#: Kernels whose tiles have a cost for the end of a tile besides; that of the others is in what K costs.
WITH_ENDS = ("wgmma_gemm_a16",)
UNITS = 320.0  # of a microsecond: predicted times are in 32nds of 0.1 us


class Key(NamedTuple):
    """A tile of a kernel: a line of the table."""

    kernel: str
    bits: int
    block_n: int
    block_m: int
    corrects: bool


class Cost(NamedTuple):
    key: Key
    name: str  #: a member of TileCost


Costs = dict[Cost, int]


def tiles_of(row: dict[str, Any]) -> list[tuple[Key, dict[str, Any]]]:
    """The tiles of a product. Four warpgroups of the exact kernels are int4's; others are each width's own."""
    return [
        (Key(row["kernel"], row["bits"], tile["block_n"], tile["block_m"], tile["corrects"]), tile) for tile in row["tiles"]
    ]


def least_squares(rows: list[dict[str, Any]]) -> dict[Cost, float]:
    """Costs whose predictions have the least sum of squared relative errors."""
    equations: dict[Key, list[tuple[str, float, float, float]]] = defaultdict(list)
    for row in rows:
        for key, tile in tiles_of(row):
            want = tile["us"] * UNITS
            equations[key].append((tile["cost"], tile["k_tiles"] / want, tile["ends"] / want, 1 - tile["constant"] / want))
    costs: dict[Cost, float] = {}
    for key, lines in sorted(equations.items()):
        names = [name for name in KINDS if any(line[0] == name for line in lines)]
        columns = [*names, "end"] if key.kernel in WITH_ENDS else names
        matrix, target = np.zeros((len(lines), len(columns))), np.zeros(len(lines))
        for i, (name, per_cost, per_end, rest) in enumerate(lines):
            matrix[i, columns.index(name)], target[i] = per_cost, rest
            if "end" in columns:
                matrix[i, columns.index("end")] = per_end
        solution = np.linalg.lstsq(matrix, target, rcond=None)[0]
        if "end" in columns and solution[-1] < 0:
            solution = np.append(np.linalg.lstsq(matrix[:, :-1], target, rcond=None)[0], 0.0)
        costs.update({Cost(key, name): value for name, value in zip(columns, solution, strict=True)})
    return costs


class Choices:
    """What products cost by the tiles of least predicted time."""

    def __init__(self, rows: list[dict[str, Any]], costs: Costs) -> None:
        self.costs = costs
        self.products = [row for row in map(tiles_of, rows) if len(row) > 1]
        self.users: dict[Cost, list[int]] = defaultdict(list)
        for i, tiles in enumerate(self.products):
            for cost in {cost for key, tile in tiles for cost in (Cost(key, tile["cost"]), Cost(key, "end"))}:
                self.users[cost].append(i)
        self.losses = [self.loss(i) for i in range(len(self.products))]

    def loss(self, i: int) -> float:
        """How much longer product i takes by the tile that is chosen than by the best."""

        def predicted(entry: tuple[Key, dict[str, Any]]) -> float:
            key, tile = entry
            cost, end = self.costs[Cost(key, tile["cost"])], self.costs.get(Cost(key, "end"), 0)
            return float(tile["k_tiles"] * cost + tile["ends"] * end + tile["constant"])

        tiles = self.products[i]
        return float(min(tiles, key=predicted)[1]["us"] / min(tile["us"] for _, tile in tiles) - 1)

    def try_cost(self, cost: Cost, value: int) -> bool:
        """Take the value if the products that it concerns lose less by it."""
        users, before = self.users[cost], self.costs[cost]
        self.costs[cost] = value
        losses = [self.loss(i) for i in users]
        if sum(losses) < sum(self.losses[i] for i in users) - 1e-9:
            for i, loss in zip(users, losses, strict=True):
                self.losses[i] = loss
            return True
        self.costs[cost] = before
        return False


def improve(choices: Choices) -> None:
    """Move costs by some percent, then by less, until no move helps."""
    for percent in (8, 4, 2, 1):
        moved = True
        while moved:
            moved = False
            for cost in sorted(choices.costs):
                for sign in (-1, 1):
                    value = choices.costs[cost] + sign * max(1, round(choices.costs[cost] * percent / 100))
                    moved |= value >= 0 and choices.try_cost(cost, value)


def fit(rows: list[dict[str, Any]]) -> Costs:
    choices = Choices(rows, {cost: max(0, round(value)) for cost, value in least_squares(rows).items()})
    improve(choices)
    return choices.costs


def table(costs: Costs, source: str) -> str:
    """The lines of csrc/dispatch/costs_sm90.inc."""
    text = f"// Made by tools/fit_costs.py from {source}: kernel, bits, tile, whether it compensates zero points; TileCost.\n"
    for key in sorted({cost.key for cost in costs}):
        values = [costs.get(Cost(key, name), 0) for name in (*KINDS, "end")]
        if values[0] == 0:  # none is of the kind that the others are special cases of
            values[0] = max(values[1:3])
        corrects = "true" if key.corrects else "false"
        text += f'{{"{key.kernel}", {key.bits}, {key.block_n}, {key.block_m}, {corrects}, {{{", ".join(map(str, values))}}}}},\n'
    return text


def report(rows: list[dict[str, Any]], losses: list[list[float]], heading: str) -> None:
    print(heading)
    groups: dict[str, list[float]] = defaultdict(list)
    for row, (loss,) in zip(rows, losses, strict=True):
        groups[row["format"]].append(loss)
    for name, values in groups.items():
        print(f"  {name:18} {len(values):4} products, mean {np.mean(values):6.2%}, worst {max(values):6.1%}")
    print(f"  all                {np.mean([loss for (loss,) in losses]):6.2%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the table is another than the fit's")
    args = parser.parse_args()
    rows = [row for row in json.loads(args.results.read_text())["rows"] if len(row["tiles"]) > 1]

    def measured(row: dict[str, Any]) -> float:
        """Of the table that the measured library had."""
        best = min(tile["us"] for tile in row["tiles"])
        return next((tile["us"] for tile in row["tiles"] if tile["chosen"]), best) / best - 1

    costs = fit(rows)
    report(rows, [[measured(row)] for row in rows], "choices of the library that was measured, over the best tiles:")
    choices = Choices(rows, costs)
    report(rows, [[loss] for loss in choices.losses], "choices by the fitted costs:")
    text = table(costs, f"results/{args.results.name}")
    if args.check:
        return 0 if TABLE.read_text() == text else 1
    TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
