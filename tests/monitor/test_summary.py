"""summary.json: the keys that users and scripts rely on, and the table printed from it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
from rich.console import Console

from streamrl.monitor.overlap import Overlap, StepRecord
from streamrl.monitor.summary import (
    Groups,
    Summary,
    print_summary,
    read_summary,
    validation_fields,
    write_summary,
)
from transfer_queue.net.messages import PartitionStats, QueueStats

PROMISED = {
    "val_sampled_before",
    "val_sampled_after",
    "val_greedy_before",
    "val_greedy_after",
    "train_seconds",
    "steps",
    "overlap_efficiency",
    "lost_seconds_by_cause",
    "groups",
    "status",
}


def summary() -> Summary:
    overlap = Overlap()
    overlap.add(
        StepRecord(
            step=1,
            start=0.0,
            end=10.0,
            train=[(0.0, 6.0)],
            waits={"wait_data": [(6.0, 9.0)]},
            generation_busy=8.0,
            engines=1,
            slots=4,
        )
    )
    return Summary(
        status="finished",
        steps=60,
        train_seconds=62.5,
        val_sampled_before=0.31,
        val_sampled_after=0.94,
        val_greedy_before=0.5,
        val_greedy_after=0.99,
        groups=Groups(trained=960, dropped={"stale": 3}),
        **overlap.run.summary_fields(),
    )


def test_the_file_has_the_promised_keys(tmp_path: Path) -> None:
    path = write_summary(tmp_path, summary())
    found = json.loads(path.read_text())
    assert found.keys() >= PROMISED
    assert found["groups"] == {"trained": 960, "dropped": {"stale": 3}, "dead": 0, "dead_reasons": {}}
    assert found["busy_seconds"]["training"] + sum(found["lost_seconds_by_cause"].values()) == found["measured_seconds"]
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert read_summary(tmp_path) == summary()


def test_groups_come_from_the_queue_and_reasons_are_classes() -> None:
    part = PartitionStats(
        depth={"trained": 5, "dead": 1},
        rows=0,
        nbytes=0,
        next_order=9,
        dropped={"failed: a": 1, "failed: b": 1},
        redelivered=0,
        dead={"e0p1": "poison"},
        oldest_age={},
    )
    stats = QueueStats(epoch=1, partitions={"train": part}, units=[], clients=0)
    assert Groups.of(stats) == Groups(trained=5, dropped={"failed": 2}, dead=1, dead_reasons={"e0p1": "poison"})
    assert Groups.of(stats, "val") == Groups()


def test_the_table_shows_validation_time_by_cause_and_the_run_directory(tmp_path: Path) -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    print_summary(summary(), tmp_path, console)
    text = console.export_text().replace("\n", "")
    for expected in ("0.310", "0.940", "0.990", "waiting for data", "6.0 s", "3.0 s", "no request", "3 stale"):
        assert expected in text
    assert str(tmp_path) in text


def test_accuracies_are_told_where_every_validation_has_them_and_scores_where_not() -> None:
    before, after = {"sampled": -0.2, "sampled/acc": 0.25}, {"sampled": 0.4, "sampled/acc": 0.75}
    assert validation_fields({"before": before, "during": {"sampled": 0.0}, "after": after}) == {
        "val_sampled_before": 0.25, "val_sampled_after": 0.75, "val_quantity": "acc",
    }  # fmt: skip
    assert validation_fields({"before": {"sampled": -0.2, "greedy": 0.1}, "after": after}) == {
        "val_sampled_before": -0.2, "val_greedy_before": 0.1, "val_sampled_after": 0.4, "val_quantity": "score",
    }  # fmt: skip
    assert validation_fields({}) == {"val_quantity": "score"}


def test_the_table_of_validations_is_named_by_what_it_shows(tmp_path: Path) -> None:
    for quantity in ("score", "acc"):
        console = Console(record=True, width=120, file=io.StringIO())
        print_summary(msgspec.structs.replace(summary(), val_quantity=quantity), tmp_path, console)
        assert f"validation, mean {quantity}" in console.export_text()


def test_a_run_without_validation_or_steps_can_be_shown(tmp_path: Path) -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    empty = Summary(status="failed", error="CUDA [error] at step 1", steps=0, train_seconds=0.0)
    write_summary(tmp_path, empty)
    print_summary(empty, tmp_path, console)
    text = console.export_text()
    assert "CUDA [error] at step 1" in text
    assert "mean score" not in text, "no table of nothing"
    assert "overlap efficiency" not in text, "no step, no times"


def test_no_sentence_is_cut_where_the_table_ends(tmp_path: Path) -> None:
    console = Console(record=True, width=60, file=io.StringIO())
    print_summary(summary(), tmp_path, console)
    [line] = [line for line in console.export_text().splitlines() if line.startswith("overlap efficiency")]
    assert len(line) > 60
    assert line.endswith("(bound / measured step time)")
