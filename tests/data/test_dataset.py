"""Order: the same sequence after every restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.loop import AGENT_LOOPS
from streamrl.config import from_dict
from streamrl.data import DatasetError, PromptDataset, train_dataset, training_steps, val_dataset
from streamrl.data.order import permutation


def rows(count: int) -> list[dict[str, Any]]:
    return [{"raw_prompt": [{"role": "user", "content": str(i)}]} for i in range(count)]


def test_the_permutation_never_changes_from_release_to_release():
    assert permutation(8, seed=42, epoch=0).tolist() == [6, 2, 5, 7, 0, 4, 3, 1]


@given(st.integers(1, 300), st.integers(0, 2**63), st.integers(0, 50))
def test_an_order_holds_every_row_once(size: int, seed: int, epoch: int):
    assert sorted(permutation(size, seed, epoch).tolist()) == list(range(size))


def test_epochs_and_seeds_differ():
    orders = {tuple(permutation(50, seed, epoch).tolist()) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_positions_are_spread_evenly():
    first = np.array([permutation(10, seed, 0)[0] for seed in range(5000)])
    counts = np.bincount(first, minlength=10)
    assert counts.min() > 400
    assert counts.max() < 600


def test_without_shuffle_the_order_is_that_of_the_files():
    assert PromptDataset(rows(5), shuffle=False).order(3).tolist() == [0, 1, 2, 3, 4]


def test_at_gives_the_row_with_its_index():
    dataset = PromptDataset(rows(20), seed=1)
    index = int(dataset.order(2)[7])
    assert dataset.at(2, 7) == {"raw_prompt": [{"role": "user", "content": str(index)}], "index": index}


def test_two_datasets_of_the_same_rows_and_seed_have_the_same_order():
    first, again = (PromptDataset(rows(30), seed=3) for _ in range(2))
    assert [first.at(epoch, 4) for epoch in range(9)] == [again.at(epoch, 4) for epoch in reversed(range(9))][::-1]


@pytest.fixture
def file(tmp_path: Path) -> str:
    lines = [{"prompt": str(i), "data_source": "n", "reward_model": {"ground_truth": i}} for i in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path / "a.jsonl")


def contents(dataset: PromptDataset) -> list[int]:
    return [int(dataset.row(i)["raw_prompt"][0]["content"]) for i in range(len(dataset))]


def test_max_samples_takes_the_first_rows_or_draws_them_by_the_seed(file: str):
    assert contents(PromptDataset.from_files([file], shuffle=False, max_samples=3)) == [0, 1, 2]
    drawn = contents(PromptDataset.from_files([file], seed=1, max_samples=10))
    assert drawn == contents(PromptDataset.from_files([file], seed=1, max_samples=10)) == sorted(drawn)
    assert drawn != list(range(10))


def test_max_samples_beyond_the_file_takes_all(file: str):
    assert len(PromptDataset.from_files([file], max_samples=1000)) == 100


def test_the_datasets_of_a_configuration(file: str):
    data = {"train_files": [file], "val_files": [file], "train_batch_size": 30, "seed": 5, "val_max_samples": 7}
    config = from_dict({"data": data})
    train, val = train_dataset(config), val_dataset(config)
    assert train.order(0).tolist() == permutation(100, 5, 0).tolist()
    assert val is not None
    assert contents(val) == [0, 1, 2, 3, 4, 5, 6]
    assert training_steps(config, len(train)) == 30 * 3
    assert training_steps(from_dict({"data": data, "trainer": {"total_training_steps": 4}}), len(train)) == 4


def test_no_validation_file_means_no_validation_set():
    assert val_dataset(from_dict({})) is None


def test_fewer_prompts_than_a_batch_are_an_error(file: str):
    config = from_dict({"data": {"train_files": [file], "train_max_samples": 5, "train_batch_size": 8}})
    with pytest.raises(DatasetError, match="5 prompts are fewer than data.train_batch_size=8"):
        train_dataset(config)


def named(file: str, agent: str, default: str = "single_turn_agent") -> PromptDataset:
    """A file of 8 rows whose last names an agent."""
    lines = Path(file).read_text().splitlines()[:8]
    Path(file).write_text("\n".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | {"agent_name": agent})]))
    rollout = {"agent": {"default_agent_loop": default}}
    data = {"train_files": [file], "train_batch_size": 8}
    return train_dataset(from_dict({"data": data, "actor_rollout_ref": {"rollout": rollout}}))


LOOPS = """
from agent_loop.loop import register_agent_loop

@register_agent_loop("registered_beside")
class Loop: ...
"""


def test_rows_may_name_a_registered_loop_the_default_and_what_its_file_registers(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(AGENT_LOOPS, "_entries", dict(AGENT_LOOPS._entries))
    (tmp_path / "mine.py").write_text(LOOPS)
    default = f"{tmp_path}/mine.py:Loop"
    for agent in ("tool_agent", default, "registered_beside"):
        assert len(named(file, agent, default)) == 8


@pytest.mark.parametrize("agent", ["tool_agnt", "@tmp/mine.py:Loop"])
def test_a_row_that_names_another_loop_is_refused_at_start_and_no_file_is_loaded(file: str, tmp_path: Path, agent: str):
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    with pytest.raises(
        DatasetError, match=r"line 8, column 'agent_name': there is no .*rows may name single_turn_agent"
    ):
        named(file, agent.replace("@tmp", str(tmp_path)))
