"""The calculator job on SGLang, as its user starts it: new weights reach the server, its numbers are the trainer's."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrl.monitor.metrics_log import read_metrics
from streamrl.recording.record import Recording
from tests.rollout.sglang import environment
from tests.runtime.jobs import Job
from tests.runtime.test_vllm_run import CLOSE, MODEL, check_row

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 3
ON_CPU = "{attention_backend: torch_native, sampling_backend: pytorch, max_total_tokens: 40000, disable_overlap_schedule: true}"  # noqa: E501


def test_the_calculator_job_on_sglang_has_the_trainers_log_probs_its_loss_mask_and_its_newest_weights(
    tmp_path: Path,
) -> None:
    python = os.environ.get("SGLANG_PYTHON") or environment.python(environment.directory())
    if not python:
        pytest.skip("SGLang is not installed (make sglang-env)")
    key = "actor_rollout_ref.rollout"
    job = Job(
        tmp_path, f"{key}.name=sglang", f"{key}.sglang.python={python}", f"{key}.sglang.engine_kwargs={ON_CPU}",
        "trainer.record=true", "trainer.v1.trainer_mode=sync", "algorithm.rollout_correction.bypass_mode=false",
        "trainer.val_before_train=false", steps=STEPS, seconds=500,
    )  # fmt: skip
    job.start()
    job.wait_for_step(1)
    children = job.processes()
    job.finish()
    job.check_accounts()
    recording = Recording(job.path)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    stop = model.generation_config.eos_token_id
    for step, done in recording.steps.items():
        rows = [row for uid in done.uids for row in recording.group(uid)]
        made = {int(v) for row in rows for v in row.columns["weight_versions"][row.columns["response_mask"] == 1]}
        assert made == {step - 1}, "the servers have the weights of the step before"
        for row in rows:
            check_row(row, model, stop, 64)
    for line in read_metrics(job.path):
        assert line["training/rollout_probs_diff_max"] <= CLOSE
    assert not psutil.wait_procs(children, timeout=120)[1]
