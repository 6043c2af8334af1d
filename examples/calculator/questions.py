"""The questions of the calculator task: `17 * 23 = ?` over five operators, drawn with a seed.

Operands are positive, so that `//` and `%` mean the same everywhere. A question's text decides its answer, so two data
sets are disjoint exactly when their texts are.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Container
from dataclasses import dataclass

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}

_EXPRESSION = re.compile(r"([0-9]{1,9}) ?(\+|-|\*|//|%) ?([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Question:
    left: int
    symbol: str
    right: int

    @classmethod
    def parse(cls, text: str) -> Question:
        """The question of a data set's row."""
        left, symbol, right = text.removesuffix(" = ?").split(" ")
        return cls(int(left), symbol, int(right))

    @property
    def text(self) -> str:
        return f"{self.left} {self.symbol} {self.right} = ?"

    @property
    def expression(self) -> str:
        return f"{self.left}{self.symbol}{self.right}"

    @property
    def answer(self) -> int:
        return OPERATORS[self.symbol](self.left, self.right)


_RANGES: dict[str, tuple[int, int]] = {
    "+": (4999, 4999),
    "-": (4999, 4999),
    "*": (99, 99),
    "//": (9999, 99),
    "%": (9999, 99),
}
"""Largest left and right operand; the smallest is 11. Sums are as long as products, so copying either is one skill."""


def draw_question(rng: random.Random, symbol: str) -> Question:
    left, right = _RANGES[symbol]
    return Question(rng.randint(11, left), symbol, rng.randint(11, right))


def draw_distinct(rng: random.Random, count: int, excluded: Container[str] = ()) -> list[Question]:
    """`count` questions with distinct texts, none of them in `excluded`, the operators in turn and then shuffled."""
    symbols = list(OPERATORS)
    chosen: dict[str, Question] = {}
    while len(chosen) < count:
        question = draw_question(rng, symbols[len(chosen) % len(symbols)])
        if question.text not in excluded:
            chosen.setdefault(question.text, question)
    questions = list(chosen.values())
    rng.shuffle(questions)
    return questions


def calculate(expression: str) -> str:
    """What the calculator tool answers to one binary operation; an error text for anything else."""
    match = _EXPRESSION.fullmatch(expression.strip())
    if match is None:
        return "error: not an expression"
    left, symbol, right = int(match[1]), match[2], int(match[3])
    if symbol in ("//", "%") and right == 0:
        return "error: division by zero"
    return str(OPERATORS[symbol](left, right))
