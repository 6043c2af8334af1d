"""The embedded engine of deterministic mode: a request's tokens and log-probs, to the bit, whoever comes with it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_loop.llm.protocol import Generation, SamplingParams
from streamrl.rollout.noise import uniforms
from streamrl.rollout.requests import VersionNotServed
from streamrl.rollout.torch.batch_engine import BatchEngine, Request
from streamrl.rollout.torch.invariant import TILE, InvariantDecoder, NotInvariant
from streamrl.rollout.torch.loading import load_model
from streamrl.rollout.torch.server import TorchServer
from streamrl.weight_sync import WeightStore

VOCAB = 64
KINDS = ["qwen2", "llama"]
MAX_LEN = 200
"""Beyond the first bucket of positions, and no multiple of it."""


def engine(path: str, *, slots: int = 40) -> BatchEngine:
    model = load_model(path, device="cpu", dtype="float32", max_model_len=MAX_LEN)
    return BatchEngine(model, slots=slots, max_len=MAX_LEN, invariant=True)


def request(name: str, prompt: list[int], sampling: SamplingParams, seed: int = 0) -> Request:
    return Request(name, prompt, sampling, uniforms(seed, 0, len(prompt), sampling.max_tokens))


def run(target: BatchEngine, *requests: Request) -> dict[str, Generation]:
    for each in requests:
        target.submit(each)
    done: dict[str, Generation] = {}
    while target.has_work:
        done |= {r.id: r.generation for r in target.step()}
    return done


def bits(generation: Generation) -> tuple[list[int], list[float]]:
    return generation.token_ids, generation.log_probs


def asked(rng: random.Random, count: int) -> list[Request]:
    """Prompts and responses of any length, at several temperatures, some of them cut."""
    return [
        request(
            f"r{i}", [rng.randrange(VOCAB) for _ in range(rng.randint(1, 120))],
            SamplingParams(
                max_tokens=rng.randint(1, 70), temperature=rng.choice([0.0, 0.7, 1.0]),
                top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([-1, 5]),
            ),
            seed=i,
        )
        for i in range(count)
    ]  # fmt: skip


def copied(original: Request) -> Request:
    return Request(original.id, list(original.prompt), original.sampling, original.uniforms)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_alone_and_among_31_others_gives_the_same_bits(model_dirs: dict[str, str], kind: str) -> None:
    rng = random.Random(3)
    everyone = asked(rng, 32)
    together = run(engine(model_dirs[kind]), *map(copied, everyone))
    narrow = run(engine(model_dirs[kind], slots=3), *map(copied, reversed(everyone)))
    other = engine(model_dirs[kind])
    for each in everyone:
        alone = run(other, copied(each))[each.id]
        assert bits(alone) == bits(together[each.id]) == bits(narrow[each.id])


@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_prefix_changes_no_bit(model_dirs: dict[str, str], kind: str) -> None:
    rng = random.Random(4)
    history = [rng.randrange(VOCAB) for _ in range(150)]
    sampling = SamplingParams(max_tokens=30)
    fresh = engine(model_dirs[kind])
    missed = run(fresh, request("missed", history, sampling, seed=1))["missed"]
    warm = engine(model_dirs[kind])
    run(warm, request("before", history[:90], SamplingParams(max_tokens=20), seed=2))
    run(warm, *(request(f"sample {i}", history[:120], sampling, seed=i) for i in range(5)))
    reused = warm.tokens_reused
    hit = run(warm, request("hit", history, sampling, seed=1))["hit"]
    assert warm.tokens_reused - reused >= 119
    assert bits(hit) == bits(missed)


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_request_that_goes_on_elsewhere_gives_the_same_bits(model_dirs: dict[str, str], kind: str) -> None:
    prompt, sampling = [5, 6, 7], SamplingParams(max_tokens=40)
    whole = run(engine(model_dirs[kind]), request("whole", prompt, sampling, seed=9))["whole"]
    first = engine(model_dirs[kind])
    first.submit(request("first", prompt, sampling, seed=9))
    for _ in range(17):
        first.step()
    [begun] = first.abort(None)
    done = begun.generation.token_ids
    rest = request("rest", prompt + done, SamplingParams(max_tokens=40 - len(done)), seed=9)
    ended = run(engine(model_dirs[kind]), rest)["rest"]
    assert (done + ended.token_ids, begun.generation.log_probs + ended.log_probs) == bits(whole)


def test_its_numbers_are_the_ordinary_engines_up_to_rounding(model_dirs: dict[str, str]) -> None:
    rng = random.Random(5)
    everyone = [request(f"r{i}", [rng.randrange(VOCAB)] * 20, SamplingParams(16), seed=i) for i in range(8)]
    found = run(engine(model_dirs["qwen2"]), *map(copied, everyone))
    model = load_model(model_dirs["qwen2"], device="cpu", dtype="float32", max_model_len=MAX_LEN)
    ordinary = run(BatchEngine(model, slots=40, max_len=MAX_LEN), *map(copied, everyone))
    for name, generation in found.items():
        assert generation.token_ids == ordinary[name].token_ids
        assert torch.tensor(generation.log_probs).allclose(torch.tensor(ordinary[name].log_probs), atol=1e-4)


def test_products_that_depend_on_the_place_in_a_batch_are_refused_at_the_start(
    model_dirs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = torch.nn.functional.linear

    def uneven(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        found = linear(x, *rest)
        found[: TILE // 2] += 1e-6
        return found

    monkeypatch.setattr("torch.nn.functional.linear", uneven)
    model = load_model(model_dirs["llama"], device="cpu", dtype="float32", max_model_len=MAX_LEN)
    with pytest.raises(NotInvariant, match="trainer.deterministic"):
        InvariantDecoder(model, 4, MAX_LEN)


@pytest.fixture
def weights(tmp_path: Path, make_model: Any) -> Path:
    """Versions 0 to 2, differently seeded."""
    store = WeightStore(tmp_path / "weights", older=2)
    for version in range(3):
        store.write(make_model("llama", version).state_dict(), version)
    return store.directory


def pinned(version: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=24, weight_version=version, seed=version, **more)


async def test_requests_get_the_version_they_name_in_any_order_and_always_the_same_tokens(
    model_dirs: dict[str, str], weights: Path
) -> None:
    rng = random.Random(6)
    wanted = {f"r{i}": ([rng.randrange(VOCAB) for _ in range(20)], pinned(i % 3)) for i in range(12)}
    found: list[dict[str, tuple[list[int], list[float]]]] = []
    for names in (list(wanted), list(reversed(wanted))):
        server = TorchServer(
            model_dirs["llama"], max_num_seqs=4, max_model_len=MAX_LEN, weights_dir=str(weights), invariant=True
        )
        try:
            answers = await asyncio.gather(*(server.generate(name, *wanted[name]) for name in names))
            for name, answer in zip(names, answers, strict=True):
                assert set(answer.weight_versions) == {wanted[name][1].weight_version}
            found.append({name: bits(answer) for name, answer in zip(names, answers, strict=True)})
            assert (await server.load()).weight_version == 2, "the newest there is, whatever is served just now"
        finally:
            await server.close()
    assert found[0] == found[1]
    assert found[0]["r0"][1] != found[0]["r1"][1]


async def test_a_version_published_meanwhile_waits_for_its_turn(
    model_dirs: dict[str, str], weights: Path, make_model: Any
) -> None:
    server = TorchServer(model_dirs["llama"], max_model_len=MAX_LEN, weights_dir=str(weights), invariant=True)
    try:
        before = asyncio.create_task(server.generate("before", [1, 2, 3], pinned(2)))
        await asyncio.sleep(0)
        info = WeightStore(weights, older=2).write(make_model("llama", 3).state_dict(), 3)
        await server.update_weights(info.path, 3)
        after = await server.generate("after", [1, 2, 3], pinned(3))
        assert set((await before).weight_versions) == {2}
        assert set(after.weight_versions) == {3}
    finally:
        await server.close()


async def test_a_version_that_is_not_kept_is_told_and_others_are_served(
    model_dirs: dict[str, str], weights: Path
) -> None:
    server = TorchServer(model_dirs["llama"], max_model_len=MAX_LEN, weights_dir=str(weights), invariant=True)
    try:
        with pytest.raises(VersionNotServed, match="weight version 7 cannot be served"):
            await server.generate("lost", [1, 2, 3], pinned(7))
        assert set((await server.generate("kept", [1, 2, 3], pinned(1))).weight_versions) == {1}
    finally:
        await server.close()
