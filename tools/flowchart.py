"""Flow charts of the kernels as SVG, from the top down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH, BOX, GAP, FONT = 480, 30, 44, 13


class Chart(NamedTuple):
    """Boxes and arrows.

    Attributes:
        rows: keys of the boxes of each row, from the top.
        boxes: the text of each box.
        arrows: from, to, and what is said beside the arrow; from one row to a later one.
    """

    rows: Sequence[Sequence[str]]
    boxes: Mapping[str, str]
    arrows: Sequence[tuple[str, str, str]]


CHARTS = {
    "wgmma_gemm_a8": Chart(
        (("x", "w"), ("stage",), ("wgmma",), ("promotion",), ("epilogue",)),
        {
            "x": "x: int8 codes, scales",
            "w": "weight: packed codes, scales",
            "stage": "stage: 128 columns",
            "wgmma": "wgmma s8: int32 sums",
            "promotion": "promotion to fp32",
            "epilogue": "epilogue: bias, activation, residual",
        },
        (
            ("x", "stage", "TMA multicast"),
            ("w", "stage", "bulk copy"),
            ("stage", "wgmma", "A: registers, int4 to int8"),
            ("wgmma", "promotion", "fp32 += sum * s_x * s_w"),
            ("promotion", "epilogue", ""),
        ),
    ),
    "wgmma_gemm_a16": Chart(
        (("x", "w"), ("stage",), ("wgmma",), ("promotion",), ("epilogue",)),
        {
            "x": "x: fp16 or bf16",
            "w": "weight: packed codes, scales",
            "stage": "stage: 128 columns",
            "wgmma": "wgmma f16: fp32 sums of a group",
            "promotion": "promotion",
            "epilogue": "epilogue: bias, activation, residual",
        },
        (
            ("x", "stage", "TMA multicast"),
            ("w", "stage", "bulk copy"),
            ("stage", "wgmma", "A: registers, q - z"),
            ("wgmma", "promotion", "fp32 += sum * s_w"),
            ("promotion", "epilogue", ""),
        ),
    ),
    "wgmma_fold16": Chart(
        (("x", "w"), ("xs", "ws"), ("wgmma",), ("epilogue",)),
        {
            "x": "x: 16 bits (int8: its values)",
            "w": "codes, scales, offsets, zeros",
            "xs": "x stages: 64 columns",
            "ws": "weight stages: 128 columns",
            "wgmma": "wgmma f16: fp32 sums over K",
            "epilogue": "epilogue: bias, activation, residual",
        },
        (
            ("x", "xs", "TMA multicast"),
            ("w", "ws", "bulk copy"),
            ("xs", "wgmma", "B"),
            ("ws", "wgmma", "A: registers, s * (q - z) + o"),
            ("wgmma", "epilogue", ""),
        ),
    ),
    "experts": Chart(
        (("ids",), ("route", "x"), ("up",), ("down",), ("sum",)),
        {
            "ids": "ids",
            "x": "x",
            "route": "assign_slots: slots, tiles",
            "up": "gate and up: act(gate) * up",
            "down": "down",
            "sum": "sum_experts: weighted, in the order of ids",
        },
        (
            ("ids", "route", ""),
            ("x", "up", "quantised, with act_quant"),
            ("route", "up", ""),
            ("up", "down", "quantised, with act_quant"),
            ("down", "sum", ""),
        ),
    ),
}


def draw(chart: Chart, path: Path) -> None:
    """Write a chart to an SVG file."""
    places = {}  # centre, top and width of each box
    for line, keys in enumerate(chart.rows):
        for i, key in enumerate(keys):
            centre = WIDTH * (2 * i + 1) // (2 * len(keys))
            places[key] = (
                centre,
                2 + line * (BOX + GAP),
                round(len(chart.boxes[key]) * FONT * 0.53) + 20,
            )
    height = 4 + len(chart.rows) * (BOX + GAP) - GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 '
        f'{WIDTH} {height}" '
        f'font-family="sans-serif" font-size="{FONT}">',
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for start, end, _ in chart.arrows:
        (x1, y1, _), (x2, y2, width) = places[start], places[end]
        x2 += max(-width // 3, min(width // 3, (x1 - x2) // 3))
        parts.append(
            f'<line x1="{x1}" y1="{y1 + BOX}" x2="{x2}" y2="{y2}" stroke="#000000" '
            'marker-end="url(#head)"/>'
        )
    for start, end, text in chart.arrows:
        if text:
            (x1, y1, _), (x2, y2, _) = places[start], places[end]
            middle, y = round(x1 + (x2 - x1) * 0.5 * (BOX + GAP) / (y2 - y1)), y1 + BOX + 26
            half = round(len(text) * (FONT - 1) * 0.27) + 4
            middle = max(half, min(WIDTH - half, middle))
            parts.append(
                f'<rect x="{middle - half}" y="{y - 12}" width="{2 * half}" height="16" '
                'fill="#ffffff"/>'
            )
            parts.append(
                f'<text x="{middle}" y="{y}" text-anchor="middle" '
                f'font-size="{FONT - 1}">{escape(text)}</text>'
            )
    for key, (centre, top, width) in places.items():
        parts.append(
            f'<rect x="{centre - width // 2}" y="{top}" width="{width}" height="{BOX}" rx="4" '
            'fill="#e8eef6" stroke="#1f5fa8"/>'
        )
        parts.append(
            f'<text x="{centre}" y="{top + 20}" '
            f'text-anchor="middle">{escape(chart.boxes[key])}</text>'
        )
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")
