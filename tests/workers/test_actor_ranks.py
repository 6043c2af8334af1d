"""The actor on two real ranks (gloo, one process each): what one rank computes, two compute."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from streamrl.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    RankInfo,
    ResourcePool,
    Worker,
    WorkerDied,
    WorkerGroup,
    register,
)
from streamrl.weight_sync import WeightStore
from streamrl.workers.actor import ActorWorker
from streamrl.workers.settings import ActorSettings
from tests.workers.tiny import FileStore, make_model, make_rows, settings
from transfer_queue.metadata import KVBatchMeta

BROKEN = "p9_0_0"
"""A row like the first, of which one log-prob is NaN."""


class FileActor(ActorWorker):
    """Its rows come from a file, so that they need no queue."""

    def __init__(self, rank: RankInfo, settings: ActorSettings, path: str) -> None:
        super().__init__(rank, settings, FileStore(path))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, KVBatchMeta]:
    """Model directory, file of rows, references to them."""
    directory = tmp_path_factory.mktemp("ranks")
    batch, store = make_rows(4, 3)
    for rows in store.columns.values():
        rows[BROKEN] = rows[batch.keys[0]].copy()
    store.columns["rollout_log_probs"][BROKEN][0] = np.nan
    return make_model(directory / "model"), store.save(directory / "rows.safetensors"), batch


@pytest.fixture(scope="module")
def two_ranks(parts: tuple[str, str, KVBatchMeta], ray_cluster: None) -> Iterator[WorkerGroup]:
    from streamrl.single_controller import RayWorkerGroup

    group = RayWorkerGroup(ResourcePool([2]), ClassWithInitArgs(FileActor, settings(parts[0]), parts[1]), timeout=60)
    group.init_model()
    yield group
    group.shutdown()


class Joiner(Worker):
    """Joins its process group and adds up the ranks."""

    @register(Dispatch.ONE_TO_ALL)
    def ranks_added(self) -> float:
        import torch
        import torch.distributed as dist

        from streamrl.workers.engine import process_group

        process_group.join(self.rank)
        total = torch.tensor([self.rank.rank + 1.0])
        dist.all_reduce(total)
        process_group.leave()
        return total.item()


GAPS = ("rollout_corr/kl", "rollout_corr/chi2_token", "rollout_corr/chi2_seq", "rollout_corr/training_ppl",
        "rollout_corr/log_ppl_diff_max", "rollout_corr/log_ppl_diff_min",
        "training/rollout_probs_diff_std")  # fmt: skip


def one_rank(parts: tuple[str, str, KVBatchMeta]) -> WorkerGroup:
    group = LocalWorkerGroup(ClassWithInitArgs(FileActor, settings(parts[0]), parts[1]))
    group.init_model()
    return group


def test_two_ranks_train_as_one_and_their_checkpoint_loads_on_one(
    parts: tuple[str, str, KVBatchMeta], two_ranks: WorkerGroup, tmp_path: Path
) -> None:
    batch, single = parts[2], one_rank(parts)
    for _ in range(4):
        expected, found = single.update_actor(batch), two_ranks.update_actor(batch)
        for name in ("actor/pg_loss", "actor/entropy", "actor/ppo_kl", "actor/grad_norm", *GAPS):
            assert found[name] == pytest.approx(expected[name], abs=1e-5), name
        for name in ("rows/trained", "perf/total_num_tokens", "data/bytes_read", "actor/optimizer_steps"):
            assert found[name] == expected[name], name

    two_ranks.save_checkpoint(str(tmp_path / "checkpoint"))
    single.load_checkpoint(str(tmp_path / "checkpoint"))
    assert single.state_digest() == two_ranks.state_digest()
    for _ in range(2):
        assert single.update_actor(batch)["actor/pg_loss"] == pytest.approx(
            two_ranks.update_actor(batch)["actor/pg_loss"], abs=1e-5
        )
    two_ranks.load_checkpoint(str(tmp_path / "checkpoint"))
    single.load_checkpoint(str(tmp_path / "checkpoint"))
    assert single.state_digest() == two_ranks.state_digest()
    files = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}

    single.save_checkpoint(str(tmp_path / "from_one"))
    two_ranks.load_checkpoint(str(tmp_path / "from_one"))
    assert single.state_digest() == two_ranks.state_digest()

    info = two_ranks.publish_weights(1, str(tmp_path / "weights"))
    other = single.publish_weights(1, str(tmp_path / "other"))
    a, b = WeightStore(tmp_path / "weights").read(info.path), WeightStore(tmp_path / "other").read(other.path)
    assert a.keys() == b.keys()
    assert all((a[name] == b[name]).all() for name in a)
    single.shutdown()


def test_a_rank_without_rows_takes_part(parts: tuple[str, str, KVBatchMeta], two_ranks: WorkerGroup) -> None:
    batch = parts[2].select_keys(parts[2].keys[:1])
    assert batch.extra_info
    batch.extra_info["advantages"] = {key: 1.0 for key in batch.keys}
    metrics = two_ranks.update_actor(batch)
    assert metrics["rows/trained"] == 1.0
    assert metrics["actor/optimizer_steps"] == 1.0
    assert np.isfinite(metrics["actor/grad_norm"])
    assert two_ranks.compute_log_prob(batch)["data/bytes_written"] > 0


def test_a_loss_that_is_not_finite_on_one_rank_takes_the_step_from_all(
    parts: tuple[str, str, KVBatchMeta], two_ranks: WorkerGroup
) -> None:
    first, info = parts[2].keys[0], {**(parts[2].extra_info or {}), "mini_batch_size": 2}
    keys, tag = [first, BROKEN], parts[2].tags[0]
    batch = KVBatchMeta(keys, [tag, dict(tag)], "train", extra_info={**info, "advantages": dict.fromkeys(keys, 1.0)})
    before = two_ranks.state_digest()
    metrics = two_ranks.update_actor(batch)
    assert (metrics["actor/steps_not_finite"], metrics["actor/optimizer_steps"]) == (1.0, 0.0)
    assert two_ranks.state_digest() == before


def test_ranks_of_several_nodes_meet_over_tcp(ray_cluster: None) -> None:
    from streamrl.single_controller import RayWorkerGroup

    group = RayWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Joiner), rendezvous="tcp")
    assert group.ranks_added() == [3.0, 3.0]
    group.shutdown()


@pytest.mark.chaos
async def test_a_rank_killed_in_a_collective_is_named_not_its_peer(
    parts: tuple[str, str, KVBatchMeta], two_ranks: WorkerGroup
) -> None:
    os.kill(two_ranks.pids[1], signal.SIGSTOP)
    call = two_ranks.update_actor(parts[2])
    await asyncio.sleep(0.3)  # rank 0 is in the first collective and waits for rank 1
    began = time.monotonic()
    os.kill(two_ranks.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rank 1 .* during update_actor"):
        await call
    assert time.monotonic() - began < 3.0
