"""What a validation makes of the answers to its questions, under verl's names and by verl's definitions.

For every data source and quantity, with N answers to each question: `mean@N`, and for N > 1 `std@N`, and for k = 2, 4,
8, ... and N what k of the answers would give, as mean and std over DRAWS draws with replacement: `best@k`, `worst@k`,
and where answers can be compared `maj@k`, the quantity of the answer that most of the k agree on (of several such, the
one drawn first). Each is the mean over the questions. A question is reckoned as soon as its last answer is there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

DRAWS = 1000
SEED = 42
SCORE, ACC, PRED = "reward", "acc", "pred"
"""The outcome score; what the reward calls acc, if it does; a number that equal answers share."""
GREEDY = "greedy"
OVERALL = "val-aux/mean/"
"""And the mode: the mean score over all data sources; /acc behind it: that of acc, where every answer has one."""

Answer = Mapping[str, float]
"""Its quantities."""
FAILED: Answer = {SCORE: 0.0}
"""Of a session that failed: all its quantities count as 0."""


class Question(NamedTuple):
    """As it was asked."""

    mode: str
    """sampled or greedy."""
    source: str
    index: int
    """Its place in the validation set."""


@dataclass(slots=True)
class Outcomes:
    """Of one validation, folded answer by answer."""

    answers: Mapping[str, int]
    """To each question, by mode."""
    versions: list[float] = field(default_factory=list)
    """Oldest and newest weights by which each answer was sampled."""
    turns: list[float] = field(default_factory=list)
    _open: dict[Question, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    _questions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By mode and source: those with all their answers."""
    _sums: dict[tuple[str, str], dict[str, Counter[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Counter))
    )
    """By mode and source, quantity, statistic."""
    _without_acc: set[tuple[str, str]] = field(default_factory=set)
    """Mode and source of answers to which the reward gave none."""

    def add(self, question: Question, answer: Answer) -> None:
        if answer is not FAILED and ACC not in answer:
            self._without_acc.add((question.mode, question.source))
        found = self._open[question]
        found.append(answer)
        if len(found) < self.answers[question.mode]:
            return
        del self._open[question]
        asked = (question.mode, question.source)
        self._questions[asked] += 1
        predictions = _codes(found) if any(PRED in answer for answer in found) else None
        for name in dict.fromkeys(name for answer in found for name in answer if name != PRED):
            values = tuple(answer.get(name, 0.0) for answer in found)
            self._sums[asked][name].update(statistics(values, predictions))

    def means(self) -> dict[str, float]:
        """Over all data sources, by mode: the mean score, and as `<mode>/acc` that of acc if every answer has one."""
        found: dict[str, float] = {}
        for mode, n in self.answers.items():
            sources = [asked for asked in self._questions if asked[0] == mode]
            questions = sum(self._questions[asked] for asked in sources)
            for quantity in (SCORE, ACC) if sources else ():
                if quantity == SCORE or all(self._core(asked) == ACC for asked in sources):
                    total = sum(self._sums[asked][quantity][f"mean@{n}"] for asked in sources)
                    found[mode if quantity == SCORE else f"{mode}/{ACC}"] = total / questions
        return found

    def _core(self, asked: tuple[str, str]) -> str:
        """The quantity that says how good the answers are."""
        return ACC if ACC in self._sums[asked] and asked not in self._without_acc else SCORE

    def metrics(self) -> dict[str, float]:
        """val-core/*: mean, best and maj of all N answers, in `acc` where every answer has one, else in the score.
        val-aux/*: the rest."""
        metrics: dict[str, float] = {}
        for (mode, source), quantities in self._sums.items():
            suffix, core = "_greedy" if mode == GREEDY else "", self._core((mode, source))
            for name, sums in quantities.items():
                for statistic, total in sums.items():
                    kind, _, size = statistic.partition("@")
                    first = name == core and kind in ("mean", "best", "maj")
                    first = first and int(size.partition("/")[0]) == self.answers[mode]
                    key = f"val-{'core' if first else 'aux'}/{source}/{name}{suffix}/{statistic}"
                    metrics[key] = total / self._questions[mode, source]
        metrics |= {f"{OVERALL}{name}": value for name, value in self.means().items()}
        for name, values in (("versions", self.versions), ("num_turns", self.turns)):
            if values:
                metrics |= {f"val-aux/{name}/min": min(values), f"val-aux/{name}/max": max(values)}
        if self.turns:
            metrics["val-aux/num_turns/mean"] = sum(self.turns) / len(self.turns)
        return metrics


def _codes(answers: Sequence[Answer]) -> tuple[int, ...]:
    """Equal numbers where answers agree; one without a prediction agrees with no other."""
    seen: dict[float | tuple[int], int] = {}
    return tuple(seen.setdefault(a.get(PRED, (place,)), len(seen)) for place, a in enumerate(answers))


@lru_cache(4096)
def statistics(values: tuple[float, ...], predictions: tuple[int, ...] | None = None) -> dict[str, float]:
    """Of the N answers to one question; `predictions` are equal where answers agree, 0 <= each < N."""
    n, found = len(values), {f"mean@{len(values)}": sum(values) / len(values)}
    if n == 1:
        return found
    array = np.array(values, np.float64)
    found[f"std@{n}"] = float(array.std())
    for k in [*(2**power for power in range(1, n.bit_length()) if 2**power < n), n]:
        draws = _draws(n, k)
        kinds = {"best": array[draws].max(axis=1), "worst": array[draws].min(axis=1)}
        if predictions is not None:
            kinds["maj"] = _majority(array, np.array(predictions), draws)
        for kind, drawn in kinds.items():
            found |= {f"{kind}@{k}/mean": float(drawn.mean()), f"{kind}@{k}/std": float(drawn.std())}
    return found


@cache
def _draws(n: int, k: int) -> np.ndarray:
    """i64[DRAWS, k]: places of answers, the same for every question."""
    return np.random.RandomState(SEED).choice(n, size=(DRAWS, k), replace=True)


def _majority(values: np.ndarray, codes: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """f64[DRAWS] of f64[N] and i64[DRAWS, k]: the value of what most of each draw agree on."""
    drawn = codes[draws]
    counts = (drawn[:, :, None] == np.arange(codes.max() + 1)).sum(axis=1)
    first = np.take_along_axis(counts, drawn, axis=1).argmax(axis=1)  # the first of those with most votes
    return values[draws[np.arange(len(draws)), first]]
