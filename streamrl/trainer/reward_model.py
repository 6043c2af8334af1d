"""Scores of a reward model, which the training ranks hold: of leased groups, before anything compares them.

    leased groups ──last row of each session──► compute_rm_scores ──► the same groups, scored

The ranks read the tokens and write the column `rm_scores`; a number per session comes here.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.config import StreamRLConfig
from streamrl.single_controller.metrics import merge_metrics
from streamrl.trainer.parts import Actor
from streamrl.trainer.scores import last_rows, rescored
from transfer_queue.metadata import KVBatchMeta
from transfer_queue.net.messages import Group, Token


class RewardModel:
    """Of a run that has one."""

    def __init__(self, actor: Actor, *, keeps_function: bool) -> None:
        """`keeps_function`: the rows' own score is a reward function's, and is told beside."""
        self._actor, self._keeps_function = actor, keeps_function

    @classmethod
    def of(cls, config: StreamRLConfig, actor: Actor) -> RewardModel | None:
        """None where it is the reward function's score that counts."""
        if not config.reward.reward_model.enable:
            return None
        # A replay's rows have the score that counted when they were recorded, and beside it the function's.
        return cls(actor, keeps_function=config.trainer.replay is None)

    async def scored(
        self, groups: Sequence[Group], partition: str, token: Token
    ) -> tuple[list[Group], dict[str, float]]:
        """The groups, leased under `token`, with its scores; what that took."""
        rows = last_rows(groups)
        meta = KVBatchMeta([row.key for row in rows], [dict(row.tag) for row in rows], partition)
        meta.token = token
        parts = await self._actor.compute_rm_scores(meta)
        scores = {key: score for part in parts for key, score in part["scores"].items()}
        return rescored(groups, scores, keep=self._keeps_function), merge_metrics(part["metrics"] for part in parts)
