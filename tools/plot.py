#!/usr/bin/env python3
"""Draw the results of tools/bench.py.

    tools/plot.py results/h200.json                   writes results/h200.svg
    tools/plot.py results/h200.json --out picture.svg

Two pictures for each shape of weight and format, over M. Above, the time of one call in times of
the floor, of this package and of the best peer at that M, with this package's microseconds; below,
the rate of the products and the floor's. The same file gives the same picture, byte for byte.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
#: The M that are written beside the axis and the points: others stand too close to these.
TICKS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
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
    shapes = panels(result["rows"])
    columns = max(len(formats) for formats in shapes.values())
    figure, axes = plt.subplots(
        2 * len(shapes),
        columns,
        figsize=(3.6 * columns, 4.4 * len(shapes)),
        squeeze=False,
        layout="constrained",
    )
    for line, ((n, k), formats) in enumerate(shapes.items()):
        for column in range(columns):
            time, rate = axes[2 * line][column], axes[2 * line + 1][column]
            if column >= len(formats):
                time.set_axis_off(), rate.set_axis_off()
                continue
            name, rows = list(formats.items())[column]
            ms = [row["m"] for row in rows]
            peers = [best_peer(row) for row in rows]
            with_peer = [
                (m, peer, row["us"]) for m, peer, row in zip(ms, peers, rows, strict=True) if peer
            ]
            peer_names = sorted({peer[0] for _, peer, _ in with_peer})

            def tops(m: int, us: float, n: int = n, k: int = k) -> float:
                return 2 * m * n * k / us / 1e6

            floor = {row["m"]: row["floor_us"] for row in rows}
            rate.plot(
                ms, [tops(m, floor[m]) for m in ms], color=FLOOR, linestyle=":", label="floor"
            )
            for axis, value in ((time, lambda m, us, floor=floor: us / floor[m]), (rate, tops)):
                axis.plot(
                    [m for m, _, _ in with_peer],
                    [value(m, peer[1]) for m, peer, _ in with_peer],
                    color=PEER,
                    marker="s",
                    markersize=3,
                    label="best peer: " + ", ".join(peer_names),
                )
                axis.plot(
                    ms,
                    [value(r["m"], r["us"]) for r in rows],
                    color=OURS,
                    marker="o",
                    markersize=3,
                    label="cutlass_ops",
                )
                axis.set_xscale("log", base=2)
                ticks = [m for m in ms if m in TICKS]
                axis.set_xticks(ticks, [str(m) for m in ticks], rotation=45)
                axis.minorticks_off()
            for r in (r for r in rows if r["m"] in TICKS):
                at = (r["m"], r["us"] / r["floor_us"])
                time.annotate(
                    f"{r['us']:.0f}" if r["us"] >= 100 else f"{r['us']:.3g}",
                    at,
                    (0, -9),
                    textcoords="offset points",
                    ha="center",
                    fontsize=6,
                    color=OURS,
                )
            time.axhline(1, color=FLOOR, linestyle=":")
            time.set_ylim(bottom=0)
            rate.set_yscale("log")
            time.set_title(f"{name}, {n} x {k}")
            time.set_ylabel("time / floor; us")
            rate.set_ylabel("TFLOP/s" if "a16" in name else "TOPS")
            rate.set_xlabel("M")
            rate.legend(fontsize=6, loc="lower right")
    measured = f"{result['device']}, torch {result['torch']}"
    figure.suptitle(f"{measured}: time of one call in times of the floor, and its rate, over M")
    save(figure, path)


def draw_bars(bars: list[tuple[str, float, tuple[str, float]]], title: str, path: Path) -> None:
    """Draw a pair of bars for each name: this package's microseconds, and a
    peer's with its name.
    """
    plt = pyplot("bars", 9)
    plt.rcParams.update({"axes.grid.axis": "x", "axes.axisbelow": True})
    figure, axis = plt.subplots(figsize=(7, 0.6 * len(bars) + 0.8), layout="constrained")
    peers = [f"{peer} {us:.1f}" for _, _, (peer, us) in bars]
    for place, colour, values, texts in (
        (-0.2, OURS, [us for _, us, _ in bars], [f"cutlass_ops {us:.1f}" for _, us, _ in bars]),
        (0.2, PEER, [us for _, _, (_, us) in bars], peers),
    ):
        drawn = axis.barh([i + place for i in range(len(bars))], values, 0.38, color=colour)
        axis.bar_label(drawn, texts, padding=3, fontsize=8)
    axis.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.set_title(title, fontsize=9)
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
        len(models), 2, figsize=(11, 3.6 * len(models)), squeeze=False, layout="constrained"
    )
    for (left, right), model in zip(axes, models, strict=True):
        kinds = model["kinds"]
        for i, (way, colour) in enumerate(colours.items()):
            heights = [100 * kind["errors"][f"x {way}"] for kind in kinds]
            left.bar(
                [j + 0.2 * (i - 1.5) for j in range(len(kinds))],
                heights,
                0.2,
                color=colour,
                label=way,
            )
        names = [
            "\n".join([*kind["kind"].rsplit(".", 1), f"{kind['median_peak_over_rms']:.0f}"])
            for kind in kinds
        ]
        left.set_xticks(range(len(kinds)), names, fontsize=7)
        left.set_ylabel("error of x @ W^T, %")
        left.set_title(
            f"{model['model']}: int8 activations alone\n(number: median of max |x| / rms)",
            fontsize=9,
        )
        left.legend(fontsize=8, frameon=False)
        series = {
            "16": ("#777777", "activations not quantised"),
            "8 token": ("#c8553d", "token"),
            "8 block": ("#1f4e79", "block"),
        }
        places = [(bits, group) for bits in (8, 4) for group in (128, 64, 32)]
        for i, (name, (colour, text)) in enumerate(series.items()):
            rows = [
                row
                for row in model["rows"]
                if row.get("symmetric") and "clip" not in row and row["activations"] == name
            ]
            found = {(row["bits"], row["group_size"]): 100 * row["error"] for row in rows}
            heights = [found[place] for place in places]
            right.bar(
                [j + 0.27 * (i - 1) for j in range(len(places))],
                heights,
                0.27,
                color=colour,
                label=text,
            )
        right.set_xticks(range(len(places)), [f"W{bits}\ng{group}" for bits, group in places])
        right.set_yscale("log")
        right.set_ylabel(f"error of {model['compared']}, %")
        right.set_title(f"{model['model']}: the whole model, symmetric", fontsize=9)
        right.legend(fontsize=8, frameon=False)
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
