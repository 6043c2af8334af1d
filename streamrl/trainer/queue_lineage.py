"""Whose queue it is: its partition holds the lineage of the trainer that has it, in a row of its journal.

A queue directory can be taken for another's: that of a copy of the run which went on, or of another run with the same
configuration. Its prompts have the same names, and what it has trained would never be trained here.
"""

from __future__ import annotations

from pathlib import Path

from streamrl.errors import UserError
from streamrl.trainer.batch_log import lineages
from transfer_queue.client import QueueClient

KEY = "lineage"
"""Of the row, and of its one tag; it has no columns."""


class ForeignQueue(UserError):
    """The queue in a run's directory is not that run's."""


async def check_lineage(queue: QueueClient, partition: str, log: Path, *, directory: Path) -> None:
    """Raises ForeignQueue if the last trainer of the queue is none that the run's batch log knows. One that no trainer
    has had yet is anybody's, and a log that knows none (it was lost) cannot tell."""
    found = await queue.lookup(partition, [KEY])
    known = lineages(log)
    for tag in found.tags:
        if known and (lineage := str(tag[KEY])) not in known:
            raise ForeignQueue(
                f"the queue in {directory} is of lineage {lineage}, which {log} does not know: it is of another run, "
                f"or of a copy of this one that went on. Bring the run's own back; or remove {directory}, then the run "
                "goes on from its checkpoint with a new queue, and generates again what was not finished then"
            )


async def claim(queue: QueueClient, partition: str, lineage: str) -> None:
    """The queue is this trainer's from now on; its batch log must know the lineage already."""
    await queue.put(partition, [KEY], {}, tags=[{KEY: lineage}])
