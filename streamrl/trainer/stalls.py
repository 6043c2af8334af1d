"""What to look at when the trainer has waited in vain: who waits for what in the queue."""

from __future__ import annotations

import asyncio

from transfer_queue.client import QueueClient
from transfer_queue.errors import QueueError

ASK_SECONDS = 5.0
"""For the queue to say how things stand: one that does not is what is told."""


async def look_at(queue: QueueClient, otherwise: str) -> str:
    """A sentence without its full stop; `otherwise` if no writer waits for room in the queue."""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            stats = await queue.stats()
    except (QueueError, TimeoutError) as error:
        return f"The queue does not say who waits ({type(error).__name__}: {error}): look at it first"
    if not stats.no_room:
        return otherwise
    return (
        f"The queue's memory is full, and writers (agent workers, the feeder) wait for room, {stats.no_room} of them; "
        f"the first: {stats.first_without_room}. Both budgets are keys of transfer_queue here; raise one"
    )
