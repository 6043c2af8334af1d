"""Rollout on one GPU: the `torch` engine, the FSDP2 actor, and the weights that go from one to the other.

    python -m benchmarks.gpu.rollout --json gpu.json          # at most 8 minutes
    python -m benchmarks.gpu.rollout --device cpu --tiny      # every line of it, half a minute, no figure worth keeping

generate  tokens/s of the `torch` engine with all slots busy, on a random model of Qwen2.5-0.5B's shape
train     tokens/s of one optimizer step of the actor
copy      bytes/s of the same weights from the actor's device to the host and back
shm       seconds and bytes/s of a new version, from the actor's parameters until the engine serves them, requests in
          flight; and its share of `copy`
collective  the same by broadcast. NCCL cannot join two members on one GPU, so that it takes a second one for the engine

After each version the engine's checksum is compared with the actor's, and every request in flight has to end whole.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from agent_loop.llm.protocol import LLMServer, SamplingParams
from benchmarks.bars import Bar, report
from streamrl.config.sections.actor import ActorConfig, ModelConfig, OptimConfig
from streamrl.config.sections.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from streamrl.rollout.manager import LLMServerManager
from streamrl.rollout.torch.server import TorchServer
from streamrl.single_controller.worker import RankInfo
from streamrl.weight_sync.digest import weights_digest
from streamrl.weight_sync.publisher import Backend, SyncSettings
from streamrl.workers.actor import ActorWorker
from streamrl.workers.settings import ActorSettings
from transfer_queue.metadata import KVBatchMeta

SYNCS = 6
FRESH = 1
"""The first, which pays for pages and groups that later ones use again."""
DEADLINE = 480.0
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass(frozen=True, slots=True)
class Size:
    """`requests` of `new_tokens` each keep `slots` busy; `rows` of `row_tokens` are trained in one step."""

    model: dict[str, Any]
    slots: int
    requests: int
    new_tokens: int
    rows: int
    row_tokens: int


HALF_BILLION = Size(
    {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
     "num_attention_heads": 14, "num_key_value_heads": 2},
    slots=128, requests=256, new_tokens=256, rows=64, row_tokens=512,
)  # fmt: skip
TINY = Size(
    {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
     "num_key_value_heads": 2},
    slots=4, requests=8, new_tokens=16, rows=8, row_tokens=24,
)  # fmt: skip


class Rows:
    """Implements `RowStore` for the rows of one step, which nobody in particular sampled."""

    def __init__(self, size: Size) -> None:
        rng, count = np.random.default_rng(0), size.row_tokens
        answer = count - count // 4
        self.columns = {
            "input_ids": [rng.integers(0, size.model["vocab_size"], count) for _ in range(size.rows)],
            "response_mask": [np.ones(answer, np.int64)] * size.rows,
            "rollout_log_probs": [rng.normal(-4.0, 0.3, answer).astype(np.float32) for _ in range(size.rows)],
            "weight_versions": [np.zeros(answer, np.int32)] * size.rows,
        }
        keys = [f"p{i}_0_0" for i in range(size.rows)]
        tag = {"prompt_len": count - answer, "response_len": answer, "seq_len": count}
        advantages = {key: float(rng.normal()) for key in keys}
        info = {"advantages": advantages, "mini_batch_size": size.rows, "temperature": 1.0, "version": 1}
        self.batch = KVBatchMeta(keys, [tag] * size.rows, "train", extra_info=info)

    def get(self, partition: str, keys: list[str], fields: list[str] | None = None) -> dict[str, list[np.ndarray]]:
        at = [int(key[1:].split("_")[0]) for key in keys]
        return {name: [self.columns[name][i] for i in at] for name in fields or self.columns}

    def put(self, partition: str, keys: list[str], columns: Any, **more: Any) -> None: ...

    def close(self) -> None: ...


def save_model(size: Size, directory: Path) -> str:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**size.model, max_position_embeddings=2048, tie_word_embeddings=True)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return str(directory)


def start_actor(path: str, rows: Rows, device: Any, backend: Backend, directory: Path) -> ActorWorker:
    settings = ActorSettings(
        model=ModelConfig(path=path, enable_gradient_checkpointing=device == "cuda"),
        actor=ActorConfig(optim=OptimConfig(lr=1e-5), strategy="fsdp2"),
        algorithm=AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(bypass_mode=True)),
        weight_sync=SyncSettings(backend=backend, staged=True),
    )
    actor = ActorWorker(RankInfo(device=device), settings, rows, str(directory))
    actor.init_model()
    return actor


def settle(device: str) -> None:
    """Until the device has done what it was asked: clocks of the host are right then."""
    if device.startswith("cuda"):
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


async def generate(server: LLMServer, size: Size, name: str) -> float:
    """Tokens per second. Raises RuntimeError: a request did not end whole."""
    rng = random.Random(name)
    prompts = [[rng.randrange(size.model["vocab_size"]) for _ in range(16)] for _ in range(size.requests)]
    began = time.perf_counter()
    calls = [
        server.generate(f"{name} {i}", prompt, SamplingParams(max_tokens=size.new_tokens, seed=i))
        for i, prompt in enumerate(prompts)
    ]
    made = [len(got.token_ids) for got in await asyncio.gather(*calls)]
    if set(made) != {size.new_tokens}:
        raise RuntimeError(f"requests of {size.new_tokens} tokens ended with {sorted(set(made))}")
    return sum(made) / (time.perf_counter() - began)


def train(actor: ActorWorker, rows: Rows, device: str) -> float:
    """Tokens per second of one step."""
    began = time.perf_counter()
    actor.update_actor(rows.batch)
    settle(device)
    return sum(map(len, rows.columns["input_ids"])) / (time.perf_counter() - began)


def copy_rate(actor: ActorWorker, device: str) -> tuple[float, int]:
    """Bytes per second of the actor's parameters to the host and back, and how many bytes they are."""
    tensors = [share.local for share in actor.engine.shares()]
    host = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    back = [torch.empty_like(tensor) for tensor in tensors]
    size = sum(tensor.nbytes for tensor in tensors)
    seconds: list[float] = []
    for _ in range(4):
        began = time.perf_counter()
        with torch.no_grad():
            for source, there, again in zip(tensors, host, back, strict=True):
                there.copy_(source)
                again.copy_(there)
        settle(device)
        seconds.append(time.perf_counter() - began)
    return size / median(seconds[1:]), size


async def sync(backend: Backend, size: Size, home: Path, model: str, device: str, served: str) -> list[Bar]:
    """Versions from an actor on `device` to an engine on `served`, with requests in flight."""
    rows, weights = Rows(size), home / backend
    actor = start_actor(model, rows, device, backend, weights)
    server = TorchServer(
        model, max_num_seqs=size.slots, max_model_len=size.new_tokens + 64, device=served,
        weights_dir=str(weights) if backend == "shm" else None,
    )  # fmt: skip
    manager = LLMServerManager({"server-0": server})

    async def send(path: str) -> None:
        await asyncio.to_thread(actor.send_weights, path)

    manager.broadcast_by(send)
    rate, bytes_each = copy_rate(actor, device)
    trained = [await asyncio.to_thread(train, actor, rows, device) for _ in range(3)]
    alone = [await generate(server, size, f"{backend} {i}") for i in range(3)]
    totals: list[float] = []
    pauses: list[float] = []
    different = 0
    for version in range(1, SYNCS + FRESH + 1):
        await asyncio.to_thread(train, actor, rows, device)
        flying = asyncio.ensure_future(generate(server, size, f"{backend} version {version}"))
        await asyncio.sleep(0)
        began = time.perf_counter()
        info = await asyncio.to_thread(actor.publish_weights, version)
        assert info is not None
        done = await manager.update_weights(info)
        settle(served)
        totals.append(time.perf_counter() - began)
        if done.missing:
            raise RuntimeError(f"version {version} by {backend}: {done.missing}")
        pauses.append(done.stages["pause"])
        await flying
        if version in (1, SYNCS + FRESH):
            different += await server.weights_checksum() != weights_digest(actor.engine.full_state())
    await manager.close()
    actor.close()
    seconds = median(totals[FRESH:])
    figures = [
        Bar("torch engine: tokens generated, all slots busy", max(alone), "tokens/s"),
        Bar("actor (fsdp2): tokens trained", max(trained), "tokens/s"),
        Bar("copy of the weights to the host and back", rate, "bytes/s"),
    ]
    return [
        *(figures if backend == "shm" else []),
        Bar(f"{backend}: a version of {bytes_each / 1e6:.0f} MB, requests in flight", seconds, "s"),
        Bar(f"{backend}: of that the engine made no token for", median(pauses[FRESH:]), "s"),
        Bar(f"{backend}: rate", bytes_each / seconds, "bytes/s"),
        Bar(f"{backend}: time against copying once there and back", seconds * rate / bytes_each, "x"),
        Bar(f"{backend}: versions whose checksum is not the actor's", different, "versions", 0, "at most", always=True),
    ]


async def measure(size: Size, device: str) -> list[Bar]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as home:
        model = save_model(size, Path(home) / "model")
        async with asyncio.timeout(DEADLINE):
            bars = await sync("shm", size, Path(home), model, device, device)
            if device == "cuda" and torch.cuda.device_count() < 2:
                print("collective: not measured, there is one GPU and NCCL takes one for each member", file=sys.stderr)
                return bars
            served = "cuda:1" if device == "cuda" else device
            return [*bars, *await sync("collective", size, Path(home), model, device, served)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of some thousand numbers: does every line run?")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks.gpu.rollout: torch sees no GPU here; --device cpu --tiny rehearses it on the CPU",
            file=sys.stderr,
        )
        return 2
    if options.device == "cpu":
        torch.set_num_threads(1)
    size = TINY if options.tiny else HALF_BILLION
    return report(asyncio.run(measure(size, options.device)), options.json, quick=options.tiny)


if __name__ == "__main__":
    sys.exit(main())
