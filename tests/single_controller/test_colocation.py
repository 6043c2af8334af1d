"""Several roles in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from streamrl.single_controller import (
    ClassWithInitArgs,
    LocalWorkerGroup,
    ResourcePool,
    WorkerDied,
    WorkerGroup,
    WorkerGroupError,
    WorkerTimeout,
    create_colocated_worker_cls,
)
from tests.single_controller.inline import InlineWorkerGroup
from tests.single_controller.ranks import EchoWorker, SharingWorker
from tests.single_controller.test_mesh import batch_of

ROLES = {
    "actor": ClassWithInitArgs(SharingWorker, greeting="actor"),
    "critic": ClassWithInitArgs(EchoWorker, greeting="critic"),
}


@pytest.fixture(scope="module", params=["local", "ray"])
def group(request: pytest.FixtureRequest) -> Iterator[WorkerGroup]:
    if request.param == "local":
        made: WorkerGroup = LocalWorkerGroup(create_colocated_worker_cls(ROLES))
    else:
        request.getfixturevalue("ray_cluster")
        from streamrl.single_controller import RayWorkerGroup

        made = RayWorkerGroup(ResourcePool([2]), create_colocated_worker_cls(ROLES))
    yield made
    made.shutdown()


def test_each_role_has_a_view_with_its_own_worker(group: WorkerGroup) -> None:
    views = group.spawn()
    assert list(views) == ["actor", "critic"]
    assert [greeting for greeting, *_ in views["actor"].where()] == ["actor"] * group.world_size
    assert [greeting for greeting, *_ in views["critic"].where()] == ["critic"] * group.world_size
    assert list(group.spawn(prefix_set=["critic"])) == ["critic"]


def test_roles_share_their_processes(group: WorkerGroup) -> None:
    views = group.spawn()
    assert views["actor"].pid() == views["critic"].pid() == views["actor"].pids == views["critic"].pids
    assert views["actor"].pids == group.pids


def test_a_mesh_is_the_roles_own(group: WorkerGroup) -> None:
    actor = group.spawn()["actor"]
    actor.init_model()
    batch = batch_of([30, 10, 20, 40])
    assert actor.all_rows(batch) == [batch.keys]  # one share, from the last rank


def test_the_group_itself_has_no_methods_but_says_where_they_are(group: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match=r"holds the roles actor, critic; call spawn\(\)\[role\]\.where"):
        group.where()
    with pytest.raises(ValueError, match=r"unknown roles \['reward'\]; this group's roles are actor, critic"):
        group.spawn(["reward"])


@pytest.mark.chaos
def test_the_end_of_a_shared_process_is_the_end_of_all_its_roles(group: WorkerGroup) -> None:
    """The last of this file that uses the group."""
    views = group.spawn()
    if group.world_size == 1:  # this process
        with pytest.raises(WorkerTimeout) as timeout:
            views["critic"].hang(0, timeout=0.05)
        assert views["actor"].failure is timeout.value
    else:
        with pytest.raises(WorkerDied, match=rf"rank 1 \(pid {group.pids[1]}\) died"):
            views["critic"].die(1)
    with pytest.raises(WorkerGroupError):
        views["actor"].where()


def test_closing_a_view_closes_each_role_once_and_all_of_them() -> None:
    closed: list[str] = []

    class Closing(EchoWorker):
        def close(self) -> None:
            closed.append(self.greeting)

    group = InlineWorkerGroup(1, {name: ClassWithInitArgs(Closing, greeting=name) for name in ("actor", "critic")})
    views = group.spawn()
    views["actor"].shutdown()
    views["critic"].shutdown()
    group.shutdown()
    assert closed == ["actor", "critic"]
    with pytest.raises(WorkerGroupError, match="closed"):
        views["critic"].where()


@pytest.mark.parametrize("workers", [{}, {"": ROLES["actor"]}, ["actor"], None])
def test_roles_are_names_with_classes(workers: object) -> None:
    with pytest.raises(ValueError, match="dict of them by role"):
        LocalWorkerGroup(workers)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs a class, not"):
        LocalWorkerGroup({"actor": ClassWithInitArgs(len)})
    with pytest.raises(TypeError, match="needs a class, not"):
        LocalWorkerGroup({"actor": EchoWorker})  # type: ignore[dict-item]


def test_one_worker_without_a_role_has_no_roles_to_spawn() -> None:
    group = LocalWorkerGroup(ClassWithInitArgs(EchoWorker))
    with pytest.raises(ValueError, match="one class, not a dict by role"):
        group.spawn()
    assert group.pids == [os.getpid()]
    group.shutdown()
