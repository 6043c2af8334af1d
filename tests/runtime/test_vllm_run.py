"""The calculator job on vLLM, as its user starts it: new weights reach the server, its numbers are the trainer's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrl.monitor.events import read_events
from streamrl.monitor.metrics_log import read_metrics
from streamrl.recording.record import RecordedRow, Recording
from tests.runtime.jobs import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MODEL = "examples/calculator/model"
STEPS, CLOSE = 4, 1e-3


def spans(mask: np.ndarray) -> list[tuple[int, int]]:
    """(first, end) of the stretches where it is 1."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def check_row(row: RecordedRow, model: torch.nn.Module, stop: int, budget: int) -> None:
    """The loss mask is on what the model sampled and on nothing else, and vLLM's log-probs there are the model's."""
    ids, mask = row.columns["input_ids"], row.columns["response_mask"]
    told, versions = row.columns["rollout_log_probs"], row.columns["weight_versions"]
    prompt = len(ids) - len(mask)
    sampled = mask == 1
    assert sampled[0]
    assert (told[~sampled] == 0).all()
    assert (told[sampled] < 0).any()
    response = ids[prompt:]
    for first, end in spans(mask):
        assert stop not in response[first : end - 1].tolist()
        assert response[end - 1] == stop or len(mask) >= budget, "a turn ends with the stop token or the budget"
    if set(versions[sampled].tolist()) == {0}:
        with torch.no_grad():
            logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, prompt - 1 : -1]
        wanted = logits.log_softmax(-1).gather(-1, torch.from_numpy(response.astype(np.int64))[:, None])[:, 0].numpy()
        np.testing.assert_allclose(told[sampled], wanted[sampled], atol=CLOSE)


def test_the_calculator_job_on_vllm_has_the_trainers_log_probs_its_loss_mask_and_its_newest_weights(
    tmp_path: Path,
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed (make vllm)")
    job = Job(
        tmp_path, "actor_rollout_ref.rollout.name=vllm", "trainer.record=true", "trainer.v1.trainer_mode=sync",
        "algorithm.rollout_correction.bypass_mode=false", "trainer.val_before_train=false",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=67108864", steps=STEPS, seconds=400,
    )  # fmt: skip
    job.start()
    job.wait_for_step(1)
    children = job.processes()
    assert any("EngineCore" in child.name() for child in children)
    job.finish()
    job.check_accounts()
    recording = Recording(job.path)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    stop = model.generation_config.eos_token_id
    rows = {step: [row for uid in done.uids for row in recording.group(uid)] for step, done in recording.steps.items()}
    for step, found in rows.items():
        made = {int(v) for row in found for v in row.columns["weight_versions"][row.columns["response_mask"] == 1]}
        assert made == {step - 1}, "the servers have the weights of the step before"
        for row in found:
            check_row(row, model, stop, 64)
    synced = [event.fields for event in read_events(job.path) if (event.kind, event.name) == ("span", "publish")]
    assert [each["version"] for each in synced] == list(range(STEPS + 1))
    assert len({each["digest"] for each in synced}) == STEPS + 1, "every step changes the weights"
    for each in synced:
        assert each["checksums"] == {"server-0": each["digest"]}, "what it serves is what the trainer has"
    for line in read_metrics(job.path):
        assert line["training/rollout_probs_diff_max"] <= CLOSE
    assert not psutil.wait_procs(children, timeout=120)[1]
