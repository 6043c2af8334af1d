"""Ctrl-C and SIGTERM, from the first imports to the end of a run.

    until the run can be asked to stop    KeyboardInterrupt, and a note of it: a library that is just being imported or
                                          started may swallow the exception, the note stays
    from then on                          the first one asks for a clean end, the second one ends at once

Imports next to nothing: it is the first thing that the command line installs.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Invariant: an interrupt that was taken ends the run, whatever became of the exception that told of it."""

    def __init__(self) -> None:
        self.received = False
        self._asked = False
        self._stop: Callable[[], object] | None = None

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take the signals while the block runs. For the main thread; again within itself it changes nothing."""
        before = {number: signal.signal(number, self._take) for number in SIGNALS}
        outermost = before[signal.SIGINT] != self._take
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if outermost:
                self.received = self._asked = False

    @contextlib.contextmanager
    def asking(self, stop: Callable[[], object]) -> Iterator[None]:
        """While the block runs, the first interrupt calls `stop`; at once if one came before."""
        with self.taken():
            self._stop = stop
            try:
                if self.received:
                    self._ask()
                yield
            finally:
                self._stop = None

    def check(self) -> None:
        """Raise KeyboardInterrupt if one came that was swallowed, or made into another error."""
        if self.received and not self._asked:
            raise KeyboardInterrupt

    def _take(self, _signal: int, _frame: object) -> None:
        again, self.received = self.received, True
        if again or self._stop is None:
            raise KeyboardInterrupt
        self._ask()

    def _ask(self) -> None:
        sys.stderr.write("\nstopping after a checkpoint; press Ctrl-C again to end at once\n")
        assert self._stop is not None
        self._asked = True
        self._stop()


INTERRUPTS = Interrupts()
"""Of this process."""
