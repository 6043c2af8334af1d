"""The stages of an update: which run, in which order, and what each is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streamrl.config.root import ActorRolloutRefConfig, StreamRLConfig
from streamrl.config.sections.actor import ActorConfig, CriticConfig
from streamrl.config.sections.algorithm import (
    AlgorithmConfig,
    DistillationConfig,
    KLControlConfig,
    RolloutCorrectionConfig,
    TeacherConfig,
)
from streamrl.config.sections.trainer import TrainerConfig
from streamrl.monitor.events import EventLog
from streamrl.trainer.replay_buffer import LeasedBatch
from streamrl.trainer.update import Update
from tests.trainer.groups import ready_group
from transfer_queue.metadata import KVBatchMeta
from transfer_queue.net.messages import Token

GROUPS = [ready_group("u0", [1.0, 0.0]), ready_group("u1", [1.0, 1.0])]


class Ranks:
    """Remembers its calls. Each row's KL is 0.1 per response token; every row comes from a rank of its own."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, KVBatchMeta | None]] = []

    def __getattr__(self, method: str) -> Any:
        async def call(batch: KVBatchMeta | None = None) -> Any:
            self.calls.append((method, batch))
            if method != "compute_rewards" or batch is None:
                return {f"of/{method}": 1.0}
            coef = (batch.extra_info or {})["kl_coef"]
            kl = {k: 0.1 * tag["response_len"] for k, tag in zip(batch.keys, batch.tags, strict=True)}
            return [{"penalty": {key: coef * value}, "kl": 0.1, "rows": 1.0} for key, value in kl.items()]

        return call

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]

    def told(self, method: str) -> dict[str, Any]:
        [meta] = [batch for name, batch in self.calls if name == method]
        assert meta is not None
        return meta.extra_info or {}


@pytest.fixture
def events(tmp_path):
    with EventLog(tmp_path, "trainer") as log:
        yield log


def config(*, actor: dict | None = None, critic: dict | None = None, warmup: int = 0, **algorithm: Any):
    algorithm.setdefault("rollout_correction", RolloutCorrectionConfig(bypass_mode=True))
    return StreamRLConfig(
        actor_rollout_ref=ActorRolloutRefConfig(actor=ActorConfig(ppo_mini_batch_size=2, **(actor or {}))),
        algorithm=AlgorithmConfig(**algorithm), critic=CriticConfig(ppo_mini_batch_size=1, **(critic or {})),
        trainer=TrainerConfig(critic_warmup=warmup),
    )  # fmt: skip


async def run(update: Update, step: int = 5, **options: Any) -> dict[str, float]:
    return await update.run(
        LeasedBatch(Token(1, 1), GROUPS), step=step, version=step - 1, max_age=3, staleness=1.5, **options
    )


async def test_grpo_in_an_async_mode_is_one_call_with_a_scalar_per_row(events):
    ranks = Ranks()
    metrics = await run(Update(config(), ranks, None, events, "train"))
    assert ranks.methods == ["update_actor"]
    told = ranks.told("update_actor")
    assert (told["version"], told["staleness"], told["max_age"], told["mini_batch_size"]) == (4, 1.5, 3, 2)
    assert list(told["advantages"]) == ["u0_0_0", "u0_1_0", "u1_0_0", "u1_1_0"]
    assert told["advantages"]["u1_0_0"] == 0.0
    assert metrics["of/update_actor"] == 1.0


async def test_ppo_with_critic_and_reference_runs_all_stages_in_order(events):
    ranks, critic = Ranks(), Ranks()
    ppo = config(
        adv_estimator="gae", rollout_correction=RolloutCorrectionConfig(bypass_mode=False), use_kl_in_reward=True
    )
    await run(Update(ppo, ranks, critic, events, "train"))
    assert ranks.methods == [
        "compute_log_prob", "compute_ref_log_prob", "compute_rewards", "compute_advantage", "update_actor",
    ]  # fmt: skip
    assert critic.methods == ["compute_values", "update_critic"]
    assert ranks.told("compute_advantage")["scores"] == {"u0_0_0": 1.0, "u0_1_0": 0.0, "u1_0_0": 1.0, "u1_1_0": 1.0}
    assert ranks.told("update_actor")["advantage_columns"]
    assert critic.told("update_critic")["mini_batch_size"] == 1
    assert "advantages" not in ranks.told("update_actor")


async def test_a_penalty_in_the_reward_reaches_estimators_that_work_on_sessions(events):
    ranks = Ranks()
    update = Update(
        config(use_kl_in_reward=True, norm_adv_by_std_in_grpo=False, kl_ctrl=KLControlConfig(kl_coef=0.5)),
        ranks, None, events, "train",
    )  # fmt: skip
    metrics = await run(update)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.1)
    advantages = ranks.told("update_actor")["advantages"]
    # lengths 4 and 5: scores 1 - .2 and 0 - .25, mean .275
    assert [advantages["u0_0_0"], advantages["u0_1_0"]] == pytest.approx([0.525, -0.525])


async def test_an_adaptive_coefficient_moves_towards_its_target(events):
    ranks = Ranks()
    control = KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.01, horizon=10)
    update = Update(config(use_kl_in_reward=True, kl_ctrl=control), ranks, None, events, "train")
    first, second = await run(update), await run(update)
    assert first["actor/reward_kl_penalty_coeff"] == 0.5
    assert second["actor/reward_kl_penalty_coeff"] > 0.5, "the KL is ten times the target"


async def test_a_whitened_estimator_gives_its_scalars_to_the_ranks(events):
    ranks = Ranks()
    await run(Update(config(adv_estimator="reinforce_plus_plus_baseline"), ranks, None, events, "train"))
    assert ranks.methods == ["compute_advantage", "update_actor"]
    assert ranks.told("compute_advantage")["advantages"]["u0_0_0"] == 0.5


async def test_gdpo_is_told_the_components_that_the_configuration_names_with_their_weights(events):
    ranks, group = Ranks(), ready_group("u0", [5.0, 5.0])
    for row, right in zip(group.rows, (1.0, 0.0), strict=True):
        row.tag.update({"score/right": right, "score/short": 3.0})
    gdpo = config(adv_estimator="gdpo", gdpo_reward_keys=("right", "short"), gdpo_reward_weights=(-2.0, 1.0))
    batch = LeasedBatch(Token(1, 1), [group])
    await Update(gdpo, ranks, None, events, "train").run(batch, step=1, version=0, max_age=None, staleness=0.0)
    found = ranks.told("update_actor")["advantages"]
    assert [found["u0_0_0"], found["u0_1_0"]] == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)


async def test_the_kl_loss_alone_needs_the_reference_and_no_rewards(events):
    ranks = Ranks()
    await run(Update(config(actor={"use_kl_loss": True}), ranks, None, events, "train"))
    assert ranks.methods == ["compute_ref_log_prob", "update_actor"]


async def test_a_teacher_is_asked_before_the_update(events):
    ranks = Ranks()
    taught = replace(config(), distillation=DistillationConfig(enabled=True))
    await run(Update(taught, ranks, None, events, "train"))
    assert ranks.methods == ["compute_teacher_log_prob", "update_actor"]


async def test_a_teacher_on_servers_is_no_stage_of_the_update(events):
    ranks = Ranks()
    chosen = DistillationConfig(enabled=True, teacher_model=TeacherConfig(placement="servers"))
    await run(Update(replace(config(), distillation=chosen), ranks, None, events, "train"))
    assert ranks.methods == ["update_actor"]


async def test_the_actor_rests_while_the_critic_warms_up(events):
    ranks, critic = Ranks(), Ranks()
    update = Update(config(adv_estimator="gae", warmup=5), ranks, critic, events, "train")
    await run(update, step=5)
    assert "update_actor" not in ranks.methods
    await run(update, step=6)
    assert "update_actor" in ranks.methods


async def test_old_log_probs_of_a_step_with_several_updates_are_those_of_its_start(events):
    ranks = Ranks()
    update = Update(config(rollout_correction=RolloutCorrectionConfig(bypass_mode=False)), ranks, None, events, "train")
    await run(update, pi_old="keep")
    await run(update, pi_old="kept")
    told = [meta.extra_info["snapshot"] for method, meta in ranks.calls if method == "compute_log_prob"]
    assert ranks.methods[0] == "keep_snapshot"
    assert told == [False, True]
    assert ranks.methods.count("keep_snapshot") == 1


async def test_with_the_current_policy_as_the_old_one_no_log_probs_are_computed_before_the_update(events):
    ranks = Ranks()
    current = RolloutCorrectionConfig(bypass_mode=False, pi_old="current")
    await run(Update(config(rollout_correction=current), ranks, None, events, "train"))
    assert ranks.methods == ["update_actor"]


async def test_a_gradient_that_is_never_finite_ends_the_run(events):
    class Diverged(Ranks):
        async def update_actor(self, batch: KVBatchMeta) -> dict[str, float]:
            return {"actor/steps_not_finite": 2.0, "actor/optimizer_steps": 0.0}

    update = Update(config(), Diverged(), None, events, "train")
    await run(update)
    await run(update)
    with pytest.raises(FloatingPointError, match=r"not finite in the last 3 updates \(step 5\)"):
        await run(update)


async def test_a_critic_whose_gradient_is_never_finite_ends_the_run_though_the_actor_learns(events):
    class Diverged(Ranks):
        async def update_critic(self, batch: KVBatchMeta) -> dict[str, float]:
            return {"critic/steps_not_finite": 2.0, "critic/optimizer_steps": 0.0}

    update = Update(config(adv_estimator="gae"), Ranks(), Diverged(), events, "train")
    await run(update)
    await run(update)
    with pytest.raises(FloatingPointError, match=r"critic's gradient or loss was not finite in the last 3 updates"):
        await run(update)


async def test_bytes_add_up_over_the_stages(events):
    class Counting(Ranks):
        def __getattr__(self, method: str) -> Any:
            async def call(batch: KVBatchMeta | None = None) -> dict[str, float]:
                return {"data/bytes_read": 100.0, "actor/lr": 1e-3}

            return call

    decoupled = config(actor={"use_kl_loss": True}, rollout_correction=RolloutCorrectionConfig(bypass_mode=False))
    metrics = await run(Update(decoupled, Counting(), None, events, "train"))
    assert (metrics["data/bytes_read"], metrics["actor/lr"]) == (300.0, 1e-3)
