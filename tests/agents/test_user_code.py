"""An error is placed in the file of the user that it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.plugins import load_from_file
from agent_loop.user_code import place_of

CODE = """\
import json

def own():
    return 1 / 0

def of_a_library():
    return json.loads("{")

def wrapped():
    try:
        own()
    except ZeroDivisionError as error:
        raise ValueError("no") from error
"""


@pytest.mark.parametrize(
    ("name", "line", "text"),
    [
        ("own", 4, "return 1 / 0"),
        ("of_a_library", 7, 'return json.loads("{")'),
        ("wrapped", 13, 'raise ValueError("no")'),
    ],
)
def test_an_error_is_placed_at_the_last_line_of_the_users_file(tmp_path: Path, name: str, line: int, text: str) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    function = load_from_file(f"{tmp_path}/mine.py:{name}", "reward")
    with pytest.raises((ValueError, ZeroDivisionError)) as caught:
        function()
    place = place_of(caught.value)
    assert place.startswith(f"{tmp_path}/mine.py:{line} in {name}: {text}")


def test_an_error_of_the_library_alone_has_no_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file") as caught:
        load_from_file(f"{tmp_path}/none.py:f", "reward")
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without this test, which is a user's file, too
    assert place_of(error) == ""
