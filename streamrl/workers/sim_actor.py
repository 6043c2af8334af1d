"""The actor's methods without a model: they take the time of one, on the clock of the caller's loop.

For runs on the `sim` server, where the flow of groups, versions and steps is what is looked at. Its "weights" are a
digest of everything trained so far and in which order, so two runs that trained the same have equal digests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.rendering.chat import ChatTokenizer
from streamrl.recording.samples import FIELDS, SampleOrder, write_samples
from streamrl.single_controller.decorator import Dispatch, Execute, register
from streamrl.single_controller.metrics import Mean, Metric, Peak, Total
from streamrl.single_controller.worker import RankInfo, Worker
from streamrl.weight_sync.protocol import WeightInfo
from streamrl.workers.contract import Reads
from streamrl.workers.preparation import loss_masks, mask_metrics, mini_batch_rows
from transfer_queue.metadata import KVBatchMeta

Sleep = Callable[[float], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class SimTiming:
    """Seconds."""

    per_step: float = 0.05
    """Of an optimizer step, whatever is in it."""
    per_token: float = 1e-5
    """Of forward and backward; a forward alone takes a third."""
    publish: float = 0.02
    save: float = 0.0
    """Of writing a checkpoint."""


class SimActorWorker(Worker):
    """World size 1, for `LocalWorkerGroup(inline=True)`. `queue` (async) is read as the real actor reads it."""

    def __init__(
        self, rank: RankInfo, timing: SimTiming, *, queue: Any = None, sleep: Sleep = asyncio.sleep,
        tokenizer_path: str = "",
    ) -> None:  # fmt: skip
        super().__init__(rank)
        self._tokenizer_path = tokenizer_path
        self._timing, self._queue, self._sleep = timing, queue, sleep
        self._digest = hashlib.sha256(b"base").hexdigest()
        self._held: tuple[Path, str] | None = None

    @register(Dispatch.RANK_ZERO)
    async def init_model(self) -> dict[str, Any]:
        return {"model_type": "sim", "parameters": 0, "world_size": 1, "device": "none"}

    @register(Dispatch.DP_COMPUTE)
    async def compute_log_prob(self, batch: KVBatchMeta) -> dict[str, Metric]:
        """Takes its time; writes nothing, since there is no policy whose log-probs it could be."""
        seconds = self._timing.per_token * _tokens(batch) / 3
        await self._sleep(seconds)
        return {"timing_s/old_log_prob": Peak(seconds)}

    @register(Dispatch.DP_COMPUTE)
    async def compute_rm_scores(self, batch: KVBatchMeta) -> dict[str, Any]:
        """Takes its time; the scores, from 0 to 1, follow from the rows' keys, and no column is written."""
        seconds = self._timing.per_token * _tokens(batch) / 3
        await self._sleep(seconds)
        scores = {key: zlib.crc32(key.encode()) / 0xFFFFFFFF for key in batch.keys}
        return {"scores": scores, "metrics": {"timing_s/reward_model": Peak(seconds)}}

    @register(Dispatch.ONE_TO_ALL)
    async def keep_snapshot(self) -> None: ...

    @register(Dispatch.DP_COMPUTE)
    async def update_actor(self, batch: KVBatchMeta) -> dict[str, Metric]:
        info = batch.extra_info or {}
        bytes_read, masks = await self._read(batch)
        steps = sum(1 for rows in mini_batch_rows(batch.keys, info) if rows)
        seconds = self._timing.per_step * steps + self._timing.per_token * _tokens(batch)
        await self._sleep(seconds)
        trained = json.dumps([batch.keys, info.get("advantages")], sort_keys=True)
        self._digest = hashlib.sha256((self._digest + trained).encode()).hexdigest()
        return {
            "actor/optimizer_steps": Mean(steps),
            "rows/trained": Total(len(batch)),
            "perf/total_num_tokens": Total(_tokens(batch)),
            "data/bytes_read": Total(bytes_read),
            "timing_s/update_actor": Peak(seconds),
            **masks,
        }

    async def _read(self, batch: KVBatchMeta) -> tuple[int, dict[str, Metric]]:
        """Bytes read, and what would count in the loss."""
        if self._queue is None or not batch.keys:
            return 0, {}
        info = batch.extra_info or {}
        fields = Reads(old="rollout_log_probs").of("update_actor", info)
        columns = await self._queue.get(batch.partition_id, batch.keys, fields)
        rows = {name: [column[i] for i in range(len(batch.keys))] for name, column in columns.items()}
        masks, versions = rows["response_mask"], rows.get("weight_versions")
        loss = loss_masks(batch.keys, masks, versions, info)
        nbytes = sum(row.nbytes for column in rows.values() for row in column)
        return nbytes, mask_metrics(masks, loss, versions, info)

    @register(Dispatch.RANK_ZERO, Execute.RANK_ZERO)
    async def write_samples(self, order: SampleOrder) -> list[dict[str, Any]]:
        columns = await self._queue.get(order.partition, [order.keys[i] for i in order.wanted], FIELDS)
        return write_samples(order, columns, ChatTokenizer.from_pretrained(self._tokenizer_path))

    @register(Dispatch.RANK_ZERO)
    async def publish_weights(self, version: int, weights_dir: str = "") -> WeightInfo:
        """No file: the `sim` server takes the version and does not look for what the path names."""
        await self._sleep(self._timing.publish)
        return WeightInfo(version, f"simulated-v{version}", 0, self._timing.publish)

    @register(Dispatch.RANK_ZERO)
    async def state_digest(self) -> str:
        return self._digest

    @register(Dispatch.ONE_TO_ALL)
    async def save_checkpoint(self, directory: str, background: bool = False) -> None:
        self._held = Path(directory), self._digest
        if not background:
            await self._write()

    @register(Dispatch.ONE_TO_ALL, beside=True)
    async def checkpoint_written(self) -> None:
        await self._write()

    async def _write(self) -> None:
        """Half of it, the rest a while later, as a real one takes its time."""
        assert self._held is not None
        path, digest = self._held
        text = json.dumps({"digest": digest})
        path.mkdir(parents=True, exist_ok=True)
        (path / "state.json").write_text(text[: len(text) // 2])
        await self._sleep(self._timing.save)
        (path / "state.json").write_text(text)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: str) -> None:
        self._digest = json.loads((Path(directory) / "state.json").read_text())["digest"]

    @register(Dispatch.ONE_TO_ALL)
    async def close(self) -> None: ...  # type: ignore[override]


def _tokens(batch: KVBatchMeta) -> int:
    return sum(int(tag["seq_len"]) for tag in batch.tags)
