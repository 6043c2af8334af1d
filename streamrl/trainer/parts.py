"""What a trainer is built from. A runtime (streamrl.runtime) makes the parts; the trainer only sees these seams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from streamrl.config import StreamRLConfig
from streamrl.monitor.events import EventLog
from streamrl.recording.record import Recording
from streamrl.recording.samples import SampleOrder
from streamrl.runtime.run_dir import RunDirectory
from streamrl.trainer.feeder import PromptSource
from transfer_queue.client import QueueClient
from transfer_queue.metadata import KVBatchMeta


class Actor(Protocol):
    """The policy's worker group, by the methods that the trainer calls (streamrl.workers.actor)."""

    async def compute_log_prob(self, batch: KVBatchMeta) -> dict[str, float]: ...
    async def compute_ref_log_prob(self, batch: KVBatchMeta) -> dict[str, float]: ...
    async def compute_teacher_log_prob(self, batch: KVBatchMeta) -> dict[str, float]: ...
    async def compute_rewards(self, batch: KVBatchMeta) -> list[dict[str, Any]]: ...
    async def compute_advantage(self, batch: KVBatchMeta) -> dict[str, float]: ...
    async def keep_snapshot(self) -> object: ...
    async def update_actor(self, batch: KVBatchMeta) -> dict[str, float]: ...
    async def publish_weights(self, version: int) -> Any: ...
    async def write_samples(self, order: SampleOrder) -> list[dict[str, Any]]: ...
    async def save_checkpoint(self, directory: str, background: bool = False) -> object: ...
    async def checkpoint_written(self, *, timeout: float | None = None) -> object: ...
    async def load_checkpoint(self, directory: str) -> object: ...
    async def watch(self) -> NoReturn: ...


class Critic(Protocol):
    """The critic's worker group (streamrl.workers.critic)."""

    async def compute_values(self, batch: KVBatchMeta) -> dict[str, float]: ...
    async def update_critic(self, batch: KVBatchMeta) -> dict[str, float]: ...
    async def save_checkpoint(self, directory: str, background: bool = False) -> object: ...
    async def checkpoint_written(self, *, timeout: float | None = None) -> object: ...
    async def load_checkpoint(self, directory: str) -> object: ...


class Servers(Protocol):
    """The LLM servers as one (streamrl.rollout.manager.LLMServerManager)."""

    async def update_weights(self, info: Any) -> Any: ...
    async def loads(self) -> dict[str, Any]: ...
    async def sleep(self) -> None: ...
    async def wake_up(self) -> None: ...


class Agents(Protocol):
    """The agent workers as one (agent_loop.manager.AgentLoopManager): runs until cancelled, raises when it gives up."""

    async def run(self) -> None: ...
    async def cancel(self, partition: str, uids: list[str]) -> None: ...


@dataclass(slots=True)
class Parts:
    config: StreamRLConfig
    run: RunDirectory
    queue: QueueClient
    actor: Actor
    servers: Servers
    agents: Agents
    train_data: PromptSource
    val_data: PromptSource | None
    events: EventLog
    clock: Callable[[], float]
    """Monotonic seconds; the event loop's own time, so that a virtual clock is one everywhere."""
    weights_dir: Path
    critic: Critic | None = None
    teachers: Servers | None = None
    """The teacher's servers, if it has any; the trainer only looks at their loads."""
    recording: Recording | None = None
    """What is trained again, if this is a replay."""
