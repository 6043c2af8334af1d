"""Calling ranks as one, in this process and over Ray."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl import DataProto
from streamrl.single_controller import (
    ClassWithInitArgs,
    Correlation,
    Effective,
    LocalWorkerGroup,
    Low,
    Mean,
    Peak,
    PlacementError,
    ResourcePool,
    Spread,
    Total,
    WorkerDied,
    WorkerFailed,
    WorkerGroup,
    WorkerTimeout,
    merge_metrics,
)
from streamrl.single_controller.balance import balanced_partitions
from streamrl.single_controller.dispatch import mini_batch_indices, split_batch
from tests.single_controller.ranks import EchoWorker
from transfer_queue.metadata import KVBatchMeta


def batch_of(lengths: list[int], **info: object) -> KVBatchMeta:
    keys = [f"p{i // 2}_{i % 2}_0" for i in range(len(lengths))]
    return KVBatchMeta(keys, [{"seq_len": length} for length in lengths], "train", extra_info=dict(info))


# --- splitting ----------------------------------------------------------------------------------------------------


def test_partitions_are_balanced_and_keep_the_order() -> None:
    parts = balanced_partitions([5, 9, 1, 7, 3, 5], 2)
    assert parts == [[1, 4, 5], [0, 2, 3]] or all(part == sorted(part) for part in parts)
    costs = [5, 9, 1, 7, 3, 5]
    loads = [sum(costs[i] for i in part) for part in parts]
    assert sorted(i for part in parts for i in part) == list(range(6))
    assert max(loads) - min(loads) <= 2


def test_each_mini_batch_is_balanced_by_itself() -> None:
    batch = batch_of([100, 10, 100, 10, 10, 10, 10, 10], mini_batch_size=2)
    shares = split_batch(batch, 2)
    for share in shares:
        assert share.extra_info
        assert share.extra_info["mini_batches"] == 2
        assert set(share.extra_info["mini_batch"]) == set(share.keys)
        lengths = dict(zip(share.keys, (tag["seq_len"] for tag in share.tags), strict=True))
        first = [lengths[key] for key, index in share.extra_info["mini_batch"].items() if index == 0]
        assert sum(first) == 110
        assert share.keys == sorted(share.keys)


def test_mini_batches_count_prompts_not_rows() -> None:
    keys = ["a_0_0", "a_1_0", "b_0_0", "a_2_0", "c_0_0", "c_0_1"]
    assert mini_batch_indices(keys, 2) == [0, 0, 0, 0, 1, 1]


def test_a_share_may_be_empty_and_per_row_values_are_narrowed() -> None:
    batch = batch_of([7], advantages={"p0_0_0": 1.5}, temperature=0.9)
    full, empty = split_batch(batch, 2)
    assert (full.keys, empty.keys) == (["p0_0_0"], [])
    assert full.extra_info
    assert empty.extra_info
    assert full.extra_info["advantages"] == {"p0_0_0": 1.5}
    assert empty.extra_info["advantages"] == {}
    assert empty.extra_info["temperature"] == 0.9
    assert empty.extra_info["mini_batches"] == 1


def test_a_row_without_a_length_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"p0_0_0 has no tag seq_len"):
        split_batch(KVBatchMeta(["p0_0_0"], [{}], "train"), 2)


def test_metrics_merge_by_their_kind() -> None:
    merged = merge_metrics(
        [{"m": Mean(6.0, 3), "t": Total(1), "p": Peak(2)}, {"m": Mean(2.0, 1), "t": Total(4), "p": Peak(1)}, {}]
    )
    assert merged == {"m": 2.0, "t": 5.0, "p": 2.0}
    assert merge_metrics([{"m": Mean(0.0, 0)}]) == {"m": 0.0}
    # 1, 2 on one rank and 3, 6 on another: mean 3, squares 1 + 4 + 9 + 36
    spread = merge_metrics(
        [{"s": Spread(2, 3.0, 5.0), "e": Effective(2, 3.0, 5.0), "l": Low(1.0)},
         {"s": Spread(2, 9.0, 45.0), "e": Effective(2, 9.0, 45.0), "l": Low(3.0)}]
    )  # fmt: skip
    assert spread == pytest.approx({"s": 3.5**0.5, "e": 144.0 / 200.0, "l": 1.0})
    assert merge_metrics([{"s": Spread(0, 0.0, 0.0), "e": Effective(0, 0.0, 0.0)}]) == {"s": 0.0, "e": 0.0}
    pairs = [(1.0, 2.0), (2.0, 1.0), (4.0, 5.0)]  # on three ranks
    correlated = merge_metrics([{"c": Correlation(1, x, y, x * x, y * y, x * y)} for x, y in pairs])
    assert correlated == pytest.approx({"c": float(np.corrcoef(*zip(*pairs, strict=True))[0, 1])})
    assert merge_metrics([{"c": Correlation(2, 2.0, 3.0, 2.0, 5.0, 3.0)}]) == {"c": 0.0}, "one of them never varies"
    with pytest.raises(TypeError, match="disagree"):
        merge_metrics([{"m": Mean(1.0)}, {"m": Total(1.0)}])


# --- one suite for both kinds of group ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["local", "ray"])
def group(request: pytest.FixtureRequest) -> Iterator[WorkerGroup]:
    worker = ClassWithInitArgs(EchoWorker, greeting="hi")
    if request.param == "local":
        made: WorkerGroup = LocalWorkerGroup(worker)
    else:
        request.getfixturevalue("ray_cluster")
        from streamrl.single_controller import RayWorkerGroup

        made = RayWorkerGroup(ResourcePool([2]), worker)
    yield made
    made.shutdown()


def test_one_to_all_gives_a_result_per_rank(group: WorkerGroup) -> None:
    assert group.where() == [("hi", rank, group.world_size) for rank in range(group.world_size)]


def test_rank_zero_gives_its_result(group: WorkerGroup) -> None:
    assert group.who() == 0
    assert group.only_first() == 0


def test_a_batch_is_split_and_metrics_are_merged(group: WorkerGroup) -> None:
    batch = batch_of([30, 10, 20, 40])
    parts = group.keys(batch, prefix="x")
    assert len(parts) == group.world_size
    assert sorted(key for part in parts for key in part) == sorted("x" + key for key in batch.keys)
    assert group.count(batch) == {"rows": 4.0, "length": 25.0}


def test_rows_are_split_padded_and_come_back_in_order(group: WorkerGroup) -> None:
    data = DataProto.from_dict({"ids": torch.arange(6).reshape(3, 2)}, {"uid": ["a", "b", "c"]}, {"step": 1})
    back = group.doubled(data)
    assert back.batch["ids"].tolist() == [[0, 2], [4, 6], [8, 10]]
    assert list(back.non_tensor_batch["uid"]) == ["a", "b", "c"]
    assert back.meta_info == {"step": 1, "metrics": {"rows": {1: 3.0, 2: 4.0}[group.world_size]}}


def test_all_to_all_gives_each_rank_its_own(group: WorkerGroup) -> None:
    ranks = list(range(group.world_size))
    assert group.mine([f"for {r}" for r in ranks], other=ranks) == [(r, f"for {r}", r) for r in ranks]
    with pytest.raises(ValueError, match=rf"a list of {group.world_size}, one per rank; got 5 elements"):
        group.mine(["x"] * 5, other=ranks)


def test_a_function_goes_by_name_and_runs_on_the_ranks_with_its_share(group: WorkerGroup) -> None:
    names = group.execute_with_func_generator("tests.single_controller.functions:keys_of", batch_of([1, 1, 1, 1]))
    assert sorted(key for keys in names for key in keys) == sorted(batch_of([1, 1, 1, 1]).keys)
    with pytest.raises(TypeError, match="by name"):
        group.execute_with_func_generator(len, batch_of([1]))


async def test_in_an_event_loop_a_call_is_awaited(group: WorkerGroup) -> None:
    batch = batch_of([30, 10, 20, 40])
    first, second = group.count(batch), group.where()
    assert (await second)[0][0] == "hi"
    assert await first == {"rows": 4.0, "length": 25.0}
    with pytest.raises(RuntimeError, match="await"):
        group.where().result()


def test_an_unknown_method_names_those_that_exist(group: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match=r"not_registered is no @register'ed method of EchoWorker.*where"):
        group.not_registered()


def test_a_failure_names_rank_and_method_and_leaves_the_cause(group: WorkerGroup) -> None:
    last = group.world_size - 1
    with pytest.raises(WorkerFailed, match=rf"fail failed on rank {last} .*ValueError: rank {last} does not like"):
        group.fail(last)
    if group.world_size > 1:  # ranks out of step
        with pytest.raises(WorkerFailed):
            group.where()


def test_a_local_call_that_takes_too_long_is_an_error() -> None:
    group = LocalWorkerGroup(ClassWithInitArgs(_Sleeper))
    with pytest.raises(WorkerTimeout, match=r"nap: no answer from rank 0 \(pid \d+\) after 0.05 s"):
        group.nap(0.3, timeout=0.05)


class _Sleeper(EchoWorker):
    from streamrl.single_controller import Dispatch, register

    @register(Dispatch.ONE_TO_ALL)
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(Dispatch.RANK_ZERO)
    async def drowse(self, seconds: float) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(seconds)
        return loop.time() - began


async def test_inline_methods_may_be_coroutines_of_the_callers_loop() -> None:
    group = LocalWorkerGroup(ClassWithInitArgs(_Sleeper), inline=True)
    assert await group.drowse(0.01) >= 0.01
    assert await group.who() == 0
    with pytest.raises(WorkerTimeout):
        await group.drowse(5.0, timeout=0.01)


async def heard_beside(group: WorkerGroup) -> None:
    """Whoever waits beside neither holds up the call that it waits for, nor takes its place in the order."""
    heard = group.heard(30.0)
    await group.say()
    assert set(await heard) == {True}


async def test_a_method_beside_waits_while_others_run() -> None:
    group = LocalWorkerGroup(ClassWithInitArgs(EchoWorker))
    await heard_beside(group)
    await group.close()


# --- Ray ------------------------------------------------------------------------------------------------------------


def test_a_rank_runs_one_thread_in_a_process_of_its_own(ray_cluster: None) -> None:
    from streamrl.single_controller import RayWorkerGroup

    group = RayWorkerGroup(ResourcePool([2], cpus_per_rank=0), ClassWithInitArgs(EchoWorker))
    assert group.threads().result() == ["1", "1"]
    assert len({*group.pids, os.getpid()}) == 3
    group.shutdown()


async def test_a_method_beside_waits_on_ranks_while_others_run(ray_cluster: None) -> None:
    from streamrl.single_controller import RayWorkerGroup

    group = RayWorkerGroup(ResourcePool([2], cpus_per_rank=0), ClassWithInitArgs(EchoWorker))
    await heard_beside(group)
    await group.close()


async def test_a_call_under_way_does_not_hold_up_the_end(ray_cluster: None) -> None:
    from streamrl.single_controller import RayWorkerGroup

    group = RayWorkerGroup(ResourcePool([1], cpus_per_rank=0), ClassWithInitArgs(Closing))
    group.hang(0)
    began = time.monotonic()
    await group.close()
    assert time.monotonic() - began < 6.0


class Closing(EchoWorker):
    from streamrl.single_controller import Dispatch, register

    @register(Dispatch.ONE_TO_ALL)
    def close(self) -> None: ...


def test_too_few_cpus_are_an_error_at_once(ray_cluster: None) -> None:
    from streamrl.single_controller import RayWorkerGroup

    began = time.monotonic()
    with pytest.raises(PlacementError, match=r"40 ranks on 1 node need 40 CPU; the cluster has 16 CPU.*num_cpus"):
        RayWorkerGroup(ResourcePool([40]), ClassWithInitArgs(EchoWorker))
    assert time.monotonic() - began < 2.0


@pytest.mark.chaos
def test_the_death_of_a_rank_is_noticed_and_named(ray_cluster: None) -> None:
    from streamrl.single_controller import RayWorkerGroup

    group = RayWorkerGroup(ResourcePool([2]), ClassWithInitArgs(EchoWorker))
    began = time.monotonic()
    with pytest.raises(WorkerDied, match=rf"rank 1 \(pid {group.pids[1]}\) died during die"):
        group.die(1)
    assert time.monotonic() - began < 3.0
    with pytest.raises(WorkerDied):
        group.where()
    group.shutdown()


@pytest.mark.chaos
def test_a_native_crash_leaves_stacks_and_thread_names_in_a_log_that_the_error_names(ray_cluster: None) -> None:
    from streamrl.single_controller import RayWorkerGroup

    group = RayWorkerGroup(ResourcePool([1]), ClassWithInitArgs(EchoWorker))
    assert group.who() == 0
    with pytest.raises(WorkerDied, match=r"died during crash; its log is /\S+; if nothing there says why") as death:
        group.crash()
    group.shutdown()
    words = Path(death.value.log).read_text()
    assert re.search(r"threads new after who: .*\b\d+ worker\.io\b", words)  # one of Ray's own, without Python
    stacks = words[words.index("Fatal Python error: Segmentation fault") :]
    assert "in crash" in stacks
    assert "in until_death" in stacks  # another thread than the one that crashed


@pytest.mark.chaos
async def test_the_death_of_an_idle_rank_is_noticed_too(ray_cluster: None) -> None:
    from streamrl.single_controller import RayWorkerGroup

    group = await asyncio.to_thread(RayWorkerGroup, ResourcePool([2]), ClassWithInitArgs(EchoWorker))
    watch = asyncio.ensure_future(group.watch())
    await asyncio.sleep(0)
    assert group.failure is None
    began = time.monotonic()
    os.kill(group.pids[0], 9)
    told = (
        rf"rank 0 \(pid {group.pids[0]}\) died while it had nothing to do; its log is /\S+; .*the same command resumes"
    )
    with pytest.raises(WorkerDied, match=told) as death:
        await asyncio.wait_for(watch, 3.0)
    assert time.monotonic() - began <= 3.0
    assert group.failure is death.value  # also for who does not watch
    with pytest.raises(WorkerDied):
        group.where()
    await group.close()


def test_a_stuck_rank_is_named_after_the_deadline(ray_cluster: None) -> None:
    from streamrl.single_controller import RayWorkerGroup

    group = RayWorkerGroup(ResourcePool([2]), ClassWithInitArgs(EchoWorker))
    with pytest.raises(WorkerTimeout, match=rf"hang: no answer from rank 1 \(pid {group.pids[1]}\) after 0.3 s"):
        group.hang(1, timeout=0.3)
    group.shutdown()


def test_the_controller_imports_no_torch() -> None:
    code = (
        "import sys, streamrl.single_controller as s, streamrl.algorithms.advantages; s.RayWorkerGroup;"
        " import streamrl.workers.actor, streamrl.workers.settings;"
        "assert not {'torch', 'tensordict', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
