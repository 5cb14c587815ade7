#!/usr/bin/env python3
"""Fit the costs by which dispatch chooses among tiles and decode kernels to measured times.

    build/.../time_tiles tiles > results/h200-tile-costs.json      on the GPU
    build/.../time_tiles decode > results/h200-decode-costs.json    on the GPU
    tools/fit_costs.py    writes csrc/dispatch/cards.inc, tile_costs.inc and decode_costs.inc

A card, as the H200 here, is one that has both files; their names begin with its name. A card whose
file lacks a kind of product has another card's costs of it.

A predicted time is linear in a candidate's costs (csrc/dispatch/cost.cpp), so they are first a
least-squares fit of relative errors. Then they are moved, one at a time, as long as the candidates
that they choose take less time in the mean, relative to the best of each product. ``--check``
writes nothing and fails if the tables are not this script's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS, DISPATCH = ROOT / "results", ROOT / "csrc" / "dispatch"
CARDS_TABLE = DISPATCH / "cards.inc"
#: Names of the cards that were measured.
CARDS = sorted(
    path.name.removesuffix("-tile-costs.json").upper() for path in RESULTS.glob("*-tile-costs.json")
)
#: Values of a candidate are compared, sorted and printed in the order of the C++ struct.
Key = tuple[Any, ...]
Row = dict[str, Any]


class Entry(NamedTuple):
    """A candidate of a product: its time is a constant and the sum of costs[name]
    times terms[name].
    """

    key: Key
    us: float
    chosen: bool
    #: whether it may be chosen; other candidates are fitted for problems where they may
    applies: bool
    constant: float
    terms: dict[str, float]


class Model(NamedTuple):
    """The model that the results files of all cards are fitted to."""

    name: str  #: in the names of the results files and of the table
    heading: str
    members: tuple[str, ...]  #: of the C++ struct
    units: float  #: of a microsecond, that predicted times are in
    entry: Callable[[Row, Row], Entry]  #: of a product's row and a candidate's

    @property
    def table(self) -> Path:
        """The table that C++ includes."""
        return DISPATCH / f"{self.name}_costs.inc"

    def results(self, card: str) -> dict[str, Any]:
        """The output of time_tiles on the card.

        Raises:
            ValueError: it was another card.
        """
        path = RESULTS / f"{card.lower()}-{self.name}-costs.json"
        results: dict[str, Any] = json.loads(path.read_text())
        if card not in results["device"]:
            raise ValueError(f"{path.name} was measured on {results['device']!r}, no {card}")
        return results


#: Kernels that are not chosen by costs.
PORTABLE = "mma_gemm"
TILE_COSTS = ("k4096", "row_scales", "whole_rows", "wide", "end")


def tile_entry(row: Row, tile: Row) -> Entry:
    """The entry of a line of ``time_tiles tiles``."""
    key = (tile["kernel"], row["bits"], tile["block_n"], tile["block_m"], tile["compensates"])
    terms = {tile["cost"]: tile["k_tiles"], "end": tile["ends"]}
    return Entry(key, tile["us"], tile["chosen"], True, tile["constant"], terms)


def decode_entry(row: Row, tile: Row) -> Entry:
    """The entry of a line of ``time_tiles decode``."""
    key = (
        tile["kernel"],
        tile["block_m"],
        tile["ctas_per_sm"],
        tile["quantizes"],
        row["bits"],
        tile["kind"],
    )
    return Entry(
        key,
        tile["us"],
        tile["chosen"],
        tile["applies"],
        0,
        {"start": 1} | {name: tile[name] for name in ("chunk", "share", "x", "row")},
    )


MODELS = (
    Model(
        "tile",
        "card, kernel, bits, tile, whether it compensates zero points; TileCost",
        TILE_COSTS,
        320,  # 32nds of 0.1 us
        tile_entry,
    ),
    Model(
        "decode",
        "card, kernel, rows of x, CTAs per SM, whether it quantises x, bits, kind; DecodeCost",
        ("start", "chunk", "share", "x", "row"),
        1000,
        decode_entry,
    ),
)
Costs = dict[tuple[Key, str], int]


def least_squares(products: list[list[Entry]], model: Model) -> Costs:
    """Costs whose predictions have the least sum of squared relative errors, none below zero."""
    entries: dict[Key, list[Entry]] = defaultdict(list)
    for product in products:
        for entry in product:
            entries[entry.key].append(entry)
    costs: Costs = {}
    for key, of_key in entries.items():
        columns = [name for name in model.members if any(entry.terms.get(name) for entry in of_key)]
        wanted = [entry.us * model.units for entry in of_key]
        target = np.array(
            [1 - entry.constant / want for entry, want in zip(of_key, wanted, strict=True)]
        )
        while True:
            matrix = np.array(
                [
                    [entry.terms.get(name, 0) / want for name in columns]
                    for entry, want in zip(of_key, wanted, strict=True)
                ]
            )
            solution = np.linalg.lstsq(matrix, target, rcond=None)[0]
            if min(solution) >= 0:
                break
            columns.pop(int(np.argmin(solution)))
        costs.update(
            {
                (key, name): round(float(value))
                for name, value in zip(columns, solution, strict=True)
            }
        )
    return costs


class Choices:
    """How much longer products take by the candidates of least predicted time than by the best."""

    def __init__(self, products: list[list[Entry]], costs: Costs) -> None:
        self.costs = costs
        # The costs by their places, which are faster to look up; for each product its least time,
        # and the time, constant and terms of each entry.
        self.places = {cost: place for place, cost in enumerate(costs)}
        self.values = list(costs.values())
        self.best = [min(entry.us for entry in product) for product in products]
        self.entries = [
            [
                (
                    entry.us,
                    entry.constant,
                    [
                        (self.places[entry.key, name], count)
                        for name, count in entry.terms.items()
                        if (entry.key, name) in self.places
                    ],
                )
                for entry in product
            ]
            for product in products
        ]
        self.users: dict[tuple[Key, str], list[int]] = defaultdict(list)
        for i, product in enumerate(products):
            for cost in {(entry.key, name) for entry in product for name in entry.terms}:
                self.users[cost].append(i)
        self.losses = [self.loss(i) for i in range(len(products))]

    def loss(self, i: int) -> float:
        """The loss of product i."""
        values = self.values
        least, chosen = math.inf, math.inf
        for us, constant, terms in self.entries[i]:
            predicted = constant + sum([values[place] * count for place, count in terms])
            if predicted < least:
                least, chosen = predicted, us
        return chosen / self.best[i] - 1

    def try_cost(self, cost: tuple[Key, str], value: int) -> bool:
        """Keep the value if the products that it affects take less time with it."""
        users, before = self.users[cost], self.costs[cost]
        self.costs[cost] = self.values[self.places[cost]] = value
        losses = [self.loss(i) for i in users]
        if sum(losses) < sum(self.losses[i] for i in users) - 1e-9:
            for i, loss in zip(users, losses, strict=True):
                self.losses[i] = loss
            return True
        self.costs[cost] = self.values[self.places[cost]] = before
        return False

    def improve(self) -> None:
        """Move costs by some percent, then by less, until no move helps."""
        for percent in (8, 4, 2, 1):
            moved = True
            while moved:
                moved = False
                for cost in sorted(self.costs):
                    for sign in (-1, 1):
                        value = self.costs[cost] + sign * max(
                            1, round(self.costs[cost] * percent / 100)
                        )
                        moved |= value >= 0 and self.try_cost(cost, value)


def spelled(value: Any) -> str:
    """As C++ writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"DecodeKind::{value}" if value.startswith("k") else f'"{value}"'
    return str(value)


def made_from(model: Model, heading: str) -> str:
    """The first lines of a table."""
    return f"// Made by tools/fit_costs.py from results/*-{model.name}-costs.json:\n// {heading}.\n"


def lines(card: str, costs: Costs, model: Model) -> str:
    """The lines of a card in the table that C++ includes."""
    text = ""
    for key in sorted({key for key, _ in costs}):
        values = [costs.get((key, name), 0) for name in model.members]
        if model.members is TILE_COSTS and values[0] == 0:  # the general case
            values[0] = max(values[1:3])
        entry = f"{{{', '.join(map(spelled, (card, *key)))},"
        numbers = f"{{{', '.join(map(str, values))}}}}},"
        text += f"{entry}{' ' if len(entry) + len(numbers) < 100 else chr(10) + ' '}{numbers}\n"
    return text


def report(heading: str, formats: list[str], losses: list[float]) -> None:
    """Print how much longer the choices take than the best, by format."""
    print(heading)
    groups: dict[str, list[float]] = defaultdict(list)
    for name, loss in zip(formats, losses, strict=True):
        groups[name].append(loss)
    for name, values in groups.items():
        print(
            f"  {name:18} {len(values):4} products, mean {np.mean(values):6.2%}, worst "
            f"{max(values):6.1%}"
        )
    print(f"  all {len(losses):19} products, mean {np.mean(losses):6.2%}")


def fit(model: Model, card: str) -> Costs:
    """Fit the costs of a card, and say how good they are."""
    results = model.results(card)
    rows = [dict(zip(results["columns"], row, strict=True)) for row in results["rows"]]
    for row in rows:
        row["tiles"] = [
            dict(zip(results["candidate_columns"], values, strict=True))
            for values in row["candidates"]
            if not values[0].startswith(PORTABLE)
        ]
    products = [[model.entry(row, tile) for tile in row["tiles"]] for row in rows]
    every = products
    products = [[entry for entry in product if entry.applies] for product in products]
    formats = [row["format"] for row, product in zip(rows, products, strict=True) if product]
    products = [product for product in products if product]
    before = []
    for product in products:
        best = min(entry.us for entry in product)
        before.append(next((entry.us for entry in product if entry.chosen), best) / best - 1)
    report(
        f"{card}, {model.name}: choices of the library that was measured, beyond the best:",
        formats,
        before,
    )
    choices = Choices(products, least_squares(every, model))
    choices.improve()
    report("choices by the fitted costs:", formats, choices.losses)
    return choices.costs


def completed(costs: dict[str, Costs], card: str, model: Model) -> Costs:
    """A card's costs, and another's of the kinds of products that it has none of."""

    def kind(cost: tuple[Key, str]) -> Any:
        return cost if model.members is TILE_COSTS else cost[0]

    own = costs[card]
    kinds = {kind(cost) for cost in own}
    others = {
        cost: value
        for of_card in costs.values()
        for cost, value in of_card.items()
        if kind(cost) not in kinds
    }
    return others | own


def tables() -> Iterator[tuple[Path, str]]:
    """The files that C++ includes, with their contents."""
    tiles, _ = MODELS
    yield (
        CARDS_TABLE,
        made_from(tiles, "name, memory_bandwidth; Card")
        + "".join(f'{{"{card}", {tiles.results(card)["memory_bandwidth"]}}},\n' for card in CARDS),
    )
    for model in MODELS:
        costs = {card: fit(model, card) for card in CARDS}
        yield (
            model.table,
            made_from(model, model.heading)
            + "".join(lines(card, completed(costs, card, model), model) for card in CARDS),
        )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if a table is another than the fit's",
    )
    args = parser.parse_args()
    same = True
    for path, text in tables():
        if args.check:
            same &= path.read_text() == text
        else:
            path.write_text(text)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
