"""What several tests of the queue start from."""

from __future__ import annotations

import os
import subprocess

import pytest


@pytest.fixture
def small(tmp_path):
    """A tmpfs of 24 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a tmpfs here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
