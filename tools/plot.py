#!/usr/bin/env python3
"""Draw the results of tools/bench.py.

    tools/plot.py results/h200.json                   writes results/h200.svg
    tools/plot.py results/h200.json --out picture.svg

A picture for each shape of weight and format: over M, the time of one call in times of the floor,
of this package and of the best peer at that M. This package's microseconds stand below M. The same
file gives the same picture, byte for byte.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
#: The M that are written below the axis: there is no room for others.
TICKS = (1, 16, 256, 4096)
COLUMNS = 3
#: Percents of error beside a logarithmic axis.
ERRORS = (1, 2, 5, 10, 20, 50)
OURS, PEER, FLOOR = "#1f5fa8", "#d1762a", "#8a8a8a"


def best_peer(row: dict[str, Any]) -> tuple[str, float] | None:
    """Name and microseconds of the fastest peer; torch's products are of other formats and count
    where there is no other.
    """
    times = {name: us for name, us in row["peers_us"].items() if us is not None}
    of_format = {name: us for name, us in times.items() if not name.startswith("torch ")} or times
    return min(of_format.items(), key=lambda peer: peer[1]) if of_format else None


def panels(rows: Rows) -> dict[tuple[int, int], dict[str, Rows]]:
    """Rows by shape and format, in the order of the file; those of a format by M. What only
    moves data has no M.
    """
    found: dict[tuple[int, int], dict[str, Rows]] = {}
    for row in (row for row in rows if row["m"]):
        found.setdefault((row["n"], row["k"]), {}).setdefault(row["format"], []).append(row)
    for formats in found.values():
        for of_format in formats.values():
            of_format.sort(key=lambda row: row["m"])
    return found


def pyplot(salt: str, size: int) -> Any:
    """Return matplotlib's pyplot for SVG, with this package's style."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcdefaults()
    # Text stays text, and names of parts are not drawn by lot.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": size})
    matplotlib.rcParams.update(
        {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}
    )
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    """Write a picture that does not say when it was drawn."""
    from matplotlib import pyplot as plt

    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close(figure)
    # matplotlib leaves blanks at the ends of lines, which editors and git complain of.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture of ``result`` to ``path``."""
    plt = pyplot("bench", 8)
    plt.rcParams["axes.spines.bottom"] = False
    shapes = panels(result["rows"])
    formats = dict.fromkeys(name for of_shape in shapes.values() for name in of_shape)
    drawn = [
        (name, shape, shapes[shape][name])
        for name in formats
        for shape in shapes
        if name in shapes[shape]
    ]
    lines = -(-len(drawn) // COLUMNS)
    figure, axes = plt.subplots(
        lines, COLUMNS, figsize=(9, 1.55 * lines + 0.4), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(drawn) :]:
        axis.set_axis_off()
    for axis, (name, (n, k), rows) in zip(axes.flat, drawn, strict=False):
        axis.axhline(1, color=FLOOR, linestyle=":")
        with_peer = [(row, peer) for row in rows if (peer := best_peer(row))]
        for colour, marker, points in (
            (PEER, "s", [(row, us) for row, (_, us) in with_peer]),
            (OURS, "o", [(row, row["us"]) for row in rows]),
        ):
            axis.plot(
                [row["m"] for row, _ in points],
                [us / row["floor_us"] for row, us in points],
                color=colour,
                marker=marker,
                markersize=3,
            )
        axis.set_xscale("log", base=2)
        times = {row["m"]: row["us"] for row in rows if row["m"] in TICKS}
        axis.set_xticks(
            list(times),
            [f"{m}\n{us:.0f}" if us >= 100 else f"{m}\n{us:.3g}" for m, us in times.items()],
        )
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_title(f"{name}, {n} x {k}", loc="left", fontsize=8, pad=13)
        names = sorted({peer for _, (peer, _) in with_peer})
        axis.text(
            0,
            1.04,
            "best peer: " + ", ".join(names),
            transform=axis.transAxes,
            color=PEER,
            fontsize=7,
        )
    figure.suptitle(
        f"{result['device']}, torch {result['torch']}: time of one call over the floor's, by M\n"
        "(blue: cutlass_ops, its microseconds below M; orange: the best peer)",
        fontsize=9,
    )
    save(figure, path)


def draw_bars(bars: list[tuple[str, float, tuple[str, float]]], title: str, path: Path) -> None:
    """Draw a pair of bars for each name: this package's microseconds, and a
    peer's with its name.
    """
    plt = pyplot("bars", 9)
    plt.rcParams.update({"axes.grid.axis": "x", "axes.axisbelow": True})
    figure, axis = plt.subplots(figsize=(5.2, 0.6 * len(bars) + 0.8), layout="constrained")
    peers = [f"{peer} {us:.1f}" for _, _, (peer, us) in bars]
    for place, colour, values, texts in (
        (-0.2, OURS, [us for _, us, _ in bars], [f"cutlass_ops {us:.1f}" for _, us, _ in bars]),
        (0.2, PEER, [us for _, _, (_, us) in bars], peers),
    ):
        drawn = axis.barh([i + place for i in range(len(bars))], values, 0.38, color=colour)
        axis.bar_label(drawn, texts, padding=3, fontsize=8)
    axis.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axis.invert_yaxis()
    axis.margins(x=0.5)  # for the label of the longest bar
    figure.suptitle(title, fontsize=9)
    save(figure, path)


def draw_accuracy(results: dict[str, Any], path: Path) -> None:
    """Draw results/accuracy.json: what x's quantisation does to each kind of layer, and what all of
    it does to a model.
    """
    plt = pyplot("accuracy", 9)
    plt.rcParams.update({"axes.grid.axis": "y", "axes.axisbelow": True})
    colours = {
        "token": "#c8553d",
        "block 128": "#8fb8de",
        "block 64": "#4a86bf",
        "block 32": "#1f4e79",
    }
    models = results["models"]
    figure, axes = plt.subplots(
        2 * len(models), 1, figsize=(7, 3.2 * 2 * len(models)), squeeze=False, layout="constrained"
    )
    for i, model in enumerate(models):
        kinds_axis, model_axis = axes[2 * i][0], axes[2 * i + 1][0]
        kinds = model["kinds"]
        for j, (way, colour) in enumerate(colours.items()):
            kinds_axis.bar(
                [place + 0.2 * (j - 1.5) for place in range(len(kinds))],
                [100 * kind["errors"][f"x {way}"] for kind in kinds],
                0.2,
                color=colour,
                label=way,
            )
        names = [
            "\n".join([*kind["kind"].rsplit(".", 1), f"{kind['median_peak_over_rms']:.0f}"])
            for kind in kinds
        ]
        kinds_axis.set_xticks(range(len(kinds)), names, fontsize=8)
        kinds_axis.set_ylabel("error of x @ W^T, %")
        kinds_axis.set_title(
            f"{model['model']}: int8 activations alone\n(number: median of max |x| / rms)",
            fontsize=9,
        )
        kinds_axis.legend(fontsize=8, frameon=False)
        series = {
            "16": ("#777777", "activations not quantised"),
            "8 token": ("#c8553d", "token"),
            "8 block": ("#1f4e79", "block"),
        }
        places = [(bits, group) for bits in (8, 4) for group in (128, 64, 32)]
        for j, (name, (colour, text)) in enumerate(series.items()):
            rows = [
                row
                for row in model["rows"]
                if row.get("symmetric") and "clip" not in row and row["activations"] == name
            ]
            found = {(row["bits"], row["group_size"]): 100 * row["error"] for row in rows}
            model_axis.bar(
                [place + 0.27 * (j - 1) for place in range(len(places))],
                [found[place] for place in places],
                0.27,
                color=colour,
                label=text,
            )
        model_axis.set_xticks(range(len(places)), [f"W{bits}\ng{group}" for bits, group in places])
        model_axis.set_yscale("log")
        model_axis.set_yticks(ERRORS, [str(error) for error in ERRORS])
        model_axis.minorticks_off()
        model_axis.set_ylabel(f"error of {model['compared']}, %")
        model_axis.set_title(f"{model['model']}: the whole model, symmetric", fontsize=9)
        model_axis.legend(fontsize=8, frameon=False)
    save(figure, path)


def main() -> None:
    """Draw the file that the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="a file written by tools/bench.py --out")
    parser.add_argument("--out", type=Path, help="the SVG file; next to the results by default")
    arguments = parser.parse_args()
    try:
        result = json.loads(arguments.results.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"{arguments.results}: {error}")
    if not isinstance(result, dict) or not result.get("rows"):
        parser.error(f"{arguments.results} has no rows of measurements")
    out = arguments.out or arguments.results.with_suffix(".svg")
    draw(result, out)
    print(out)


if __name__ == "__main__":
    main()
