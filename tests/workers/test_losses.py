"""The actor's loss as the engine calls it, against numpy in float64."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from streamrl.config.sections.actor import ActorConfig
from streamrl.config.sections.algorithm import RolloutCorrectionConfig
from streamrl.workers.engine.base import TokenOutputs
from streamrl.workers.losses import ActorLoss, MiniBatchSize

ROW = np.array([0, 0, 0, 1, 1, 2])
MASK = np.array([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])


def outputs() -> TokenOutputs:
    rng = np.random.default_rng(3)
    values = {
        name: torch.tensor(rng.normal(-1.5, 0.7, 6)) for name in ("log_probs", "old_log_probs", "rollout_log_probs")
    }
    columns = {name: values[name] for name in ("old_log_probs", "rollout_log_probs")}
    columns |= {"loss_mask": torch.tensor(MASK), "advantages": torch.tensor(rng.normal(0, 1, 6))}
    return TokenOutputs(values["log_probs"], torch.tensor(rng.uniform(1, 2, 6)), torch.tensor(ROW), columns)


@pytest.mark.parametrize("level", [None, "token"])
def test_loss_is_the_weighted_surrogate_less_the_entropy_bonus(level: Literal["token"] | None) -> None:
    out = outputs()
    correction = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=1.5, bypass_mode=False)
    loss, sums = ActorLoss(ActorConfig(entropy_coeff=0.1), correction, MiniBatchSize(tokens=8.0, sequences=3.0))(out)

    new, old, rollout = (
        x.numpy() for x in (out.log_probs, *(out.columns[f"{n}_log_probs"] for n in ("old", "rollout")))
    )
    a, ratio = out.columns["advantages"].numpy(), np.exp(new - old)
    surrogate = np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
    surrogate = np.where(a < 0, np.maximum(surrogate, 3.0 * a), surrogate)
    weight = np.minimum(np.exp(old - rollout), 1.5) if level else 1.0
    pg_loss = -(weight * surrogate * MASK).sum() / 8.0
    entropy = (out.entropy.numpy() * MASK).sum() / 8.0
    assert float(loss) == pytest.approx(pg_loss - 0.1 * entropy)
    assert float(sums["pg_loss"]) == pytest.approx(pg_loss)
    assert float(sums["ppo_kl"]) == pytest.approx(((old - new) * MASK).sum())
    assert float(sums["rollout_kl"]) == pytest.approx(((rollout - new) * MASK).sum())
    assert float(sums["tokens"]) == MASK.sum()
    assert ("rollout_is" in sums) == (level is not None)
