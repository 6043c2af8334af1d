"""What a worker's thread tells its server: of one question, by one user, each worker once."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from streamrl.rollout.vllm.answers import Answers, tell


async def test_all_workers_are_waited_for_and_late_answers_to_an_older_question_are_dropped() -> None:
    answers = Answers()
    older, told = answers.expect("one", 2), answers.expect("two", 2)
    for about, text in (("one", "late"), ("two", "a"), ("one", "later"), ("two", "b")):
        threading.Thread(target=tell, args=(answers.address, about, ["", text])).start()
    assert sorted(await asyncio.wait_for(told, 10)) == [["", "a"], ["", "b"]]
    assert not older.done()
    answers.close()


async def test_another_user_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, user = Answers(), os.getuid()
    told = answers.expect("one", 1)
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    tell(answers.address, "one", ["", "theirs"])
    await asyncio.sleep(0.05)
    assert not told.done()
    monkeypatch.undo()
    tell(answers.address, "one", ["", "ours"])
    assert await asyncio.wait_for(told, 10) == [["", "ours"]]
    answers.close()


def test_whoever_tells_a_server_that_is_gone_goes_on() -> None:
    answers = Answers()
    answers.close()
    tell(answers.address, "one", ["", "x"])
