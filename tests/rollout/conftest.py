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
    if kind == "wide":  # heads of 32, the least that vLLM knows on a CPU
        sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        return Qwen2ForCausalLM(Qwen2Config(**common | sizes, tie_word_embeddings=True))
    return LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=4, tie_word_embeddings=False))


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    dirs: dict[str, str] = {}
    for kind in ("qwen2", "llama", "wide"):
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


@pytest.fixture(scope="module")
def vllm_engine(model_dirs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A `KeptEngine` with the model "wide"; skips where vLLM is not installed."""
    pytest.importorskip("vllm", reason="vLLM is not installed (make vllm)")
    from streamrl.rollout.server_config import RolloutServerConfig
    from streamrl.weight_sync import WeightStore
    from tests.rollout.kept_vllm import KeptEngine

    weights = tmp_path_factory.mktemp("vllm") / "weights"
    WeightStore(weights).write(tiny_model("wide").state_dict(), 0)
    options = {"engine_kwargs": {"kv_cache_memory_bytes": 64 << 20, "block_size": 32}}
    config = RolloutServerConfig(
        "vllm", model_dirs["wide"], str(weights), max_num_seqs=4, max_model_len=512, vllm=options
    )
    engine = KeptEngine(config)
    yield engine
    engine.end()


@pytest.fixture
def fake_sglang() -> Iterator[tuple[str, str]]:
    """(url, key) of a server with the published interface and no model."""
    from tests.rollout.fake_sglang import KEY, FakeSglang

    fake = FakeSglang(vocab_size=VOCAB, slots=4, context_length=520)
    yield fake.url, KEY
    fake.close()


@pytest.fixture(scope="module")
def real_sglang(model_dirs: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(url, key) of SGLang with the tiny qwen2; skips where it is not installed."""
    from tests.rollout.kept_sglang import started

    yield from started(model_dirs["qwen2"])
