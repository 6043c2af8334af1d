"""On-policy distillation from teacher servers, beside generation."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

from streamrl.config import to_yaml
from streamrl.monitor.events import read_events
from streamrl.monitor.metrics_log import read_metrics
from streamrl.monitor.registry import check_step_metrics
from streamrl.monitor.schema import check_events
from streamrl.rollout.sim.virtual_clock import run_virtual
from streamrl.runtime.local_runtime import local_parts
from streamrl.runtime.run_dir import open_run
from streamrl.runtime.session import Session
from tests.runtime.test_local_run import run

MODEL = Path("examples/calculator/model")
SERVERS = (
    "distillation.enabled=true", f"distillation.teacher_model.path={MODEL}",
    "distillation.teacher_model.placement=servers", "distillation.teacher_model.num_replicas=2",
)  # fmt: skip
REAL = (
    "runtime=local", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=8", "trainer.v1.trainer_mode=sync",
    "trainer.val_before_train=false", "data.train_max_samples=8", "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.tools.calculator.latency_mean=0.01",
    "actor_rollout_ref.actor.optim={lr: 1e-3, lr_warmup_steps: 0, lr_scheduler_type: constant}",
    "distillation.distillation_loss={loss_mode: k1+, use_task_rewards: false}",
)  # fmt: skip


def moved(directory: Path, *, noise: float = 0.3) -> Path:
    """The calculator's model, each of its weights moved a little."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(MODEL, directory)
    torch.manual_seed(1)
    weights = load_file(directory / "model.safetensors")
    noisy = {name: w + noise * w.std() * torch.randn_like(w) if w.dim() > 1 else w for name, w in weights.items()}
    save_file(noisy, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_policy_comes_closer_to_a_teacher_on_servers_and_no_rank_computes_it(make_config, tmp_path: Path) -> None:
    policy = moved(tmp_path / "policy")
    path, summary = run(make_config(*REAL, *SERVERS, f"actor_rollout_ref.model.path={policy}", base=()))
    assert summary.status == "finished"
    lines = list(read_metrics(path))
    away = [line["actor/distillation_loss"] for line in lines]
    assert np.mean(away[-2:]) < 0.5 * np.mean(away[:2]), f"KL to the teacher, nats per token: {away}"
    for line in lines:
        check_step_metrics({name: value for name, value in line.items() if name != "step"})
        assert "timing_s/teacher" not in line
        assert line["teacher/queue_s"] >= 0
    events = list(read_events(path))
    check_events(events)
    assert not [event for event in events if event.kind == "span" and event.name == "teacher"], "a stage of the ranks"
    assert {e.fields["server"] for e in events if e.name == "teacher_tokens"} == {"teacher-0", "teacher-1"}
    assert not [e for e in events if e.name == "server_weights" and e.fields["server"].startswith("teacher")]
    sessions = [e for e in events if e.name == "session" and e.fields.get("partition") == "train"]
    sampled = sum(e.fields["tokens"] for e in sessions if e.fields["status"] == "success")
    assert 0 < sum(line["teacher/tokens_scored"] for line in lines) <= 2 * sampled


def test_teacher_servers_that_die_during_a_run_cost_no_group_and_no_row(make_config) -> None:
    config = make_config(
        *SERVERS, "distillation.teacher_model.name=sim", "actor_rollout_ref.rollout.sim.prefill_seconds=0.05"
    )
    directory = open_run(Path(config.trainer.runs_dir), "test", to_yaml(config), resume_mode="auto", resume_from=None)
    deaths, read = 0, []

    async def main():
        nonlocal deaths
        async with local_parts(config, directory) as parts:
            session, update = Session(parts), parts.actor.update_actor
            teachers = list(parts.teachers.servers.values())

            async def killing() -> None:
                nonlocal deaths
                while True:
                    for server in teachers:
                        await asyncio.sleep(0.3)
                        server.die()
                        deaths += 1
                        await asyncio.sleep(0.2)
                        server.restart()

            async def looked_at(batch):
                columns = await parts.queue.get(
                    batch.partition_id, batch.keys, ["response_mask", "teacher_log_prob", "responses"]
                )
                for index, key in enumerate(batch.keys):
                    read.append((key, *(np.asarray(columns[name][index]) for name in columns)))
                return await update(batch)

            parts.actor.update_actor = looked_at
            dying = asyncio.ensure_future(killing())
            try:
                return await session.run()
            finally:
                dying.cancel()

    summary = run_virtual(main())
    directory.release()
    assert summary.status == "finished"
    assert deaths > 5
    assert summary.groups.trained == 80
    assert len({key for key, *_ in read}) == len(read) == 320
    for _, mask, log_probs, responses in read:
        assert len(mask) == len(log_probs) == len(responses)
        assert (log_probs[mask == 0] == 0).all()
        assert (log_probs[mask == 1] <= 0).all()
        assert (log_probs[mask == 1] < 0).any()


def test_a_run_without_teacher_servers_tells_nothing_of_them(make_config) -> None:
    path, _ = run(make_config("trainer.total_training_steps=2"))
    assert not [name for line in read_metrics(path) for name in line if name.startswith("teacher/")]


@pytest.mark.slow
@pytest.mark.chaos
def test_a_killed_teacher_process_loses_and_corrupts_no_row(tmp_path: Path) -> None:
    """Under Ray, processes and all: SIGKILL while rows are being scored; the job ends with its accounts in order."""
    import os
    import signal

    from tests.runtime.jobs import Job

    job = Job(
        tmp_path, *SERVERS, f"actor_rollout_ref.model.path={moved(tmp_path / 'policy')}",
        "trainer.val_before_train=false", "trainer.n_gpus_per_node=1", "monitor.prometheus.enabled=false",
        steps=6, seconds=240.0,
    )  # fmt: skip
    job.start()
    for step in (1, 3):
        job.wait_for_step(step)
        os.kill(job.pid_of("teacher-0"), signal.SIGKILL)
    job.finish()
    job.check_accounts()
    lines = list(read_metrics(job.path))
    assert all(np.isfinite(line["actor/distillation_loss"]) for line in lines)
    starts = [e for e in read_events(job.path) if e.kind == "process" and e.process == "teacher-0"]
    assert len(starts) >= 2, "it was started again"
