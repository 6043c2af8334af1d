"""The libraries behind the protocol. None is imported before it is asked for.

Whether a service is spoken to is the environment's to say: without a key or a mode in it, wandb and swanlab write
files to the run directory (`wandb sync`, `swanlab sync` send them later).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from streamrl.monitor.trackers.base import TrackedRun

STEP = "training/global_step"
COLUMNS = ("mode", "input", "output", "score")

MLFLOW_BATCH = 1000
"""Metrics that one of its requests may have."""
MLFLOW_PARAMS = 100
"""Parameters likewise."""
MLFLOW_VALUE = 500
"""Characters of a parameter; newer servers take 6000."""


def _library(name: str) -> Any:
    return import_module(name)


def _mode(prefix: str) -> Any:
    """The library's own choice where the environment says anything of it, else offline."""
    return None if os.environ.get(f"{prefix}_MODE") or os.environ.get(f"{prefix}_API_KEY") else "offline"


class TensorBoard:
    """Event files in <run>/tensorboard: `tensorboard --logdir runs`."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        again = None if run.resumed_at is None else run.resumed_at + 1
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=again)
        if run.resumed_at is None:
            self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=2, default=str)}\n```")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # it is our thread's time

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        for number, row in enumerate(rows):
            text = "\n\n".join(f"**{name}**\n```text\n{row.get(name, '')}\n```" for name in COLUMNS)
            self._writer.add_text(f"samples/{number}", text, step)

    def finish(self) -> None:
        self._writer.close()


class WandB:
    """WANDB_API_KEY, WANDB_MODE, WANDB_ENTITY, ... in the environment. Steps are those of `training/global_step`."""

    def __init__(self, run: TrackedRun) -> None:
        self._wandb = wandb = _library("wandb")
        self._run = wandb.init(
            project=run.project, id=run.name, name=run.name, resume="allow", dir=str(run.directory),
            config=run.config, mode=_mode("WANDB"),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )  # fmt: skip
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, STEP: step})  # not its own step, which may only grow

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        table = self._wandb.Table(columns=list(COLUMNS), data=[[row.get(name) for name in COLUMNS] for row in rows])
        self._run.log({"samples": table, STEP: step})

    def finish(self) -> None:
        self._run.finish()


class MLflow:
    """MLFLOW_TRACKING_URI in the environment, else an SQLite file beside the runs (`mlflow ui --backend-store-uri`).
    "@", which it refuses in names, becomes "_at_", as verl writes it."""

    def __init__(self, run: TrackedRun) -> None:
        mlflow = _library("mlflow")
        self._entities: Any = mlflow.entities
        uri, runs = os.environ.get("MLFLOW_TRACKING_URI"), run.directory.parent
        self._client = mlflow.MlflowClient(tracking_uri=uri or f"sqlite:///{runs / 'mlflow.db'}")
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(
            run.project, artifact_location=None if uri else (runs / "mlflow").as_uri()
        )  # fmt: skip
        before = self._client.search_runs([experiment], f"tags.`streamrl.run` = '{run.name}'", max_results=1)
        if before:
            self._id = before[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {"streamrl.run": run.name}
        self._id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        self._parameters(run)

    def _parameters(self, run: TrackedRun) -> None:
        params = [self._entities.Param(key, str(value)[:MLFLOW_VALUE]) for key, value in run.leaves().items()]
        for start in range(0, len(params), MLFLOW_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MLFLOW_PARAMS])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        metric, now = self._entities.Metric, int(1000 * time.time())
        found = [metric(name.replace("@", "_at_"), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(found), MLFLOW_BATCH):
            self._client.log_batch(self._id, metrics=found[start : start + MLFLOW_BATCH])

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._client.log_dict(self._id, {"samples": [dict(row) for row in rows]}, f"samples/{step}.json")

    def finish(self) -> None:
        self._client.set_terminated(self._id)


class Trackio:
    """Files of its own (TRACKIO_DIR): `trackio show`; TRACKIO_SPACE_ID in the environment sends them."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = _library("trackio").init(
            run.project, name=run.name, config=run.config, resume="allow", embed=False,
            space_id=os.environ.get("TRACKIO_SPACE_ID"), auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._run.finish()


class SwanLab:
    """SWANLAB_API_KEY, SWANLAB_MODE in the environment."""

    def __init__(self, run: TrackedRun) -> None:
        self._swanlab = swanlab = _library("swanlab")
        directory = run.directory / "swanlog"
        directory.mkdir(exist_ok=True)
        self._run = swanlab.init(
            project=run.project, name=run.name, id=run.name, resume="allow", mode=_mode("SWANLAB"),
            log_dir=str(directory), config=run.config,
        )  # fmt: skip

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        texts = [self._swanlab.Text(f"{row.get('input')}\n\n{row.get('output')}", caption=f"score {row.get('score')}")
                 for row in rows]  # fmt: skip
        self._run.log({"samples": texts}, step=step)

    def finish(self) -> None:
        self._run.finish()
