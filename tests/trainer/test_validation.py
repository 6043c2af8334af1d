"""What validation asks, and what it makes of the answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from streamrl.config.sections.rollout import ValidationSamplingConfig
from streamrl.data import PromptDataset
from streamrl.trainer.validation import PARTITION, Accuracies, Validator
from transfer_queue.local import LocalQueue

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
        running = background.create_task(validator.accuracies("before"))
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


def test_the_name_of_a_mean_says_over_how_many_answers_it_is():
    found = Accuracies({"sampled": 4, "greedy": 1})
    found.scores["sampled", "sum"] += [1.0, 0.0, 0.0, 0.0]
    found.scores["greedy", "sum"] += [1.0]
    assert found.metrics() == {"val-core/sum/reward/mean@4": 0.25, "val-core/sum/reward_greedy/mean@1": 1.0}
    assert found.means() == {"sampled": 0.25, "greedy": 1.0}
