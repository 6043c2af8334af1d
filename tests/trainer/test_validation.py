"""What validation asks, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from streamrl.config.sections.rollout import ValidationSamplingConfig
from streamrl.data import PromptDataset
from streamrl.monitor.registry import check_step_metrics
from streamrl.trainer.validation import PARTITION, Validator, answer_of
from streamrl.trainer.validation_lane import ValidationLane
from streamrl.trainer.validation_metrics import FAILED, Answer, Outcomes, Question, statistics
from transfer_queue.local import LocalQueue
from transfer_queue.net.messages import Group, Row

ROWS: list[dict[str, Any]] = [
    {"raw_prompt": [{"role": "user", "content": f"{i} + 1 = ?"}], "data_source": "sum", "reward_model": {}}
    for i in range(2)
]


async def asked(sampling: ValidationSamplingConfig) -> Counter[tuple[tuple[str, Any], ...]]:
    """How often a validation of two questions asks with which sampling."""
    local = LocalQueue()
    client = local.client("trainer")
    validator = Validator(client, PromptDataset(ROWS, shuffle=False), sampling, stall_timeout=60.0)
    await validator.open()
    async with asyncio.timeout(10), asyncio.TaskGroup() as background:
        running = background.create_task(validator.outcomes("before"))
        groups = (await client.watch(PARTITION, -1, wait=5.0)).groups
        while not groups:
            groups = (await client.watch(PARTITION, 0, wait=5.0)).groups
        running.cancel()
    told = ("temperature", "greedy", "top_p", "top_k")
    return Counter(tuple((key, group.tag[key]) for key in told if key in group.tag) for group in groups)


GREEDY = (("temperature", 0.0), ("greedy", True))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, {(("temperature", 1.0), ("greedy", False)): 2, GREEDY: 2}),
        ({"n": 3}, {(("temperature", 1.0), ("greedy", False)): 6, GREEDY: 2}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.7, "top_k": 20, "n": 4},
            {(("temperature", 0.6), ("greedy", False), ("top_p", 0.7), ("top_k", 20)): 8},
        ),
        ({"temperature": 0.6}, {(("temperature", 0.6), ("greedy", False)): 2}),
        ({"temperature": 0.0}, {GREEDY: 2}),
        ({"do_sample": False, "n": 2}, {GREEDY: 4}),
    ],
)
async def test_a_validation_asks_as_val_kwargs_say(sampling: dict[str, Any], expected: dict[Any, int]):
    assert await asked(ValidationSamplingConfig(**sampling)) == expected


def outcomes(answers: Mapping[Question, Sequence[Answer]], **n: int) -> Outcomes:
    found = Outcomes(n)
    for question, given in answers.items():
        for answer in given:
            found.add(question, answer)
    return found


def test_the_name_of_a_mean_says_over_how_many_answers_it_is():
    given = [{"reward": score} for score in (1.0, 0.0, 0.0, 0.0)]
    found = outcomes(
        {Question("sampled", "sum", 0): given, Question("greedy", "sum", 0): [{"reward": 1.0}]}, sampled=4, greedy=1
    )
    metrics = found.metrics()
    check_step_metrics(metrics)
    assert metrics["val-core/sum/reward/mean@4"] == 0.25
    assert metrics["val-core/sum/reward_greedy/mean@1"] == 1.0
    assert (metrics["val-aux/mean/sampled"], metrics["val-aux/mean/greedy"]) == (0.25, 1.0)
    assert {name for name in metrics if name.startswith("val-core/sum/reward/")} == {
        f"val-core/sum/reward/{name}" for name in ("mean@4", "best@4/mean", "best@4/std")
    }
    assert "val-aux/sum/reward/worst@2/mean" in metrics


def test_each_data_source_has_its_means_and_acc_stands_before_the_score():
    given = {
        Question("sampled", "openai/gsm8k", 0): [{"reward": 0.9, "acc": 1.0, "format": 1.0}],
        Question("sampled", "openai/gsm8k", 1): [FAILED],
        Question("sampled", "math", 2): [{"reward": 0.5}],
    }
    metrics = outcomes(given, sampled=1).metrics()
    check_step_metrics(metrics)
    assert metrics == {
        "val-core/openai/gsm8k/acc/mean@1": 0.5, "val-aux/openai/gsm8k/reward/mean@1": 0.45,
        "val-aux/openai/gsm8k/format/mean@1": 0.5, "val-core/math/reward/mean@1": 0.5,
        "val-aux/mean/sampled": pytest.approx(1.4 / 3),
    }  # fmt: skip


def test_the_mean_of_a_validation_is_that_of_acc_where_every_answer_that_came_has_one():
    right, wrong = {"reward": 0.3, "acc": 1.0}, {"reward": -0.2, "acc": 0.0}
    asked = [Question("sampled", source, place) for source in ("a", "b") for place in range(2)]
    given = {question: [answer] for question, answer in zip(asked, (right, wrong, right, FAILED), strict=True)}
    found = outcomes(given, sampled=1)
    check_step_metrics(found.metrics())
    assert found.means() == {"sampled": pytest.approx(0.1), "sampled/acc": 0.5}
    given[asked[1]] = [{"reward": 1.0}]
    partly = outcomes(given, sampled=1)
    assert set(partly.means()) == {"sampled"}
    assert "val-core/a/reward/mean@1" in partly.metrics(), "an acc that an answer lacks is that of others"
    assert "val-core/b/acc/mean@1" in partly.metrics()


def by_hand(values: tuple[float, ...], predictions: tuple[int, ...], k: int) -> dict[str, float]:
    """One draw after the other, as verl's definitions say."""
    generator = np.random.RandomState(42)
    best, worst, majority = [], [], []
    for _ in range(1000):
        drawn = generator.choice(len(values), size=k, replace=True)
        best.append(max(values[i] for i in drawn))
        worst.append(min(values[i] for i in drawn))
        votes: dict[int, list[float]] = {}
        for i in drawn:
            votes.setdefault(predictions[i], []).append(values[i])
        majority.append(max(votes.values(), key=len)[0])
    kinds = {"best": best, "worst": worst, "maj": majority}
    means = {f"{kind}@{k}/mean": float(np.mean(found)) for kind, found in kinds.items()}
    return means | {f"{kind}@{k}/std": float(np.std(found)) for kind, found in kinds.items()}


def test_best_worst_and_majority_of_k_are_what_the_same_draws_give_by_hand():
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # noqa: T201
    rng = random.Random(seed)
    for n in (2, 3, 6, 8):
        values = tuple(rng.choice([0.0, 0.5, 1.0]) for _ in range(n))
        predictions = tuple(rng.randrange(1 + n // 2) for _ in range(n))
        found = statistics(values, predictions)
        sizes = [k for k in (2, 4, 8) if k < n] + [n]
        expected = {name: value for k in sizes for name, value in by_hand(values, predictions, k).items()}
        expected |= {f"mean@{n}": sum(values) / n, f"std@{n}": float(np.std(values))}
        assert found == pytest.approx(expected)


def test_a_majority_beats_single_answers_and_one_without_an_answer_agrees_with_nobody():
    right, wrong = {"reward": 1.0, "pred": 7.0}, [{"reward": 0.0, "pred": 8.0 + i} for i in range(3)]
    voted = outcomes({Question("sampled", "sum", 0): [right] * 5 + wrong}, sampled=8).metrics()
    assert voted["val-core/sum/reward/maj@8/mean"] > 0.9 > voted["val-core/sum/reward/mean@8"]
    failed = outcomes({Question("sampled", "sum", 0): [right] * 2 + [{"reward": 0.0}] * 6}, sampled=8).metrics()
    assert failed["val-core/sum/reward/maj@8/mean"] > 1.2 * failed["val-core/sum/reward/mean@8"]


def test_an_answer_is_the_score_of_its_last_row_and_what_its_reward_told():
    first, last = Row("a_0_0", {"score": 0.0}), Row("a_0_1", {"score": 1.0, "score/acc": 1.0, "score/pred": 5.0})
    group = Group("a", "ready", 1, 0, {}, rows=[first, last])
    assert answer_of(group) == {"reward": 1.0, "acc": 1.0, "pred": 5.0}


async def test_a_validation_that_is_due_while_another_goes_on_is_left_out_and_that_is_said():
    done, told, ended = [], [], asyncio.Event()

    async def validate(label: str, step: int) -> None:
        await ended.wait()
        done.append((label, step))

    lane = ValidationLane(validate, told.append)
    lane.begin("during", 2)
    lane.begin("during", 4)
    assert told[0].startswith("no validation of step 4: that of step 2 is still under way; raise trainer.test_freq")
    ended.set()
    await lane.idle()
    lane.begin("during", 6)
    await lane.idle()
    assert done == [("during", 2), ("during", 6)]
    assert len(told) == 1


async def test_the_error_of_a_validation_is_raised_to_the_trainer_and_closing_ends_one():
    async def validate(label: str, step: int) -> None:
        if step == 2:
            raise RuntimeError("every session failed")
        await asyncio.Event().wait()

    lane = ValidationLane(validate, pytest.fail)
    lane.begin("during", 2)
    lane.check()  # not yet
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="every session failed"):
        lane.check()
    lane.begin("during", 4)
    assert lane.under_way
    async with asyncio.timeout(5.0):
        await lane.close()
    assert not lane.under_way
