"""Dispatch over meshes: ranks that share rows, and ranks whose result counts."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    Mean,
    MeshError,
    Metric,
    Total,
    Worker,
    WorkerFailed,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from streamrl.single_controller.mesh import Layout, MeshPlace
from tests.single_controller.inline import InlineWorkerGroup
from transfer_queue.metadata import KVBatchMeta


class MeshWorker(Worker):
    """Ranks 2k and 2k + 1 share rows; the odd ones collect. In the mesh "flat", every rank has its own."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self._register_dispatch_collect_info("actor", self.rank.rank // 2, self.rank.rank % 2 == 1)
        self._register_dispatch_collect_info("flat", self.rank.rank, True)

    @register(make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def who(self, batch: KVBatchMeta) -> tuple[int, list[str]]:
        self.seen = batch.keys
        return self.rank.rank, batch.keys

    @register(make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def count(self, batch: KVBatchMeta) -> dict[str, Metric]:
        lengths = [tag["seq_len"] for tag in batch.tags]
        return {"rows": Total(len(batch)), "length": Mean(float(sum(lengths)), len(lengths))}

    @register(make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def same(self, batch: KVBatchMeta) -> KVBatchMeta:
        return batch

    @register(make_nd_compute_dataproto_dispatch_fn(mesh_name="flat"))
    def alone(self, batch: KVBatchMeta) -> list[str]:
        return batch.keys

    @register(make_nd_compute_dataproto_dispatch_fn(mesh_name="nowhere"))
    def lost(self, batch: KVBatchMeta) -> None: ...


def batch_of(lengths: list[int], **info: Any) -> KVBatchMeta:
    keys = [f"p{i}_0_0" for i in range(len(lengths))]
    return KVBatchMeta(keys, [{"seq_len": length} for length in lengths], "train", ["input_ids"], dict(info))


def started() -> InlineWorkerGroup:
    group = InlineWorkerGroup(4, ClassWithInitArgs(MeshWorker))
    group.init_model()
    return group


def test_ranks_of_one_dp_rank_get_the_same_rows_and_only_collecting_ranks_answer() -> None:
    group, batch = started(), batch_of([30, 10, 20, 40])
    answers = group.who(batch)
    assert [rank for rank, _ in answers] == [1, 3]
    assert sorted(key for _, keys in answers for key in keys) == sorted(batch.keys)
    seen = [worker[""].seen for worker in group._ranks.workers]
    assert seen == [answers[0][1], answers[0][1], answers[1][1], answers[1][1]]
    assert [len(keys) for keys in group.alone(batch)] == [1, 1, 1, 1]


def test_metrics_are_those_of_the_collecting_ranks_once() -> None:
    assert started().count(batch_of([30, 10, 20, 40])) == {"rows": 4.0, "length": 25.0}


def test_references_come_back_in_the_order_of_the_rows_with_their_values() -> None:
    batch = batch_of([5, 50, 7, 70, 9], advantages={f"p{i}_0_0": float(i) for i in range(5)}, version=3)
    back = started().same(batch)
    assert (back.keys, back.tags, back.fields, back.partition_id) == (batch.keys, batch.tags, batch.fields, "train")
    assert back.extra_info == batch.extra_info


def test_the_group_asks_once_and_only_when_a_mesh_is_needed() -> None:
    group = started()
    assert group.calls == ["init_model"]
    for _ in range(3):
        group.count(batch_of([3, 4]))
    assert group.calls == ["init_model", "mesh_places", "count", "count", "count"]


async def test_the_first_call_over_a_mesh_may_be_made_in_an_event_loop() -> None:
    group = InlineWorkerGroup(4, ClassWithInitArgs(MeshWorker))
    await group.init_model()
    assert (await group.count(batch_of([3, 4])))["rows"] == 2.0


@pytest.mark.parametrize("inline", [False, True])
async def test_a_local_rank_is_a_mesh_of_one(inline: bool) -> None:
    class Alone(MeshWorker):
        @register(Dispatch.ONE_TO_ALL)
        def init_model(self) -> None:
            self._register_dispatch_collect_info("actor", 0, True)

    group = LocalWorkerGroup(ClassWithInitArgs(Alone), inline=inline)
    await group.init_model()
    assert await group.count(batch_of([3, 5])) == {"rows": 2.0, "length": 4.0}
    await group.close()


def test_a_call_before_the_ranks_know_their_place_says_what_to_do_and_may_be_repeated() -> None:
    group = InlineWorkerGroup(4, ClassWithInitArgs(MeshWorker))
    with pytest.raises(MeshError, match=r"rank 0 has registered no place in mesh 'actor'.*none.*init_model"):
        group.count(batch_of([3]))
    group.init_model()
    assert group.count(batch_of([3]))["rows"] == 1.0
    with pytest.raises(MeshError, match=r"mesh 'nowhere' \(meshes it knows: actor, flat\)"):
        group.lost(batch_of([3]))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([(0, True), (0, True)], r"ranks \[0, 1\] collect for data-parallel rank 0"),
        ([(0, True), (1, False)], r"ranks \[\] collect for data-parallel rank 1"),
        ([(0, True), (2, True)], r"ranks \[\] collect for data-parallel rank 1.*\[0, 2\]"),
    ],
)
def test_places_that_lose_or_double_a_result_are_refused(places: list[tuple[int, bool]], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        Layout.of("actor", [{"actor": MeshPlace(*place)} for place in places])


def test_a_rank_cannot_move_after_it_said_where_it_stands() -> None:
    group = started()
    group.init_model()  # the same places again
    worker = group._ranks.workers[0][""]
    with pytest.raises(ValueError, match="after"):
        worker._register_dispatch_collect_info("actor", 1, True)


def test_a_failing_rank_is_named_by_its_rank_not_by_its_share() -> None:
    class Fails(MeshWorker):
        @register(make_nd_compute_dataproto_dispatch_fn("actor"))
        def break_down(self, batch: KVBatchMeta) -> None:
            if self.rank.rank == 2:
                raise ArithmeticError("two")

    group = InlineWorkerGroup(4, ClassWithInitArgs(Fails))
    group.init_model()
    with pytest.raises(WorkerFailed, match="break_down failed on rank 2 .*ArithmeticError: two"):
        group.break_down(batch_of([1, 2]))
