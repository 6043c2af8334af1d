"""A run that is asked to stop stops soon, also one that never has to wait; and one that failed does not end with 0."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from streamrl.cli import main
from streamrl.config import StreamRLConfig, to_yaml
from streamrl.monitor.summary import Summary, read_summary
from streamrl.rollout.sim.virtual_clock import run_virtual
from streamrl.runtime.launch import launch
from streamrl.runtime.local_runtime import local_parts
from streamrl.runtime.run_dir import open_run, status_of
from streamrl.runtime.session import Session
from tests.runtime.conftest import VIRTUAL

NEVER_WAITS = (
    "trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.num_warmup_batches=3",
    "trainer.v1.sampler.max_off_policy_threshold=8", "actor_rollout_ref.actor.sim.step_seconds=100.0",
    "actor_rollout_ref.rollout.sim.token_seconds=0.001",
)  # fmt: skip


async def stopped_in_step(config: StreamRLConfig, step: int, monkeypatch: pytest.MonkeyPatch) -> Summary:
    run = open_run(Path(config.trainer.runs_dir), "test", to_yaml(config), resume_mode="disable", resume_from=None)
    async with local_parts(config, run) as parts:
        session = Session(parts)
        update = session.trainer.update.run

        async def stopping(*arguments, **values):
            if session.trainer.step + 1 == step:
                session.stop()
            return await update(*arguments, **values)

        monkeypatch.setattr(session.trainer.update, "run", stopping)
        summary = await session.run()
    run.release()
    return summary


MINI_BATCHES = ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.v1.separate_async.parameter_sync_step=2")


@pytest.mark.parametrize("more", [(), MINI_BATCHES], ids=["whole", "mini"])
def test_a_run_whose_groups_are_always_ready_stops_after_the_step_it_is_in(make_config, monkeypatch, more) -> None:
    summary = run_virtual(stopped_in_step(make_config(*NEVER_WAITS, *more), 4, monkeypatch))
    assert (summary.status, summary.steps) == ("interrupted", 4)


def test_a_job_whose_code_calls_exit_does_not_end_with_0(make_config, tmp_path: Path, monkeypatch, capsys) -> None:
    """Wherever it does, and whatever it says: here where nothing else catches it, and while the data is read."""
    config = make_config("trainer.total_training_steps=2")

    def gives_up(*_: object) -> None:
        raise SystemExit(0)

    with monkeypatch.context() as patched:
        patched.setattr("streamrl.trainer.modes.FilterRate.look", gives_up)
        run = open_run(Path(config.trainer.runs_dir), "test", to_yaml(config), resume_mode="disable", resume_from=None)
        out = io.StringIO()
        console = Console(file=out, force_terminal=False)
        assert launch(config, run, console) == 1
    assert "failed: TrainerDied: sys.exit(0) was called" in out.getvalue()
    assert status_of(run.path) == "failed"
    assert "sys.exit(0) was called" in read_summary(run.path).error
    run.release()
    monkeypatch.setattr("streamrl.data.train_dataset", gives_up)
    assert main(["train", "experiment=calculator", *VIRTUAL, f"trainer.runs_dir={tmp_path}"]) == 2
    assert "sys.exit(0) was called" in capsys.readouterr().err


def test_a_run_that_waits_in_vain_since_the_queue_is_full_says_so(make_config) -> None:
    small = (
        "transfer_queue.unit_budget_bytes=65536", "transfer_queue.segment_bytes=65536", "trainer.stall_timeout=40",
        "transfer_queue.spill_budget_bytes=0", "actor_rollout_ref.rollout.sim.response_tokens_mean=200",
        "trainer.v1.trainer_mode=separate_async",
    )  # fmt: skip
    config = make_config(*small)
    run = open_run(Path(config.trainer.runs_dir), "test", to_yaml(config), resume_mode="disable", resume_from=None)
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=10_000)
    assert launch(config, run, console) == 1
    told = out.getvalue()
    assert "The queue's memory is full, and writers (agent workers, the feeder) wait for room" in told
    assert re.search(r"the first: 'agent-0' waited [\d.]+ s for room for \d+ bytes.* of 131072 bytes", told)
    run.release()
