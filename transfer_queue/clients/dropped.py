"""A client that nobody closed: what it holds here and in the controller goes when it is collected, with a warning."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable


def close_when_dropped(client: object, name: str, end: Callable[[], None]) -> weakref.finalize:
    """Call `end`, which must neither hold `client` nor wait, once nobody has `client` any more; not at the end of the
    process, nor in a fork of it. `detach` the result when the client is closed."""
    dropped = weakref.finalize(client, _dropped, name, os.getpid(), end)
    dropped.atexit = False
    return dropped


def _dropped(name: str, process: int, end: Callable[[], None]) -> None:
    if os.getpid() == process:
        try:
            end()
        finally:
            warnings.warn(f"client {name!r} was dropped without close(); it is closed now", ResourceWarning, 2)
