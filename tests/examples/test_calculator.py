"""The calculator example: its data, tokenizer, reward and base policy keep what the README says of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from make_data import SEED, TRAIN_ROWS, VAL_ROWS, make_rows
from questions import Question, calculate
from reward import compute_score, final_answer
from tokenizer import CALL_BEGIN, CALL_END, END, make_tokenizer
from transformers import AutoTokenizer

EXAMPLE = Path(__file__).parents[2] / "examples/calculator"
CALL = f"{CALL_BEGIN}17*23{CALL_END}"
RIGHT = f"{CALL}<|im_end|><|im_start|>tool\n391<|im_end|><|im_start|>assistant\n= 391<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EXAMPLE / "model")


def read(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / f"data/{split}.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------------- data


def test_the_committed_data_is_what_the_script_writes() -> None:
    assert {split: read(split) for split in ("train", "val")} == make_rows(SEED, TRAIN_ROWS, VAL_ROWS)


def test_no_question_is_asked_in_both_splits_or_twice() -> None:
    texts = [row["prompt"][0]["content"] for split in ("train", "val") for row in read(split)]
    assert len(set(texts)) == len(texts) == TRAIN_ROWS + VAL_ROWS


def test_validation_does_not_depend_on_the_size_of_the_training_set() -> None:
    assert make_rows(3, 10, 20)["val"] == make_rows(3, 50, 20)["val"]
    assert make_rows(3, 10, 20) != make_rows(4, 10, 20)


def test_each_operator_has_its_share_and_each_answer_is_right() -> None:
    rows = read("val")
    questions = [Question.parse(row["prompt"][0]["content"]) for row in rows]
    assert Counter(question.symbol for question in questions) == dict.fromkeys(("+", "-", "*", "//", "%"), 80)
    for row, question in zip(rows, questions, strict=True):
        assert row["reward_model"] == {"style": "rule", "ground_truth": calculate(question.expression)}


# ---------------------------------------------------------------------------------------------------------- tokenizer


@pytest.mark.parametrize("text", ["17 * 23 = ?", "héllo\n\t wörld 日本 😀 a ,b .", "  two  spaces ", RIGHT, "\x00"])
def test_any_text_decodes_to_itself(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_saved_tokenizer_is_the_one_the_script_makes(tokenizer: Any) -> None:
    made = make_tokenizer()
    assert tokenizer.get_vocab() == made.get_vocab()
    assert tokenizer.chat_template == made.chat_template


def test_a_conversation_with_a_tool_turn_is_the_prompt_extended_token_by_token(tokenizer: Any) -> None:
    asked = [{"role": "user", "content": "17 * 23 = ?"}]
    whole = [
        *asked,
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "391"},
        {"role": "assistant", "content": "= 391"},
    ]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    called = tokenizer.encode(CALL + END)
    answered = tokenizer.encode("<|im_start|>tool\n391<|im_end|><|im_start|>assistant\n")
    said = tokenizer.encode("= 391" + END)

    assert prompt + called + answered + said == tokenizer.apply_chat_template(whole, return_dict=False)
    assert (len(prompt), len(called), len(answered), len(said)) == (14, 8, 6, 6)


def test_a_tool_call_given_as_data_renders_as_the_policy_writes_it(tokenizer: Any) -> None:
    function = {"name": "calculator", "arguments": {"expr": "17*23"}}
    for call in ({"type": "function", "function": function}, function):
        messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == f"<|im_start|>assistant\n{CALL}<|im_end|>"


# -------------------------------------------------------------------------------------------------------------- reward


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (RIGHT, 1.0),
        (f"{CALL}391= 391", 1.0),  # without the special tokens
        ("= 391<|im_end|>", 1.0),  # in the head
        (f"{CALL}<|im_end|><|im_start|>tool\nerror: no<|im_end|><|im_start|>assistant\n= 391", 1.0),
        ("= 392<|im_end|>", 0.0),
        ("= 3910", 0.0),
        ("= -391", 0.0),
        ("= 0391", 0.0),
        ("391", 0.0),  # said without the marker
        ("", 0.0),
        ("= ", 0.0),
        ("= 1 = 391", 0.0),  # two answers
        ("= 391 or so", 0.0),
        (f"{CALL}<|im_end|><|im_start|>tool\n391<|im_end|>", 0.0),  # the tool's text is no answer
        (f"{CALL}391", 0.0),
        (f"= 391{CALL}<|im_end|><|im_start|>tool\n391<|im_end|><|im_start|>assistant\n", 0.0),  # not the last turn
        (f"{CALL_BEGIN}= 391", 0.0),  # inside an unfinished call
    ],
)
def test_only_the_right_number_said_in_the_last_turn_earns_the_reward(response: str, score: float) -> None:
    assert compute_score("calculator", response, "391", {"index": 0}, anything="else") == score


def test_negative_answers_are_understood() -> None:
    assert final_answer("= -45<|im_end|>") == "-45"


def test_the_reward_knows_the_turn_headers_of_the_template() -> None:
    headers = "".join(f"<|im_start|>{role}\n" for role in ("system", "user", "assistant", "tool"))
    assert final_answer(f"{headers}= 7<|im_end|><|endoftext|>") == "7"


# ---------------------------------------------------------------------------------------------------------- base policy


def test_the_base_policy_starts_where_learning_can_begin(tokenizer: Any) -> None:
    """Sampled at 0.2 to 0.5, greedy below 0.6: it can do it, its habits are against it."""
    torch = pytest.importorskip("torch")
    from play import accuracy
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE / "model").eval()
    questions = [Question.parse(row["prompt"][0]["content"]) for row in read("val")]

    assert 0.3 < accuracy(model, tokenizer, questions, temperature=1.0) < 0.5
    assert 0.3 < accuracy(model, tokenizer, questions, temperature=0.0) < 0.5


def test_played_conversations_keep_sampled_and_given_tokens_apart(tokenizer: Any) -> None:
    pytest.importorskip("torch")
    from play import play, prompt_ids
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(EXAMPLE / "model").eval()
    questions = [Question(4123, "+", 37), Question(17, "*", 23)]
    called, guessed = play(model, tokenizer, [prompt_ids(tokenizer, q) for q in questions], temperature=0.0)

    given = [token for token, mask in zip(called.response_ids, called.response_mask, strict=True) if mask == 0]
    assert tokenizer.decode(given) == "<|im_start|>tool\n4160<|im_end|><|im_start|>assistant\n"
    assert tokenizer.decode(called.response_ids).endswith("= 4160<|im_end|>")
    assert set(guessed.response_mask) == {1}
    assert all(lp == 0.0 for lp, mask in zip(called.log_probs, called.response_mask, strict=True) if mask == 0)
