"""Files that are mapped once and read whenever they were written anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from streamrl.weight_sync import WeightsDamaged, WeightsMissing, WeightStore
from streamrl.weight_sync.kept import KeptMaps
from streamrl.weight_sync.mapped import recyclable
from streamrl.weight_sync.ranks import OneRank
from streamrl.weight_sync.shares import shares_of, write_shares


def written(store: WeightStore, version: int, size: int = 5000) -> str:
    tensors = {"a": torch.full((size,), float(version)), "b": torch.arange(7)}
    info = write_shares(store, list(shares_of(tensors.items(), 0, 1)), version, OneRank())
    assert info is not None
    store.publish(version, info.path)
    return info.path


def test_every_version_is_read_and_files_are_mapped_once(tmp_path: Path) -> None:
    store, maps, places = WeightStore(tmp_path / "w"), KeptMaps(), []
    for version in range(1, 7):
        tensors = maps.open(written(store, version))
        assert tensors["a"].tolist() == [version] * 5000
        assert tensors["b"].tolist() == list(range(7))
        places.append(tensors["a"].data_ptr())
        del tensors
        maps.release()
    assert len(set(places)) == 2, "two files take turns"


def test_a_file_is_written_over_once_it_is_released(tmp_path: Path) -> None:
    path, maps = written(WeightStore(tmp_path / "w"), 1), KeptMaps()
    for _ in range(2):
        maps.open(path)
        assert not recyclable(path, path)
        maps.release()
        assert recyclable(path, path)


def test_a_file_of_another_size_is_mapped_anew(tmp_path: Path) -> None:
    store, maps = WeightStore(tmp_path / "w"), KeptMaps()
    for version, size in enumerate((10, 20_000, 300, 40_000, 5), 1):
        assert maps.open(written(store, version, size))["a"].tolist() == [version] * size
        maps.release()


def test_pages_that_were_changed_here_are_forgotten(tmp_path: Path) -> None:
    path, maps = written(WeightStore(tmp_path / "w"), 1), KeptMaps()
    maps.open(path)["a"].zero_()
    assert maps.open(path)["a"][0] == 0
    maps.forget()
    assert maps.open(path)["a"][0] == 1


def test_nothing_is_kept_of_files_that_are_gone(tmp_path: Path) -> None:
    store, maps, before = WeightStore(tmp_path / "w"), KeptMaps(), len(os.listdir("/proc/self/fd"))
    for version in range(1, 5):
        path = written(store, version)
        maps.open(path)
        os.unlink(path)
    with pytest.raises(WeightsMissing):
        maps.open(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_damaged_file_is_refused_and_not_held(tmp_path: Path) -> None:
    path, maps = written(WeightStore(tmp_path / "w"), 1), KeptMaps()
    os.truncate(path, 100)
    with pytest.raises(WeightsDamaged, match="publish again"):
        maps.open(path)
    assert recyclable(path, path)
