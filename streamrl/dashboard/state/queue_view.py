"""The queue as its page shows it: from the events of a run, and from the queue itself where it answers."""

from __future__ import annotations

from collections import deque
from typing import Any

from streamrl.dashboard.state.series import Series
from streamrl.monitor.events import Event
from streamrl.monitor.run_view import PARTITION
from transfer_queue.net.messages import PartitionStats, QueueStats

OUT = ("pending", "generating", "ready", "training")
"""States of groups that hold credit."""

ENDS = ("trained", "dropped", "dead")
"""States that count since the start; "final" ones are told with the trained."""

RATE_SECONDS = 30.0
"""Rates are those of so long."""

DEAD_SHOWN = 200


class QueueView:
    """Fed the trainer's events and, while it lives, the queue's own numbers: the newest of both is shown."""

    def __init__(self) -> None:
        self.series = Series((*OUT, *ENDS))
        self.depth: dict[str, dict[str, int]] = {}
        self.credit: dict[str, int] = {}
        self.rows: dict[str, int] = {}
        self.nbytes: dict[str, int] = {}
        self.redelivered: dict[str, int] = {}
        self.oldest: dict[str, dict[str, float]] = {}
        """By partition and state: since when the oldest group is in it (wall clock)."""
        self.dropped: dict[str, dict[str, int]] = {}
        self.dead: dict[str, dict[str, str]] = {}
        self.units: dict[int, dict[str, Any]] = {}
        self.live: QueueStats | None = None
        self.at = 0.0
        """When these numbers were true."""
        self._pending_point: float | None = None
        self._samples: deque[tuple[float, dict[str, int]]] = deque()

    # --- taking in ----------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        fields, value = event.fields, event.value
        if event.name == "queue_groups" and isinstance(value, (int, float)):
            self._tell_point(event.end)
            partition = str(fields.get("partition"))
            self.depth.setdefault(partition, {})[str(fields.get("state"))] = int(value)
            if partition == PARTITION:
                self._pending_point = event.end
        elif event.name == "unit_bytes":
            self.units[int(fields.get("unit", 0))] = {"used": value, **fields}
        elif event.name == "dropped":
            self._left(event)
        elif event.name.startswith("queue_") and isinstance(value, (int, float)):
            self._number(event.name, str(fields.get("partition")), int(value), event)

    def _number(self, name: str, partition: str, value: int, event: Event) -> None:
        if name == "queue_oldest_age" and isinstance(event.value, (int, float)):
            self.oldest.setdefault(partition, {})[str(event.fields.get("state"))] = event.end - event.value
        else:
            table = {
                "queue_bytes": self.nbytes, "queue_rows": self.rows, "queue_credit": self.credit,
                "queue_redelivered": self.redelivered,
            }.get(name)  # fmt: skip
            if table is not None:
                table[partition] = value

    def _left(self, event: Event) -> None:
        reason, uid = str(event.fields.get("reason", "")), str(event.fields.get("uid", ""))
        if event.value == "dead":
            self._remember_dead(PARTITION, uid, reason)
        else:
            kind = reason.split(":", 1)[0] or "unknown"
            table = self.dropped.setdefault(PARTITION, {})
            table[kind] = table.get(kind, 0) + 1

    def _remember_dead(self, partition: str, uid: str, reason: str) -> None:
        dead = self.dead.setdefault(partition, {})
        if len(dead) < DEAD_SHOWN or uid in dead:
            dead[uid] = reason

    def settle(self) -> None:
        """All events of a moment are in: the point of the chart is whole."""
        self._tell_point(float("inf"))

    def _tell_point(self, time: float) -> None:
        if self._pending_point is not None and time > self._pending_point + 0.01:
            at, self._pending_point = self._pending_point, None
            self._point(at)

    def _point(self, at: float) -> None:
        depth = self.depth.get(PARTITION, {})
        if at < self.at:  # what the queue itself told is newer
            return
        self.at = at
        self.series.add(at, *(depth.get(state, 0) for state in (*OUT, *ENDS)))
        self._samples.append((at, dict(depth)))
        while len(self._samples) > 2 and self._samples[1][0] < at - RATE_SECONDS:
            self._samples.popleft()

    def ask(self, stats: QueueStats, now: float) -> None:
        """What the queue itself says, just now."""
        self.live = stats
        for name, part in stats.partitions.items():
            self._partition(name, part, now)
        self.units = {
            unit.unit: {"used": unit.used, "budget": unit.budget, "spilled": unit.spilled, "alive": unit.alive,
                        "segments": unit.segments, "spill_budget": unit.spill_budget}
            for unit in stats.units
        }  # fmt: skip
        self._pending_point = None
        self._point(now)

    def _partition(self, name: str, part: PartitionStats, now: float) -> None:
        self.depth[name] = dict(part.depth)
        self.credit[name], self.rows[name], self.nbytes[name] = part.max_groups, part.rows, part.nbytes
        self.redelivered[name] = part.redelivered
        self.oldest[name] = {state: now - age for state, age in part.oldest_age.items()}
        kinds: dict[str, int] = {}
        for reason, count in part.dropped.items():
            kind = reason.split(":", 1)[0] or "unknown"
            kinds[kind] = kinds.get(kind, 0) + count
        self.dropped[name] = kinds
        self.dead[name] = dict(list(part.dead.items())[:DEAD_SHOWN])

    def gone(self) -> None:
        """The queue answers no more: from here on only events tell."""
        self.live = None

    # --- what it tells ------------------------------------------------------------------------------------------

    def out(self, partition: str = PARTITION) -> int:
        return sum(self.depth.get(partition, {}).get(state, 0) for state in OUT)

    def rates(self) -> dict[str, float]:
        """Groups per second that were admitted, became ready, were trained, were dropped, lately."""
        if len(self._samples) < 2:
            return {}
        (t0, then), (t1, now) = self._samples[0], self._samples[-1]
        if t1 <= t0:
            return {}

        def more(states: tuple[str, ...]) -> float:
            return max(0.0, sum(now.get(s, 0) - then.get(s, 0) for s in states) / (t1 - t0))

        ended = ("trained", "final", *ENDS[1:])
        return {
            "admitted": more((*OUT, *ended)), "generated": more(("ready", "training", "trained", "final")),
            "trained": more(("trained", "final")), "dropped": more(("dropped", "dead")),
        }  # fmt: skip

    def page(self) -> dict[str, Any]:
        """Everything but the chart."""
        names = sorted({*self.depth, *self.rows})
        live = self.live
        return {
            "live": live is not None,
            "at": self.at,
            "partitions": [self._row(name) for name in names],
            "units": [{"unit": unit, **what} for unit, what in sorted(self.units.items())],
            "rates": {name: round(rate, 3) for name, rate in self.rates().items()},
            "clients": live.clients if live is not None else None,
            "epoch": live.epoch if live is not None else None,
            "no_room": live.no_room if live is not None else 0,
            "first_without_room": live.first_without_room if live is not None else "",
        }

    def _row(self, name: str) -> dict[str, Any]:
        part = self.live.partitions.get(name) if self.live is not None else None
        leases = [
            {"task": lease.task, "holder": lease.holder, "groups": lease.groups, "oldest": self.at - lease.oldest}
            for lease in (part.leases if part is not None else [])
        ]
        return {
            "name": name,
            "depth": self.depth.get(name, {}),
            "credit": self.credit.get(name, 0),
            "out": self.out(name),
            "rows": self.rows.get(name, 0),
            "bytes": self.nbytes.get(name, 0),
            "redelivered": self.redelivered.get(name, 0),
            "oldest": self.oldest.get(name, {}),
            "dropped": self.dropped.get(name, {}),
            "dead": [{"uid": uid, "reason": reason} for uid, reason in self.dead.get(name, {}).items()],
            "leases": leases,
            "fields": dict(part.fields) if part is not None else {},
            "consumers": list(part.consumers) if part is not None else [],
        }
