"""Tiny random models for the rollout tests, made once per session; torch runs one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

VOCAB = 64


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_model() -> Any:
    return tiny_model


def tiny_model(kind: str, seed: int = 0) -> Any:
    """qwen2: biases, grouped heads, tied. llama: none of these. Weights large enough to be opinionated."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    if kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**common, num_key_value_heads=2, tie_word_embeddings=True))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
        return model
    return LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=4, tie_word_embeddings=False))


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    dirs: dict[str, str] = {}
    for kind in ("qwen2", "llama"):
        path = tmp_path_factory.mktemp(kind)
        tiny_model(kind).save_pretrained(path)
        dirs[kind] = str(path)
    return dirs


@pytest.fixture
def other_weights(tmp_path: Path) -> Any:
    """other_weights(kind, seed, version): differently seeded weights, published in a store of the test's own."""
    from streamrl.weight_sync import WeightStore

    def publish(kind: str, seed: int, version: int) -> Any:
        return WeightStore(tmp_path / "weights").write(tiny_model(kind, seed).state_dict(), version)

    return publish
