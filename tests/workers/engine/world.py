"""Four processes that wait for work, so that a test of ranks costs no start of Python and torch.

    world.run(2, function, argument)      function(RankInfo, argument) on two ranks; what each returned

The ranks of each call meet in a process group of their own, as a worker group's do, and leave it again.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrl.single_controller.worker import RankInfo

RANKS = 4
SECONDS = 110.0
"""Of a call; the first of all waits for the imports."""


IMPORTED = ["torch", "transformers", "transformers.models.qwen2.modeling_qwen2", "streamrl.workers.engine.fsdp2"]
"""Once, in the process that the ranks are forked from: it is most of what their start costs."""


class World:
    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._directory = tempfile.TemporaryDirectory()
        self._pipes: list[Any] = []
        self._processes = []
        self._calls = 0
        for _ in range(RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, ranks: int, function: Callable[[RankInfo, Any], Any], argument: Any) -> list[Any]:
        """Raises AssertionError with the traceback of the first rank that failed."""
        self._calls += 1
        rendezvous = f"file://{Path(self._directory.name) / str(self._calls)}"
        for rank, pipe in enumerate(self._pipes[:ranks]):
            pipe.send((RankInfo(rank, ranks, rank, "cpu", rendezvous, SECONDS), function, argument))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            assert pipe.poll(SECONDS), f"rank {rank} of {ranks} does not answer"
            failed, result = pipe.recv()
            (failures if failed else results).append(result)
        assert not failures, "\n".join(failures)
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._directory.cleanup()


def serve(pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        rank, function, argument = pipe.recv()
        try:
            pipe.send((False, function(rank, argument)))
        except Exception:  # noqa: BLE001 - it goes to the test
            pipe.send((True, traceback.format_exc()))
