from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.errors import DamagedFileError
from streamrl.trainer.batch_log import BatchLog, last_committed, lineages, read_batch_log


def test_what_a_resume_undid_does_not_count(tmp_path: Path) -> None:
    log = BatchLog(tmp_path / "batches.jsonl")
    for step in (1, 2, 3):
        log.trained(step, [f"u{step}"], [step])
    log.begins(1)
    log.trained(2, ["u9"], [9])
    log.close()
    assert [(s.step, s.uids) for s in read_batch_log(tmp_path / "batches.jsonl")] == [(1, ["u1"]), (2, ["u9"])]


def test_what_was_given_up_without_a_checkpoint_is_told_apart_and_undone_by_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "batches.jsonl"
    log = BatchLog(path)
    log.committed(4)
    log.committed(6, saved=False)
    assert (last_committed(path), last_committed(path, unsaved=True)) == (4, 6)
    log.begins(4)
    assert (last_committed(path), last_committed(path, unsaved=True)) == (4, 4)
    log.begins(0)
    assert last_committed(path, unsaved=True) == 0
    assert lineages(path) == {log.lineage}
    log.close()


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "batches.jsonl"
    log = BatchLog(path)
    log.trained(1, ["a"], [0])
    path.write_bytes(path.read_bytes() + b'{"step": 2, "ui')
    assert [s.step for s in read_batch_log(path)] == [1]
    resumed = BatchLog(path)
    resumed.trained(2, ["b"], [1])
    assert [s.step for s in read_batch_log(path)] == [1, 2]


@pytest.mark.parametrize("line", [b'{"step": 2, "ui', b"[]", b'{"committed": "all"}', b"\xff\xfe"])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "batches.jsonl"
    path.write_bytes(b'{"resume": 0}\n' + line + b'\n{"resume": 0}\n')
    with pytest.raises(DamagedFileError, match=r"batches\.jsonl, line 2 is damaged"):
        last_committed(path)
