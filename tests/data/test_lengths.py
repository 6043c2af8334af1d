"""Prompts longer than data.max_prompt_length are found before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agent_loop.rendering.chat import ChatTokenizer
from streamrl.cli import train
from streamrl.config import load_config
from streamrl.data import DatasetError, PromptDataset, train_dataset
from streamrl.data import lengths as module
from streamrl.data.lengths import PromptLimit
from streamrl.runtime.settings import agent_worker

CHAT = ChatTokenizer.from_pretrained(Path(__file__).parents[2] / "examples/calculator/model")
SUM = "1776 - 4687 + 12 * 12 = ?"


def tokens(text: str) -> int:
    return len(CHAT.render_prompt([{"role": "user", "content": text}]))


def file_of(tmp_path: Path, *prompts: Any) -> Path:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": 1}) + "\n" for prompt in prompts))
    return file


def read(file: Path, limit: PromptLimit, **options: Any) -> PromptDataset:
    return PromptDataset.from_files([file], shuffle=False, limit=limit, **options)


def test_a_prompt_of_exactly_the_limit_stays_and_one_token_more_is_an_error(tmp_path: Path):
    file = file_of(tmp_path, "1?", SUM)
    assert len(read(file, PromptLimit(CHAT, tokens(SUM)))) == 2
    with pytest.raises(DatasetError) as caught:
        read(file, PromptLimit(CHAT, tokens(SUM) - 1))
    assert str(caught.value).startswith(
        f"{file}, line 2: the prompt has {tokens(SUM)} tokens, data.max_prompt_length is {tokens(SUM) - 1}; raise it"
    )


def test_the_error_names_the_first_row_and_counts_the_rest(tmp_path: Path):
    file = file_of(tmp_path, "1?", SUM, SUM, SUM)
    with pytest.raises(DatasetError, match=r"line 2: .* \(and 2 more rows\)"):
        read(file, PromptLimit(CHAT, tokens(SUM) - 1))


def test_filtered_prompts_leave_and_are_counted(tmp_path: Path):
    dataset = read(file_of(tmp_path, "1?", SUM, "2?", SUM), PromptLimit(CHAT, tokens(SUM) - 1, "drop"))
    assert (len(dataset), dataset.left_out) == (2, 2)
    assert dataset.row(1)["raw_prompt"][0]["content"] == "2?"


def test_a_dataset_without_a_prompt_that_fits_is_an_error(tmp_path: Path):
    with pytest.raises(DatasetError, match="every prompt in .* is longer than data.max_prompt_length=3 tokens"):
        read(file_of(tmp_path, "1?"), PromptLimit(CHAT, 3, "drop"))


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_a_cut_prompt_fits_and_keeps_its_template_and_its_shorter_messages(tmp_path: Path, side: Any):
    long = ",".join(map(str, range(100, 160)))
    file = file_of(tmp_path, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": long}])
    limit = tokens("Be brief.") + 40
    messages = read(file, PromptLimit(CHAT, limit, side)).row(0)["raw_prompt"]
    kept = messages[1]["content"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert limit - 8 <= len(CHAT.render_prompt(messages)) <= limit
    ends = (kept.startswith("100,"), kept.endswith(",159"))
    assert ends == {"left": (False, True), "right": (True, False), "middle": (True, True)}[side]
    assert len(kept) < len(long)


def test_characters_cut_in_two_are_left_out(tmp_path: Path):
    for side in ("left", "right", "middle"):
        row = read(file_of(tmp_path, "äöü€" * 30), PromptLimit(CHAT, 50, side)).row(0)
        assert set(row["raw_prompt"][0]["content"]) <= set("äöü€")


def test_a_template_alone_longer_than_the_limit_cannot_be_cut(tmp_path: Path):
    with pytest.raises(DatasetError, match="line 1: the prompt cannot be cut to data.max_prompt_length=3"):
        read(file_of(tmp_path, SUM), PromptLimit(CHAT, 3, "left"))


def test_the_tools_that_an_agent_shows_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    template = "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = ChatTokenizer(CHAT.tokenizer, template, special={})
    limit = PromptLimit(chat, 60, "drop", lambda row: [{"name": "search" * 20}] if row["agent_name"] else [])
    rows = [{"prompt": "1?", "answer": 1, "agent_name": name} for name in (None, "tool_agent")]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(file, limit).row(0)["agent_name"] is None
    assert read(file, limit).left_out == 1


def test_only_the_samples_that_are_taken_are_checked(tmp_path: Path):
    assert len(read(file_of(tmp_path, "1?", SUM), PromptLimit(CHAT, tokens(SUM) - 1), max_samples=1)) == 1


def test_large_datasets_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "REMEMBERED_FROM", 3)
    file = file_of(tmp_path, "1?", SUM, SUM)
    limit = PromptLimit(CHAT, tokens(SUM) - 1, "drop")
    assert read(file, limit).left_out == 2
    with monkeypatch.context() as patch:
        patch.setattr(PromptLimit, "_count", lambda *_: pytest.fail("counted again"))
        assert read(file, limit).left_out == 2
    (memory,) = (tmp_path / "streamrl").iterdir()
    memory.write_bytes(b"damaged")
    assert read(file, limit).left_out == 2
    assert read(file_of(tmp_path, "1?", "2?", SUM), limit).left_out == 1


def test_text_that_fits_whatever_the_tokens_is_not_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limit = PromptLimit(CHAT, 400)
    assert all(limit._surely_fits(text) for text in ("", "a" * 300))
    assert not limit._surely_fits("a" * 400)
    assert not limit._surely_fits("ﷺ" * 100)  # NFKC makes 18 characters of it


def test_the_start_says_what_was_left_out(valid: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [json.dumps({"prompt": SUM if i % 4 == 0 else "1?", "answer": 1}) for i in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    length = f"data.max_prompt_length={tokens(SUM) - 1}"
    assert train([*valid, length, "--dry-run"]) == 2
    assert f"train.jsonl, line 1: the prompt has {tokens(SUM)} tokens" in capsys.readouterr().err
    assert train([*valid, length, "--dry-run", "data.filter_overlong_prompts=True"]) == 0
    assert f"note: data.train_files: 10 of 40 prompts are longer than {length} tokens" in capsys.readouterr().err


@pytest.mark.parametrize("message", [{"content": [{"type": "image"}]}, {"content": "", "tool_calls": [{}]}])
def test_a_prompt_that_the_template_cannot_render_is_named(tmp_path: Path, message: dict[str, Any]):
    shown = "{{ m.content + m.tool_calls[0].name.x if m.tool_calls else '' + m.content }}"
    template = "{% for m in messages %}" + shown + "{% endfor %}"
    file = file_of(tmp_path, "1?", [{"role": "assistant"} | message])
    with pytest.raises(DatasetError, match="line 2: the prompt cannot be rendered: the chat template failed"):
        read(file, PromptLimit(ChatTokenizer(CHAT.tokenizer, template, special={}), 100))


def test_arguments_of_the_template_count_and_reach_the_agents(valid: list[str], tmp_path: Path):
    model = tmp_path / "thinking"
    shutil.copytree(Path(__file__).parents[2] / "examples/calculator/model", model)
    template = (model / "chat_template.jinja").read_text() + "{{ 'think ' * effort if effort else '' }}"
    (model / "chat_template.jinja").write_text(template)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": "1?", "answer": 1}) + "\n" for _ in range(40)))
    changes = [
        f"actor_rollout_ref.model.path={model}", "data.filter_overlong_prompts=True", "data.max_response_length=64",
        f"data.max_prompt_length={tokens('1?') + 20}",
    ]  # fmt: skip
    for effort, fit in ((1, 40), (100, 0)):
        config = load_config([*valid, *changes, f"+data.apply_chat_template_kwargs.effort={effort}"]).config
        assert agent_worker(config).template_kwargs == {"effort": effort}
        if fit:
            assert len(train_dataset(config)) == fit
        else:
            with pytest.raises(DatasetError, match="every prompt"):
                train_dataset(config)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "+data.apply_chat_template_kwargs.enable_thinking=false",
            "error: data.apply_chat_template_kwargs={'enable_thinking': False}: the chat template does not ask for "
            "'enable_thinking'",
        ),
        ("data.apply_chat_template_kwargs={a:{b:1}}", "it takes a mapping to plain values or lists of them"),
    ],
)
def test_arguments_without_effect_are_errors_at_start(
    valid: list[str], capsys: pytest.CaptureFixture[str], given: str, says: str
):
    assert train([*valid, "--dry-run", given]) == 2
    assert says in capsys.readouterr().err
