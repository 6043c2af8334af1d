"""Functions by name: what a caller may say, and what a rank makes of it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agent_loop.plugins import PluginError, load_from_file

_NAME = re.compile(r"(?P<place>[\w.]+|.+\.py):(?P<function>\w+)")


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """`package.module:function` or `path/to/file.py:function`; loaded where it is called."""

    name: str

    @classmethod
    def of(cls, name: object) -> NamedFunction:
        """Raises TypeError for a callable, which would have to be sent as code, and ValueError for a bad name."""
        if not isinstance(name, str):
            raise TypeError(
                f"{name!r}: a function is sent to the ranks by name, 'package.module:function' or "
                "'path/to/file.py:function', never as code"
            )
        if not _NAME.fullmatch(name):
            raise ValueError(f"function {name!r}: expected 'package.module:function' or 'path/to/file.py:function'")
        return cls(name)

    def load(self) -> Callable[..., Any]:
        """Raises PluginError, or what the import raises."""
        place, _, function = self.name.rpartition(":")
        if place.endswith(".py"):
            found = load_from_file(self.name, "function")
        else:
            module = importlib.import_module(place)
            if not hasattr(module, function):
                raise PluginError(f"function {self.name!r}: {place} has no {function!r}")
            found = getattr(module, function)
        if not callable(found):
            raise PluginError(f"function {self.name!r} is not callable but {type(found).__name__}")
        return found
