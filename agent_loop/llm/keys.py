"""API keys: where one comes from, and that it is never shown."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path


class KeyMissing(ValueError):
    """No key where one was said to be."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`str`, `repr` and logs of it show three stars; `headers` is the only way out."""

    value: str = field(repr=False)

    @classmethod
    def find(cls, *, env: str | None = None, file: str | os.PathLike[str] | None = None) -> ApiKey | None:
        """From the environment variable `env`, else from `file`, which must be closed to others; None if neither is
        named. Raises KeyMissing, which says where it looked and nothing of what it found."""
        if env is None and file is None:
            return None
        if env is not None and (value := os.environ.get(env, "").strip()):
            return cls(value)
        if file is None:
            raise KeyMissing(f"the environment variable {env} holds no API key; export it where this process starts")
        path = Path(file).expanduser()
        try:
            mode = path.stat().st_mode
            value = path.read_text().strip()
        except OSError as error:
            raise KeyMissing(f"no API key in {path}: {error.strerror}") from None
        if stat.S_IMODE(mode) & 0o077:
            raise KeyMissing(f"the API key in {path} can be read by others (mode {stat.S_IMODE(mode):04o}); chmod 600")
        if not value:
            raise KeyMissing(f"the API key file {path} is empty")
        return cls(value)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.value}"}

    def __str__(self) -> str:
        return "***"
