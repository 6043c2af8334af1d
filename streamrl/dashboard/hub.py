"""What runs behind the pages: reads the run directory as it grows, keeps the state, makes the frames."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from streamrl.dashboard.frames import FrameLog
from streamrl.dashboard.live_queue import LiveQueue
from streamrl.dashboard.reading import MetricsTail, SummaryFile, boot, last_growth, lives, read_config
from streamrl.dashboard.state.run_state import RunState
from streamrl.dashboard.usable import usable
from streamrl.dashboard.wakeup import Wakeup
from streamrl.monitor.events import Event, EventTail
from streamrl.monitor.run_view import ENDED, PARTITION
from transfer_queue.net.messages import QueueStats

log = logging.getLogger(__name__)

FRAME_SECONDS = 0.5
"""Two frames a second at most."""

LOOK_SECONDS = 1.0
"""A look is taken after this without a change: that a run fell silent is no change of a file."""


class Hub:
    """Consumes: the files of a run, and its queue's answers. Produces: frames. Waits for: changes of the files, the
    next second. One event loop; all that changes `state` happens between two awaits."""

    def __init__(self, run_dir: Path, *, wall: Callable[[], float] = time.time) -> None:
        self.run_dir = run_dir
        self.state = RunState(read_config(run_dir), run_dir.resolve().name)
        self.state.host = boot()
        self.state.last_sign = last_growth(run_dir, wall())
        self.frames = FrameLog()
        self.ready = asyncio.Event()
        """Set once what was there at the start has been read."""
        self.queue = LiveQueue(run_dir / "queue", PARTITION, self._queue_said, self._next_look)
        self._events = EventTail(run_dir)
        self._metrics = MetricsTail(run_dir)
        self._summary = SummaryFile(run_dir)
        self._odd = 0
        self._wall = wall
        self._news, self._look = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        with Wakeup() as wakeup:
            self._watch(wakeup)
            await asyncio.to_thread(
                self._take, self._events.catch_up(), grown=False
            )  # of a long run that takes seconds
            self.flush()
            self.ready.set()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.queue.run(), name="live queue")
                while True:
                    await wakeup.wait(LOOK_SECONDS)
                    self._watch(wakeup)
                    self.look()
                    await asyncio.sleep(FRAME_SECONDS)

    def look(self) -> None:
        """Take in what is new, and make a frame of what that changes."""
        events = self._events.poll()
        self._take(events, grown=bool(events))
        self.flush()
        self._look, looked = asyncio.Event(), self._look
        looked.set()

    def flush(self) -> None:
        """A frame of what changed since the last one, if anything did."""
        frame = self.state.delta(self._wall())
        if frame is None:
            self.frames.forget()
        elif frame:
            self.frames.add(frame)
        else:
            return
        self._news, told = asyncio.Event(), self._news
        told.set()

    def snapshot(self) -> bytes:
        """The state as of frame `frames.last`."""
        self.flush()
        return self.state.snapshot(self._wall())

    async def news(self, number: int, seconds: float) -> bool:
        """Whether there is a frame after `number`, or comes within so many seconds."""
        if self.frames.last != number:
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    def now(self) -> float:
        return self._wall()

    def _watch(self, wakeup: Wakeup) -> None:
        wakeup.watch(self.run_dir)
        wakeup.watch(self.run_dir / "events")

    def _take(self, events: Iterable[Event], *, grown: bool) -> None:
        state = self.state
        for event in events:
            if usable(event):
                state.feed(event)
            else:
                self._odd += 1
        if grown:
            state.last_sign = self._wall()
        anew, lines = self._metrics.poll()
        if anew:
            state.metrics_anew()
        for line in lines:
            state.metrics_line(line)
        state.damaged = self._events.damaged + self._metrics.damaged + self._odd
        if not state.config:
            state.config = read_config(self.run_dir) or {}
        self._look_at_end()
        state.processes(lives)

    def _look_at_end(self) -> None:
        """A run that was killed said nothing in its log; who started it may have summed it up."""
        summary = self._summary.read()
        if summary is None:
            self.state.error = ""
            return
        status, self.state.error = summary
        if status in ENDED and self.state.view.status not in ENDED:
            trainer = self.state.fleet.processes.get("trainer")
            if trainer is None or trainer.alive is not True:
                self.state.view.status = status

    def _queue_said(self, stats: QueueStats | None) -> None:
        if stats is None:
            self.state.queue.gone()
        else:
            self.state.queue.ask(stats, self._wall())
        self.flush()

    async def _next_look(self) -> None:
        await self._look.wait()
