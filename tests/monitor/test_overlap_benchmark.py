"""benchmarks.overlap: small simulations of the whole loop, and what is made of their outcomes."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest

from benchmarks.overlap import calculator, plots, simulation, tables
from benchmarks.overlap.scenario import Expected, Lengths, Outcome, Scenario, length_bias, simulate, waste
from transfer_queue.keys import prompt_uid

SMALL = Scenario(name="small", prompts=4, samples=2, slots=8, train=6.0, sync=0.5, steps=9)


@pytest.fixture(scope="module", params=[None, "drop", "wait", "mask"])
def outcome(request: pytest.FixtureRequest) -> Outcome:
    return simulate(replace(SMALL, policy=request.param, warmup=1.0, sigma=1.2))


def test_training_and_the_losses_of_a_simulated_step_add_up_to_it(outcome: Outcome) -> None:
    assert outcome.groups == 9 * 4
    assert outcome.train + sum(outcome.lost.values()) == pytest.approx(outcome.step, rel=1e-6)
    assert 0 < outcome.efficiency < 1.2


def test_no_token_that_counts_is_older_than_the_bound(outcome: Outcome) -> None:
    policy = outcome.scenario["policy"]
    if policy is not None:
        assert outcome.trained_age_max is not None
        assert outcome.trained_age_max <= 1
    if policy in ("drop", "wait"):
        assert outcome.age_max <= 1
    assert bool(outcome.wasted) <= (policy in ("drop", "mask"))


def test_outcomes_make_bars_tables_and_charts(outcome: Outcome) -> None:
    row = asdict(outcome)
    results = {"lengths": [row], "policies": [row], "ages": [row]}
    bars = simulation.bars(results)
    assert any(bar.name.endswith("groups trained") and bar.value == 36 for bar in bars)
    assert "| small | 1 |" in tables.markdown(results)
    assert plots.losses([row]).startswith("<svg")
    assert "η" in plots.svg([plots.efficiency([row])])


def test_a_constant_length_makes_the_bound_and_s_min_by_hand() -> None:
    expected = Expected.of(Scenario(sigma=0.0, scale=1.0))
    assert expected.t_gen == pytest.approx(32 * 8 * 8.0 / 64)
    assert expected.bound == pytest.approx(32.0)
    assert expected.longest == pytest.approx(8.0)
    assert expected.s_min == math.ceil((25 + 1.5 + 8) / 32)


def test_the_longest_of_a_group_of_one_is_the_mean() -> None:
    lengths = Lengths.of(Scenario(sigma=0.8).engine, samples=1)
    assert lengths.longest == pytest.approx(lengths.mean)
    assert Lengths.of(Scenario(sigma=0.8).engine, samples=8).longest > 2 * lengths.mean


def test_bias_counts_only_prompts_before_the_oldest_that_is_still_under_way() -> None:
    mean = round(Lengths.of(Scenario(sigma=0.0).engine, 1).mean)
    uids = [prompt_uid(0, place) for place in range(4)]
    tokens = {uid: {0: mean} for uid in uids} | {uids[3]: {0: 100 * mean}}
    trained = {uids[0]: 0, uids[1]: 1, uids[3]: 3}  # the third is under way, so that the fourth is left out
    assert length_bias(Scenario(sigma=0.0), trained, set(), tokens)[0] == pytest.approx(1.0)
    assert length_bias(Scenario(sigma=0.0), trained, {uids[2]}, tokens)[0] == pytest.approx(34.0)


def test_waste_is_by_reason_with_what_was_sampled_of_cancelled_sessions() -> None:
    tokens = {"a": {0: 100}, "b": {0: 300}, "c": {0: 50}}
    found = waste(tokens, {"c": 30, "d": 20}, {"b": "stale", "c": "cancelled", "d": "cancelled"}, 500)
    assert found == {"stale": 0.6, "cancelled": 0.2}


def test_the_time_to_an_accuracy_is_that_of_the_first_window_that_has_it() -> None:
    lines = [{"overlap/step_s": 2.0, "critic/score/mean": score} for score in (1.0, 0.5, 0.9, 0.9, 0.9, 0.9, 0.9)]
    assert calculator.seconds_to(0.9, lines) == 14.0
    assert calculator.seconds_to(0.95, lines) == math.inf
