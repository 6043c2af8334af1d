"""A judge that a reward function asks, and a teacher that somebody else serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_loop.llm.keys import KeyMissing
from agent_loop.llm.openai_remote import OpenAIRemote
from agent_loop.llm.protocol import ServerDied
from agent_loop.llm.remote_http import RemoteRefused
from agent_loop.llm.remote_model import RemoteModel
from agent_loop.llm.remote_teacher import RemoteTeacher, check_teacher
from agent_loop.rewards import RewardError, RewardFunction
from agent_loop.trajectory import Trajectory
from tests.agents.fakes import byte_chat
from tests.fake_remote import KEY, Remote, log_prob, scores
from tests.http_app import Answer, Asked

CHAT = byte_chat()
FILE = """
async def judged(data_source, solution_str, ground_truth, extra_info, *, judge, limit=8):
    said = await judge.chat([{"role": "user", "content": f"Is {solution_str} {ground_truth}?"}], max_tokens=limit)
    return float(said.text == "yes")
async def no_judge(data_source, solution_str, ground_truth, extra_info): return 0.0
def waits_for_nobody(data_source, solution_str, ground_truth, extra_info, judge): return 0.0
"""


@pytest.fixture
def remote() -> Iterator[Remote]:
    remote = Remote()
    yield remote
    remote.app.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(FILE)
    return path


async def test_a_reward_function_asks_its_judge(remote: Remote, file: Path) -> None:
    def answer(asked: Asked) -> Answer:
        right = asked.body["messages"][0]["content"] == "Is 391 391?"
        return Answer({"choices": [{"message": {"content": "yes" if right else "no"}}]})

    remote.answer = answer
    judge = remote.client()
    reward = RewardFunction(f"{file}:judged", kwargs={"limit": 3}, judge=judge)
    for said, score in (("391", 1.0), ("17", 0.0)):
        done = Trajectory(prompt_ids=CHAT.encode("?"), num_turns=2)
        done.append_sampled(CHAT.encode(said), [0.0] * len(said), [0] * len(said))
        row: dict[str, Any] = {"reward_model": {"ground_truth": "391"}}
        assert (await reward(row, done, CHAT)).value == score
    assert remote.seen[0].body["max_tokens"] == 3
    await judge.close()


async def test_a_judge_that_nobody_asks_or_nobody_can_wait_for_is_refused(remote: Remote, file: Path) -> None:
    judge = remote.client()
    with pytest.raises(RewardError, match="no_judge' has no parameter 'judge', and reward.judge names one"):
        RewardFunction(f"{file}:no_judge", judge=judge)
    with pytest.raises(RewardError, match="waits_for_nobody' has a judge, whose answers are awaited: use async def"):
        RewardFunction(f"{file}:waits_for_nobody", judge=judge)
    await judge.close()


async def test_a_teacher_that_is_gone_is_a_lost_server_and_one_that_refuses_is_not(remote: Remote) -> None:
    remote.answer = scores
    client = remote.client()
    teacher = RemoteTeacher(client)
    assert (await teacher.score([5, 6], [7, 8], 1.0, session="s")).log_probs == [log_prob(7), log_prob(8)]
    remote.answer = lambda asked: Answer({"error": "not your model"}, 403)
    with pytest.raises(RemoteRefused, match="not your model"):
        await teacher.score([5], [7], 1.0, session="s")
    await asyncio.to_thread(remote.app.close)
    with pytest.raises(ServerDied, match="no connection"):
        await teacher.score([5], [7], 1.0, session="s")
    await client.close()


async def test_before_a_run_it_shows_whether_a_teacher_can_score(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY.value)
    teacher = RemoteModel(remote.app.url + "/v1", "big", key_env="TEACHER_KEY", deadline=5.0)
    with pytest.raises(ValueError, match="big at .* tells no log-probs of given tokens"):
        await check_teacher(teacher)
    remote.answer = scores
    await check_teacher(teacher)
    assert remote.seen[-1].headers["authorization"] == f"Bearer {KEY.value}"
    remote.answer = lambda asked: Answer({"error": f"{KEY.value} is no key"}, 401)
    with pytest.raises(ValueError, match=r"refuses: 401 .*\*\*\* is no key") as refused:
        await check_teacher(teacher)
    assert KEY.value not in str(refused.value)
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(KeyMissing, match="TEACHER_KEY holds no API key"):
        await check_teacher(teacher)


async def test_it_is_plain_values_until_it_is_opened(remote: Remote) -> None:
    opened = RemoteModel(remote.app.url + "/v1/", "m", concurrency=3, deadline=7.0).open()
    assert isinstance(opened, OpenAIRemote)
    assert (opened.model, opened.http.url) == ("m", remote.app.url + "/v1")
    await opened.close()
