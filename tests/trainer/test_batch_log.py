from __future__ import annotations

from pathlib import Path

from streamrl.trainer.batch_log import BatchLog, read_batch_log


def test_what_a_resume_undid_does_not_count(tmp_path: Path) -> None:
    log = BatchLog(tmp_path / "batches.jsonl")
    for step in (1, 2, 3):
        log.trained(step, [f"u{step}"], [step])
    log.resumed(1)
    log.trained(2, ["u9"], [9])
    log.close()
    assert [(s.step, s.uids) for s in read_batch_log(tmp_path / "batches.jsonl")] == [(1, ["u1"]), (2, ["u9"])]


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "batches.jsonl"
    log = BatchLog(path)
    log.trained(1, ["a"], [0])
    path.write_bytes(path.read_bytes() + b'{"step": 2, "ui')
    assert [s.step for s in read_batch_log(path)] == [1]
