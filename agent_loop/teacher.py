"""A teacher beside generation: it scores the rows of a finished session before they are put.

So `teacher_log_prob` lies in the same put as the row, and a group that is ready is a group that was scored. A teacher
whose servers are gone is infrastructure: the session is interrupted and its group goes back; no row is put without.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import numpy as np

from agent_loop.llm.protocol import LEAST_LOG_PROB, MOST_LOG_PROB, Scorer
from agent_loop.loop import AgentContext
from agent_loop.rows import MULTI_MODAL_FIELD, TEACHER_FIELD, SessionRows


@dataclass(frozen=True, slots=True)
class Teacher:
    scorer: Scorer
    temperature: float
    """At which the policy samples what is trained."""
    partitions: tuple[str, ...] = ("train",)
    """Whose rows are scored: nobody learns from a validation."""

    async def taught(self, rows: SessionRows, ctx: AgentContext) -> SessionRows:
        """The rows with `teacher_log_prob` f32[R], 0 where the response mask is. Raises what `Scorer.score` raises, and
        FloatingPointError or ValueError for scores that cannot be, in an ExceptionGroup. Adds to the session's metrics
        `teacher_seconds` (as the session waits), `teacher_queue_seconds` (as the servers report) and
        `teacher_tokens`."""
        begun = ctx.clock()
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._row(rows, index, ctx)) for index in range(len(rows.keys))]
        ctx.count("teacher_seconds", ctx.clock() - begun)
        return replace(rows, columns={**rows.columns, TEACHER_FIELD: [task.result() for task in asked]})

    async def _row(self, rows: SessionRows, index: int, ctx: AgentContext) -> np.ndarray:
        columns = rows.columns
        images = columns.get(MULTI_MODAL_FIELD)
        if images is not None and images[index]:
            raise ValueError("the row has images; a teacher's servers score text alone")
        prompt, response = columns["prompts"][index].tolist(), columns["responses"][index].tolist()
        scores = await self.scorer.score(prompt, response, self.temperature, session=ctx.session)
        ctx.count("teacher_queue_seconds", scores.queue_seconds)
        ctx.count("teacher_tokens", len(response))
        return _checked(np.asarray(scores.log_probs, np.float64), columns["response_mask"][index])


def _checked(log_probs: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """f32[R], 0 where the mask is. One that cannot be would make the whole step not finite, and the trainer could not
    say why. Raises FloatingPointError, ValueError."""
    if log_probs.shape != mask.shape:
        raise ValueError(f"the teacher gave {log_probs.size} log-probs of {mask.size} tokens")
    kept = np.where(mask > 0, log_probs, 0.0)
    wrong = np.flatnonzero(~((kept >= LEAST_LOG_PROB) & (kept <= MOST_LOG_PROB)))  # NaN is neither
    if len(wrong):
        raise FloatingPointError(
            f"the teacher's log-prob of token {wrong[0]} of {len(kept)} is {kept[wrong[0]]:g}; expected one from "
            f"{LEAST_LOG_PROB:g} to 0; look at the teacher's servers"
        )
    return kept.astype(np.float32)
