"""`summary.json`, written once when a run ends, however it ends, and the table that the user sees then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.monitor.files import replace_file
from streamrl.monitor.registry import by_reason_class
from transfer_queue.net.messages import QueueStats

FILE = "summary.json"

MAX_DEAD_REASONS = 20
"""Reasons kept in the summary; all of them are in the event log."""

Status = Literal["finished", "interrupted", "failed"]


class Groups(msgspec.Struct, kw_only=True):
    """Where the prompt groups of the training partition ended."""

    trained: int = 0
    dropped: dict[str, int] = {}
    """By class of reason: stale, filtered, failed."""
    dead: int = 0
    dead_reasons: dict[str, str] = {}
    """By uid, of the first ones: those that killed every worker, or whose prompt cannot be read."""

    @classmethod
    def of(cls, stats: QueueStats, partition: str = "train") -> Groups:
        part = stats.partitions.get(partition)
        if part is None:
            return cls()
        return cls(
            trained=part.depth.get("trained", 0),
            dropped=by_reason_class(part.dropped),
            dead=part.depth.get("dead", len(part.dead)),
            dead_reasons=dict(islice(part.dead.items(), MAX_DEAD_REASONS)),
        )


class Summary(msgspec.Struct, kw_only=True):
    """What became of a run. `val_*` are None where no validation ran; seconds are None-free.

    The losses and the busy time of training add up to `measured_seconds`, the time of the steps.
    """

    status: Status
    error: str = ""
    """Why it failed, one line."""
    steps: int
    train_seconds: float
    """From the first step's start to the last one's end, validation before and after left out."""
    val_sampled_before: float | None = None
    val_sampled_after: float | None = None
    val_greedy_before: float | None = None
    val_greedy_after: float | None = None
    val_quantity: Literal["score", "acc"] = "score"
    """What `val_*` are the means of, over all data sources: acc, if every answer of all of them has one."""
    overlap_efficiency: float = 0.0
    overlap_efficiency_steady: float = 0.0
    measured_seconds: float = 0.0
    cpu_bound_seconds: float = 0.0
    """CPU seconds of all processes / cores, over the steps; 0: unknown."""
    lost_seconds_by_cause: dict[str, float] = {}
    busy_seconds: dict[str, float] = {}
    """Of "training" and of "generation" (the mean engine)."""
    generation_waits: dict[str, float] = {}
    groups: Groups = msgspec.field(default_factory=Groups)
    extra: dict[str, Any] = {}
    """What else a mode wants to tell (mode, seed, restarts)."""


def validation_fields(means: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The part of a summary that validations fill. `means`: by label, then `<mode>` the mean score and `<mode>/acc`."""
    shown = product(("before", "after"), ("sampled", "greedy"))
    there = [(label, mode) for label, mode in shown if mode in means.get(label, {})]
    by_acc = bool(there) and all(f"{mode}/acc" in means[label] for label, mode in there)
    values = {f"val_{mode}_{label}": means[label][f"{mode}/acc" if by_acc else mode] for label, mode in there}
    return values | {"val_quantity": "acc" if by_acc else "score"}


def write_summary(run_dir: Path | str, summary: Summary) -> Path:
    """Write it atomically; numbers that are not finite become null."""
    path = Path(run_dir) / FILE
    replace_file(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return path


def read_summary(run_dir: Path | str) -> Summary:
    return msgspec.json.decode((Path(run_dir) / FILE).read_bytes(), type=Summary)


# --- the table at the end -----------------------------------------------------------------------------------------

LABELS = {
    "wait_data": "waiting for data",
    "wait_order": "waiting for order",
    "sync": "weight sync",
    "hand_off": "hand-off",
    "checkpoint": "checkpoint",
    "validation": "validation",
    "bookkeeping": "bookkeeping",
    "unaccounted": "unaccounted",
    "idle": "no request",
}
"""How causes are called where people read them."""


def render_summary(summary: Summary, run_dir: Path | str) -> list[RenderableType]:
    headline = f"{summary.status}: {summary.steps} steps in {summary.train_seconds:.0f} s"
    parts: list[RenderableType] = [Text(headline, style="bold")]
    if summary.error:
        parts.append(Text(summary.error, style="red"))
    passes = (
        ("sampled", summary.val_sampled_before, summary.val_sampled_after),
        ("greedy", summary.val_greedy_before, summary.val_greedy_after),
    )
    if validated := [each for each in passes if each[1:] != (None, None)]:
        parts.append(_validation(validated, summary.val_quantity))
    if summary.measured_seconds > 0:
        steady = f"{summary.overlap_efficiency:.2f}, steady {summary.overlap_efficiency_steady:.2f}"
        parts += [_time(summary), Text(f"overlap efficiency {steady} (bound / measured step time)")]
        if summary.cpu_bound_seconds > 0:
            share = summary.cpu_bound_seconds / summary.measured_seconds
            parts.append(Text(f"CPU bound {share:.2f} (CPU seconds of all processes / cores / measured time)"))
    parts += [_groups(summary), Text(f"run directory: {run_dir}")]
    return parts


def print_summary(summary: Summary, run_dir: Path | str, console: Console | None = None) -> None:
    """Only what there is: no validation without one, no times without a step."""
    console = console or Console()
    for part in render_summary(summary, run_dir):
        console.print(part, soft_wrap=isinstance(part, Text))


def _validation(passes: Sequence[tuple[str, float | None, float | None]], quantity: str) -> Table:
    table = Table(f"validation, mean {quantity}", "before", "after", title_justify="left")
    for name, before, after in passes:
        table.add_row(name, _share(before), _share(after))
    return table


def _share(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def _time(summary: Summary) -> Table:
    """Busy and waiting time of training and of generation, each adding up to the time of the steps."""
    total = summary.measured_seconds
    table = Table("time", "training", "generation", "of the steps")
    for column in (1, 2, 3):
        table.columns[column].justify = "right"

    def row(label: str, training: float | None, generation: float | None) -> None:
        shown = [value for value in (training, generation) if value is not None]
        if max(shown, default=0.0) < 0.05:
            return
        percent = " / ".join(f"{100 * value / total:.0f} %" for value in shown) if total > 0 else ""
        table.add_row(label, *("" if v is None else f"{v:.1f} s" for v in (training, generation)), percent)

    row("busy", summary.busy_seconds.get("training", 0.0), summary.busy_seconds.get("generation", 0.0))
    for cause in {**summary.lost_seconds_by_cause, **summary.generation_waits}:
        row(LABELS.get(cause, cause), summary.lost_seconds_by_cause.get(cause), summary.generation_waits.get(cause))
    return table


def _groups(summary: Summary) -> Text:
    groups = summary.groups
    dropped = ", ".join(f"{count} {reason}" for reason, count in groups.dropped.items()) or "0"
    first = [f"{uid}: {reason}" for uid, reason in islice(groups.dead_reasons.items(), 3)]
    dead = f"{groups.dead} ({'; '.join(first)}{'; ...' if groups.dead > len(first) else ''})" if first else groups.dead
    return Text(f"prompt groups: {groups.trained} trained, dropped: {dropped}, dead: {dead}")
