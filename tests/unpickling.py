"""Notices when a decoder of ours lets pickle resolve a name, which is how data becomes code.

An audit hook sees every `pickle.find_class` of the process. It is a breach if the innermost code that asked for it,
Ray's and multiprocessing's own transports aside, is the queue or a checkpoint's reader.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]

DECODERS = (
    f"{ROOT}/transfer_queue/",
    f"{ROOT}/agent_loop/rows.py",
    f"{ROOT}/streamrl/trainer/checkpoint.py",
    f"{ROOT}/streamrl/workers/engine/checkpoint.py",
    f"{ROOT}/streamrl/workers/engine/loading.py",
    f"{ROOT}/streamrl/weight_sync/",
)

TRANSPORTS = (
    "/ray/", "/multiprocessing/", "/torch/multiprocessing/", "/concurrent/futures/",
    "/torch/distributed/distributed_c10d.py",  # what the ranks of one process group tell each other
)  # fmt: skip
"""They unpickle what a process of the same run has sent them over their own, authenticated connections."""

breaches: list[str] = []
"""What was resolved since the last look: "module.name, asked for by file:line"."""

_watching = False


def watch() -> None:
    """From now on; a hook cannot be removed, so a second call does nothing."""
    global _watching
    if not _watching:
        _watching = True
        sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple) -> None:
    if event != "pickle.find_class":
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in TRANSPORTS):
            return
        if file.startswith(DECODERS):
            breaches.append(f"{arguments[0]}.{arguments[1]}, asked for by {file}:{frame.f_lineno}")
            return
        frame = frame.f_back
