"""What a new version of the weights costs: in all, and for the requests in flight.

total   from the ranks' parameters until the `torch` engine serves them, 270 MB by `shm`, against copying them twice;
        until `vllm` serves them, where it is installed, against the part of it that is vLLM's own reload from memory
pause   how long the engine makes no token for it, 1.4 MB, with requests in flight
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from agent_loop.llm.protocol import SamplingParams
from benchmarks.bars import Bar
from streamrl.rollout.building import build_server
from streamrl.rollout.manager import LLMServerManager
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.rollout.vllm.options import installed
from streamrl.rollout.vllm.server import VllmServer
from streamrl.weight_sync.publisher import SyncSettings, publisher
from streamrl.weight_sync.ranks import OneRank
from streamrl.weight_sync.shares import shares_of

SYNCS = 12
FRESH = 4
"""The first ones, which pay for pages that later ones write over, and for mapping them."""


def model(hidden: int, layers: int, vocab: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
        )
    )  # fmt: skip


async def syncs(
    trained: Any, home: Path, requests: int, name: str = "torch"
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each sync, of its pause, and of copying the same bytes twice just before it; of vLLM instead of the
    last, of its own reload."""
    trained.save_pretrained(home / "model")
    config = RolloutServerConfig(
        name=name, model_path=str(home / "model"), weights_dir=str(home / "weights"), max_num_seqs=8, max_model_len=2000
    )
    server = await asyncio.to_thread(build_server, config)
    manager, ranks = LLMServerManager({"server": server}), OneRank()
    writer = publisher(SyncSettings(staged=True), str(home / "weights"), ranks)
    sampling = SamplingParams(max_tokens=1900)
    flying = [asyncio.ensure_future(server.generate(f"r{i}", [1, 2], sampling)) for i in range(requests)]
    parameters = list(trained.parameters())
    aside = [torch.empty_like(parameter) for parameter in parameters]
    totals, pauses, copies = [], [], []
    for version in range(1, SYNCS + FRESH + 1):
        began = time.perf_counter()
        with torch.no_grad():
            for there, parameter in zip(aside, parameters, strict=True):
                there.copy_(parameter)
            for there, parameter in zip(aside, parameters, strict=True):
                parameter.copy_(there)
        copied = time.perf_counter()
        info = writer.publish(shares_of(trained.named_parameters(), 0, 1), version)
        assert info is not None
        done = await manager.update_weights(info)
        totals.append(time.perf_counter() - copied)
        pauses.append(done.stages["pause"])
        copies.append(server.reload_seconds if isinstance(server, VllmServer) else copied - began)
    for request in flying:
        request.cancel()
    await manager.close()
    return totals[FRESH:], pauses[FRESH:], copies[FRESH:]


def weights() -> list[Bar]:
    torch.set_num_threads(1)
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as home:
        totals, _, copies = asyncio.run(syncs(model(1024, 7, 2048), Path(home), 0))
        ratio = median(total / copy for total, copy in zip(totals, copies, strict=True))
    with tempfile.TemporaryDirectory(dir=root) as home:
        _, pauses, _ = asyncio.run(syncs(model(128, 2, 320), Path(home), 4))
    bars = [
        Bar("sync of a 270 MB model, by shm, against copying it twice", ratio, "x", 3.0, "at most"),
        Bar("pause of a 1.4 MB model, median", 1e3 * median(pauses), "ms", 50.0, "at most"),
    ]
    return bars + (_vllm(root) if installed() else [])


def _vllm(root: str | None) -> list[Bar]:
    with tempfile.TemporaryDirectory(dir=root) as home:
        totals, _, reloads = asyncio.run(syncs(model(1024, 7, 2048), Path(home), 0, "vllm"))
    ratio = median(total / reload for total, reload in zip(totals, reloads, strict=True))
    with tempfile.TemporaryDirectory(dir=root) as home:
        _, pauses, _ = asyncio.run(syncs(model(128, 2, 320), Path(home), 4, "vllm"))
    return [
        Bar("vllm: sync of a 270 MB model, by shm, against its own reload", ratio, "x", 1.3, "at most"),
        Bar("vllm: its own reload, median", median(reloads), "s"),
        Bar("vllm: pause of a 1.4 MB model, median", 1e3 * median(pauses), "ms", 50.0, "at most"),
    ]
