"""When acks become final, and what a resume takes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config import StreamRLConfig, load_config, to_yaml
from streamrl.monitor.events import EventLog
from streamrl.runtime.run_dir import open_run
from streamrl.single_controller.errors import WorkerFailed
from streamrl.trainer.batch_log import BatchLog, last_committed
from streamrl.trainer.checkpoint import CheckpointError, TrainerState
from streamrl.trainer.queue_cut import QueueCut
from streamrl.trainer.saving import Saver
from streamrl.workers.engine.checkpoint import ForeignCheckpoint


class Queue:
    """Remembers, for each commit, which checkpoints stood and what the batch log said. Nothing in it is finished."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.commits: list[tuple[int, list[str], int]] = []

    async def stats(self, *, orders: bool) -> Any:
        return SimpleNamespace(partitions={"train": SimpleNamespace(next_order=40, outstanding=[38, 39])})

    async def watch(self, partition: str, since: int) -> Any:
        return SimpleNamespace(groups=[])

    async def commit_step(self, partition: str, step: int) -> None:
        stood = sorted(path.parent.name for path in self.run.glob("checkpoints/*/manifest.json"))
        self.commits.append((step, stood, last_committed(self.run / "batches.jsonl")))


class Ranks:
    """Write a file; in the background only once they may."""

    def __init__(self) -> None:
        self.may_write = asyncio.Event()
        self.error: Exception | None = None
        self.loaded: list[str] = []
        self._held = Path()

    async def save_checkpoint(self, directory: str, background: bool = False) -> None:
        self._held = Path(directory)
        if not background:
            self.may_write.set()
            await self.checkpoint_written()

    async def checkpoint_written(self, *, timeout: float | None = None) -> None:
        held = self._held
        await self.may_write.wait()
        if self.error is not None:
            raise self.error
        held.mkdir()
        (held / "shard").write_bytes(b"weights")

    async def load_checkpoint(self, directory: str) -> None:
        if self.error is not None:
            raise self.error
        self.loaded.append(directory)


@cache
def configured(*arguments: str) -> StreamRLConfig:
    return load_config(["experiment=calculator", *arguments]).config


class Made:
    """A saver with its parts, for one run directory."""

    def __init__(self, directory: Path, *arguments: str, critic: bool = False) -> None:
        config = configured(*arguments)
        self.run = open_run(directory, "test", to_yaml(config), resume_mode="auto", resume_from=None)
        self.queue, self.ranks, self.reported = Queue(self.run.path), Ranks(), []
        self.critic = Ranks() if critic else None
        self.events = EventLog(self.run.path / "events", "trainer")
        self.log = BatchLog(self.run.batches)
        parts: Any = SimpleNamespace(
            config=config, run=self.run, queue=self.queue, actor=self.ranks, critic=self.critic, events=self.events
        )
        report: Any = SimpleNamespace(saved=lambda step, removed: self.reported.append(step))
        self.kl: Any = SimpleNamespace(state=lambda: {"coef": 0.25}, load=lambda state: self.reported.append(state))
        queue: Any = self.queue
        cut = QueueCut(queue, "train", "generate", include="auto", computed=())
        self.saver = Saver(parts, "train", self.log, report, self.kl, cut)

    def train(self, *steps: int) -> None:
        for step in steps:
            self.log.trained(step, [f"u{step}"], [step])

    def close(self) -> None:
        self.events.close()
        self.log.close()
        self.run.release()


ASYNC = "actor_rollout_ref.actor.checkpoint.async_save=true"


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Made]:
    made = Made(tmp_path / "runs", ASYNC, "trainer.save_freq=1")
    yield made
    await made.saver.close()
    made.close()


async def test_acks_become_final_when_the_checkpoint_stands_and_the_log_says_so(tmp_path: Path) -> None:
    made = Made(tmp_path / "runs", "trainer.save_freq=1")
    made.train(1, 2)
    await made.saver.save(2, {"before": {"sampled": 0.5}})
    assert made.queue.commits == [(2, ["global_step_2"], 2)]
    lineage = made.log.lineage
    expected = TrainerState(2, 40, [38, 39], {"before": {"sampled": 0.5}}, {"coef": 0.25}, lineage)
    assert made.saver.store.load(2) == expected
    saved = made.run.path / "checkpoints/global_step_2/config.yaml"
    assert saved.read_text() == (made.run.path / "config.yaml").read_text()
    made.close()


async def test_training_goes_on_while_the_ranks_write_and_until_then_nothing_is_final(made: Made) -> None:
    made.train(1)
    await asyncio.wait_for(made.saver.save(1, {}), 5)
    assert made.saver.saved_step == 1
    assert (made.saver.store.steps(), made.queue.commits, made.reported) == ([], [], [])
    made.ranks.may_write.set()
    await made.saver.finish()
    assert made.queue.commits == [(1, ["global_step_1"], 1)]
    assert made.reported == [1]


async def test_a_second_save_waits_for_the_first(made: Made) -> None:
    made.train(1, 2)
    await made.saver.save(1, {})
    second = asyncio.create_task(made.saver.save(2, {}))
    await asyncio.sleep(0.05)
    assert not second.done()
    made.ranks.may_write.set()
    await second
    assert made.saver.store.steps() == [1]
    await made.saver.finish()
    assert [commit[0] for commit in made.queue.commits] == [1, 2]


async def test_a_save_in_the_background_that_fails_is_told_and_leaves_the_one_before(made: Made) -> None:
    made.train(1, 2)
    made.ranks.may_write.set()
    await made.saver.save(1, {})
    await made.saver.finish()
    made.ranks.error = OSError(28, "No space left on device")
    told = asyncio.create_task(made.saver.watch())
    await made.saver.save(2, {})
    with pytest.raises(OSError, match="No space left"):
        await asyncio.wait_for(told, 5)
    with pytest.raises(OSError, match="No space left"):
        await made.saver.finish()
    assert [commit[0] for commit in made.queue.commits] == [1]
    assert [path.name for path in made.saver.store.directory.iterdir()] == ["global_step_1"]
    assert made.saver.store.load(1).step == 1


async def test_what_a_failed_run_was_writing_is_given_up(made: Made) -> None:
    made.train(1)
    await made.saver.save(1, {})
    await made.saver.close()
    assert (list(made.saver.store.directory.iterdir()), made.queue.commits) == ([], [])


async def saved_run(directory: Path, *, critic: bool = False) -> Path:
    """Step 4 saved, then step 5 trained; the run is killed."""
    made = Made(directory, "trainer.save_freq=1", critic=critic)
    made.train(1, 2, 3, 4)
    await made.saver.save(4, {})
    made.train(5)
    made.close()
    return made.run.path


async def test_a_resume_loads_the_newest_checkpoint_and_undoes_what_came_after_it(tmp_path: Path) -> None:
    run = await saved_run(tmp_path)
    (run / "checkpoints/.global_step_6.draft").mkdir()
    made = Made(tmp_path, "trainer.save_freq=1")
    state = await made.saver.restore()
    assert (state.step, made.saver.saved_step, made.reported) == (4, 4, [{"coef": 0.25}])
    assert made.ranks.loaded == [str(run / "checkpoints/global_step_4/actor")]
    assert not (run / "checkpoints/.global_step_6.draft").exists()
    made.train(5)
    await made.saver.save(5, {})
    assert (await Made(tmp_path / "other").saver.restore()).step == 0
    made.close()


async def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    run, other = await saved_run(tmp_path / "runs"), await saved_run(tmp_path / "others")
    shutil.rmtree(run / "checkpoints/global_step_4")
    (other / "checkpoints/global_step_4").rename(run / "checkpoints/global_step_4")
    made = Made(tmp_path / "runs", "trainer.save_freq=1")
    with pytest.raises(CheckpointError, match=r"is of lineage \w+, and .*batches.jsonl knows step 4 as of lineage \w+"):
        await made.saver.restore()
    assert made.ranks.loaded == []
    made.close()


async def test_a_checkpoint_with_another_set_of_models_is_refused(tmp_path: Path) -> None:
    await saved_run(tmp_path / "with", critic=True)
    await saved_run(tmp_path / "without")
    with pytest.raises(CheckpointError, match="holds the state of a critic, and this run has none"):
        await Made(tmp_path / "with", "trainer.save_freq=1").saver.restore()
    with pytest.raises(CheckpointError, match="holds no critic, and this run has one"):
        await Made(tmp_path / "without", "trainer.save_freq=1", critic=True).saver.restore()


async def test_a_checkpoint_that_does_not_fit_the_model_says_what_the_rank_found(tmp_path: Path) -> None:
    await saved_run(tmp_path)
    made = Made(tmp_path, "trainer.save_freq=1")
    made.ranks.error = WorkerFailed(0, 1, "load_checkpoint", "ForeignCheckpoint: ...")
    made.ranks.error.__cause__ = ForeignCheckpoint("it holds norm.weight as [8], and this model has it as [4]")
    with pytest.raises(CheckpointError, match=r"global_step_4 does not fit this run: it holds norm.weight as \[8\]"):
        await made.saver.restore()


async def test_a_resume_with_other_values_is_on_record(tmp_path: Path) -> None:
    run = await saved_run(tmp_path)
    before = (run / "config.yaml").read_text()
    made = Made(tmp_path, "trainer.save_freq=1", "trainer.n_gpus_per_node=3")
    assert made.run.path == run, "another number of ranks goes on with the run"
    made.run.summary.write_text('{"status": "finished"}')
    await made.saver.restore()
    assert (run / "config.yaml").read_text() == before, "nothing is changed until all of it has worked"
    assert made.run.summary.exists()
    made.saver.goes_on()
    assert "n_gpus_per_node: 3" in (run / "config.yaml").read_text()
    assert (run / "config.1.yaml").read_text() == before
    assert not made.run.summary.exists(), "the run that goes on has not ended"
    made.close()
