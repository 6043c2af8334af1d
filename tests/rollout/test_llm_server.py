"""What every LLM server keeps. A new implementation adds a `Case` and passes all of this.

The simulation runs on a virtual clock; `Case.run` hides which loop a test is on, `Case.until_tokens` how time passes.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from agent_loop.llm.protocol import (
    CannotScore,
    ContextOverflow,
    Generation,
    ImagesNotServed,
    LLMServer,
    SamplingParams,
    Scores,
    ServerDied,
)
from streamrl.rollout.building import build_server
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.rollout.sglang.server import SglangServer
from streamrl.rollout.sim.server import SimConfig, SimServer
from streamrl.rollout.sim.virtual_clock import run_virtual
from streamrl.weight_sync.two_phase import TwoPhase
from tests.rollout.kept_sglang import sglang_at

VOCAB, SLOTS, MAX_LEN = 64, 4, 512
STOP = 7
LONG = 480
"""Tokens of a request that must still be running some steps later, also when this machine is busy."""


@dataclass
class Case:
    """How to build one kind of server and publish weights for it."""

    name: str
    build: Callable[[], LLMServer]
    publish: Callable[[int], str]
    scores: bool = True
    score_temperatures: tuple[float, float] | None = (0.7, 0.5)
    """None: it tells log-probs of given tokens at 1 alone."""
    cuts: bool = True
    seeds: bool = True

    def needs_scores(self) -> None:
        if not self.scores:
            pytest.skip(f"{self.name} scores no tokens")

    def needs_seeds(self) -> None:
        if not self.seeds:
            pytest.skip(f"{self.name} takes no seeds on this machine")

    def run(self, test: Callable[[LLMServer], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            server = self.build()
            try:
                await asyncio.wait_for(test(server), 60)
            finally:
                await server.close()

        run_virtual(main()) if self.name == "sim" else asyncio.run(main())


async def until_tokens(server: LLMServer, count: int) -> None:
    """Until so many tokens were generated; short sleeps are the only way to ask, and the virtual clock jumps them."""
    while (await server.load()).tokens_generated < count:  # noqa: ASYNC110  # a server announces no tokens
        await asyncio.sleep(0.001)


VLLM = pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.timeout(400)])
"""Its engine starts once for all tests here, in half a minute or more."""


SGLANG = pytest.param("sglang", marks=[pytest.mark.slow, pytest.mark.timeout(400)])
"""Runs where SGLang is installed (make sglang-env); one process for all tests here."""


@pytest.fixture(params=["torch", "sim", "sglang protocol", VLLM, SGLANG, "own"])
def case(request: pytest.FixtureRequest, model_dirs: dict[str, str], other_weights: Any) -> Case:
    if request.param == "own":
        if (named := request.config.getoption("--server")) is None:
            pytest.skip("--server path/to/file.py:function names one")
        config = RolloutServerConfig(named, model_dirs["qwen2"], max_num_seqs=SLOTS, max_model_len=MAX_LEN)
        return Case("own", lambda: build_server(config), lambda version: other_weights("qwen2", version, version).path)
    if request.param == "vllm":
        engine = request.getfixturevalue("vllm_engine")
        return Case("vllm", engine.server, lambda version: other_weights("wide", version, version).path, scores=False)
    if "sglang" in request.param:
        url, key = request.getfixturevalue("fake_sglang" if "protocol" in request.param else "real_sglang")
        config = sglang_at(url, key, model_dirs["qwen2"])
        real = request.param == "sglang"
        return Case(
            request.param,
            lambda: SglangServer(config),
            lambda version: other_weights("qwen2", version, version).path,
            score_temperatures=None,
            seeds=not real,
        )
    if request.param == "sim":
        sim = SimConfig(vocab_size=VOCAB, token_seconds=0.01, token_sigma=0.3, response_tokens_sigma=0.5)
        return Case(
            "sim",
            lambda: SimServer(sim, max_num_seqs=SLOTS, max_model_len=MAX_LEN),
            lambda version: "unused",
            cuts=False,
        )
    from streamrl.rollout.torch.server import TorchServer

    return Case(
        "torch",
        lambda: TorchServer(model_dirs["qwen2"], max_num_seqs=SLOTS, max_model_len=MAX_LEN),
        lambda version: other_weights("qwen2", version, version).path,
    )


def start(server: LLMServer, name: str, tokens: int = 100, **sampling: Any) -> asyncio.Task[Generation]:
    return asyncio.ensure_future(server.generate(name, [1, 2, 3], SamplingParams(max_tokens=tokens, **sampling)))


def check(got: Generation) -> None:
    """What holds for every generation."""
    assert len(got.token_ids) == len(got.log_probs) == len(got.weight_versions)
    assert all(0 <= token < VOCAB for token in got.token_ids)
    assert all(log_prob <= 0 for log_prob in got.log_probs)
    assert got.weight_versions == sorted(got.weight_versions)
    assert got.queue_seconds >= 0
    assert got.engine_seconds >= 0


def test_max_tokens_is_exact_without_stop_tokens(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        for tokens in (1, 2, 17, 125):
            got = await start(server, f"r{tokens}", tokens)
            check(got)
            assert (len(got.token_ids), got.stop_reason) == (tokens, "length")
            assert got.weight_versions == [0] * tokens

    case.run(test)


def test_a_stop_token_is_kept_last_and_occurs_nowhere_else(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        stop = tuple(range(0, VOCAB, 5))
        results = await asyncio.gather(*(start(server, f"r{i}", 100, stop_token_ids=stop, seed=i) for i in range(20)))
        assert any(got.stop_reason == "stop" for got in results)
        for got in results:
            check(got)
            assert not set(got.token_ids[:-1]) & set(stop)
            assert (got.token_ids[-1] in stop) == (got.stop_reason == "stop")
            assert got.stop_reason == "stop" or len(got.token_ids) == 100

    case.run(test)


def test_tokens_before_an_update_carry_the_old_version_and_later_ones_the_new(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        running = [start(server, f"r{i}", LONG) for i in range(SLOTS)]
        await until_tokens(server, 40)
        await server.update_weights(case.publish(1), 1)
        assert (await server.load()).weight_version == 1
        after = start(server, "after", 5)
        for got in await asyncio.gather(*running):
            check(got)
            assert len(got.token_ids) == LONG
            assert set(got.weight_versions) == {0, 1}
        assert (await after).weight_versions == [1] * 5

    case.run(test)


def test_a_version_that_is_prepared_changes_nothing_and_serves_from_its_commit_on(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        assert isinstance(server, TwoPhase)
        path, forgotten = case.publish(1), case.publish(2)
        await server.prepare_weights(forgotten, 2)
        await server.prepare_weights(path, 1)
        assert (await start(server, "before", 20)).weight_versions == [0] * 20
        await server.commit_weights(path, 1)
        assert (await start(server, "after", 20)).weight_versions == [1] * 20
        await server.commit_weights(forgotten, 2)
        assert (await start(server, "last", 20)).weight_versions == [2] * 20

    case.run(test)


def test_abort_keeps_tokens_and_log_probs(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        running = [start(server, f"r{i}", LONG) for i in range(SLOTS)]
        waiting = start(server, "waiting", 10)
        await until_tokens(server, 30)
        assert await server.abort(["r0", "unknown"]) == 1
        got = await running[0]
        check(got)
        assert got.stop_reason == "aborted"
        assert 1 <= len(got.token_ids) < LONG
        assert (await waiting).stop_reason == "length"
        assert await server.abort() == SLOTS - 1
        for task in running[1:]:
            got = await task
            check(got)
            assert got.stop_reason == "aborted"
        assert await server.abort() == 0

    case.run(test)


def test_tokens_can_be_read_while_they_are_made_and_are_those_of_the_end(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        running = [start(server, f"r{i}", LONG) for i in range(SLOTS)]
        waiting = start(server, "waiting", 5)
        await until_tokens(server, 30)
        have = {f"r{i}": 0 for i in range(SLOTS)} | {"waiting": 0, "unknown": 0}
        first = await server.progress(have)
        assert set(first) == {f"r{i}" for i in range(SLOTS)}
        await server.update_weights(case.publish(1), 1)
        made = (await server.load()).tokens_generated
        await until_tokens(server, made + 30)
        counts = {name: len(piece.token_ids) for name, piece in first.items()}
        more = await server.progress(counts)
        await server.pause()
        assert await server.progress(have)
        await server.resume()
        await server.abort()
        for name, task in zip(first, running, strict=True):
            got, piece, rest = await task, first[name], more[name]
            check(piece)
            check(rest)
            for field in ("token_ids", "log_probs", "weight_versions"):
                seen = getattr(piece, field) + getattr(rest, field)
                assert seen == getattr(got, field)[: len(seen)]
            assert rest.weight_versions[-1] == 1
        await waiting

    case.run(test)


def test_a_waiting_request_aborts_without_tokens(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        running = [start(server, f"r{i}", LONG) for i in range(SLOTS)]
        waiting = start(server, "waiting", 10)
        await until_tokens(server, 1)
        assert await server.abort(["waiting"]) == 1
        got = await waiting
        assert (got.token_ids, got.stop_reason) == ([], "aborted")
        await asyncio.gather(*running)

    case.run(test)


def test_a_seed_reproduces_tokens_in_any_company_and_other_seeds_differ(case: Case) -> None:
    case.needs_seeds()

    async def test(server: LLMServer) -> None:
        alone = await start(server, "alone", 40, seed=11)
        crowd = [start(server, f"c{i}", 10 + i) for i in range(6)]
        together = await start(server, "together", 40, seed=11)
        other = await start(server, "other", 40, seed=12)
        await asyncio.gather(*crowd)
        assert together.token_ids == alone.token_ids
        assert together.log_probs == pytest.approx(alone.log_probs, abs=1e-4)
        assert other.token_ids != alone.token_ids
        first, second = await asyncio.gather(start(server, "u1", 40), start(server, "u2", 40))
        assert first.token_ids != second.token_ids

    case.run(test)


def test_prompts_that_cannot_fit_are_the_callers_error(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        with pytest.raises(ContextOverflow, match=str(MAX_LEN)):
            await server.generate("long", [1] * 500, SamplingParams(max_tokens=13))
        for prompt, sampling in (
            ([], SamplingParams(max_tokens=1)),
            ([VOCAB], SamplingParams(max_tokens=1)),
            ([1], SamplingParams(max_tokens=0)),
            ([1], SamplingParams(max_tokens=1, temperature=-1.0)),
            ([1], SamplingParams(max_tokens=1, top_p=0.0)),
        ):
            with pytest.raises(ValueError):
                await server.generate("bad", prompt, sampling)
        assert len((await server.generate("fits", [1] * 500, SamplingParams(max_tokens=12))).token_ids) == 12

    case.run(test)


@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_p": 0.05}, {"top_k": 1}], ids=str)
def test_log_probs_are_those_after_the_cuts(case: Case, sampling: dict[str, Any]) -> None:
    if not case.cuts:
        pytest.skip(f"{case.name} has no distribution to cut")

    async def test(server: LLMServer) -> None:
        results = await asyncio.gather(*(start(server, f"r{i}", 1, seed=i, **sampling) for i in range(80)))
        told = {got.token_ids[0]: got.log_probs[0] for got in results}
        kept = sampling.get("top_k", VOCAB)
        assert len(told) <= kept
        for got in results:
            assert got.log_probs[0] == pytest.approx(told[got.token_ids[0]], abs=1e-3)
        if len(told) == kept or "top_p" in sampling:  # all of them were seen, most likely
            assert sum(map(math.exp, told.values())) == pytest.approx(1.0, abs=1e-2)

    case.run(test)


NAN = float("nan")
ODD: list[tuple[Any, Any, dict[str, Any], str]] = [
    ("x", [1, 2.5], {}, "prompt token 2.5 is a float"),
    ("x", [1, NAN], {}, "prompt token nan is a float"),
    ("x", [1, True], {}, "prompt token True"),
    ("x", [1, None], {}, "prompt token None"),
    ("x", "1, 2", {}, "prompt is a str"),
    ("x", None, {}, "prompt is a NoneType"),
    (7, [1], {}, "request id 7"),
    ("x", [1], {"max_tokens": 1.5}, "max_tokens 1.5"),
    ("x", [1], {"temperature": NAN}, "temperature nan"),
    ("x", [1], {"temperature": math.inf}, "temperature inf"),
    ("x", [1], {"temperature": 1e-40}, "temperature 1e-40: it has to be 0, or a finite number >= 0.01"),
    ("x", [1], {"temperature": "hot"}, "temperature 'hot'"),
    ("x", [1], {"top_p": NAN}, "top_p nan"),
    ("x", [1], {"top_k": 2.0}, "top_k 2.0"),
    ("x", [1], {"top_k": 2**40}, "top_k 1099511627776"),
    ("x", [1], {"stop_token_ids": None}, "stop_token_ids None"),
    ("x", [1], {"stop_token_ids": (1, "2")}, "'2' is no token id"),
    ("x", [1], {"seed": "a"}, "seed 'a'"),
    ("x", [1], {"seed": -1}, "seed -1"),
    ("x", [1], {"weight_version": "a"}, "weight_version 'a'"),
]


def test_what_no_engine_could_serve_is_the_error_of_its_caller_alone(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        beside = start(server, "beside", LONG)
        await until_tokens(server, 1)
        for request_id, prompt, sampling, told in ODD:
            with pytest.raises(ValueError, match=re.escape(told)):
                await server.generate(request_id, prompt, SamplingParams(**{"max_tokens": 1, **sampling}))
        for verb in (
            lambda: server.abort([[1]]),  # type: ignore[list-item]
            lambda: server.abort("beside"),  # type: ignore[arg-type]
            lambda: server.progress({"beside": -1}),
            lambda: server.progress(["beside"]),  # type: ignore[arg-type]
            lambda: server.update_weights(None, 1),  # type: ignore[arg-type]
            lambda: server.update_weights("file", "1"),  # type: ignore[arg-type]
        ):
            with pytest.raises(ValueError):
                await verb()
        assert len((await beside).token_ids) == LONG
        assert len((await start(server, "x", 2)).token_ids) == 2

    case.run(test)


def test_the_id_of_a_cancelled_call_is_free_at_once(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        for _ in range(3):
            gone = start(server, "same", LONG)
            await until_tokens(server, 1)
            gone.cancel()
            await asyncio.wait({gone})
            got = await start(server, "same", 20)
            assert (len(got.token_ids), got.stop_reason) == (20, "length")
            assert (await server.load()).running == 0

    case.run(test)


def test_images_are_refused_by_servers_of_text(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        with pytest.raises(ImagesNotServed, match="the prompt has 2 images; .*Server serves text alone"):
            await server.generate("seen", [1, 2], SamplingParams(max_tokens=1), [b"png", b"jpeg"])

    case.run(test)


def test_an_id_that_is_open_is_refused(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        first = start(server, "same", LONG)
        await until_tokens(server, 1)
        with pytest.raises(ValueError, match="same"):
            await server.generate("same", [1], SamplingParams(max_tokens=1))
        await first
        assert len((await start(server, "same", 2)).token_ids) == 2

    case.run(test)


def test_nothing_is_generated_while_paused(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        running = start(server, "running", LONG)
        await until_tokens(server, 5)
        await server.pause()
        arrived = start(server, "arrived", 3)
        before = (await server.load()).tokens_generated
        await asyncio.sleep(0.05)
        assert (await server.load()).tokens_generated == before < LONG
        await server.update_weights(case.publish(1), 1)
        await server.pause()
        await server.resume()
        got = await running
        check(got)
        assert len(got.token_ids) == LONG
        assert set(got.weight_versions) == {0, 1}
        assert (await arrived).weight_versions == [1] * 3

    case.run(test)


def test_after_a_sleep_requests_go_on_where_they_were_with_the_new_weights(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        running = start(server, "running", LONG)
        await until_tokens(server, 5)
        await server.sleep()
        arrived, given_up = start(server, "arrived", 3), start(server, "given up", 3)
        before = (await server.load()).tokens_generated
        await asyncio.sleep(0.05)
        assert (await server.load()).tokens_generated == before < LONG
        await server.update_weights(case.publish(1), 1)
        await server.sleep()
        given_up.cancel()
        await server.resume()  # of a pause that never was
        await asyncio.sleep(0.02)
        assert (await server.load()).tokens_generated == before
        await server.wake_up()
        await server.wake_up()
        got = await running
        check(got)
        assert got.weight_versions == [0] * before + [1] * (LONG - before)
        assert (await arrived).weight_versions == [1] * 3

    case.run(test)


def test_load_figures_add_up(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        idle = await server.load()
        assert (idle.running, idle.waiting, idle.slots, idle.tokens_generated) == (0, 0, SLOTS, 0)
        tasks = [start(server, f"r{i}", 60) for i in range(SLOTS + 3)]
        await until_tokens(server, 10)
        await server.pause()
        busy = await server.load()
        assert (busy.running, busy.waiting) == (SLOTS, 3)
        await server.resume()
        results = await asyncio.gather(*tasks)
        after = await server.load()
        assert (after.running, after.waiting, after.tokens_generated) == (0, 0, 60 * (SLOTS + 3))
        assert after.busy_seconds > busy.busy_seconds > 0
        assert max(got.queue_seconds for got in results) > min(got.queue_seconds for got in results)

    case.run(test)


def test_close_fails_open_requests_and_later_calls(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        tasks = [start(server, f"r{i}", LONG) for i in range(SLOTS + 2)]
        await until_tokens(server, 3)
        await server.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, ServerDied) for result in results)
        calls: list[Callable[[], Awaitable[Any]]] = [
            server.load, server.pause, server.resume, server.abort, lambda: start(server, "late"),
            lambda: server.update_weights("x", 1), lambda: server.score([1], [2]),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(ServerDied):
                await call()
        await server.close()

    case.run(test)


def test_a_cancelled_call_frees_its_slot(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        tasks = [start(server, f"r{i}", LONG) for i in range(SLOTS)]
        waiting = start(server, "waiting", 3)
        await until_tokens(server, 8)
        for task in tasks:
            task.cancel()
        assert len((await waiting).token_ids) == 3
        await asyncio.gather(*tasks, return_exceptions=True)
        load = await server.load()
        assert (load.running, load.waiting) == (0, 0)

    case.run(test)


def test_scores_are_one_log_prob_per_response_token_whatever_else_runs(case: Case) -> None:
    case.needs_scores()

    async def test(server: LLMServer) -> None:
        rng = random.Random(5)
        rows = [([rng.randrange(VOCAB)] * rng.randint(1, 9), [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))])
                for _ in range(12)]  # fmt: skip
        temperature, colder = case.score_temperatures or (1.0, None)
        alone = [await server.score(prompt, response, temperature) for prompt, response in rows]
        running = [start(server, f"r{i}", 60) for i in range(SLOTS + 2)]
        together = await asyncio.gather(*(server.score(prompt, response, temperature) for prompt, response in rows))
        for (_, response), first, second in zip(rows, alone, together, strict=True):
            assert len(first.log_probs) == len(response)
            assert max(first.log_probs) <= 0
            assert second.log_probs == pytest.approx(first.log_probs, abs=1e-5)
            assert min(second.queue_seconds, second.engine_seconds) >= 0
            assert first.weight_version == 0
        if colder is None:
            with pytest.raises(CannotScore):
                await server.score(*rows[0], 0.5)
        else:
            cold = await server.score(*rows[0], colder)
            assert cold.log_probs != pytest.approx(alone[0].log_probs, abs=1e-3), "the temperature counts"
        for got in await asyncio.gather(*running):
            check(got)
            assert len(got.token_ids) == 60
        load = await server.load()
        assert (load.running, load.waiting, load.rows_scored) == (0, 0, 24 + (colder is not None))
        cold_tokens = 0 if colder is None else len(rows[0][1])
        assert load.tokens_scored == 2 * sum(len(response) for _, response in rows) + cold_tokens
        assert load.tokens_generated == 60 * (SLOTS + 2), "scoring makes no tokens"
        assert load.score_queue_seconds >= sum(scores.queue_seconds for scores in together)

    case.run(test)


def test_tokens_that_cannot_be_scored_are_the_callers_error(case: Case) -> None:
    case.needs_scores()

    async def test(server: LLMServer) -> None:
        with pytest.raises(ContextOverflow, match=str(MAX_LEN)):
            await server.score([1] * 500, [2] * 13)
        odd: list[tuple[Any, Any, Any]] = [
            ([], [1], 1.0), ([1], [], 1.0), ([VOCAB], [1], 1.0), ([1], [1, VOCAB], 1.0), ([1], [-1], 1.0),
            ([1], [1], 0.0), ([1], [1], float("nan")), ([1], [1], float("inf")), ([1], [1], 1e-40),
            ([1], [1.5], 1.0), ([1], None, 1.0), ([1], [1], "1"),
        ]  # fmt: skip
        for prompt, response, temperature in odd:
            with pytest.raises(ValueError):
                await server.score(prompt, response, temperature)
        assert len((await server.score([1] * 500, [2] * 12)).log_probs) == 12

    case.run(test)


def test_scoring_waits_while_paused_and_is_not_aborted(case: Case) -> None:
    case.needs_scores()

    async def test(server: LLMServer) -> None:
        await server.pause()
        asked: list[asyncio.Task[Scores]] = [asyncio.ensure_future(server.score([1, 2], [3, i])) for i in range(7)]
        await asyncio.sleep(0.05)
        assert await server.abort() == 0
        assert not any(task.done() for task in asked)
        load = await server.load()
        assert (load.running, load.waiting) == (0, 7)
        asked[0].cancel()
        await asyncio.sleep(0)
        await server.resume()
        assert [len(scores.log_probs) for scores in await asyncio.gather(*asked[1:])] == [2] * 6
        assert (await server.load()).rows_scored == 6, "what was given up is not computed"

    case.run(test)


def test_close_fails_what_is_to_be_scored(case: Case) -> None:
    case.needs_scores()

    async def test(server: LLMServer) -> None:
        await server.pause()
        asked = [asyncio.ensure_future(server.score([1, 2], [3, 4])) for _ in range(3)]
        await asyncio.sleep(0.01)
        await server.close()
        assert [type(found) for found in await asyncio.gather(*asked, return_exceptions=True)] == [ServerDied] * 3

    case.run(test)


def test_two_hundred_requests_with_random_aborts_pauses_and_updates_leave_nothing_stuck(case: Case) -> None:
    async def test(server: LLMServer) -> None:
        rng = random.Random(3)
        versions = [case.publish(v) for v in (1, 2)]
        budgets = {f"r{i}": rng.randint(1, 60) for i in range(200)}
        tasks: dict[str, asyncio.Task[Generation]] = {}

        async def disturb() -> None:
            version = 0
            while True:
                await asyncio.sleep(rng.uniform(0.001, 0.02))
                match rng.randrange(4):
                    case 0:
                        await server.abort(rng.sample(sorted(budgets), 30))
                    case 1:
                        await server.pause()
                        await server.resume()
                    case 2:
                        version += 1
                        await server.update_weights(versions[version % 2], version)
                    case _:
                        load = await server.load()
                        assert load.running <= SLOTS

        disturbing = asyncio.ensure_future(disturb())
        for name, budget in budgets.items():
            stop = (STOP,) if rng.random() < 0.5 else ()
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
            sampling = SamplingParams(max_tokens=budget, stop_token_ids=stop, temperature=rng.choice([0.0, 1.0]))
            tasks[name] = asyncio.ensure_future(server.generate(name, prompt, sampling))
            if rng.random() < 0.2:
                await asyncio.sleep(0.005)
        results = dict(zip(tasks, await asyncio.wait_for(asyncio.gather(*tasks.values()), 50), strict=True))
        disturbing.cancel()
        assert isinstance((await asyncio.gather(disturbing, return_exceptions=True))[0], asyncio.CancelledError)
        for name, got in results.items():
            check(got)
            assert len(got.token_ids) <= budgets[name]
            assert got.stop_reason != "length" or len(got.token_ids) == budgets[name]
        load = await server.load()
        assert (load.running, load.waiting) == (0, 0)
        assert load.tokens_generated == sum(len(got.token_ids) for got in results.values())
        assert {got.stop_reason for got in results.values()} >= {"length", "aborted"}

    case.run(test)
