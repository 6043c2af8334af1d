#!/usr/bin/env bash
# GRPO: the samples of a prompt are compared with each other. No critic. The default of the calculator job.
# https://arxiv.org/abs/2402.03300
PATH="$(dirname "$0")/../../.venv/bin:$PATH"
exec streamrl train experiment=calculator \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    trainer.experiment_name=grpo "$@"
