#!/usr/bin/env bash
# PPO: a critic estimates each token's value, GAE turns the scores into advantages, and a penalty in the reward keeps
# the policy near the reference. Generation and training take turns.
# https://arxiv.org/abs/1707.06347, https://arxiv.org/abs/1506.02438
PATH="$(dirname "$0")/../../.venv/bin:$PATH"
exec streamrl train experiment=calculator \
    trainer.v1.trainer_mode=sync \
    algorithm.adv_estimator=gae \
    algorithm.gamma=1.0 \
    algorithm.lam=0.95 \
    algorithm.use_kl_in_reward=true \
    algorithm.kl_ctrl.kl_coef=0.001 \
    critic.optim.lr=1e-3 \
    critic.model.enable_gradient_checkpointing=false \
    trainer.critic_warmup=2 \
    trainer.experiment_name=ppo "$@"
