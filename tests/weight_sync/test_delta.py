"""Deltas: small, exact to the bit, and refused where they do not fit what is served."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamrl.weight_sync import WeightInfo, WeightsDamaged, WeightsMissing, WeightsNotWritten, WeightStore
from streamrl.weight_sync.delta import apply, encode
from streamrl.weight_sync.delta_files import SUFFIX, read_manifest
from streamrl.weight_sync.delta_publisher import DeltaPublisher
from streamrl.weight_sync.load import copy_into, stage
from streamrl.weight_sync.publisher import SyncSettings
from streamrl.weight_sync.shares import cast, shares_of
from tests.weight_sync.ranks import on_all, rank_threads


def test_what_is_encoded_is_applied_to_the_bit_in_the_smallest_form() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201
    rng = torch.Generator().manual_seed(seed)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for share in (0.0, 0.002, 0.2, 1.0):
            old = torch.randn(5000, generator=rng).to(dtype)
            new = torch.where(torch.rand(5000, generator=rng) < share, -old, old)
            parts = encode("w", old, new)
            got = old.clone()
            apply("w", got, parts)
            assert torch.equal(got.view(torch.uint8), new.view(torch.uint8))
            assert {name[0] for name in parts} == {0.0: set(), 0.002: {"i", "v"}, 0.2: {"b", "v"}, 1.0: {"f"}}[share]
            assert sum(part.nbytes for part in parts.values()) <= new.nbytes


def test_signs_of_zero_and_nan_are_changes() -> None:
    old, new = torch.tensor([0.0, 1.0] * 50), torch.tensor([-0.0, 1.0] * 50)
    got = old.clone()
    apply("w", got, encode("w", old, new))
    assert torch.equal(got.signbit(), new.signbit())


@pytest.mark.parametrize("parts", [
    {"i:w": torch.tensor([9], dtype=torch.uint32), "v:w": torch.zeros(1)},
    {"i:w": torch.tensor([1], dtype=torch.uint32)},
    {"i:w": torch.tensor([1], dtype=torch.uint32), "v:w": torch.zeros(2)},
    {"b:w": torch.zeros(3, dtype=torch.uint8), "v:w": torch.zeros(0)},
    {"f:w": torch.zeros(5)},
    {"f:w": torch.zeros(4, dtype=torch.float64)},
], ids=str)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(parts: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="w: "):
        apply("w", torch.zeros(4), parts)


class Model(nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))


class Trainer:
    """`ranks` ranks that publish by deltas; every version changes a few numbers of two tensors of three."""

    def __init__(self, directory: Path, ranks: int = 2, **settings: Any) -> None:
        self.store = WeightStore(directory)
        self.tensors = {"a": torch.randn(40, 30), "b": torch.randn(300), "c": torch.randn(6, 5)}
        self._ranks = rank_threads(ranks)
        chosen = SyncSettings(backend="delta", staged=True, **settings)
        self._publishers = [DeltaPublisher(chosen, str(directory), rank) for rank in self._ranks]

    def publish(self, version: int, *, taken: bool = True) -> Any:
        self.tensors["a"][version % 40, 3:6] += 1.0
        self.tensors["b"][version::50] += 1.0

        def one(rank: Any) -> Any:
            shares = shares_of(self.tensors.items(), rank.rank, rank.world_size)
            return self._publishers[rank.rank].publish(shares, version)

        found = on_all(self._ranks, one)
        for error in found:
            if isinstance(error, Exception):
                raise error
        if taken:
            assert isinstance(found[0], WeightInfo)
            self.store.publish(version, found[0].path)
        return found[0]

    def equals(self, model: nn.Module) -> bool:
        return all(torch.equal(parameter, self.tensors[name]) for name, parameter in model.named_parameters())


def kinds(trainer: Trainer, *versions: int) -> list[str]:
    return [Path(trainer.publish(version).path).suffix for version in versions]


def test_a_server_with_the_version_before_gets_what_has_changed(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "w")
    full = trainer.publish(1)
    model = Model(trainer.tensors)
    info = trainer.publish(2)
    assert info.path.endswith(SUFFIX)
    assert info.bytes < full.bytes / 10
    staged = stage(model, info.path, 2, serves=1)
    assert set(staged.tensors) == {"a", "b"}
    copy_into(model, staged.tensors)
    assert trainer.equals(model)


def test_a_server_in_float32_takes_deltas_of_rounded_weights(tmp_path: Path) -> None:
    trainer, ranks = Trainer(tmp_path / "w"), rank_threads(1)[0]
    chosen = SyncSettings(backend="delta", dtype="bfloat16")
    writer = DeltaPublisher(chosen, str(tmp_path / "w"), ranks)
    model = Model(trainer.tensors)
    for version in (1, 2):
        trainer.tensors["b"].add_(1e-4)  # seen by few numbers in bfloat16, by all in float32
        info = writer.publish(cast(shares_of(trainer.tensors.items(), 0, 1), chosen.dtype), version)
        assert info is not None
        copy_into(model, stage(model, info.path, version, serves=version - 1).tensors)
    assert info.path.endswith(SUFFIX)
    assert info.bytes < 200
    rounded = {name: tensor.to(torch.bfloat16).to(torch.float32) for name, tensor in trainer.tensors.items()}
    assert all(torch.equal(parameter, rounded[name]) for name, parameter in model.named_parameters())


def test_who_joins_reads_the_chain_from_its_full_version(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "w", ranks=3)
    model = Model(trainer.tensors)
    for version in (1, 2, 3, 4):
        info = trainer.publish(version)
    staged = stage(model, info.path, 4)
    assert set(staged.tensors) == {"a", "b", "c"}
    copy_into(model, staged.tensors)
    assert trainer.equals(model)
    found = trainer.store.read_latest()
    assert found is not None
    assert torch.equal(found[1]["a"], trainer.tensors["a"])


def test_a_base_that_is_not_the_trainers_is_noticed_and_all_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tmp_path / "w")
    trainer.publish(1)
    model = Model(trainer.tensors)
    with torch.no_grad():
        model.get_parameter("c")[0, 0] += 1.0  # a bit flipped in the server's memory
    info = trainer.publish(2)
    staged = stage(model, info.path, 2, serves=1)
    assert "another checksum" in caplog.text
    copy_into(model, staged.tensors)
    assert trainer.equals(model)


def test_a_damaged_delta_is_refused_and_the_model_not_touched(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "w")
    trainer.publish(1)
    model = Model(trainer.tensors)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    info = trainer.publish(2)
    part = Path(info.path) / "part-0001.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 0x40
    part.write_bytes(data)
    with pytest.raises(WeightsDamaged):
        stage(model, info.path, 2, serves=1)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    (Path(info.path) / "MANIFEST.json").write_text('{"version": 2}')
    with pytest.raises(WeightsDamaged, match="no manifest"):
        stage(model, info.path, 2, serves=1)
    with pytest.raises(WeightsMissing):
        stage(model, str(tmp_path / "w" / "v00000009.delta"), 9)


def test_who_joins_refuses_a_chain_whose_full_version_has_been_damaged(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "w")
    full = Path(trainer.publish(1).path)
    trainer.publish(2)
    data = bytearray(full.read_bytes())
    data[-1] ^= 0x40
    full.write_bytes(data)
    with pytest.raises(WeightsDamaged, match="checksum"):
        trainer.store.read_latest()


@pytest.mark.parametrize("manifest", [
    "[" * 100_000, '{"version": Infinity, "ranks": 1, "chain": [], "tensors": {}}', b"\xff\xfe", None,
], ids=["deep", "infinite", "no text", "a pipe"])  # fmt: skip
def test_a_manifest_that_cannot_be_is_damage(tmp_path: Path, manifest: str | bytes | None) -> None:
    if manifest is None:
        os.mkfifo(tmp_path / "MANIFEST.json")
    else:
        (tmp_path / "MANIFEST.json").write_bytes(manifest.encode() if isinstance(manifest, str) else manifest)
    with pytest.raises(WeightsDamaged, match="no manifest"):
        read_manifest(tmp_path)


def test_a_full_disk_is_told_and_the_version_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tmp_path / "w", ranks=1)
    trainer.publish(1)
    before = sorted(path.name for path in (tmp_path / "w").iterdir())

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(WeightsNotWritten, match="no room for version 2 of the weights in "):
            trainer.publish(2)
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == before
    assert trainer.publish(3).path.endswith(SUFFIX), "the next one is whole again"


def test_full_versions_come_at_intervals_and_what_a_chain_needs_is_kept(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "w", full_every=3)
    full, delta = ".safetensors", ".delta"
    assert kinds(trainer, 1, 2, 3, 4, 5) == [full, delta, delta, full, delta]
    left = {path.name for path in (tmp_path / "w").glob("v*")}
    assert {"v00000004.safetensors", "v00000005.delta"} <= left
    assert "v00000002.delta" not in left or "v00000001.safetensors" in left


def test_after_a_version_that_no_server_took_the_next_begins_at_the_one_they_have(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "w")
    trainer.publish(1)
    model = Model(trainer.tensors)
    trainer.publish(2, taken=False)
    info = trainer.publish(3)
    staged = stage(model, info.path, 3, serves=1)
    assert set(staged.tensors) == {"a", "b"}
    copy_into(model, staged.tensors)
    assert trainer.equals(model)


def test_a_trainer_that_starts_again_begins_with_a_full_version(tmp_path: Path) -> None:
    assert kinds(Trainer(tmp_path / "w"), 1, 2) == [".safetensors", ".delta"]
    assert kinds(Trainer(tmp_path / "w"), 3, 4) == [".safetensors", ".delta"]
