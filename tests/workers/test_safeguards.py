"""What keeps learning stable on stale samples: steps left out beyond target_kl, smaller steps on older samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamrl.config.sections.actor import ActorConfig, ModelConfig, OptimConfig
from streamrl.single_controller.worker import RankInfo
from streamrl.workers.actor import ActorWorker
from streamrl.workers.settings import ActorSettings
from tests.workers.test_actor_local import start
from tests.workers.tiny import make_model, make_rows


def learning_rate(staleness: float, *, aware: bool) -> float:
    optim = OptimConfig(lr=1e-3, staleness_aware=aware)
    settings = ActorSettings(model=ModelConfig(), actor=ActorConfig(optim=optim))
    return ActorWorker(RankInfo(), settings, queue={})._learning_rate({"version": 5, "staleness": staleness})


@pytest.mark.parametrize(("staleness", "share"), [(0.0, 1.0), (1.0, 1.0), (2.0, 1 / 2), (3.5, 1 / 3.5)])
def test_the_rate_is_divided_by_the_mean_age_of_the_samples(staleness: float, share: float) -> None:
    assert learning_rate(staleness, aware=True) == pytest.approx(share * 1e-3)


def test_without_the_option_age_does_not_change_the_rate() -> None:
    assert learning_rate(4.0, aware=False) == 1e-3


def test_a_mini_batch_on_which_the_policy_has_drifted_takes_no_step(tmp_path: Path) -> None:
    batch, store = make_rows(prompts=1, n=4)
    for target_kl, moved in ((1e-9, False), (None, True)):
        group = start(make_model(tmp_path / str(target_kl)), store, target_kl=target_kl)
        before = group.state_digest()
        metrics = group.update_actor(batch)  # one mini-batch
        assert metrics["rollout_corr/k3_kl"] > 1e-9
        assert (group.state_digest() != before) is moved
        assert metrics["actor/optimizer_steps"] == float(moved)
        group.shutdown()


def test_a_mini_batch_whose_loss_is_not_finite_takes_no_step(tmp_path: Path) -> None:
    """Though its gradient is finite: the clamp in k3 gives a reference of NaN the gradient 0."""
    batch, store = make_rows(prompts=1, n=4)
    store.columns["ref_log_prob"] = {k: values.copy() for k, values in store.columns["rollout_log_probs"].items()}
    for broken in (False, True):
        if broken:
            store.columns["ref_log_prob"][batch.keys[0]][0] = np.nan
        group = start(make_model(tmp_path / str(broken)), store, use_kl_loss=True, kl_loss_coef=0.1)
        before = group.state_digest()
        metrics = group.update_actor(batch)  # one mini-batch
        assert (group.state_digest() == before) is broken
        assert (metrics["actor/steps_not_finite"], metrics["actor/optimizer_steps"]) == (float(broken), 1.0 - broken)
        group.shutdown()
