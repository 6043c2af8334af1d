"""All modes with the main algorithms: the real loop, ranks and engine, in one process, two steps each."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.monitor.events import read_events
from streamrl.monitor.metrics_log import read_metrics
from streamrl.monitor.registry import check_step_metrics
from streamrl.trainer.batch_log import read_batch_log
from tests.runtime.test_algorithms import command_line
from tests.runtime.test_local_run import run

MODES = ("sync", "colocate_async", "separate_async")
STEPS = 2
SMALL = (
    "runtime=local", "trainer.n_gpus_per_node=1", f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false", "data.val_files=[]", "reward.overlong_buffer.len=8", "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.tools.calculator.latency_mean=0.01", "trainer.v1.sampler.max_off_policy_threshold=3",
)  # fmt: skip


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "ppo", "gspo"])
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_trains_with_an_algorithm(make_config, mode: str, algorithm: str) -> None:
    script = command_line(Path(f"examples/algorithms/{algorithm}.sh"))
    warmup = 1 if algorithm == "ppo" else 0
    more = (f"trainer.v1.trainer_mode={mode}", f"trainer.critic_warmup={warmup}")
    path, summary = run(make_config(*script, *SMALL, *more, base=()))
    assert (summary.status, summary.groups.trained) == ("finished", 4 * STEPS)
    first, second = read_metrics(path)
    for line in (first, second):
        check_step_metrics({name: value for name, value in line.items() if name != "step"})
    assert ("actor/optimizer_steps" in first, "critic/vf_loss" in first) == (not warmup, bool(warmup))
    assert second["actor/grad_norm"] > 0
    if algorithm == "dapo":
        assert second["groups/zero_variance"] == 0
    if mode == "sync":
        assert second["training/off_policy/trajectory_staleness_worst/max"] == 0
    published = [event.fields["version"] for event in read_events(path) if event.name == "publish"]
    assert sorted(set(published)) == list(range(STEPS + 1 - warmup)), "a step that only warms up makes no version"
    orders = [order for step in read_batch_log(path / "batches.jsonl") for order in step.orders]
    assert len(set(orders)) == len(orders) == 4 * STEPS
