"""vLLM's log-probs of what it sampled against those that the training ranks compute. Needs `streamrl[cpu]`."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup
from streamrl.workers.actor import ActorWorker
from tests.workers.tiny import MemoryStore, settings
from transfer_queue.metadata import KVBatchMeta

MODEL = "examples/calculator/model"


@pytest.mark.slow
def test_the_log_probs_of_vllm_are_those_of_the_training_ranks() -> None:
    pytest.importorskip("vllm")
    assert largest_difference() <= 1e-3


def largest_difference() -> float:
    """Over 32 prompts at each of three temperatures, in nats."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
    import vllm  # pyright: ignore[reportMissingImports]

    llm = vllm.LLM(
        model=MODEL, dtype="float32", enforce_eager=True, gpu_memory_utilization=0.1, kv_cache_memory_bytes=64 << 20,
        max_model_len=160, skip_tokenizer_init=True, logprobs_mode="processed_logprobs",
        distributed_executor_backend="uni",
    )  # fmt: skip
    vocabulary = json.loads(Path(MODEL, "config.json").read_text())["vocab_size"]
    rng, off = random.Random(0), [0.0]
    for temperature in (0.7, 1.0, 1.3):
        prompts = [[rng.randrange(vocabulary) for _ in range(rng.randint(2, 40))] for _ in range(32)]
        sampling = [
            vllm.SamplingParams(temperature=temperature, max_tokens=64, logprobs=0, seed=i, detokenize=False)
            for i in range(len(prompts))
        ]
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        columns: dict[str, dict[str, np.ndarray]] = {"input_ids": {}, "rollout_log_probs": {}}
        for i, (prompt, output) in enumerate(zip(prompts, found, strict=True)):
            ids = list(output.outputs[0].token_ids)
            steps = zip(output.outputs[0].logprobs, ids, strict=True)
            columns["input_ids"][f"p{i}_0_0"] = np.array([*prompt, *ids])
            columns["rollout_log_probs"][f"p{i}_0_0"] = np.array([step[token].logprob for step, token in steps])
        keys = list(columns["input_ids"])
        tags = [
            {"response_len": len(columns["rollout_log_probs"][key]), "seq_len": len(columns["input_ids"][key])}
            for key in keys
        ]
        store = MemoryStore(columns)
        group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, settings(MODEL), store))
        group.init_model()
        group.compute_log_prob(KVBatchMeta(keys, tags, "train", extra_info={"temperature": temperature}))
        group.shutdown()
        off += [np.abs(store.columns["old_log_probs"][k] - columns["rollout_log_probs"][k]).max() for k in keys]
    return float(max(off))
