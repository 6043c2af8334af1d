"""Names, paths, and errors that say what there is instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.loop import load_agent_loop
from agent_loop.plugins import PluginError, Registry
from agent_loop.seeds import derive_seed

LOOP = """
class Echo:
    def __init__(self, times=1):
        self.times = times
    async def run(self, row, ctx):
        return []
class NoRun: ...
class SyncRun:
    def run(self, row, ctx): ...
class WrongRun:
    async def run(self, row): ...
def function(): ...
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_loop.py"
    path.write_text(LOOP)
    return path


def test_a_loop_of_a_file_is_loaded_with_its_settings(file: Path) -> None:
    loop = load_agent_loop(f"{file}:Echo", times=3)
    assert type(loop).__name__ == "Echo"
    assert vars(loop) == {"times": 3}
    assert type(load_agent_loop(f"{file}:Echo")) is type(loop)


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("tool_agnt", "unknown agent loop 'tool_agnt': did you mean 'tool_agent'"),
        ("nothing/here.py:Echo", "there is no file"),
        ("{file}:Eco", "my_loop.py has no 'Eco'; it has Echo"),
        ("{file}", "expected 'path/to/file.py:Name'"),
        ("{file}:NoRun", "has no `async def run"),
        ("{file}:SyncRun", "has no `async def run"),
        ("{file}:WrongRun", r"run\(self, row\) should be run\(self, row, ctx\)"),
        ("{file}:function", "is a function; expected a class"),
    ],
)
def test_a_wrong_spec_says_what_to_do(file: Path, spec: str, error: str) -> None:
    with pytest.raises(PluginError, match=error):
        load_agent_loop(spec.format(file=file))


def test_settings_that_a_loop_does_not_take_are_named(file: Path) -> None:
    with pytest.raises(PluginError, match=r"does not take the settings \['often'\]"):
        load_agent_loop(f"{file}:Echo", often=3)


def test_an_error_in_the_users_file_is_shown_as_it_is(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        load_agent_loop(f"{broken}:Echo")


def test_a_name_is_registered_once() -> None:
    registry: Registry[int] = Registry("number")
    registry.register("one")(1)
    registry.register("one")(1)
    with pytest.raises(PluginError, match="number 'one' is registered twice"):
        registry.register("one")(2)


def test_seeds_are_stable_and_do_not_confuse_their_parts() -> None:
    assert derive_seed(1, "e0p0000003", 2) == derive_seed(1, "e0p0000003", 2)
    assert len({derive_seed(1, 23), derive_seed(12, 3), derive_seed("1", 23), derive_seed("12", "3")}) == 4
    assert 0 <= derive_seed("x") < 2**63
