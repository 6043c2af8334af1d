"""The controller without sockets: who waits is woken, what is sent twice is done once, who dies is cleaned up after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from transfer_queue.controller.core import UNIT_GRACE, ControllerCore
from transfer_queue.errors import Corrupt
from transfer_queue.ledger import Ledger
from transfer_queue.net import messages as m
from transfer_queue.storage.journal import MemoryJournal
from transfer_queue.storage.segments import segment_id, unit_of

SEGMENT = 1024
TASKS = [m.TaskSpec("generate", "prompt", ttl=15.0), m.TaskSpec("train", "rows", "incarnation")]


class World:
    """A core, the clients that talk to it, and one unit or several that make what they are asked for."""

    def __init__(self, *, path: Path | None = None, units: int = 1, budget: int = 16 * SEGMENT, spare: int = 2) -> None:
        self.now, self.path, self.budget, self.spare = 0.0, path, budget, spare
        self.answers: dict[tuple[str, int], list[Any]] = {}
        self.pushes: list[tuple[str, Any]] = []
        self.files: dict[int, dict[int, int]] = {unit: {} for unit in range(units)}
        self.next_id = self.made = 0
        self.broken = False
        self.journal = MemoryJournal()
        self.core: Any = None
        self.start()

    def start(self) -> None:
        """Also after a crash: units register again."""
        self.pushes.clear()
        if self.core is not None:
            self.core.close()
        if self.path is None:
            self.core = ControllerCore(
                Ledger(), send=self.send, journal=self.journal, segment_bytes=SEGMENT, spare_segments=self.spare
            )
        else:
            self.core = ControllerCore.recover(
                self.path, send=self.send, now=self.now, run="r", segment_bytes=SEGMENT, spare_segments=self.spare
            )
        for unit in self.files:
            self.register(unit)

    def send(self, client: str, response: m.Response) -> None:
        if response.id == 0:
            self.pushes.append((client, response.body))
        else:
            self.answers.setdefault((client, response.id), []).append(response.body)

    # --- clients ----------------------------------------------------------------------------------------------

    def hello(self, client: str, name: str = "") -> Any:
        return self.ask(client, m.Hello(version=m.VERSION, run="r", key="", name=name or client))

    def ask(self, client: str, body: Any, *, id: int = 0) -> Any:
        """The answer, or None if the request waits."""
        if not id:
            self.next_id += 1
            id = self.next_id
        self.last = (client, id)
        before = len(self.answers.get(self.last, []))
        self.core.handle(client, m.Request(id=id, body=body), self.now)
        asked = self.last
        self.serve_pushes()
        self.last = asked
        answers = self.answers.get(asked, [])
        return answers[-1] if len(answers) > before else None

    def answer_to(self, ticket: tuple[str, int]) -> Any:
        """The one answer to a request, or None if it still waits."""
        answers = self.answers.get(ticket, [])
        assert len(answers) < 2, "answered twice"
        return answers[0] if answers else None

    def wait(self, client: str, body: Any) -> tuple[str, int]:
        """A request that must wait; its ticket for `answer_to`."""
        assert self.ask(client, body) is None
        return self.last

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)
        self.serve_pushes()

    # --- units ------------------------------------------------------------------------------------------------

    def register(self, unit: int) -> Any:
        self.hello(f"unit-{unit}")
        info = m.UnitInfo(unit=unit, directory=f"/u{unit}", endpoint="", nonce="n")
        self.next_id += 1
        inventory = list(self.files[unit].items())
        body = m.RegisterUnit(info, 0, self.budget, inventory)
        self.core.handle(f"unit-{unit}", m.Request(id=self.next_id, body=body), self.now)
        keep = self.answer_to((f"unit-{unit}", self.next_id))
        self.files[unit] = {segment: nbytes for segment, nbytes in inventory if segment in keep.segments}
        self.serve_pushes()
        return keep

    def serve_pushes(self) -> None:
        while self.pushes and not self.broken:
            client, push = self.pushes.pop(0)
            if isinstance(push, m.GiveBack):  # test_recalling.py
                continue
            unit = int(client.removeprefix("unit-"))
            if isinstance(push, m.FreeSegments):
                for segment in push.segments:
                    del self.files[unit][segment]
                continue
            made: list[m.Segment] = []
            for _ in range(push.count):
                self.made += 1
                made.append(m.Segment(segment_id(unit, 1, self.made), unit, push.nbytes))
                self.files[unit][made[-1].segment] = push.nbytes
            assert sum(self.files[unit].values()) <= self.budget, "the budget is exceeded"
            self.ask(client, m.SegmentsMade(unit=unit, segments=made))

    # --- the usual --------------------------------------------------------------------------------------------

    def open(self, **credit: int) -> None:
        for name in ("trainer", "worker", "other"):
            self.hello(name)
        self.ask("trainer", m.OpenPartition("p", TASKS, **credit))

    def segment(self, client: str, nbytes: int = 100) -> int:
        return self.ask(client, m.SegmentRequest(nbytes, wait=1.0)).segments[0].segment

    def admit(self, *uids: str, wait: float = 0.0) -> Any:
        return self.ask("trainer", m.Admit("p", [m.GroupSpec(uid, 1, int(uid[1:])) for uid in uids], wait=wait))

    def generate(self, uid: str, token: m.Token | None = None, segment: int | None = None, tag: Any = None) -> Any:
        blocks = [] if segment is None else [m.Block("x", segment, 0, 8, 1, "dense", "<i8", (), 0)]
        close = m.SessionClose(uid, 0, [f"{uid}_0_0"])
        return self.ask("worker", m.Commit("p", [f"{uid}_0_0"], blocks, [tag or {}], token, [close]))


@pytest.fixture
def world() -> World:
    world = World()
    world.open()
    return world


TRAIN = m.Lease("p", "train", "trainer", groups=2, wait=30.0)
GENERATE = m.Lease("p", "generate", "worker", groups=2, wait=30.0)


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_parked_lease_wakes_with_the_last_session_end(world: World) -> None:
    waiting = world.wait("trainer", TRAIN)
    world.admit("u0")
    leased = world.ask("worker", GENERATE)
    assert world.answer_to(waiting) is None
    world.generate("u0", leased.token)
    assert [group.uid for group in world.answer_to(waiting).groups] == ["u0"]


def test_a_lease_that_waits_in_vain_is_told_how_things_stand(world: World) -> None:
    waiting = world.wait("trainer", TRAIN)
    world.admit("u0")
    world.ask("worker", GENERATE)
    assert world.core.next_deadline() == 15.0
    world.after(14.0)
    world.ask("worker", m.Renew("p", m.Token(1, 1)))
    world.after(15.9)
    assert world.answer_to(waiting) is None
    assert world.core.next_deadline() == 30.0
    world.after(0.1)
    failed = world.answer_to(waiting)
    assert failed.code == "deadline"
    for part in ("'trainer' waited 30.0 s", "up to 2 groups", "task 'train'", "partition 'p'", "pending 1", "ready 0"):
        assert part in failed.message


def test_a_lease_on_a_partition_that_nobody_has_opened_waits_for_that_and_says_so_at_its_deadline(world: World) -> None:
    request = m.Lease("later", "generate", "worker", groups=1, wait=30.0)
    first, second = world.wait("worker", request), world.wait("worker", request)
    records = len(world.journal.records)
    world.ask("other", m.Commit("later", ["plain"]))
    assert world.answer_to(first) is None, "rows alone do not open it"
    world.after(30.0)
    assert len(world.journal.records) == records + 1
    failed = world.answer_to(first)
    assert failed.code == "deadline"
    for part in ("'worker' waited 30.0 s", "'later', which nobody has opened (open: 'p')", "open_partition"):
        assert part in failed.message
    assert world.answer_to(second).code == "deadline"
    assert world.ask("worker", m.Lease("later", "generate", "worker", groups=1)).code == "deadline", "it does not wait"


def test_a_lease_gets_what_is_admitted_once_its_partition_is_open(world: World) -> None:
    waiting = world.wait("worker", m.Lease("later", "generate", "worker", groups=1, wait=30.0))
    stranger = world.wait("worker", m.Lease("later", "judge", "worker", groups=1, wait=30.0))
    world.ask("trainer", m.OpenPartition("later", TASKS))
    assert world.answer_to(waiting) is None
    assert "no task 'judge'" in world.answer_to(stranger).message
    world.ask("trainer", m.Admit("later", [m.GroupSpec("u0", 1, 0)]))
    assert [group.uid for group in world.answer_to(waiting).groups] == ["u0"]


def test_who_came_first_gets_the_group(world: World) -> None:
    first = world.wait("worker", m.Lease("p", "generate", "worker", groups=1, wait=9.0))
    second = world.wait("other", m.Lease("p", "generate", "other", groups=1, wait=9.0))
    named = world.wait("other", m.Lease("p", "train", "other", groups=1, wait=9.0))
    world.admit("u0")
    assert world.answer_to(first).groups[0].uid == "u0"
    assert world.answer_to(second) is None
    world.admit("u1")
    assert world.answer_to(second).groups[0].uid == "u1"
    assert world.answer_to(named) is None


def test_a_lease_by_uid_waits_for_its_groups_and_holds_up_nobody(world: World) -> None:
    world.admit("u0", "u1")
    assert world.ask("trainer", m.Lease("p", "train", "trainer", uids=["u9"], wait=9.0)).code == "not_found"
    named = world.wait("trainer", m.Lease("p", "train", "trainer", uids=["u1"], wait=9.0))
    anybody = world.wait("other", m.Lease("p", "train", "other", groups=1, wait=9.0))
    world.generate("u0")
    assert world.answer_to(anybody).groups[0].uid == "u0"
    world.generate("u1")
    assert world.answer_to(named).groups[0].uid == "u1"


def test_credit_is_given_in_order_of_arrival() -> None:
    world = World()
    world.open(max_groups=2)
    world.admit("u0", "u1")
    big, small = world.wait("trainer", _admit("u2", "u3")), world.wait("other", _admit("u4"))
    again = world.ask("other", _admit("u0"))
    assert isinstance(again, m.Ok), "what needs no credit is not held up"
    world.ask("trainer", m.Drop("p", ["u0"], "stale"))
    assert world.answer_to(big) is None
    assert world.answer_to(small) is None, "the small one must not starve the big one"
    world.ask("trainer", m.Drop("p", ["u1"], "stale"))
    assert isinstance(world.answer_to(big), m.Ok)
    world.after(60.0)
    assert world.answer_to(small).code == "queue_full"
    assert "2 of 2 are outstanding" in world.answer_to(small).message
    assert world.answer_to(small).retry_after > 0


def _admit(*uids: str) -> m.Admit:
    return m.Admit("p", [m.GroupSpec(uid, 1, int(uid[1:])) for uid in uids], wait=50.0)


def test_a_watcher_wakes_at_once_and_its_timeout_is_no_error(world: World) -> None:
    snapshot = world.ask("trainer", m.Watch("p", -1, wait=9.0))
    assert snapshot.snapshot
    waiting = world.wait("trainer", m.Watch("p", snapshot.seq, wait=9.0))
    world.admit("u0")
    changes = world.answer_to(waiting)
    assert [(group.uid, group.state) for group in changes.groups] == [("u0", "pending")]
    waiting = world.wait("trainer", m.Watch("p", changes.seq, wait=9.0))
    world.after(9.0)
    assert world.answer_to(waiting) == m.Changes(changes.seq, [], changes.depth)


def test_watchers_are_looked_at_only_when_a_group_has_changed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.admit("u0")
    seq = world.ask("trainer", m.Watch("p", -1)).seq
    waiting = [world.wait("trainer", m.Watch("p", seq, wait=9.0)) for _ in range(10)]
    world.ask("trainer", m.Commit("p", ["a"], tags=[{}]))
    looked, attempt = [], world.core._attempt
    monkeypatch.setattr(world.core, "_attempt", lambda *given, **how: looked.append(given) or attempt(*given, **how))
    for _ in range(5):
        assert isinstance(world.ask("trainer", m.Commit("p", ["a"], tags=[{}])), m.Committed)
    assert looked == []
    world.admit("u1")
    assert all(world.answer_to(watcher).groups[0].uid == "u1" for watcher in waiting)


# --- once -------------------------------------------------------------------------------------------------------------


def test_a_request_sent_twice_is_done_once_and_answered_alike(world: World) -> None:
    world.admit("u0", "u1")
    first = world.ask("worker", m.Lease("p", "generate", "worker", groups=1))
    again = world.ask("worker", m.Lease("p", "generate", "worker", groups=1), id=world.last[1])
    assert again == first
    assert world.core.ledger.stats(0.0)["p"].depth["generating"] == 1
    waiting = world.wait("trainer", TRAIN)
    assert world.ask("trainer", TRAIN, id=waiting[1]) is None
    world.generate("u0", first.token)
    assert world.answer_to(waiting).groups[0].uid == "u0"


def test_refused_requests_are_not_journaled(world: World) -> None:
    before = len(world.journal.records)
    assert world.ask("worker", m.Renew("p", m.Token(9, 9))).code == "fenced"
    assert world.ask("worker", m.Expire()).code == "invalid"
    world.after(99.0)
    assert len(world.journal.records) == before


# --- death ------------------------------------------------------------------------------------------------------------


def test_a_dead_client_gives_its_groups_back_and_its_token_is_fenced(world: World) -> None:
    world.admit("u0", "u1")
    leased = world.ask("worker", GENERATE)
    waiting = world.wait("other", m.Lease("p", "generate", "other", groups=2, wait=9.0))
    forgotten = world.wait("worker", m.Watch("p", world.core.ledger.sequence("p"), wait=9.0))
    world.core.client_gone("worker", world.now)
    assert [group.attempt for group in world.answer_to(waiting).groups] == [1, 1]
    assert world.answer_to(forgotten) is None
    assert world.generate("u0", leased.token).code == "disconnected"
    world.hello("worker")
    assert world.generate("u0", leased.token).code == "fenced"


def in_hand(world: World, name: str, count: int = 4) -> list[str]:
    """What a new worker of this name gets that leases all it can."""
    world.hello(name)
    leased = world.ask(name, m.Lease("p", "generate", name, groups=count))
    assert world.ask(name, m.Lease("p", "generate", name, groups=count)).code == "deadline"
    return [group.uid for group in leased.groups]


def test_a_group_that_kills_every_holder_is_found_and_ends_dead_while_its_neighbours_go_on(world: World) -> None:
    world.admit("u0", "u1", "u2")
    for number, expected in enumerate([["u0", "u1", "u2"], ["u0", "u1", "u2"], ["u0"], ["u0"], ["u0"]]):
        assert in_hand(world, f"w{number}") == expected
        world.core.client_gone(f"w{number}", world.now)
    stats = world.core.ledger.stats(0.0)["p"]
    assert stats.dead == {"u0": "its holder 'w4' died (delivered 3 times)"}
    assert in_hand(world, "w5") == ["u1"], "innocent, but nobody knows yet"
    other = world.wait("w5", m.Lease("q", "generate", "w5", groups=1, wait=9.0))
    world.ask("trainer", m.OpenPartition("q", TASKS))
    world.ask("trainer", m.Admit("q", [m.GroupSpec("v0", 1, 0)]))
    assert world.answer_to(other) is None, "nor in another partition"
    world.admit("u7")
    assert in_hand(world, "w6") == ["u2"]
    world.generate("u1", m.Token(1, 6))
    assert [group.uid for group in world.answer_to(other).groups] == ["v0"]
    world.generate("u2", m.Token(1, 7))
    assert in_hand(world, "w7") == ["u7"]
    assert stats.depth["dead"] == 1


def test_only_a_death_makes_a_group_suspected(world: World) -> None:
    world.admit("u0", "u1")
    for number in range(9):
        name = f"w{number}"
        assert in_hand(world, name) == ["u0", "u1"]
        if number % 3 == 0:
            world.ask(name, m.Bye())
        elif number % 3 == 1:
            world.ask(name, m.ReleaseHolder(name, died=False))
        else:
            world.after(15.0)
    in_hand(world, "dies")
    world.ask("trainer", m.ReleaseHolder("dies"))
    assert in_hand(world, "next") == ["u0", "u1"], "one death may be anything"


def test_a_client_whose_twin_lives_keeps_its_leases(world: World) -> None:
    world.hello("worker-2", name="worker")
    world.admit("u0")
    leased = world.ask("worker", GENERATE)
    world.core.client_gone("worker", world.now)
    assert isinstance(world.ask("worker-2", m.Renew("p", leased.token)), m.Ok)


def test_a_training_lease_outlives_its_client_and_any_time_but_not_the_next_incarnation(world: World) -> None:
    world.admit("u0")
    world.generate("u0")
    leased = world.ask("trainer", TRAIN)
    world.core.client_gone("trainer", world.now)
    world.after(1e6)
    world.hello("trainer")
    write = m.Commit("p", ["u0_0_0"], tags=[{"loss": 1.0}], token=leased.token)
    assert isinstance(world.ask("trainer", write), m.Committed)
    restored = world.ask("trainer", m.OpenTrainer("p", 0))
    assert (restored.incarnation, restored.ready, restored.reissued) == (1, ["u0"], [])
    assert world.ask("trainer", write).code == "fenced"
    assert world.ask("trainer", m.Ack("p", leased.token, ["u0"], step=1)).code == "fenced"


def test_a_restore_that_repeats_keeps_whole_groups_of_any_version_and_forgets_the_others(world: World) -> None:
    world.admit("u0", "u1", "u2", "u3", "u4")
    for uid, version in [("u0", 0), ("u1", 5)]:
        world.generate(uid, tag={"max_global_steps": version})
    token = world.ask("trainer", m.Lease("p", "train", "trainer", uids=["u0"])).token
    world.ask("trainer", m.Ack("p", token, ["u0"], step=2))
    held = world.ask("worker", m.Lease("p", "generate", "worker", uids=["u2"])).token
    world.ask("trainer", m.Drop("p", ["u4"], "filtered"))
    seen = world.ask("trainer", m.Watch("p", -1, 0.0)).seq
    restored = world.ask("trainer", m.OpenTrainer("p", 1, repeats=True))
    assert (restored.ready, restored.reissued) == (["u0", "u1"], [])
    told = {group.uid: group.state for group in world.ask("trainer", m.Watch("p", seen, 0.0)).groups}
    assert told == {"u0": "ready", "u2": "dropped", "u3": "dropped"}
    assert world.generate("u2", held).code == "fenced"
    assert isinstance(world.admit("u2", "u3", "u4"), m.Ok)
    live = world.core.ledger.partition("p").groups
    assert {uid: group.state for uid, group in live.items()} == {
        "u0": "ready", "u1": "ready", "u2": "pending", "u3": "pending",
    }, "what had ended stays so"  # fmt: skip


def test_a_restore_brings_back_what_was_acked_later_and_never_what_was_committed(world: World) -> None:
    world.admit("u0", "u1", "u2", "u3")
    for uid, version in [("u0", 0), ("u1", 1), ("u2", 2), ("u3", 0)]:
        world.generate(uid, tag={"max_global_steps": version})
    for step, uid in enumerate(["u0", "u1", "u2"], start=1):
        token = world.ask("trainer", m.Lease("p", "train", "trainer", uids=[uid])).token
        world.ask("trainer", m.Ack("p", token, [uid], step=step))
    world.ask("trainer", m.CommitStep("p", 1))
    restored = world.ask("trainer", m.OpenTrainer("p", 1))
    assert restored.ready == ["u1", "u3"]
    assert restored.reissued == ["u2"], "its rows come from weights that no longer exist"
    assert world.ask("trainer", m.Lease("p", "train", "trainer", uids=["u0"])).code == "not_found"
    assert isinstance(world.admit("u0"), m.Ok)
    assert world.core.ledger.stats(0.0)["p"].depth["pending"] == 1


def test_a_lease_that_runs_out_goes_to_the_next_and_is_journaled_once(world: World) -> None:
    world.admit("u0")
    world.ask("worker", GENERATE)
    waiting = world.wait("other", m.Lease("p", "generate", "other", groups=1, wait=99.0))
    world.after(15.0)
    assert world.answer_to(waiting).groups[0].attempt == 1
    world.after(0.0)
    kinds = [type(record.mutation) for record in world.journal.records]
    assert kinds.count(m.Expire) == 1


def test_who_did_not_say_hello_rightly_is_not_served(world: World) -> None:
    assert world.ask("stranger", m.Stats()).code == "disconnected"
    strict = ControllerCore(Ledger(), send=world.send, journal=MemoryJournal(), run="r", key="secret")
    world.core = strict
    for hello, text in [
        (m.Hello(version=99, run="r", key="secret", name="a"), "version"),
        (m.Hello(version=m.VERSION, run="x", key="secret", name="a"), "serves run 'r', not 'x'"),
        (m.Hello(version=m.VERSION, run="r", key="sécret", name="a"), "wrong key"),
    ]:
        assert text in world.ask("a", hello).message
    assert isinstance(world.ask("a", m.Hello(version=m.VERSION, run="r", key="secret", name="a")), m.Welcome)


# --- segments ---------------------------------------------------------------------------------------------------------


def test_writers_get_segments_from_the_units_by_turns() -> None:
    world = World(units=2)
    world.open()
    units = [world.ask("worker", m.SegmentRequest(10)).segments[0].unit for _ in range(4)]
    assert units == [0, 1, 0, 1]
    commit = m.Commit("p", ["kv"], want=2 * SEGMENT)
    assert len(world.ask("worker", commit).grants) == 2


def test_a_segment_request_waits_within_the_budget_and_says_so() -> None:
    world = World(budget=3 * SEGMENT)
    world.open()
    held = [world.segment("worker") for _ in range(3)]
    waiting, vain = (world.wait(client, m.SegmentRequest(10, wait=9.0)) for client in ("other", "trainer"))
    assert world.ask("other", m.SegmentRequest(4 * SEGMENT, wait=9.0)).code == "invalid"
    world.ask("worker", m.Commit("p", ["kv"], [_block(held[0])], sealed=held[:2]))
    assert world.answer_to(waiting) is not None
    world.after(4.0)
    stats = world.ask("other", m.Stats())
    assert stats.no_room == 1
    assert stats.first_without_room.startswith("'trainer' waited 4.0 s for room for 10 bytes")
    world.after(5.0)
    failed = world.answer_to(vain)
    assert failed.code == "queue_full"
    assert f"unit 0 uses {3 * SEGMENT} of {3 * SEGMENT} bytes" in failed.message
    assert world.ask("other", m.Stats()).no_room == 0


def _block(segment: int, offset: int = 0, nbytes: int = 8) -> m.Block:
    return m.Block("x", segment, offset, nbytes, 1, "dense", "<i8", (nbytes // 8,) if nbytes > 8 else (), 0)


def test_a_large_put_gets_a_segment_of_its_own_at_the_cost_of_spare_ones() -> None:
    world = World(budget=16 * SEGMENT, spare=8)
    world.open()
    assert len(world.files[0]) == 8
    granted = world.ask("worker", m.SegmentRequest(9 * SEGMENT, wait=9.0))
    assert granted.segments[0].nbytes >= 9 * SEGMENT
    assert len(world.files[0]) == 5


def test_large_segments_come_from_the_unit_that_has_freed_one_of_that_size() -> None:
    """It may have pooled the file: a fresh one costs several times as much."""
    world = World(units=2, budget=64 * SEGMENT)
    world.open()
    used = []
    for i in range(5):
        segment = world.segment("worker", (9 + i % 2) * SEGMENT)
        used.append(unit_of(segment))
        world.ask("worker", m.Commit("p", ["a"], [_block(segment)], sealed=[segment]))
        world.ask("worker", m.Clear("p", ["a"]))
    assert used[2:] == [used[0], used[1], used[0]]


def test_a_request_for_a_segment_seals_those_that_it_names(world: World) -> None:
    full = world.segment("worker")
    world.ask("worker", m.SegmentRequest(100, wait=1.0, sealed=[full]))
    assert full not in world.files[0]


def test_a_segment_is_freed_when_it_is_sealed_and_empty_but_not_before(world: World) -> None:
    segment = world.segment("worker")
    world.ask("worker", m.Commit("p", ["a"], [_block(segment)]))
    world.ask("worker", m.Clear("p", ["a"]))
    assert segment in world.files[0], "its writer may go on"
    world.ask("worker", m.Commit("p", ["a"], [_block(segment, 64)], sealed=[segment]))
    assert segment in world.files[0], "a row lives in it"
    world.ask("worker", m.Clear("p", ["a"]))
    assert segment not in world.files[0]


def test_segments_are_sealed_even_by_a_refused_commit_and_by_their_writers_death(world: World) -> None:
    first, second = world.segment("worker"), world.segment("worker")
    refused = m.Commit("p", ["a"], [_block(first)], token=m.Token(7, 7), sealed=[first])
    assert world.ask("worker", refused).code == "fenced"
    assert first not in world.files[0]
    world.core.client_gone("worker", world.now)
    world.serve_pushes()
    assert second not in world.files[0]


def test_a_block_outside_the_writers_own_segments_is_refused(world: World) -> None:
    segment = world.segment("worker")
    assert world.ask("other", m.Commit("p", ["a"], [_block(segment)])).code == "segment_gone"
    assert world.ask("worker", m.Commit("p", ["a"], [_block(segment, SEGMENT - 8, 16)])).code == "invalid"
    assert world.ask("worker", m.Commit("p", ["a"], [_block(segment + 1000)])).code == "segment_gone"


def test_a_unit_that_cannot_make_segments_is_asked_again_later() -> None:
    world = World(units=1, spare=1)
    world.open()
    world.broken = True
    world.segment("worker")
    (_, push) = world.pushes.pop()
    assert (push.count, push.nbytes) == (1, SEGMENT)
    waiting = world.wait("worker", m.SegmentRequest(10, wait=30.0))
    pushed = len(world.pushes)
    world.ask("unit-0", m.SegmentsMade(unit=0, segments=[], error="ENOSPC"))
    assert len(world.pushes) == pushed
    world.broken = False
    assert world.core.next_deadline() == 1.0
    world.after(1.0)
    assert world.answer_to(waiting) is not None


# --- units that come back --------------------------------------------------------------------------------------------


def test_a_unit_that_lost_segments_has_its_groups_issued_again(world: World) -> None:
    prompts, rows = world.segment("trainer"), world.segment("worker")
    specs = [m.GroupSpec(f"u{i}", 1, i) for i in range(2)]
    world.ask("trainer", m.Admit("p", specs, [m.Block("raw", prompts, 0, 16, 2, "dense", "<i8", (), 0)]))
    world.generate("u0", segment=rows)
    world.core.client_gone("unit-0", world.now)
    assert not world.ask("trainer", m.Stats()).units[0].alive
    del world.files[0][rows]
    keep = world.register(0)
    assert keep.segments == [prompts]
    again = world.ask("other", m.Lease("p", "generate", "other", groups=2))
    assert [(group.uid, group.attempt) for group in again.groups] == [("u0", 1), ("u1", 0)]
    assert world.ask("worker", m.Commit("p", ["kv"], [_block(rows)])).code == "segment_gone"


def test_a_group_without_its_prompt_waits_until_it_is_admitted_again(world: World) -> None:
    prompts = world.segment("trainer")
    admit = m.Admit("p", [m.GroupSpec("u0", 1, 0)], [_block(prompts)])
    world.ask("trainer", admit)
    world.files[0].clear()
    world.register(0)
    shown = world.ask("trainer", m.Watch("p", -1)).groups[0]
    assert (shown.state, shown.reason) == ("pending", "prompt lost")
    waiting = world.wait("worker", GENERATE)
    fresh = world.segment("trainer")
    world.ask("trainer", m.Admit("p", [m.GroupSpec("u0", 1, 0)], [_block(fresh)]))
    assert world.answer_to(waiting).groups[0].uid == "u0"


# --- recovery ---------------------------------------------------------------------------------------------------------


def lived(tmp_path: Path) -> World:
    world = World(path=tmp_path / "journal")
    world.open(max_groups=4)
    world.admit("u0", "u1")
    return world


def test_a_new_life_knows_what_was_acknowledged_and_honours_leases_that_are_held(tmp_path: Path) -> None:
    world = lived(tmp_path)
    leased = world.ask("worker", m.Lease("p", "generate", "worker", groups=1))
    ticket = world.last
    segment = world.segment("worker")
    world.ask("worker", m.Commit("p", ["kv"], [_block(segment)]))
    before = world.core.ledger.stats(world.now)
    world.now = 3.0  # the clock of another boot
    world.start()
    assert world.core.ledger.stats(world.now)["p"].depth == before["p"].depth
    assert world.ask("worker", m.Stats()).code == "disconnected"
    assert world.hello("worker").epoch == 2
    assert world.ask("worker", m.Lease("p", "generate", "worker", groups=1), id=ticket[1]) == leased
    assert world.core.next_deadline() == 3.0 + 15.0
    assert isinstance(world.generate("u0", leased.token), m.Committed)
    assert world.ask("worker", GENERATE).token == m.Token(2, 2)
    assert world.ask("worker", m.Lookup("p", ["kv"])).blocks[0].segment == segment


def test_a_lookup_waits_for_the_unit_that_has_not_registered_again(tmp_path: Path) -> None:
    world = lived(tmp_path)
    world.ask("worker", m.Commit("p", ["kv"], [_block(world.segment("worker"))]))
    units, world.files = world.files, {}
    world.start()
    world.hello("worker")
    waiting = world.wait("worker", m.Lookup("p", ["kv"]))
    world.files = units
    world.register(0)
    assert world.answer_to(waiting).units[0].unit == 0
    units, world.files = world.files, {}
    world.start()
    world.hello("worker")
    vain = world.wait("worker", m.Lookup("p", ["kv"]))
    world.after(UNIT_GRACE)
    assert world.answer_to(vain).code == "disconnected"


def test_a_torn_record_is_forgotten_and_the_journal_goes_on(tmp_path: Path) -> None:
    world = lived(tmp_path)
    whole = world.core.ledger.fingerprint()
    world.ask("trainer", m.Drop("p", ["u0"], "stale"))
    world.core.close()
    journal = tmp_path / "journal"
    journal.write_bytes(journal.read_bytes()[:-3])
    world.start()
    assert world.core.ledger.partition("p").groups.keys() == {"u0", "u1"}
    world.open(max_groups=4)
    world.ask("trainer", m.Drop("p", ["u1"], "stale"))
    now = world.core.ledger.fingerprint()
    world.core.close()
    world.start()
    assert world.core.ledger.epoch == 3
    assert world.core.ledger.partition("p").groups.keys() == {"u0"}
    assert len({whole, now, world.core.ledger.fingerprint()}) == 3


def test_a_flipped_bit_in_the_middle_stops_the_controller(tmp_path: Path) -> None:
    world = lived(tmp_path)
    world.core.close()
    journal = tmp_path / "journal"
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 4
    journal.write_bytes(data)
    with pytest.raises(Corrupt, match="damaged"):
        world.start()


def test_another_runs_journal_is_refused(tmp_path: Path) -> None:
    lived(tmp_path).core.close()
    with pytest.raises(Corrupt, match="belongs to run 'r'"):
        ControllerCore.recover(tmp_path / "journal", send=lambda *_: None, now=0.0, run="other")


def test_a_lease_that_waits_is_fenced_when_a_newer_trainer_takes_over(world: World) -> None:
    """Else the groups would go to a trainer that is dead or stopped, and stay there as long as the new one lives."""
    first = world.ask("trainer", m.OpenTrainer("p", 0)).incarnation
    waiting = world.wait("trainer", m.Lease("p", "train", "trainer", groups=1, wait=30.0, incarnation=first))
    second = world.ask("other", m.OpenTrainer("p", 0)).incarnation
    assert world.answer_to(waiting).code == "fenced"
    world.admit("u0")
    leased = world.ask("worker", GENERATE)
    world.generate("u0", leased.token)
    late = world.ask("trainer", m.Lease("p", "train", "trainer", groups=1, incarnation=first))
    assert late.code == "fenced"
    assert "has taken over" in late.message
    now = m.Lease("p", "train", "other", groups=1, incarnation=second)
    assert [group.uid for group in world.ask("other", now).groups] == ["u0"]
