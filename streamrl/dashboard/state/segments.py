"""What the trainer's devices did at each instant of a step: the drawn form of the overlap account.

The account (monitor/overlap_account.py) says how many seconds a step lost to which cause; this says when. Both take the
same intervals by the same precedence, so what is drawn adds up to the numbers in the metrics.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from streamrl.monitor.overlap_account import PRECEDENCE
from streamrl.monitor.schema import CAUSE_OF_SPAN, TRAIN_SPANS


class Segment(NamedTuple):
    """`what` is a training span's name, a cause, or "unaccounted"."""

    start: float
    end: float
    what: str


_RANK = {name: rank for rank, name in enumerate((*TRAIN_SPANS, *PRECEDENCE, "unaccounted"))}


def what_of(span: str) -> str | None:
    """What a span of the trainer is drawn as; None for one that is no part of the account."""
    return span if span in TRAIN_SPANS else CAUSE_OF_SPAN.get(span)


def segments(start: float, end: float, spans: Iterable[Segment]) -> list[Segment]:
    """From `start` to `end` without gap or overlap: at each instant the first in precedence of what was going on."""
    inside = [Segment(max(s.start, start), min(s.end, end), s.what) for s in spans if s.end > start and s.start < end]
    edges = sorted({start, end, *(s.start for s in inside), *(s.end for s in inside)})
    best = [_RANK["unaccounted"]] * len(edges)
    for segment in inside:
        rank = _RANK[segment.what]
        for at in range(bisect_right(edges, segment.start) - 1, len(edges) - 1):
            if edges[at] >= segment.end:
                break
            best[at] = min(best[at], rank)
    names = list(_RANK)
    found: list[Segment] = []
    for at in range(len(edges) - 1):
        what = names[best[at]]
        if found and found[-1].what == what:
            found[-1] = found[-1]._replace(end=edges[at + 1])
        else:
            found.append(Segment(edges[at], edges[at + 1], what))
    return found


def seconds_by(parts: Iterable[Segment]) -> dict[str, float]:
    """Seconds of each kind; those of training also together, as "training"."""
    totals: dict[str, float] = {}
    for segment in parts:
        totals[segment.what] = totals.get(segment.what, 0.0) + segment.end - segment.start
    totals["training"] = sum(totals.get(name, 0.0) for name in TRAIN_SPANS)
    return totals


def binned(parts: Mapping[str, list[Segment]] | list[Segment], start: float, end: float, bins: int) -> list[Segment]:
    """No more than `bins` segments of [start, end): in each bin what most of it was, neighbours of a kind joined."""
    flat = parts if isinstance(parts, list) else [s for each in parts.values() for s in each]
    width = (end - start) / bins
    seconds: list[dict[str, float]] = [{} for _ in range(bins)]
    for segment in flat:
        first, last = max(0, int((segment.start - start) / width)), min(bins - 1, int((segment.end - start) / width))
        for at in range(first, last + 1):
            inside = min(segment.end, start + (at + 1) * width) - max(segment.start, start + at * width)
            if inside > 0:
                seconds[at][segment.what] = seconds[at].get(segment.what, 0.0) + inside
    found: list[Segment] = []
    for at, kinds in enumerate(seconds):
        if not kinds or sum(kinds.values()) < width / 2:
            continue
        what = max(kinds, key=lambda kind: kinds[kind])
        left, right = start + at * width, start + (at + 1) * width
        if found and found[-1].what == what and found[-1].end > left - width / 2:
            found[-1] = found[-1]._replace(end=right)
        else:
            found.append(Segment(left, right, what))
    return found
