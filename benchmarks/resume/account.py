"""What became of the prompts of a killed run, by its own batch log; and the bars that this is held to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bars import Bar
from streamrl.monitor.summary import read_summary
from streamrl.trainer.batch_log import read_batch_log
from streamrl.trainer.checkpoint import CheckpointStore


@dataclass(slots=True)
class Outcome:
    """Of any number of runs."""

    kills: int = 0
    runs: int = 0
    steps: int = 0
    undone: int = 0
    """Steps that a kill undid, so that they were trained again."""
    twice: int = 0
    lost: int = 0
    """Prompts issued and neither trained, nor dropped, nor out at the end."""
    wrong: int = 0
    """Steps that are missing, or did not train as many prompts as they should."""
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(*(getattr(self, name) + getattr(other, name) for name in Outcome.__slots__))

    def bars(self, what: str, kills: int) -> list[Bar]:
        return [
            Bar(f"{what}: kills", self.kills, "kills", kills),
            Bar(f"{what}: prompts trained twice", self.twice, "prompts", 0, "at most"),
            Bar(f"{what}: prompts lost", self.lost, "prompts", 0, "at most"),
            Bar(f"{what}: steps missing or not whole", self.wrong, "steps", 0, "at most"),
            Bar(f"{what}: runs", self.runs, "runs"),
            Bar(f"{what}: steps trained", self.steps, "steps"),
            Bar(f"{what}: steps that a kill undid", self.undone, "steps"),
            Bar(f"{what}: time", self.seconds, "s"),
        ]


def account(run: Path, steps: int, batch: int) -> Outcome:
    """What became of the prompts of a finished run."""
    lines = (run / "batches.jsonl").read_text().splitlines()
    trained = read_batch_log(run / "batches.jsonl")
    orders = [order for step in trained for order in step.orders]
    last = CheckpointStore(run / "checkpoints").load(steps)
    issued = set(range(last.next_order)) - set(last.outstanding)
    dropped = sum(read_summary(run).groups.dropped.values()) + read_summary(run).groups.dead
    whole = Counter(step.step for step in trained if len(step.orders) == batch)
    return Outcome(
        runs=1, steps=len(trained), undone=sum('"step"' in line for line in lines) - len(trained),
        twice=len(orders) - len(set(orders)), lost=max(0, len(issued - set(orders)) - dropped),
        wrong=sum(whole[step] != 1 for step in range(1, steps + 1)),
    )  # fmt: skip
