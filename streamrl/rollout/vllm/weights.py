"""A version of the weights on its way into vLLM's workers, in two phases.

```
 prepare: names and shapes are looked at here ─► workers begin to read ══ steps go on ══► each tells its checksum
 load:    the engine stands ─► workers reload from what they have mapped
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from streamrl.rollout.expected_weights import ExpectedWeights
from streamrl.rollout.vllm.answers import Answers
from streamrl.weight_sync import WeightError, WeightsDamaged, WeightsMissing

PREPARE_SECONDS = 170.0
"""For all workers to read a version, from a disk maybe, while steps go on."""

_REFUSALS: dict[str, type[WeightError]] = {"WeightsMissing": WeightsMissing, "WeightsDamaged": WeightsDamaged}

Ask = Callable[..., Awaitable[Any]]
"""(call, seconds): its answer; a death of the engine, or none within `seconds`, is the end of the server. Without
`seconds`: those of a control call; None: no limit."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version that all workers have mapped and read."""

    path: str
    version: int
    about: str
    """What it is called to the workers."""
    digest: str


class WorkerWeights:
    """Invariant: what workers load, all of them have read with the same checksum."""

    def __init__(self, engine: Any, expected: ExpectedWeights, ask: Ask) -> None:
        self._engine, self._expected, self._ask = engine, expected, ask
        self._answers, self._asked = Answers(), 0
        self._prepared: Prepared | None = None
        self._digest: str | None = None
        self.reload_seconds = 0.0
        """Of the last load, vLLM's own part: its reload of tensors in memory."""

    async def prepare(self, path: str, version: int) -> Prepared:
        """What was prepared before is forgotten. Raises WeightError, TimeoutError."""
        self._prepared = None
        await asyncio.to_thread(self._expected.check, path)
        self._asked += 1
        about = f"question {self._asked}: version {version} at {path}"
        parallel = self._engine.vllm_config.parallel_config
        told = self._answers.expect(about, parallel.world_size * parallel.data_parallel_size)
        await self._on_workers("prepare_published_weights", path, about, self._answers.address)
        async with asyncio.timeout(PREPARE_SECONDS):
            answers: list[list[str]] = await self._ask(told, None)
        for refusal, text in answers:
            if refusal:
                raise _REFUSALS[refusal](text)
        if len(digests := {digest for _, digest in answers}) > 1:
            raise WeightsDamaged(f"workers of one server have read different checksums of {path}: {sorted(digests)}")
        self._prepared = Prepared(path, version, about, digests.pop())
        return self._prepared

    def take(self, path: str, version: int) -> Prepared | None:
        """What is prepared, if it is this; either way nothing is afterwards."""
        prepared, self._prepared = self._prepared, None
        return prepared if prepared and (prepared.path, prepared.version) == (path, version) else None

    async def load(self, prepared: Prepared) -> None:
        """The engine stands."""
        self.reload_seconds = max(await self._on_workers("commit_published_weights", prepared.about))
        self._digest = prepared.digest

    async def checksum(self) -> str | None:
        """Of what was loaded last."""
        if self._digest is None:
            self._digest = await asyncio.to_thread(self._expected.digest)
        return self._digest

    def close(self) -> None:
        self._answers.close()

    async def _on_workers(self, method: str, *args: str) -> list[Any]:
        """What each returns."""
        return await self._ask(self._engine.collective_rpc(method, args=args))
