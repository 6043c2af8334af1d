"""Engines by what they train and how: `@EngineRegistry.register("language_model", "fsdp2")`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from streamrl.workers.engine.base import Engine

T = TypeVar("T", bound=type)

SHIPPED = {
    (kind, backend): f"streamrl.workers.engine.{backend}"
    for kind in ("language_model", "value_model", "reward_model")
    for backend in ("fsdp2", "ddp")
}
"""Imported when first asked for, so that looking at the registry costs no torch."""


class EngineRegistry:
    """One table for the process."""

    _engines: dict[tuple[str, str], Callable[..., Engine]] = {}  # noqa: RUF012 - the registry itself

    @classmethod
    def register(cls, model_type: str, backend: str) -> Callable[[T], T]:
        """Raises ValueError if another engine has the name."""

        def add(engine: T) -> T:
            known = cls._engines.setdefault((model_type, backend), engine)
            if known is not engine:
                raise ValueError(f"engine ({model_type}, {backend}) is already registered as {known}")
            return engine

        return add

    @classmethod
    def get(cls, model_type: str, backend: str) -> Callable[..., Any]:
        """The engine's class. Raises KeyError naming those that exist."""
        name = (model_type, backend)
        if name not in cls._engines and name in SHIPPED:
            importlib.import_module(SHIPPED[name])
        if name not in cls._engines:
            known = ", ".join(f"({m}, {b})" for m, b in sorted({*cls._engines, *SHIPPED}))
            raise KeyError(f"no engine for model type {model_type!r} with backend {backend!r}; there are: {known}")
        return cls._engines[name]
