"""What servers did between two looks at them follows from their totals, also when one is new, restarted or gone."""

from __future__ import annotations

from typing import Any

import pytest

from agent_loop.llm.protocol import ServerLoad
from streamrl.monitor.registry import check_step_metrics
from streamrl.trainer.server_figures import ServerFigures


def load(tokens: int = 0, first_tokens: int = 0, waited: float = 0.0, took: float = 0.0, **more: Any) -> ServerLoad:
    return ServerLoad(
        1, 2, 4, 0, tokens, 0.0, first_tokens=first_tokens, queue_seconds=waited, first_token_seconds=took, **more
    )


def test_means_are_of_the_requests_since_the_last_step() -> None:
    now = 0.0
    figures = ServerFigures(lambda: now)
    figures.look({"a": load(100, 4, 2.0, 6.0, prompt_tokens=40, cached_tokens=10), "b": load(50)})
    first = figures.step_metrics()
    check_step_metrics(first)
    assert (first["rollout/queue_s"], first["rollout/first_token_s"], first["rollout/prefix_hits"]) == (0.5, 1.5, 0.25)
    assert (first["rollout/running"], first["rollout/waiting"]) == (2.0, 4.0)
    assert "rollout/tokens_per_s/mean" not in first, "nobody knows since when"
    now = 10.0
    later = load(200, 6, 2.0, 7.0, prompt_tokens=60, cached_tokens=30, preemptions=3, cache_usage=0.5)
    figures.look({"a": later, "b": load(350, weights_seconds=8.0)})
    second = figures.step_metrics()
    check_step_metrics(second)
    assert (second["rollout/queue_s"], second["rollout/first_token_s"], second["rollout/prefix_hits"]) == (
        0.0,
        0.5,
        1.0,
    )
    rates = {stat: second[f"rollout/tokens_per_s/{stat}"] for stat in ("mean", "max", "min")}
    assert rates == {"mean": 20.0, "max": 30.0, "min": 10.0}
    assert second["rollout/preemptions"] == 3
    assert second["rollout/cache_usage/max"] == 0.5
    assert second["rollout/weights_age_s/max"] == 8.0


def test_a_server_that_was_started_again_counts_from_its_start_and_one_that_left_does_not_count() -> None:
    now = 0.0
    figures = ServerFigures(lambda: now)
    figures.look({"a": load(100, 4, 2.0, 6.0), "b": load(10, 1, 1.0, 1.0)})
    figures.step_metrics()
    now = 2.0
    figures.look({"a": load(40, 2, 4.0, 8.0)})
    metrics = figures.step_metrics()
    assert metrics["rollout/queue_s"] == 2.0
    assert metrics["rollout/tokens_per_s/mean"] == 20.0
    assert metrics["rollout/running"] == 1.0


def test_two_looks_in_one_step_count_nothing_twice() -> None:
    figures = ServerFigures(lambda: 0.0)
    for total in (1, 3):
        figures.look({"a": load(total, total, float(total), float(total))})
    assert figures.step_metrics()["rollout/queue_s"] == pytest.approx(1.0)
    assert "rollout/queue_s" not in figures.step_metrics()


def test_without_servers_nothing_is_told() -> None:
    figures = ServerFigures(lambda: 0.0)
    figures.look({})
    assert figures.step_metrics() == {}
