"""SGLang's environment is shared by all checkouts on a machine, one at a time."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.sglang import environment


def test_one_of_another_checkout_is_not_taken_before_it_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installs_nothing(*given: Any, **more: Any) -> None:
        raise AssertionError("it is there already")

    monkeypatch.setattr(subprocess, "run", installs_nothing)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: name)
    shared = environment._shared(tmp_path)
    shared.parent.mkdir(parents=True)
    shared.write_text("/gone/tests/rollout/sglang/standins\n/gone/.venv/lib/python3.11/site-packages\n")
    assert environment.python(tmp_path) is None, "it was not made to the end"
    (tmp_path / ".installed").touch()
    assert environment.python(tmp_path) is None, "its packages are another checkout's"
    environment.make(tmp_path)
    assert environment.python(tmp_path) == tmp_path / "bin" / "python"
    assert str(environment.STANDINS) in shared.read_text()
