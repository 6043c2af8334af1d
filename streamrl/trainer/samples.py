"""Which answers are written to files and shown (streamrl.recording.samples): those that the configuration asks for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from streamrl.config import StreamRLConfig
from streamrl.recording.samples import SampleOrder
from streamrl.trainer.parts import Actor
from transfer_queue.net.messages import Group

SAME = 42
"""Seed of the draw of the answers shown, so that validations of the same questions show the same ones."""


class Samples:
    """Told of groups before their rows are given up; rank 0 reads them."""

    def __init__(self, config: StreamRLConfig, actor: Actor) -> None:
        trainer = config.trainer
        self._actor = actor
        self._rollouts, self._validations = trainer.rollout_data_dir, trainer.validation_data_dir
        self._show = trainer.log_val_generations

    async def trained(self, step: int, partition: str, groups: Sequence[Group]) -> None:
        """Of a step that was trained."""
        if self._rollouts:
            await self._actor.write_samples(_order(partition, step, groups, self._rollouts, 0, lambda group: {}))

    async def validated(
        self, step: int, partition: str, groups: Sequence[Group], more: Callable[[Group], dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Of a validation; the answers to show."""
        if not groups or not (self._validations or self._show):
            return []
        order = _order(partition, step, groups, self._validations, self._show, more)
        return await self._actor.write_samples(order)


def _order(
    partition: str, step: int, groups: Sequence[Group], directory: str | None, show: int,
    more: Callable[[Group], dict[str, Any]],
) -> SampleOrder:  # fmt: skip
    rows = [(row, more(group)) for group in groups for row in group.rows]
    keys = [row.key for row, _ in rows]
    drawn = random.Random(SAME).sample(range(len(keys)), min(show, len(keys)))
    return SampleOrder(
        partition, step, keys, [dict(row.tag) for row, _ in rows], [fields for _, fields in rows], directory,
        [keys[place] for place in sorted(drawn)],
    )  # fmt: skip
