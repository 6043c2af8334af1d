"""Names for code: registries of what is shipped, and `path/to/file.py:Name` for what a user brings.

A path is only ever taken from configuration, never from a dataset row: data must not choose code.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PluginError(ValueError):
    """A name or a `path.py:Name` that cannot be resolved; the message says what there is instead."""


class Registry(Generic[T]):
    """What is known under a name. `kind` is the word for one entry in error messages, e.g. "agent loop"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator. Raises PluginError when the name is taken by something else."""

        def add(entry: T) -> T:
            if self._entries.setdefault(name, entry) is not entry:
                raise PluginError(f"{self.kind} {name!r} is registered twice: {self._entries[name]!r} and {entry!r}")
            return entry

        return add

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return sorted(self._entries)

    def resolve(self, spec: str) -> T:
        """The entry named `spec`, or the object at `path.py:Name`."""
        if spec in self._entries:
            return self._entries[spec]
        if is_path_spec(spec):
            return load_from_file(spec, self.kind)
        near = difflib.get_close_matches(spec, self._entries, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise PluginError(
            f"unknown {self.kind} {spec!r}: {hint}known: {', '.join(self.names())}, or 'path/to/file.py:Name'"
        )


def is_path_spec(spec: str) -> bool:
    """Whether `spec` has the form `path.py:Name` (and is not a registered name)."""
    return ".py:" in spec or spec.endswith(".py")


def load_from_file(spec: str, kind: str) -> Any:
    """The object `Name` of the file in `path/to/file.py:Name`. An error while importing keeps its traceback."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise PluginError(f"{kind} {spec!r}: expected 'path/to/file.py:Name'")
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise PluginError(f"{kind} {spec!r}: there is no file {file}")
    module = _module_of(file)
    if not hasattr(module, name):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        near = difflib.get_close_matches(name, public := [n for n in own if not n.startswith("_")], n=1)
        raise PluginError(
            f"{kind} {spec!r}: {file.name} has no {name!r}; it has {', '.join(near or public) or 'nothing'}"
        )
    return getattr(module, name)


def _module_of(file: Path) -> ModuleType:
    """One module per file, so that two specs of the same file share its classes."""
    module_name = f"_plugin_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise PluginError(f"{file} cannot be imported as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
