"""Heat maps as SVG: a ratio in each cell, with a colour and its number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

#: Colours of a ratio of times from 1/3 (darker: faster) over 1 (white) to 3 (slower).
FASTER, SLOWER = (23, 78, 134), (214, 111, 32)
CELL, HEIGHT, FONT = 52, 24, 13
Row = tuple[str, Sequence[float | None]]


def colour(ratio: float) -> tuple[int, int, int]:
    """Red, green and blue of a ratio, linear in its logarithm."""
    distance = min(1.0, abs(math.log(ratio)) / math.log(3))
    to = FASTER if ratio < 1 else SLOWER
    red, green, blue = (round(255 + distance * (end - 255)) for end in to)
    return red, green, blue


def draw(columns: Sequence[str], rows: Sequence[Row], path: Path) -> None:
    """Write a heat map of time over a peer's time.

    Without colours, the numbers say the same, and a slower cell (above 1) has a frame
    and bold digits.

    Args:
        columns: headings.
        rows: a label and the ratio of each column; None leaves a cell empty. A label without ratios
            is the heading of the rows below it.
        path: the SVG file.
    """
    label = round(max((len(name) for name, ratios in rows if ratios), default=0) * FONT * 0.61) + 8
    width, height = label + CELL * len(columns), HEIGHT * (len(rows) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 '
        f'{width} {height}" '
        f'font-family="sans-serif" font-size="{FONT}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i, name in enumerate(columns):
        parts.append(
            f'<text x="{label + CELL * i + CELL // 2}" y="16" '
            f'text-anchor="middle">{escape(name)}</text>'
        )
    for line, (name, ratios) in enumerate(rows, 1):
        top = HEIGHT * line
        x, anchor = (label - 6, "end") if ratios else (0, "start")
        parts.append(f'<text x="{x}" y="{top + 17}" text-anchor="{anchor}">{escape(name)}</text>')
        for i, ratio in enumerate(ratios):
            if ratio is None:
                continue
            rgb = colour(ratio)
            slower = round(ratio, 2) > 1
            ink = "#ffffff" if 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] < 128 else "#000000"
            frame, weight = (' stroke="#000000"', ' font-weight="bold"') if slower else ("", "")
            parts.append(
                f'<rect x="{label + CELL * i + 1.5}" y="{top + 1.5}" width="{CELL - 3}" '
                f'height="{HEIGHT - 3}" '
                f'fill="#{rgb[0]:02x}{rgb[1]:02x}{rgb[2]:02x}"{frame}/>'
            )
            text = f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"
            middle = label + CELL * i + CELL // 2
            parts.append(
                f'<text x="{middle}" y="{top + 17}" text-anchor="middle" '
                f'fill="{ink}"{weight}>{text}</text>'
            )
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")
