"""The ledger against a plain model: any sequence of mutations gives what the model says, and keeps the invariants.

The model knows no index, no heap, no log: it looks at everything, every time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from transfer_queue.errors import Conflict, DeadlineExceeded, Fenced, NotFound, QueueError, QueueFull
from transfer_queue.ledger import Ledger, dump, load
from transfer_queue.ledger.moving import survivors
from transfer_queue.ledger.order import packed
from transfer_queue.ledger.tags import unpack
from transfer_queue.net import messages as m

P, MAX_GROUPS, TTL = "p", 4, 10.0
GENERATE = m.TaskSpec("generate", "prompt", ttl=TTL, max_deliver=2)
TRAIN = m.TaskSpec("train", "rows", "incarnation", fields=["x"], max_deliver=1)
AUDIT = m.TaskSpec("audit", "rows", ttl=TTL, fields=["x", "y"], max_deliver=2)
TASKS = {task.name: task for task in (GENERATE, TRAIN, AUDIT)}
LIVE = ("pending", "generating", "ready", "training")
HOLDER, FLAG, AT = st.sampled_from(["a", "b"]), st.booleans(), st.integers(0, 50)


@dataclass
class MGroup:
    uid: str
    n: int
    order: int
    minimum: int
    state: str = "pending"
    ended: dict[int, list[str]] = field(default_factory=dict)  # session -> rows, [] if it failed
    token: m.Token | None = None
    crashes: int = 0
    poisoned: int = 0
    attempt: int = 0
    lost: bool = False  # its prompt
    cleared: bool = False  # its prompt, after its death: it can never be replayed
    step: int = 0


@dataclass
class MLease:
    task: m.TaskSpec
    holder: str
    deadline: float


class Model:
    def __init__(self) -> None:
        self.groups: dict[str, MGroup] = {}
        self.leases: dict[m.Token, MLease] = {}
        self.rows: dict[str, dict[str, m.Block]] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        self.final: set[str] = set()

    def outstanding(self) -> int:
        return sum(group.state in LIVE for group in self.groups.values())

    def held_by(self, holder: str) -> list[MGroup]:
        """Under clock leases."""
        leases = [t for t, lease in self.leases.items() if lease.holder == holder and lease.task.bind == "clock"]
        return [group for token in leases for group in self.under(token)]

    def leasable(self, task: m.TaskSpec, holder: str) -> list[str]:
        orders = sorted(group.order for group in self.groups.values() if group.state in LIVE)
        last = orders[MAX_GROUPS - 1] if len(orders) > MAX_GROUPS else float("inf")  # what credit covers

        def offers(group: MGroup) -> bool:
            if task.stage == "prompt":
                return group.state == "pending" and not group.lost and group.order <= last
            rows = [key for rows in group.ended.values() for key in rows]
            return group.state == "ready" and all(set(task.fields) <= set(self.rows[key]) for key in rows)

        found = sorted((group.order, group.uid) for group in self.groups.values() if offers(group))
        uids = [uid for _, uid in found]
        if task.stage == "rows":
            return uids
        suspects = [uid for uid in uids if self.groups[uid].crashes > 1]
        held = self.held_by(holder)
        if suspects and not held:
            return suspects[:1]
        return [] if any(group.crashes > 1 for group in held) else [uid for uid in uids if uid not in suspects]

    def under(self, token: m.Token) -> list[MGroup]:
        return [group for group in self.groups.values() if group.token == token]

    def is_held(self, token: m.Token) -> bool:
        return bool(self.under(token))

    def session_rows(self, uid: str, session: int) -> list[str]:
        return [key for key in self.rows if key.startswith(f"{uid}_{session}_")]

    def erase(self, keys: list[str]) -> None:
        for key in keys:
            del self.rows[key], self.tags[key]

    def erase_open(self, group: MGroup) -> None:
        for session in set(range(group.n)) - set(group.ended):
            self.erase(self.session_rows(group.uid, session))

    def finish(self, group: MGroup, state: str) -> None:
        group.state, group.token = state, None
        self.erase([key for key in self.rows if key.startswith(f"{group.uid}_")])
        if state != "dead":
            self.erase([group.uid])

    def settle(self, group: MGroup) -> None:
        group.token = None
        if len(group.ended) < group.n:
            group.state = "pending"
        elif sum(bool(rows) for rows in group.ended.values()) >= group.minimum:
            group.state = "ready"
        else:
            self.finish(group, "dropped")

    def give_back(self, group: MGroup, poison: bool = False) -> None:
        assert group.token is not None
        task = self.leases[group.token].task
        group.poisoned += poison
        if group.poisoned >= task.max_deliver:
            return self.finish(group, "dead")
        if task.stage == "prompt":
            group.attempt += 1
            self.erase_open(group)
        self.settle(group)

    def reissue(self, group: MGroup, sessions: list[int]) -> None:
        for session in sessions:
            self.erase(group.ended.pop(session, []))
        self.erase_open(group)
        group.attempt += 1
        self.settle(group)

    def forget(self, group: MGroup) -> None:
        self.erase([key for key in self.rows if key == group.uid or key.startswith(f"{group.uid}_")])
        del self.groups[group.uid]

    def nbytes(self) -> int:
        return sum({id(block): block.nbytes for fields in self.rows.values() for block in fields.values()}.values())


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.ledger, self.model, self.records, self.now = Ledger(change_log=6), Model(), [], 0.0
        self.tokens: list[m.Token] = []
        self.snapshot = b""
        self.delivered: set[str] = set()  # acked and committed
        self.forgotten: list[str] = []
        self.consumed: dict[str, set[bytes]] = {}  # serials, by task
        self.blocks = self.admitted = self.plain = 0
        self.watched: dict[str, m.Group] = {}
        self.watch_seq = -1
        self.limit = MAX_GROUPS
        self.do(m.Life(format=1, run="r", epoch=1))
        self.do(m.OpenPartition(P, list(TASKS.values()), max_groups=MAX_GROUPS))
        self.admit(3, 2, 0, again=False, high=False)

    # --- doing ------------------------------------------------------------------------------------------------

    def do(self, mutation: m.Mutation, error: type[QueueError] | None = None) -> Any:
        """Apply; it must raise exactly `error`, and then have changed nothing."""
        before = self.ledger.fingerprint()
        self.now += 0.25
        if error is not None:
            with pytest.raises(error) as caught:
                self.ledger.apply(mutation, self.now)
            assert type(caught.value) is error
            assert self.ledger.fingerprint() == before
            return None
        reply = self.ledger.apply(mutation, self.now)
        record = m.Record(len(self.records) + 1, self.now, "", 0, mutation)
        self.records.append(msgspec.msgpack.encode(record))
        return msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=m.Reply)

    def column(self, name: str, rows: int) -> m.Block:
        self.blocks += 1
        return m.Block(name, self.blocks % 3, 8 * self.blocks, 8 * rows, rows, "dense", "<i8", (), self.blocks)

    def pick(self, at: int, among: list[Any]) -> Any:
        return among[at % len(among)] if among else None

    def some_group(self, at: int) -> MGroup | None:
        live = [group for group in self.model.groups.values() if group.state in LIVE]
        return self.pick(at, live if at % 4 else list(self.model.groups.values()))

    def some_token(self, at: int) -> m.Token:
        held = [token for token in self.tokens if self.model.is_held(token)]
        return self.pick(at, held if held and at % 4 else [*self.tokens, m.Token(0, 7)])

    def stored(self, key: str, block: m.Block, tag: dict[str, Any] | None = None) -> None:
        self.model.rows.setdefault(key, {})[block.field] = block
        self.model.tags[key] = self.model.tags.get(key, {}) | (tag or {})

    # --- rules ------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 3), n=st.integers(1, 2), minimum=st.integers(0, 1), again=FLAG, high=FLAG)
    def admit(self, count: int, n: int, minimum: int, again: bool, high: bool) -> None:
        first = self.admitted - (again and self.admitted > 0)
        uids = [f"e0p{i:07d}" if i % 3 else f"u{i}" for i in range(first, first + count)]
        uids += [uid for uid in self.forgotten[-1:] if again and uid not in uids]
        specs = [m.GroupSpec(uid, n, int(uid[-3:].lstrip("u")) + 50 * high, minimum) for uid in uids]
        block = self.column("prompt", len(specs))
        new = [spec for spec in specs if spec.uid not in self.model.groups]
        full = bool(new) and self.model.outstanding() + len(new) > MAX_GROUPS
        self.do(m.Admit(P, specs, [block]), QueueFull if full else None)
        if full:
            return
        self.admitted = max(self.admitted, first + count)
        for spec in new:
            self.model.groups[spec.uid] = MGroup(spec.uid, n, spec.order, minimum or n)
            self.stored(spec.uid, block)
        for group in (self.model.groups[uid] for uid in uids):
            if group.lost and group.state in LIVE:
                group.lost = False
                self.stored(group.uid, block)

    @rule(task=st.sampled_from(sorted(TASKS)), count=st.integers(1, 3), holder=HOLDER, by_uid=FLAG)
    def lease(self, task: str, count: int, holder: str, by_uid: bool) -> None:
        spec, offered = TASKS[task], self.model.leasable(TASKS[task], holder)
        uids = offered[-count:] if by_uid else offered[:count]
        request = m.Lease(P, task, holder, uids=uids) if by_uid and uids else m.Lease(P, task, holder, groups=count)
        reply = self.do(request, None if uids else DeadlineExceeded)
        if reply is None:
            return
        assert [group.uid for group in reply.groups] == uids
        assert not set(uids) & self.delivered
        numbers = [(token.epoch, token.counter) for token in (*self.tokens[-1:], reply.token)]
        assert numbers == sorted(set(numbers)), "tokens strictly increase"
        self.tokens.append(reply.token)
        deadline = self.now + TTL if spec.bind == "clock" else float("inf")
        self.model.leases[reply.token] = MLease(spec, holder, deadline)
        for shown in reply.groups:
            group = self.model.groups[shown.uid]
            assert group.token is None, "two live leases on one group"
            group.token, group.state = reply.token, "generating" if spec.stage == "prompt" else "training"
            assert shown.attempt == group.attempt
            assert shown.sessions == sorted(group.ended)
            whole = [key for session in sorted(group.ended) for key in group.ended[session]]
            expected = whole if spec.stage == "rows" else []
            assert [row.key for row in shown.rows] == expected, "a group is delivered whole"

    @rule(
        at=AT,
        token=AT,
        session=st.integers(0, 1),
        stamped=st.integers(0, 3),
        close=st.sampled_from(["", "ok", "ok", "failed"]),
        version=st.integers(0, 3),
    )
    def write(self, at: int, token: int, session: int, stamped: int, close: str, version: int) -> None:
        group = self.some_group(at)
        if group is None:
            return
        stamp = (group.token or self.some_token(token)) if stamped > 1 else self.some_token(token) if stamped else None
        self.write_as(group, session, stamp, close, version)

    def write_as(self, group: MGroup, session: int, stamp: m.Token | None, close: str, version: int) -> None:
        key, tag = f"{group.uid}_{session}_0", {"max_global_steps": version}
        block = self.column("x", 1)
        failed = "boom" if close == "failed" else ""
        closes = [m.SessionClose(group.uid, session, [] if failed else [key], failed)] if close else []
        commit = m.Commit(P, [key], [block], [tag], stamp, closes)
        error = self.write_error(group, session, stamp, key, bool(close))
        self.do(commit, error)
        if error is not None:
            return
        self.stored(key, block, tag)
        if close:
            others = [row for row in self.model.session_rows(group.uid, session) if row != key or failed]
            self.model.erase(others)
            group.ended[session] = [] if failed else [key]
            if len(group.ended) == group.n:
                self.model.settle(group)

    def write_error(
        self, group: MGroup, session: int, stamp: m.Token | None, key: str, close: bool
    ) -> type[QueueError] | None:
        if stamp is not None and (group.token != stamp or group.state not in LIVE):
            return Fenced
        if group.state not in LIVE:
            return Conflict
        generator = stamp is not None and self.model.leases[stamp].task.stage == "prompt"
        if session in group.ended:
            return Conflict if generator or key not in self.model.rows or close else None
        if session >= group.n or (close and stamp is None and group.token is not None):
            return Conflict
        return None

    @rule(by=HOLDER, count=st.integers(1, 2), version=st.integers(0, 2), fails=st.integers(0, 5))
    def generate_whole_groups(self, by: str, count: int, version: int, fails: int) -> None:
        """What workers do most of the time; with one session that fails (4, 5), or that they do not finish (2, 3)."""
        self.lease("generate", count, by, False)
        held = [group for group in self.model.groups.values() if group.state == "generating"]
        for group in held:
            for session in set(range(group.n)) - set(group.ended):
                end = "failed" if fails == session + 4 else "" if fails == session + 2 else "ok"
                self.write_as(group, session, group.token, end, version)

    @rule(by=HOLDER, count=st.integers(1, 3), times=st.integers(1, 3))
    def holders_die_with_what_they_have(self, by: str, count: int, times: int) -> None:
        for _ in range(times):
            self.lease("generate", count, by, False)
            self.release_holder(by, died=True)

    @rule(count=st.integers(1, 2), step=st.integers(1, 4), end=st.sampled_from(["ack"] * 3 + ["nack", "poison", ""]))
    def train_what_is_ready(self, count: int, step: int, end: str) -> None:
        """What a trainer does most of the time."""
        self.lease("train", count, "trainer", False)
        if end and self.tokens:
            self.end(self.tokens[-1], 0, True, step, end)

    @rule(at=AT, stamped=st.booleans())
    def write_column(self, at: int, stamped: bool) -> None:
        ready = [group for group in self.model.groups.values() if group.state in ("ready", "training")]
        group = self.pick(at, ready)
        if group is None:
            return
        keys = [key for rows in group.ended.values() for key in rows]
        block = self.column("y", len(keys))
        self.do(m.Commit(P, keys, [block], token=group.token if stamped else None))
        for key in keys:
            self.stored(key, block)

    @rule(
        token=AT,
        at=AT,
        all_of_it=st.booleans(),
        step=st.integers(1, 4),
        verb=st.sampled_from(["ack", "ack", "nack", "poison", "renew"]),
    )
    def answer(self, token: int, at: int, all_of_it: bool, step: int, verb: str) -> None:
        self.end(self.some_token(token), at, all_of_it, step, verb)

    def end(self, stamp: m.Token, at: int, all_of_it: bool, step: int, verb: str) -> None:
        groups = self.model.under(stamp)
        uids = [group.uid for group in groups] if all_of_it or not groups else [groups[at % len(groups)].uid]
        error = None if groups else Fenced
        if verb == "renew":
            self.do(m.Renew(P, stamp), error)
            if groups and self.model.leases[stamp].task.bind == "clock":
                self.model.leases[stamp].deadline = self.now + TTL
            return
        if verb == "ack":
            by_prompt = groups and self.model.leases[stamp].task.stage == "prompt"
            self.do(m.Ack(P, stamp, uids or ["x"], step=step), Conflict if by_prompt else error)
            for group in () if by_prompt else groups:
                if group.uid in uids:
                    group.state, group.token, group.step = "trained", None, step
            return
        self.do(m.Nack(P, stamp, uids or ["x"], "why", poison=verb == "poison"), error)
        for group in groups:
            if group.uid in uids:
                self.model.give_back(group, verb == "poison")

    @rule(
        kind=st.sampled_from(["drop", "expire", "holder", "holder", "trainer", "segment", "crash"]),
        at=AT,
        number=st.integers(0, 3),
        some=st.booleans(),
    )
    def calamity(self, kind: str, at: int, number: int, some: bool) -> None:
        """One rule for all of them, so that they stay rarer than work."""
        match kind:
            case "drop":
                self.drop(at, some)
            case "expire":
                self.expire(11.0 if some else 3.0)
            case "holder":
                self.release_holder(["a", "b", "a", "trainer"][number], died=some or number < 2)
            case "trainer":
                self.open_trainer(number, repeats=some)
            case "segment":
                self.lose_a_segment(number % 3)
            case _:
                self.crash_and_recover()

    def drop(self, at: int, known: bool) -> None:
        group = self.some_group(at)
        if group is None or not known:
            self.do(m.Drop(P, ["nobody"], "stale"), NotFound)
            return
        self.do(m.Drop(P, [group.uid], "stale"))
        if group.state in LIVE:
            self.model.finish(group, "dropped")

    def expire(self, seconds: float) -> None:
        self.now += seconds
        self.do(m.Expire())
        for token, lease in self.model.leases.items():
            if lease.deadline <= self.now:
                for group in self.model.under(token):
                    self.model.give_back(group)

    def release_holder(self, holder: str, died: bool) -> None:
        self.do(m.ReleaseHolder(holder, died))
        held = self.model.held_by(holder)
        for group in held:
            group.crashes += died
            self.model.give_back(group, poison=died and len(held) == 1)

    def open_trainer(self, step: int, *, repeats: bool) -> None:
        restored = self.do(m.OpenTrainer(P, step, repeats))
        for group in list(self.model.groups.values()):
            if (group.state == "trained" and group.step <= step) or group.state not in (*LIVE, "trained"):
                continue
            rows = [key for key in self.model.rows if key.startswith(f"{group.uid}_")]
            if not repeats and any(self.model.tags[key]["max_global_steps"] > step for key in rows):
                self.model.reissue(group, list(group.ended))
            elif group.state == "trained" or (group.token and self.model.leases[group.token].task == TRAIN):
                self.model.settle(group)
            elif group.token is not None:
                self.model.give_back(group)
            if repeats and group.state == "pending":
                self.model.forget(group)
                self.forgotten.append(group.uid)
        self.limit = max(self.limit, self.model.outstanding())
        assert set(restored.ready) == {group.uid for group in self.model.groups.values() if group.state == "ready"}

    @rule(step=st.integers(0, 4))
    def commit_step(self, step: int) -> None:
        self.do(m.CommitStep(P, step))
        for group in self.model.groups.values():
            if group.state == "trained" and group.step <= step:
                self.model.finish(group, "final")
                self.delivered.add(group.uid)

    @rule(at=AT)
    def replay(self, at: int) -> None:
        dead = [group for group in self.model.groups.values() if group.state == "dead"]
        group = self.pick(at, dead) if dead else self.some_group(at)
        if group is None:
            return
        possible = group.state == "dead" and not group.cleared
        self.do(m.Replay(P, [group.uid]), None if possible else NotFound)
        if possible:
            group.state, group.ended = "pending", {}
            group.attempt, group.crashes, group.poisoned = group.attempt + 1, 0, 0
            self.limit = max(self.limit, self.model.outstanding())

    @rule(clear=st.booleans(), at=st.integers(0, 9), tagged=FLAG)
    def plain_rows(self, clear: bool, at: int, tagged: bool) -> None:
        """In the partition of the groups; more of them in test_ledger_plain_model.py."""
        keys = [f"kv{at}", f"kv{at + 1}"]
        if clear:
            self.do(m.Clear(P, [*keys, "unknown"]))
            return self.model.erase([key for key in keys if key in self.model.rows])
        block, tag = self.column("z", 2), {f"tag{at}": self.blocks} if tagged else {}
        self.do(m.Commit(P, keys, [block], [tag, tag] if tagged else None))
        for key in keys:
            self.stored(key, block, tag)

    @rule(at=AT)
    def clear_a_dead_letter(self, at: int) -> None:
        group = self.pick(at, [group for group in self.model.groups.values() if group.state == "dead"])
        if group is not None:
            self.do(m.Clear(P, [group.uid]))
            self.model.erase([] if group.cleared else [group.uid])
            group.cleared = True

    @rule(kind=st.sampled_from(["again", "more credit", "other tasks", "clear", "adopt"]))
    def the_partition_stays(self, kind: str) -> None:
        """It may be opened again, but not as another one; it is neither cleared nor loaded over under its groups."""
        tasks = list(TASKS.values())
        if kind == "again":
            self.do(m.OpenPartition(P, [replace(task, fields=task.fields[::-1]) for task in tasks], MAX_GROUPS))
        elif kind == "more credit":
            self.do(m.OpenPartition(P, tasks, MAX_GROUPS, max_bytes=1 << 40, durability="memory"))
        elif kind == "other tasks":
            self.do(m.OpenPartition(P, tasks[:2], MAX_GROUPS), Conflict)
        elif kind == "clear" and self.ledger.partitions[P].groups:
            self.do(m.ClearPartition(P), Conflict)
        elif kind == "adopt":
            self.do(m.AdoptPartitions({P: "other"}), Conflict)

    @rule(at=AT, task=st.sampled_from(["mine", "yours"]), reset=st.integers(0, 3))
    def rows_are_consumed(self, at: int, task: str, reset: int) -> None:
        """Any rows, by serial: what the sampler chose is not the ledger's business."""
        rows = self.ledger.partition(P).rows
        if not reset:
            self.do(m.ResetConsumption(P, task))
            self.consumed.pop(task, None)
        elif rows.ids:
            key = self.pick(at, sorted(rows.ids))
            serial = packed(np.asarray([rows.order.of(rows.ids[key])]))
            assert self.do(m.Consume(P, task, [], serial, serial)).keys == [key]
            self.consumed.setdefault(task, set()).add(serial)

    @rule(segment=st.integers(0, 2))
    def survivors_are_moved(self, segment: int) -> None:
        rows, moved = self.ledger.partition(P).rows, []
        for batch in survivors(rows, {segment}, 1 << 20):
            count, target = len(batch.serials), 100 + len(self.records)
            blocks = [replace(b, segment=target, rows=count, nbytes=8 * count) for b in batch.sources[0][0]]
            moved.append(batch.moved(blocks))
            for row in rows.order.find(batch.serials).tolist():
                self.model.rows[rows.keys[row]] |= {block.field: block for block in blocks}
        self.do(m.Move(P, [segment], moved))
        assert segment not in self.ledger.segments.use

    @rule(at=AT)
    def clear_of_a_live_group_is_refused(self, at: int) -> None:
        group = self.some_group(at)
        if group is not None and group.state in LIVE:
            self.do(m.Clear(P, [group.uid]), Conflict)

    def lose_a_segment(self, segment: int) -> None:
        self.do(m.LoseSegments([segment]))
        lost = {key for key, fields in self.model.rows.items() if any(b.segment == segment for b in fields.values())}
        self.model.erase([key for key in lost if key.startswith("kv")])
        for group in list(self.model.groups.values()):
            if group.uid in lost:
                self.model.rows[group.uid] = {}
                group.lost = True
            sessions = {int(key.rsplit("_", 2)[1]) for key in lost if key.startswith(f"{group.uid}_")}
            if group.state == "trained":
                for session in sessions:
                    self.model.erase(group.ended.pop(session))
            elif sessions or (group.uid in lost and group.state == "generating"):
                self.model.reissue(group, sorted(sessions))

    def crash_and_recover(self) -> None:
        """From the last snapshot, if there is one, and the records since then."""
        sections = msgspec.msgpack.decode(self.snapshot) if self.snapshot else []
        again = load(sections, change_log=6)
        for record in self.records:
            record = msgspec.msgpack.decode(record, type=m.Record)
            again.apply(record.mutation, record.now)
        assert again.fingerprint() == self.ledger.fingerprint()
        self.ledger = again
        self.do(m.Life(format=1, run="r", epoch=self.ledger.epoch + 1))
        for token, lease in self.model.leases.items():
            if self.model.is_held(token) and lease.task.bind == "clock":
                lease.deadline = self.now + TTL

    @rule()
    def take_a_snapshot(self) -> None:
        self.snapshot = msgspec.msgpack.encode(list(dump(self.ledger)))
        self.records = []

    @rule()
    def watch(self) -> None:
        changes = self.ledger.changes(P, self.watch_seq)
        self.watch_seq = changes.seq
        if changes.snapshot:
            self.watched = {}
        self.watched |= {group.uid: group for group in changes.groups}
        for group in self.model.groups.values():
            if group.state in LIVE:
                assert self.watched[group.uid].state == group.state
            elif group.uid in self.watched:
                assert self.watched[group.uid].state == group.state.replace("final", "trained")

    # --- invariants -------------------------------------------------------------------------------------------

    @invariant()
    def every_admitted_group_is_in_the_state_of_the_model(self) -> None:
        p = self.ledger.partitions[P]
        for group in self.model.groups.values():
            if group.state in (*LIVE, "trained"):
                assert p.groups[group.uid].state == group.state
                assert group.uid in p.by_state[p.groups[group.uid].state]
            else:
                assert group.uid not in p.groups
                assert group.uid in p.seen
        states = [group.state for group in self.model.groups.values()]
        expected = {state: states.count(state) for state in (*LIVE, "dropped", "dead")}
        assert p.depth() == expected | {"trained": states.count("trained") + states.count("final")}
        assert sum(p.depth().values()) == len(self.model.groups)

    @invariant()
    def credit_is_never_exceeded_but_by_what_a_restore_brought_back(self) -> None:
        assert self.ledger.partitions[P].outstanding() == self.model.outstanding() <= self.limit
        self.limit = max(MAX_GROUPS, self.model.outstanding())

    @invariant()
    def leases_are_those_of_the_model(self) -> None:
        held = {token: sorted(lease.groups) for token, lease in self.ledger.leases.held.items()}
        expected = {token: sorted(group.uid for group in self.model.under(token)) for token in self.model.leases}
        assert held == {token: uids for token, uids in expected.items() if uids}
        due = [self.model.leases[token].deadline for token in held if self.model.leases[token].task.bind == "clock"]
        assert self.ledger.next_expiry() == min(due, default=None)

    @invariant()
    def rows_and_live_bytes_are_those_of_the_model(self) -> None:
        p = self.ledger.partitions[P]
        assert set(p.rows.ids) == set(self.model.rows)
        assert {key: unpack(p.rows.tags[row]) for key, row in p.rows.ids.items()} == self.model.tags
        assert p.rows.nbytes == self.model.nbytes()
        assert p.rows.nbytes == sum(use.nbytes for use in self.ledger.segments.use.values())
        visible = set(self.ledger.listing(P).partitions[P])
        hidden = {u for u, group in self.model.groups.items() if group.state == "trained"}
        assert visible == {key for key in self.model.rows if key.rsplit("_", 2)[0] not in hidden}

    @invariant()
    def rows_are_consumed_by_whom_they_were_given_to(self) -> None:
        rows = self.ledger.partition(P).rows
        serials = [packed(np.asarray([rows.order.of(row)])) for row in rows.ids.values()]
        for task in ("mine", "yours"):
            found = self.ledger.find(m.Find(P, rows=b"".join(serials), fields=[], task=task))
            assert found.consumed == bytes(serial in self.consumed.get(task, ()) for serial in serials)

    @invariant()
    def a_lookup_finds_what_was_written_last(self) -> None:
        for key in self.ledger.listing(P).partitions[P]:
            located = self.ledger.lookup(P, [key])
            found = {place.field: located.blocks[int.from_bytes(place.block, "little")] for place in located.places}
            assert found == self.model.rows[key]


def test_the_ledger_agrees_with_the_model() -> None:
    run_state_machine_as_test(LedgerMachine, settings=_settings(100, 40))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_ledger_agrees_with_the_model_for_long() -> None:
    run_state_machine_as_test(LedgerMachine, settings=_settings(2000, 50))


def _settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
