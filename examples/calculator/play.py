"""Play whole conversations with a local model, the calculator answering inline: how the example measures accuracy.

All conversations advance together, one position per step. Position t of each holds a given token (prompt, tool text) or
the one sampled from the logits at t-1, so there is no padding and no mask, whatever the lengths.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import torch
from questions import Question, calculate
from reward import compute_score
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

MAX_RESPONSE = 48
_CALL = re.compile(r'<tool_call>(\{"name": "calculator", .*\})</tool_call>')


@dataclass(slots=True)
class Conversation:
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    given: list[int] = field(default_factory=list)  # context tokens not fed yet
    turn: list[int] = field(default_factory=list)  # sampled since the last context
    calls: int = 0
    done: bool = False

    def append(self, token: int, mask: int, log_prob: float) -> None:
        self.response_ids.append(token)
        self.response_mask.append(mask)
        self.log_probs.append(log_prob)


def tool_answer(turn_text: str) -> str | None:
    """The calculator's text for a turn that calls it, None for any other turn."""
    match = _CALL.search(turn_text)
    if match is None:
        return None
    try:
        return calculate(str(json.loads(match[1])["arguments"]["expr"]))
    except (json.JSONDecodeError, KeyError, TypeError):
        return "error: malformed tool call"


def tool_turn(tokenizer: PreTrainedTokenizerBase, result: str) -> list[int]:
    """What follows a turn that called the tool: the tool's turn and the header of the next assistant turn."""
    return tokenizer.encode(f"<|im_start|>tool\n{result}<|im_end|><|im_start|>assistant\n")


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: Question) -> list[int]:
    messages = [{"role": "user", "content": question.text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)  # pyright: ignore


@torch.no_grad()
def play(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    *,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    max_calls: int = 2,
) -> list[Conversation]:
    """One conversation per prompt; temperature 0 is greedy."""
    talks = [Conversation(list(ids)) for ids in prompts]
    common = min(map(len, prompts))
    fed = torch.tensor([ids[:common] for ids in prompts])
    cache = DynamicCache(config=model.config)
    position = common
    while not all(talk.done for talk in talks):
        logits = model(fed, past_key_values=cache, use_cache=True).logits[:, -1].float()
        log_probs = torch.log_softmax(logits / (temperature or 1.0), -1)
        if temperature:
            picks = torch.multinomial(log_probs.exp(), 1, generator=generator)
        else:
            picks = logits.argmax(-1, keepdim=True)
        sampled = zip(talks, picks[:, 0].tolist(), log_probs.gather(1, picks)[:, 0].tolist(), strict=True)
        fed = torch.tensor([[_advance(talk, position, pick, lp, tokenizer, max_calls)] for talk, pick, lp in sampled])
        position += 1
    return talks


def _advance(
    talk: Conversation,
    position: int,
    pick: int,
    log_prob: float,
    tokenizer: PreTrainedTokenizerBase,
    max_calls: int,
) -> int:
    """The token of the conversation at `position`: the given one if there is, else the one picked."""
    if talk.done:
        return 0
    if position < len(talk.prompt_ids):
        return talk.prompt_ids[position]
    if talk.given:
        token = talk.given.pop(0)
        talk.append(token, 0, 0.0)
    else:
        token = pick
        talk.append(token, 1, log_prob)
        talk.turn.append(token)
        if token == tokenizer.eos_token_id:
            _end_turn(talk, tokenizer, max_calls)
    talk.done = talk.done or len(talk.response_ids) >= MAX_RESPONSE
    return token


def _end_turn(talk: Conversation, tokenizer: PreTrainedTokenizerBase, max_calls: int) -> None:
    result = tool_answer(str(tokenizer.decode(talk.turn))) if talk.calls < max_calls else None
    talk.turn = []
    if result is None:
        talk.done = True
    else:
        talk.given = tool_turn(tokenizer, result)
        talk.calls += 1


def score(tokenizer: PreTrainedTokenizerBase, talk: Conversation, question: Question) -> float:
    return compute_score("calculator", str(tokenizer.decode(talk.response_ids)), str(question.answer))


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[Question],
    *,
    temperature: float,
    seed: int = 0,
) -> float:
    prompts = [prompt_ids(tokenizer, question) for question in questions]
    generator = torch.Generator().manual_seed(seed)
    talks = play(model, tokenizer, prompts, temperature=temperature, generator=generator)
    return sum(score(tokenizer, t, q) for t, q in zip(talks, questions, strict=True)) / len(questions)
