"""Calls to many LLM servers at the same time, each with its own end: an answer, or why there is none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agent_loop.llm.answers import cancelled_itself, trouble
from streamrl.weight_sync import WeightError, WeightsMissing

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""For the members of a broadcast to notice that it has broken off; who is silent then is left out of the next one."""

Calls = Mapping[str, Callable[[], Awaitable[Any]]]


async def each_of(calls: Calls, seconds: float) -> dict[str, Any]:
    """By server: its answer, or the ServerDied, WeightError or TimeoutError in its place. What else one raises is its
    own end (ProtocolBroken), and not that of the others."""

    async def one(name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await call()
        except TimeoutError:
            return TimeoutError(f"no answer within {seconds:.0f} s; it catches up when it is back")
        except WeightError as error:
            return error
        except (Exception, asyncio.CancelledError) as error:  # a server of one's own may raise anything
            if isinstance(error, asyncio.CancelledError) and cancelled_itself():
                raise
            found = trouble(error, name, "a call")
            if found is not error:
                logger.warning("%s", found)
            return found

    return dict(zip(calls, await asyncio.gather(*(one(*item) for item in calls.items())), strict=True))


async def broadcast(send: Callable[[], Awaitable[Any]], calls: Calls, seconds: float) -> tuple[dict[str, Any], bool]:
    """`send` and the calls that receive, which end together or not at all. As `each_of`, and whether all went well.

    Where one of them fails the others break off, which a server says by WeightsMissing. Those that say nothing for
    `GRACE_SECONDS` after it, or after `seconds`, are TimeoutError.
    """
    receiving = {name: asyncio.ensure_future(call()) for name, call in calls.items()}
    sending = asyncio.ensure_future(send())
    tasks = [sending, *receiving.values()]
    try:
        _, left = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        if left:
            await asyncio.wait(left, timeout=GRACE_SECONDS)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    sent = not sending.cancelled() and sending.exception() is None
    if not sent:
        why = "it took too long" if sending.cancelled() else sending.exception()
        logger.warning("a broadcast of weights broke off: %s", why)
    answers = {name: _outcome(name, task, sent) for name, task in receiving.items()}
    return answers, sent and not any(isinstance(answer, Exception) for answer in answers.values())


def _outcome(name: str, task: asyncio.Future[Any], sent: bool) -> Any:
    if task.cancelled():
        return TimeoutError("it did not receive the broadcast in time")
    if task.exception() is None and not sent:
        return WeightsMissing("the broadcast broke off after it had received all")
    error = task.exception()
    if error is None or isinstance(error, (WeightError, TimeoutError)):
        return error or task.result()
    return trouble(error, name, "receiving weights")
