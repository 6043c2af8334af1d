"""A run that is killed with -9 at any time and started again: no prompt is lost, none is trained twice.

Counted from the trainer's own batch log, not from the queue's journal. On a virtual clock, in one process.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from streamrl.cli import train
from streamrl.monitor.events import read_events
from streamrl.monitor.metrics_log import read_metrics
from streamrl.monitor.summary import read_summary
from streamrl.runtime.run_dir import status_of
from streamrl.trainer.checkpoint import CheckpointStore
from tests.runtime.conftest import VIRTUAL
from tests.runtime.jobs import Job, chaos_seed

STEPS = 40


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, *VIRTUAL, "trainer.save_freq=3", steps=STEPS)


IN_BACKGROUND = ("actor_rollout_ref.actor.checkpoint.async_save=true", "actor_rollout_ref.actor.sim.save_seconds=0.5")
"""The ranks need that long, which is a step and a half."""


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_a_run_killed_again_and_again_trains_every_prompt_once(tmp_path: Path, mode: str) -> None:
    rng = random.Random(chaos_seed())
    job = Job(tmp_path, *VIRTUAL, "trainer.save_freq=3", f"trainer.v1.trainer_mode={mode}", steps=STEPS)
    for step in sorted(rng.sample(range(1, STEPS - 2), 3)):
        job.start()
        job.wait_for_step(step)
        time.sleep(rng.random() * 0.05)
        job.kill()
    job.start()
    job.finish()
    assert len(list(job.runs.glob("2*"))) == 1, "the run was resumed in its own directory"
    job.check_accounts()


def test_a_run_that_writes_its_checkpoints_in_the_background_goes_on_from_a_whole_one(tmp_path: Path) -> None:
    job = Job(tmp_path, *VIRTUAL, *IN_BACKGROUND, "trainer.save_freq=1", steps=STEPS)
    for step in (3, 9):
        job.start()
        job.wait_for_step(step)
        job.kill()
    job.start()
    job.finish()
    job.check_accounts()
    store = CheckpointStore(job.path / "checkpoints")
    assert [path.name for path in store.directory.iterdir()] == [f"global_step_{STEPS}"]
    assert store.load(STEPS).step == STEPS


@pytest.mark.parametrize("saves", [(), IN_BACKGROUND], ids=["at once", "in the background"])
def test_ctrl_c_stops_with_a_checkpoint_and_the_same_command_goes_on(tmp_path: Path, saves: tuple[str, ...]) -> None:
    job = Job(tmp_path, *VIRTUAL, *saves, "trainer.save_freq=3", steps=STEPS)
    process = job.start()
    job.wait_for_step(4)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    path = job.path
    assert status_of(path) == "interrupted"
    assert "the same command resumes this run" in job.text
    store = CheckpointStore(path / "checkpoints")
    assert store.load(store.steps()[-1]).step == len(list(read_metrics(path)))
    job.start()
    job.finish()
    assert job.path == path
    job.check_accounts()


@pytest.mark.chaos
def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(tmp_path: Path) -> None:
    job = Job(tmp_path, *VIRTUAL, "trainer.save_freq=1", steps=STEPS)
    for _ in range(10):
        process = job.start()
        while process.poll() is None and not (job.path.exists() and list(job.path.glob("checkpoints/.*.draft"))):
            time.sleep(0)
        job.kill()
        if list(job.path.glob("checkpoints/.*.draft")):
            break
    else:
        raise AssertionError("no kill hit a checkpoint")
    job.start()
    job.finish()
    job.check_accounts()


@pytest.mark.chaos
def test_a_run_killed_while_it_validates_asks_again(tmp_path: Path) -> None:
    validating = ("trainer.test_freq=2", "actor_rollout_ref.rollout.sim.clock=real", "data.val_max_samples=32")
    job = Job(tmp_path, *VIRTUAL, "trainer.save_freq=3", *validating, steps=6)

    def validates() -> bool:
        events = [event for event in read_events(job.path) if event.name == "validate_beside"]
        return bool(events) and events[-1].kind == "begin"

    job.start()
    job.wait_until(validates, "validation during the training")
    job.kill()
    job.start()
    job.finish()
    job.check_accounts()
    assert read_summary(job.path).val_sampled_after is not None


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0])
def test_ctrl_c_at_any_moment_of_the_start_ends_it(job: Job, seconds: float) -> None:
    process = job.start()
    while not job.takes_interrupts():
        time.sleep(0.005)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130, job.text
    assert "interrupted" in job.text or "stopped; the same command" in job.text
    assert "Traceback" not in job.text


def test_a_run_whose_stored_rows_are_gone_issues_its_prompts_again(job: Job) -> None:
    job.start()
    job.wait_for_step(5)
    job.kill()
    for segment in (job.path / "queue").rglob("*.seg"):
        segment.unlink()
    job.start()
    job.finish()
    job.check_accounts()


def test_a_run_whose_queue_directory_is_gone_goes_on_from_the_checkpoint(job: Job) -> None:
    job.start()
    job.wait_for_step(5)
    job.kill()
    shutil.rmtree(job.path / "queue")
    job.start()
    job.finish()
    job.check_accounts()


def test_a_run_whose_checkpoint_was_removed_is_refused_since_its_rows_are_gone(job: Job) -> None:
    job.start()
    job.wait_for_step(5)
    job.kill()
    shutil.rmtree(next(job.path.glob("checkpoints/global_step_*")))
    assert job.start().wait(60) == 2
    assert "start anew with trainer.resume_mode=disable" in job.text


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.8])
def test_a_journal_that_lost_its_end_does_not_make_prompts_train_twice(job: Job, kept: float) -> None:
    job.start()
    job.wait_for_step(14)
    job.kill()
    journal = job.path / "queue" / "journal"
    with journal.open("r+b") as file:
        file.truncate(int(journal.stat().st_size * kept))
    job.start()
    job.finish()
    job.check_accounts()


@pytest.mark.parametrize("room", [80_000, 160_000])
def test_a_run_that_cannot_write_any_more_names_the_directory_and_goes_on_when_it_can(
    tmp_path: Path, room: int
) -> None:
    job = Job(tmp_path, *VIRTUAL, "trainer.save_freq=3", "transfer_queue.segment_bytes=65536", steps=STEPS)
    assert job.start(max_file_bytes=room).wait(60) == 2, job.text
    last = job.text.splitlines()[-1]
    assert f"error: no room to write in {job.path}: File too large" in last
    assert "Free disk space there" in last
    assert "Traceback" not in job.text
    job.start()
    job.finish()
    job.check_accounts()


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :]


def spoil_line(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    lines[1] = b"\xff\x00{" + lines[1][9:]
    return b"".join(lines)


def test_a_damaged_file_of_a_resumed_run_is_named_in_two_lines_and_put_back_it_goes_on(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    process = job.start()
    job.wait_for_step(4)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    for file, damage in [
        ("queue/journal", flip), ("queue/journal", lambda data: b"x" + data), ("metrics.jsonl", spoil_line),
        ("metrics.jsonl", lambda data: b"[]\n" + data), ("batches.jsonl", spoil_line),
    ]:  # fmt: skip
        path = job.path / file
        sound = path.read_bytes()
        path.write_bytes(damage(sound))
        assert train(job.arguments) == 2
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 1, told
        assert str(path) in told[0]
        assert "damaged" in told[0] or "is not a queue journal" in told[0]
        path.write_bytes(sound)
    events = job.path / "events" / "trainer.0000.jsonl"
    events.write_bytes(spoil_line(events.read_bytes()))
    job.start()
    job.finish()
    job.check_accounts()


def test_a_damaged_run_directory_does_not_keep_new_runs_from_starting(tmp_path: Path) -> None:
    job = Job(tmp_path, *VIRTUAL, steps=2)
    broken = job.runs / "20200101-000000-calculator"
    broken.mkdir(parents=True)
    (broken / "config.yaml").write_text("trainer: [")
    job.start()
    job.finish()
    job.check_accounts()


@pytest.mark.chaos
def test_what_a_resume_has_to_generate_again_is_generated_as_it_can_be_trained(tmp_path: Path) -> None:
    """Fourteen batches are undone, three ages are allowed: generated all at once, most would be too old to train."""
    threshold = "trainer.v1.sampler.max_off_policy_threshold=3"
    job = Job(
        tmp_path, *VIRTUAL, "trainer.save_freq=100", "trainer.v1.trainer_mode=separate_async", threshold, steps=30
    )
    job.start()
    job.wait_for_step(14)
    job.kill()
    job.start()
    job.finish()
    job.check_accounts()
    assert read_summary(job.path).groups.dropped == {}
