"""Broadcasts from N ranks to M workers of several servers: what arrives is what was published, to the bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from streamrl.weight_sync import WeightsDamaged, WeightsMissing
from streamrl.weight_sync.address import Address, Epochs
from streamrl.weight_sync.collective import Receiver, Sender
from streamrl.weight_sync.plan import target_box, tensor_parallel
from streamrl.weight_sync.publisher import SyncSettings
from streamrl.weight_sync.shares import shares_of
from tests.weight_sync.ranks import on_all, rank_threads

TENSORS = {
    "model.embed_tokens.weight": torch.randn(10, 6), "model.layers.0.self_attn.q_proj.weight": torch.randn(8, 6),
    "model.layers.0.self_attn.q_proj.bias": torch.randn(8).to(torch.bfloat16),
    "model.layers.0.self_attn.o_proj.weight": torch.randn(6, 8),
    "model.layers.0.mlp.down_proj.weight": torch.randn(6, 12), "model.norm.weight": torch.randn(6).to(torch.bfloat16),
}  # fmt: skip
SMALL = SyncSettings(backend="collective", bucket_bytes=200)


class Job:
    """Ranks and receivers as threads, each with its own groups."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self._ranks = rank_threads(ranks)
        self.senders = [Sender(SMALL, str(directory), rank) for rank in self._ranks]
        self.epochs = Epochs()

    def publish(self, version: int) -> str:
        found = on_all(
            self._ranks,
            lambda r: self.senders[r.rank].publish(shares_of(TENSORS.items(), r.rank, r.world_size), version),
        )  # fmt: skip
        return found[0].path  # type: ignore[union-attr]

    def sync(
        self, path: str, servers: list[list[Receiver]], *, seconds: float = 20.0
    ) -> list[list[dict[str, torch.Tensor]]]:
        order, addresses = self.epochs.addresses(path, [id(server[0]) for server in servers], seconds)
        workers = len(servers[0])
        with ThreadPoolExecutor(16) as pool:
            sent = [pool.submit(s.send, order, workers=workers, split=tensor_parallel) for s in self.senders]
            got = [
                [pool.submit(worker.receive, address) for worker in server]
                for server, address in zip(servers, addresses, strict=True)
            ]
            for each in sent:
                each.result()
            return [[one.result() for one in server] for server in got]


def server(workers: int) -> list[Receiver]:
    return [
        Receiver(worker=w, workers=workers, split=tensor_parallel)
        for w in range(workers)
    ]  # fmt: skip


@pytest.fixture(params=[(1, 1), (2, 1), (2, 2), (3, 2)], ids=str)
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


def test_from_n_ranks_to_m_workers_each_gets_its_part(tmp_path: Path, sizes: tuple[int, int]) -> None:
    ranks, workers = sizes
    job, servers = Job(tmp_path / "w", ranks), [server(workers), server(workers)]
    for got in job.sync(job.publish(1), servers):
        for worker, tensors in enumerate(got):
            assert tensors.keys() == TENSORS.keys()
            for name, tensor in TENSORS.items():
                split = tensor_parallel(name) if workers > 1 else None
                box = target_box(tuple(tensor.shape), split, worker, workers)
                part = tensor[tuple(slice(r.start, r.stop) for r in box)]
                assert torch.equal(tensors[name], part)
                assert tensors[name].dtype == part.dtype


def test_groups_are_kept_between_syncs_and_made_anew_when_a_server_joins(tmp_path: Path) -> None:
    job, servers = Job(tmp_path / "w", 2), [server(1), server(1)]
    job.sync(job.publish(1), servers)
    job.sync(job.publish(2), servers)
    assert [s[0].groups_made for s in servers] == [2, 2]
    servers.append(server(1))
    job.sync(job.publish(3), servers)
    assert [s[0].groups_made for s in servers] == [4, 4, 2]


def test_who_joins_later_gets_the_version_that_was_published(tmp_path: Path) -> None:
    job, first = Job(tmp_path / "w", 2), server(1)  # kept: members are told apart by their identity
    path = job.publish(1)
    job.sync(path, [first])
    name = "model.norm.weight"
    before = TENSORS[name].clone()
    try:
        TENSORS[name].zero_()  # training goes on
        [[got]] = job.sync(path, [server(1)])
    finally:
        TENSORS[name].copy_(before)
    assert torch.equal(got[name], before)


def test_a_server_that_does_not_come_is_an_error_in_time_and_the_others_sync_without_it(tmp_path: Path) -> None:
    job, here = Job(tmp_path / "w", 2), server(1)
    path = job.publish(1)
    order, addresses = job.epochs.addresses(path, ["here", "gone"], 2.0)
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(s.send, order) for s in job.senders]
        got = pool.submit(here[0].receive, addresses[0])
        assert all(isinstance(each.exception(timeout=15), RuntimeError) for each in sent)
        assert isinstance(got.exception(timeout=15), WeightsMissing)
    job.epochs.broken()
    [[tensors]] = job.sync(path, [here])
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


def test_two_syncs_of_the_same_servers_are_of_one_epoch_until_one_breaks() -> None:
    epochs, path = Epochs(), str(Address("file:///x", 3, 2))

    def number(*members: str) -> int:
        return Address.parse(epochs.addresses(path, members, 1.0)[0]).epoch

    assert [number("a", "b"), number("a", "b"), number("a"), number("a", "b")] == [1, 1, 2, 3]
    epochs.broken()
    assert number("a", "b") == 4
    order, addresses = epochs.addresses(path, ("a", "b"), 1.5)
    assert [Address.parse(address).index for address in (order, *addresses)] == [-1, 0, 1]


@pytest.mark.parametrize("path", ["collective:", "collective:[]", 'collective:{"store": "x"}'])
def test_an_address_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(WeightsDamaged, match="no address"):
        Address.parse(path)
