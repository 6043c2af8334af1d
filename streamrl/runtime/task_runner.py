"""The single controller as a Ray actor, so that the process the user started only shows and steers."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from streamrl.config import StreamRLConfig
from streamrl.monitor.summary import Summary
from streamrl.runtime.ray_runtime import ray_parts
from streamrl.runtime.run_dir import RunDirectory
from streamrl.runtime.session import Session


class TaskRunner:
    """`run` once; `stop` from elsewhere while it runs."""

    def __init__(self, config: StreamRLConfig, run_dir: str, resumed: bool) -> None:
        self._config = config
        self._run = RunDirectory(Path(run_dir), resumed)
        self._stop = asyncio.Event()
        logging.basicConfig(
            filename=self._run.path / "trainer.log",
            level=logging.INFO,
            force=True,  # Ray has set up logging already
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )

    async def run(self) -> Summary:
        async with ray_parts(self._config, self._run) as parts:
            session = Session(parts)
            stopper = asyncio.create_task(self._pass_on(session))
            try:
                return await session.run()
            finally:
                stopper.cancel()

    async def stop(self) -> None:
        """Ask for a clean end: checkpoint, then `run` returns."""
        self._stop.set()

    async def _pass_on(self, session: Session) -> Any:
        await self._stop.wait()
        session.stop()
