"""Small jobs: the calculator's files, few steps, the simulated server and a virtual clock unless said otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from streamrl.config import StreamRLConfig, load_config

VIRTUAL = (
    "runtime=local",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.actor.strategy=sim",
    "actor_rollout_ref.rollout.name=sim",
    "actor_rollout_ref.rollout.sim.clock=virtual",
)

MakeConfig = Callable[..., StreamRLConfig]


def small_config(*arguments: str, base: Sequence[str] = VIRTUAL) -> StreamRLConfig:
    small = (
        "experiment=calculator",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        "data.val_max_samples=8",
        "trainer.total_training_steps=10",
        "monitor.prometheus.enabled=false",
    )
    return load_config([*small, *base, *arguments]).config


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    def make(*arguments: str, base: Sequence[str] = VIRTUAL) -> StreamRLConfig:
        return small_config(f"trainer.runs_dir={tmp_path / 'runs'}", *arguments, base=base)

    return make
