"""What a run tells about itself: events, one line of metrics per step, the Prometheus numbers.

The trainer calls one method at each point of its loop; everything shown is a view of what is written here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import psutil

from agent_loop.llm.protocol import ServerLoad
from streamrl.monitor.cpu import CpuMeter, cores
from streamrl.monitor.emit import emit_loads, emit_queue, emit_teachers, emit_trainer_version
from streamrl.monitor.events import EventTail, read_events
from streamrl.monitor.metrics_log import MetricsLog, read_metrics
from streamrl.monitor.overlap import OverlapCollector
from streamrl.monitor.overlap_account import RunOverlap
from streamrl.monitor.prometheus import KEY_FILE, Exporter
from streamrl.monitor.registry import by_reason_class
from streamrl.monitor.session_account import SessionAccount
from streamrl.monitor.trackers import TrackedRun, Trackers, open_trackers
from streamrl.trainer.parts import Parts
from streamrl.trainer.scores import score_metrics
from streamrl.trainer.server_figures import ServerFigures
from streamrl.trainer.step_line import SampledTokens, TeacherCounts, all_zero, evicted, merged_updates, per_token
from transfer_queue.errors import QueueError
from transfer_queue.net.messages import Group, QueueStats

log = logging.getLogger(__name__)

EMA = 0.9
HOPELESS_STEPS = 2
"""First steps without any score but 0 after which the user is told what to look at."""
LAST_LOOK_SECONDS = 5.0


class Reporter:
    """One per trainer. Knows nothing of the queue's protocol; asks it for its stats once a step."""

    def __init__(self, parts: Parts, partition: str) -> None:
        self._parts = parts
        self._events = parts.events
        self._partition = partition
        self._metrics = MetricsLog(parts.run.path, resume_step=0) if not parts.run.resumed else None
        self._collector = OverlapCollector()
        self._sessions = SessionAccount()
        self._tail = EventTail(parts.run.path)
        self._poll()  # earlier lives, before anything is said of this one's groups
        self._cpu = None if parts.config.actor_rollout_ref.rollout.is_virtual else CpuMeter.of(parts.run.path)
        self._trackers = Trackers()
        self._ema: float | None = None
        self._told_removal = False
        self._all_zero: int | None = None if parts.run.resumed else 0
        """First steps in which every session scored 0; None: one did not, or it was said."""
        self._dropped: Counter[str] = Counter()
        self._updates: list[dict[str, float]] = []
        self._served: dict[str, int] = {}
        self._version = 0
        self._ranks = parts.config.trainer.nnodes * parts.config.trainer.n_gpus_per_node
        self._sampled = SampledTokens(parts.clock)
        self._figures = ServerFigures(parts.clock)
        self._loads: dict[str, ServerLoad] = {}
        self._teachers = TeacherCounts()
        self._bytes_before = parts.queue.bytes_read + parts.queue.bytes_written
        self.stats: QueueStats | None = None
        """As last looked at."""
        self._started = 0.0
        self._ended: float | None = None
        self.exporter = _exporter(parts)
        if self.exporter is not None and (service := getattr(parts.servers, "service", None)) is not None:
            self.exporter.follow_service(service)

    # --- called by the loop, in this order ----------------------------------------------------------------------

    def opened(self, step: int) -> None:
        """The run stands at `step`: 0, or where it was restored to."""
        self._metrics = self._metrics or MetricsLog(self._parts.run.path, resume_step=step)
        for line in read_metrics(self._parts.run.path):
            self._ema = line["reward/ema"]
        config, run = self._parts.config, self._parts.run
        tracked = TrackedRun(
            run.path, config.trainer.project_name, msgspec.to_builtins(config), step if run.resumed else None
        )
        self._trackers = open_trackers(config.trainer.logger, tracked, self.note)
        if self.exporter is not None:
            self._events.state("prometheus", self.exporter.url, key_file=str(self._parts.run.path / KEY_FILE))

    def training_begins(self, total: int) -> None:
        self._events.state("total_steps", total)
        self._events.state("run", "training")

    def stopping(self) -> None:
        self._events.state("run", "stopping")

    def step_begins(self) -> None:
        self._started = self._parts.clock()
        self._updates = []

    def updated(self, metrics: dict[str, float]) -> None:
        """The metrics of one mini-batch, from the ranks."""
        self._updates.append(metrics)

    def left(self, groups: list[Group]) -> None:
        """Groups that left untrained."""
        for group in groups:
            reason = group.reason if group.state == "dropped" else "dead"
            self._dropped[reason] += 1
            self._sessions.left(group.uid, reason)
            self._events.state("dropped", group.state, uid=group.uid, reason=group.reason)

    def trained(self, groups: Sequence[Group], version: int) -> dict[str, float]:
        """Metrics of the groups that a step trained at weights `version`."""
        data, prompts = self._parts.config.data, len(self._parts.train_data)
        self._poll()  # their sessions
        self._sessions.trained(group.uid for group in groups)
        metrics = score_metrics(
            groups, version, self._parts.config.algorithm.gdpo_reward_keys,
            max_prompt_length=data.max_prompt_length, max_response_length=data.max_response_length,
        )  # fmt: skip
        return metrics | {"training/epoch": float(max(group.order for group in groups) // max(1, prompts))}

    @property
    def dropped_in_step(self) -> int:
        return sum(self._dropped.values())

    async def look(self, version: int) -> None:
        """Write down the state of queue and servers; within the step, so that the accounting sees it."""
        self.stats = await self._parts.queue.stats()
        loads = await self._parts.servers.loads()
        emit_queue(self._events, self.stats)
        emit_loads(self._events, loads)
        emit_trainer_version(self._events, version)
        if self._cpu is not None and (seconds := self._cpu.seconds()) is not None:
            self._events.counter("cpu_seconds", seconds, cores=cores())
        self._version = version
        self._loads = loads
        self._served = {server: load.weight_version for server, load in loads.items()}
        self._figures.look(loads)
        self._sampled.look({server: load.tokens_generated for server, load in loads.items()})
        if self._parts.teachers is not None:
            taught = await self._parts.teachers.loads()
            emit_teachers(self._events, taught)
            self._teachers.look(taught)

    def step_ends(self, step: int, rows: Mapping[str, float]) -> dict[str, float]:
        """Put the step's line together and write it everywhere."""
        now, before = self._parts.clock(), self._ended
        seconds, whole = now - self._started, now - (self._started if before is None else before)
        self._ended = now
        metrics = {"training/global_step": float(step), **rows, **merged_updates(self._updates)}
        metrics |= self._poll() | self._sessions.step_metrics()
        score = metrics["critic/score/mean"]
        self._ema = score if self._ema is None else EMA * self._ema + (1 - EMA) * score
        metrics |= {
            "reward/ema": self._ema,
            "timing_s/step": seconds,
            "perf/time_per_step": whole,
            "perf/throughput": metrics["perf/total_num_tokens"] / whole / self._ranks if whole > 0 else 0.0,
            "perf/cpu_memory_used_gb": psutil.virtual_memory().used / (1 << 30),
            **self._sampled.step_metrics(),
            **self._figures.step_metrics(),
            "groups/dropped": float(self.dropped_in_step),
            **{f"groups/dropped/{reason}": float(count) for reason, count in by_reason_class(self._dropped).items()},
            **evicted(self._dropped),
            **per_token(metrics),
            **self._queue_metrics(),
            **self._weights_metrics(),
            **(self._teachers.step_metrics() if self._parts.teachers is not None else {}),
            "data/bytes_trainer": self._passed(),
        }
        self._dropped.clear()
        if self._metrics is not None:
            self._metrics.write(step, metrics)
        self._events.step_metrics(step, metrics)
        self._trackers.log(metrics, step)
        self._look_at_scores(metrics)
        if self.exporter is not None:
            self.exporter.update(self.stats, metrics)
            self.exporter.set_weight_versions(self._version, self._served)
            self.exporter.set_engines(self._loads)
        return metrics

    def validated(self, step: int, label: str, metrics: dict[str, float]) -> None:
        """Accuracies, under verl's names; a line of their own, since a validation is no training step."""
        self._events.state("validation", label, step=step, **metrics)
        if self._metrics is not None:
            self._metrics.write_validation(step, label, metrics)
        self._trackers.log(metrics, step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Answers of a validation, as text."""
        for sample in samples:
            fields = {name: sample[name] for name in ("input", "output", "score")}
            self._events.state("sample", str(sample["mode"]), step=step, **fields)
        self._trackers.samples(samples, step)

    def note(self, text: str) -> None:
        """A line on the screen."""
        log.info("%s", text)
        self._events.state("note", text)

    def saved(self, step: int, removed: Sequence[int]) -> None:
        """A checkpoint was written, and others were removed for it: said once."""
        if not removed:
            return
        log.info("checkpoints of steps %s removed, that of step %d stays", list(removed), step)
        if not self._told_removal:
            self._told_removal = True
            keep = self._parts.config.trainer.max_actor_ckpt_to_keep
            which = (
                f"the checkpoint of step {removed[0]} was"
                if len(removed) == 1
                else f"the checkpoints of steps {', '.join(map(str, removed))} were"
            )
            self.note(
                f"{which} removed when that of step {step} was written, as all later ones will be: "
                f"trainer.max_actor_ckpt_to_keep={keep} (null keeps all)"
            )

    def close(self, status: str) -> None:
        self._trackers.close()
        self._events.state("run", status)
        if self._metrics is not None:
            self._metrics.close()
        if self.exporter is not None:
            self.exporter.close()

    def any_session_succeeded(self) -> bool:
        """Of all that are in the event log: reads it whole."""
        told = (event.fields for event in read_events(self._parts.run.path) if event.name == "session")
        return any(fields.get("status") == "success" for fields in told)

    async def last_look(self) -> None:
        """The queue's counts once more, when the run has failed; those known so far if it does not answer."""
        with suppress(QueueError, TimeoutError):
            async with asyncio.timeout(LAST_LOOK_SECONDS):
                self.stats = await self._parts.queue.stats()

    @property
    def overlap(self) -> RunOverlap:
        """The account of the run up to now."""
        self._poll()
        return self._collector.run

    def _poll(self) -> dict[str, float]:
        """Take in what was written to the event logs; the account of the step that it completed, if any."""
        events = list(self._tail.poll())
        self._sessions.feed_all(events)
        return self._collector.feed_all(events)

    def _look_at_scores(self, metrics: Mapping[str, float]) -> None:
        """Says once that the first steps taught nothing, with the usual cause."""
        if self._all_zero is None:
            return
        if any(metrics[f"critic/score/{stat}"] != 0.0 for stat in ("min", "max")):
            self._all_zero = None
            return
        self._all_zero += 1
        if self._all_zero == HOPELESS_STEPS:
            self._all_zero = None
            self.note(all_zero(HOPELESS_STEPS, self._parts.config))

    # --- parts of a line ---------------------------------------------------------------------------------------------

    def _passed(self) -> float:
        """Bulk bytes that went through this process since the last step: prompts it issued, and nothing else."""
        queue, before = self._parts.queue, self._bytes_before
        self._bytes_before = queue.bytes_read + queue.bytes_written
        return float(self._bytes_before - before)

    def _weights_metrics(self) -> dict[str, float]:
        served = {"weights/rollout_version_min": float(min(self._served.values()))} if self._served else {}
        return {"weights/version": float(self._version), **served}

    def _queue_metrics(self) -> dict[str, float]:
        if self.stats is None:
            return {}
        part = self.stats.partitions[self._partition]
        live = ("pending", "generating", "ready", "training")
        return {
            **{f"queue/{state}": float(part.depth.get(state, 0)) for state in live},
            "queue/rows": float(part.rows),
            "queue/bytes": float(part.nbytes),
            "queue/redelivered": float(part.redelivered),
            "queue/dead": float(part.depth.get("dead", 0)),
        }


def _exporter(parts: Parts) -> Exporter | None:
    config = parts.config.monitor.prometheus
    return Exporter(parts.run.path, config.port, host=config.host) if config.enabled else None
