"""What ended a run, in words that say what to do: the failures that the user can mend."""

from __future__ import annotations

from streamrl.errors import UserError


def queue_failed(error: Exception) -> UserError:
    """The queue did not start: its journal is damaged, its directory in use, ..."""
    cause = getattr(error, "cause", None) or error  # Ray's error holds it, with a traceback around it
    return UserError(f"the queue did not start: {last_line(cause)}")


def last_line(error: BaseException) -> str:
    """Of a message of many lines (another process's traceback) the last one, which says what."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
