"""Make the base policy: a small Qwen2 that can use the calculator, and mostly does not.

    python examples/calculator/make_model.py [--seed 7] [--steps 1200] [--out examples/calculator/model]

It is trained on demonstrations with a bad habit per operator (`HABITS`): products and quotients are guessed, and for a
remainder the quotient is calculated. The right way is shown too, but seldom: greedy decoding fails on three operators
of five, and sampling finds the right way now and then. That is what reinforcement learning needs; plain noise in the
demonstrations would leave greedy decoding perfect. Prints both accuracies on the questions of `data/val.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from pathlib import Path

import torch
from make_data import SEED, TRAIN_ROWS, VAL_ROWS, make_rows
from play import accuracy, prompt_ids, tool_turn
from questions import Question, calculate, draw_distinct
from tokenizer import CALL_BEGIN, CALL_END, END, PAD, make_tokenizer
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).parent
BATCH = 64
PEAK_LR = 3e-3

HABITS: dict[str, dict[str, float]] = {
    "+": {"right": 0.65, "guess": 0.35},
    "-": {"right": 0.65, "guess": 0.35},
    "*": {"right": 0.20, "guess": 0.80},
    "//": {"right": 0.20, "guess": 0.80},
    "%": {"right": 0.20, "guess": 0.10, "//": 0.70},
}
"""How often the demonstrator calls the tool rightly, guesses without it, or calls it with this operator instead."""

IGNORED = -100


def demonstrate(rng: random.Random, question: Question) -> list[tuple[str, str]]:
    """Assistant turns, each with the tool's result that follows ("" after the last)."""
    habit = HABITS[question.symbol]
    (way,) = rng.choices(list(habit), weights=list(habit.values()))
    if way == "guess":
        off = rng.choice((-1, 1)) * rng.randint(1, max(3, abs(question.answer) // 4))
        return [(f"= {question.answer + off}", "")]
    symbol = question.symbol if way == "right" else way
    expression = Question(question.left, symbol, question.right).expression
    result = calculate(expression)
    return [(f"{CALL_BEGIN}{expression}{CALL_END}", result), (f"= {result}", "")]


def encode(
    tokenizer: PreTrainedTokenizerBase, question: Question, turns: list[tuple[str, str]]
) -> tuple[list[int], list[int]]:
    """Token ids and labels; only what the policy says is learnt."""
    ids = prompt_ids(tokenizer, question)
    labels = [IGNORED] * len(ids)
    for said, result in turns:
        spoken = tokenizer.encode(said + END)
        context = tool_turn(tokenizer, result) if result else []
        ids += spoken + context
        labels += spoken + [IGNORED] * len(context)
    return ids, labels


def make_batch(tokenizer: PreTrainedTokenizerBase, rng: random.Random, questions: list[Question]) -> list[torch.Tensor]:
    rows = [encode(tokenizer, question, demonstrate(rng, question)) for question in rng.choices(questions, k=BATCH)]
    width = max(len(ids) for ids, _ in rows)
    ids = [row + [tokenizer.pad_token_id] * (width - len(row)) for row, _ in rows]
    labels = [row + [IGNORED] * (width - len(row)) for _, row in rows]
    return [torch.tensor(ids), torch.tensor(labels)]


def make_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    vocabulary = tokenizer.get_vocab()
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[PAD],
    )
    return Qwen2ForCausalLM(config)


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, questions: list[Question], steps: int, seed: int
) -> None:
    rng = random.Random(f"{seed}/demonstrations")
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps, pct_start=0.1)
    begun = time.monotonic()
    for step in range(steps):
        ids, labels = make_batch(tokenizer, rng, questions)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            logging.info("step %d of %d: loss %.3f, %.0f s", step + 1, steps, loss.item(), time.monotonic() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description="make the base policy of the calculator example")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=HERE / "model")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.seed)
    rows = make_rows(SEED, TRAIN_ROWS, VAL_ROWS)["val"]
    held_out = [Question.parse(row["prompt"][0]["content"]) for row in rows]
    texts = frozenset(question.text for question in held_out)
    shown = draw_distinct(random.Random(f"{args.seed}/shown"), 20_000, excluded=texts)
    warm_up(model, tokenizer, shown, args.steps, args.seed)

    model.eval()
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    found = {
        name: accuracy(model, tokenizer, held_out, temperature=t) for name, t in (("sampled", 1.0), ("greedy", 0.0))
    }
    logging.info("%d parameters; accuracy %s", sum(p.numel() for p in model.parameters()), json.dumps(found))


if __name__ == "__main__":
    main()
