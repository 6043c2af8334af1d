"""A version goes, whether it is a file or a directory."""

from __future__ import annotations

import shutil
from pathlib import Path


def remove(path: Path) -> None:
    """Also where it is gone already."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
