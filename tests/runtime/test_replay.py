"""A run recorded and trained again: the same numbers, and the same data for another loss."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from streamrl.config import StreamRLConfig
from streamrl.monitor.metrics_log import read_metrics
from streamrl.recording.record import FIELDS, RecordError, Recording, RecordWriter, _digest
from streamrl.trainer.batch_log import BatchLog, read_batch_log
from tests.runtime.test_local_run import run

REAL = (
    "runtime=local", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=3", "trainer.val_before_train=false",
    "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.v1.separate_async.parameter_sync_step=2", "actor_rollout_ref.rollout.tools.calculator.latency_mean=0.01",
)  # fmt: skip
FIGURES = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "rows/trained", "perf/total_num_tokens")


def figures(path: Path) -> list[list[float]]:
    return [[line[name] for name in FIGURES] for line in read_metrics(path)]


def batches(path: Path) -> list[tuple[int, list[str], list[int]]]:
    return [(step.step, step.uids, step.orders) for step in read_batch_log(path / "batches.jsonl")]


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_a_replay_trains_the_same_steps_to_the_same_numbers(make_config, mode: str) -> None:
    chosen = f"trainer.v1.trainer_mode={mode}"
    recorded, _ = run(make_config(chosen, "trainer.record=true", base=REAL))
    again, summary = run(make_config(chosen, f"trainer.replay={recorded}", base=REAL))
    assert figures(again) == figures(recorded)
    assert batches(again) == batches(recorded)
    assert summary.groups.trained == 24
    other, _ = run(
        make_config(
            chosen, f"trainer.replay={recorded}", "actor_rollout_ref.actor.policy_loss.loss_mode=cispo", base=REAL
        )
    )
    assert [line[2:] for line in figures(other)] == [line[2:] for line in figures(recorded)], "the same data"
    assert figures(other) != figures(recorded)


def test_a_replay_of_other_batches_is_refused_before_it_begins(make_config, tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(RecordError, match="trained 1 prompts per step, data.train_batch_size is 8"):
        Recording(tmp_path).check(make_config())
    fitting = ("data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    Recording(tmp_path).check(make_config(*fitting))
    with pytest.raises(RecordError, match=r"recorded 2 samples of prompt p0, this run asks for 4: .*rollout.n"):
        Recording(tmp_path).sessions("p0", 4)


def written(tmp_path: Path, *, step: int = 1) -> RecordWriter:
    log = BatchLog(tmp_path / "batches.jsonl")
    log.trained(1, ["p0"], [0])
    log.close()
    writer = RecordWriter(tmp_path / "trajectories", rank=0)
    columns = {
        "input_ids": [np.arange(5), np.arange(4)], "response_mask": [np.array([1, 0, 1]), np.array([1, 1])],
        "rollout_log_probs": [np.zeros(3, np.float32), np.ones(2, np.float32)],
        "weight_versions": [np.zeros(3, np.int32), np.ones(2, np.int32)],
    }  # fmt: skip
    writer.write(step, ["p0_1_0", "p0_0_0"], [{"score": 1.0}, {"score": 0.5}], columns)
    return writer


def test_rows_come_back_as_they_were_sampled(tmp_path: Path) -> None:
    written(tmp_path)
    first, second = Recording(tmp_path).group("p0")
    assert (first.key, first.tag, second.tag) == ("p0_0_0", {"score": 0.5}, {"score": 1.0})
    assert first.columns["input_ids"].tolist() == [0, 1, 2, 3]
    assert second.columns["response_mask"].tolist() == [1, 0, 1]
    assert first.columns["rollout_log_probs"].dtype == np.float32


def test_a_step_that_is_trained_again_replaces_its_record(tmp_path: Path) -> None:
    writer = written(tmp_path)
    writer.write(2, [], [], {})
    written(tmp_path)
    assert len(Recording(tmp_path).group("p0")) == 2


def test_what_is_not_recorded_is_an_error_that_says_so(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(RecordError, match="did not train group p9"):
        Recording(tmp_path).group("p9")
    [file] = (tmp_path / "trajectories").iterdir()
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(RecordError, match="is damaged"):
        Recording(tmp_path).group("p0")
    file.unlink()
    with pytest.raises(RecordError, match=r"record a run with trainer.record=true"):
        Recording(tmp_path)


def lie(file: Path, *, rows: object, signed: bool) -> None:
    """Writes the file again with another header, with or without its digest."""
    with safe_open(file, "numpy") as read:
        flat, digest = {name: read.get_tensor(name) for name in FIELDS}, read.metadata()["blake2b"]
    header = rows if isinstance(rows, str) else json.dumps(rows)
    save_file(flat, file, metadata={"rows": header, "blake2b": _digest(header, flat) if signed else digest})


@pytest.mark.parametrize(
    "rows",
    [
        [["p0_1_0", {}, 5, 3], ["p0_0_0", {}, 400, 2]],
        [["p0_1_0", {}, 9, 5]] * 2,
        [["p0_1_0", {}, 10, 6], ["p0_0_0", {}, -1, -1]],
        [["p0_1_0", {}, "5", 3], ["p0_0_0", {}, 4, 2]],
        [["p0_1_0", None, 5, 3], ["p0_0_0", {}, 4, 2]],
        [[7, {}, 5, 3], ["p0_0_0", {}, 4, 2]],
        [["nokey", {}, 5, 3], ["p0_0_0", {}, 4, 2]],
        [3], 3, {}, "[" * 100_000, "{",
    ],
)  # fmt: skip
def test_a_header_that_lies_about_its_rows_is_damage(tmp_path: Path, rows: object) -> None:
    written(tmp_path)
    [file] = (tmp_path / "trajectories").iterdir()
    lie(file, rows=rows, signed=True)
    with pytest.raises(RecordError, match="is damaged"):
        Recording(tmp_path).group("p0")


def test_rows_or_tokens_that_are_not_those_recorded_are_damage(tmp_path: Path) -> None:
    written(tmp_path)
    [file] = (tmp_path / "trajectories").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(RecordError, match="its digest is another"):
        Recording(tmp_path).group("p0")
    file.write_bytes(whole)
    lie(file, rows=[["p0_0_0", {}, 5, 3], ["p0_1_0", {}, 4, 2]], signed=False)
    with pytest.raises(RecordError, match="its digest is another"):
        Recording(tmp_path).group("p0")


def test_a_replay_names_a_run_directory(make_config, tmp_path: Path) -> None:
    from streamrl.config import ConfigError

    with pytest.raises(ConfigError, match="is no run directory"):
        make_config(f"trainer.replay={tmp_path}")
    config: StreamRLConfig = make_config()
    assert config.trainer.replay is None


def test_a_replay_of_a_run_without_trajectories_is_refused_before_anything_is_made(
    make_config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from streamrl.cli import train

    log = BatchLog(tmp_path / "batches.jsonl")
    log.trained(1, ["p0"], [0])
    log.close()
    runs = tmp_path / "runs"
    assert train(["experiment=calculator", f"trainer.replay={tmp_path}", f"trainer.runs_dir={runs}"]) == 2
    assert "holds no trajectories; record a run with trainer.record=true first" in capsys.readouterr().err
    assert not runs.exists()


def test_more_steps_than_were_recorded_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from streamrl.cli import train

    written(tmp_path)
    one = ["data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1", "trainer.n_gpus_per_node=1",
           "trainer.v1.trainer_mode=sync", "trainer.total_training_steps=9", "--dry-run"]  # fmt: skip
    assert train(["experiment=calculator", f"trainer.replay={tmp_path}", *one]) == 0
    assert "recorded 1 steps; the replay ends with them" in capsys.readouterr().err
