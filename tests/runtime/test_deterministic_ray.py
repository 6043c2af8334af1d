"""Deterministic mode under Ray: two training ranks, and servers, agent workers and the whole run killed with -9."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.runtime.jobs import Job, chaos_seed
from tests.runtime.results import result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

STEPS = 6
JOB = (
    "trainer.deterministic=true", "trainer.v1.trainer_mode=separate_async", "trainer.save_freq=2",
    "data.max_response_length=48",
)  # fmt: skip
TWO = ("actor_rollout_ref.rollout.num_replicas=2", "actor_rollout_ref.rollout.agent.num_workers=2")


@pytest.mark.chaos
def test_a_killed_server_a_killed_worker_and_a_killed_run_leave_no_trace(tmp_path: Path) -> None:
    undisturbed = Job(tmp_path / "undisturbed", *JOB, steps=STEPS, seconds=400.0)
    disturbed = Job(tmp_path / "disturbed", *JOB, *TWO, steps=STEPS, seconds=400.0)
    for job in (undisturbed, disturbed):
        job.output.parent.mkdir()
        job.start()
        if job is undisturbed:
            job.finish()
    rng = random.Random(chaos_seed())
    for step, victim in [(1, "server-0"), (2, "agent-1"), (3, "server-1")]:
        disturbed.wait_for_step(step)
        time.sleep(rng.random())
        os.kill(disturbed.pid_of(victim), signal.SIGKILL)
    disturbed.wait_for_step(4)
    disturbed.kill()
    disturbed.start()
    disturbed.finish()
    disturbed.check_accounts()
    assert result(disturbed.path) == result(undisturbed.path)
