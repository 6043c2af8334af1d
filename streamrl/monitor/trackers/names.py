"""Which trackers there are, and what they need."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from functools import partial

from agent_loop.plugins import is_path_spec, load_from_file
from streamrl.monitor.trackers import libraries
from streamrl.monitor.trackers.base import TrackedRun, Tracker
from streamrl.monitor.trackers.lane import Lane, Trackers, could_not_start, text_of

BUILT_IN = ("file", "console")
"""Names in trainer.logger that are no trackers: metrics.jsonl, which every run writes, and the terminal view."""

LIBRARIES: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": libraries.TensorBoard,
    "wandb": libraries.WandB,
    "mlflow": libraries.MLflow,
    "trackio": libraries.Trackio,
    "swanlab": libraries.SwanLab,
}
"""Name -> its class. The name is also that of its package, its module and our extra."""


MODULES = {"tensorboard": "torch.utils.tensorboard.writer"}
"""Where that is not what is imported."""


def missing(names: Iterable[str]) -> list[str]:
    """Libraries that are named and not installed."""
    return [name for name in names if name in LIBRARIES and not _installed(name)]


def _installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # a mere directory, as wandb leaves one, has no origin


def open_trackers(names: Iterable[str], run: TrackedRun, tell: Callable[[str], None]) -> Trackers:
    """Each in a thread of its own, in which it is made. `names`: of LIBRARIES, or path.py:Class.

    What they import is imported here, in the caller's thread, and takes seconds: a module that one thread imports is
    half a module to all others meanwhile.
    """
    lanes: list[Lane] = []
    for name in dict.fromkeys(name for name in names if name not in BUILT_IN):
        shown = name.rpartition("/")[2]
        try:
            make = load_from_file(name, "tracker") if is_path_spec(name) else _imported(name)
        except Exception as error:  # noqa: BLE001  (whatever an import may run into)
            tell(f"{could_not_start(shown)}: {type(error).__name__}: {text_of(error)}")
        else:
            lanes.append(Lane(shown, partial(make, run), tell))
    return Trackers(lanes)


def _imported(name: str) -> Callable[[TrackedRun], Tracker]:
    importlib.import_module(MODULES.get(name, name))
    return LIBRARIES[name]
