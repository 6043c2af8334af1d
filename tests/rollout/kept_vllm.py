"""One engine of vLLM for many tests: each has a server of its own on it, whose end the engine survives."""

from __future__ import annotations

from typing import Any

from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.rollout.vllm.server import Engine, VllmServer


class KeptEngine:
    """Give it to `VllmServer` as its engine."""

    def __init__(self, config: RolloutServerConfig) -> None:
        """`config.weights_dir` holds version 0, which every server loads first."""
        self._config, self._engine = config, Engine(config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def server(self) -> VllmServer:
        return VllmServer(self._config, engine=self)  # pyright: ignore[reportArgumentType]

    def shutdown(self) -> None:
        async def clear() -> None:
            llm = self._engine.llm
            await llm.abort(list(llm.output_processor.request_states), internal=True)
            await llm.resume_generation()

        self._engine.run(clear())

    def end(self) -> None:
        self._engine.shutdown()
