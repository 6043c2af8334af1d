"""What all tests share: one thread per process, a quick hypothesis profile, and skips for what a machine lacks."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings

from streamrl.weight_sync.leftovers import remove_leftovers
from tests import unpickling

settings.register_profile("quick", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

NEEDED = {
    "gpu": (lambda: Path("/dev/nvidia0").exists(), "no CUDA device"),
    "browser": (lambda: shutil.which("chromium") is not None, "no chromium"),
}


SHARED = Path("/dev/shm")

unpickling.watch()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job, and in all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--server", help="path/to/file.py:function, a server for tests/rollout/test_llm_server.py")


@pytest.fixture(autouse=True)
def no_decoder_unpickles() -> Iterator[None]:
    """Fails any test in which a decoder of ours resolved a pickled global."""
    yield
    found = unpickling.breaches.copy()
    unpickling.breaches.clear()
    assert not found, f"data became code: {found}"


@pytest.fixture(scope="session", autouse=True)
def killed_runs_leave_no_weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests kill runs and do not start them again; their directories are kept for a while."""
    yield
    remove_leftovers(SHARED, below=tmp_path_factory.getbasetemp())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes many minutes runs only where it is asked for by its marker."""
    if "endurance" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("endurance")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, (available, reason) in NEEDED.items():
        if item.get_closest_marker(marker) and not available():
            pytest.skip(reason)
