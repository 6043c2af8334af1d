"""Validation on a lane of its own: partition "val", its own prompts, the same agents and servers.

Every question is asked as rollout.val_kwargs says: by default once sampled at temperature 1 and once greedily. A
session that failed counts as wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import product
from statistics import mean

from agent_loop.rows import PROMPT_FIELDS
from streamrl.config.sections.rollout import ValidationSamplingConfig
from streamrl.trainer.feeder import PromptSource
from streamrl.trainer.group_buffer import FIRST_GROUPS, kind_of
from transfer_queue.client import QueueClient
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.net.messages import Group, GroupSpec, TaskSpec

PARTITION = "val"
TASKS = [
    TaskSpec("generate", "prompt", "clock", ttl=15.0),
    TaskSpec("validate", "rows", "incarnation"),
]
QUANTITIES = {"sampled": "reward", "greedy": "reward_greedy"}
"""Mode -> its name in val-core/<source>/<quantity>/mean@n."""

OnAnswers = Callable[[list[Group]], Awaitable[None]]

Asked = tuple[str, str]
"""(mode, data source) of a question."""


def mode_of(group: Group) -> str:
    """The pass in which a question was asked."""
    return "greedy" if group.tag.get("greedy") else "sampled"


@dataclass(slots=True)
class Accuracies:
    """Scores of one validation by (mode, data source); `answers` to each question by mode."""

    answers: dict[str, int]
    scores: dict[Asked, list[float]] = field(default_factory=lambda: defaultdict(list))

    def means(self) -> dict[str, float]:
        """Mean score over all data sources, by mode."""
        modes = {
            mode: [score for (asked, _), scores in self.scores.items() if asked == mode for score in scores]
            for mode in self.answers
        }
        return {mode: mean(scores) for mode, scores in modes.items()}

    def metrics(self) -> dict[str, float]:
        """Under verl's names."""
        return {
            f"val-core/{source}/{QUANTITIES[mode]}/mean@{self.answers[mode]}": mean(found)
            for (mode, source), found in self.scores.items()
        }


@dataclass(slots=True)
class _Round:
    """One validation: which groups are out and what those that came back scored."""

    expected: dict[str, Asked]
    accuracies: Accuracies
    ready: list[Group] = field(default_factory=list)
    failure: str = ""
    """Of the last session that failed."""
    failed: int = 0
    kinds: set[str] = field(default_factory=set)
    """Types of their errors."""

    def fold(self, groups: list[Group]) -> None:
        for group in groups:
            if group.state in ("pending", "generating") or (asked := self.expected.pop(group.uid, None)) is None:
                continue
            if group.state == "ready":
                self.ready.append(group)
            else:
                self.failure = group.reason.removeprefix("failed: ")
                self.failed += 1
                self.kinds.add(kind_of(group))
            self.accuracies.scores[asked].append(float(group.rows[-1].tag["score"]) if group.state == "ready" else 0.0)

    def check(self) -> None:
        """Raises RuntimeError when the first answers all failed in the same way: so will the others."""
        if not self.ready and self.failed >= FIRST_GROUPS and len(self.kinds) == 1 and self.expected:
            raise RuntimeError(
                f"the first {self.failed} sessions of the validation failed, the last with: {self.failure}. The agent "
                "loop, its tools or the reward function is broken for every prompt"
            )


class Validator:
    """Consumes: the validation set. Produces: accuracies. Waits for: its groups. Woken by: `watch` on its partition."""

    def __init__(
        self, client: QueueClient, source: PromptSource, sampling: ValidationSamplingConfig, *, stall_timeout: float
    ) -> None:
        self._client = client
        self._source = source
        self._sampling = sampling
        self._stall_timeout = stall_timeout
        self._round = 0

    async def open(self) -> None:
        await self._client.open_partition(PARTITION, tasks=TASKS)
        restored = await self._client.open_trainer(PARTITION, 0)
        stale = await self._client.watch(PARTITION, -1)
        if stale.groups:  # left over by a run that was killed while validating
            await self._client.drop(PARTITION, [group.uid for group in stale.groups], "validation abandoned")
        self._round = restored.next_order

    async def accuracies(self, label: str, on_answers: OnAnswers | None = None) -> Accuracies:
        """Ask the whole validation set. `on_answers` may look at the rows before they go. Raises DeadlineExceeded when
        nothing ended for `stall_timeout` seconds."""
        changes = await self._client.watch(PARTITION, -1)
        answers = {mode: self._sampling.answers(mode) for mode in self._sampling.modes}
        current = _Round(await self._admit(label, answers), Accuracies(answers))
        seq = changes.seq
        while current.expected:
            changes = await self._client.watch(PARTITION, seq, wait=self._stall_timeout)
            if not changes.groups and changes.seq == seq:
                raise DeadlineExceeded(
                    f"validation {label!r} waited {self._stall_timeout:g} s for {len(current.expected)} questions, as "
                    f"{next(iter(current.expected))}; depth {changes.depth}. Look at the agent workers and LLM servers"
                )
            current.fold(changes.groups)
            current.check()
            seq = changes.seq
        if not current.ready:
            raise RuntimeError(f"every session of the validation failed, the last with: {current.failure}")
        if on_answers is not None:
            await on_answers(current.ready)
        await self._finish([group.uid for group in current.ready])
        return current.accuracies

    async def _admit(self, label: str, answers: dict[str, int]) -> dict[str, Asked]:
        """Each answer is a group of its own: one that fails costs no other its score."""
        expected: dict[str, Asked] = {}
        specs: list[GroupSpec] = []
        columns: dict[str, list[object]] = {name: [] for name in PROMPT_FIELDS}
        for mode, times in answers.items():
            tag = self._sampling.tag(mode)
            for position, _ in product(range(len(self._source)), range(times)):
                row = self._source.at(0, position)
                uid = f"v{self._round}{mode}{position:07d}"
                specs.append(GroupSpec(uid, 1, self._round, tag={**tag, "index": row["index"], "label": label}))
                expected[uid] = (mode, row["data_source"])
                self._round += 1
                for name in PROMPT_FIELDS:
                    columns[name].append(row.get(name))
        await self._client.admit(PARTITION, specs, columns)
        return expected

    async def _finish(self, uids: list[str]) -> None:
        if uids:
            leased = await self._client.lease(PARTITION, "validate", uids=uids, holder="trainer")
            await self._client.ack(PARTITION, leased.token, uids, step=0)
            await self._client.commit_step(PARTITION, 0)
