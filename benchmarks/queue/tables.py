"""The results as a markdown table and as a chart (SVG): medians of each side, and ratios to ours."""

from __future__ import annotations

import html
import math
from pathlib import Path

from benchmarks.bars import Bar
from benchmarks.queue.workload import Figures

COLOURS = {"ours": "#2563eb", "peer": "#d97706", "memcpy": "#6b7280"}
NOT_SECONDS = (
    "bytes", "bytes a row", "trials", "clients", "requests a second, slowest client", "descriptors", "threads",
    "rows", "found", "large, held", "large, live", "many, held", "many, live", "spilled bytes", "answered", "right",
    "taken", "filled", "consumed",
)  # fmt: skip
"""Figures that are bytes, counts or shares; the bars tell them with their unit."""


def markdown(results: dict[str, Figures], bars: list[Bar], heading: str, *, quick: bool = False) -> str:
    """One table of medians, one of bars."""
    lines = [f"# {heading}", "", "| workload | figure | ours | peer | peer / ours | memcpy | ours / memcpy | load |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, figures in results.items():
        load = f"{min(figures.loads):.1f}-{max(figures.loads):.1f}"
        for what in figures.rounds["ours"]:
            if what in NOT_SECONDS:
                continue
            ours, peer, copy = (_median(figures, side, what) for side in ("ours", "peer", "memcpy"))
            cells = [_time(ours), _time(peer), _ratio(peer, ours), _time(copy), _ratio(ours, copy), load]
            lines.append(f"| {name} | {what} | " + " | ".join(cells) + " |")
    lines += ["", "| figure | value | unit | bar | holds |", "|---|---|---|---|---|"]
    for bar in bars:
        limit = "" if bar.bar is None else f"{bar.sense} {bar.bar:g}"
        holds = bar.verdict(quick=quick).replace("NO", "**no**")
        lines.append(f"| {bar.name} | {bar.value:.4g} | {bar.unit} | {limit} | {holds} |")
    return "\n".join(lines) + "\n"


def chart(results: dict[str, Figures]) -> str:
    """Horizontal bars on a logarithmic scale of seconds, for the figures that more than one side has."""
    rows = [
        (f"{name}: {what}", [(side, figures.median(side, what)) for side in figures.sides() if figures.has(side, what)])
        for name, figures in results.items()
        for what in figures.rounds["ours"]
        if what not in NOT_SECONDS and sum(figures.has(side, what) for side in figures.sides()) > 1
    ]
    times = [value for _, sides in rows for _, value in sides if value > 0]
    low, high = (math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))) if times else (0, 1)
    left, width, line = 260, 520, 12
    scale = width / max(1, high - low)
    parts, y = [], 40
    for side, x in zip(COLOURS, range(left, left + 300, 100), strict=False):
        parts.append(f'<rect x="{x}" y="10" width="10" height="10" fill="{COLOURS[side]}"/>')
        parts.append(f'<text x="{x + 14}" y="19">{side}</text>')
    for label, sides in rows:
        parts.append(f'<text x="{left - 8}" y="{y + 10}" text-anchor="end">{html.escape(label)}</text>')
        for side, value in sides:
            length = max(1.0, (math.log10(max(value, 10.0**low)) - low) * scale)
            parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{line - 2}" fill="{COLOURS[side]}"/>')
            parts.append(f'<text x="{left + length + 4:.1f}" y="{y + 9}">{_time(value)}</text>')
            y += line
        y += 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" height="{y + 10}" '
    return head + 'font-family="sans-serif" font-size="10">\n' + "\n".join(parts) + "\n</svg>\n"


def write(path: Path | None, text: str) -> None:
    if path is not None:
        path.write_text(text)


def _median(figures: Figures, side: str, what: str) -> float | None:
    return figures.median(side, what) if figures.has(side, what) else None


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{1e3 * seconds:.3g} ms"
        if seconds >= 1e-3
        else f"{1e6 * seconds:.3g} µs"
    )


def _ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.3g}" if a is not None and b else ""
