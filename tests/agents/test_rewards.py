"""A score is a finite number; a reward that breaks fails the session instead of scoring 0."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.rewards import RewardError, RewardFunction, last_turn, score_components, told_numbers
from agent_loop.trajectory import Trajectory
from tests.agents.fakes import byte_chat

CHAT = byte_chat()
ROW: dict[str, Any] = {"data_source": "d", "reward_model": {"ground_truth": "391"}, "extra_info": {"index": 4}}


def trajectory(*turns: str) -> Trajectory:
    """Assistant turns with the tool text "99" between them."""
    made = Trajectory(prompt_ids=CHAT.encode("?"), num_turns=2 * len(turns))
    for i, turn in enumerate(turns):
        if i:
            made.append_context(CHAT.encode("99"))
        ids = CHAT.encode(turn + "<|im_end|>")
        made.append_sampled(ids, [0.0] * len(ids), [0] * len(ids))
    return made


FILE = """
import asyncio, time
def plain(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return 0.5 + bonus
async def dictionary(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1, "seen": [data_source, solution_str, ground_truth, extra_info["index"], extra_info["num_turns"]]}
def broken(**kwargs): raise KeyError("x")
def nothing(**kwargs): return None
def infinite(**kwargs): return float("inf")
async def sleepy(**kwargs): await asyncio.sleep(60)
def hung(**kwargs): time.sleep(0.5)
def hung_for_good(**kwargs): time.sleep(1e6)
def leaving(**kwargs): raise SystemExit(3)
def stopping(**kwargs): raise StopIteration("x")
def detailed(kib, **kwargs): return {"score": 1, "why": "x", "log": ["0123456789abcdef"] * (kib << 10 >> 4)}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(FILE)
    return path


async def test_numbers_and_dicts_are_scores(file: Path) -> None:
    done = trajectory("= 391")
    assert (await RewardFunction(f"{file}:plain", kwargs={"bonus": 0.25})(ROW, done, CHAT)).value == 0.75
    score = await RewardFunction(f"{file}:dictionary")(ROW, done, CHAT)
    assert score.value == 1.0
    assert score.details == {"seen": ["d", "= 391", "391", 4, 2]}


@pytest.mark.parametrize(("name", "error"), [("nothing", "returned None"), ("infinite", "must be finite")])
async def test_no_number_is_an_error(file: Path, name: str, error: str) -> None:
    with pytest.raises(RewardError, match=error):
        await RewardFunction(f"{file}:{name}")(ROW, trajectory("= 391"), CHAT)


async def test_an_exception_of_the_function_is_not_a_score(file: Path) -> None:
    with pytest.raises(KeyError):
        await RewardFunction(f"{file}:broken")(ROW, trajectory("= 391"), CHAT)


@pytest.mark.parametrize("name", ["sleepy", "hung"])
async def test_a_reward_has_a_time_out_even_if_it_blocks(file: Path, name: str) -> None:
    begun = time.monotonic()
    with pytest.raises(RewardError, match=r"gave no score within 0\.05 s"):
        await RewardFunction(f"{file}:{name}", timeout=0.05)(ROW, trajectory("= 391"), CHAT)
    assert time.monotonic() - begun < 0.4


@pytest.mark.parametrize(("name", "raised"), [("leaving", "SystemExit: 3"), ("stopping", "StopIteration: x")])
async def test_what_a_thread_cannot_hand_over_is_an_error_that_names_it(file: Path, name: str, raised: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{name}' raised {raised}"):
        await RewardFunction(f"{file}:{name}", timeout=5.0)(ROW, trajectory("= 391"), CHAT)


HANGS = """
import asyncio, sys
from agent_loop.rewards import RewardError, RewardFunction
from tests.agents.test_rewards import CHAT, ROW, trajectory
try:
    asyncio.run(RewardFunction(sys.argv[1], timeout=0.1)(ROW, trajectory("= 391"), CHAT))
except RewardError as error:
    sys.exit(str(error))
"""


def test_a_reward_that_hangs_for_good_does_not_keep_the_process(file: Path) -> None:
    spec = f"{file}:hung_for_good"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", HANGS, spec], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("gave no score within 0.1 s")


async def test_the_last_integer_of_the_last_turn_counts_not_the_tools() -> None:
    reward = RewardFunction("last_integer")
    assert (await reward(ROW, trajectory("<tool_call>", "it is 391"), CHAT)).value == 1.0
    assert (await reward(ROW, trajectory("391", "it is 390"), CHAT)).value == 0.0
    assert (await reward(ROW, trajectory("no number"), CHAT)).details == {"pred": ""}
    assert last_turn(trajectory("a", "b"), CHAT) == "b"


async def test_the_example_reward_runs() -> None:
    path = Path(__file__).parents[2] / "examples/calculator/reward.py"
    assert (await RewardFunction(f"{path}:compute_score")(ROW, trajectory("= 391"), CHAT)).value == 1.0


def test_components_of_a_score_are_the_finite_numbers_that_were_asked_for() -> None:
    given = {"right": True, "short": "0.5", "pred": "abc", "long": float("nan")}
    assert score_components(given, ["right", "short", "absent"]) == {"right": 1.0, "short": 0.5}
    with pytest.raises(RewardError, match="component 'pred' of the score is 'abc'; expected a number"):
        score_components(given, ["pred"])
    with pytest.raises(RewardError, match="component 'long' of the score is nan; a score must be finite"):
        score_components(given, ["long"])


async def test_what_a_reward_returns_besides_the_score_is_bounded(file: Path) -> None:
    asked = ROW, trajectory("1"), CHAT
    assert (await RewardFunction(f"{file}:detailed", kwargs={"kib": 100})(*asked)).details["why"] == "x"
    with pytest.raises(RewardError, match="returned more than 256 KiB besides the score \\(most of it in 'log'\\)"):
        await RewardFunction(f"{file}:detailed", kwargs={"kib": 5 << 10})(*asked)


def test_the_numbers_told_are_finite_and_few_with_acc_first_and_equal_answers_equal() -> None:
    given = {
        "score": 1.0,
        "a": 1,
        "b": float("nan"),
        "c": "text",
        "d": [1],
        "acc": np.bool_(True),
        "pred": "7",
        "e": 2.5,
    }
    told = told_numbers(given, 4)
    assert list(told) == ["acc", "pred", "a", "e"]
    assert (told["acc"], told["a"], told["e"]) == (1.0, 1.0, 2.5)
    assert told["pred"] == told_numbers({"pred": "7"}, 4)["pred"] != told_numbers({"pred": "8"}, 4)["pred"]
    assert list(told_numbers(given, 1)) == ["acc"]
