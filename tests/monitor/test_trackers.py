"""One suite for every tracker that can be imported here, a fake among them; and what a lane does with bad ones."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import ConfigError, load_config
from streamrl.errors import UserError
from streamrl.monitor.registry import check_step_metrics
from streamrl.monitor.trackers import LIBRARIES, Lane, TrackedRun, Trackers, open_trackers
from streamrl.runtime import preflight
from tests.runtime.conftest import small_config

FAKE = '''
"""A tracker as a user writes one."""
import json

class Mine:
    def __init__(self, run):
        self.file = open(run.directory / "mine.jsonl", "a")
        self.write("config", run.config)

    def write(self, kind, value):
        self.file.write(json.dumps([kind, value]) + "\\n")
        self.file.flush()

    def log(self, metrics, step):
        self.write("log", [step, metrics])

    def samples(self, rows, step):
        self.write("samples", [step, rows])

    def finish(self):
        self.write("finish", None)
'''

Logged = dict[str, list[tuple[int, float]]]
SCORE, ACCURACY = "critic/score/mean", "val-core/sum/acc/mean@4"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of runs; no library speaks to anything outside."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    (tmp_path / "mine.py").write_text(FAKE)
    return tmp_path


def read_fake(run: TrackedRun) -> Logged:
    import json

    lines = [json.loads(line) for line in (run.directory / "mine.jsonl").read_text().splitlines()]
    return _by_name((step, metrics) for kind, value in lines if kind == "log" for step, metrics in [value])


def read_tensorboard(run: TrackedRun) -> Logged:
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    events = EventAccumulator(str(run.directory / "tensorboard"))
    events.Reload()
    assert "config/text_summary" in events.Tags()["tensors"]
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def read_mlflow(run: TrackedRun) -> Logged:
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient(tracking_uri=f"sqlite:///{run.directory.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(run.project)
    [found] = client.search_runs([experiment.experiment_id])
    assert found.data.params["trainer.seed"] == "1"
    names = {name: name.replace("@", "_at_") for name in (SCORE, ACCURACY)}
    return {name: [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, told)]
            for name, told in names.items()}  # fmt: skip


def read_trackio(run: TrackedRun) -> Logged:
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    return _by_name((int(line["step"]), line) for line in SQLiteStorage.get_logs(run.project, run.name))


def read_wandb(run: TrackedRun) -> None:
    """Its files are its own; that there are some, of both lives."""
    assert len(list(run.directory.glob("wandb/offline-run-*/*.wandb"))) == 2


def read_swanlab(run: TrackedRun) -> None:
    assert list(run.directory.glob("swanlog/run-*/*.swanlab"))


READERS: dict[str, Callable[[TrackedRun], Logged | None]] = {
    "tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio,
    "swanlab": read_swanlab,
}  # fmt: skip


def _by_name(lines: Any) -> Logged:
    found: Logged = defaultdict(list)
    for step, metrics in lines:
        for name in (SCORE, ACCURACY):
            if name in metrics:
                found[name].append((step, metrics[name]))
    return found


@pytest.mark.parametrize("name", [*LIBRARIES, "mine.py:Mine"])
def test_a_tracker_takes_steps_validations_and_samples_of_a_run_and_of_its_resume(place: Path, name: str) -> None:
    if name in LIBRARIES and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    spec = name if name in LIBRARIES else str(place / name)
    directory = place / "20261130-0614-project-run"
    directory.mkdir()
    check_step_metrics({SCORE: 0.0, ACCURACY: 0.0})
    told: list[str] = []
    for resumed_at in (None, 2):
        run = TrackedRun(directory, "project", {"trainer": {"seed": 1, "logger": [name]}}, resumed_at)
        trackers = open_trackers([spec, "file", "console"], run, told.append)
        begin = 0 if resumed_at is None else resumed_at
        for step in range(begin + 1, begin + 4):
            trackers.log({SCORE: step / 4, "actor/grad_norm": float("nan"), "note": "text"}, step)
        trackers.log({ACCURACY: 0.5}, begin)  # a validation that took longer than three steps
        trackers.samples([{"mode": "greedy", "input": "1 + 1 = ?", "output": "2", "score": 1.0}], begin)
        trackers.close(60.0)
    assert told == []
    logged = READERS.get(name, read_fake)(run)
    if logged is not None:
        steps = sorted(set(logged[SCORE]))  # a resumed run logs step 3 again
        assert [(step, pytest.approx(step / 4)) for step in range(1, 6)] == steps
        assert sorted(logged[ACCURACY]) == [(0, 0.5), (2, 0.5)]


class Recorder:
    """Takes what it gets when it is let."""

    def __init__(self, *, let: bool = True, fail: bool = False) -> None:
        self.let = threading.Event()
        self.fail, self.steps, self.finished, self.seen = fail, list[int](), False, list[Mapping[str, float]]()
        if let:
            self.let.set()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.let.wait(30.0)
        if self.fail:
            raise OSError("no route to host")
        self.steps.append(step)
        self.seen.append(metrics)

    def finish(self) -> None:
        self.finished = True


def test_a_tracker_that_fails_is_told_once_and_counted_at_the_end() -> None:
    told: list[str] = []
    bad, good = Recorder(fail=True), Recorder()
    trackers = Trackers([Lane("bad", lambda: bad, told.append), Lane("good", lambda: good, told.append)])
    for step in range(5):
        trackers.log({"x": 1.0}, step)
    trackers.close(10.0)
    assert told == [
        "tracker bad failed: OSError: no route to host",
        "tracker bad: 5 calls failed; metrics.jsonl has everything",
    ]
    assert good.steps == [0, 1, 2, 3, 4]
    assert bad.finished
    assert good.finished


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def test_a_tracker_whose_error_has_no_text_is_told_and_counted_like_any_other() -> None:
    class Bad(Recorder):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            raise Unspeakable

        def finish(self) -> None:
            self.finished = True
            raise Unspeakable

    def unmade() -> Bad:
        raise Unspeakable

    told: list[str] = []
    bad = Bad()
    trackers = Trackers([Lane("bad", lambda: bad, told.append), Lane("unmade", unmade, told.append)])
    for step in range(3):
        trackers.log({"x": 1.0}, step)
    trackers.close(10.0)
    assert bad.finished
    why = "Unspeakable: (its text cannot be had: SystemExit)"
    assert sorted(told) == [
        f"tracker bad did not finish: {why}",
        f"tracker bad failed: {why}",
        "tracker bad: 3 calls failed; metrics.jsonl has everything",
        f"tracker unmade could not start, and the run goes on without it: {why}",
    ]


def test_a_tracker_that_cannot_start_costs_a_line(place: Path) -> None:
    told: list[str] = []
    (place / "bad.py").write_text("class Bad:\n    def __init__(self, run):\n        raise SystemExit('no key')\n")
    trackers = open_trackers([f"{place / 'bad.py'}:Bad"], TrackedRun(place, "p", {}), told.append)
    trackers.log({"x": 1.0}, 1)
    trackers.close(10.0)
    assert told == ["tracker bad.py:Bad could not start, and the run goes on without it: SystemExit: no key"]


def test_a_hanging_tracker_costs_neither_steps_nor_memory_nor_the_end_of_a_run() -> None:
    told: list[str] = []
    hanging = Recorder(let=False)
    lane = Lane("hanging", lambda: hanging, told.append, capacity=3)
    trackers = Trackers([lane])
    trackers.log({"x": 1.0}, 0)
    wait_until(lambda: not lane._waiting)
    began = time.monotonic()
    for step in range(1, 1001):
        trackers.log({"x": 1.0}, step)
    assert time.monotonic() - began < 5.0
    assert lane.dropped == 997
    assert len(told) == 1
    began = time.monotonic()
    trackers.close(0.2)
    assert time.monotonic() - began < 5.0
    assert told[-1].startswith("tracker hanging: 997 calls were dropped, 4 calls had not ended when the run did")
    hanging.let.set()
    wait_until(lambda: hanging.finished)
    assert hanging.steps == [0, 998, 999, 1000], "the newest are kept"


def test_only_finite_numbers_reach_a_tracker() -> None:
    recorder = Recorder()
    trackers = Trackers([Lane("recorder", lambda: recorder, pytest.fail)])
    trackers.log({"a": 1, "b": float("inf"), "c": "text", "d": None, "e": True}, 1)
    trackers.close(10.0)
    assert recorder.seen == [{"a": 1.0, "e": 1.0}]


def test_a_library_that_is_not_installed_is_an_error_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = small_config("trainer.logger=[console,mlflow,wandb]")
    with pytest.raises(UserError, match=r"trainer\.logger: mlflow, wandb are not installed; pip install mlflow wandb"):
        preflight.check_machine(config)
    assert list(preflight.not_installed(small_config("trainer.logger=[console,file]"))) == []


@pytest.mark.parametrize(
    ("logger", "said"),
    [
        ("[console,wandbb]", "unknown tracker 'wandbb'; did you mean 'wandb'"),
        ("[nowhere.py:Mine]", "trainer.logger: there is no file nowhere.py"),
        ("[tests/monitor/test_trackers.py:Mine]", "defines no Mine"),
    ],
)
def test_a_tracker_that_is_not_there_is_an_error_of_the_configuration(logger: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", "\\(")):
        load_config(["experiment=calculator", f"trainer.logger={logger}"])


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
