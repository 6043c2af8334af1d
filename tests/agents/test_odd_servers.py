"""A server that answers, or raises, what none may: it is out and named, and what it was asked for comes from others."""

from __future__ import annotations

import asyncio
import math
import random
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from agent_loop.llm.answers import AHEAD, OddAnswer, Sense
from agent_loop.llm.client import NoServer, Patience, PoisonRequest, RoutedClient
from agent_loop.llm.fleet import FleetNews
from agent_loop.llm.protocol import ContextOverflow, Generation, SamplingParams, Scores, ServerDied, ServerLoad
from streamrl.rollout.sim.virtual_clock import run_virtual
from tests.agents.fakes import FakeServer, Script

PROMPT = [1, 2, 3]
QUICK = Patience(healthy=10.0, answer=30.0)
FINE = Generation([4, 5], [-0.5, -0.1], [3, 4], "length", 0.1, 0.2)

ODD: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": [4, 64]}, "token_ids has 64, which is no token of the vocabulary of 64"),
    ({"token_ids": [4, -1]}, "token_ids has -1"),
    ({"token_ids": [4, 5.0]}, "token_ids has 5.0"),
    ({"token_ids": [4, "a"]}, "token_ids has 'a'"),
    ({"token_ids": [4]}, "weight_versions has 2 entries for 1 tokens"),
    ({"token_ids": [4] * 9}, "token_ids has 9 tokens, of at most 8 that were asked for"),
    ({"log_probs": [-0.5]}, "log_probs has 1 entries for 2 tokens"),
    ({"log_probs": [-0.5, math.nan]}, "log_probs has nan"),
    ({"log_probs": [-0.5, -math.inf]}, "log_probs has -inf"),
    ({"log_probs": [0.5, -0.5]}, "log_probs has 0.5"),
    ({"log_probs": [None, -0.5]}, "no Generation"),
    ({"weight_versions": [3]}, "weight_versions has 1 entries"),
    ({"weight_versions": [-1, 3]}, "weight_versions has -1"),
    ({"weight_versions": [-1, -1]}, "weight_versions has -1"),
    ({"weight_versions": [3, 4.5]}, "weight_versions has 4.5"),
    ({"weight_versions": [3, 1004]}, "weight_versions has 1004, and the newest that was published is 4"),
    ({"stop_reason": "tired"}, "stop_reason is 'tired'"),
    ({"queue_seconds": math.nan}, "queue_seconds nan"),
    ({"engine_seconds": None}, "no Generation"),
]


def some(prompt_ids: list[int], sampling: SamplingParams) -> list[int]:
    return [7, 8, 9]


def sense_of() -> Sense:
    sense = Sense(64)
    sense.tell_newest(4)
    return sense


def client_of(servers: Mapping[str, Any], sense: Sense | None = None) -> RoutedClient:
    return RoutedClient(servers, patience=QUICK, sense=sense or sense_of())


@pytest.mark.parametrize(("fields", "told"), ODD, ids=[told for _, told in ODD])
def test_an_answer_without_sense_is_named_by_server_and_field(fields: dict[str, Any], told: str) -> None:
    sense = sense_of()
    sense.check(FINE, "server-7", left=8)
    with pytest.raises(OddAnswer, match=re.escape("server server-7 broke the protocol: ") + ".*" + re.escape(told)):
        sense.check(replace(FINE, **fields), "server-7", left=8)


@pytest.mark.parametrize(
    ("field", "odd"),
    [("token_ids", 64), ("token_ids", -1), ("token_ids", 2.0), ("log_probs", math.nan), ("log_probs", 1.0),
     ("weight_versions", -1), ("weight_versions", 1004), ("weight_versions", None)],
)  # fmt: skip
def test_one_odd_number_among_many_is_found(field: str, odd: Any) -> None:
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"seed {seed}")
    where = random.Random(seed).randrange(300)
    long = Generation([4] * 300, [-0.5] * 300, [3] * 300, "length")
    sense_of().check(long, "a", left=300)
    getattr(long, field)[where] = odd
    with pytest.raises(OddAnswer, match=field if odd is not None else "no Generation"):
        sense_of().check(long, "a", left=300)


def test_what_is_not_known_is_not_held_against_an_answer() -> None:
    Sense().check(replace(FINE, token_ids=[0, 10**6], weight_versions=[0, 10**6]), "a", left=2)
    sense = Sense()
    sense.tell_newest(4)
    sense.check(replace(FINE, weight_versions=[4, 4 + AHEAD]), "a", left=2)
    sense.tell_newest(None)
    sense.check(replace(FINE, weight_versions=[4, 5 + AHEAD]), "a", left=2)
    sense.check(Generation([], [], [], "aborted"), "a", left=2)
    for answer in (None, "tokens", Scores([])):
        with pytest.raises(OddAnswer, match="is no Generation"):
            sense.check(answer, "a", left=2)  # type: ignore[arg-type]


def raising(error: Exception) -> Script:
    return lambda prompt_ids, sampling: error


def answering(piece: Any) -> Script:
    return lambda prompt_ids, sampling: piece


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (raising(KeyError("slot")), r"generate raised KeyError('slot')"),
        (raising(IndexError("list")), r"generate raised IndexError('list')"),
        (answering(replace(FINE, weight_versions=[1004, 1004])), "weight_versions has 1004"),
        (answering(replace(FINE, weight_versions=[-1, -1])), "weight_versions has -1"),
        (answering(replace(FINE, token_ids=[10**6, 1])), "token_ids has 1000000"),
    ],
    ids=str,
)
def test_one_odd_server_beside_good_ones_costs_no_request_and_is_out(script: Script, told: str) -> None:
    async def main() -> None:
        bad = FakeServer(script, seconds=0.1)
        client = client_of({"bad": bad, **{f"good-{i}": FakeServer(some, seconds=0.1) for i in range(3)}})

        async def sessions(first: int) -> None:
            for turn in range(20):
                got = await client.generate(PROMPT, SamplingParams(20), session=f"s{first}-{turn}")
                assert (got.token_ids, got.weight_versions) == ([7, 8, 9], [0, 0, 0])

        await asyncio.gather(*(sessions(i) for i in range(16)))
        assert len(bad.calls) < 40, "of 320: it is asked ever more seldom"
        assert client.router.version == 0
        assert client.router.in_flight() == 0
        bad.dead = True
        await asyncio.sleep(30)
        assert list(client.router.out()) == ["bad"]
        await client.close()

    seen: list[str] = []

    def note(*args: Any, **_: Any) -> None:
        seen.append(str(args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agent_loop.llm.client.logger.warning", note)
        run_virtual(main())
    assert any("server bad broke the protocol" in line and told in line.replace("\\", "") for line in seen), seen[:3]


def test_what_a_request_is_to_blame_for_stays_its_own() -> None:
    async def main() -> None:
        for error in (ValueError("prompt token 2.5"), ContextOverflow("too long")):
            server = FakeServer(raising(error))
            client = client_of({"a": server})
            with pytest.raises(type(error), match=str(error)):
                await client.generate(PROMPT, SamplingParams(20), session="s")
            assert client.router.out() == {}
            assert len(server.calls) == 1

    run_virtual(main())


def test_a_request_is_given_up_when_every_server_answers_it_without_sense_and_is_no_poison() -> None:
    async def main() -> None:
        client = client_of({"a": FakeServer(answering(replace(FINE, token_ids=[1])))})
        with pytest.raises(ServerDied, match="8 servers died .*server a broke the protocol: weight_versions has 2"):
            await client.generate(PROMPT, SamplingParams(20), session="s")
        assert client.router.in_flight() == 0
        await client.close()

    run_virtual(main())


def test_a_request_that_makes_every_server_raise_is_poison_and_the_reason_names_the_server() -> None:
    async def main() -> None:
        client = client_of({"a": FakeServer(raising(KeyError("slot")))})
        with pytest.raises(PoisonRequest, match=r"server a broke the protocol: generate raised KeyError\('slot'\)"):
            await client.generate(PROMPT, SamplingParams(20), session="s")
        await client.close()

    run_virtual(main())


class Beating(FakeServer):
    """Tells of its open calls what `told` says."""

    told: Callable[[Mapping[str, int]], Any] = staticmethod(lambda have: {})

    async def progress(self, have: Mapping[str, int]) -> Any:
        return self.told(have)


def _key_error(*_: Any) -> Any:
    raise KeyError("progress")


def _cancelled(*_: Any) -> Any:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    "told",
    [
        _key_error, _cancelled,
        lambda have: None,
        lambda have: {id: Generation([1, 2], [-0.1, -0.1], []) for id in have},
        lambda have: {id: Generation([1], [-0.1], [-1]) for id in have},
        lambda have: {id: None for id in have},
    ],
    ids=["KeyError", "cancelled", "None", "no versions", "negative version", "no generation"],
)  # fmt: skip
def test_a_server_whose_progress_is_odd_loses_its_requests_to_others_and_no_other_is_disturbed(told: Any) -> None:
    async def main() -> None:
        bad, good = Beating(some, seconds=5.0), FakeServer(some, seconds=5.0)
        bad.told = told
        client = client_of({"bad": bad, "good": good})
        requests = [client.generate(PROMPT, SamplingParams(20), session=f"s{i}") for i in range(2)]
        await asyncio.sleep(0)
        got = await asyncio.gather(*requests)
        assert [one.token_ids for one in got] == [[7, 8, 9]] * 2
        assert len(good.calls) == 2
        bad.dead = True
        assert (await client.generate(PROMPT, SamplingParams(20), session="later")).token_ids == [7, 8, 9]
        await client.close()

    run_virtual(main())


@pytest.mark.parametrize(
    ("answer_given", "told"),
    [
        (TypeError("a bug"), r"load raised TypeError\('a bug'\)"),
        (None, "load answered None, which is no ServerLoad"),
        (asyncio.CancelledError(), "load raised RuntimeError.*nobody had asked"),
        (ServerLoad(0, 0, 64, 0, 0, None), "load.busy_seconds is None"),  # type: ignore[arg-type]
        (ServerLoad(0, 0, 64, -1, 0, 0.0), "load.weight_version is -1"),
        (ServerLoad(0, 0, 64, 1004, 0, 0.0), "load.weight_version has 1004, and the newest that was published is 4"),
    ],
    ids=str,
)
def test_a_server_whose_health_check_is_odd_stays_out_with_the_reason_until_it_is_right(
    answer_given: Any, told: str
) -> None:
    class Odd(FakeServer):
        answer: Any = answer_given

        async def load(self) -> Any:
            right = await super().load()
            if isinstance(self.answer, BaseException):
                raise self.answer
            return right if self.answer == "right" else self.answer

    async def main() -> None:
        server = Odd(some, dead=True)
        client = client_of({"a": server})
        asyncio.get_running_loop().call_later(1.0, setattr, server, "dead", False)
        with pytest.raises(NoServer, match=f"a: health check: server a broke the protocol: {told}"):
            await client.generate(PROMPT, SamplingParams(20), session="s")
        server.answer = "right"
        assert (await client.generate(PROMPT, SamplingParams(20), session="s")).token_ids == [7, 8, 9]
        await client.close()

    run_virtual(main())


def test_a_server_whose_abort_is_odd_is_out_and_its_client_goes_on() -> None:
    class Odd(FakeServer):
        async def abort(self, request_ids: list[str] | None = None) -> int:
            raise KeyError("abort")

    async def main() -> None:
        server = Odd(some, seconds=20.0)
        client = client_of({"a": server})
        request = asyncio.ensure_future(client.generate(PROMPT, SamplingParams(20), session="s"))
        await asyncio.sleep(1.0)
        request.cancel()
        await asyncio.wait({request})
        assert "abort raised KeyError('abort')" in client.router.out()["a"]
        server.seconds = 0.1
        assert (await client.generate(PROMPT, SamplingParams(20), session="s")).token_ids == [7, 8, 9]
        await client.close()

    run_virtual(main())


@pytest.mark.parametrize(
    ("answer", "told"),
    [(KeyError("score"), "score raised"), (asyncio.CancelledError(), "score raised"),
     (Scores([-0.1]), "log_probs [-0.1]; expected 2 numbers"),
     (None, "score answered None")],
    ids=str,
)  # fmt: skip
def test_scores_without_sense_are_asked_of_another_server(answer: Any, told: str) -> None:
    class Odd(FakeServer):
        async def score(self, prompt_ids: list[int], response_ids: list[int], temperature: float = 1.0) -> Any:
            self.asked = True
            if isinstance(answer, BaseException):
                raise answer
            return answer

    async def main() -> None:
        odd = Odd(some)
        client = client_of({"odd": odd, "good": FakeServer(some)})
        for i in range(2):
            scores = await client.score(PROMPT, [5, 6], 1.0, session=f"s{i}")
            assert scores.log_probs == [-0.005, -0.006]
        assert odd.asked
        assert told in client.router.out()["odd"]
        await client.close()

    run_virtual(main())


def test_a_version_that_was_never_published_does_not_stay_the_newest() -> None:
    async def main() -> None:
        lies = FakeServer(answering(replace(FINE, weight_versions=[1004, 1004])))
        client = client_of({"a": lies}, Sense(64))
        await client.generate(PROMPT, SamplingParams(2), session="s")  # nothing is known yet
        assert client.router.version == 1004
        client.hear(FleetNews(newest=4))
        assert client.router.version == 4
        await client.close()

    run_virtual(main())
