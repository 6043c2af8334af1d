"""What sessions cost and what became of them, from the events of a run: waste by reason, length bias, times.

    session spans ──► SessionAccount ◄── trained(uids), left(uids, reason)     the trainer's own word on each group
                            └──► step_metrics(): of what was seen since the last call

A session's tokens are first its group's; they are trained or wasted when the group is. A session that failed, or was
cancelled or interrupted, is wasted at once, under the reason for which its group left if that is known already.

Of a cancelled or interrupted session only is known that it would have been longer than it was: its length is censored.
What the mean length of all sessions is then, is estimated as survival times are (Kaplan and Meier, 1958).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from streamrl.monitor.events import Event
from streamrl.monitor.registry import by_reason_class

PARTITION = "train"

REMEMBERED = 4096
"""Groups that have left, of which a session may still be told."""

TIMES = {
    "agent_loop/generate_sequences": ("engine_seconds", "queue_seconds"),
    "agent_loop/queue": ("queue_seconds",),
    "agent_loop/tool_calls": ("tool_seconds",),
    "agent_loop/teacher": ("teacher_seconds",),
    "tool_call_counts": ("tool_calls",),
}
"""Metric -> the fields of a session span that it adds up."""

STAGES = {
    "wait_data": "gen", "wait_order": "gen", "publish": "update_weights", "checkpoint": "save_checkpoint",
    "validate": "testing", "validate_beside": "testing",
}  # fmt: skip
"""Span of the trainer -> its name in timing_s/*. Those of the ranks' stages come with their own metrics."""


CUT = ("cancelled", "interrupted")
"""Status of a session that would have gone on: nobody knows how long it would have been."""


@dataclass(slots=True)
class _Sampled:
    """Sessions and their tokens."""

    sessions: int = 0
    tokens: int = 0

    def add(self, other: _Sampled) -> None:
        self.sessions += other.sessions
        self.tokens += other.tokens

    @property
    def mean(self) -> float:
        return self.tokens / self.sessions if self.sessions else 0.0


@dataclass(slots=True)
class Lengths:
    """Lengths of sessions, of which some are only known to be no shorter than what is told: those were cut."""

    ended: Counter[int] = field(default_factory=Counter)
    cut: Counter[int] = field(default_factory=Counter)

    @property
    def mean(self) -> float:
        """Of the product-limit estimate (Kaplan and Meier, J. Am. Stat. Assoc. 53, 1958), up to the longest that is
        told, which counts as ended; without cut ones the plain mean. It supposes that who cuts does not know how long
        a session would have become."""
        at_risk = self.ended.total() + self.cut.total()
        mean, survive, reached = 0.0, 1.0, 0
        for length in sorted({*self.ended, *self.cut}):
            mean += survive * (length - reached)
            survive *= 1 - self.ended[length] / at_risk
            at_risk -= self.ended[length] + self.cut[length]
            reached = length
        return mean


SYNC_STAGES = ("gather", "transfer", "apply", "commit", "pause")
"""Of a weight sync, as its event tells them (rollout.manager.UpdateReport)."""


@dataclass(slots=True)
class SessionAccount:
    """Invariant: every token that a session span tells of is held by its group, trained, or wasted, once."""

    held: dict[str, _Sampled] = field(default_factory=lambda: defaultdict(_Sampled))
    """By group: sessions that succeeded, of groups whose end is not told yet."""
    trained_in_all: _Sampled = field(default_factory=_Sampled)
    lengths: Lengths = field(default_factory=Lengths)
    """Of all sessions since the start."""
    _trained: int = 0
    """Tokens since the last call of `step_metrics`, as all that follow."""
    _wasted: Counter[str] = field(default_factory=Counter)
    _stages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _published: int = 0
    _sync: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _gone: OrderedDict[str, str] = field(default_factory=OrderedDict)
    """Group -> why it left; "": it was trained."""

    def feed_all(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.kind == "process" and event.name == "trainer" and not event.fields.get("rotated"):
                self._forget()
            elif event.kind == "span" and event.name == "session":
                self._session(event)
            elif event.kind == "span" and event.process == "trainer" and event.name in STAGES:
                self._stages[STAGES[event.name]] += event.seconds
                if event.name == "publish":
                    self._published += event.fields.get("bytes", 0)
                    for stage in SYNC_STAGES:
                        self._sync[stage] += event.fields.get(f"{stage}_s", 0.0)

    def _forget(self) -> None:
        """What an earlier life of the trainer sampled: nobody says any more what became of it."""
        for seen in (self.held, self._gone, self._wasted, self._stages, self._values):
            seen.clear()
        self.trained_in_all, self.lengths = _Sampled(), Lengths()
        self._trained = self._published = 0

    def trained(self, uids: Iterable[str]) -> None:
        for uid in uids:
            sampled = self.held.pop(uid, _Sampled())
            self._trained += sampled.tokens
            self.trained_in_all.add(sampled)
            self._leaves(uid, "")

    def left(self, uid: str, reason: str) -> None:
        """A group that will not be trained."""
        self._wasted[reason] += self.held.pop(uid, _Sampled()).tokens
        self._leaves(uid, reason)

    def step_metrics(self) -> dict[str, float]:
        """Of what was seen since the last call."""
        wasted, trained = sum(self._wasted.values()), self._trained
        metrics = {f"timing_s/{stage}": seconds for stage, seconds in self._stages.items()}
        metrics |= {f"waste/tokens/{reason}": float(n) for reason, n in by_reason_class(self._wasted).items() if n}
        metrics["waste/ratio"] = wasted / (wasted + trained) if wasted else 0.0
        if self.trained_in_all.tokens and (sampled := self.lengths.mean):
            metrics["sampling/length_bias"] = self.trained_in_all.mean / sampled
        if self._published:
            metrics["weights/bytes"] = float(self._published)
            metrics |= {f"weights/seconds/{stage}": seconds for stage, seconds in self._sync.items()}
        for name, values in self._values.items():
            metrics |= {
                f"{name}/mean": sum(values) / len(values),
                f"{name}/max": max(values),
                f"{name}/min": min(values),
            }
        self._trained = self._published = 0
        for seen in (self._wasted, self._stages, self._values, self._sync):
            seen.clear()
        return metrics

    def _session(self, event: Event) -> None:
        fields = event.fields
        if fields.get("partition") != PARTITION:
            return
        uid, sampled = str(fields.get("uid")), _Sampled(1, int(fields.get("tokens", 0)))
        status, left = str(fields.get("status")), self._gone.get(uid)
        (self.lengths.cut if status in CUT else self.lengths.ended)[sampled.tokens] += 1
        for name, parts in TIMES.items():
            if status != "cancelled" and any(part in fields for part in parts):
                self._values[name].append(float(sum(fields.get(part, 0.0) for part in parts)))
        if status == "success" and left is None:
            self.held[uid].add(sampled)
        elif status == "success" and not left:  # read only now
            self._trained += sampled.tokens
            self.trained_in_all.add(sampled)
        else:
            self._wasted[left or status] += sampled.tokens

    def _leaves(self, uid: str, reason: str) -> None:
        self._gone[uid] = reason
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
