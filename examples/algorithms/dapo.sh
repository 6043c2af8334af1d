#!/usr/bin/env bash
# DAPO: GRPO without a KL penalty, with an asymmetric clip, a token mean, dynamic sampling (groups whose samples all
# scored the same are replaced by others while generation goes on) and a soft punishment of overlong answers.
# Short here: once nearly all answers are right, nearly all groups are filtered out, and a step waits for the few others.
# https://arxiv.org/abs/2503.14476
PATH="$(dirname "$0")/../../.venv/bin:$PATH"
exec streamrl train experiment=calculator \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.max_num_gen_batches=20 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    reward.overlong_buffer.enable=true \
    reward.overlong_buffer.len=16 \
    trainer.total_training_steps=20 \
    trainer.experiment_name=dapo "$@"
