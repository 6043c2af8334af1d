"""The terminal view of a run, live or finished: it reads the event log of a run directory and nothing else.

    with TerminalView(run_dir):            # beside a run
        ...
    TerminalView(run_dir).follow()         # a run of another process, live or finished

On a terminal it draws a panel four times a second. Where stdout is no terminal it prints one line per step.
`RunView` is the state behind it: it is fed events and can be rendered at any time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live

from streamrl.monitor.events import EventTail
from streamrl.monitor.run_view import PRINTED, RunView, render

DRAW_SECONDS = 0.25

SILENT_SECONDS = 60.0
"""`follow` gives up after this time without an event, where nobody watches a terminal: the run is dead."""


class TerminalView:
    """Shows a run from a thread of its own, until closed. `live` None: whether the console is a terminal.
    `from_now`: without what the log already holds (a resumed run's earlier lives)."""

    def __init__(
        self,
        run_dir: Path | str,
        console: Console | None = None,
        *,
        live: bool | None = None,
        from_now: bool = False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.view = RunView()
        self._console = console or Console()
        self._live = self._console.is_terminal if live is None else live
        self._tail = EventTail(run_dir)
        if from_now:
            self._tail.poll()
        self._wall = wall
        self._screen: Live | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._open()
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._show()
        self._close()

    def follow(self) -> None:
        """Show the run until it ends; a finished one is shown once. Ctrl-C leaves."""
        self._open()
        try:
            while True:
                self._show()
                silent = self._wall() - self.view.last_event > SILENT_SECONDS
                if self.view.ended or (silent and not self._live):
                    return
                self._stop.wait(DRAW_SECONDS)
        except KeyboardInterrupt:
            return
        finally:
            self._close()

    def _run(self) -> None:
        while not self._stop.wait(DRAW_SECONDS):
            self._show()

    def _open(self) -> None:
        if self._live:
            self._screen = Live(console=self._console, auto_refresh=False, transient=False)
            self._screen.start()

    def _close(self) -> None:
        if self._screen is not None:
            self._screen.stop()
            self._screen = None

    def _show(self) -> None:
        """Take in what is new, and draw it or print its lines."""
        for event in self._tail.poll():
            line = self.view.feed(event)
            if line and (self._screen is None or event.name in PRINTED):
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._screen is not None:
            self._screen.update(render(self.view, self._wall()), refresh=True)
