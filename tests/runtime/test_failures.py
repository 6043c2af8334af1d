from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from streamrl.errors import ConfigError
from streamrl.runtime.failures import DiskFullError, explained
from transfer_queue.errors import QueueFull


def caused(cause: Exception) -> Exception:
    try:
        raise RuntimeError("a rank failed") from cause
    except RuntimeError as error:
        return error


class OfAnotherProcess(Exception):
    """As Ray's: the cause is an attribute."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("a traceback")
        self.cause = cause


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        caused(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))),
        OfAnotherProcess(RuntimeError('IoError(Os { code: 28, message: "No space left on device" })')),
    ],
)
def test_a_full_disk_is_told_with_the_directory_and_what_to_do(tmp_path: Path, error: Exception) -> None:
    found = explained(error, tmp_path)
    assert isinstance(found, DiskFullError)
    assert str(found).startswith(f"no room to write in {tmp_path}: ")
    assert "Free disk space there" in str(found)
    assert "\n" not in str(found)


def test_full_storage_of_the_queue_says_itself_where_it_is(tmp_path: Path) -> None:
    full = QueueFull("unit 0 cannot make segments: /dev/shm/x: No space left on device. Make room there")
    assert str(explained(full, tmp_path)) == str(full)
    waits = QueueFull("no credit for 3 more groups")
    assert explained(waits, tmp_path) is waits


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    for error in (ValueError("no"), OSError(errno.EIO, "I/O error"), ConfigError("No space left on device")):
        assert explained(error, tmp_path) is error


def test_an_error_taken_out_of_the_one_around_it_has_an_end(tmp_path: Path) -> None:
    """As `raise error.cause from None` makes it."""
    cause = ValueError("no")
    around = OfAnotherProcess(cause)
    cause.__context__ = around
    assert explained(cause, tmp_path) is cause
