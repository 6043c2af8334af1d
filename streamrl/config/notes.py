"""What is allowed, and worth a line at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.config.root import StreamRLConfig

ACTOR = "actor_rollout_ref.actor"
OF_SEQUENCES = ("gspo", "geo_mean")
"""Policy losses whose papers average over sequences."""


def notes(config: StreamRLConfig) -> list[str]:
    """One line each. `config` is a derived one."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    found, loss = [], actor.policy_loss.loss_mode
    if loss in OF_SEQUENCES and correction.loss_type == "ppo_clip" and actor.loss_agg_mode != "seq-mean-token-mean":
        found.append(
            f"{ACTOR}.loss_agg_mode={actor.loss_agg_mode} with loss_mode={loss}: its paper averages over sequences, "
            "each weighing the same; that is seq-mean-token-mean"
        )
    if correction.pi_old == "current":
        limit = f"{ACTOR}.target_kl={actor.target_kl:g}" if actor.target_kl else f"nothing ({ACTOR}.target_kl would)"
        found.append(
            "algorithm.rollout_correction.pi_old=current has no trust region: the ratio is always 1, no clip ever "
            f"acts, and what holds stale samples or a high learning rate back is {limit}"
        )
    if config.reward.reward_model.enable and config.reward.function:
        found.append(
            f"the score that counts is that of reward.reward_model; what {config.reward.function} gives is told "
            "beside it. A function that is to count asks a model itself (reward.judge)"
        )
    return [*found, *_ahead(config), *_micro_batches(config)]


def _ahead(config: StreamRLConfig) -> Iterator[str]:
    """More batches ahead than may be old."""
    v1 = config.trainer.v1
    sampler, section = v1.sampler, {"colocate_async": v1.colocate_async, "separate_async": v1.separate_async}
    if v1.trainer_mode == "sync" or sampler.max_off_policy_threshold is None:
        return
    ahead, bound = section[v1.trainer_mode].num_warmup_batches, sampler.max_off_policy_threshold - 1
    if sampler.max_off_policy_strategy is not None and ahead > bound:
        yield (
            f"trainer.v1.{v1.trainer_mode}.num_warmup_batches={ahead:g} with max_off_policy_threshold={bound + 1}: "
            f"batches issued ahead are at most {bound}, since more would be too old when the trainer comes to them"
        )


def _micro_batches(config: StreamRLConfig) -> Iterator[str]:
    """verl cuts by rows unless it is told otherwise."""
    actor, ref, critic = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic
    rows = {
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu,
        "critic.ppo_micro_batch_size_per_gpu": critic.use_dynamic_bsz and critic.ppo_micro_batch_size_per_gpu,
    }
    if ref.log_prob_micro_batch_size_per_gpu != actor.ppo_micro_batch_size_per_gpu:  # its default
        rows["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"] = (
            ref.log_prob_use_dynamic_bsz and ref.log_prob_micro_batch_size_per_gpu
        )
    if given := [f"{key}={number}" for key, number in rows.items() if number]:
        yield (
            f"{', '.join(given)}: micro-batches are cut by tokens (ppo_max_token_len_per_gpu), since use_dynamic_bsz "
            "is true here by default; with use_dynamic_bsz=false they have these rows"
        )
