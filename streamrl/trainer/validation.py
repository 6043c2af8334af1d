"""One validation: partition "val", its own prompts, the same agents and servers.

    Validator ──admit──► queue ──► agent workers ──► queue ──watch──► Outcomes

Every question is asked as rollout.val_kwargs says: by default once sampled at temperature 1 and once greedily. A
session that failed counts as wrong. When it is done, and beside what: validation_lane.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

from agent_loop.rows import PROMPT_FIELDS
from agent_loop.session import RESERVED, SEEDED_AS, TELLS_ALL
from streamrl.config.sections.rollout import ValidationSamplingConfig
from streamrl.trainer.feeder import PromptSource
from streamrl.trainer.group_buffer import FIRST_GROUPS, kind_of
from streamrl.trainer.stalls import look_at
from streamrl.trainer.validation_metrics import FAILED, GREEDY, SCORE, Answer, Outcomes, Question
from transfer_queue.client import QueueClient
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.net.messages import Group, GroupSpec, TaskSpec, Token

PARTITION = "val"
TASKS = [
    TaskSpec("generate", "prompt", "clock", ttl=15.0),
    TaskSpec("validate", "rows", "incarnation"),
]

OnAnswers = Callable[[list[Group]], Awaitable[None]]
Scorer = Callable[[list[Group], Token], Awaitable[list[Group]]]
"""Groups leased under a token -> the same with the scores that count."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """A validation that gives the same whenever it is done (deterministic mode)."""

    name: str
    """What its seeds derive from: the same for the same validation."""
    version: int
    """Of the weights that sample its answers."""

    def tag(self, question: str) -> dict[str, object]:
        return {SEEDED_AS: f"{self.name} {question}", "weight_version": self.version}


def mode_of(group: Group) -> str:
    """The pass in which a question was asked."""
    return GREEDY if group.tag.get("greedy") else "sampled"


@dataclass(slots=True)
class _Round:
    """One validation: which groups are out and what those that came back scored."""

    expected: dict[str, Question]
    outcomes: Outcomes
    ready: list[Group] = field(default_factory=list)
    answered: dict[str, Question] = field(default_factory=dict)
    """What the ready ones answer."""
    failure: str = ""
    """Of the last session that failed."""
    failed: int = 0
    kinds: set[str] = field(default_factory=set)
    """Types of their errors."""
    scored_later: bool = False
    """Answers are added by `scored`, when all have come."""

    def fold(self, groups: list[Group]) -> None:
        for group in groups:
            if group.state in ("pending", "generating") or (asked := self.expected.pop(group.uid, None)) is None:
                continue
            if group.state == "ready":
                self.ready.append(group)
                self.outcomes.versions += [float(row.tag[name]) for row in group.rows for name in VERSIONS]
                self.outcomes.turns.append(float(group.rows[-1].tag["num_turns"]))
                self.answered[group.uid] = asked
                if not self.scored_later:
                    self.outcomes.add(asked, answer_of(group))
            else:
                self.failure = group.reason.removeprefix("failed: ")
                self.failed += 1
                self.kinds.add(kind_of(group))
                self.outcomes.add(asked, FAILED)

    def scored(self, groups: list[Group]) -> None:
        """The ready ones, with the scores that count."""
        self.ready = groups
        for group in groups:
            self.outcomes.add(self.answered[group.uid], answer_of(group))

    def check(self) -> None:
        """Raises RuntimeError when the first answers all failed in the same way: so will the others."""
        if not self.ready and self.failed >= FIRST_GROUPS and len(self.kinds) == 1 and self.expected:
            raise RuntimeError(
                f"the first {self.failed} sessions of the validation failed, the last with: {self.failure}. The agent "
                "loop, its tools or the reward function is broken for every prompt"
            )


VERSIONS = ("min_global_steps", "max_global_steps")
"""Tags of a row: the weights of its oldest and its newest token."""


def answer_of(group: Group) -> Answer:
    """What the last row of a question's session tells: its score, and the numbers that the reward gave with it."""
    tag = group.rows[-1].tag
    told = {name.removeprefix("score/"): float(value) for name, value in tag.items() if name.startswith("score/")}
    return {**told, SCORE: float(tag["score"])}


class Validator:
    """Consumes: the validation set. Produces: outcomes. Waits for: its groups. Woken by: `watch` on its partition."""

    def __init__(
        self, client: QueueClient, source: PromptSource, sampling: ValidationSamplingConfig, *, stall_timeout: float,
        scorer: Scorer | None = None,
    ) -> None:  # fmt: skip
        """`scorer`: gives the scores that count; None: the rows have them."""
        self._client = client
        self._source = source
        self._sampling = sampling
        self._stall_timeout = stall_timeout
        self._scorer = scorer
        self._round = 0

    async def open(self) -> None:
        await self._client.open_partition(PARTITION, tasks=TASKS)
        restored = await self._client.open_trainer(PARTITION, 0)
        stale = await self._client.watch(PARTITION, -1)
        if stale.groups:  # left over by a run that was killed while validating
            await self._client.drop(PARTITION, [group.uid for group in stale.groups], "validation abandoned")
        self._round = restored.next_order

    async def outcomes(
        self, label: str, on_answers: OnAnswers | None = None, repeats: Repeats | None = None, *, reserved: bool = False
    ) -> Outcomes:
        """Ask the whole validation set, if `reserved` at the servers that are. `on_answers` may look at the rows before
        they go. Raises DeadlineExceeded when
        nothing ended for `stall_timeout` seconds."""
        changes = await self._client.watch(PARTITION, -1)
        answers = {mode: self._sampling.answers(mode) for mode in self._sampling.modes}
        more = {RESERVED: True} if reserved else {}
        asked = await self._admit(label, answers, repeats, more)
        current = _Round(asked, Outcomes(answers), scored_later=self._scorer is not None)
        seq = changes.seq
        while current.expected:
            changes = await self._client.watch(PARTITION, seq, wait=self._stall_timeout)
            if not changes.groups and changes.seq == seq:
                raise DeadlineExceeded(
                    f"validation {label!r} waited {self._stall_timeout:g} s for {len(current.expected)} questions, as "
                    f"{next(iter(current.expected))}; depth {changes.depth}. "
                    + await look_at(self._client, "Look at the agent workers and LLM servers")
                )
            current.fold(changes.groups)
            current.check()
            seq = changes.seq
        if not current.ready:
            raise RuntimeError(f"every session of the validation failed, the last with: {current.failure}")
        uids = [group.uid for group in current.ready]
        leased = await self._client.lease(PARTITION, "validate", uids=uids, holder="trainer")
        if self._scorer is not None:
            current.scored(await self._scorer(current.ready, leased.token))
        if on_answers is not None:
            await on_answers(current.ready)
        await self._client.ack(PARTITION, leased.token, uids, step=0)
        await self._client.commit_step(PARTITION, 0)
        return current.outcomes

    async def _admit(
        self, label: str, answers: dict[str, int], repeats: Repeats | None, more: Mapping[str, object]
    ) -> dict[str, Question]:
        """Each answer is a group of its own: one that fails costs no other its score."""
        expected: dict[str, Question] = {}
        specs: list[GroupSpec] = []
        columns: dict[str, list[object]] = {name: [] for name in PROMPT_FIELDS}
        for mode, times in answers.items():
            tag = {**self._sampling.tag(mode), "label": label, TELLS_ALL: True, **more}
            for position, answer in product(range(len(self._source)), range(times)):
                row = self._source.at(0, position)
                uid = f"v{self._round}{mode}{position:07d}"
                again = repeats.tag(f"{mode}{position}/{answer}") if repeats else {}
                specs.append(GroupSpec(uid, 1, self._round, tag={**tag, "index": row["index"], **again}))
                expected[uid] = Question(mode, row["data_source"], position)
                self._round += 1
                for name in PROMPT_FIELDS:
                    columns[name].append(row.get(name))
        await self._client.admit(PARTITION, specs, columns)
        return expected
