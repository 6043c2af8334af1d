"""Who has a version, who is out, and whether it may be published: decided by calls."""

from __future__ import annotations

import pytest

from agent_loop.llm.protocol import ServerDied
from streamrl.weight_sync import WeightsDamaged, WeightsMismatch, WeightsMissing
from streamrl.weight_sync.two_phase import SyncRound

DEAD, DAMAGED, GONE, SLOW = ServerDied("killed"), WeightsDamaged("a bit"), WeightsMissing("gone"), TimeoutError("slow")


def ran(prepared: dict[str, object], committed: dict[str, object] | None = None, digest: str = "d") -> SyncRound:
    turn = SyncRound(digest)
    ready = turn.prepared(prepared)
    turn.committed({name: (committed or {}).get(name, 0.01) for name in ready})
    return turn


def test_all_take_it() -> None:
    turn = ran({"a": "d", "b": None})
    assert (turn.acknowledged, turn.missing, turn.in_service, turn.refusal) == (("a", "b"), {}, True, None)


@pytest.mark.parametrize("failure", [DAMAGED, GONE, SLOW, WeightsMismatch("names")], ids=repr)
@pytest.mark.parametrize("phase", ["prepare", "commit"])
def test_one_that_fails_is_behind_and_the_others_go_on(failure: Exception, phase: str) -> None:
    turn = ran({"a": failure if phase == "prepare" else "d", "b": "d"}, {"a": failure} if phase == "commit" else {})
    assert turn.acknowledged == ("b",)
    assert turn.behind == turn.missing == {"a": str(failure)}
    assert turn.in_service
    assert turn.refusal is None


def test_one_that_is_dead_is_missing_and_not_behind() -> None:
    turn = ran({"a": DEAD, "b": "d"})
    assert (turn.missing, turn.behind) == ({"a": "killed"}, {})


def test_a_checksum_that_is_not_the_trainers_is_damage() -> None:
    turn = ran({"a": "other", "b": "d"})
    assert turn.acknowledged == ("b",)
    assert "a has read checksum other, the trainer wrote d" in turn.missing["a"]
    assert ran({"a": "anything"}, digest="").acknowledged == ("a",)


def test_a_version_that_nobody_takes_and_somebody_refuses_is_wrong_itself() -> None:
    turn = ran({"a": DAMAGED, "b": SLOW})
    assert turn.refusal is DAMAGED
    assert not turn.in_service


def test_a_version_that_nobody_takes_in_time_is_not_published() -> None:
    turn = ran({"a": SLOW, "b": DEAD})
    assert (turn.refusal, turn.in_service, turn.acknowledged) == (None, False, ())


def test_where_all_are_dead_the_version_is_what_they_come_back_with() -> None:
    assert ran({"a": DEAD, "b": DEAD}).in_service
    assert ran({}).in_service
