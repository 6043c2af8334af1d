"""What a server may answer, and how it is told from what none should: a server's odd answer is no fault of the request.

    the request's own     ValueError (ContextOverflow, ImagesNotServed), and of `score` CannotScore, FloatingPointError
    the server is gone    ConnectionError, TimeoutError
    it broke the protocol whatever else it raises, and an answer that cannot be: `ProtocolBroken`, which is a ServerDied

So a server that answers nonsense is out of service, its request goes on elsewhere, and nothing of the answer is used.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from agent_loop.llm.protocol import MOST_LOG_PROB, CannotScore, Generation, Scores, ServerDied, ServerLoad

T = TypeVar("T")

AHEAD = 64
"""Versions ahead of the newest that was told: those that servers may take until the next beat tells of them."""
SHORT = 64
"""Tokens up to which numpy costs more than it saves."""
STOP_REASONS = frozenset({"stop", "length", "aborted"})
REQUESTS_OWN = (ValueError,)
SCORES_OWN = (ValueError, CannotScore, FloatingPointError)
_COUNTS = ("running", "waiting", "slots", "weight_version", "tokens_generated", "preemptions")
_FIGURES = tuple(field.name for field in fields(ServerLoad) if field.name not in (*_COUNTS, "asleep"))


class ProtocolBroken(ServerDied):
    """A server raised what no server may. It counts as one that died, maybe of the request."""


class OddAnswer(ProtocolBroken):
    """A server answered what no server may. It counts as one that died, of itself."""


def odd(server: str, what: str) -> OddAnswer:
    return OddAnswer(f"server {server} broke the protocol: {what}")


def trouble(error: BaseException, server: str, verb: str) -> ServerDied:
    """What the error of a verb says of its server, where it cannot be the caller's own."""
    if isinstance(error, ServerDied):
        return error
    if isinstance(error, ConnectionError | TimeoutError):
        return ServerDied(f"server {server}: {error or type(error).__name__}")
    if isinstance(error, asyncio.CancelledError):
        error = RuntimeError("it was cancelled, and nobody had asked for that")
    return ProtocolBroken(f"server {server} broke the protocol: {verb} raised {_short(error)}")


def cancelled_itself() -> bool:
    """Of a task that has caught a CancelledError: whether it is cancelled itself, and not something of a server's."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def result_of(answer: asyncio.Future[T], server: str, verb: str, own: tuple[type[Exception], ...]) -> T:
    """Of a call that is done. Raises the errors that are the caller's `own`, and ServerDied."""
    if answer.cancelled():
        raise trouble(asyncio.CancelledError(), server, verb)
    error = answer.exception()
    if error is None:
        return answer.result()
    if isinstance(error, own):
        raise error
    found = trouble(error, server, verb)
    raise found from (None if found is error else error)


class Sense:
    """Whether answers can be. `newest`: the newest weight version that is known to be there, None: not known."""

    def __init__(self, vocab_size: int | None = None) -> None:
        self._vocab_size = math.inf if vocab_size is None else vocab_size
        self._last_version = math.inf

    def tell_newest(self, version: int | None) -> None:
        self._last_version = math.inf if version is None else version + AHEAD

    def is_future(self, version: int) -> bool:
        return version > self._last_version

    def check(self, piece: Generation, server: str, *, left: int) -> None:
        """Raises OddAnswer. `left`: tokens that may still come. A few passes in C over the lists, once a piece."""
        try:
            fault = self._fault(piece, left)
        except Exception as error:  # what cannot even be looked at is no answer either
            raise odd(server, f"it answered {_short(piece)}, which is no Generation ({error!r})") from error
        if fault:
            raise odd(server, fault)

    @staticmethod
    def check_scores(scores: Scores, server: str, *, count: int) -> None:
        """Raises OddAnswer unless there are `count` of them; what they are worth is looked at by who uses them."""
        if not isinstance(scores, Scores):
            raise odd(server, f"score answered {_short(scores)}, which is no Scores")
        if not isinstance(scores.log_probs, list) or len(scores.log_probs) != count:
            raise odd(server, f"score answered log_probs {_short(scores.log_probs)}; expected {count} numbers")

    def check_load(self, load: ServerLoad, server: str) -> None:
        """Raises OddAnswer."""
        if not isinstance(load, ServerLoad):
            raise odd(server, f"load answered {_short(load)}, which is no ServerLoad")
        for field in _COUNTS:
            count = getattr(load, field)
            if type(count) is not int or count < 0:
                raise odd(server, f"load.{field} is {_short(count)}; it has to be a whole number >= 0")
        for field in _FIGURES:
            figure = getattr(load, field)
            if not isinstance(figure, int | float) or not 0 <= figure < math.inf:
                raise odd(server, f"load.{field} is {_short(figure)}; it has to be a finite number >= 0")
        if self.is_future(load.weight_version):
            raise odd(server, self._of_the_future("load.weight_version", load.weight_version))

    def _fault(self, piece: Generation, left: int) -> str:
        ids, versions = piece.token_ids, piece.weight_versions
        count = len(ids)
        if piece.stop_reason not in STOP_REASONS:
            return f"stop_reason is {_short(piece.stop_reason)}; known are stop, length and aborted"
        if not piece.queue_seconds >= 0 or not piece.engine_seconds >= 0:
            return f"queue_seconds {piece.queue_seconds!r} and engine_seconds {piece.engine_seconds!r} are no durations"
        if count > left:
            return f"token_ids has {count} tokens, of at most {left} that were asked for"
        if len(versions) != count:
            return f"weight_versions has {len(versions)} entries for {count} tokens"
        if fault := _log_probs_fault(piece.log_probs, count):
            return fault
        if not count:
            return ""
        if self._largest(ids) >= self._vocab_size:
            limit = min(self._vocab_size, 2**32)
            bad = next(id for id in ids if not isinstance(id, int) or not 0 <= id < limit)
            known = "" if self._vocab_size == math.inf else f" of the vocabulary of {self._vocab_size}"
            return f"token_ids has {_short(bad)}, which is no token{known}"
        newest = versions[0]
        if versions.count(newest) != count:  # else one look is enough
            newest = max(versions)
            oldest, whole = min(versions), type(sum(versions)) is int
        else:
            oldest, whole = newest, type(newest) is int
        if not whole or oldest < 0:
            bad = next(version for version in versions if not isinstance(version, int) or version < 0)
            return f"weight_versions has {_short(bad)}, which is no version"
        if newest > self._last_version:
            return self._of_the_future("weight_versions", newest)
        return ""

    @staticmethod
    def _largest(ids: list[int]) -> float:
        """Infinite if one of them is none. An array takes whole numbers of 32 bits alone; all in C."""
        try:
            packed = array("I", ids)
        except (TypeError, OverflowError):
            return math.inf
        return max(packed) if len(packed) < SHORT else int(np.frombuffer(packed, np.uint32).max())

    def _of_the_future(self, field: str, version: int) -> str:
        return f"{field} has {version}, and the newest that was published is {int(self._last_version) - AHEAD}"


def _log_probs_fault(log_probs: list[float], count: int) -> str:
    """A sum is NaN or infinite if one of them is."""
    if len(log_probs) != count:
        return f"log_probs has {len(log_probs)} entries for {count} tokens"
    if count and not (-math.inf < sum(log_probs) < math.inf and max(log_probs) <= MOST_LOG_PROB):
        bad = next(given for given in log_probs if not -math.inf < given <= MOST_LOG_PROB)
        return f"log_probs has {_short(bad)}, which is no log-probability"
    return ""


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # whoever wrote it is to be named all the same
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."
