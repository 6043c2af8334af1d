"""What one LLM server is: its kind, its model, and how it is told from others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RolloutServerConfig:
    """One server. `weights_dir` None serves the model as it is saved; `events_dir` None reports nothing."""

    name: str = "torch"
    """Which kind: "torch", "vllm", "sglang", "sim", a name given to `register_server`, or `path/to/file.py:builder`."""
    model_path: str = ""
    weights_dir: str | None = None
    awaits_weights: bool = False
    """As a Ray actor it serves nobody before it was given a version: it cannot find one by itself (collective)."""
    max_num_seqs: int = 64
    max_model_len: int = 1024
    max_score_tokens: int = 8192
    """Tokens of one pass in which rows are scored (torch)."""
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0
    sim: Any = None
    """A SimConfig, or a mapping or config section with some of its fields."""
    vllm: Any = None
    """A VllmOptions, or a mapping with some of its fields."""
    sglang: Any = None
    """An SglangOptions, or a mapping with some of its fields."""
    server: str = "server-0"
    """The name by which events and loads tell this server from others."""
    events_dir: str | None = None
    log_dir: str | None = None
    """As a Ray actor it writes what it prints and logs to `<server>.log` there; None: Ray's own file."""
    start_timeout: float = 180.0
    """Seconds for it to start, as a Ray actor."""
    update_timeout: float = 120.0
    """Seconds that whoever gives it a version waits for each phase; past them the actor is given up, too."""
    invariant: bool = False
    """A request's tokens do not depend on the batch, and it may name the weight version that samples it."""
