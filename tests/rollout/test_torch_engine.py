"""The embedded engine's numbers: log-probs, seeds, cuts, prefixes, weights."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_loop.llm.protocol import Generation, SamplingParams, ServerDied
from streamrl.rollout.noise import uniforms
from streamrl.rollout.torch.batch_engine import BatchEngine, Request
from streamrl.rollout.torch.loading import load_model
from streamrl.rollout.torch.sampling import Knobs, sample
from streamrl.rollout.torch.server import TorchServer
from streamrl.weight_sync import WeightsMismatch
from streamrl.weight_sync.load import load_into
from streamrl.weight_sync.shared_memory import read_weights

VOCAB = 64
KINDS = ["qwen2", "llama"]


def engine(path: str, slots: int = 8) -> BatchEngine:
    return BatchEngine(load(path), slots=slots, max_len=128)


def load(path: str) -> Any:
    return load_model(path, device="cpu", dtype="float32", max_model_len=128)


def request(name: str, prompt: list[int], sampling: SamplingParams, seed: int = 0) -> Request:
    return Request(name, prompt, sampling, uniforms(seed, 0, len(prompt), sampling.max_tokens))


def run(target: BatchEngine) -> dict[str, Generation]:
    done: dict[str, Generation] = {}
    while target.has_work:
        done |= {r.id: r.generation for r in target.step()}
    return done


def run_of(target: BatchEngine, requests: list[Request]) -> dict[str, Generation]:
    for each in requests:
        target.submit(each)
    return run(target)


def reference(path: str, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """Log-probs of the response by one full forward pass of the untouched model."""
    model = load(path)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / (temperature or 1.0), -1)


def prompts(count: int, rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_a_full_forward_for_any_batch_composition(model_dirs: dict[str, str], kind: str) -> None:
    rng = random.Random(1)
    target = engine(model_dirs[kind], slots=6)
    asked = [
        request(str(i), p, SamplingParams(max_tokens=rng.randint(1, 40), temperature=rng.choice([0.0, 0.7, 1.5])), i)
        for i, p in enumerate(prompts(30, rng))
    ]
    done: dict[str, Generation] = {}
    left = list(asked)
    while left or target.has_work:  # requests join at random moments
        for _ in range(rng.randint(0, 2)):
            if left:
                target.submit(left.pop())
        done |= {r.id: r.generation for r in target.step()} if target.has_work else {}
    assert len(done) == 30
    for r in asked:
        got = done[r.id]
        wanted = reference(model_dirs[kind], r.prompt, got.token_ids, r.sampling.temperature)
        picked = wanted[torch.arange(len(got.token_ids)), torch.tensor(got.token_ids)]
        assert (picked - torch.tensor(got.log_probs)).abs().max() < 1e-4
        if r.sampling.temperature == 0:
            assert got.token_ids == wanted.argmax(-1).tolist()


def test_a_seed_gives_the_same_tokens_alone_and_in_company(model_dirs: dict[str, str]) -> None:
    sampling = SamplingParams(max_tokens=30)
    alone = engine(model_dirs["qwen2"])
    alone.submit(request("x", [1, 2, 3], sampling, seed=5))
    together = engine(model_dirs["qwen2"])
    for i in range(20):
        together.submit(request(f"other{i}", [i, 2], SamplingParams(max_tokens=3 + i), seed=i))
        if i == 10:
            together.submit(request("x", [1, 2, 3], sampling, seed=5))
    assert run(alone)["x"].token_ids == run(together)["x"].token_ids


def test_a_request_continued_elsewhere_with_its_seed_goes_on_as_if_uninterrupted(model_dirs: dict[str, str]) -> None:
    target = engine(model_dirs["llama"])
    prompt = [4, 5, 6]
    target.submit(request("whole", prompt, SamplingParams(max_tokens=20), seed=9))
    whole = run(target)["whole"].token_ids
    target.submit(request("rest", prompt + whole[:8], SamplingParams(max_tokens=12), seed=9))
    assert run(target)["rest"].token_ids == whole[8:]


@pytest.mark.parametrize("kind", KINDS)
def test_later_turns_start_from_the_kept_prefix_with_equal_log_probs(model_dirs: dict[str, str], kind: str) -> None:
    target = engine(model_dirs[kind])
    rng = random.Random(2)
    history = [rng.randrange(VOCAB) for _ in range(12)]
    for turn in range(4):
        target.submit(request(f"t{turn}", list(history), SamplingParams(max_tokens=6), seed=turn))
        target.submit(request(f"noise{turn}", prompts(1, rng)[0], SamplingParams(max_tokens=9), seed=50 + turn))
        computed = target.tokens_prefilled
        got = run(target)[f"t{turn}"]
        wanted = reference(model_dirs[kind], history, got.token_ids, 1.0)
        picked = wanted[torch.arange(6), torch.tensor(got.token_ids)]
        assert (picked - torch.tensor(got.log_probs)).abs().max() < 1e-4
        if turn:
            assert target.tokens_prefilled - computed < 12 + 40
        history += [*got.token_ids, 7, 8, 9]
    assert target.tokens_reused >= 12 + 21 + 30 - 3


def test_the_samples_of_a_group_compute_their_prompt_once(model_dirs: dict[str, str]) -> None:
    target = engine(model_dirs["qwen2"])
    prompt = list(range(20))
    for i in range(8):
        target.submit(request(str(i), prompt, SamplingParams(max_tokens=5), seed=i))
    done = run(target)
    assert target.tokens_prefilled == 20 + 7
    for got in done.values():
        wanted = reference(model_dirs["qwen2"], prompt, got.token_ids, 1.0)
        assert (wanted[torch.arange(5), torch.tensor(got.token_ids)] - torch.tensor(got.log_probs)).abs().max() < 1e-4


def test_no_prefix_is_reused_under_newer_weights(model_dirs: dict[str, str]) -> None:
    target = engine(model_dirs["qwen2"])
    target.submit(request("a", list(range(20)), SamplingParams(max_tokens=5)))
    run(target)
    target.version = target.newest = 1
    target.submit(request("b", list(range(20)), SamplingParams(max_tokens=5)))
    run(target)
    assert target.tokens_reused == 0


def test_a_sleep_gives_the_cache_back_and_changes_no_token(model_dirs: dict[str, str]) -> None:
    asked = [
        request(f"r{i}", prompt, SamplingParams(max_tokens=30), i)
        for i, prompt in enumerate(prompts(5, random.Random(2)))
    ]
    through = run_of(engine(model_dirs["qwen2"], slots=3), [replace(r, generation=Generation()) for r in asked])
    target = engine(model_dirs["qwen2"], slots=3)
    for each in asked:
        target.submit(each)
    done: dict[str, Generation] = {}
    for _ in range(4):
        done |= {r.id: r.generation for _ in range(7) for r in target.step()}
        size = target.decoder.cache.nbytes
        target.sleep()
        assert (target.decoder.cache.nbytes, target.running) == (0, [])
        target.wake_up()
        assert target.decoder.cache.nbytes == size
    done |= run(target)
    assert {name: got.token_ids for name, got in done.items()} == {name: got.token_ids for name, got in through.items()}
    for name, got in done.items():
        assert got.log_probs == pytest.approx(through[name].log_probs, abs=1e-5)


def test_sampling_follows_the_distribution_and_reports_it() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 8).expand(4000, 8)
    sampling = SamplingParams(max_tokens=1, temperature=0.8, top_k=5, top_p=0.9)
    noise = torch.tensor(uniforms(3, 0, 0, 4000))
    tokens, log_probs = sample(logits, noise, Knobs.of([sampling] * 4000, 8, torch.device("cpu")))
    probs = torch.softmax(logits[0] / 0.8, -1)
    order = probs.argsort(descending=True)[:5]
    kept = probs[order] / probs[order].sum()
    order = order[(kept.cumsum(0) - kept) < 0.9]
    wanted = torch.zeros(8)
    wanted[order] = probs[order] / probs[order].sum()
    assert (torch.bincount(tokens, minlength=8) / 4000 - wanted).abs().max() < 0.03
    assert torch.allclose(log_probs.exp(), wanted[tokens], atol=1e-6)


def test_the_largest_uniform_never_picks_an_impossible_token() -> None:
    logits = torch.tensor([[1.0, 2.0, -1e4, -torch.inf]])
    knobs = Knobs.of([SamplingParams(max_tokens=1)], 4, torch.device("cpu"))
    tokens, _ = sample(logits, torch.tensor([1 - 2.0**-24]), knobs)
    assert tokens.item() == 1


def test_top_k_one_and_tiny_top_p_are_greedy(model_dirs: dict[str, str]) -> None:
    target = engine(model_dirs["llama"])
    for name, sampling in {
        "greedy": SamplingParams(max_tokens=12, temperature=0.0),
        "k": SamplingParams(max_tokens=12, top_k=1),
        "p": SamplingParams(max_tokens=12, top_p=1e-6),
        "free": SamplingParams(max_tokens=12),
    }.items():
        target.submit(request(name, [1, 2, 3], sampling, seed=4))
    done = run(target)
    assert done["greedy"].token_ids == done["k"].token_ids == done["p"].token_ids
    assert done["k"].log_probs == pytest.approx([0.0] * 12)


@pytest.mark.parametrize("kind", KINDS)
def test_loading_replaces_every_weight_also_fused_and_tied_ones(
    model_dirs: dict[str, str], make_model: Any, other_weights: Any, kind: str
) -> None:
    info = other_weights(kind, 1, 1)
    target = engine(model_dirs[kind])
    load_into(target.model, read_weights(info.path))
    target.submit(request("a", [1, 2, 3], SamplingParams(max_tokens=20)))
    got = run(target)["a"]
    with torch.inference_mode():
        logits = make_model(kind, 1).eval()(torch.tensor([[1, 2, 3, *got.token_ids]])).logits[0, 2:-1]
    wanted = torch.log_softmax(logits, -1)[torch.arange(20), torch.tensor(got.token_ids)]
    assert (wanted - torch.tensor(got.log_probs)).abs().max() < 1e-4


@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "tied"])
def test_weights_that_do_not_fit_change_nothing(model_dirs: dict[str, str], change: str) -> None:
    model = load(model_dirs["qwen2"])
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    if change == "missing":
        del state["model.norm.weight"]
    elif change == "unknown":
        state["model.extra"] = torch.zeros(1)
    elif change == "shape":
        state["model.norm.weight"] = torch.zeros(3)
    else:
        state["lm_head.weight"] = torch.ones_like(state["model.embed_tokens.weight"])
    with pytest.raises(WeightsMismatch, match=change):
        load_into(model, state)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


class Events:
    def __init__(self) -> None:
        self.states: list[str | float] = []
        self.spans: list[tuple[str, float, float, dict[str, Any]]] = []

    def span_at(self, name: str, start: float, end: float, /, **fields: Any) -> None:
        self.spans.append((name, start, end, fields))

    def state(self, name: str, value: str | float, /, **labels: Any) -> None:
        self.states.append(value)


async def test_an_exception_in_the_engine_thread_fails_all_requests_and_the_health_check(
    model_dirs: dict[str, str],
) -> None:
    events = Events()
    server = TorchServer(model_dirs["qwen2"], max_model_len=128, events=events)
    calls = [asyncio.ensure_future(server.generate(str(i), [1, 2], SamplingParams(max_tokens=100))) for i in range(3)]
    await asyncio.sleep(0.005)
    server._engine.step = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert all(isinstance(r, ServerDied) and "ZeroDivisionError" in str(r) for r in results)
    with pytest.raises(ServerDied):
        await server.load()
    with pytest.raises(ServerDied):
        await server.update_weights("x", 1)
    assert [str(state).split(":")[0] for state in events.states] == ["started", "died"]
    await server.close()


async def test_broken_weights_are_loud(model_dirs: dict[str, str], tmp_path: Any) -> None:
    from streamrl.weight_sync import WeightStore

    server = TorchServer(model_dirs["qwen2"], max_model_len=128)
    nan = {name: torch.full_like(p, torch.nan) for name, p in server._engine.model.named_parameters()}
    info = WeightStore(tmp_path).write(nan, 3)
    await server.update_weights(info.path, 3)
    with pytest.raises(ServerDied, match="NaN at weight version 3"):
        await server.generate("a", [1], SamplingParams(max_tokens=2))
    await server.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"model_path": "/nowhere"}, "config.json"), ({"dtype": "int8"}, "int8"), ({"max_model_len": 9999}, "9999")],
)
def test_a_server_that_cannot_start_says_why(model_dirs: dict[str, str], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchServer(**({"model_path": model_dirs["qwen2"], "max_model_len": 128} | change))
