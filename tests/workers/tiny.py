"""A tiny model, rows sampled from nobody in particular, and a store in memory: what the actor's tests need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.config.sections.actor import ActorConfig, ModelConfig, OptimConfig
from streamrl.config.sections.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from streamrl.workers.settings import ActorSettings
from transfer_queue.metadata import KVBatchMeta

VOCAB = 64


def make_model(directory: Path, *, kind: str = "qwen2", hidden: int = 32, layers: int = 2, seed: int = 0) -> str:
    """Save a random causal LM; its directory."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    if kind == "gpt2":
        model: Any = GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB, n_embd=hidden, n_layer=layers, n_head=4, n_positions=256,
                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        )  # fmt: skip
    else:
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCAB, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
            )
        )  # fmt: skip
    model.save_pretrained(directory)
    return str(directory)


def settings(
    path: str, *, bypass: bool = True, lr: float = 1e-3, algorithm: dict[str, Any] | None = None,
    correction: dict[str, Any] | None = None, **actor: Any,
) -> ActorSettings:  # fmt: skip
    actor = {"ppo_max_token_len_per_gpu": 256, "strategy": "fsdp2", **actor}
    return ActorSettings(
        model=ModelConfig(path=path, enable_gradient_checkpointing=False),
        actor=ActorConfig(optim=OptimConfig(lr=lr), **actor),
        algorithm=AlgorithmConfig(
            rollout_correction=RolloutCorrectionConfig(bypass_mode=bypass, **(correction or {})), **(algorithm or {})
        ),
    )


class MemoryStore:
    """Implements RowStore: columns as lists of arrays. Remembers which fields were read."""

    def __init__(self, columns: dict[str, dict[str, np.ndarray]]) -> None:
        self.columns = columns
        self.reads: list[list[str]] = []
        self.tags: dict[str, dict[str, Any]] = {}

    def get(self, partition: str, keys: list[str], fields: list[str] | None = None) -> dict[str, list[np.ndarray]]:
        self.reads.append(list(fields or self.columns))
        return {name: [self.columns[name][key] for key in keys] for name in fields or self.columns}

    def put(self, partition: str, keys: list[str], columns: Any, *, tags: Any = None, token: Any = None) -> None:
        for name, values in columns.items():
            self.columns.setdefault(name, {}).update(zip(keys, values, strict=True))
        self.tags.update(zip(keys, tags or [{}] * len(keys), strict=True))

    def close(self) -> None: ...

    def save(self, path: Path) -> str:
        """For `FileStore`: other processes read it."""
        from safetensors.numpy import save_file

        save_file(
            {f"{name}/{key}": values for name, rows in self.columns.items() for key, values in rows.items()}, path
        )
        return str(path)


class FileStore(MemoryStore):
    """A saved MemoryStore, opened where it is used."""

    def __init__(self, path: str) -> None:
        from safetensors.numpy import load_file

        columns: dict[str, dict[str, np.ndarray]] = {}
        for name, values in load_file(path).items():
            field, key = name.split("/", 1)
            columns.setdefault(field, {})[key] = values
        super().__init__(columns)


def make_rows(prompts: int, n: int, *, seed: int = 0, longest: int = 24) -> tuple[KVBatchMeta, MemoryStore]:
    """`prompts` groups of `n` ragged rows with tool text in the middle, and the references to them."""
    rng = np.random.default_rng(seed)
    columns: dict[str, dict[str, np.ndarray]] = {
        name: {} for name in ("input_ids", "response_mask", "rollout_log_probs", "weight_versions")
    }
    keys, tags = [], []
    for prompt in range(prompts):
        for session in range(n):
            key = f"p{prompt}_{session}_0"
            p, r = int(rng.integers(3, 9)), int(rng.integers(4, longest))
            mask = np.ones(r, np.int64)
            mask[r // 3 : r // 2] = 0
            keys.append(key)
            tags.append({"prompt_len": p, "response_len": r, "seq_len": p + r})
            columns["input_ids"][key] = rng.integers(0, VOCAB, p + r)
            columns["response_mask"][key] = mask
            columns["rollout_log_probs"][key] = (rng.normal(-4.0, 0.3, r) * mask).astype(np.float32)
            columns["weight_versions"][key] = np.where(mask > 0, rng.integers(0, 4, r), -1).astype(np.int32)
    info = {
        "advantages": {key: float(rng.normal()) for key in keys}, "mini_batch_size": max(prompts // 2, 1),
        "temperature": 1.0, "version": 3,
    }  # fmt: skip
    return KVBatchMeta(keys, tags, "train", extra_info=info), MemoryStore(columns)


def load_json(path: Path) -> Any:
    return json.loads(path.read_text())
