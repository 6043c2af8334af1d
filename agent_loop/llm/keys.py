"""API keys: where one comes from, and that it is never shown."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path


class KeyMissing(ValueError):
    """No key that could be sent where one was said to be."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`str`, `repr` and logs of it show three stars; `headers` is the only way out."""

    value: str = field(repr=False)

    def __post_init__(self) -> None:
        """Raises KeyMissing."""
        if misfit := _misfit(self.value):
            raise KeyMissing(f"the API key {misfit}")

    @classmethod
    def find(cls, *, env: str | None = None, file: str | os.PathLike[str] | None = None) -> ApiKey | None:
        """From the environment variable `env`, else from `file`, which must be closed to others; None if neither is
        named. Raises KeyMissing, which says where it looked and nothing of what it found."""
        if env is None and file is None:
            return None
        if env is not None and (value := os.environ.get(env, "").strip()):
            return cls._checked(value, f"the environment variable {env}")
        if file is None:
            raise KeyMissing(f"the environment variable {env} holds no API key; export it where this process starts")
        path = Path(file).expanduser()
        try:
            mode = path.stat().st_mode
            value = path.read_bytes().decode("utf-8", "replace").strip()
        except OSError as error:
            raise KeyMissing(f"no API key in {path}: {error.strerror}") from None
        if stat.S_IMODE(mode) & 0o077:
            raise KeyMissing(f"the API key in {path} can be read by others (mode {stat.S_IMODE(mode):04o}); chmod 600")
        if not value:
            raise KeyMissing(f"the API key file {path} is empty")
        return cls._checked(value, str(path))

    @classmethod
    def _checked(cls, value: str, place: str) -> ApiKey:
        if misfit := _misfit(value):
            raise KeyMissing(f"the API key in {place} {misfit}")
        return cls(value)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.value}"}

    def __str__(self) -> str:
        return "***"


def _misfit(value: str) -> str:
    """Why a key cannot stand in a header; empty if it can."""
    if not value:
        return "is empty"
    if len(value.splitlines()) > 1:
        return f"has {len(value.splitlines())} lines; it must be one"
    if not (value.isascii() and value.isprintable()) or value != value.strip():
        return "has characters that no HTTP header may hold: only printable ASCII, and no space at its ends"
    return ""
