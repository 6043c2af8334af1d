"""The control plane of StreamRL: trainer, workers, LLM servers, configuration and command line."""

from __future__ import annotations

__version__ = "0.1.0"
