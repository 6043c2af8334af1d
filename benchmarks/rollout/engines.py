"""The `engines` part of benchmarks.rollout: how fast the embedded engine is, and how fast it and vLLM let go.

tokens/s   32 requests at the same time on the calculator model, `torch` and, where it is installed, `vllm` in turn; the
           medians of their rounds. Each engine has one thread, and is asked through the same protocol.
abort      2,000 requests in flight (in the slots and waiting; in `vllm` all have a slot): from the call to the last
           answer, the longer one of two in a row, and tokens kept
pause      with 5,000 requests waiting: from the call until no step is made
bits       batch-invariant mode: tokens and log-probs of requests alone against those in random company
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time

from agent_loop.llm.protocol import Generation, LLMServer, SamplingParams
from benchmarks.bars import Bar
from streamrl.rollout.building import build_server
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.rollout.vllm.options import installed

CALCULATOR = "examples/calculator/model"
VOCAB, LENGTH = 256, 256
CONCURRENT, NEW_TOKENS, ROUNDS = 32, 128, 5
IN_FLIGHT, WAITING, SLOTS = 2000, 5000, 256


def engines() -> list[Bar]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        gone = asyncio.run(_letting_go("torch", SLOTS))
        if installed():
            gone += asyncio.run(_letting_go("vllm", IN_FLIGHT))
        return [*asyncio.run(_speed()), *gone, asyncio.run(_bits())]
    finally:
        torch.set_num_threads(before)


def _server(name: str, slots: int, **more: object) -> LLMServer:
    config = RolloutServerConfig(name, CALCULATOR, max_num_seqs=slots, max_model_len=LENGTH, **more)  # pyright: ignore[reportArgumentType]
    return build_server(config)


def _prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(16, 48))] for _ in range(count)]


async def _tokens_per_second(server: LLMServer, seed: int) -> float:
    began = time.perf_counter()
    calls = [
        server.generate(f"{seed} {i}", prompt, SamplingParams(max_tokens=NEW_TOKENS, seed=seed * 1000 + i))
        for i, prompt in enumerate(_prompts(CONCURRENT, seed))
    ]
    made = sum(len(got.token_ids) for got in await asyncio.gather(*calls))
    return made / (time.perf_counter() - began)


async def _speed() -> list[Bar]:
    names = ["torch", *(["vllm"] if installed() else [])]
    servers = {name: _server(name, CONCURRENT) for name in names}
    for server in servers.values():
        await _tokens_per_second(server, 0)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(1, ROUNDS + 1):
        for name, server in servers.items():
            rates[name].append(await _tokens_per_second(server, turn))
    for server in servers.values():
        await server.close()
    medians = {name: statistics.median(found) for name, found in rates.items()}
    bars = [Bar(f"{name}: tokens of {CONCURRENT} requests", rate, "tokens/s") for name, rate in medians.items()]
    if "vllm" not in names:
        print("vLLM is not installed: the torch engine is compared with nothing (make vllm)", file=sys.stderr)
        return bars
    share = statistics.median(mine / other for mine, other in zip(rates["torch"], rates["vllm"], strict=True))
    return [*bars, Bar("torch engine: share of vLLM's tokens/s", share, "", 0.6)]


async def _letting_go(name: str, slots: int) -> list[Bar]:
    server = _server(name, slots)
    sampling = SamplingParams(max_tokens=200)

    async def busy(turn: str, count: int) -> list[asyncio.Task[Generation]]:
        tasks = [
            asyncio.ensure_future(server.generate(f"{turn} {i}", prompt, sampling))
            for i, prompt in enumerate(_prompts(count, count))
        ]
        made = (await server.load()).tokens_generated
        while (  # noqa: ASYNC110  # a server announces no tokens
            (load := await server.load()).running < slots or load.tokens_generated < made + 5 * slots
        ):
            await asyncio.sleep(0.01)
        return tasks

    async def empty(tasks: list[asyncio.Task[Generation]]) -> list[Generation]:
        await server.abort()
        return await asyncio.gather(*tasks)

    aborts, lost = [], 0
    for turn in ("first", "second"):
        tasks = await busy(turn, IN_FLIGHT)
        seen = await server.progress({f"{turn} {i}": 0 for i in range(IN_FLIGHT)})
        began = time.perf_counter()
        answers = await empty(tasks)
        aborts.append(time.perf_counter() - began)
        lost += sum(len(answers[int(id.split()[1])].token_ids) < len(piece.token_ids) for id, piece in seen.items())
    tasks = await busy("waiting", WAITING + slots)
    began = time.perf_counter()
    await server.pause()
    pause = time.perf_counter() - began
    await empty(tasks)
    await server.close()
    return [
        Bar(f"{name}: abort of {IN_FLIGHT} requests in flight, {slots} slots", max(aborts), "s", 2.0, "at most"),
        Bar(f"{name}: requests whose tokens an abort lost", lost, "requests", 0, "at most", always=True),
        Bar(f"{name}: pause with {WAITING} requests waiting", pause, "s", 1.0, "at most"),
    ]


async def _bits() -> Bar:
    """Each request alone, then all in an order and company of their own, three times."""
    server = _server("torch", 24, invariant=True)
    rng = random.Random(7)
    requests = [
        (prompt, SamplingParams(max_tokens=rng.randint(1, 40), seed=i, temperature=rng.choice([0.0, 0.7, 1.0])))
        for i, prompt in enumerate(_prompts(40, 7))
    ]

    async def one(turn: int, i: int) -> tuple[list[int], list[float]]:
        got = await server.generate(f"{turn} {i}", *requests[i])
        return got.token_ids, got.log_probs

    alone = [await one(0, i) for i in range(len(requests))]
    differ = 0
    for turn in range(1, 4):
        order = rng.sample(range(len(requests)), len(requests))
        found = await asyncio.gather(*(one(turn, i) for i in order))
        differ += sum(alone[i] != got for i, got in zip(order, found, strict=True))
    await server.close()
    name = "torch engine, invariant: requests with other bits in company"
    return Bar(name, differ, "requests", 0, "at most", always=True)
