"""Trackers: where metrics go besides the run's own files, as `trainer.logger` names them.

    trainer ──log(metrics, step)──► Lane: bounded queue ──► thread ──► tracker   one lane each
                                      │ full: the oldest leaves, counted and told once

metrics.jsonl is the truth (monitor/metrics_log.py), and `console` the terminal view (monitor/terminal.py): neither is a
tracker. A tracker may fail, be slow or hang: training does not notice, and at the end waits CLOSE_SECONDS for all of
them together. Keys (WANDB_API_KEY, ...) are taken from the environment by the libraries themselves.
"""

from streamrl.monitor.trackers.base import TakesSamples, TrackedRun, Tracker
from streamrl.monitor.trackers.lane import CLOSE_SECONDS, Lane, Trackers
from streamrl.monitor.trackers.names import BUILT_IN, LIBRARIES, missing, open_trackers

__all__ = [
    "BUILT_IN", "CLOSE_SECONDS", "LIBRARIES", "Lane", "TakesSamples", "TrackedRun", "Tracker", "Trackers", "missing",
    "open_trackers",
]  # fmt: skip
