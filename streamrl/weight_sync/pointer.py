"""LATEST, a small JSON in a directory of versions: which of them is in service, and the checksums of those kept.

    {"version": 42, "path": "<dir>/v00000042.safetensors", "digests": {"v00000042.safetensors": "0123456789abcdef"}}

A version has no checksum here where nobody has computed one (a delta, whose parts have their own; an older writer).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from streamrl.weight_sync.delta_files import version_of
from streamrl.weight_sync.protocol import WeightsDamaged
from streamrl.weight_sync.removing import remove
from streamrl.weight_sync.saving import sync
from transfer_queue.storage.private import open_regular

LATEST = "LATEST"
_MAX_BYTES = 1 << 20
"""A line for each version that is kept; what is larger was not written here."""
_DIGEST = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Pointer:
    version: int
    name: str
    """Of the file, or of a delta's directory: it is in the same directory, wherever that has been moved to."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """weight_sync.digest, by name."""

    @classmethod
    def parse(cls, text: bytes) -> Pointer:
        """Raises ValueError."""
        try:
            entry = json.loads(text)
            version, path, digests = entry["version"], entry["path"], entry.get("digests", {})
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(repr(error)) from error
        if type(version) is not int or not 0 <= version < 1 << 63 or not isinstance(path, str):
            raise ValueError(f"it names version {str(version)[:100]} at {str(path)[:100]!r}")
        if version_of(name := Path(path).name) != version:
            raise ValueError(f"it calls {name!r} version {version}")
        if not isinstance(digests, dict) or not all(map(_is_digest, digests.values())):
            raise ValueError("its checksums are none")
        return cls(version, name, digests)

    @classmethod
    def read(cls, directory: Path) -> Pointer | None:
        """At once, whatever stands there; None if there is nothing. Raises WeightsDamaged."""
        path = directory / LATEST
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                text = file.read(_MAX_BYTES + 1)
            if len(text) > _MAX_BYTES:
                raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
            return cls.parse(text)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            why = ascii(str(error))[1:300].removesuffix("'")
            raise WeightsDamaged(f"{path} is no {{version, path}} JSON ({why}); remove it or publish again") from error

    def without(self, *names: str) -> Pointer:
        """They have other contents from now on."""
        return replace(self, digests={name: each for name, each in self.digests.items() if name not in names})

    def write(self, directory: Path) -> None:
        """In place of whatever stands there. Raises OSError, and nothing is left of it."""
        path, temporary = directory / LATEST, directory / f".{LATEST}.{os.getpid()}.tmp"
        there = {name: each for name, each in self.digests.items() if (directory / name).exists()}
        entry = {"version": self.version, "path": str(directory / self.name), "digests": there}
        try:
            remove(temporary)
            temporary.touch(mode=0o600)
            temporary.write_text(json.dumps(entry))
            sync(temporary)
            if path.is_dir() and not path.is_symlink():
                remove(path)
            os.replace(temporary, path)
            sync(directory)
        except BaseException:
            remove(temporary)
            raise


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None
