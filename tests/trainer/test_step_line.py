"""The metrics of several updates as those of one step, and what follows from them."""

from __future__ import annotations

from streamrl.trainer.step_line import SampledTokens, age_percentiles, evicted, merged_updates, per_token


def test_metrics_of_several_updates_add_up_or_are_averaged_and_extremes_stay_extremes():
    first = {"rows/trained": 8.0, "timing_s/update_actor": 1.0, "actor/lr": 2e-3, "actor/entropy": 1.0}
    second = {"rows/trained": 8.0, "timing_s/update_actor": 3.0, "actor/lr": 1e-3, "actor/entropy": 3.0}
    first |= {"actor/seconds/compute": 0.5, "actor/computed/tokens": 70.0}
    second |= {"actor/seconds/compute": 1.5, "actor/computed/tokens": 30.0}
    assert merged_updates([first, second]) == {
        "rows/trained": 16.0, "timing_s/update_actor": 4.0, "actor/lr": 1e-3, "actor/entropy": 2.0,
        "actor/seconds/compute": 2.0, "actor/computed/tokens": 100.0,
    }  # fmt: skip
    high, low = "rollout_corr/log_ppl_diff_max", "rollout_corr/log_ppl_diff_min"
    assert merged_updates([{high: 0.5, low: -0.1}, {high: 0.25, low: -0.5}]) == {high: 0.5, low: -0.5}


def test_percentiles_of_the_tokens_ages_come_from_the_counts_of_all_updates():
    age = "training/off_policy/token_age/"
    merged = merged_updates([{f"{age}0": 50.0, f"{age}2": 39.0}, {f"{age}0": 1.0, f"{age}2": 5.0, f"{age}10": 5.0}])
    assert merged[f"{age}2"] == 44.0
    percentiles = [merged[f"training/off_policy/token_staleness/p{share}"] for share in (50, 90, 99)]
    assert percentiles == [0.0, 2.0, 10.0]
    assert age_percentiles({}) == {}


def test_groups_that_left_are_counted_under_verls_names_and_times_per_token():
    dropped = {"stale": 2, "cancelled: too old before its last session ended": 1, "filtered": 3, "failed: x": 4}
    assert evicted(dropped) == {
        "training/off_policy/evicted_samples": 3.0, "training/filter_groups/evicted_samples": 3.0,
        "training/rollout_failure/evicted_samples": 4.0,
    }  # fmt: skip
    metrics = {"timing_s/gen": 1.0, "timing_s/ref": 3.0, "response_length/mean": 5.0, "rows/trained": 100.0}
    assert per_token(metrics | {"perf/total_num_tokens": 1500.0}) == {
        "timing_per_token_ms/gen": 2.0, "timing_per_token_ms/ref": 2.0,
    }  # fmt: skip


def test_tokens_per_second_cover_the_time_between_the_looks_and_are_unknown_before_the_second():
    now = 0.0
    sampled = SampledTokens(lambda: now)
    sampled.look({"a": 1000, "b": 500})
    assert sampled.step_metrics() == {}
    now = 10.0  # a step of 2 s, and a checkpoint of 8 s
    sampled.look({"a": 1100, "b": 550})
    assert sampled.step_metrics() == {"perf/generated_tokens_per_s": 15.0}
    now = 20.0  # a is gone, b was restarted, c is new
    sampled.look({"b": 40, "c": 9000})
    assert sampled.step_metrics() == {"perf/generated_tokens_per_s": 4.0}
