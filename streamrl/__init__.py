"""The control plane of StreamRL: trainer, workers, LLM servers, configuration and command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.protocol import DataProto

__all__ = ["DataProto", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "DataProto":
        from streamrl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
