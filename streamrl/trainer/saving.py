"""When a run's checkpoints are written, what is in them, and how the run goes on from the newest.

    after step k:  look at the queue ─► the ranks copy (async_save) or write ─► training goes on
                       └► its finished rows are copied, before a later step drops or acks any
                                            └► all is on disk ─► manifest, rename ─► batch log ─► acks up to k final

The order is what makes a kill harmless at any point. Until the rename, a resume finds the checkpoint before, and the
queue still has all rows acked since. After it, a resume finds this one, and rows acked up to k stay acked, whether or
not the queue was told that they are final. The batch log says that they are given up before they are: from then on an
older checkpoint is refused, since their prompts would be lost.

A save that fails (disk full, a rank that cannot write) ends the run, also one in the background: its directory goes,
the checkpoint before stays as it was, and the same command goes on from there. A run that went on would lose more.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, NoReturn, Protocol

from streamrl.config import to_yaml
from streamrl.errors import UserError
from streamrl.single_controller.errors import WorkerFailed
from streamrl.trainer.batch_log import BatchLog, last_committed, other_lineage
from streamrl.trainer.checkpoint import REMEDY, CheckpointError, CheckpointStore, TrainerState
from streamrl.trainer.parts import Parts
from streamrl.trainer.queue_cut import Cut, QueueCut
from streamrl.trainer.report import Reporter
from streamrl.trainer.resume_checks import unlike
from transfer_queue.checkpoint import GroupsCopy

log = logging.getLogger(__name__)

WRITE_SECONDS = 3600.0
"""For the ranks to write in the background what they copied."""


class KLState(Protocol):
    """Of the KL penalty's coefficient."""

    def state(self) -> dict[str, float]: ...
    def load(self, state: dict[str, float]) -> None: ...


class Saver:
    """Consumes: the state after a step. Produces: checkpoints. A second save waits until the first is sealed.

    Invariants: at most one save is under way; acks become final only up to a step whose checkpoint is sealed; no group
    of a cut leaves the queue before its rows are copied.
    """

    def __init__(
        self, parts: Parts, partition: str, batch_log: BatchLog, report: Reporter, kl: KLState, cut: QueueCut
    ) -> None:
        self.more: dict[str, Any] = {}
        """What else has a part in a checkpoint, by its directory there, with the methods of a worker group."""
        trainer, actor = parts.config.trainer, parts.config.actor_rollout_ref.actor
        self._parts, self._partition, self._batch_log, self._report, self._kl = parts, partition, batch_log, report, kl
        self._background = actor.checkpoint.async_save
        self._cut = cut
        self.store = CheckpointStore(
            parts.run.checkpoints, keep=trainer.max_actor_ckpt_to_keep, keep_every=trainer.ckpt_keep_interval,
            in_thread=actor.strategy != "sim",  # nothing large there, and maybe a virtual clock
        )  # fmt: skip
        self.saved_step = 0
        self._writing: asyncio.Task[None] | None = None
        self._copying: asyncio.Task[GroupsCopy] | None = None
        self._failure: Exception | None = None
        self._failed = asyncio.Event()

    # --- saving -------------------------------------------------------------------------------------------------

    async def save(self, step: int, validation: dict[str, dict[str, float]], *, rows: bool = True) -> None:
        """The checkpoint of `step`, the last one trained; `rows`: with finished groups, since the run goes on. With
        async_save it returns when the ranks have copies."""
        with self._parts.events.span("checkpoint", step=step) as span:
            await self.finish()
            cut = await self._cut.take(rows=rows)
            state = TrainerState(
                step, cut.next_order, cut.outstanding, dict(validation), self._kl.state(), self._batch_log.lineage
            )
            span.add(groups=len(cut.finished))
            draft = self.store.draft(step)
            begin = asyncio.Event()
            if not self._background:
                begin.set()
            copying = asyncio.create_task(self._copy(cut, begin), name=f"rows of step {step}")
            self._copying = copying
            try:
                for role, group in self._roles().items():
                    await group.save_checkpoint(str(draft / role), background=self._background)
                begin.set()
            except BaseException:
                copying.cancel()
                self.store.discard(draft)
                raise
            self.saved_step = step
            self._writing = asyncio.create_task(self._write(draft, state, copying), name=f"checkpoint of step {step}")
            if not self._background:
                await self.finish()

    async def _copy(self, cut: Cut, begin: asyncio.Event) -> GroupsCopy:
        """The cut's rows: while the ranks write, or, if these only copy, once training goes on."""
        await begin.wait()
        return await self._cut.copy(cut)

    async def copied(self) -> None:
        """Wait until rows that the save under way is to hold may leave the queue: before a step drops or acks any."""
        if self._copying is not None:
            await asyncio.wait({self._copying})  # what it fails with, the save fails with
            self._copying = None

    async def finish(self) -> None:
        """Wait until the save under way is sealed. Raises what kept it from that."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def watch(self) -> NoReturn:
        """Wait for a save in the background that fails; raises its error."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def close(self) -> None:
        """A save under way is given up: the run has failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            self.store.clean()

    async def _write(self, draft: Path, state: TrainerState, copying: asyncio.Task[GroupsCopy]) -> None:
        try:
            rows = await copying
            if self._background:
                for group in self._roles().values():
                    await group.checkpoint_written(timeout=WRITE_SECONDS)
            await self.store.call(lambda: self._cut.write(rows, draft))
            final = await self.store.seal(draft, state, (self._parts.run.path / "config.yaml").read_text())
            self._batch_log.committed(final)
            await self._parts.queue.commit_step(self._partition, final)
            self._report.saved(state.step, self.store.removed)
        except BaseException as error:
            copying.cancel()
            self.store.discard(draft)
            if self._background and isinstance(error, Exception):
                log.error("the checkpoint of step %d could not be written: %s", state.step, error)
                self._failure = error
                self._failed.set()
            raise

    def _roles(self) -> dict[str, Any]:
        """What has a part in a checkpoint, by its directory there."""
        roles = {"actor": self._parts.actor, "critic": self._parts.critic}
        return {role: group for role, group in roles.items() if group is not None} | self.more

    # --- going on -----------------------------------------------------------------------------------------------

    async def restore(self) -> TrainerState:
        """Of the newest checkpoint, with which the ranks are loaded; step 0 if there is none yet.

        Raises CheckpointError for one that is damaged, of another run or model, or older than what was given up.
        """
        run = self._parts.run
        self.store.clean()
        steps = self.store.steps()
        state = TrainerState(0, 0)
        committed = last_committed(run.batches)
        if committed > (steps[-1] if steps else 0):
            raise CheckpointError(
                f"{self.store.directory} has no checkpoint of step {committed} or later, and the rows of those "
                "steps were given up; bring it back from a copy, or start anew with trainer.resume_mode=disable"
            )
        path = self.store.path(steps[-1]) if steps else run.path
        if steps:
            state = await self.store.verified(steps[-1])
            if other := other_lineage(run.batches, state.step, state.lineage):
                raise CheckpointError(
                    f"checkpoint {path} is of lineage {state.lineage}, and {run.batches} knows step {state.step} as of "
                    f"lineage {other}: it is of another run, or of steps that a resume has undone. {REMEDY}"
                )
        if differs := unlike(path / "config.yaml", self._parts.config):
            raise CheckpointError(f"{path} cannot be continued like this: {differs}")
        if steps:
            await self._load(path)
            if state.kl:
                self._kl.load(state.kl)
        self.saved_step = state.step
        log.info("resuming %s at step %d", run.path, state.step)
        return state

    def goes_on(self) -> None:
        """Nothing is in the way of a resume any more: steps after its checkpoint are undone, the run is of this
        configuration from here on, and how it ended before counts no more."""
        self._batch_log.begins(self.saved_step)
        if self._parts.run.resumed:
            self._parts.run.adopt(to_yaml(self._parts.config))

    async def restore_rows(self, version: int | None) -> list[str]:
        """Finished groups of the checkpoint that was restored come back to a queue that lacks them; see QueueCut."""
        path = self.store.path(self.saved_step)
        restored = await self._cut.restore(path, version=version)
        if restored:
            log.info("%d finished groups that the queue lacked came back from %s", len(restored), path)
        return restored

    async def _load(self, path: Path) -> None:
        roles = self._roles()
        for role in ("actor", "critic"):
            if (path / role).is_dir() != (role in roles):
                has, needs = ("no ", "has one") if role in roles else ("the state of a ", "has none")
                raise CheckpointError(
                    f"checkpoint {path} holds {has}{role}, and this run {needs}: algorithm.adv_estimator or "
                    f"critic.enable differs. {REMEDY}"
                )
        for role, group in roles.items():
            try:
                await group.load_checkpoint(str(path / role))
            except WorkerFailed as error:
                cause = getattr(error.__cause__, "cause", None) or error.__cause__
                if isinstance(cause, UserError):
                    raise CheckpointError(f"checkpoint {path} does not fit this run: {cause}. {REMEDY}") from error
                raise
