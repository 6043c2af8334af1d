"""A run that is asked to stop stops soon, also one that never has to wait; and one that failed does not end with 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import StreamRLConfig, to_yaml
from streamrl.monitor.summary import Summary
from streamrl.rollout.virtual_clock import run_virtual
from streamrl.runtime.local_runtime import local_parts
from streamrl.runtime.run_dir import open_run
from streamrl.runtime.session import Session

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
