"""A remote model that means ill, or is broken: an error of ours that names what is wrong, no key, and little memory."""

from __future__ import annotations

import gzip
import logging
import re
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_loop.llm.keys import ApiKey, KeyMissing
from agent_loop.llm.openai_remote import OpenAIRemote
from agent_loop.llm.remote_http import RemoteError, RemoteInvalid, RemoteRefused, RemoteUnavailable
from tests.fake_remote import KEY, Remote, scores
from tests.http_app import Answer, Asked

CHAT = [{"role": "user", "content": "prime?"}]
YES = {"message": {"content": "yes"}}


@pytest.fixture
def remote() -> Iterator[Remote]:
    remote = Remote()
    yield remote
    remote.app.close()


async def refused(remote: Remote, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> RemoteError:
    remote.answer = lambda asked: Answer(body, status, headers or {})
    client = remote.client()
    with pytest.raises(RemoteError) as caught:
        await client.chat(CHAT, max_tokens=1, log_probs=True)
    await client.close()
    return caught.value


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"x" * 290 + b" " + KEY.value.encode(), 401),
        ({KEY.value: 1}, 200),
        ({"error": {"message": f"no {KEY.value}"}}, 200),
        ({"choices": KEY.value}, 200),
        (KEY.value.encode(), 200),
        (KEY.value.encode("utf-16"), 500),
    ],
)
async def test_no_part_of_the_key_is_in_an_error_or_in_the_log(
    remote: Remote, body: Any, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    error = await refused(remote, body, status, {"x-told": KEY.value})
    parts = {KEY.value[at : at + 6] for at in range(len(KEY.value) - 5)}
    assert not [part for part in parts if part in f"{error!r} {caplog.text}"]


TOLD = [
    ({}, "required field `choices`"),
    ({"choices": []}, "choices"),
    ({"choices": [{"message": None}]}, r"message"),
    ({"choices": [{"message": {"content": ["yes"]}}]}, r"message\.content"),
    ({"choices": [YES], "usage": "many"}, r"usage"),
    ({"choices": [YES | {"logprobs": [1]}]}, r"logprobs"),
    ({"choices": [YES | {"logprobs": {"content": [{"token": "y"}]}}]}, "required field `logprob`"),
    ({"choices": [YES | {"logprobs": {"content": [{"token": "y", "logprob": "abc"}]}}]}, r"logprob"),
    ({"choices": [YES | {"logprobs": {"content": [{"token": "y", "logprob": float("nan")}]}}]}, "malformed"),
    ({"choices": [YES | {"logprobs": {"content": [{"token": "y", "logprob": 5.0}]}}]}, r"logprob"),
    (b'{"x":' + b"[" * 200_000, "recursion"),
    (b"<html>", "malformed.*<html>"),
    (b"\xff", "malformed|UTF-8"),
    ([], "Expected `object`"),
]


@pytest.mark.parametrize(("body", "says"), TOLD, ids=[says for _, says in TOLD])
async def test_an_answer_that_makes_no_sense_is_asked_for_again_and_then_told(
    remote: Remote, body: Any, says: str
) -> None:
    error = await refused(remote, body)
    assert isinstance(error, RemoteInvalid)
    assert len(remote.seen) == 3
    assert re.search(f"chat/completions: 3 answers make no sense.*{says}", str(error)), str(error)


@pytest.mark.parametrize("status", [200, 401])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_an_answer_that_cannot_be_unpacked_is_an_error_of_ours(
    remote: Remote, encoding: str, status: int
) -> None:
    error = await refused(remote, b"no " + encoding.encode(), status, {"content-encoding": encoding})
    assert "cannot be unpacked" in str(error)
    assert isinstance(error, RemoteRefused if status == 401 else RemoteInvalid)


@pytest.mark.parametrize("charset", ["rot13", "hex", "zip", "utf-16"])
async def test_the_charset_of_an_error_is_not_believed(remote: Remote, charset: str) -> None:
    error = await refused(remote, b"who are you", 401, {"content-type": f"text/plain; charset={charset}"})
    assert "refuses: 401 who are you" in str(error)


async def test_a_date_of_return_that_is_none_is_not_waited_for(remote: Remote) -> None:
    error = await refused(remote, {}, 503, {"retry-after": "Mon, 01 Jan 99999999999999999999"})
    assert "4 tries failed; the last: 503" in str(error)


@pytest.mark.parametrize("code", [None, "overloaded", True, 10**30, 529])
async def test_an_error_with_status_200_is_told_and_asked_again(remote: Remote, code: Any) -> None:
    error = await refused(remote, {"error": {"message": "overloaded", "code": code}})
    assert isinstance(error, RemoteUnavailable)
    assert "overloaded" in str(error)
    assert len(remote.seen) == 4


async def test_an_error_with_status_200_that_is_the_askers_is_not_asked_again(remote: Remote) -> None:
    error = await refused(remote, {"error": {"message": "no such model", "code": 404}})
    assert (type(error), error.status, len(remote.seen)) == (RemoteRefused, 404, 1)


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf"), -1e30, 5.0, "abc", None])
async def test_a_score_that_cannot_be_is_asked_for_again(remote: Remote, wrong: Any) -> None:
    def answer(asked: Asked) -> Answer:
        told = scores(asked)
        if len(remote.seen) == 1:
            told.body["choices"][0]["prompt_logprobs"][2]["7"]["logprob"] = wrong
        return told

    remote.answer = answer
    client = remote.client()
    assert (await client.score([5, 6], [7, 8])).log_probs == [-0.5, -1.5]
    assert len(remote.seen) == 2
    await client.close()


async def test_scores_that_can_never_be_are_told(remote: Remote) -> None:
    told = {"token_logprobs": [None, -0.5, 5.0]}
    remote.answer = lambda asked: Answer({}, 400) if "prompt_logprobs" in asked.body else Answer(
        {"choices": [{"logprobs": told}]}
    )  # fmt: skip
    client = remote.client()
    with pytest.raises(RemoteInvalid, match=r"Expected `float` <= 0\.01 - at .*token_logprobs"):
        await client.score([5, 6], [7])
    await client.close()


async def test_an_answer_that_does_not_end_is_cut_off_and_takes_little_memory(remote: Remote) -> None:
    packed = gzip.compress(bytes(256 << 20), 1)

    async def endless() -> AsyncIterator[str]:
        while True:
            yield "x" * (1 << 16)

    tracemalloc.start()
    error = await refused(remote, packed, headers={"content-encoding": "gzip"})
    assert "an answer of more than 1052672 bytes" in str(error)
    remote.answer = lambda asked: Answer(stream=endless())
    client = remote.client()
    with pytest.raises(RemoteInvalid, match="an answer of more than"):
        await client.chat(CHAT, max_tokens=1)
    remote.answer = lambda asked: Answer(packed, 401, {"content-encoding": "gzip"})
    with pytest.raises(RemoteRefused, match="401"):
        await client.chat(CHAT, max_tokens=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20, f"{peak >> 20} MiB"
    await client.close()


async def test_a_deadline_says_whether_the_call_had_its_turn(remote: Remote) -> None:
    remote.seconds = 30.0
    client = remote.client(deadline=0.5, concurrency=1)
    with pytest.raises(RemoteUnavailable, match=r"no answer within 0\.5 s; try 1 got none$"):
        await client.chat(CHAT, max_tokens=1)
    async with client.http._places:
        with pytest.raises(RemoteUnavailable, match=r"no answer within 0\.5 s; all 1 places were taken by other calls"):
            await client.chat(CHAT, max_tokens=1)
    await client.close()


@pytest.mark.parametrize(
    "url",
    ["notaurl", "127.0.0.1:8991/v1", "", "ftp://host/v1", "http://", "http://[::1", "http://h:99999", "http://h\n"],
)
def test_what_is_no_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="the url of a remote model is .*; expected https://host/v1"):
        OpenAIRemote(url, "judge")


@pytest.mark.parametrize("url", ["https://u:hunter22@host/v1", "u:hunter22@host/v1", "https://host/v1?key=hunter22"])
def test_an_address_that_holds_a_secret_is_refused_without_it(url: str) -> None:
    with pytest.raises(ValueError, match="give a key by key_env or key_file") as caught:
        OpenAIRemote(url, "judge")
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-a\nsk-b", "sk-a\r\nX: y", "sk-\xe9", "sk-\x00", " sk", ""])
def test_a_key_that_no_header_can_hold_is_refused_at_once_by_its_place(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyMissing, match="the API key (has|is)") as caught:
        ApiKey(key)
    assert "sk" not in str(caught.value)
    if not key.strip() or key != key.strip():
        return
    (tmp_path / "key").write_text(key)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(KeyMissing, match="the API key in .*key has"):
        ApiKey.find(file=tmp_path / "key")
    if "\0" not in key:
        monkeypatch.setenv("A_KEY", key)
        with pytest.raises(KeyMissing, match="the API key in the environment variable A_KEY has"):
            ApiKey.find(env="A_KEY")
