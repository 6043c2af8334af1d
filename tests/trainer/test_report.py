"""What a reporter says of the first step of a trainer's life, and of the step after a pause between two steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent_loop.llm.protocol import ServerLoad
from streamrl.monitor.events import EventLog, read_events
from streamrl.runtime.run_dir import RunDirectory
from streamrl.trainer.parts import Parts
from streamrl.trainer.report import Reporter
from tests.runtime.conftest import small_config
from transfer_queue.net.messages import Group, PartitionStats, QueueStats

TRAINED = {"critic/score/mean": 0.5, "critic/score/min": 0.0, "critic/score/max": 1.0, "perf/total_num_tokens": 600.0}


class Life:
    """A trainer's life in a run directory: a reporter, and events of its agents. Its clock is set by hand."""

    def __init__(self, directory: Path, *, resumed: bool) -> None:
        self.now, self.sampled = 0.0, 0
        wall = 100.0 if resumed else 0.0
        log = {"clock": lambda: self.now, "wall": lambda: wall + self.now, "host": f"host{resumed}"}
        trainer, self.agents = (EventLog(directory / "events", process, **log) for process in ("trainer", "agents-0"))
        queue = SimpleNamespace(bytes_read=0, bytes_written=0, stats=self._stats)
        parts = SimpleNamespace(
            config=small_config(), run=RunDirectory(directory, resumed), queue=queue, events=trainer,
            servers=SimpleNamespace(loads=self._loads), clock=lambda: self.now, teachers=None,
        )  # fmt: skip
        self.report = Reporter(cast(Parts, parts), "train")
        self.report.opened(0)

    def session(self, uid: str, tokens: int) -> None:
        self.agents.span_at(
            "session", self.now, self.now, partition="train", uid=uid, session=0, status="success", tokens=tokens
        )

    async def step(self, step: int, seconds: float) -> dict[str, float]:
        self.report.step_begins()
        self.now += seconds
        await self.report.look(step)
        return self.report.step_ends(step, TRAINED)

    async def _stats(self) -> QueueStats:
        part = PartitionStats({}, 0, 0, 0, {}, 0, {}, {})
        return QueueStats(epoch=1, partitions={"train": part}, units=[], clients=1)

    async def _loads(self) -> dict[str, Any]:
        return {"server-0": ServerLoad(0, 0, 1, 0, self.sampled, 0.0)}


def group(uid: str) -> Group:
    return Group(uid=uid, state="dropped", n=1, order=0, tag={}, reason="stale")


@pytest.mark.parametrize("resumed", [False, True])
async def test_what_left_before_the_first_look_at_the_events_is_waste_of_the_first_step(
    tmp_path: Path, resumed: bool
) -> None:
    if resumed:
        Life(tmp_path, resumed=False).session("earlier", 1000)
    life = Life(tmp_path, resumed=resumed)
    life.session("old", 30)
    life.report.left([group("old")])
    assert (await life.step(1, 1.0))["waste/tokens/stale"] == 30.0


async def test_rates_cover_what_the_trainer_does_between_its_steps(tmp_path: Path) -> None:
    life = Life(tmp_path, resumed=False)
    await life.report.look(0)
    life.sampled += 50
    first = await life.step(1, 2.0)
    assert first["perf/generated_tokens_per_s"] == 25.0
    life.now += 8.0  # a checkpoint
    life.sampled += 250
    second = await life.step(2, 2.0)
    assert second["timing_s/step"] == 2.0
    assert second["perf/time_per_step"] == 10.0
    assert second["perf/generated_tokens_per_s"] == 25.0
    assert second["perf/throughput"] == 600 / 10.0 / life.report._ranks


def test_all_checkpoints_that_were_removed_are_named_once(tmp_path: Path) -> None:
    life = Life(tmp_path, resumed=False)
    life.report.saved(6, [2, 4])
    life.report.saved(8, [6])
    notes = [str(event.value) for event in read_events(tmp_path) if event.name == "note"]
    assert len(notes) == 1
    assert notes[0].startswith("the checkpoints of steps 2, 4 were removed when that of step 6 was written")
