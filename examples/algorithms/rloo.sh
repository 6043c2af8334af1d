#!/usr/bin/env bash
# RLOO: each sample's baseline is the mean of the other samples of its prompt.
# https://arxiv.org/abs/2402.14740
PATH="$(dirname "$0")/../../.venv/bin:$PATH"
exec streamrl train experiment=calculator \
    algorithm.adv_estimator=rloo \
    trainer.experiment_name=rloo "$@"
