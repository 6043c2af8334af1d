"""A remote model over real HTTP: what it says, what it scores, and what happens when it is busy."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_loop.llm.keys import ApiKey, KeyMissing
from agent_loop.llm.protocol import CannotScore
from agent_loop.llm.remote_http import Backoff, RemoteHttp, RemoteRefused, RemoteUnavailable, retry_after
from tests.fake_remote import KEY, QUICK, Remote
from tests.http_app import Answer, Asked

LOG_PROBS = [None, -0.5, -1.5, -2.5]


@pytest.fixture
def remote() -> Iterator[Remote]:
    remote = Remote()
    yield remote
    remote.app.close()


async def test_a_chat_is_answered_with_its_text_and_log_probs(remote: Remote) -> None:
    content = [{"token": "ye", "logprob": -0.1}, {"token": "s", "logprob": -0.2}]
    choice = {"message": {"content": "yes"}, "finish_reason": "stop", "logprobs": {"content": content}}
    remote.answer = lambda asked: Answer({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
    client = remote.client()
    said = await client.chat([{"role": "user", "content": "prime?"}], max_tokens=3, log_probs=True, seed=4)
    assert (said.text, said.finish_reason, said.log_probs) == ("yes", "stop", (-0.1, -0.2))
    assert (said.prompt_tokens, said.completion_tokens) == (9, 2)
    asked = remote.seen[0]
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == f"Bearer {KEY.value}"
    assert asked.body["model"] == "judge"
    assert asked.body["seed"] == 4
    await client.close()


async def test_a_completion_continues_token_ids(remote: Remote) -> None:
    told = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0]}
    remote.answer = lambda asked: Answer({"choices": [{"text": "ab", "finish_reason": "length", "logprobs": told}]})
    client = remote.client()
    said = await client.complete([5, 6], max_tokens=2, log_probs=True)
    assert (said.text, said.tokens, said.log_probs) == ("ab", ("a", "b"), (-1.0, -2.0))
    assert remote.seen[0].body["prompt"] == [5, 6]
    await client.close()


async def test_scores_come_from_prompt_logprobs_where_they_are_offered(remote: Remote) -> None:
    told = [None, *({str(token): {"logprob": value}} for token, value in zip([6, 7, 8], LOG_PROBS[1:], strict=True))]
    remote.answer = lambda asked: Answer({"choices": [{"text": "", "prompt_logprobs": told}]})
    client = remote.client()
    assert (await client.score([5, 6], [7, 8])).log_probs == [-1.5, -2.5]
    assert "echo" not in remote.seen[0].body
    await client.close()


async def test_scores_come_from_echo_where_that_is_offered_and_the_way_is_remembered(remote: Remote) -> None:
    def answer(asked: Asked) -> Answer:
        if "prompt_logprobs" in asked.body:
            return Answer({"error": "unknown field prompt_logprobs"}, 400)
        return Answer({"choices": [{"text": "", "logprobs": {"token_logprobs": [*LOG_PROBS, -9.0]}}]})

    remote.answer = answer
    client = remote.client()
    for _ in range(2):
        assert (await client.score([5, 6], [7, 8])).log_probs == [-1.5, -2.5]
    assert ["echo" in asked.body for asked in remote.seen] == [False, True, True]
    await client.close()


async def test_a_server_that_tells_no_log_probs_of_a_prompt_cannot_score(remote: Remote) -> None:
    client = remote.client()
    with pytest.raises(CannotScore, match="no log-probs of given tokens"):
        await client.score([5], [7])
    with pytest.raises(CannotScore, match=r"temperature 0\.5"):
        await client.score([5], [7], 0.5)
    await client.close()


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_server_is_asked_again(remote: Remote, status: int) -> None:
    def answer(asked: Asked) -> Answer:
        return Answer({"choices": [{"text": "done"}]}) if len(remote.seen) == 3 else Answer({"error": "busy"}, status)

    remote.answer = answer
    client = remote.client()
    assert (await client.complete("x", max_tokens=1)).text == "done"
    assert client.http.retries == 2
    await client.close()


async def test_retry_after_is_waited_for(remote: Remote) -> None:
    def answer(asked: Asked) -> Answer:
        first = len(remote.seen) == 1
        return Answer({}, 429, {"retry-after": "1"}) if first else Answer({"choices": [{"text": "done"}]})

    remote.answer = answer
    client, clock = remote.client(), asyncio.get_running_loop().time
    began = clock()
    await client.complete("x", max_tokens=1)
    assert clock() - began >= 1.0
    await client.close()


async def test_a_wait_beyond_the_deadline_is_not_begun(remote: Remote) -> None:
    remote.answer = lambda asked: Answer({}, 429, {"retry-after": "3600"})
    client = remote.client()
    with pytest.raises(RemoteUnavailable, match="after the deadline"):
        await asyncio.wait_for(client.complete("x", max_tokens=1), 5)
    assert len(remote.seen) == 1
    await client.close()


async def test_tries_and_time_are_bounded(remote: Remote) -> None:
    remote.answer = lambda asked: Answer({}, 500)
    client = remote.client()
    with pytest.raises(RemoteUnavailable, match="4 tries failed"):
        await client.complete("x", max_tokens=1)
    assert len(remote.seen) == 4
    await client.close()
    remote.seconds = 30.0
    client = remote.client(deadline=0.2)
    with pytest.raises(RemoteUnavailable, match=r"0\.2 s"):
        await client.complete("x", max_tokens=1)
    await client.close()


async def test_what_is_wrong_is_not_asked_again_and_the_key_is_never_shown(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    remote.answer = lambda asked: Answer({"error": f"incorrect key {KEY.value}"}, 401)
    client = remote.client()
    with pytest.raises(RemoteRefused, match=r"401.*\*\*\*") as refused:
        await client.complete("x", max_tokens=1)
    assert len(remote.seen) == 1
    assert KEY.value not in f"{refused.value!r} {KEY!r} {KEY} {caplog.text}"
    await client.close()


async def test_so_many_calls_are_open_at_a_time(remote: Remote) -> None:
    remote.seconds = 0.02
    client = remote.client(concurrency=3)
    await asyncio.gather(*(client.complete("x", max_tokens=1) for _ in range(12)))
    assert (len(remote.seen), remote.most) == (12, 3)
    await client.close()


async def test_nobody_there_is_unavailable(remote: Remote) -> None:
    client = remote.client()
    await asyncio.to_thread(remote.app.close)
    with pytest.raises(RemoteUnavailable, match="no connection"):
        await client.complete("x", max_tokens=1)
    await client.close()


def test_pauses_double_up_to_the_longest_and_are_jittered() -> None:
    backoff = Backoff(first=1.0, longest=10.0)
    assert [backoff.pause(failed, None, 1.0) for failed in (1, 2, 3, 9)] == [1, 2, 4, 10]
    assert backoff.pause(3, None, 0.25) == 1.0
    assert backoff.pause(1, 7.0, 0.0) == 7.0


def test_retry_after_is_a_number_or_a_date() -> None:
    assert retry_after(None) is None
    assert retry_after("2.5") == 2.5
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT", now=lambda: 1445412470.0) == 10.0
    assert retry_after("soon") is None
    assert retry_after("Mon, 01 Jan 99999999999999999999") is None


def test_a_key_comes_from_the_environment_or_from_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("from the file\n")
    file.chmod(0o600)
    monkeypatch.setenv("A_KEY", "from the environment")
    for found, expected in (
        (ApiKey.find(env="A_KEY", file=file), "from the environment"),
        (ApiKey.find(env="NOT_SET", file=file), "from the file"),
    ):
        assert found is not None
        assert found.value == expected
    assert ApiKey.find() is None
    with pytest.raises(KeyMissing, match="NOT_SET"):
        ApiKey.find(env="NOT_SET")
    os.chmod(file, 0o644)
    with pytest.raises(KeyMissing, match="read by others"):
        ApiKey.find(file=file)


async def test_a_redirect_does_not_take_the_key_elsewhere(remote: Remote) -> None:
    remote.answer = lambda asked: Answer({}, 307, {"location": "http://127.0.0.1:9/elsewhere"})
    http = RemoteHttp(remote.app.url, key=KEY, backoff=QUICK)
    with pytest.raises(RemoteRefused, match="307"):
        await http.post("/x", {}, dict)
    await http.close()
