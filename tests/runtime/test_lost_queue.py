"""A run that is killed and whose queue is gone, or its rows: what was finished at the checkpoint is trained as it
was, once, and is not generated again. Processes as a user starts them; the ranks are real, so that what they train is
on record, and the servers simulated, so that it takes seconds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.monitor.events import read_events
from streamrl.recording.record import FIELDS, Recording
from streamrl.trainer.batch_log import read_batch_log
from streamrl.trainer.checkpoint import CheckpointStore
from tests.runtime.jobs import Job
from transfer_queue.checkpoint import read_manifest
from transfer_queue.checkpoint.format import pages_of
from transfer_queue.keys import split_row_key, try_split_row_key
from transfer_queue.storage.columns import read_block

STEPS = 6
ARGUMENTS = (
    "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=sim", "actor_rollout_ref.rollout.sim.clock=real",
    "actor_rollout_ref.rollout.sim.token_seconds=0.0005", "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1", "trainer.v1.separate_async.num_warmup_batches=2",
    "trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=null", "trainer.record=true",
    "trainer.val_before_train=false", "actor_rollout_ref.actor.checkpoint.async_save=true",
)  # fmt: skip


def stored_rows(checkpoint: Path) -> dict[str, dict[str, np.ndarray]]:
    """By key: what a checkpoint holds of the rows of finished groups."""
    directory, found = checkpoint / "queue", {}
    [entry] = read_manifest(directory).partitions
    for page, data in pages_of(directory, entry):
        for one in page.columns:
            block = one.block
            column = read_block(block, data[block.offset : block.offset + block.nbytes])
            for index, at in enumerate(np.frombuffer(one.rows, np.int32).tolist()):
                if block.field in FIELDS:
                    found.setdefault(page.keys[at], {})[block.field] = column[index]
    return {key: columns for key, columns in found.items() if try_split_row_key(key) is not None}


def sessions(run: Path, uids: set[str]) -> dict[tuple[Any, Any], int]:
    """How often sessions of these prompts ran to their end."""
    counts: dict[tuple[Any, Any], int] = {}
    for event in read_events(run):
        if event.name == "session" and event.fields["status"] == "success" and event.fields["uid"] in uids:
            key = event.fields["uid"], event.fields["session"]
            counts[key] = counts.get(key, 0) + 1
    return counts


def newest_with_rows(run: Path) -> int:
    """The newest checkpoint, if it holds rows; 0 if it does not, or there is none."""
    store = CheckpointStore(run / "checkpoints")
    step = max(store.steps(), default=0)
    return step if (store.path(step) / "queue").is_dir() else 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("runtime", "lost"),
    [
        ("local", "journal and rows"), ("local", "rows"), ("local", "all but a copy of the checkpoint"),
        pytest.param("ray", "journal and rows", marks=pytest.mark.chaos),
        pytest.param("ray", "rows", marks=pytest.mark.chaos),
    ],
)  # fmt: skip
def test_finished_groups_of_a_checkpoint_are_trained_as_they_were_though_the_queue_is_gone(
    tmp_path: Path, runtime: str, lost: str
) -> None:
    storage = tmp_path / "storage"
    storage.mkdir(mode=0o700)
    places = (f"runtime={runtime}", f"transfer_queue.storage_dir={storage}")
    job = Job(tmp_path, *ARGUMENTS, *places, steps=STEPS, seconds=240.0)
    job.start()
    job.wait_until(lambda: newest_with_rows(job.path) > 0, "checkpoint with finished groups")
    job.kill()
    step = newest_with_rows(job.path)
    assert step > 0
    rows = stored_rows(job.path / f"checkpoints/global_step_{step}")
    uids = {split_row_key(key).uid for key in rows}
    assert all(columns["weight_versions"].max() <= step for columns in rows.values())
    ran = sessions(job.path, uids)
    copied = "copy" in lost
    if lost != "rows":
        shutil.rmtree(job.path / "queue")
    for segment in storage.rglob("*.seg"):
        segment.unlink()
    if copied:
        other = job.runs / "copy"
        other.mkdir(mode=0o700)
        shutil.copy(job.path / "config.yaml", other)
        shutil.copytree(job.path / f"checkpoints/global_step_{step}", other / f"checkpoints/global_step_{step}")
        job.arguments += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={other}"]
        ran = {}
    job.start()
    job.finish()
    trained = read_batch_log(job.path / "batches.jsonl")
    if not copied:
        job.check_accounts()
    assert [done.step for done in trained][-1] == STEPS
    later = [uid for done in trained if done.step > step for uid in done.uids]
    assert len(later) == len(set(later))
    reused = uids & set(later)
    assert reused, "none of the stored groups was trained"
    assert sessions(job.path, uids) == ran, "a finished session was generated again"
    recording = Recording(job.path)
    for uid in reused:
        for row in recording.group(uid):
            for name in FIELDS:
                np.testing.assert_array_equal(row.columns[name], rows[row.key][name], err_msg=f"{row.key} {name}")
