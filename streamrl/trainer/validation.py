"""Validation on a lane of its own: partition "val", its own prompts, the same agents and servers.

Every question is asked twice: once sampled at temperature 1 and once greedily. A session that failed counts as wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streamrl.trainer.feeder import PROMPT_FIELDS, PromptSource
from transfer_queue.client import QueueClient
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.net.messages import Group, GroupSpec, TaskSpec

PARTITION = "val"
TASKS = [
    TaskSpec("generate", "prompt", "clock", ttl=15.0),
    TaskSpec("validate", "rows", "incarnation"),
]
MODES: dict[str, dict[str, object]] = {"sampled": {"temperature": 1.0, "greedy": False}, "greedy": {"temperature": 0.0, "greedy": True}}


@dataclass(slots=True)
class _Round:
    """One validation: which groups are out and what those that came back scored."""

    expected: dict[str, str]  # uid -> mode
    scores: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    ready: list[str] = field(default_factory=list)

    def fold(self, groups: list[Group]) -> None:
        for group in groups:
            mode = self.expected.get(group.uid)
            if mode is None or group.state in ("pending", "generating"):
                continue
            del self.expected[group.uid]
            if group.state == "ready":
                self.ready.append(group.uid)
                self.scores[mode].append(float(group.rows[-1].tag["score"]))
            else:
                self.scores[mode].append(0.0)


class Validator:
    """Consumes: the validation set. Produces: accuracies. Waits for: its groups. Woken by: `watch` on its partition."""

    def __init__(self, client: QueueClient, source: PromptSource, *, stall_timeout: float) -> None:
        self._client = client
        self._source = source
        self._stall_timeout = stall_timeout
        self._round = 0

    async def open(self) -> None:
        await self._client.open_partition(PARTITION, tasks=TASKS)
        restored = await self._client.open_trainer(PARTITION, 0)
        stale = await self._client.watch(PARTITION, -1)
        if stale.groups:  # left over by a run that was killed while validating
            await self._client.drop(PARTITION, [group.uid for group in stale.groups], "validation abandoned")
        self._round = restored.next_order

    async def accuracies(self, label: str) -> dict[str, float]:
        """Mean score of the whole validation set: {"sampled": ..., "greedy": ...}."""
        changes = await self._client.watch(PARTITION, -1)
        current = _Round(await self._admit(label))
        seq = changes.seq
        while current.expected:
            changes = await self._client.watch(PARTITION, seq, wait=self._stall_timeout)
            if not changes.groups and changes.seq == seq:
                raise DeadlineExceeded(
                    f"validation {label!r} waited {self._stall_timeout:g} s for {len(current.expected)} questions, e.g. "
                    f"{next(iter(current.expected))}; depth {changes.depth}. Look at the agent workers and LLM servers"
                )
            current.fold(changes.groups)
            seq = changes.seq
        await self._finish(current.ready)
        return {mode: sum(scores) / len(scores) for mode, scores in current.scores.items()}

    async def _admit(self, label: str) -> dict[str, str]:
        expected: dict[str, str] = {}
        specs: list[GroupSpec] = []
        columns: dict[str, list[object]] = {name: [] for name in PROMPT_FIELDS}
        for mode, tag in MODES.items():
            for position in range(len(self._source)):
                row = self._source.at(0, position)
                uid = f"v{self._round}{mode}{position:07d}"
                specs.append(GroupSpec(uid, 1, self._round, tag={**tag, "index": row["index"], "label": label}))
                expected[uid] = mode
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
