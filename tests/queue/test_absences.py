"""A storage unit that stays away is given up after a stated time; its rows are lost and their groups issued again."""

from __future__ import annotations

import pytest

from transfer_queue.controller.absences import Absences
from transfer_queue.controller.core import ControllerCore
from transfer_queue.ledger import Ledger
from transfer_queue.net import messages as m
from transfer_queue.net.messages import VERSION
from transfer_queue.storage.journal import MemoryJournal
from transfer_queue.storage.segments import segment_id

MIB = 1 << 20


def test_a_unit_is_lost_once_and_never_early():
    absences = Absences(after=10.0)
    assert absences.next_due() is None
    absences.left(1, 5.0)
    absences.left(1, 8.0)
    absences.left(2, 7.0)
    absences.left(3, 5.0)
    absences.back(3)
    assert absences.next_due() == 15.0
    assert absences.due(14.9) == []
    assert absences.due(15.0) == [1]
    assert absences.due(20.0) == [2]
    assert absences.next_due() is None


class Controller:
    """A core with one storage unit and one worker, driven by calls."""

    def __init__(self, path=None) -> None:
        self.sent: list[tuple[str, m.Response]] = []
        send = lambda *sent: self.sent.append(sent)  # noqa: E731
        if path is None:
            self.core = ControllerCore(Ledger(), send=send, journal=MemoryJournal())
        else:
            self.core = ControllerCore.recover(path, send=send, now=0.0, run="r")
        self.core.absences.after = 30.0
        self.requests = 0
        self.made = 0

    def ask(self, client: str, body: m.Mutation | m.Query, now: float = 0.0) -> m.Reply | m.Push | None:
        self.requests += 1
        before = len(self.sent)
        self.core.handle(client, m.Request(self.requests, body), now)
        return next((r.body for _, r in self.sent[before:] if r.id == self.requests), None)

    def join_unit(self, number: int, now: float, inventory: list[tuple[int, int]] | None = None) -> m.Keep:
        client = f"unit-{number}"
        self.ask(client, m.Hello(VERSION, "r", "", client), now)
        info = m.UnitInfo(number, f"/u{number}", "", "n")
        keep = self.ask(client, m.RegisterUnit(info, MIB, 64 * MIB, inventory or []), now)
        for push in [r.body for c, r in list(self.sent) if c == client and isinstance(r.body, m.MakeSegments)]:
            made = [m.Segment(segment_id(number, 0, self.made + i), number, push.nbytes) for i in range(push.count)]
            self.made += push.count
            self.ask(client, m.SegmentsMade(number, made), now)
        assert isinstance(keep, m.Keep)
        return keep

    def write_group(self, uid: str) -> int:
        """Admit and generate a group of one session: the segment in which its row lies."""
        self.ask("worker", m.Hello(VERSION, "r", "", "worker"))
        self.ask("worker", m.OpenPartition("p", [m.TaskSpec("generate", "prompt", "clock", 600.0)]))
        self.ask("worker", m.Admit("p", [m.GroupSpec(uid, 1, 0)]))
        leased = self.ask("worker", m.Lease("p", "generate", "worker", 1))
        granted = self.ask("worker", m.SegmentRequest(100, 5.0))
        assert isinstance(leased, m.Leased)
        assert isinstance(granted, m.Granted)
        segment = granted.segments[0].segment
        block = m.Block("x", segment, 0, 8, 1, "dense", "<i8", (), 0)
        closes = [m.SessionClose(uid, 0, [f"{uid}_0_0"])]
        reply = self.ask("worker", m.Commit("p", [f"{uid}_0_0"], [block], None, leased.token, closes))
        assert isinstance(reply, m.Committed), reply
        return segment

    def depth(self) -> dict[str, int]:
        return {state: n for state, n in self.core.ledger.stats(0.0)["p"].depth.items() if n}


def test_a_node_lost_for_good_gives_its_groups_back_after_the_stated_time():
    controller = Controller()
    controller.join_unit(0, 0.0)
    segment = controller.write_group("u0")
    assert controller.depth() == {"ready": 1}
    controller.core.client_gone("unit-0", 100.0)
    deadline = controller.core.next_deadline()
    assert deadline is not None
    assert deadline <= 130.0
    controller.core.tick(129.0)
    assert controller.depth() == {"ready": 1}
    controller.core.tick(130.0)
    assert controller.depth() == {"pending": 1}
    stats = controller.ask("worker", m.Stats(), 131.0)
    assert isinstance(stats, m.QueueStats)
    assert stats.units == []
    keep = controller.join_unit(0, 200.0, [(segment, MIB)])
    assert keep.segments == []  # it may come back, without what was given up


def test_a_unit_that_comes_back_in_time_keeps_its_rows():
    controller = Controller()
    controller.join_unit(0, 0.0)
    segment = controller.write_group("u0")
    controller.core.client_gone("unit-0", 100.0)
    controller.core.tick(120.0)
    assert controller.join_unit(0, 121.0, [(segment, MIB)]).segments == [segment]
    controller.core.tick(1000.0)
    assert controller.depth() == {"ready": 1}


def test_who_writes_to_a_lost_unit_is_told_to_copy_anew():
    controller = Controller()
    controller.join_unit(0, 0.0)
    segment = controller.write_group("u0")
    controller.core.client_gone("unit-0", 0.0)
    controller.core.tick(30.0)
    block = m.Block("x", segment, 64, 8, 1, "dense", "<i8", (), 0)
    answer = controller.ask("worker", m.Commit("p", ["plain"], [block]), 31.0)
    assert isinstance(answer, m.Failed)
    assert answer.code == "segment_gone"


@pytest.mark.parametrize("comes", [True, False])
def test_a_unit_that_does_not_come_after_a_restart_of_the_controller_is_lost_too(tmp_path, comes):
    first = Controller(tmp_path / "journal")
    first.join_unit(0, 0.0)
    segment = first.write_group("u0")
    first.core.close()
    again = Controller(tmp_path / "journal")
    if comes:
        again.join_unit(0, 1.0, [(segment, MIB)])
    again.core.tick(30.0)
    assert again.depth() == ({"ready": 1} if comes else {"pending": 1})
    again.core.close()
