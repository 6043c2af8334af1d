"""A dataset written for another framework reads as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import from_dict, load_config
from streamrl.data import DatasetError, PromptDataset, train_dataset
from streamrl.data.load import columns_of

CHAT = [{"role": "user", "content": "1 + 1 = ?"}]
RULE = {"style": "rule", "ground_truth": "2"}
FORMS: dict[str, dict[str, Any]] = {
    "verl": {"prompt": CHAT, "data_source": "sums", "reward_model": RULE, "ability": "math", "extra_info": {"id": 7}},
    "TRL, messages": {"prompt": CHAT, "answer": "2"},
    "TRL, string": {"prompt": "1 + 1 = ?", "solution": "2", "level": 3},
    "TRL, ground truth": {"prompt": "1 + 1 = ?", "ground_truth": "2"},
    "SkyRL": {"prompt": CHAT, "env_class": "sums", "reward_spec": {"method": "rule", "ground_truth": "2"},
              "extras": {"id": 7}},
    "slime": {"input": "1 + 1 = ?", "label": "2", "metadata": {"id": 7}},
}  # fmt: skip


def read(tmp_path: Path, *rows: dict[str, Any], **data: Any) -> PromptDataset:
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = from_dict({"data": data})
    return PromptDataset.from_files([file], shuffle=False, columns=columns_of(config.data))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_the_same_prompt(tmp_path: Path, form: str):
    row = read(tmp_path, FORMS[form]).row(0)
    assert row["raw_prompt"] == CHAT
    assert row["data_source"] == "sums"
    assert row["reward_model"]["ground_truth"] == "2"
    assert row["extra_info"].get("id", 7) == 7


def test_further_columns_beside_a_bare_answer_reach_the_reward_function(tmp_path: Path):
    assert read(tmp_path, FORMS["TRL, string"]).row(0)["extra_info"] == {"level": 3}
    assert read(tmp_path, FORMS["verl"]).row(0)["extra_info"] == {"id": 7}


def test_columns_that_are_named_replace_those_of_the_table(tmp_path: Path):
    row = {"question": "1 + 1 = ?", "label": "no", "gold": "2", "about": {"id": 7}, "picture": ["a.png"]}
    names = {"prompt_key": "question", "label_key": "gold", "metadata_key": "about", "image_key": "picture"}
    read_row = read(tmp_path, row, **names).row(0)
    assert (read_row["raw_prompt"], read_row["reward_model"], read_row["images"]) == (CHAT, RULE, ["a.png"])
    assert read_row["extra_info"] == {"id": 7}


def test_a_column_that_is_named_must_be_there(tmp_path: Path):
    with pytest.raises(DatasetError, match="column 'question' is missing; the row has prompt, answer"):
        read(tmp_path, FORMS["TRL, messages"], prompt_key="question")


def test_slimes_name_of_the_prompt_key_is_understood(valid: list[str]):
    assert load_config([*valid, "data.input_key=question"]).config.data.prompt_key == "question"


def test_images_videos_and_audios_pass_through_untouched(tmp_path: Path):
    media = {"images": [{"path": "a.png", "bytes": None}], "videos": ["b.mp4"], "audios": [[0.5, 0.25]]}
    row = read(tmp_path, FORMS["verl"] | media).row(0)
    assert {name: row[name] for name in media} == media


def test_rows_choose_their_agent_tools_and_number_of_samples(tmp_path: Path):
    own = {"agent_name": "tool_agent", "tools_kwargs": {"search": {"top": 3}}, "tool_selection": ["search"], "n": 4}
    inside = {"extra_info": {"tool_selection": ["search"], "tools_kwargs": {"search": {"top": 3}}}, "__rollout_n__": 4}
    first, second = read(tmp_path, FORMS["verl"] | own, FORMS["verl"] | inside), own.keys() - {"agent_name"}
    assert {name: first.row(0)[name] for name in own} == own
    assert {name: first.row(1)[name] for name in second} == {name: own[name] for name in second}


CLASS = """
class Sums:
    def __init__(self, data_files, config, split):
        self.count = config.train_batch_size if split == "train" else 3

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"prompt": f"{index} + 1 = ?", "answer": index + 1}


def sums(data_files, config, split):
    for index in range(config.train_batch_size):
        yield {"prompt": f"{index} + 1 = ?", "answer": index + 1}


def wrong(files):
    return []


def bad_row(data_files, config, split):
    return [{"prompt": "?", "answer": 1}, {"prompt": 3, "answer": 1}]
"""


def custom(tmp_path: Path, name: str) -> PromptDataset:
    (tmp_path / "mine.py").write_text(CLASS)
    data = {"custom_cls": {"path": str(tmp_path / "mine.py"), "name": name}, "train_batch_size": 5, "shuffle": False}
    return train_dataset(from_dict({"data": data}))


@pytest.mark.parametrize("name", ["Sums", "sums"])
def test_rows_may_come_from_a_class_or_a_function_of_the_user(tmp_path: Path, name: str):
    dataset = custom(tmp_path, name)
    assert len(dataset) == 5
    assert dataset.row(4)["raw_prompt"] == [{"role": "user", "content": "4 + 1 = ?"}]
    assert dataset.row(4)["data_source"] == "mine"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wrong", "is called with data_files, config and split and gives rows"),
        ("bad_row", "mine.py:bad_row, row 2, column 'prompt': expected chat messages or a string, found int 3"),
        ("Nowhere", "has no 'Nowhere'"),
    ],
)
def test_a_custom_dataset_that_gives_no_rows_is_named(tmp_path: Path, name: str, says: str):
    with pytest.raises(DatasetError, match=says):
        custom(tmp_path, name)


@pytest.mark.parametrize(
    ("change", "processor", "fits"),
    [
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": ["a.png"]}, False, False),
        ({"prompt": [{"role": "user", "content": [{"type": "video_url", "text": "x"}]}]}, True, False),
        ({"prompt": "<image> 1?", "images": ["a.png"]}, True, False),
        ({"prompt": "<image> 1?", "images": ["a.png"]}, False, True),
        ({"prompt": "1?", "images": ["a.png"]}, True, True),
        ({"prompt": "<image> 1?"}, True, True),
    ],
)
def test_rows_that_show_the_model_more_than_text_are_refused_because_no_engine_takes_it(
    tmp_path: Path, change: dict[str, Any], processor: bool, fits: bool
):
    model = tmp_path / "model"
    shutil.copytree(Path(__file__).parents[2] / "examples/calculator/model", model)
    if processor:
        (model / "preprocessor_config.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text(json.dumps({"answer": 1} | change) + "\n")
    data = {"train_files": [str(tmp_path / "a.jsonl")], "train_batch_size": 1}
    config = from_dict({"data": data, "actor_rollout_ref": {"model": {"path": str(model)}}})
    if fits:
        assert len(train_dataset(config)) == 1
    else:
        with pytest.raises(DatasetError, match="line 1: the messages show the model (image|video); training"):
            train_dataset(config)
