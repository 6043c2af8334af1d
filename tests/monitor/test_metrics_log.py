"""metrics.jsonl holds each step once, in order, through crashes and resumes."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from streamrl.errors import DamagedFileError
from streamrl.monitor.metrics_log import MetricsLog, read_metrics, read_validations


def write_steps(run_dir: Path, steps: range, resume_step: int = 0, more: dict[str, float] | None = None) -> None:
    with MetricsLog(run_dir, resume_step=resume_step) as log:
        for step in steps:
            log.write(step, {"critic/score/mean": np.float32(0.5), **(more or {})})


def test_steps_are_read_back(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4), more={"actor/loss": math.nan})
    records = list(read_metrics(tmp_path))
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[0]["critic/score/mean"] == 0.5
    assert math.isnan(records[0]["actor/loss"])


def test_a_run_without_metrics_reads_as_empty(tmp_path: Path) -> None:
    assert list(read_metrics(tmp_path)) == []


def test_a_resumed_run_cuts_what_comes_after_its_checkpoint(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 8))
    write_steps(tmp_path, range(5, 7), resume_step=4, more={"actor/lr": 1.0})
    records = list(read_metrics(tmp_path))
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert ["actor/lr" in record for record in records] == [False] * 4 + [True] * 2


def test_a_torn_last_line_is_left_out_and_cut_at_the_next_start(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    os.truncate(path, path.stat().st_size - 5)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    write_steps(tmp_path, range(3, 4), resume_step=2)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("line", ['{"ste', "[]", '{"actor/lr": 1.0}', '{"step": null}'])
def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step":1}}\n{line}\n{{"step":3}}\n')
    with pytest.raises(DamagedFileError, match=r"metrics\.jsonl, line 2"):
        list(read_metrics(tmp_path))


def test_a_full_disk_is_an_error_and_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    log = MetricsLog(tmp_path)
    log.write(1, {"actor/lr": 1.0})
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:4]))
    with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"):
        log.write(2, {"actor/lr": 1.0})
    monkeypatch.undo()
    log.write(2, {"actor/lr": 2.0})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_validations_are_lines_of_their_own_and_no_steps(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write_validation(0, "before", {"val-core/x/reward/mean@1": 0.25})
        log.write(1, {"critic/score/mean": 0.5})
        log.write_validation(1, "during", {"val-core/x/reward/mean@1": 0.5})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    assert list(read_validations(tmp_path)) == [
        {"step": 0, "validation": "before", "val-core/x/reward/mean@1": 0.25},
        {"step": 1, "validation": "during", "val-core/x/reward/mean@1": 0.5},
    ]


DONE = [(0, "before"), (2, "during"), (4, "after"), (6, "during")]


@pytest.mark.parametrize(("resume_step", "left"), [(0, DONE[:1]), (2, DONE[:2]), (4, DONE[:3])])
def test_a_resumed_run_cuts_the_validations_of_the_steps_that_it_does_again(
    tmp_path: Path, resume_step: int, left: list
) -> None:
    with MetricsLog(tmp_path) as log:
        for step, label in DONE:
            log.write_validation(step, label, {})
    MetricsLog(tmp_path, resume_step=resume_step).close()
    assert [(line["step"], line["validation"]) for line in read_validations(tmp_path)] == left
