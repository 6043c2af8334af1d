"""Checks of `algorithm.*` and `reward.*`: an estimator, a loss and a correction that fit together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from agent_loop.plugins import PluginError
from agent_loop.rows import MAX_COMPONENTS
from streamrl.algorithms.advantages import estimator
from streamrl.algorithms.thresholds import parse_threshold, rejection_rules
from streamrl.config.derive import estimator_needs
from streamrl.config.paths import split_file_object
from streamrl.config.root import StreamRLConfig
from streamrl.config.signatures import ESTIMATOR, misfits

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
COMPARES_SAMPLES = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "grpo_passk", "gpg", "gdpo")
"""Estimators that are 0 for a group of one."""
SELECTING_LOSSES = ("clip_cov", "kl_cov")
"""policy_losses.NEEDS_SELECTION, which would import torch."""


def algorithm(config: StreamRLConfig) -> Iterator[str]:
    algorithm, n = config.algorithm, config.actor_rollout_ref.rollout.n
    try:
        estimator(algorithm.adv_estimator)
    except PluginError as error:
        yield f"algorithm.adv_estimator: {error}"
    else:
        if of_file := split_file_object(algorithm.adv_estimator):
            found = misfits(Path(of_file[0]), of_file[1], ESTIMATOR)
            yield from (f"algorithm.adv_estimator: {problem}" for problem in found)
    if algorithm.adv_estimator in COMPARES_SAMPLES and n < 2:
        yield (
            f"{ROLLOUT}.n={n}: algorithm.adv_estimator={algorithm.adv_estimator} compares the samples of a prompt and "
            "needs n >= 2"
        )
    yield from _components(config)
    if config.trainer.replay and "baseline" in estimator_needs(algorithm):
        yield f"trainer.replay: the greedy answers that {algorithm.adv_estimator} compares with are not recorded"
    if algorithm.filter_groups.enable and n < 2:
        yield f"{ROLLOUT}.n={n}: algorithm.filter_groups.enable=true would filter out every group; it needs n >= 2"
    if "values" in estimator_needs(algorithm) and not config.critic.enable:
        yield f"critic.enable=false: algorithm.adv_estimator={algorithm.adv_estimator} needs a critic's values"
    buffer, longest = config.reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= longest:
        yield (
            f"reward.overlong_buffer.len={buffer.len} must be above 0 and at most data.max_response_length={longest}"
        )


def _components(config: StreamRLConfig) -> Iterator[str]:
    """Of scores, for the estimators that take them apart."""
    algorithm, key = config.algorithm, "algorithm.gdpo_reward_keys"
    names, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    chosen = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if "components" not in estimator_needs(algorithm):
        if names or weights is not None:
            yield f"{key} and its weights have no effect with {chosen}; leave them out, or use gdpo"
        return
    if not names:
        yield f"{chosen} needs {key}: names of numbers that the reward returns in its dict, e.g. [correct,format]"
    if len(names) > MAX_COMPONENTS:
        yield f"{key} has {len(names)} names; at most {MAX_COMPONENTS} components travel with a row"
    if len(set(names)) < len(names):
        yield f"{key}={list(names)} names a component twice"
    if weights is not None and (len(weights) != len(names) or not all(map(math.isfinite, weights))):
        yield f"algorithm.gdpo_reward_weights={list(weights)}: give one finite number per component ({len(names)})"
    if algorithm.use_kl_in_reward or config.reward.overlong_buffer.enable:
        yield (
            f"{chosen} compares components, and a penalty on their sum would be lost: set "
            "algorithm.use_kl_in_reward=false (actor.use_kl_loss is there) and reward.overlong_buffer.enable=false"
        )


def _current(config: StreamRLConfig) -> Iterator[str]:
    """What pi_old=current cannot have: further steps on the same samples, and log-probs before the step."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    chosen, correction = "algorithm.rollout_correction.pi_old=current", algorithm.rollout_correction
    batch, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    if actor.ppo_epochs > 1 or batch != mini:
        yield (
            f"{chosen} takes one optimizer step per set of weights, since from the second on the policy has moved and "
            f"its ratio is still 1: data.train_batch_size={batch} must be {ACTOR}.ppo_mini_batch_size={mini}, and "
            f"ppo_epochs={actor.ppo_epochs} must be 1; or use pi_old=snapshot"
        )
    if correction.rollout_is or correction.rollout_rs:
        yield (
            f"{chosen} has no log-probs before the step, which rollout_is and rollout_rs need; use pi_old=snapshot, or "
            "pi_old=bypass with loss_type=reinforce"
        )
    if algorithm.use_kl_in_reward:
        yield f"{chosen} has no log-probs for algorithm.use_kl_in_reward; use {ACTOR}.use_kl_loss, or pi_old=snapshot"
    if actor.policy_loss.loss_mode in SELECTING_LOSSES:
        yield f"{chosen} has no log-probs for loss_mode={actor.policy_loss.loss_mode} to select by; use pi_old=snapshot"


def correction(config: StreamRLConfig) -> Iterator[str]:
    correction, key = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    rollout = config.actor_rollout_ref.rollout
    if correction.loss_type == "reinforce" and not correction.bypass_mode:
        yield f"{key}.loss_type=reinforce needs {key}.bypass_mode=true (there is no other old policy in it)"
    if correction.pi_old and correction.bypass_mode != (correction.pi_old == "bypass"):
        given = str(correction.bypass_mode).lower()
        yield f"{key}.bypass_mode={given} contradicts {key}.pi_old={correction.pi_old}; give one of them"
    elif correction.pi_old == "current":
        yield from _current(config)
    try:
        parse_threshold(correction.rollout_is_threshold)
        if correction.rollout_rs is not None:
            rejection_rules(correction.rollout_rs, correction.rollout_rs_threshold)
    except ValueError as error:
        yield f"{key}: {error}"
    cut, drift = rollout.top_p < 1 or rollout.top_k > 0, config.actor_rollout_ref.actor.target_kl
    if cut and (correction.bypass_mode or correction.rollout_is or correction.rollout_rs or drift):
        yield (
            f"{ROLLOUT}.top_p={rollout.top_p:g} top_k={rollout.top_k}: the servers' log-probs are then those of the "
            f"cut distribution and no policy's; set {key}.bypass_mode=false (old log-probs are then computed again), "
            f"rollout_is=null, rollout_rs=null and {ACTOR}.target_kl=null, or top_p=1 top_k=-1"
        )
