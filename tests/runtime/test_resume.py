"""A run that is killed with -9 at any time and started again: no prompt is lost, none is trained twice.

Counted from the trainer's own batch log, not from the queue's journal.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamrl.monitor.metrics_log import read_metrics
from streamrl.monitor.summary import read_summary
from streamrl.runtime.run_dir import status_of
from streamrl.trainer.batch_log import read_batch_log
from .conftest import VIRTUAL

BATCH, STEPS = 8, 40
SECONDS = 60.0


def command(runs: Path, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "streamrl.main", "experiment=calculator", *VIRTUAL,
        f"data.train_batch_size={BATCH}", f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        "actor_rollout_ref.rollout.n=4", "data.val_max_samples=8", f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=3", f"trainer.runs_dir={runs}", *arguments,
    ]  # fmt: skip


def start(runs: Path, *arguments: str) -> subprocess.Popen:
    log = (runs.parent / "output.txt").open("ab")
    return subprocess.Popen(command(runs, *arguments), stdout=log, stderr=log)


def wait_for_step(runs: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if (runs / "latest" / "metrics.jsonl").exists() and len(list(read_metrics(runs / "latest"))) >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"no step {step} within {SECONDS:.0f} s: {(runs.parent / 'output.txt').read_text()[-2000:]}")


def finish(runs: Path, process: subprocess.Popen) -> Path:
    assert process.wait(SECONDS) == 0, (runs.parent / "output.txt").read_text()[-3000:]
    return (runs / "latest").resolve()


def check_accounts(path: Path) -> None:
    """Every dispatch order up to the highest one trained was trained exactly once or dropped."""
    steps = read_batch_log(path / "batches.jsonl")
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    orders = [order for step in steps for order in step.orders]
    assert len(orders) == len(set(orders)) == BATCH * STEPS, "a prompt was trained twice"
    summary = read_summary(path)
    missing = set(range(max(orders))) - set(orders)
    assert len(missing) <= sum(summary.groups.dropped.values()) + BATCH, f"prompts were lost: {sorted(missing)}"
    assert [line["step"] for line in read_metrics(path)] == list(range(1, STEPS + 1))


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_a_run_killed_again_and_again_trains_every_prompt_once(tmp_path: Path, mode: str) -> None:
    seed = int(os.environ.get("CHAOS_SEED", time.time_ns() % 100000))
    print(f"CHAOS_SEED={seed}")
    rng, runs = random.Random(seed), tmp_path / "runs"
    for kill_at in sorted(rng.sample(range(1, STEPS - 2), 3)):
        process = start(runs, f"trainer.v1.trainer_mode={mode}")
        wait_for_step(runs, kill_at, process)
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.wait()
    path = finish(runs, start(runs, f"trainer.v1.trainer_mode={mode}"))
    assert len(list(runs.glob("2*"))) == 1, "the run was resumed in its own directory"
    check_accounts(path)


def test_ctrl_c_stops_with_a_checkpoint_and_the_same_command_goes_on(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = start(runs)
    wait_for_step(runs, 4, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(SECONDS) == 130
    path = (runs / "latest").resolve()
    assert status_of(path) == "interrupted"
    assert "the same command resumes this run" in (tmp_path / "output.txt").read_text()
    assert finish(runs, start(runs)) == path
    check_accounts(path)


def test_a_run_whose_stored_rows_are_gone_issues_its_prompts_again(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = start(runs)
    wait_for_step(runs, 5, process)
    process.kill()
    process.wait()
    for segment in (runs / "latest" / "queue").rglob("*.seg"):
        segment.unlink()
    check_accounts(finish(runs, start(runs)))


def test_a_run_whose_queue_directory_is_gone_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = start(runs)
    wait_for_step(runs, 5, process)
    process.kill()
    process.wait()
    subprocess.run(["rm", "-rf", runs / "latest" / "queue"], check=True)
    check_accounts(finish(runs, start(runs)))
