from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from streamrl.runtime.run_dir import RunDirectory, RunDirectoryError, open_run, status_of

CONFIG = "trainer:\n  total_training_steps: 4\n  save_freq: 2\n  resume_mode: auto\n"


def start(runs: Path, config: str = CONFIG, mode: str = "auto", path: Path | None = None) -> RunDirectory:
    return open_run(runs, "job", config, resume_mode=mode, resume_from=path)


def finish(run: RunDirectory, status: str) -> None:
    run.summary.write_text(json.dumps({"status": status}))
    run.release()


def test_latest_points_to_the_newest_run(tmp_path: Path) -> None:
    first = start(tmp_path)
    second = start(tmp_path, mode="disable")
    assert (tmp_path / "latest").resolve() == second.path.resolve() != first.path.resolve()


def test_a_killed_run_of_the_same_configuration_is_resumed(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.release()
    again = start(tmp_path)
    assert again.resumed
    assert again.path == run.path
    assert status_of(run.path) == "killed"


@pytest.mark.parametrize(("status", "resumed"), [("finished", False), ("interrupted", True), ("failed", True)])
def test_only_a_finished_run_is_left_alone(tmp_path: Path, status: str, resumed: bool) -> None:
    finish(start(tmp_path), status)
    assert start(tmp_path).resumed is resumed


def test_another_configuration_starts_anew_but_resume_keys_do_not_count(tmp_path: Path) -> None:
    start(tmp_path).release()
    assert not start(tmp_path, CONFIG.replace("4", "5")).resumed
    other = tmp_path / "b"
    start(other).release()
    assert start(other, CONFIG.replace("resume_mode: auto", "resume_mode: resume_path")).resumed


def test_a_run_that_keeps_no_checkpoints_starts_anew(tmp_path: Path) -> None:
    config = CONFIG.replace("save_freq: 2", "save_freq: -1")
    start(tmp_path, config).release()
    assert not start(tmp_path, config).resumed


def with_checkpoint(run: RunDirectory) -> Path:
    checkpoint = run.checkpoints / "global_step_4"
    checkpoint.mkdir()
    for name in ("config.yaml", "manifest.json"):
        (checkpoint / name).write_text(CONFIG)
    return checkpoint


@pytest.mark.parametrize("damaged", ["", "trainer: [", "[]", "trainer: 3\n", "\x00\x01", None])
def test_a_damaged_configuration_of_a_run_with_a_checkpoint_is_told_with_the_remedy(
    tmp_path: Path, damaged: str | None
) -> None:
    run = start(tmp_path)
    checkpoint = with_checkpoint(run)
    run.release()
    config = run.path / "config.yaml"
    config.unlink() if damaged is None else config.write_text(damaged)
    with pytest.raises(RunDirectoryError, match=rf"{config} is missing or damaged.*{checkpoint}/config.yaml"):
        start(tmp_path)
    assert not start(tmp_path, mode="disable").resumed
    shutil.copy(checkpoint / "config.yaml", config)
    assert start(tmp_path).path == run.path


def test_a_run_goes_on_where_its_runs_directory_was_moved(tmp_path: Path) -> None:
    run = start(tmp_path / "a", CONFIG + f"  runs_dir: {tmp_path}/a\n")
    run.release()
    (tmp_path / "a").rename(tmp_path / "b")
    again = start(tmp_path / "b", CONFIG + f"  runs_dir: {tmp_path}/b\n")
    assert (again.resumed, again.path) == (True, tmp_path / "b" / run.path.name)


def test_a_live_run_is_not_resumed(tmp_path: Path) -> None:
    live = start(tmp_path)
    assert start(tmp_path).path != live.path
    with pytest.raises(RunDirectoryError, match="in use by a live run"):
        start(tmp_path, mode="resume_path", path=live.path)


def test_resume_path_names_the_run_not_a_checkpoint_of_it(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.release()
    checkpoint = run.checkpoints / "global_step_4"
    checkpoint.mkdir()
    for name in ("config.yaml", "manifest.json"):
        (checkpoint / name).touch()
    with pytest.raises(RunDirectoryError, match=rf"is a checkpoint; give its run, {run.path}, which goes on"):
        start(tmp_path, mode="resume_path", path=checkpoint)


def test_resume_path_must_be_a_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is no run directory"):
        start(tmp_path, mode="resume_path", path=tmp_path / "nothing")


def test_an_unfinished_run_that_is_not_continued_is_named_with_what_differs(tmp_path: Path) -> None:
    first = start(tmp_path)
    first.release()
    second = start(tmp_path, CONFIG.replace("steps: 4", "steps: 8"))
    assert not second.resumed
    assert second.note.startswith(
        f"the unfinished run {first.path} is not continued, since trainer.total_training_steps"
    )
    assert f"trainer.resume_mode=resume_path trainer.resume_from_path={first.path} continues it" in second.note
    assert start(tmp_path, CONFIG).note == ""


def latest(runs: Path) -> Path:
    return (runs / "latest").resolve()


def test_latest_goes_back_to_the_run_before_if_a_start_ends_before_its_first_step(tmp_path: Path) -> None:
    first = start(tmp_path, mode="disable")
    first.give_latest_back()
    assert latest(tmp_path) == first.path, "there is no other"
    second = start(tmp_path, mode="disable")
    second.give_latest_back()
    assert latest(tmp_path) == first.path
    third = start(tmp_path, mode="disable")
    third.batches.write_text('{"step": 1, "uids": [], "orders": []}\n')
    third.give_latest_back()
    assert latest(tmp_path) == third.path


def test_latest_of_a_younger_run_is_not_touched(tmp_path: Path) -> None:
    start(tmp_path, mode="disable")
    failed, younger = start(tmp_path, mode="disable"), start(tmp_path, mode="disable")
    failed.give_latest_back()
    assert latest(tmp_path) == younger.path


def test_a_replay_of_latest_leaves_it_where_it_is(tmp_path: Path) -> None:
    recorded = start(tmp_path, mode="disable")
    older = start(tmp_path / "others", mode="disable")

    def replay(path: Path) -> RunDirectory:
        return open_run(tmp_path, "job", CONFIG, resume_mode="disable", resume_from=None, replayed=str(path))

    replay(recorded.path)
    assert latest(tmp_path) == recorded.path
    other = replay(older.path)
    assert latest(tmp_path) == other.path


def test_latest_names_a_run_that_is_continued(tmp_path: Path) -> None:
    first = start(tmp_path, mode="disable")
    failed = start(tmp_path)
    failed.give_latest_back()
    failed.release()
    assert latest(tmp_path) == first.path
    again = start(tmp_path)
    assert again.path == failed.path
    assert latest(tmp_path) == failed.path
