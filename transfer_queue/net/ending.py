"""Whether a queue has ended for good, as far as its files tell: who asks it need not wait then.

Clients of nodes that do not see them are told by the controller, by Failed("closed") to no request, as it ends.

A queue whose processes merely died is started again on its directory, and its clients wait for that.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

from transfer_queue.errors import Invalid
from transfer_queue.storage.private import open_regular

CLOSED = "closed"
"""A file in a queue's directory from its orderly end to its next start."""

ANONYMOUS = "anonymous"
"""A file in the directory of a queue that ends with the process that started it, directory and all."""


def why_ended(address: Mapping[str, str]) -> str | None:
    """What is to be told about the queue of this address if it has ended; None if it runs, or may come back."""
    directory = Path(address["key_file"]).parent
    if not Path(address["key_file"]).exists():
        return f"the queue of run {address['run']!r} was closed by its owner, its directory {directory} is gone"
    if (directory / CLOSED).exists():
        return f"the queue of run {address['run']!r} was closed by its owner; start it again on {directory}"
    if (directory / ANONYMOUS).exists() and not is_held(directory / "service.lock"):
        return f"the queue of run {address['run']!r} ended with the process that had started it by init()"
    return None


def sees(address: Mapping[str, str]) -> bool:
    """Whether the queue's directory can be seen here, and not only a copy of its key."""
    return (Path(address["key_file"]).parent / "run.json").exists()


def is_held(lock: Path) -> bool:
    """Whether a process has locked this file."""
    try:
        with os.fdopen(open_regular(lock), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, Invalid):
        return False
    return False
