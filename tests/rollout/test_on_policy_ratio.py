"""What the engine reports while it samples is what the training ranks compute of the same tokens: a ratio of 1."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent_loop.llm.protocol import SamplingParams
from streamrl.rollout.noise import uniforms
from streamrl.rollout.torch.batch_engine import BatchEngine, Request
from streamrl.rollout.torch.loading import load_model
from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup
from streamrl.workers.actor import ActorWorker
from tests.workers.tiny import MemoryStore, settings
from transfer_queue.metadata import KVBatchMeta

VOCAB = 64
CALCULATOR = str(Path("examples/calculator/model"))


def sampled(path: str, temperature: float, *, rows: int = 24) -> tuple[KVBatchMeta, MemoryStore]:
    """Rows from the engine, requests joining while others run."""
    rng = random.Random(7)
    engine = BatchEngine(load_model(path, device="cpu", dtype="float32", max_model_len=160), slots=5, max_len=160)
    prompts = {f"p{i}_0_0": [rng.randrange(VOCAB) for _ in range(rng.randint(2, 40))] for i in range(rows)}
    for key, prompt in prompts.items():
        sampling = SamplingParams(max_tokens=rng.randint(1, 60), temperature=temperature)
        engine.submit(Request(key, prompt, sampling, uniforms(3, int(key[1:].split("_")[0]), 0, sampling.max_tokens)))
    columns: dict[str, dict[str, np.ndarray]] = {
        name: {} for name in ("input_ids", "response_mask", "rollout_log_probs")
    }
    while engine.has_work:
        for done in engine.step():
            ids = done.generation.token_ids
            columns["input_ids"][done.id] = np.array([*prompts[done.id], *ids])
            columns["response_mask"][done.id] = np.ones(len(ids), np.int64)
            columns["rollout_log_probs"][done.id] = np.array(done.generation.log_probs, np.float32)
    keys = list(columns["input_ids"])
    tags = [
        {"response_len": len(columns["response_mask"][key]), "seq_len": len(columns["input_ids"][key])} for key in keys
    ]
    return KVBatchMeta(keys, tags, "train", extra_info={"temperature": temperature}), MemoryStore(columns)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("model", ["qwen2", "llama", "calculator"])
def test_the_ratio_of_training_and_rollout_policy_is_one_for_any_micro_batch(
    model_dirs: dict[str, str], model: str, temperature: float
) -> None:
    path = model_dirs.get(model, CALCULATOR)
    batch, store = sampled(path, temperature)
    chosen = settings(path)
    for packed in (True, False):
        for tokens in (1, 200, 100_000):
            options = replace(
                chosen,
                actor=replace(chosen.actor, ppo_max_token_len_per_gpu=tokens),
                model=replace(chosen.model, use_remove_padding=packed),
            )
            group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, options, store))
            group.init_model()
            group.compute_log_prob(batch)
            group.shutdown()
            off = [
                np.abs(np.expm1(store.columns["old_log_probs"][k] - store.columns["rollout_log_probs"][k])).max()
                for k in batch.keys
            ]
            assert max(off) <= 1e-4, f"packed={packed}, micro-batches of {tokens} tokens"
