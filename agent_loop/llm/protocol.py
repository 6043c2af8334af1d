"""The two seams of generation: `LLMServer` is one engine; `LLMClient` is what an agent loop sees.

Tokens in, tokens out. Nothing here knows text, Ray or torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`max_tokens` bounds this call. Log-probs are reported after temperature (and after top-p/top-k if those cut)."""

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()  # generated, kept as last token, and end the call
    seed: int | None = None
    weight_version: int | None = None  # that samples this call (deterministic mode); None: the newest there is


StopReason = Literal["stop", "length", "aborted"]


@dataclass(slots=True)
class Generation:
    """R tokens. `log_probs` and `weight_versions` are per token, as the engine knew them when it sampled it."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    stop_reason: StopReason = "stop"
    queue_seconds: float = 0.0  # waiting for a slot, also where no server has one to wait for
    engine_seconds: float = 0.0  # holding a slot


def since(made: Generation, have: int) -> Generation:
    """The tokens after the first `have` of a generation that may be growing in another thread: an engine appends the
    version last, so as many tokens as there are versions are whole."""
    whole = len(made.weight_versions)
    return Generation(made.token_ids[have:whole], made.log_probs[have:whole], made.weight_versions[have:whole])


LEAST_LOG_PROB, MOST_LOG_PROB = -1e4, 1e-2
"""What a log-prob can be: servers write -9999 for "never", and rounding may go above 0."""


@dataclass(slots=True)
class Scores:
    """What a model says of R tokens that another one sampled."""

    log_probs: list[float]
    """Per response token, of softmax(logits / temperature) over the whole vocabulary."""
    weight_version: int = 0
    queue_seconds: float = 0.0  # waiting for its turn
    engine_seconds: float = 0.0  # in the forward pass, together with whoever shared it


@dataclass(frozen=True, slots=True)
class ServerLoad:
    running: int
    waiting: int
    slots: int
    weight_version: int
    tokens_generated: int  # since the start
    busy_seconds: float  # time with at least one running request, since the start
    rows_scored: int = 0  # answers of `score`, since the start
    tokens_scored: int = 0  # their response tokens
    score_queue_seconds: float = 0.0  # what these answers waited for their turn, in all
    preemptions: int = 0  # running requests that lost their cache for want of room, since the start
    cache_usage: float = 0.0  # share of the KV cache that running requests hold, 0 to 1
    first_tokens: int = 0  # requests that have made their first token, since the start
    queue_seconds: float = 0.0  # what these waited for a slot, in all
    first_token_seconds: float = 0.0  # from their arrival to that token, in all
    prompt_tokens: int = 0  # with which requests got their slots, since the start; 0: not known
    cached_tokens: int = 0  # of these: found in the prefix cache
    weights_seconds: float = 0.0  # for how long the weights have been in service here
    asleep: bool = False  # between `sleep` and `wake_up`


class ServerDied(ConnectionError):
    """The engine or its process is gone; its requests may go elsewhere with the tokens they have."""


class ContextOverflow(ValueError):
    """Prompt plus max_tokens exceeds the engine's context length. The agent's own error, not the infrastructure's."""


class CannotScore(NotImplementedError):
    """This kind of server has no forward pass over given tokens."""


class ImagesNotServed(ValueError):
    """This kind of server takes text alone."""


def refuse_images(server: object, images: Sequence[bytes]) -> None:
    """For servers of text. Raises ImagesNotServed."""
    if images:
        raise ImagesNotServed(f"the prompt has {len(images)} images; {type(server).__name__} serves text alone")


class LLMServer(Protocol):
    """One engine. Every implementation passes tests/rollout/test_llm_server.py."""

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams, images: Sequence[bytes] = ()
    ) -> Generation:
        """`images` (PNG, JPEG, ...) stand where `prompt_ids` has runs of placeholder tokens, in order. Raises
        ServerDied, ContextOverflow, ImagesNotServed."""
        ...

    async def progress(self, have: Mapping[str, int]) -> dict[str, Generation]:
        """What these open requests have made so far: by id, the tokens after their first `have[id]` ones (its lists are
        all that means something yet). Ids that are unknown or have nothing new may be left out.

        Asked every half a second by who has requests here: so a death costs a request the tokens since the last answer,
        and silence is noticed. Answered at once, also while paused or asleep. A server without this verb loses the
        tokens of its open requests when it dies. Raises ServerDied."""
        return {}

    async def score(self, prompt_ids: list[int], response_ids: list[int], temperature: float = 1.0) -> Scores:
        """The log-prob of each response token after the prompt and the response tokens before it. Waits while paused.

        `abort` does not end it; whoever gives it up costs at most its share of one forward pass. Raises ServerDied,
        ContextOverflow, ValueError, FloatingPointError (the model's own numbers are not finite), CannotScore.
        """
        raise CannotScore(f"{type(self).__name__} scores no tokens; teacher servers are of the kinds torch and sim")

    async def abort(self, request_ids: list[str] | None = None) -> int:
        """End these generations (None: all) with the tokens they have, stop_reason "aborted"; how many there were."""
        ...

    async def update_weights(self, path: str, version: int) -> None:
        """Load the safetensors file `path` between two decode steps. Running requests go on (their KV is kept);
        tokens sampled from now on carry `version`."""
        ...

    async def weights_checksum(self) -> str | None:
        """Of the weights in service, comparable with the trainer's (streamrl.weight_sync.digest). None: this kind has
        none to tell."""
        return None

    async def pause(self) -> None:
        """No decode step until resume; requests keep their place."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """As pause, for as long as training has the devices: also gives up the memory of the cache, as far as the
        engine can. Requests keep their place and their tokens; weights can be updated meanwhile."""
        await self.pause()

    async def wake_up(self) -> None:
        """After sleep: requests go on with the weights of now, those whose cache was given up after computing it
        again."""
        await self.resume()

    async def load(self) -> ServerLoad:
        """Also the health check."""
        ...

    async def close(self) -> None: ...


class LLMClient(Protocol):
    """What an agent loop calls. Deaths, aborts and swaps are handled below it."""

    async def generate(
        self, prompt_ids: list[int], sampling: SamplingParams, *, session: str, images: Sequence[bytes] = ()
    ) -> Generation:
        """`session` makes later turns of a trajectory find their prefix cache. Never returns "aborted" unless
        the whole run stops."""
        ...


class Scorer(Protocol):
    """A teacher, as a session sees it: the servers of another model. Deaths are handled below it."""

    async def score(
        self, prompt_ids: list[int], response_ids: list[int], temperature: float, *, session: str
    ) -> Scores:
        """As `LLMServer.score`. Raises ServerDied once retries are exhausted, or when the run stops."""
        ...
