"""Charts of the outcomes, as SVG."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#6b7280")
CAUSE_COLOURS = {
    "train": "#2563eb", "sync": "#7c3aed", "wait_data": "#d97706", "wait_order": "#dc2626", "hand_off": "#059669",
    "other": "#6b7280",
}  # fmt: skip
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 300, 200, 50, 34, 44

Point = tuple[float, float]
Outcome = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over one pair of axes; `marks` are points drawn large."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[Point]]
    low: float
    high: float
    marks: Sequence[Point] = ()


def write(results: Mapping[str, list[Outcome]], directory: Path) -> None:
    """The charts of those sweeps that were run."""
    directory.mkdir(parents=True, exist_ok=True)
    if outcomes := results.get("lengths"):
        (directory / "efficiency.svg").write_text(svg([efficiency(outcomes)]))
        (directory / "losses.svg").write_text(losses(outcomes))
    if outcomes := results.get("policies"):
        (directory / "policies.svg").write_text(svg(policies(outcomes)))


def efficiency(outcomes: list[Outcome]) -> Panel:
    """η over staleness, a line per distribution; the large points are at S_min."""
    marks = [_point(each, "efficiency") for each in outcomes if each["scenario"]["warmup"] == each["s_min"]]
    lines = _lines(outcomes, lambda each: each["scenario"]["name"], "efficiency")
    return Panel("η, by length distribution", "S (num_warmup_batches)", "η", lines, 0.0, 1.05, marks)


def policies(outcomes: list[Outcome]) -> list[Panel]:
    """η, oldest age, waste and length bias over S, a line per policy and a row of panels per σ."""
    panels = []
    for sigma in sorted({each["scenario"]["sigma"] for each in outcomes}):
        those = [
            each | {"waste": sum(each["wasted"].values())} for each in outcomes if each["scenario"]["sigma"] == sigma
        ]
        oldest = max(each["age_max"] for each in those)
        panels += [
            Panel(f"{title}, σ={sigma:g}", "S", "", _lines(those, _policy, figure), low, high)
            for title, figure, low, high in (
                ("η", "efficiency", 0.0, 1.05),
                ("age of the oldest token", "age_max", 0.0, oldest + 1),
                ("tokens wasted + masked", "gone", 0.0, 0.4),
                ("trained / drawn length", "length_ratio", 0.8, 1.05),
            )
        ]
    return panels


def _policy(outcome: Outcome) -> str:
    return outcome["scenario"]["policy"] or "null"


def _point(outcome: Outcome, figure: str) -> Point:
    value = outcome["waste"] + outcome["masked"] if figure == "gone" else outcome[figure]
    return outcome["scenario"]["warmup"], value


def _lines(outcomes: list[Outcome], name: Callable[[Outcome], str], figure: str) -> dict[str, list[Point]]:
    lines: dict[str, list[Point]] = defaultdict(list)
    for each in outcomes:
        lines[name(each)].append(_point(each, figure))
    return {name: sorted(points) for name, points in lines.items()}


def svg(panels: Sequence[Panel], columns: int = 4) -> str:
    """The panels side by side, with one legend."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    step_x, step_y = LEFT + WIDTH + 20, TOP + HEIGHT + BOTTOM
    parts: list[str] = []
    for place, panel in enumerate(panels):
        left, top = (place % columns) * step_x + LEFT, (place // columns) * step_y + TOP
        parts += _drawn(panel, left, top)
    for place, name in enumerate(panels[0].lines):
        x, y = LEFT + place * 62, rows * step_y + 8
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[place % len(COLOURS)]}"/>')
        parts.append(_text(x + 14, y, name))
    return _document(parts, columns * step_x + 10, rows * step_y + 20)


def _drawn(panel: Panel, left: float, top: float) -> list[str]:
    most = max((x for points in panel.lines.values() for x, _ in points), default=1.0) or 1.0

    def at(point: Point) -> tuple[float, float]:
        share = (min(max(point[1], panel.low), panel.high) - panel.low) / (panel.high - panel.low)
        return left + point[0] / most * WIDTH, top + (1 - share) * HEIGHT

    parts = [
        _text(left, top - 10, panel.title, size=12),
        _text(left + WIDTH / 2, top + HEIGHT + 32, panel.x, anchor="middle"),
    ]
    parts.append(f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#d1d5db"/>')
    for value in ticks(panel.low, panel.high):
        _, y = at((0.0, value))
        parts.append(_text(left - 6, y + 4, f"{value:.3g}", anchor="end"))
        parts.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#f3f4f6"/>')
    for x in sorted({x for points in panel.lines.values() for x, _ in points}):
        parts.append(_text(at((x, panel.low))[0], top + HEIGHT + 16, f"{x:g}", anchor="middle"))
    for place, points in enumerate(panel.lines.values()):
        colour = COLOURS[place % len(COLOURS)]
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, points))
        dashes = f' stroke-dasharray="{4 + 3 * place} {4 * place}"' if place else ""  # lines may lie on each other
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        for point in points:
            x, y = at(point)
            radius = 6 if point in panel.marks else 2.5
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}" fill-opacity="0.8"/>')
    return parts


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, four to nine of them."""
    unit = 10 ** math.floor(math.log10(high - low))
    step = next(step for step in (unit / 10, unit / 5, unit / 4, unit / 2, unit) if (high - low) / step < 8)
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def losses(outcomes: Sequence[Outcome]) -> str:
    """Where the mean step went: a bar per run, in seconds of scale 1, and T* as a tick."""
    parts: list[str] = []
    bars = [(each, {"train": each["train"], **_grouped(each["lost"])}) for each in outcomes]
    longest = max(sum(spent.values()) / each["scenario"]["scale"] for each, spent in bars)
    left, width, height = 130, 560, 12
    for place, (cause, colour) in enumerate(CAUSE_COLOURS.items()):
        parts.append(f'<rect x="{left + place * 90}" y="6" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(left + place * 90 + 14, 15, cause.replace("_", " ")))
    for place, (each, spent) in enumerate(bars):
        scenario, y = each["scenario"], 28 + place * (height + 5)
        unit = width / longest / scenario["scale"]
        parts.append(_text(left - 8, y + 10, f"{scenario['name']}, S={scenario['warmup']:g}", anchor="end"))
        x = float(left)
        for cause, seconds in spent.items():
            long = seconds * unit
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{long:.1f}" height="{height}" fill="{CAUSE_COLOURS[cause]}"/>'
            )
            x += long
        bound = left + each["bound"] * unit
        parts.append(f'<line x1="{bound:.1f}" x2="{bound:.1f}" y1="{y - 2}" y2="{y + height + 2}" stroke="black"/>')
        parts.append(_text(x + 5, y + 10, f"η {each['efficiency']:.2f}"))
    return _document(parts, left + width + 70, 28 + len(bars) * (height + 5) + 10)


def _grouped(lost: Mapping[str, float]) -> dict[str, float]:
    grouped: dict[str, float] = defaultdict(float)
    for cause, seconds in lost.items():
        grouped[cause if cause in CAUSE_COLOURS else "other"] += seconds
    return dict(grouped)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 10) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(text)}</text>'


def _document(parts: Sequence[str], width: float, height: float) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
    white = '<rect width="100%" height="100%" fill="white"/>'
    return head + 'font-family="sans-serif">\n' + white + "\n" + "\n".join(parts) + "\n</svg>\n"
