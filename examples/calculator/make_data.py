"""Write `data/train.jsonl` and `data/val.jsonl`, in verl's columns.

    python examples/calculator/make_data.py [--seed 7] [--train 2048] [--val 400] [--out examples/calculator/data]

The same seed writes the same bytes. No question of `val.jsonl` stands in `train.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from questions import Question, draw_distinct

HERE = Path(__file__).parent
SEED = 7
TRAIN_ROWS, VAL_ROWS = 2048, 400


def to_row(question: Question, index: int, split: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question.text}],
        "data_source": "calculator",
        "reward_model": {"style": "rule", "ground_truth": str(question.answer)},
        "extra_info": {"index": index, "split": split},
        "agent_name": "tool_agent",
    }


def make_rows(seed: int, train: int, val: int) -> dict[str, list[dict[str, Any]]]:
    """Both splits; validation is drawn first, so that it stays the same whatever the size of the training set."""
    held_out = draw_distinct(random.Random(f"{seed}/val"), val)
    texts = frozenset(question.text for question in held_out)
    seen = draw_distinct(random.Random(f"{seed}/train"), train, excluded=texts)
    splits = {"train": seen, "val": held_out}
    return {split: [to_row(q, i, split) for i, q in enumerate(questions)] for split, questions in splits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="write the data sets of the calculator example")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--train", type=int, default=TRAIN_ROWS)
    parser.add_argument("--val", type=int, default=VAL_ROWS)
    parser.add_argument("--out", type=Path, default=HERE / "data")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for split, rows in make_rows(args.seed, args.train, args.val).items():
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        (args.out / f"{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
