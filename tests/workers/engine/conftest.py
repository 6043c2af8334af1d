from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.engine.cases import make_models
from tests.workers.engine.world import World


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))
