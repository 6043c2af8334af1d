"""What limits a run, in one sentence: a pure function of what its last steps lost to which cause.

The shares are those of the overlap account (docs/metrics.md, `lost_s/*` and `overlap/*`) over the last steps, plus what
the step under way has lost so far, so a run that stands still is judged by that and not by how well it once ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from streamrl.dashboard.state.health import Health
from streamrl.monitor.schema import CAUSES

Tone = Literal["good", "note", "warn", "bad"]

STEPS = 10
"""Steps that are looked back on."""

IDLE_SHARE = 0.15
"""Share of the time in which the mean engine idles from which that is worth a word."""

TOOL_SHARE = 0.5
"""Share of their time in tools from which sessions are said to wait for them."""

LOSS_SHARE = 0.3
"""Share that one cause takes from which the verdict is a warning."""

TOOL_SECONDS = 5.0
TOOL_FACTOR = 5.0
"""A tool call hangs after so many seconds, and so many times what calls of that tool usually take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """A tool call that has not ended."""

    tool: str
    worker: str
    since: float
    uid: str = ""
    session: int = -1
    usual: float = 0.0
    """Median seconds of the calls of this tool that ended."""

    def hangs(self, now: float) -> bool:
        return now - self.since > max(TOOL_SECONDS, TOOL_FACTOR * self.usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that the verdict depends on."""

    health: Health
    status: str
    now: float
    part: str = ""
    """While starting: what is there now."""
    error: str = ""
    """Of a run that failed."""
    mode: str = "separate_async"
    steps: Sequence[Mapping[str, float]] = ()
    """Metrics of the last steps."""
    partial: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the step under way, by cause and "training"."""
    waits_now: str = ""
    """The cause for which the trainer waits at this moment, if it does."""
    depth: Mapping[str, int] = field(default_factory=dict)
    credit: int = 0
    """Groups that may be out; 0: unknown."""
    feeder_waits: bool = False
    """Whether the feeder waits for credit."""
    tools: Sequence[OpenCall] = ()
    tool_share: float = 0.0
    """Share of the time of the sessions that ended lately in which they waited for tools, ..."""
    queue_share: float = 0.0
    """... and for a slot in a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`cause` names it for machines; `share` of the time looked at, if that is what the headline is about."""

    tone: Tone
    cause: str
    headline: str
    detail: str = ""
    advice: str = ""
    share: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    """Of all causes and "training"; they add up to 1."""


def verdict(s: Situation) -> Verdict:
    """Death, then a hanging tool, then the greatest loss."""
    shares, whole = _shares(s)
    if s.health.condition in ("dead", "stale"):
        what = "The run is dead" if s.health.condition == "dead" else "The run is silent"
        return Verdict(
            tone="bad", cause=s.health.condition, headline=what, detail=s.health.why, shares=shares,
            advice="The same command goes on from its last checkpoint." if s.health.condition == "dead" else
            "Look at its terminal and trainer.log; a stopped process goes on with `kill -CONT`.",
        )  # fmt: skip
    if s.status == "failed":
        return Verdict(
            tone="bad", cause="failed", headline="The run failed", detail=s.error or "Its log says why.", shares=shares,
            advice="See trainer.log and logs/ in the run directory.",
        )  # fmt: skip
    if s.health.condition == "live" and (hung := _hung(s)) is not None:
        return _of_tool(s, hung, shares)
    if whole <= 0:
        part = f"There so far: {s.part}." if s.part else ""
        words = {"starting": "Starting", "validating": "Validating"}
        return Verdict(
            tone="note", cause="starting", headline=words.get(s.status, "No step has ended yet"), detail=part
        )
    return _greatest(s, shares)


def _shares(s: Situation) -> tuple[dict[str, float], float]:
    """Shares by cause, and the seconds that they are of."""
    seconds = dict.fromkeys(("training", *CAUSES), 0.0)
    for step in s.steps:
        seconds["training"] += step.get("overlap/train_s", 0.0)
        for cause in CAUSES:
            seconds[cause] += step.get(f"lost_s/{cause}", 0.0)
    if s.health.alive:
        for name, value in s.partial.items():
            if name in seconds:
                seconds[name] += value
    whole = sum(seconds.values())
    return ({name: value / whole for name, value in seconds.items()} if whole > 0 else {}), whole


def _hung(s: Situation) -> OpenCall | None:
    hanging = [call for call in s.tools if call.hangs(s.now)]
    return min(hanging, key=lambda call: call.since, default=None)


def _of_tool(s: Situation, call: OpenCall, shares: Mapping[str, float]) -> Verdict:
    hanging = sum(other.hangs(s.now) for other in s.tools)
    more = f", and {hanging - 1} more calls hang" if hanging > 1 else ""
    blocks = s.waits_now in ("wait_data", "wait_order")
    usual = f" (others take {call.usual:.2g} s)" if call.usual else ""
    return Verdict(
        tone="bad" if blocks else "warn",
        cause="tool",
        headline=f"A tool hangs: {call.tool}",
        detail=f"A call of {call.worker}, session {call.session} of group {call.uid}, has not come back{usual}{more}."
        + (" The trainer waits for data meanwhile." if blocks else ""),
        advice="Look at what the tool waits for; rollout.multi_turn.tool_timeout ends such calls, with an error that "
        "the model can read.",
        shares=shares,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    """What the greatest loss is judged by."""

    s: Situation
    shares: Mapping[str, float]
    worst: str
    over: str
    """The time looked at, in words."""
    idle: float
    """Share of it in which the mean engine had nothing to do."""

    @property
    def turns(self) -> bool:
        """Whether generation and training take turns in this mode, so that one always waits for the other."""
        return self.s.mode in ("sync", "colocate_async")

    @property
    def percent(self) -> str:
        return f"{100 * self.shares[self.worst]:.0f} %"

    @property
    def engines_idled(self) -> str:
        return f"the engines idled {100 * self.idle:.0f} % of it"

    def says(self, cause: str, headline: str, detail: str, advice: str = "", share: float | None = None) -> Verdict:
        ended = self.s.health.condition == "ended"
        lost = self.worst != "training" and self.shares[self.worst] > LOSS_SHARE
        tone: Tone = "note" if ended else "good" if cause == "training" else "warn" if lost else "note"
        return Verdict(
            tone=tone, cause=cause, headline=headline, detail=detail, advice=advice, shares=self.shares,
            share=self.shares[self.worst] if share is None else share,
        )  # fmt: skip


def _greatest(s: Situation, shares: Mapping[str, float]) -> Verdict:
    over = f"the last {len(s.steps)} steps" if len(s.steps) > 1 else "the last step"
    if s.partial and s.health.alive:
        over = f"{over} and the one under way" if s.steps else "the step under way"
    looked = _Looked(s=s, shares=shares, worst=max(shares, key=lambda name: shares[name]), over=over, idle=_idle(s))
    if looked.worst == "training":
        return _training(looked)
    if looked.worst == "wait_data":
        return _starved(looked)
    headline, subject, advice = LOST[looked.worst]
    return looked.says(looked.worst, headline, f"{subject} took {looked.percent} of {over}.", advice)


def _training(at: _Looked) -> Verdict:
    s = at.s
    if at.idle <= IDLE_SHARE or at.turns:
        well = "" if at.turns else "This is what a well balanced run looks like."
        return at.says("training", "Trainer-bound", f"The trainer worked for {at.percent} of {at.over}.", well)
    out = f" All {s.credit} groups that may be out are out." if s.credit and _out(s) >= s.credit else ""
    return at.says(
        "credit",
        "Trainer-bound: the rollout waits for credit",
        f"The trainer worked for {at.percent} of {at.over} and cannot keep up: {at.engines_idled}.{out}",
        "Make training faster (more ranks, larger micro-batches), or give it devices of the rollout.",
        share=at.idle,
    )


def _starved(at: _Looked) -> Verdict:
    s, waited = at.s, f"The trainer waited for data for {at.percent} of {at.over}"
    if at.turns:
        return at.says(
            "wait_data", "Rollout-bound", f"{waited}; in this mode generation and training take turns.",
            "trainer.v1.trainer_mode=separate_async overlaps them.",
        )  # fmt: skip
    if at.idle > IDLE_SHARE and s.feeder_waits and not s.depth.get("pending", 0):
        return at.says(
            "credit_starved", "Rollout-bound: no credit for more prompts",
            f"{waited}, though {at.engines_idled}: all groups that may be out are, and wait for their last sessions.",
            "More prompts in flight hide the longest sessions: raise trainer.v1.separate_async.num_warmup_batches.",
        )  # fmt: skip
    if s.tool_share > TOOL_SHARE:
        return at.says(
            "tools", "Rollout-bound: sessions wait for tools",
            f"{waited}; sessions spent {100 * s.tool_share:.0f} % of their time in tools.",
            "Make tools faster, or run more sessions at once (rollout.agent.max_sessions).",
        )  # fmt: skip
    if at.idle > IDLE_SHARE:
        return at.says(
            "wait_data", "Rollout-bound", f"{waited}, though {at.engines_idled}.",
            "Sessions are too few to keep the engines busy: raise rollout.agent.max_sessions.",
        )  # fmt: skip
    line = f", and sessions waited {100 * s.queue_share:.0f} % of their time for a slot" if s.queue_share > 0.2 else ""
    return at.says(
        "wait_data", "Rollout-bound", f"{waited}; the engines were busy{line}.",
        "More or faster engines, or shorter answers, would make it faster.",
    )  # fmt: skip


def _idle(s: Situation) -> float:
    """Share of the last steps in which the mean engine had nothing to do."""
    whole = sum(step.get("overlap/step_s", 0.0) for step in s.steps)
    return sum(step.get("overlap/generation_idle_s", 0.0) for step in s.steps) / whole if whole > 0 else 0.0


def _out(s: Situation) -> int:
    return sum(s.depth.get(state, 0) for state in ("pending", "generating", "ready", "training"))


LOST: Mapping[str, tuple[str, str, str]] = {
    "wait_order": (
        "Held back by order",
        "Groups were ready, but dispatch order or the age policy held them back; that",
        "A larger bound on staleness, or more prompts in flight, lets the trainer take what is there.",
    ),
    "sync": (
        "Weight sync",
        "Carrying new weights to the servers",
        "docs/rollout.md compares the ways (shm, delta, collective) and what each costs.",
    ),
    "hand_off": (
        "Hand-off",
        "Leasing groups and handing them to the ranks",
        "Larger mini-batches are handed off less often.",
    ),
    "checkpoint": (
        "Checkpoints",
        "Writing checkpoints",
        "trainer.async_save=true writes them beside training; save_freq says how often.",
    ),
    "validation": (
        "Validation",
        "Validation in training's place",
        "test_freq says how often; in separate_async it goes on beside training.",
    ),
    "bookkeeping": ("Bookkeeping", "Choosing groups and writing the step down", ""),
    "unaccounted": ("Unaccounted time", "Time that no span accounts for", "The timeline shows where it lies."),
}
"""Headline, subject and advice of the causes that need no further look."""
