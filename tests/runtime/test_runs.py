"""What runs hold outside of their directories, and that only the dead ones lose it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli import main
from streamrl.config.root import ActorRolloutRefConfig, StreamRLConfig
from streamrl.config.sections.actor import ModelConfig
from streamrl.config.sections.trainer import TrainerConfig
from streamrl.runtime.run_dir import RunDirectory, open_run, run_name
from streamrl.runtime.runs import find_runs
from tests.runtime.conftest import VIRTUAL
from tests.runtime.jobs import Job

CONFIG = "trainer:\n  save_freq: 2\n"


def start(runs: Path, shared: Path, name: str) -> tuple[RunDirectory, Path]:
    """A run with a MiB in shared memory."""
    run = open_run(runs, name, CONFIG, resume_mode="disable", resume_from=None)
    home = shared / f"tq-{name}"
    (home / "unit-0").mkdir(parents=True)
    (home / "unit-0" / "0.seg").write_bytes(bytes(1 << 20))
    (home / "owner").write_text(str(run.queue))
    (run.queue / "run.json").write_text(json.dumps({"storage": str(home)}))
    run.metrics.write_text('{"step":1}\n{"step":2}\n')
    return run, home


def test_runs_are_listed_with_what_they_hold_and_clean_frees_what_no_living_run_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, shared = tmp_path / "runs", tmp_path / "shm"
    dead, of_dead = start(runs, shared, "dead")
    dead.release()
    stopped, of_stopped = start(runs, shared, "stopped")
    stopped.summary.write_text('{"status": "interrupted"}')
    stopped.release()
    living, of_living = start(runs, shared, "living")
    done, of_done = start(runs, shared, "done")
    (of_done / "owner").write_text("/another/run/queue")
    done.release()
    found = {run.path.name.rpartition("-")[2]: run for run in find_runs(runs)}
    assert {name: (run.status, run.steps, run.nbytes >> 20) for name, run in found.items()} == {
        "dead": ("killed", 2, 1), "stopped": ("interrupted", 2, 1), "living": ("running", 2, 1),
        "done": ("killed", 2, 0),
    }  # fmt: skip
    assert main(["runs", str(runs)]) == 0
    assert "2.0 MiB are held for runs that do not run; --clean frees them" in capsys.readouterr().out
    assert of_dead.exists()
    assert main(["runs", str(runs), "--clean"]) == 0
    told = capsys.readouterr().out
    assert f"freed 1.0 MiB in {of_dead}" in told
    assert f"freed 1.0 MiB in {of_stopped}" in told
    assert not of_dead.exists()
    assert not of_stopped.exists()
    assert of_living.exists(), "it lives"
    assert of_done.exists(), "it is not its own"
    living.release()


def test_a_directory_that_is_none_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path / "nothing")]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_a_run_resumes_after_its_memory_was_freed(tmp_path: Path) -> None:
    storage = tmp_path / "shm"
    storage.mkdir()
    job = Job(tmp_path, *VIRTUAL, "trainer.save_freq=3", f"transfer_queue.storage_dir={storage}", steps=20)
    job.start()
    job.wait_for_step(5)
    job.kill()
    [run] = find_runs(job.runs)
    assert run.status == "killed"
    assert run.steps >= 5
    assert any(storage in home.parents for home in run.held)
    assert main(["runs", str(job.runs), "--clean"]) == 0
    assert not any(storage.glob("tq-*"))
    job.start()
    job.finish()
    job.check_accounts()


def test_runs_that_came_to_nothing_can_be_hidden_and_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, shared = tmp_path / "runs", tmp_path / "shm"
    names = ("failed", "saved", "done", "alive")
    started = {name: start(runs, shared, name) for name in names}
    for name, (run, _) in started.items():
        status = "finished" if name == "done" else "failed"
        run.summary.write_text(json.dumps({"status": status}))
        if name != "alive":
            run.release()
    saved = started["saved"][0].checkpoints / "global_step_2"
    saved.mkdir()
    (saved / "manifest.json").touch()
    assert main(["runs", str(runs), "--hide-failed"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in names if f"-{name}" in shown] == ["saved", "done", "alive"]
    assert main(["runs", str(runs), "--delete-failed"]) == 0
    assert {run.path.name.rpartition("-")[2] for run in find_runs(runs)} == {"saved", "done", "alive"}
    assert not started["failed"][1].exists(), "what it held in memory goes, too"
    started["alive"][0].release()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "Qwen2.5-0.5B"),
        ({"experiment_name": "grpo"}, "grpo"),
        ({"project_name": "gsm8k", "experiment_name": "grpo"}, "gsm8k-grpo"),
    ],
)
def test_a_run_is_called_by_what_was_given_or_by_its_model(given: dict[str, Any], name: str) -> None:
    model = ActorRolloutRefConfig(model=ModelConfig(path="/models/Qwen2.5-0.5B"))
    assert run_name(StreamRLConfig(actor_rollout_ref=model, trainer=TrainerConfig(**given))) == name
