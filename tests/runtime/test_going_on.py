"""What a resume goes on from, and what it refuses before it has changed anything.

A kill at the end of a step is played by a copy of the run directory as it was then: on a virtual clock, in one process.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from streamrl.config import StreamRLConfig, to_yaml
from streamrl.errors import UserError
from streamrl.runtime.launch import launch
from streamrl.runtime.run_dir import open_run, resumable, status_of
from streamrl.trainer.batch_log import read_batch_log
from streamrl.trainer.loop import Trainer
from streamrl.trainer.resume_checks import unlike
from tests.runtime.conftest import MakeConfig

SMALL = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.val_before_train=false")


def start(config: StreamRLConfig, run: Path | None = None) -> tuple[Path, str]:
    """To its end, a new one or the one there; its directory, and what it printed. Raises UserError."""
    out = io.StringIO()
    mode = "disable" if run is None else "resume_path"
    directory = open_run(Path(config.trainer.runs_dir), "test", to_yaml(config), resume_mode=mode, resume_from=run)
    try:
        assert launch(config, directory, Console(file=out, width=10_000)) == 0, out.getvalue()
    finally:
        directory.release()
    return directory.path, out.getvalue()


@contextmanager
def killed_after(step: int, copy: Path) -> Iterator[None]:
    """`copy` is the run's directory as it was after `step`."""
    train_step = Trainer.train_step

    async def then_copied(self: Trainer) -> None:
        await train_step(self)
        if self.step == step:
            shutil.copytree(self.parts.run.path, copy)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "train_step", then_copied)
        yield


def check_accounts(run: Path, steps: int) -> None:
    trained = read_batch_log(run / "batches.jsonl")
    assert [done.step for done in trained] == list(range(1, steps + 1))
    orders = [order for done in trained for order in done.orders]
    assert sorted(orders) == list(range(4 * steps)), "each prompt once, and none left out"


@pytest.mark.parametrize("finished", [4, 0], ids=["after a checkpoint", "from the beginning"])
def test_a_run_killed_without_checkpoints_goes_on_from_the_last_one_and_trains_the_lost_prompts_again(
    make_config: MakeConfig, tmp_path: Path, finished: int
) -> None:
    def config(steps: int) -> StreamRLConfig:
        return make_config(*SMALL, "trainer.save_freq=-1", f"trainer.total_training_steps={steps}")

    run = start(config(finished))[0] if finished else None
    with killed_after(7, copy := tmp_path / "copy"):
        start(config(8), run)
    assert status_of(copy) == "killed", "that it had finished before counts no more"
    assert resumable(copy) is bool(finished)
    told = start(config(10), copy)[1]
    first = f"steps {finished + 1} to 7 were trained and never saved (trainer.save_freq=-1)"
    assert first in told
    assert "their prompts are trained again" in told
    check_accounts(copy, 10)
    assert "never saved" not in start(config(11), copy)[1]
    check_accounts(copy, 11)


def test_a_run_killed_without_checkpoints_that_was_saved_later_loses_nothing_more(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """What was undone and trained again is saved then: a later resume has nothing to give up."""
    unsaved = make_config(*SMALL, "trainer.save_freq=-1", "trainer.total_training_steps=7")
    with killed_after(5, copy := tmp_path / "copy"):
        start(unsaved)
    saving = make_config(*SMALL, "trainer.save_freq=3", "trainer.total_training_steps=7")
    with killed_after(4, again := tmp_path / "again"):
        start(saving, copy)
    assert "never saved" not in start(saving, again)[1]
    check_accounts(again, 7)


def test_the_queue_of_a_copy_that_went_on_is_refused_and_without_it_the_run_goes_on(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(*SMALL, "trainer.save_freq=3", "trainer.total_training_steps=10")
    with killed_after(4, run := tmp_path / "run"):
        start(config)
    shutil.copytree(run, other := tmp_path / "other")
    with killed_after(8, ahead := tmp_path / "ahead"):
        start(config, other)
    shutil.rmtree(run / "queue")
    shutil.copytree(ahead / "queue", run / "queue")
    with pytest.raises(UserError, match=rf"the queue in {run}/queue is of lineage \w+, which .* does not know"):
        start(config, run)
    shutil.rmtree(run / "queue")
    start(config, run)
    check_accounts(run, 10)


def test_a_finished_run_whose_continuation_is_refused_stays_finished(make_config: MakeConfig) -> None:
    common = (*SMALL, "trainer.save_freq=3", "trainer.total_training_steps=3")
    run = start(make_config(*common))[0]
    with pytest.raises(UserError, match="Give it as it was"):
        start(make_config(*common, "trainer.deterministic=true"), run)
    assert status_of(run) == "finished"


@pytest.mark.parametrize("before", ["true", "false"])
def test_deterministic_mode_cannot_begin_or_end_within_a_run_and_nothing_is_changed_by_trying(
    make_config: MakeConfig, tmp_path: Path, before: str
) -> None:
    now = "false" if before == "true" else "true"
    common = (*SMALL, "trainer.save_freq=3", "trainer.total_training_steps=6")
    as_it_was, otherwise = (make_config(*common, f"trainer.deterministic={value}") for value in (before, now))
    with killed_after(4, run := tmp_path / "run"):
        start(as_it_was)
    written = (run / "config.yaml").read_text()
    with pytest.raises(UserError, match=f"trainer.deterministic is {now} and was {before}: .*Give it as it was"):
        start(otherwise, run)
    assert (run / "config.yaml").read_text() == written
    assert not list(run.glob("config.*.yaml"))
    start(as_it_was, run)
    check_accounts(run, 6)


DETERMINISTIC, HALF = "trainer.deterministic=true", SMALL[:2]


@pytest.mark.parametrize(
    ("was", "now", "key"),
    [
        ((DETERMINISTIC,), (DETERMINISTIC, *HALF), "data.train_batch_size"),
        ((DETERMINISTIC,), (DETERMINISTIC, "trainer.v1.trainer_mode=sync"), "trainer.v1.trainer_mode"),
        ((), ("algorithm.adv_estimator=remax",), "algorithm.adv_estimator"),
        ((), ("algorithm.adv_estimator=rloo", "trainer.seed=3", *HALF, "trainer.v1.trainer_mode=sync"), ""),
    ],
)
def test_what_a_resume_cannot_change_is_named(
    make_config: MakeConfig, tmp_path: Path, was: tuple[str, ...], now: tuple[str, ...], key: str
) -> None:
    (written := tmp_path / "config.yaml").write_text(to_yaml(make_config(*was)))
    told = unlike(written, make_config(*now))
    assert told.startswith(f"{key} is ") if key else not told
    written.write_text("trainer: [")
    assert not unlike(written, make_config(*now)), "what cannot be read is not compared"
