"""The metrics of several updates as those of one step."""

from __future__ import annotations

from streamrl.trainer.report import merged_updates


def test_metrics_of_several_updates_add_up_or_are_averaged_and_extremes_stay_extremes():
    first = {"rows/trained": 8.0, "timing_s/update_actor": 1.0, "actor/lr": 2e-3, "actor/entropy": 1.0}
    second = {"rows/trained": 8.0, "timing_s/update_actor": 3.0, "actor/lr": 1e-3, "actor/entropy": 3.0}
    assert merged_updates([first, second]) == {
        "rows/trained": 16.0, "timing_s/update_actor": 4.0, "actor/lr": 1e-3, "actor/entropy": 2.0,
    }  # fmt: skip
    high, low = "rollout_corr/log_ppl_diff_max", "rollout_corr/log_ppl_diff_min"
    assert merged_updates([{high: 0.5, low: -0.1}, {high: 0.25, low: -0.5}]) == {high: 0.5, low: -0.5}
