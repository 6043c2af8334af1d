"""Weights in shared memory go with their run: with its end, and of one that was killed with its directory."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl.weight_sync import leftovers
from streamrl.weight_sync.leftovers import PREFIX, owner_of, remove_leftovers, weights_home


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def a_run(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.yaml").touch()
    return directory


def killed(home: Path, run: Path) -> None:
    """Another process has it, and is killed with it."""
    held = (
        "import sys, pathlib; from streamrl.weight_sync.leftovers import weights_home\n"
        "with weights_home(*map(pathlib.Path, sys.argv[1:])) as home:\n"
        "    (home / 'v00000001.safetensors').write_bytes(b'w'); print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", held, str(home), str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert remove_leftovers(home.parent, below=run.parent) == [], "it lives"
        process.kill()
    assert process.returncode == -signal.SIGKILL


def test_it_is_private_names_its_run_and_goes_with_it(shared: Path, tmp_path: Path) -> None:
    run = a_run(tmp_path / "runs" / "a")
    with weights_home(shared / f"{PREFIX}a", run) as home:
        assert home.stat().st_mode & 0o777 == 0o700
        assert owner_of(home) == run
        shutil.rmtree(run)
        assert remove_leftovers(shared) == [], "the run lives, whatever became of its directory"
    assert list(shared.iterdir()) == []


def test_that_of_a_killed_run_goes_once_its_directory_is_gone(shared: Path, tmp_path: Path) -> None:
    run = a_run(tmp_path / "runs" / "a")
    killed(shared / f"{PREFIX}a", run)
    with weights_home(shared / f"{PREFIX}b", a_run(tmp_path / "runs" / "b")):
        assert (shared / f"{PREFIX}a").exists(), "it may be started again, and finds it"
    run.rename(tmp_path / "moved")
    with weights_home(shared / f"{PREFIX}b", tmp_path / "runs" / "b"):
        assert not (shared / f"{PREFIX}a").exists()


def test_a_killed_run_that_is_started_again_takes_it_over(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, run = shared / f"{PREFIX}a", a_run(tmp_path / "runs" / "a")
    killed(home, run)
    monkeypatch.setattr(leftovers, "LOCK_WAIT", 0.0)
    with weights_home(home, run), pytest.raises(UserError, match="is held by process"), weights_home(home, run):
        pass
    assert not home.exists()


def test_what_is_nobodys_or_somebody_elses_stays(shared: Path, tmp_path: Path) -> None:
    (shared / f"{PREFIX}unknown").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "owner").write_text("/nowhere")
    (tmp_path / "elsewhere" / "lock").touch()
    (shared / f"{PREFIX}link").symlink_to(tmp_path / "elsewhere")
    (shared / "owner").write_text("/nowhere")
    (shared / f"{PREFIX}linked").mkdir()
    (shared / f"{PREFIX}linked" / "owner").symlink_to(shared / "owner")
    assert remove_leftovers(shared) == []
