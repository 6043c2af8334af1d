"""When validations are done: in training's place, or beside it, one at a time.

                     due ──► in its place (sync, colocate_async; before and after training, val_only): the step waits
    trainer ──step──►   └──► beside it (separate_async): a task; generation for training and updates go on

What is written is labelled with the step it began at, and val-aux/versions/{min,max} tell the oldest and the newest
weights that sampled any answer. Beside training, `separate_async.validation_weights` says which may:

    pin    those of its step: some servers keep them, and the agent workers ask these for a validation and nothing else
    hold   those of its step: the trainer asks `holds` before it gives the servers new ones (loop.py)
    mixed  whatever the servers have
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

from streamrl.monitor.metrics_log import VALIDATION, read_validations
from streamrl.trainer import validation
from streamrl.trainer.parts import Parts
from streamrl.trainer.report import Reporter
from streamrl.trainer.reward_model import RewardModel
from streamrl.trainer.samples import Samples
from streamrl.trainer.validation_metrics import OVERALL
from transfer_queue.net.messages import Group, Token

Label = Literal["before", "during", "after"]


class OrStopped(Protocol):
    """Waits for work; raises as soon as somebody asks the run to stop."""

    async def __call__(self, work: Awaitable[None], /) -> None: ...


class Validations:
    """All validations of a run, as the trainer asks for them. Without a validation set it does nothing."""

    def __init__(
        self, parts: Parts, samples: Samples, report: Reporter, or_stopped: OrStopped, *, beside: bool,
        reward_model: RewardModel | None, paused: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:  # fmt: skip
        """`beside`: those that are due during training do not stop it. `paused`: around what takes the devices that
        generation shares with the ranks."""
        self.means: dict[str, dict[str, float]] = {}
        """By label (the last one): Outcomes.means."""
        self._parts, self._samples, self._report = parts, samples, report
        self._or_stopped, self._beside = or_stopped, beside
        self._reward_model, self._paused = reward_model, paused
        self._done: set[tuple[str, int]] = set()
        self.repeats: Callable[[Label, int], validation.Repeats] | None = None
        """In deterministic mode: of the validation with this label at this step."""
        self._lane = ValidationLane(self._validate_beside, report.note)
        config = parts.config
        self._weights = config.trainer.v1.separate_async
        self._pinned: list[str] = []
        """Servers that keep their weights for the validation under way."""
        self._validator = (
            validation.Validator(
                parts.queue, parts.val_data, config.actor_rollout_ref.rollout.val_kwargs,
                stall_timeout=config.trainer.stall_timeout, scorer=self._scored if reward_model else None,
            )
            if parts.val_data is not None
            else None
        )  # fmt: skip

    async def open(self, step: int, means: Mapping[str, Mapping[str, float]]) -> None:
        """The run stands at `step`; what a checkpoint or metrics.jsonl tells of is not done again."""
        if self._validator is None:
            return
        self.means = {label: dict(found) for label, found in means.items()}
        if "before" in means:
            self._done.add(("before", 0))
        for line in read_validations(self._parts.run.path) if self._parts.run.resumed else ():
            if line["step"] <= step:
                label = str(line[VALIDATION])
                self._done.add((label, line["step"]))
                found = {name.removeprefix(OVERALL): value for name, value in line.items() if name.startswith(OVERALL)}
                self.means[label] = found or self.means.get(label, {})
        await self._validator.open()

    async def in_place(self, label: Label, step: int) -> None:
        """With the weights of `step`, unless that was done; one that is under way ends first."""
        await self._or_stopped(self._lane.idle())
        if self._validator is not None and (label, step) not in self._done:
            with self._parts.events.span("validate", step=step, when=label):
                await self._or_stopped(self._validate(label, step))

    async def due(self, step: int) -> None:
        """One during training."""
        if self._beside and self._validator is not None and ("during", step) not in self._done:
            if self._weights.validation_weights == "pin" and not self._lane.under_way:
                await self._pin()
            self._lane.begin("during", step)
        elif not self._beside:
            await self.in_place("during", step)

    @property
    def holds(self) -> bool:
        """Whether the servers have to keep their weights, for the validation under way."""
        return self._weights.validation_weights == "hold" and self._lane.under_way

    async def idle(self) -> None:
        """When none is under way beside training any more. Raises what the last one raised."""
        await self._lane.idle()

    def check(self) -> None:
        """Raises what a validation beside training raised."""
        self._lane.check()

    async def close(self) -> None:
        await self._lane.close()

    async def _validate_beside(self, label: Label, step: int) -> None:
        with self._parts.events.span("validate_beside", step=step, when=label):
            try:
                await self._validate(label, step)
            finally:
                await self._unpin()

    async def _pin(self) -> None:
        """Before the first question is asked, so that no answer is of other weights, and none for training is begun
        with these."""
        self._pinned = await self._parts.servers.pin(self._weights.validation_servers)
        await self._parts.agents.reserve(self._pinned)
        if not self._pinned:
            self._report.note("too few LLM servers answer to pin one: the validation takes whatever weights they have")

    async def _unpin(self) -> None:
        """They have the newest weights before they take part in training again."""
        if self._pinned:
            self._pinned = []
            await self._parts.servers.unpin()
            await self._parts.agents.reserve([])

    async def _validate(self, label: Label, step: int) -> None:
        async def look_at(groups: list[Group]) -> None:
            self._report.samples(step, await self._samples.validated(step, validation.PARTITION, groups, _mode))

        assert self._validator is not None
        repeats = self.repeats(label, step) if self.repeats is not None else None
        found = await self._validator.outcomes(label, look_at, repeats, reserved=bool(self._pinned))
        self.means[label] = found.means()
        self._done.add((label, step))
        self._report.validated(step, label, found.metrics())

    async def _scored(self, groups: list[Group], token: Token) -> list[Group]:
        assert self._reward_model is not None
        async with self._paused():
            scored, _ = await self._reward_model.scored(groups, validation.PARTITION, token)
        return scored


Validate = Callable[[Label, int], Coroutine[Any, Any, None]]


def _mode(group: Group) -> dict[str, str]:
    return {"mode": validation.mode_of(group)}


class ValidationLane:
    """Validations beside training, one at a time.

    Consumes: what is due. Waits for: a validation. Invariant: at most one is under way, and one that is due meanwhile
    is left out, which `tell` says. An error of one is raised to the trainer at its next call.
    """

    def __init__(self, validate: Validate, tell: Callable[[str], None]) -> None:
        """`validate(label, step)` does it."""
        self._validate = validate
        self._tell = tell
        self._task: asyncio.Task[None] | None = None
        self._step = 0

    def begin(self, label: Label, step: int) -> None:
        """Start one, unless one is under way. Raises what the last one raised."""
        if self.under_way:
            self._tell(
                f"no validation of step {step}: that of step {self._step} is still under way; raise trainer.test_freq, "
                "or ask less (data.val_max_samples, rollout.val_kwargs.n)"
            )
            return
        self.check()
        self._step = step
        self._task = asyncio.create_task(self._validate(label, step), name=f"validation of step {step}")

    @property
    def under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def check(self) -> None:
        """Raises what a validation that has ended raised."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def idle(self) -> None:
        """When none is under way any more. Raises what the last one raised."""
        if self._task is not None:
            await asyncio.wait({self._task})
            self.check()

    async def close(self) -> None:
        """Cancels the one under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
