"""`transfer_queue.*`, `monitor.*` and `ray_kwargs.*`: the services around the loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from streamrl.config.sections.types import NonNegativeInt, Port, PositiveInt

SegmentBytes = Annotated[int, Meta(ge=1 << 16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleStorageConfig:
    num_data_storage_units: PositiveInt = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    storage_backend: Literal["SimpleStorage"] = "SimpleStorage"
    SimpleStorage: SimpleStorageConfig = field(default_factory=SimpleStorageConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferQueueConfig:
    backend: BackendConfig = field(default_factory=BackendConfig)
    storage_dir: str | None = None
    """Where segments lie; None: /dev/shm if it is large enough, else the run directory."""
    unit_budget_bytes: PositiveInt = 256 << 20
    """Bytes that one storage unit may hold."""
    spill_dir: str | None = None
    """Where segments go when a unit's memory is full; None: the run directory."""
    spill_budget_bytes: NonNegativeInt | None = None
    """Bytes that one unit may move there; None: four times its memory, if the disk has room; 0: nothing."""
    segment_bytes: SegmentBytes = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusConfig:
    enabled: bool = True
    port: Port = 0
    """0: any free one; the run says which."""
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardConfig:
    enabled: bool | None = None
    """Serve the pages on loopback while it runs (docs/monitoring.md); None: when stdout is a terminal. `streamrl dash`
    serves any run at any time."""
    port: Port = 0
    """0: 8090, or a free one; the run says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    terminal: bool | None = None
    """The live view; None: when stdout is a terminal, else one line per step."""
    dashboard: DashboardConfig = field(default_factory=DashboardConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    tool: Literal["torch"] | None = None
    """torch: its profiler around the updates of chosen steps, one Chrome trace per rank."""
    steps: tuple[PositiveInt, ...] = ()
    save_path: str | None = None
    """A directory; None: <run>/profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayInitConfig:
    num_cpus: PositiveInt | None = None
    """Logical CPUs of a cluster started for this run; None: those of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayKwargs:
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)
    timeline_json_file: str | None = None
    """Write Ray's timeline of tasks and actors there when the run ends (chrome://tracing)."""
