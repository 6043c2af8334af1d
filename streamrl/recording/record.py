"""The rows of each step in files that hold no pickle.

trajectories/step-000012-r1-0.safetensors     rows that rank 1 trained in the first update of step 12
    input_ids, response_mask, rollout_log_probs, weight_versions    all rows one after the other
    rows (JSON, in the header)                                      key, tag and lengths of each
    blake2b (in the header)                                         digest of all this
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from streamrl.config import StreamRLConfig
from streamrl.errors import UserError
from streamrl.trainer.batch_log import TrainedStep, read_batch_log
from streamrl.workers.contract import RECORDED
from transfer_queue.keys import split_row_key

DIRECTORY = "trajectories"
FIELDS = RECORDED
Length = Annotated[int, msgspec.Meta(ge=0)]


class RecordError(UserError):
    """A record that is not there or cannot be read."""


@dataclass(slots=True)
class RecordWriter:
    """One per rank. A step that is trained again after a resume replaces what was written of it."""

    directory: Path
    rank: int
    _step: int = -1
    _written: int = 0

    def write(
        self, step: int, keys: Sequence[str], tags: Sequence[dict[str, Any]], columns: dict[str, list[np.ndarray]]
    ) -> None:
        from safetensors.numpy import save_file

        self.directory.mkdir(mode=0o700, exist_ok=True)
        prefix = f"step-{step:06d}-r{self.rank}-"
        if step != self._step:
            self._step, self._written = step, 0
            for old in self.directory.glob(f"{prefix}*"):
                old.unlink()
        if not keys:
            return
        ids, masks = columns["input_ids"], columns["response_mask"]
        rows = [[k, tag, len(i), len(m)] for k, tag, i, m in zip(keys, tags, ids, masks, strict=True)]
        path = self.directory / f"{prefix}{self._written}.safetensors"
        draft = path.with_suffix(".draft")
        flat, header = {name: np.concatenate(columns[name]) for name in FIELDS}, json.dumps(rows)
        save_file(flat, draft, metadata={"rows": header, "blake2b": _digest(header, flat)})
        os.replace(draft, path)
        self._written += 1


@dataclass(frozen=True, slots=True)
class RecordedRow:
    key: str
    tag: dict[str, Any]
    columns: dict[str, np.ndarray]


@dataclass(slots=True)
class Recording:
    """Of a run directory. Holds the rows of one step at a time."""

    run: Path
    steps: dict[int, TrainedStep] = field(init=False)
    _step_of: dict[str, int] = field(init=False)
    _loaded: tuple[int, dict[str, list[RecordedRow]]] = field(init=False, default=(-1, {}))

    def __post_init__(self) -> None:
        """Raises RecordError."""
        self.steps = {done.step: done for done in read_batch_log(self.run / "batches.jsonl")}
        names = [path.name for path in (self.run / DIRECTORY).glob("step-*.safetensors")]
        recorded = {int(found[1]) for name in names if (found := re.match(r"step-(\d{1,18})-", name))}
        if not recorded:
            raise RecordError(f"{self.run} holds no trajectories; record a run with trainer.record=true first")
        if missing := sorted(set(self.steps) - recorded):
            raise RecordError(f"{self.run / DIRECTORY} has no trajectories of step {missing[0]}, which was trained")
        self._step_of = {uid: step for step, done in self.steps.items() for uid in done.uids}

    def check(self, config: StreamRLConfig) -> None:
        """Raises RecordError when a run of this configuration would ask for other batches than were recorded."""
        first, batch = self.steps[min(self.steps)], config.data.train_batch_size
        if len(first.uids) != batch:
            raise RecordError(
                f"{self.run} trained {len(first.uids)} prompts per step, data.train_batch_size is {batch}: a replay "
                "has the batches of its recording"
            )

    def sessions(self, uid: str, n: int) -> list[list[RecordedRow]]:
        """The rows of a prompt group by session. Raises RecordError unless `n` were recorded."""
        found: dict[int, list[RecordedRow]] = {}
        for row in self.group(uid):
            found.setdefault(split_row_key(row.key).session, []).append(row)
        if set(found) != set(range(n)):
            raise RecordError(
                f"{self.run} recorded {len(found)} samples of prompt {uid}, this run asks for {n}: a replay has the "
                "samples of its recording; set actor_rollout_ref.rollout.n as it was then"
            )
        return [found[session] for session in range(n)]

    def group(self, uid: str) -> list[RecordedRow]:
        """The rows of a prompt group, in order. Raises RecordError for one that was not trained."""
        step = self._step_of.get(uid)
        if step is None:
            raise RecordError(f"{self.run} did not train group {uid}: is it a run on the same dataset and seed?")
        if self._loaded[0] != step:
            self._loaded = (step, self._load(step))
        return sorted(self._loaded[1].get(uid, []), key=lambda row: row.key)

    def _load(self, step: int) -> dict[str, list[RecordedRow]]:
        found: dict[str, list[RecordedRow]] = {}
        for path in sorted((self.run / DIRECTORY).glob(f"step-{step:06d}-*.safetensors")):
            for row in _read(path):
                found.setdefault(split_row_key(row.key).uid, []).append(row)
        return found


def _digest(header: str, flat: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(header.encode(), digest_size=16)
    for name in FIELDS:
        digest.update(np.ascontiguousarray(flat[name]).data)
    return digest.hexdigest()


def open_recording(config: StreamRLConfig) -> Recording | None:
    """Of `trainer.replay`, if it is set. Raises RecordError when it does not fit."""
    if config.trainer.replay is None:
        return None
    recording = Recording(Path(config.trainer.replay))
    recording.check(config)
    return recording


def _read(path: Path) -> list[RecordedRow]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            header, digest = file.metadata()["rows"], file.metadata()["blake2b"]
            flat = {name: file.get_tensor(name) for name in FIELDS}
        rows = msgspec.convert(json.loads(header), list[tuple[str, dict[str, Any], Length, Length]])
        for key, *_ in rows:
            split_row_key(key)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise RecordError(f"{path} is damaged: {type(error).__name__}: {error}; record the run again") from error
    if digest != _digest(header, flat):
        raise RecordError(f"{path} is damaged: its digest is another; record the run again")
    for name in FIELDS:
        tokens = sum(ids if name == "input_ids" else responses for _, _, ids, responses in rows)
        if flat[name].shape != (tokens,):
            raise RecordError(
                f"{path} is damaged: {name} has shape {list(flat[name].shape)}, its {len(rows)} rows say [{tokens}]; "
                "record the run again"
            )
    found, places = [], dict.fromkeys(FIELDS, 0)
    for key, tag, ids, responses in rows:
        columns = {}
        for name in FIELDS:
            end = places[name] + (ids if name == "input_ids" else responses)
            columns[name], places[name] = flat[name][places[name] : end], end
        found.append(RecordedRow(key, tag, columns))
    return found
