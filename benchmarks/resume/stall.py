"""How long the training stands still for a save."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.bars import Bar
from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup
from streamrl.trainer.checkpoint import CheckpointStore, TrainerState
from streamrl.workers.actor import ActorWorker
from tests.workers.tiny import make_model, make_rows, settings


def stall() -> list[Bar]:
    """Of a save of 25 million parameters with their moments (300 MB), one rank, on this machine's disk."""

    async def measure(directory: Path) -> list[Bar]:
        model = make_model(directory / "model", hidden=512, layers=12)
        batch, rows = make_rows(2, 2)
        group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, settings(model), rows))
        await group.init_model()
        await group.update_actor(batch)
        store, found = CheckpointStore(directory / "checkpoints", keep=1), {}
        for step in range(1, 7):
            background = step > 3
            began = time.monotonic()
            draft = store.draft(step)
            await group.save_checkpoint(str(draft / "actor"), background=background)
            if not background:
                await store.seal(draft, TrainerState(step, 0))
            found[step] = time.monotonic() - began
            if background:
                await group.update_actor(batch)
                await group.checkpoint_written()
                await store.seal(draft, TrainerState(step, 0))
        size = sum(path.stat().st_size for path in store.path(6).rglob("*") if path.is_file())
        await group.close()
        at_once, beside = median(found[step] for step in (1, 2, 3)), median(found[step] for step in (5, 6))
        return [
            Bar("stall: checkpoint", size / 1e6, "MB"), Bar("stall: written at once", at_once, "s"),
            Bar("stall: async_save", beside, "s"),
            Bar("stall: async_save, share of it", beside / at_once, "", 0.5, "at most"),
        ]  # fmt: skip

    with tempfile.TemporaryDirectory(prefix="streamrl-resume-") as directory:
        return asyncio.run(measure(Path(directory)))
