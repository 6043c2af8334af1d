"""The state of a ledger as plain values, and a ledger from them: what a snapshot holds.

    sections = dump(ledger)         # an iterator of small lists, to be written one by one
    ledger = load(sections)         # behaves as the one that was dumped would

A part of a partition with state of its own has

    dump() -> Iterator[list]    sections: lists of None, bool, int, float, str, bytes and such lists again, of some ten
                                thousand entries at most; arrays as their bytes
    load(section)               takes each of them, in this order, on a part that was just made

and stands in `_parts`. Whatever `fingerprint` covers must come back: tests/queue/test_ledger_model.py restores ledgers
at random points and compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import msgspec
import numpy as np

from transfer_queue.ledger.groups import Group
from transfer_queue.ledger.ledger import Ledger
from transfer_queue.ledger.partition import Partition
from transfer_queue.ledger.ready import ReadyQueue
from transfer_queue.net.messages import TaskSpec, Token

SLICE = 4096
"""Groups in one section."""


class Part(Protocol):
    def dump(self) -> Iterator[list[Any]]: ...

    def load(self, section: list[Any]) -> None: ...


def _parts(p: Partition) -> dict[str, Part]:
    """The parts of a partition in the order in which they are loaded."""
    return {"rows": p.rows, "consumption": p.consumption, "changes": p.changes, "groups": _Groups(p)}


def dump(ledger: Ledger) -> Iterator[list[Any]]:
    """Sections. The ledger must not change meanwhile."""
    leases = ledger.leases
    yield ["ledger", ledger.run, leases.epoch, leases.counter, leases.idled, ledger.now, ledger.serials.next]
    for p in ledger.partitions.values():
        yield ["partition", p.name, *_head(p)]
        for name, part in _parts(p).items():
            for section in part.dump():
                yield ["part", name, section]
    for lease in leases.held.values():
        token, task = [lease.token.epoch, lease.token.counter], msgspec.to_builtins(lease.task)
        yield ["lease", token, lease.partition, task, lease.holder, lease.granted, lease.deadline, list(lease.groups)]


def load(sections: Iterable[list[Any]], *, change_log: int = 4096) -> Ledger:
    """A ledger from the sections of `dump`. Raises ValueError, TypeError, KeyError or IndexError for others."""
    ledger = Ledger(change_log=change_log)
    parts: dict[str, Part] = {}
    for kind, *values in sections:
        if kind == "part":
            parts[values[0]].load(values[1])
        elif kind == "partition":
            name, *head = values
            p = ledger.find_or_new(name)
            ledger.keep(p)
            _load_head(p, *head)
            parts = _parts(p)
        elif kind == "lease":
            _load_lease(ledger, *values)
        elif kind == "ledger":
            leases = ledger.leases
            ledger.run, leases.epoch, leases.counter, leases.idled, ledger.now, ledger.serials.next = values
        else:
            raise ValueError(f"unknown section {kind!r}")
    return ledger


def _head(p: Partition) -> list[Any]:
    counts = [dict(p.ended), dict(p.dropped), p.dead, p.redelivered, p.next_order, p.incarnation, p.committed]
    credit = [p.max_groups, p.max_bytes, p.rows.puts.durability]
    return [msgspec.to_builtins(list(p.tasks.values())), credit, p.seen.dump(), counts]


def _load_head(p: Partition, tasks: list[Any], credit: list[Any], seen: Any, counts: list[Any]) -> None:
    p.tasks = {task.name: task for task in msgspec.convert(tasks, list[TaskSpec])}
    p.ready = {task.name: ReadyQueue() for task in p.tasks.values() if task.stage == "rows"}
    p.max_groups, p.max_bytes, p.rows.puts.durability = credit
    p.seen.load(seen)
    ended, dropped, p.dead, p.redelivered, p.next_order, p.incarnation, p.committed = counts
    p.ended.update(ended)
    p.dropped.update(dropped)


def _load_lease(
    ledger: Ledger, token: list[int], partition: str, task: Any, holder: str, granted: float, deadline: Any, uids: Any
) -> None:
    groups = [ledger.partitions[partition].groups[uid] for uid in uids]
    spec = msgspec.convert(task, TaskSpec)
    ledger.leases.restore(Token(*token), partition, spec, holder, groups, granted, deadline)


class _Groups:
    """The groups of a partition and who may lease them: by their places in the list of all."""

    def __init__(self, partition: Partition) -> None:
        self._p = partition
        self._groups: list[Group] = []

    def dump(self) -> Iterator[list[Any]]:
        p = self._p
        groups = list(p.groups.values())
        for at in range(0, len(groups), SLICE):
            yield ["groups", [group.dump() for group in groups[at : at + SLICE]]]
        letters = list(p.letters.values())
        for at in range(0, len(letters), SLICE):
            yield ["letters", [group.dump() for group in letters[at : at + SLICE]]]
        place = {uid: i for i, uid in enumerate(p.groups)}

        def places(uids: Iterable[str]) -> bytes:
            return np.fromiter((place[uid] for uid in uids), np.int32).tobytes()

        yield ["states", [[state, places(members)] for state, members in p.by_state.items()]]
        queues = [("pending", p.pending), ("suspects", p.suspects), *p.ready.items()]
        yield ["queues", [[name, places(queue)] for name, queue in queues]]
        yield ["trained", [[step, places(uids)] for step, uids in p.trained.items()]]

    def load(self, section: list[Any]) -> None:
        p, (kind, values) = self._p, section
        if kind in ("groups", "letters"):
            groups = [Group.load(value) for value in values]
            if kind == "groups":
                self._groups += groups
            into = p.groups if kind == "groups" else p.letters
            into.update((group.uid, group) for group in groups)
            owner = p.rows.owner
            for group in groups:
                for row in group.all_rows():
                    owner[row] = group
        elif kind == "states":
            p.by_state.update((state, {g.uid: g for g in self._at(places)}) for state, places in values)
        elif kind == "queues":
            queues = [p.pending, p.suspects, *p.ready.values()]
            for (_, places), queue in zip(values, queues, strict=True):
                queue.load((group.order, group.uid) for group in self._at(places))
        elif kind == "trained":
            p.trained = {step: dict.fromkeys(g.uid for g in self._at(places)) for step, places in values}

    def _at(self, places: bytes) -> list[Group]:
        return [self._groups[i] for i in np.frombuffer(places, np.int32).tolist()]
