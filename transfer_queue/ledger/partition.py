"""One partition: its groups and the moves between their states.

admit ─► pending ──lease──► generating ──all sessions closed──► ready ──lease──► training ──ack──► trained ─► final
           ▲                    │                 └► dropped      ▲                 │                 │
           └──── lease ended ───┘                    (too few)    ├── lease ended ──┘                 │
                                                                  └───────── restored ────────────────┘

any of them ──► dropped(reason), dead(reason); dead ──replay──► pending
"""

from __future__ import annotations

import heapq
import math
from collections import Counter

from transfer_queue.errors import Fenced, NotFound
from transfer_queue.ledger.blocks import Segments
from transfer_queue.ledger.changes import ChangeLog
from transfer_queue.ledger.consumption import Consumption
from transfer_queue.ledger.groups import OUTSTANDING, PROMPT_LOST, Group
from transfer_queue.ledger.leases import HeldLease, LeaseBook
from transfer_queue.ledger.order import Serials
from transfer_queue.ledger.ready import ReadyQueue
from transfer_queue.ledger.rows import RowTable
from transfer_queue.ledger.seen import SeenUids
from transfer_queue.ledger.tags import shown
from transfer_queue.net.messages import Group as GroupView
from transfer_queue.net.messages import GroupState, Row, TaskSpec, Token


class Partition:
    """The state of one partition.

    Invariants:

    - A uid that was ever admitted, and not forgotten, is either in `groups`, in exactly one state, or in `seen` (its
      end is final, but for that of a dead group: a replayed one is in both).
    - `by_state[s]` holds exactly the groups in state s, the one that is in it longest first.
    - `pending` and `suspects` together hold exactly the pending groups that have their prompt, each in the one for it;
      `ready[t]` exactly the ready groups all of whose rows have the fields that task t wants.
    - No admission takes the groups that hold credit beyond `max_groups`. A restore may bring back more; of these only
      the `max_groups` oldest are given to generators.
    - A group has at most one lease, whatever the task.
    """

    def __init__(self, name: str, segments: Segments, leases: LeaseBook, serials: Serials, change_log: int) -> None:
        self.name = name
        self.tasks: dict[str, TaskSpec] = {}
        self.max_groups = 0
        self.max_bytes = 0
        self.rows = RowTable(segments, serials)
        self.consumption = Consumption()
        self.groups: dict[str, Group] = {}
        self.seen = SeenUids()
        self.by_state: dict[GroupState, dict[str, Group]] = {state: {} for state in (*OUTSTANDING, "trained")}
        self.pending = ReadyQueue()
        self.suspects = ReadyQueue()
        self.ready: dict[str, ReadyQueue] = {}
        self.trained: dict[int, dict[str, None]] = {}  # step -> uids acked in it that are not final
        self.leases = leases
        self.changes = ChangeLog(change_log)
        self.ended: Counter[str] = Counter()  # groups that reached a terminal state, since the start
        self.dropped: Counter[str] = Counter()  # by kind of reason
        self.dead: dict[str, str] = {}  # uid -> reason
        self.letters: dict[str, Group] = {}  # the same groups, with their prompts: what a replay needs
        self.redelivered = 0
        self.next_order = 0
        self.incarnation = 0
        self.committed = -1

    def rename(self, name: str) -> None:
        """Only for a partition without leases: their book knows it by name."""
        self.name = name

    # --- views ------------------------------------------------------------------------------------------------

    def task(self, name: str) -> TaskSpec:
        try:
            return self.tasks[name]
        except KeyError:
            raise NotFound(f"partition {self.name!r} has no task {name!r}; it has {sorted(self.tasks)}") from None

    def outstanding(self) -> int:
        """Groups that hold credit."""
        return len(self.groups) - len(self.by_state["trained"])

    def last_in_credit(self) -> float:
        """The order of the last group that credit covers. A restore may bring back more groups than that; were they all
        generated at once, most would be too old by the time the trainer comes to them."""
        if not self.max_groups or self.outstanding() <= self.max_groups:
            return math.inf
        orders = (group.order for state in OUTSTANDING for group in self.by_state[state].values())
        return heapq.nsmallest(self.max_groups, orders)[-1]

    def depth(self) -> dict[str, int]:
        """Groups by state; terminal states count since the start."""
        depth: dict[str, int] = {state: len(self.by_state[state]) for state in OUTSTANDING}
        return depth | {state: self.ended[state] for state in ("trained", "dropped", "dead")}

    def view(self, group: Group) -> GroupView:
        """The group as readers see it now."""
        listed = group.rows() if group.state in ("ready", "training") else ()
        rows = [Row(self.rows.keys[row], shown(self.rows.tags[row])) for row in listed]
        return GroupView(
            uid=group.uid,
            state=group.state,
            n=group.n,
            order=group.order,
            tag=shown(group.tag),
            attempt=group.attempt,
            rows=rows,
            sessions=group.ended_sessions(),
            reason=group.reason,
        )

    # --- moves ------------------------------------------------------------------------------------------------

    def add_group(self, group: Group) -> None:
        self.groups[group.uid] = group
        self.by_state[group.state][group.uid] = group
        self.next_order = max(self.next_order, group.order + 1)
        self._offer(group)
        self.changes.note(group.uid)

    def move(self, group: Group, state: GroupState, now: float, reason: str = "") -> None:
        """Put a group into another state (a live one, or trained) and offer it to the tasks that lease from there."""
        del self.by_state[group.state][group.uid]
        self._withdraw(group)
        group.state, group.since, group.reason = state, now, reason
        group.pack()
        self.by_state[state][group.uid] = group
        self._offer(group)
        self.changes.note(group.uid)

    def offer_ready(self, group: Group) -> None:
        """A ready group got fields: let the tasks have it that now find all of theirs."""
        rows = group.rows()
        for task in self.tasks.values():
            if task.stage == "rows" and self.rows.have(task.fields, rows):
                self.ready[task.name].add(group.order, group.uid)

    def drop_columns(self, group: Group, fields: list[str]) -> None:
        """Rows of sessions that succeeded are as if nobody had written these fields."""
        self._withdraw(group)
        self.rows.strip(group.rows(), fields)
        self._offer(group)

    def settle(self, group: Group, now: float, reason: str = "") -> None:
        """The group is in nobody's hands: pending, ready, or dropped, as its sessions tell."""
        if not group.all_closed():
            self.move(group, "pending", now, PROMPT_LOST if group.prompt_lost else reason)
        elif group.succeeded() >= group.min_sessions:
            self.move(group, "ready", now, reason)
        else:
            first = group.failures[min(group.failures)]
            self.finish(group, "dropped", f"failed: {first}", now)

    def lease(self, task: TaskSpec, holder: str, groups: list[Group], now: float) -> HeldLease:
        lease = self.leases.grant(self.name, task, holder, groups, now)
        for group in groups:
            self.move(group, "generating" if task.stage == "prompt" else "training", now)
        return lease

    def give_back(self, group: Group, now: float, reason: str, *, crash: bool = False, poison: bool = False) -> None:
        """A lease on the group ends without its work being done: a new attempt, or death. `crash`: the holder died."""
        lease = group.lease
        assert lease is not None
        self.leases.end(group)
        self.redelivered += 1
        group.crashes += crash
        group.delivered += poison
        if group.delivered >= lease.task.max_deliver:
            self.finish(group, "dead", f"{reason} (delivered {group.delivered} times)", now)
            return
        if lease.task.stage == "prompt":
            group.attempt += 1
            self.rows.erase(group.take_open_rows())
        self.settle(group, now, reason)

    def reissue(self, group: Group, sessions: list[int] | None, now: float, reason: str) -> None:
        """Open sessions again (None: all), without their rows, under a new attempt; the group's holder is fenced."""
        self.leases.end(group)
        self.untrain(group)
        again = [*group.closed, *group.failures] if sessions is None else sessions
        self.rows.erase([row for session in again for row in group.closed.pop(session, [])])
        for session in again:
            group.failures.pop(session, None)
        self.rows.erase(group.take_open_rows())
        group.attempt += 1
        self.redelivered += 1
        self.settle(group, now, reason)

    def train(self, group: Group, step: int, now: float) -> None:
        """The group was trained in `step`: hidden, and final when that step is committed."""
        self.leases.end(group)
        group.step = step
        self.trained.setdefault(step, {})[group.uid] = None
        self.ended["trained"] += 1
        self.move(group, "trained", now)

    def untrain(self, group: Group) -> None:
        """Forget that the group was trained, if it was (the caller moves it)."""
        if group.state == "trained":
            uids = self.trained[group.step]
            del uids[group.uid]
            if not uids:
                del self.trained[group.step]
            self.ended["trained"] -= 1
            group.step = 0

    def finalize(self, uid: str) -> None:
        """A trained group is final: its bytes go, and all that stays is that its uid was seen."""
        group = self.groups.pop(uid)
        del self.by_state["trained"][uid]
        self.rows.erase(group.all_rows())
        self.seen.add(uid)
        self.changes.forget(uid, self.view(group))

    def finish(self, group: Group, state: GroupState, reason: str, now: float) -> None:
        """End a group as dropped or dead: its lease is fenced, its bytes go (but a dead one's prompt), and the reason
        stays."""
        self.leases.end(group)
        self.untrain(group)
        self._withdraw(group)
        del self.by_state[group.state][group.uid]
        del self.groups[group.uid]
        group.state, group.reason, group.since = state, reason, now
        self.seen.add(group.uid)
        self.ended[state] += 1
        self.changes.note(group.uid, self.view(group))
        if state == "dead":
            self.rows.erase([row for row in group.all_rows() if row != group.prompt])
            group.begin_again()
            self.dead[group.uid], self.letters[group.uid] = reason, group
        else:
            self.rows.erase(group.all_rows())
            self.dropped[reason.partition(":")[0]] += 1

    def forget(self, group: Group) -> None:
        """As if a group that is not whole had never been admitted: it may be admitted again."""
        self.leases.end(group)
        self._withdraw(group)
        del self.by_state[group.state][group.uid]
        del self.groups[group.uid]
        self.seen.discard(group.uid)  # one that was dead and replayed
        group.state, group.reason = "dropped", "forgotten: the trainer begins again at an earlier step"
        self.changes.note(group.uid, self.view(group))
        self.rows.erase(group.all_rows())

    def revive(self, uid: str, now: float) -> None:
        """A dead group is pending again, as if nobody had ever leased it."""
        group = self.letters.pop(uid)
        del self.dead[uid]
        self.ended["dead"] -= 1
        group.attempt += 1
        group.crashes = group.delivered = 0
        group.state, group.since = "pending", now
        group.reason = PROMPT_LOST if group.prompt_lost else "replayed"
        self.groups[uid] = self.by_state["pending"][uid] = group
        self._offer(group)
        self.changes.note(uid)

    def forget_letter(self, uid: str) -> None:
        """A dead group can never be replayed: its prompt goes."""
        self.rows.erase([self.letters.pop(uid).prompt])

    # --- tokens -----------------------------------------------------------------------------------------------

    def require(self, token: Token) -> HeldLease:
        """The lease of a token. Raises Fenced if it is not held in this partition (any more)."""
        lease = self.leases.held.get(token)
        if lease is None or lease.partition != self.name:
            raise Fenced(
                f"lease ({token.epoch}, {token.counter}) is not held in partition {self.name!r}: it ran out, was "
                "released, or a newer incarnation took over. Drop the work and lease again"
            )
        return lease

    def _offer(self, group: Group) -> None:
        if group.state == "pending" and not group.prompt_lost:
            (self.suspects if group.suspect else self.pending).add(group.order, group.uid)
        elif group.state == "ready":
            self.offer_ready(group)

    def _withdraw(self, group: Group) -> None:
        if group.state == "pending":
            self.pending.discard(group.uid)
            self.suspects.discard(group.uid)
        elif group.state == "ready":
            for queue in self.ready.values():
                queue.discard(group.uid)
