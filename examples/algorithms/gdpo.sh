#!/usr/bin/env bash
# GDPO: the reward gives several numbers; each is compared within the group by itself before they are added.
# https://arxiv.org/abs/2601.05242
PATH="$(dirname "$0")/../../.venv/bin:$PATH"
exec streamrl train experiment=calculator \
    algorithm.adv_estimator=gdpo \
    algorithm.gdpo_reward_keys='[correct,answered]' \
    algorithm.gdpo_reward_weights='[1.0,0.25]' \
    reward.custom_reward_function.name=compute_parts \
    trainer.experiment_name=gdpo "$@"
