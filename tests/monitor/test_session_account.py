"""Tokens of sessions are trained or wasted, once, and the account says for which reason."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from streamrl.monitor.events import Event
from streamrl.monitor.registry import check_step_metrics
from streamrl.monitor.session_account import Lengths, SessionAccount


def session(uid: str, tokens: int, status: str = "success", partition: str = "train", **fields: Any) -> Event:
    told = {"partition": partition, "uid": uid, "session": 0, "status": status, "tokens": tokens, **fields}
    return Event("span", "session", 0.0, 1.0, fields=told, process="agents-0")


def span(name: str, seconds: float, **fields: Any) -> Event:
    return Event("span", name, 0.0, seconds, fields=fields, process="trainer")


def test_tokens_of_groups_that_left_are_waste_by_reason() -> None:
    account = SessionAccount()
    account.feed_all([session("a", 10), session("b", 30), session("c", 5, "failed"), session("d", 20)])
    account.feed_all([session("v", 1000, partition="val")])
    account.trained(["a"])
    account.left("b", "stale")
    account.left("c", "failed: ValueError: x")
    metrics = account.step_metrics()
    check_step_metrics(metrics)
    assert metrics == {
        "waste/tokens/failed": 5.0, "waste/tokens/stale": 30.0, "waste/ratio": 35 / 45,
        "sampling/length_bias": 10 / (65 / 4),
    }  # fmt: skip
    account.trained(["d"])
    assert account.step_metrics()["waste/ratio"] == 0.0


def test_a_session_that_ends_after_its_group_left_is_waste_for_the_reason_of_the_group() -> None:
    account = SessionAccount()
    account.feed_all([session("a", 10)])
    account.left("a", "cancelled")
    account.feed_all([session("a", 7, "interrupted"), session("a", 3)])
    assert account.step_metrics()["waste/tokens/cancelled"] == 20.0
    assert account.held == {}


def test_lengths_of_cancelled_sessions_are_censored() -> None:
    account = SessionAccount()
    account.feed_all([session("a", 10), session("b", 40)])
    account.feed_all([session("c", 20, "cancelled", engine_seconds=1.0), session("d", 0, "cancelled")])
    account.trained(["a"])
    account.left("c", "cancelled: too old before its last session ended")
    metrics = account.step_metrics()
    # A third of those at risk end at 10; of the other two thirds one ends at 40, and the cut one would have, too.
    assert metrics["sampling/length_bias"] == pytest.approx(10 / (10 + 2 / 3 * 30))
    assert metrics["waste/tokens/cancelled"] == 20
    assert "agent_loop/generate_sequences/mean" not in metrics, "the times are those of sessions that ended"


def test_the_mean_of_all_lengths_is_found_though_long_ones_were_cut() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # noqa: T201
    rng, lengths, naive = random.Random(seed), Lengths(), []
    for _ in range(20_000):
        length, cut = round(rng.lognormvariate(3, 0.8)), rng.randrange(1, 400)
        (lengths.cut if cut < length else lengths.ended)[min(cut, length)] += 1
        naive += [length] if length <= cut else []
    assert lengths.mean == pytest.approx(math.exp(3 + 0.8**2 / 2), rel=0.04)
    assert statistics.mean(naive) < 0.94 * lengths.mean


def test_stages_of_the_trainer_and_times_of_sessions_are_metrics() -> None:
    account = SessionAccount()
    account.feed_all([span("wait_data", 1.0), span("wait_order", 0.5), span("publish", 0.25, version=1, bytes=4096)])
    account.feed_all([span("validate_beside", 2.0), span("step", 9.0)])
    times = {"engine_seconds": 2.0, "queue_seconds": 1.0, "tool_seconds": 0.5, "tool_calls": 3}
    account.feed_all([session("a", 1, **times), session("b", 1, engine_seconds=1.0, queue_seconds=0.0)])
    metrics = account.step_metrics()
    check_step_metrics(metrics)
    assert metrics["timing_s/gen"] == 1.5
    assert metrics["timing_s/update_weights"] == 0.25
    assert metrics["timing_s/testing"] == 2.0
    assert metrics["weights/bytes"] == 4096.0
    assert metrics["agent_loop/generate_sequences/mean"] == 2.0
    assert metrics["agent_loop/generate_sequences/max"] == 3.0
    assert metrics["agent_loop/tool_calls/max"] == metrics["agent_loop/tool_calls/min"] == 0.5
    assert metrics["tool_call_counts/mean"] == 3.0
    assert set(account.step_metrics()) == {"waste/ratio"}, "each is told once"


def test_every_token_is_held_trained_or_wasted_once_in_any_order() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # noqa: T201
    rng = random.Random(seed)
    account, told, wasted = SessionAccount(), 0, 0.0
    for _ in range(2000):
        uid, act = str(rng.randrange(40)), rng.random()
        if act < 0.7:
            tokens = rng.randrange(100)
            told += tokens
            account.feed_all(
                [session(uid, tokens, rng.choice(["success", "success", "failed", "interrupted", "cancelled"]))]
            )
        elif act < 0.8:
            account.trained([uid])
        elif act < 0.9:
            account.left(uid, rng.choice(["stale", "filtered", "failed: x"]))
        else:
            metrics = account.step_metrics()
            wasted += sum(value for name, value in metrics.items() if name.startswith("waste/tokens/"))
    wasted += sum(value for name, value in account.step_metrics().items() if name.startswith("waste/tokens/"))
    held = sum(group.tokens for group in account.held.values())
    assert told == held + account.trained_in_all.tokens + wasted


def test_a_resumed_run_accounts_for_what_it_sampled_itself() -> None:
    account = SessionAccount()
    account.feed_all([session("a", 1000), session("b", 1000, "failed"), span("publish", 5.0)])
    account.feed_all([Event("process", "trainer", 0.0, process="trainer"), session("c", 10)])
    account.trained(["a", "c"])  # a was generated in the life before
    assert account.step_metrics() == {"waste/ratio": 0.0, "sampling/length_bias": 1.0}
    account.feed_all([session("d", 10), Event("process", "trainer", 0.0, fields={"rotated": True}, process="trainer")])
    assert set(account.held) == {"d"}
