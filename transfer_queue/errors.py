"""What can go wrong in the queue. Every error says what was wrong, with which value, and what to do.

Each class has a `code`, the form in which it crosses the wire.
"""

from __future__ import annotations


class QueueError(RuntimeError):
    """Base of all errors of this package; a RuntimeError, as programs for TransferQueue expect."""

    code = "error"


class Invalid(QueueError, ValueError):
    """The request is wrong whatever the state of the queue (duplicate keys, unknown field, bad dtype)."""

    code = "invalid"


class NotFound(QueueError, KeyError):
    """A partition, key, group or task that the queue does not know (or no longer knows)."""

    code = "not_found"

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class StorageKeyNotFoundError(NotFound):
    """Rows of a BatchMeta were cleared, and possibly put anew: its serials name rows that are gone."""

    code = "rows_gone"


class Conflict(QueueError):
    """An attempt-stamped write that contradicts what stands there (a late row, a closed session)."""

    code = "conflict"


class Fenced(QueueError):
    """The token is no longer valid: the lease expired, was released, or a newer incarnation took over."""

    code = "fenced"


class QueueFull(QueueError):
    """No credit. `retry_after` is a hint in seconds."""

    code = "queue_full"

    def __init__(self, message: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SegmentGone(QueueError):
    """A block lies in a segment that its unit no longer has; the writer copies again into a new one."""

    code = "segment_gone"


class Corrupt(QueueError):
    """Stored bytes do not match their digest, or a journal record in the middle of the file is damaged."""

    code = "corrupt"


class DeadlineExceeded(QueueError, TimeoutError):
    """A wait ended. The message names who waited for what, how long, and what to do."""

    code = "deadline"


class Disconnected(QueueError, ConnectionError):
    """The controller or a unit cannot be reached."""

    code = "disconnected"


class QueueClosed(Disconnected):
    """The queue was closed by who had started it; nobody need wait for it."""

    code = "closed"


BY_CODE: dict[str, type[QueueError]] = {
    cls.code: cls
    for cls in (
        QueueError,
        Invalid,
        NotFound,
        StorageKeyNotFoundError,
        Conflict,
        Fenced,
        QueueFull,
        SegmentGone,
        Corrupt,
        DeadlineExceeded,
        Disconnected,
        QueueClosed,
    )
}
