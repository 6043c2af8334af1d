"""`actor_rollout_ref.rollout.*`: the LLM servers, the agents on them and their tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from streamrl.config.sections.types import (
    Fraction,
    GroupSize,
    NonNegativeFloat,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    Scalar,
    Seed,
    Slots,
    Temperature,
)

TopK = Annotated[int, Meta(ge=-1)]
"""-1: all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSamplingConfig:
    """How validation asks. Without do_sample and temperature in two passes: sampled, and greedily."""

    do_sample: bool | None = None
    """true: only sampled; false: only greedily. null: by temperature."""
    temperature: NonNegativeFloat | None = None
    """0: only greedily; above: only sampled, at it. null: 1.0 where it samples."""
    top_p: OpenFraction | None = None
    """null: rollout.top_p; so is top_k."""
    top_k: TopK | None = None
    n: GroupSize = 1
    """Answers to each question, whose scores val-core/<source>/reward/mean@n is the mean of. With two passes the greedy
    one asks once."""

    @property
    def modes(self) -> tuple[Literal["sampled", "greedy"], ...]:
        """The passes of a validation."""
        if self.do_sample is None and self.temperature is None:
            return ("sampled", "greedy")
        return ("sampled",) if (self.temperature if self.do_sample is None else self.do_sample) else ("greedy",)

    def answers(self, mode: str) -> int:
        """Of each question in a pass."""
        return 1 if mode == "greedy" and len(self.modes) == 2 else self.n

    def tag(self, mode: str) -> dict[str, float | bool]:
        """What the pass changes in the sampling of training (agent_loop.session.session_sampling)."""
        if mode == "greedy":
            return {"temperature": 0.0, "greedy": True}
        chosen = {"temperature": 1.0 if self.temperature is None else self.temperature, "greedy": False}
        cuts = {"top_p": self.top_p, "top_k": self.top_k}
        return chosen | {key: value for key, value in cuts.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurnConfig:
    """Budgets of a trajectory."""

    max_assistant_turns: PositiveInt | None = None
    """None: only the token budget bounds them."""
    max_parallel_calls: PositiveInt = 1
    """Tool calls of one turn that run at the same time; further ones are answered with an error text."""
    max_tool_response_length: PositiveInt = 256
    """Characters of one tool answer."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Which part of a longer answer is cut out."""
    format: Literal["hermes"] = "hermes"
    tool_timeout: PositiveFloat = 10.0
    """Seconds of one tool call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    num_workers: PositiveInt = 2
    default_agent_loop: str = "single_turn_agent"
    """A registered name or `path/to/file.py:Class`; a row's `agent_name` goes first."""
    max_sessions: PositiveInt = 64
    """Sessions that one worker runs at the same time."""
    session_timeout: PositiveFloat = 600.0
    """Seconds after which a session that has not ended is closed as failed, and its slot is free again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """The server without a model: `max_num_seqs` slots and distributions."""

    clock: Literal["real", "virtual"] = "real"
    """virtual: nothing takes real time; needs runtime=local and a simulated actor."""
    vocab_size: Annotated[int, Meta(ge=2)] = 320
    response_tokens_mean: PositiveFloat = 64.0
    """Lengths and times are log-normal around these means; sigma 0 is a constant."""
    response_tokens_sigma: NonNegativeFloat = 0.5
    long_share: Fraction = 0.0
    """Share of the responses that are `long_times` as long as the others, with the same mean over all."""
    long_times: PositiveFloat = 1.0
    token_seconds: NonNegativeFloat = 0.01
    """Time between two tokens of one request."""
    token_sigma: NonNegativeFloat = 0.0
    prefill_seconds: NonNegativeFloat = 0.0
    update_seconds: NonNegativeFloat = 0.0
    """How long a weight update stands generation still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKwargsConfig:
    """What an engine takes beyond the keys here, under its own names."""

    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's AsyncEngineArgs, e.g. {dtype: bfloat16, kv_cache_memory_bytes: 1073741824}. dtype is float32
    unless it is given; the KV cache on a CPU has 256 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig:
    """SGLang runs in an environment of its own: `python` starts one server per replica, `url` uses one that runs."""

    python: str | None = None
    """The interpreter of that environment."""
    url: str | None = None
    """Of a server that runs already, serves nobody else, and sees the weight files; then num_replicas is 1."""
    key_env: str | None = None
    """The environment variable with the key of the server at `url`."""
    key_file: str | None = None
    """The same from a file that only its owner can read."""
    deterministic: bool | None = None
    """--enable-deterministic-inference: SGLang takes the seeds of requests only then. None: on CUDA."""
    release_memory: bool | None = None
    """Whether the cache's memory is given up while training has the devices. None: on CUDA."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments by their names in SGLang's command line, e.g. {mem_fraction_static: 0.6}; true is a flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncConfig:
    """How new weights travel from the training ranks to the servers (docs/rollout.md)."""

    backend: Literal["auto", "shm", "disk", "delta", "collective"] = "auto"
    """shm: a file in shared memory, of which every rank writes its rows. disk: the same in a directory that all nodes
    share. delta: there, and only what has changed. collective: broadcasts, by gloo or NCCL. auto: shm on one node; on
    several collective with rollout.name=torch, unless `path` is given, else disk."""
    path: str | None = None
    """The directory of disk and delta, in which each run has its own; null: weights/ in the run's directory, which all
    nodes share anyway."""
    dtype: Literal["bfloat16", "float16"] | None = None
    """The type in which weights travel, and to which they are rounded; null: as they are trained (float32). In bfloat16
    they are half the bytes, and few of them change in a step, which is what delta needs; log-probs of the servers are
    then those of the rounded weights."""
    keep: Annotated[int, Meta(ge=2)] = 2
    """Versions that stay there, at least."""
    full_every: PositiveInt = 16
    """delta: of so many versions one is written whole."""
    bucket_megabytes: PositiveInt = 256
    """collective: of one operation."""
    order: Literal["together", "rolling"] = "together"
    """rolling: servers take a version one after the other, so that never more than one stands still."""
    requests: Literal["keep", "abort"] = "keep"
    """What becomes of requests in flight. keep: they go on with the new weights, and each token says its version.
    abort: they end with the tokens they have, and go on as new requests, whose cache is of the new weights alone."""
    timeout: PositiveFloat = 120.0
    """Seconds for a server to load a version aside, and again to take it. One that needs longer is out of service until
    it has the current weights; where all do, the version is not published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    name: Literal["torch", "vllm", "sglang", "sim"] = "torch"
    """torch: the embedded engine; vllm: vLLM, which is installed separately (make vllm, or streamrl[vllm]); sglang:
    SGLang, in an environment of its own."""
    server: str | None = None
    """A kind of server of your own in place of `name`: `path/to/file.py:function`, called with a RolloutServerConfig
    and the run's events (docs/rollout.md#another-kind-of-server)."""
    num_replicas: PositiveInt = 1
    """LLM servers."""
    start_timeout: PositiveFloat = 180.0
    """Seconds for one to start: libraries, the model, compilation. Large models need more."""
    n: GroupSize = 8
    """Samples per prompt."""
    temperature: Temperature = 1.0
    top_p: OpenFraction = 1.0
    top_k: TopK = -1
    max_num_seqs: Slots = 256
    """Slots of one server: requests that decode together."""
    max_model_len: PositiveInt | None = None
    """Context of one server in tokens; None: max_prompt_length + max_response_length."""
    seed: Seed | None = None
    """None: trainer.seed."""
    tensor_model_parallel_size: PositiveInt = 1
    """vllm, and sglang too, as the next: the devices over which one server spreads each layer."""
    data_parallel_size: PositiveInt = 1
    """Copies of the model inside one server."""
    gpu_memory_utilization: OpenFraction | None = None
    """vllm alone, as the next two: share of the device's memory, on a CPU of the machine's. None: vLLM's own, on a CPU
    0.1."""
    enforce_eager: bool | None = None
    """No compilation, no CUDA graphs. None: on a CPU."""
    sleep_level: Literal[1, 2] | None = None
    """vllm on CUDA alone, in trainer_mode=colocate_async: while training has the devices, 1 moves the weights to the
    host's memory and gives the cache up, 2 gives up both. None: vLLM keeps all it has."""
    engine_kwargs: EngineKwargsConfig = field(default_factory=EngineKwargsConfig)
    sglang: SglangConfig = field(default_factory=SglangConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    tools: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    """Tools that agents may call: name -> keyword arguments, e.g. {"calculator": {"latency_mean": 0.3}}."""
    val_kwargs: ValidationSamplingConfig = field(default_factory=ValidationSamplingConfig)
    sim: SimConfig = field(default_factory=SimConfig)

    @property
    def is_virtual(self) -> bool:
        """Whether the run needs no real time at all."""
        return self.name == "sim" and self.sim.clock == "virtual"
