"""What the model said, written by the ranks and shown by the trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from streamrl.recording.samples import SHOWN, SampleOrder, write_samples


class Letters:
    """A tokenizer of letters."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))


def order(directory: str | None, *, show: list[str], keys: list[str], prompt_len: int = 3) -> SampleOrder:
    tags = [{"prompt_len": prompt_len, "score": float(i)} for i in range(len(keys))]
    return SampleOrder("train", 7, keys, tags, [{"mode": "greedy"} for _ in keys], directory, show)


def columns(texts: list[str]) -> dict[str, object]:
    return {
        "input_ids": [np.array([ord(letter) for letter in text]) for text in texts],
        "reward_model": [{"ground_truth": "42"} for _ in texts],
        "reward_extra_info": [{"pred": np.int64(4), "score": 9.0} for _ in texts],
        "num_turns": np.array([2 for _ in texts]),
        "data_source": ["sums" for _ in texts],
    }


def test_a_step_is_one_file_in_verls_form(tmp_path: Path) -> None:
    write_samples(
        order(str(tmp_path / "new"), show=[], keys=["a_0_0", "a_1_0"]), columns(["1+1two", "2+2four"]), Letters()
    )
    lines = [json.loads(line) for line in (tmp_path / "new/7.jsonl").read_text().splitlines()]
    assert lines[1] == {
        "input": "2+2", "output": "four", "gts": "42", "score": 1.0, "step": 7, "uid": "a", "num_turns": 2,
        "data_source": "sums", "mode": "greedy", "pred": 4,
    }  # fmt: skip
    assert len(lines) == 2


def test_a_step_that_is_done_again_replaces_its_file(tmp_path: Path) -> None:
    for keys in (["a_0_0", "b_0_0"], ["c_0_0"]):
        write_samples(order(str(tmp_path), show=[], keys=keys), columns(["1+1two"] * len(keys)), Letters())
    assert [path.name for path in tmp_path.iterdir()] == ["7.jsonl"]
    assert [json.loads(line)["uid"] for line in (tmp_path / "7.jsonl").read_text().splitlines()] == ["c"]


def test_only_what_is_shown_is_read_where_nothing_is_written_and_it_is_short(tmp_path: Path) -> None:
    asked = order(None, show=["b_0_0"], keys=["a_0_0", "b_0_0"])
    assert asked.wanted == [1]
    [shown] = write_samples(asked, columns(["q" * 3 + "x" * 5000]), Letters())
    assert len(shown["output"]) == SHOWN + len("... ")
    assert shown["score"] == 1.0
    assert not list(tmp_path.iterdir())
