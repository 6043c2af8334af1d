"""How a run ended stands in its summary, also where it ended before there was a trainer to write one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from streamrl.config import to_yaml
from streamrl.errors import UserError
from streamrl.monitor.summary import Summary, read_summary, write_summary
from streamrl.runtime import launch
from streamrl.runtime.run_dir import RunDirectory, open_run
from streamrl.runtime.runs import find_runs
from tests.runtime.conftest import small_config


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    config = small_config(f"trainer.runs_dir={tmp_path}")
    return open_run(tmp_path, "run", to_yaml(config), resume_mode="disable", resume_from=None)


def started(run: RunDirectory, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def fails(*_: object) -> Summary:
        raise error

    monkeypatch.setattr(launch, "_run_local", fails)
    config = small_config(f"trainer.runs_dir={run.path.parent}", "trainer.logger=[file]")
    return launch.launch(config, run, Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (UserError("the model has no weights"), "failed", "UserError: the model has no weights"),
        (RuntimeError("no server came up"), "failed", "RuntimeError: no server came up"),
        (KeyboardInterrupt(), "interrupted", ""),
    ],
)
def test_a_run_that_ends_at_its_start_says_how(
    run: RunDirectory, error: BaseException, status: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(error, RuntimeError):
        assert started(run, error, monkeypatch) == launch.FAILED
    else:
        with pytest.raises(type(error)):
            started(run, error, monkeypatch)
    run.release()
    assert [each.status for each in find_runs(run.path.parent)] == [status]
    assert read_summary(run.path).error == says


def test_the_summary_that_a_trainer_wrote_stays(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    write_summary(run.path, Summary(status="failed", error="of the trainer", steps=7, train_seconds=1.0))
    started(run, RuntimeError("of the trainer"), monkeypatch)
    assert read_summary(run.path).steps == 7
