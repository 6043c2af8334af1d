"""One run of a trainer over its parts, whatever runtime they are in: it ends with a summary, however it ends."""

from __future__ import annotations

import logging

from streamrl.monitor.summary import Groups, Status, Summary, validation_fields, write_summary
from streamrl.recording.replay import replay_trainer
from streamrl.runtime.failures import explained
from streamrl.runtime.run_dir import resumable
from streamrl.trainer.deterministic import DeterministicTrainer
from streamrl.trainer.loop import Trainer
from streamrl.trainer.modes import MODES
from streamrl.trainer.parts import Parts

log = logging.getLogger(__name__)


class Session:
    """Runs the mode that the configuration names. `stop` asks for a clean end with a checkpoint."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        trainer = parts.config.trainer
        mode = DeterministicTrainer if trainer.deterministic else MODES[trainer.v1.trainer_mode]
        self.trainer: Trainer = replay_trainer(parts, parts.recording) if parts.recording else mode(parts)

    def stop(self) -> None:
        self.trainer.stop.set()

    async def run(self) -> Summary:
        """The summary, also written to the run directory; an error is written there too, and raised again."""
        try:
            status = await self.trainer.fit()
        except BaseException as error:
            cause = root_cause(error)
            if isinstance(cause, Exception):
                cause = explained(cause, self._parts.run.path)
            log.error("the run failed", exc_info=error)
            await self.trainer.report.last_look()
            if not self._parts.run.untouched:
                await self._summarise("failed", f"{type(cause).__name__}: {cause}")
            self._parts.run.finished = not resumable(self._parts.run.path)
            if isinstance(cause, Exception):
                raise cause from None
            raise
        summary = await self._summarise(status)
        self._parts.run.finished = not resumable(self._parts.run.path)
        return summary

    async def _summarise(self, status: Status, error: str = "") -> Summary:
        trainer = self.trainer
        overlap = trainer.report.overlap
        summary = Summary(
            status=status,
            error=error,
            steps=trainer.step,
            train_seconds=overlap.seconds,
            **validation_fields(trainer.validations.means),
            **overlap.summary_fields(),
            groups=Groups.of(trainer.report.stats) if trainer.report.stats else Groups(),
            extra={"mode": self._parts.config.trainer.v1.trainer_mode, "seed": self._parts.config.trainer.seed},
        )
        try:
            write_summary(self._parts.run.path, summary)
        except OSError:
            if status != "failed":
                raise
            log.exception("no summary could be written")  # what ended the run is told, not this
        return summary


def root_cause(error: BaseException) -> BaseException:
    """The first real error inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
