"""Validations of whole runs: beside training or in its place, alone, and none twice after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import ConfigError
from streamrl.monitor.events import read_events
from streamrl.monitor.metrics_log import read_metrics, read_validations
from streamrl.monitor.registry import check_step_metrics
from streamrl.monitor.schema import check_events
from tests.runtime.jobs import Job
from tests.runtime.test_local_run import run

ASKED = ("trainer.test_freq=2", "actor_rollout_ref.rollout.val_kwargs.n=4")
LONG = ("actor_rollout_ref.rollout.agent.max_sessions=8", "actor_rollout_ref.rollout.sim.response_tokens_sigma=1.0")


def spans(path: Path, name: str) -> list[tuple[float, float]]:
    return [(event.start, event.end) for event in read_events(path) if event.kind == "span" and event.name == name]


@pytest.mark.parametrize(("mode", "beside"), [("sync", False), ("separate_async", True)])
def test_a_validation_stops_training_only_where_generation_and_training_take_turns(
    make_config, mode: str, beside: bool
) -> None:
    path, summary = run(make_config(f"trainer.v1.trainer_mode={mode}", *ASKED, *LONG))
    assert summary.status == "finished"
    events = list(read_events(path))
    check_events(events)
    during = [line for line in read_validations(path) if line["validation"] == "during"]
    notes = [str(event.value) for event in events if event.name == "note"]
    skipped = [note for note in notes if note.startswith("no validation of step")]
    assert len(during) + len(skipped) == 4
    assert during
    for line in read_validations(path):
        metrics = {name: value for name, value in line.items() if name not in ("step", "validation")}
        check_step_metrics(metrics)
        assert metrics["val-aux/versions/min"] >= line["step"]
        assert {"val-core/calculator/reward/best@4/mean", "val-core/calculator/reward_greedy/mean@1"} < set(metrics)
    steps, validations = spans(path, "step"), spans(path, "validate_beside" if beside else "validate")
    inside = [(a, b) for a, b in validations for start, end in steps if start < b and a < end]
    assert bool(inside) == beside
    if beside:
        assert any(line["val-aux/versions/max"] > line["step"] for line in during), "weights moved meanwhile"


HELD = (
    "trainer.v1.trainer_mode=separate_async", "trainer.total_training_steps=12", "trainer.test_freq=3",
    "actor_rollout_ref.rollout.agent.max_sessions=16", "actor_rollout_ref.rollout.sim.response_tokens_sigma=1.0",
)  # fmt: skip
VALIDATIONS = "trainer.v1.separate_async.validation_weights"


def seen(path: Path) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The lines of the validations that stood beside training, and of the steps."""
    check_events(read_events(path))
    return [line for line in read_validations(path) if line["validation"] == "during"], list(read_metrics(path))


def test_pinned_servers_answer_a_validation_with_the_weights_of_its_step_while_others_go_on(make_config) -> None:
    pinned = ("actor_rollout_ref.rollout.num_replicas=3", "actor_rollout_ref.rollout.agent.max_sessions=64")
    path, summary = run(make_config(*HELD, *pinned))
    during, steps = seen(path)
    assert summary.status == "finished"
    assert during
    for line in during:
        assert line["val-aux/versions/min"] == line["val-aux/versions/max"] == line["step"]
    validations = [event for event in read_events(path) if event.name == "validate_beside" and event.kind == "span"]
    published = spans(path, "publish")
    assert [v for v in validations if any(v.start < start < v.end for start, _ in published)], "to the other servers"
    behind = [line["weights/version"] - line["weights/rollout_version_min"] for line in steps]
    assert max(behind) >= 1, "a pinned server keeps its weights"
    assert behind[-1] == 0, "and gets the newest afterwards"
    assert not [event.value for event in read_events(path) if event.name == "note" and "pin" in str(event.value)]


@pytest.mark.parametrize(("threshold", "strategy", "lags"), [(4, "drop", True), (2, "drop", False), (3, "wait", True)])
def test_held_weights_answer_a_validation_alone_and_nothing_trained_is_too_old(
    make_config, threshold: int, strategy: str, lags: bool
) -> None:
    sampler = "trainer.v1.sampler.max_off_policy"
    bounds = (f"{sampler}_threshold={threshold}", f"{sampler}_strategy={strategy}")
    path, summary = run(make_config(*HELD, f"{VALIDATIONS}=hold", *bounds))
    during, steps = seen(path)
    assert summary.status == "finished"
    assert during
    for line in during:
        assert line["val-aux/versions/min"] == line["val-aux/versions/max"] == line["step"]
    behind = [line["weights/version"] - line["weights/rollout_version_min"] for line in steps]
    assert (max(behind) > 0) == lags, "training goes on for as long as the bound on age lets it"
    assert max(behind) <= threshold - 2, "one version is for the batch that is out"
    assert summary.lost_seconds_by_cause["validation"] > 0, "then it waits, and says for what"
    assert max(line["training/off_policy/trajectory_staleness_worst/max"] for line in steps) < threshold
    [after] = [line for line in read_validations(path) if line["validation"] == "after"]
    assert after["val-aux/versions/min"] == after["step"] == 12, "the servers got the last weights first"


def test_to_pin_all_servers_there_are_is_an_error(make_config) -> None:
    with pytest.raises(ConfigError, match="none is left for training"):
        make_config("trainer.v1.trainer_mode=separate_async", f"{VALIDATIONS}=pin")
    one, two = make_config(), make_config("actor_rollout_ref.rollout.num_replicas=2")
    assert one.trainer.v1.separate_async.validation_weights == "mixed"
    assert two.trainer.v1.separate_async.validation_weights == "pin"


def test_val_only_validates_and_trains_nothing(make_config) -> None:
    path, summary = run(make_config("trainer.val_only=true", "trainer.val_before_train=false"))
    assert (summary.status, summary.steps, summary.groups.trained) == ("finished", 0, 0)
    assert summary.val_sampled_before is not None
    [line] = read_validations(path)
    assert (line["step"], line["validation"]) == (0, "before")
    assert list(read_metrics(path)) == []
    assert not (path / "checkpoints").exists() or not list((path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("data.val_files=[]", "trainer.val_only=true does nothing but validate"),
        ("trainer.resume_mode=resume_path", "validates a model in a run of its own"),
    ],
)
def test_val_only_without_questions_or_of_another_run_is_an_error(make_config, more: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_config("trainer.val_only=true", more)


def test_a_users_tracker_gets_steps_validations_and_samples_of_a_run_without_a_console(make_config, tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Mine:\n"
        "    def __init__(self, run):\n"
        "        self.file = open(run.directory / 'mine.txt', 'w')\n"
        "        self.log({'seed': run.config['trainer']['seed']}, -1)\n"
        "    def log(self, metrics, step):\n"
        "        print(step, *sorted(metrics), file=self.file)\n"
        "    def samples(self, rows, step):\n"
        "        print(step, 'samples', len(rows), file=self.file)\n"
        "    def finish(self):\n"
        "        self.file.close()\n"
    )
    shown = ("trainer.total_training_steps=2", "trainer.log_val_generations=3")
    path, _ = run(make_config(f"trainer.logger=[{file}:Mine]", *shown))
    lines = (path / "mine.txt").read_text().splitlines()
    assert lines[0] == "-1 seed"
    assert [line.split()[:3] for line in lines if " samples " in line] == [["0", "samples", "3"], ["2", "samples", "3"]]
    assert [line.split()[0] for line in lines if "critic/score/mean" in line] == ["1", "2"]
    assert [line.split()[0] for line in lines if "val-core/calculator/reward/mean@1" in line] == ["0", "2"]


@pytest.mark.slow
def test_a_killed_run_validates_each_due_step_once(tmp_path) -> None:
    from tests.runtime.conftest import VIRTUAL

    real = [argument for argument in VIRTUAL if "clock" not in argument]
    job = Job(
        tmp_path, *real, "actor_rollout_ref.rollout.sim.token_seconds=0.01", "trainer.save_freq=2",
        "trainer.test_freq=2", "trainer.v1.trainer_mode=sync", "monitor.prometheus.enabled=false", steps=8,
    )  # fmt: skip
    job.start()
    job.wait_until(lambda: any(line["step"] == 4 for line in read_validations(job.path)), "validation of step 4")
    job.kill()
    before = list(read_validations(job.path))
    job.start()
    job.finish()
    after = list(read_validations(job.path))
    assert after[: len(before)] == before, "what was done stays as it was"
    assert [(line["step"], line["validation"]) for line in after] == [
        (0, "before"), (2, "during"), (4, "during"), (6, "during"), (8, "after"),
    ]  # fmt: skip
    job.check_accounts()
