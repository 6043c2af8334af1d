"""The actor's loss as the engine calls it, against numpy in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl.algorithms.policy_losses import NEEDS_SELECTION
from streamrl.config.algorithm_checks import SELECTING_LOSSES
from streamrl.config.sections.actor import ActorConfig, CriticConfig
from streamrl.workers.batch import Rows
from streamrl.workers.engine.base import TokenOutputs
from streamrl.workers.losses import ActorLoss, ValueLoss, loss_weights

ROW = np.array([0, 0, 0, 1, 1, 2])
MASK = np.array([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
NOTHING = np.zeros(0, np.int64)


def outputs() -> TokenOutputs:
    rng = np.random.default_rng(3)
    values = {
        name: torch.tensor(rng.normal(-1.5, 0.7, 6)) for name in ("log_probs", "old_log_probs", "rollout_log_probs")
    }
    columns = {name: values[name] for name in ("old_log_probs", "rollout_log_probs")}
    columns |= {
        "loss_mask": torch.tensor(MASK),
        "loss_weights": torch.tensor(MASK / 8.0),
        "advantages": torch.tensor(rng.normal(0, 1, 6)),
    }
    return TokenOutputs(values["log_probs"], torch.tensor(rng.uniform(1, 2, 6)), torch.tensor(ROW), columns)


@pytest.mark.parametrize("weighted", [False, True])
def test_loss_is_the_weighted_surrogate_less_the_entropy_bonus_and_the_kl(weighted: bool) -> None:
    out = outputs()
    weight = np.array([0.5, 3.0, 1.5, 1.0, 0.0, 2.0]) if weighted else np.ones(6)
    if weighted:
        out.columns["rollout_is_weights"] = torch.tensor(weight)
    out.columns["ref_log_prob"] = torch.tensor(np.linspace(-2, -1, 6))
    config = ActorConfig(entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k2")
    loss, sums = ActorLoss(config)(out)

    new, old, rollout = (
        x.numpy() for x in (out.log_probs, *(out.columns[f"{n}_log_probs"] for n in ("old", "rollout")))
    )
    a, ratio = out.columns["advantages"].numpy(), np.exp(new - old)
    surrogate = np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
    surrogate = np.where(a < 0, np.maximum(surrogate, 3.0 * a), surrogate)
    pg_loss = -(weight * surrogate * MASK).sum() / 8.0
    entropy = (out.entropy.numpy() * MASK).sum() / 8.0
    kl = (0.5 * (new - np.linspace(-2, -1, 6)) ** 2 * MASK).sum() / 8.0
    assert float(loss) == pytest.approx(pg_loss - 0.1 * entropy + 0.3 * kl)
    assert float(sums["kl_loss"]) == pytest.approx(kl)
    assert float(sums["pg_loss"]) == pytest.approx(pg_loss)
    assert float(sums["ppo_kl"]) == pytest.approx(((old - new) * MASK).sum())
    assert float(sums["rollout_kl"]) == pytest.approx(((rollout - new) * MASK).sum())
    assert float(sums["tokens"]) == MASK.sum()


def test_with_the_current_policy_as_the_old_one_the_ratio_is_one_and_the_gradient_is_the_policy_gradient() -> None:
    out = outputs()
    del out.columns["old_log_probs"]
    log_probs = out.log_probs.requires_grad_()
    loss, sums = ActorLoss(ActorConfig(), old_is_current=True)(out)
    loss.backward()
    advantages = out.columns["advantages"].numpy()
    assert loss.item() == pytest.approx(-(advantages * MASK).sum() / 8.0)
    assert log_probs.grad is not None
    np.testing.assert_array_equal(log_probs.grad.numpy(), -advantages * MASK / 8.0)
    assert [float(sums[name]) for name in ("ppo_kl", "pg_clipfrac", "pg_clipfrac_lower")] == [0.0, 0.0, 0.0]


def test_value_loss_is_the_clipped_error_over_the_tokens_that_count() -> None:
    rng = np.random.default_rng(5)
    values, old, returns = (rng.normal(0, 1, 6) for _ in range(3))
    named = {"values": old, "returns": returns, "loss_mask": MASK, "loss_weights": MASK / 8.0}
    columns = {name: torch.tensor(x) for name, x in named.items()}
    nothing = torch.zeros(0)
    out = TokenOutputs(nothing, nothing, torch.tensor(ROW), columns, values=torch.tensor(values))
    loss, sums = ValueLoss(CriticConfig(cliprange_value=0.2))(out)
    near = old + np.clip(values - old, -0.2, 0.2)
    expected = 0.5 * np.maximum((values - returns) ** 2, (near - returns) ** 2)
    assert float(loss) == pytest.approx((expected * MASK).sum() / 8.0)
    assert float(sums["squared_error"]) == pytest.approx(((values - returns) ** 2 * MASK).sum())


def test_a_session_weighs_the_same_however_many_rows_it_has() -> None:
    keys = ["p0_0_0", "p0_0_1", "p0_1_0"]  # two rows of one session, one of another
    masks = [np.array([1.0, 1.0]), np.array([1.0, 0.0]), np.array([1.0])]
    rows = Rows([NOTHING] * 3, [2, 2, 1], {"loss_mask": [mask.astype(np.float32) for mask in masks]})

    def weigh(mode: str) -> list[list[float]]:
        found = loss_weights(rows, keys, ActorConfig(loss_agg_mode=mode), lambda values: values)  # type: ignore[arg-type]
        assert found is not None
        return [each.tolist() for each in found]

    third, quarter = pytest.approx(1 / 6), pytest.approx(1 / 4)
    assert weigh("seq-mean-token-mean") == [[third, third], [third, 0.0], [0.5]]
    assert weigh("seq-mean-token-sum") == [[0.5, 0.5], [0.5, 0.0], [0.5]]
    assert weigh("token-mean") == [[quarter, quarter], [quarter, 0.0], [quarter]]


def test_rows_that_do_not_count_leave_the_denominators_and_none_at_all_is_no_step() -> None:
    keys, zero, one = ["p0_0_0", "p0_1_0"], np.zeros(2, np.float32), np.ones(2, np.float32)
    config = ActorConfig(loss_agg_mode="seq-mean-token-mean")
    found = loss_weights(Rows([NOTHING] * 2, [2, 2], {"loss_mask": [zero, one]}), keys, config, lambda values: values)
    assert found is not None
    assert [each.tolist() for each in found] == [[0.0, 0.0], [0.5, 0.5]]
    assert (
        loss_weights(Rows([NOTHING] * 2, [2, 2], {"loss_mask": [zero, zero]}), keys, config, lambda values: values)
        is None
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("None", "returned NoneType; it returns a PolicyLoss"),
        ("PolicyLoss(inputs.log_probs.sum(), inputs.log_probs)", r"loss is \(\); it is one value per token, \(6,\)"),
        ("PolicyLoss(inputs.log_probs, inputs.log_probs[:, None])", r"log_ratio is \(6, 1\)"),
        ("PolicyLoss(inputs.log_probs, inputs.log_probs, {'mine': 3})", "mine is int"),
    ],
)
def test_a_loss_of_a_users_that_returns_something_else_is_named(tmp_path: Path, body: str, says: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"from streamrl.algorithms.policy_losses import PolicyLoss\ndef mine(inputs, settings):\n    return {body}\n"
    )
    with pytest.raises((TypeError, ValueError), match=says):
        ActorLoss(ActorConfig(), f"{file}:mine")(outputs())


def test_the_checks_know_which_losses_select_tokens() -> None:
    assert set(SELECTING_LOSSES) == NEEDS_SELECTION
