"""What a machine that loses its power leaves on its disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Disk:
    """What a machine that dies leaves of `root`: of each file the bytes as they were at its last sync, and none whose
    name was not synced."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.syncs: list[str] = []
        self._bytes: dict[tuple[int, int], bytes] = {}
        self._names: dict[Path, dict[str, tuple[int, int]]] = {}
        self._real = os.fsync, os.fdatasync
        monkeypatch.setattr(os, "fsync", lambda fd: self._note(fd, self._real[0]))
        monkeypatch.setattr(os, "fdatasync", lambda fd: self._note(fd, self._real[1]))

    def _note(self, fd: int, sync) -> None:
        sync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        self.syncs.append(path.name)
        info = os.fstat(fd)
        if not path.is_relative_to(self.root) or not path.exists():
            return
        if path.is_dir():
            self._names[path] = {e.name: (e.stat().st_dev, e.inode()) for e in os.scandir(path)}
        else:
            self._bytes[info.st_dev, info.st_ino] = path.read_bytes()

    def lose_power(self) -> None:
        """Make it so."""
        for path in sorted(path for path in self.root.rglob("*") if path.is_file()):
            key = self._names.get(path.parent, {}).get(path.name)
            if key in self._bytes:
                path.write_bytes(self._bytes[key])
            else:
                path.unlink()
