#!/usr/bin/env python3
"""Draw what tools/bench.py measured.

    tools/plot.py results/h200.json                   writes results/h200.svg
    tools/plot.py results/h200.json --out picture.svg

Two pictures for each shape of weight and format, over M. Above, the time of one call in times of the floor, of this package and
of the best peer at that M, with this package's microseconds; below, the rate of the products and the floor's. The same file
gives the same picture, byte for byte.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
OURS, PEER, FLOOR = "#1f5fa8", "#d1762a", "#8a8a8a"


def best_peer(row: dict[str, Any]) -> tuple[str, float] | None:
    """Name and microseconds of the fastest peer; torch's products are of other formats and count where there is no other."""
    times = {name: us for name, us in row["peers_us"].items() if us is not None}
    of_format = {name: us for name, us in times.items() if not name.startswith("torch ")} or times
    return min(of_format.items(), key=lambda peer: peer[1]) if of_format else None


def panels(rows: Rows) -> dict[tuple[int, int], dict[str, Rows]]:
    """Rows by shape and format, in the order of the file; those of a format by M. What only moves data has no M."""
    found: dict[tuple[int, int], dict[str, Rows]] = {}
    for row in (row for row in rows if row["m"]):
        found.setdefault((row["n"], row["k"]), {}).setdefault(row["format"], []).append(row)
    for formats in found.values():
        for of_format in formats.values():
            of_format.sort(key=lambda row: row["m"])
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture of ``result`` to ``path``."""
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and names of parts are not drawn by lot.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 8})
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3})
    import matplotlib.pyplot as plt

    shapes = panels(result["rows"])
    columns = max(len(formats) for formats in shapes.values())
    figure, axes = plt.subplots(
        2 * len(shapes), columns, figsize=(2.6 * columns, 4.4 * len(shapes)), squeeze=False, layout="constrained"
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
            with_peer = [(m, peer, row["us"]) for m, peer, row in zip(ms, peers, rows, strict=True) if peer]
            peer_names = sorted({peer[0] for _, peer, _ in with_peer})

            def tops(m: int, us: float, n: int = n, k: int = k) -> float:
                return 2 * m * n * k / us / 1e6

            floor = {row["m"]: row["floor_us"] for row in rows}
            rate.plot(ms, [tops(m, floor[m]) for m in ms], color=FLOOR, linestyle=":", label="floor")
            for axis, value in ((time, lambda m, us, floor=floor: us / floor[m]), (rate, tops)):
                axis.plot(
                    [m for m, _, _ in with_peer],
                    [value(m, peer[1]) for m, peer, _ in with_peer],
                    color=PEER,
                    marker="s",
                    markersize=3,
                    label="best peer: " + ", ".join(peer_names),
                )
                axis.plot(ms, [value(r["m"], r["us"]) for r in rows], color=OURS, marker="o", markersize=3, label="cutlass_ops")
                axis.set_xscale("log", base=2)
                axis.set_xticks(ms, [str(m) for m in ms], rotation=45)
                axis.minorticks_off()
            for r in rows:
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
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    # matplotlib leaves blanks at the ends of lines, which editors and git complain of.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def main() -> None:
    """Draw the file that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what tools/bench.py --out wrote")
    parser.add_argument("--out", type=Path, help="the SVG file; beside the results if not given")
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
