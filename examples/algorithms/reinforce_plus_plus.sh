#!/usr/bin/env bash
# REINFORCE++: discounted returns per token, whitened over the batch, instead of a comparison within the prompt.
# https://arxiv.org/abs/2501.03262
PATH="$(dirname "$0")/../../.venv/bin:$PATH"
exec streamrl train experiment=calculator \
    algorithm.adv_estimator=reinforce_plus_plus \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_type=k2 \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    trainer.experiment_name=reinforce_plus_plus "$@"
