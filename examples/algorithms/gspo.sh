#!/usr/bin/env bash
# GSPO: one ratio per sequence (the geometric mean of its tokens'), clipped where it is tiny.
# https://arxiv.org/abs/2507.18071
PATH="$(dirname "$0")/../../.venv/bin:$PATH"
exec streamrl train experiment=calculator \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.clip_ratio_low=3e-2 \
    actor_rollout_ref.actor.clip_ratio_high=4e-2 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    trainer.experiment_name=gspo "$@"
