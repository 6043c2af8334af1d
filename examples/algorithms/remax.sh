#!/usr/bin/env bash
# ReMax: the baseline of a prompt is the score of its greedy answer, generated beside the samples.
# https://arxiv.org/abs/2310.10505
PATH="$(dirname "$0")/../../.venv/bin:$PATH"
exec streamrl train experiment=calculator \
    algorithm.adv_estimator=remax \
    trainer.experiment_name=remax "$@"
