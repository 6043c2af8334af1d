"""The verdict names what limits a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamrl.dashboard.state.health import Health, health
from streamrl.dashboard.state.verdict import OpenCall, Situation, verdict
from streamrl.monitor.schema import CAUSES

LIVE = Health(condition="live", why="The run lives.")


def steps(train: float, idle: float = 0.0, **lost: float) -> list[dict[str, float]]:
    seconds = {f"lost_s/{cause}": lost.get(cause, 0.0) for cause in CAUSES}
    whole = train + sum(lost.values())
    return [
        {"overlap/train_s": train, "overlap/step_s": whole, "overlap/generation_idle_s": idle * whole, **seconds}
    ] * 10


def situation(**changes) -> Situation:
    base = Situation(health=LIVE, status="training", now=100.0, steps=steps(0.9, wait_data=0.1))
    return replace(base, **changes)


def test_a_trainer_that_works_most_of_the_time_is_the_limit_and_that_is_well() -> None:
    found = verdict(situation())
    assert (found.cause, found.tone) == ("training", "good")


def test_a_trainer_that_waits_for_data_is_bound_by_the_rollout_with_its_share() -> None:
    found = verdict(situation(steps=steps(0.6, wait_data=0.4, sync=0.0)))
    assert found.cause == "training"
    found = verdict(situation(steps=steps(0.4, wait_data=0.6)))
    assert (found.cause, found.tone, found.share) == ("wait_data", "warn", pytest.approx(0.6))
    assert "60 % of the last 10 steps" in found.detail


def test_a_rollout_that_idles_while_the_trainer_works_waits_for_credit() -> None:
    found = verdict(situation(steps=steps(0.9, idle=0.55, wait_data=0.1), credit=8, depth={"ready": 6, "training": 2}))
    assert (found.cause, found.share) == ("credit", pytest.approx(0.55))
    assert "waits for credit" in found.headline
    assert "All 8 groups that may be out are out" in found.detail


def test_idle_engines_are_no_fault_where_generation_and_training_take_turns() -> None:
    assert verdict(situation(steps=steps(0.9, idle=0.55, wait_data=0.1), mode="sync")).cause == "training"


def test_both_sides_idle_while_all_credit_waits_for_the_last_sessions() -> None:
    found = verdict(situation(steps=steps(0.2, idle=0.5, wait_data=0.8), feeder_waits=True, depth={"generating": 8}))
    assert found.cause == "credit_starved"


def test_sessions_that_spend_their_time_in_tools_are_named() -> None:
    assert verdict(situation(steps=steps(0.2, wait_data=0.8), tool_share=0.7)).cause == "tools"


@pytest.mark.parametrize("cause", [c for c in CAUSES if c != "wait_data"])
def test_any_other_cause_that_takes_most_is_named(cause: str) -> None:
    assert verdict(situation(steps=steps(0.2, **{cause: 0.8}))).cause == cause


def test_a_stall_counts_while_it_lasts() -> None:
    stalled = situation(steps=steps(0.9, wait_data=0.1), partial={"wait_data": 100.0})
    assert verdict(stalled).cause == "wait_data"


def test_a_tool_call_that_does_not_come_back_is_the_cause_while_the_trainer_waits() -> None:
    call = OpenCall(tool="browser", worker="agent-0", since=60.0, uid="g1", session=2, usual=0.3)
    found = verdict(situation(tools=[call], waits_now="wait_data"))
    assert (found.cause, found.tone) == ("tool", "bad")
    assert "browser" in found.headline
    assert "agent-0" in found.detail


def test_a_tool_that_usually_takes_long_does_not_hang_yet() -> None:
    call = OpenCall(tool="compile", worker="agent-0", since=60.0, usual=30.0)
    assert verdict(situation(tools=[call])).cause == "training"


def test_shares_add_up_to_the_whole() -> None:
    found = verdict(situation(steps=steps(0.5, wait_data=0.2, sync=0.2, unaccounted=0.1), partial={"training": 3.0}))
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_before_the_first_step_it_says_what_is_there() -> None:
    found = verdict(situation(steps=(), status="starting", part="the queue stands"))
    assert found.cause == "starting"
    assert "the queue stands" in found.detail


def test_a_failed_run_says_why() -> None:
    ended = health(status="failed", process_alive=False, last_sign=0.0, heartbeats=True, now=100.0)
    found = verdict(situation(health=ended, status="failed", error="RankDied: rank 1"))
    assert (found.cause, found.tone) == ("failed", "bad")
    assert "rank 1" in found.detail


@pytest.mark.parametrize(
    ("alive", "silent", "heartbeats", "condition"),
    [
        (True, 3.0, True, "live"),
        (True, 8.0, True, "stale"),
        (None, 3.0, True, "live"),
        (None, 8.0, True, "stale"),
        (False, 0.5, True, "dead"),
        (True, 30.0, False, "live"),
        (True, 90.0, False, "stale"),
    ],
)
def test_a_run_that_falls_silent_or_whose_process_is_gone_is_known(alive, silent, heartbeats, condition) -> None:
    found = health(status="training", process_alive=alive, last_sign=100.0 - silent, heartbeats=heartbeats, now=100.0)
    assert found.condition == condition


def test_a_run_that_said_it_ended_has_ended_whatever_its_process_does() -> None:
    assert health(status="finished", process_alive=False, last_sign=0.0, heartbeats=True, now=9e9).condition == "ended"
