"""From a server's config to SGLang's own arguments and environment. SGLang is never imported: it has an environment of
its own, because its pins and vLLM's exclude each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_loop.llm.protocol import SamplingParams
from streamrl.rollout.sglang.request import cuts

if TYPE_CHECKING:
    from streamrl.rollout.server_config import RolloutServerConfig

OURS = (
    "model_path", "model", "host", "port", "api_key", "admin_api_key", "weight_version", "max_running_requests",
    "context_length", "random_seed", "tp_size", "tensor_parallel_size", "dp_size", "data_parallel_size",
    "skip_tokenizer_init", "incremental_streaming_output", "enable_deterministic_inference", "enable_memory_saver",
    "device", "skip_server_warmup",
)  # fmt: skip
"""Arguments that `engine_kwargs` may not give: they have a key of their own, or the protocol rests on them."""


CONTEXT_MARGIN = 8
"""SGLang cuts max_new_tokens silently where prompt and response come within a few tokens of its context length."""


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """Of one server: `python` starts one, `url` uses one that runs."""

    python: str | None = None
    """The interpreter of SGLang's own environment."""
    url: str | None = None
    """Of a server that runs already, on this machine or one that sees the same weight files, and serves nobody else.
    Start it with --skip-tokenizer-init and --incremental-streaming-output; the model's own end token ends a request
    there, too."""
    key_env: str | None = None
    """The environment variable with the key of the server at `url`."""
    key_file: str | None = None
    """The same from a file that only its owner can read."""
    tensor_model_parallel_size: int = 1
    data_parallel_size: int = 1
    deterministic: bool | None = None
    """--enable-deterministic-inference: SGLang takes the seeds of requests only then. None: on CUDA; what SGLang can do
    attention with on a CPU does not allow it."""
    release_memory: bool | None = None
    """Whether sleep gives up the cache's memory (--enable-memory-saver); None: on CUDA."""
    start_seconds: float = 170.0
    """For a server to start; below the deadline of the actor that holds it (RolloutServerConfig.start_timeout)."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments by their names in SGLang's command line, e.g. {"mem_fraction_static": 0.6}; True is a flag."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the process."""

    @classmethod
    def of(cls, given: SglangOptions | Mapping[str, Any] | None) -> SglangOptions:
        """Raises ValueError unless exactly one of `python` and `url` is there."""
        options = given if isinstance(given, SglangOptions) else cls(**(given or {}))
        if (options.python is None) == (options.url is None):
            raise ValueError(
                "rollout.name=sglang needs rollout.sglang.python, the interpreter of SGLang's own environment, or "
                "rollout.sglang.url, a server that runs already; one of them"
            )
        return options

    @property
    def devices(self) -> int:
        """GPUs that one server takes here; one at `url` has its own."""
        return 0 if self.url else self.tensor_model_parallel_size * self.data_parallel_size

    def releases(self, config: RolloutServerConfig) -> bool:
        return config.device.startswith("cuda") if self.release_memory is None else self.release_memory

    def takes_seeds(self, config: RolloutServerConfig) -> bool:
        return config.device.startswith("cuda") if self.deterministic is None else self.deterministic


SUPPORT = "sampling_mask_max_tokens"
"""Of SGLang's arguments: of how many tokens that top-k and top-p have left it tells log-probs at most."""
SUPPORT_DEFAULT = 4096
"""SGLang's own."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """What a server can say of requests that top-p or top-k cut."""

    limit: int
    """Tokens that are left, at most; 0: it is older than that, and says what log-probs were before."""
    vocab_size: int

    @classmethod
    def of(cls, info: Mapping[str, Any], vocab_size: int) -> Cuts:
        """`info`: what the server says of itself."""
        return cls(int(info.get(SUPPORT) or 0), vocab_size)

    @property
    def support(self) -> int:
        """top_k of a request that names none: all tokens, or half the limit, so that ties at its edge fit."""
        return self.vocab_size if self.vocab_size <= self.limit else self.limit // 2

    def check(self, sampling: SamplingParams) -> None:
        """Raises ValueError for one whose log-probs could not be told."""
        if not cuts(sampling):
            return
        asked = f"top_p={sampling.top_p:g}, top_k={sampling.top_k}"
        if not self.limit:
            raise ValueError(
                f"{asked}: this SGLang tells no log-probs after the cuts (it has no {SUPPORT}; 0.5.23 has it); sample "
                "with top_p=1 and top_k=-1, or take a newer one"
            )
        if min(sampling.top_k, self.vocab_size) > self.limit:
            raise ValueError(
                f"{asked}: this SGLang tells log-probs after the cuts for top_k up to {self.limit}; lower it, or raise "
                f"rollout.sglang.engine_kwargs.{SUPPORT}"
            )


def check_engine_kwargs(given: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that are not the user's to give. Which others there are, SGLang says."""
    taken = [name for name in given if name.replace("-", "_") in OURS]
    if taken:
        raise ValueError(f"rollout.sglang.engine_kwargs.{taken[0]} is set by this package")


def arguments(config: RolloutServerConfig, options: SglangOptions, *, port: int, key: str) -> list[str]:
    """What follows `python -m sglang.launch_server`. Raises ValueError for what is not there, or not ours to change."""
    if config.invariant:
        raise ValueError("SGLang's samples depend on the batch; a deterministic run takes rollout.name=torch or sim")
    if not (Path(config.model_path) / "config.json").is_file():
        raise ValueError(f"model path {config.model_path!r} has no config.json; name a directory with model and config")
    check_engine_kwargs(options.engine_kwargs)
    chosen: dict[str, Any] = {
        "model_path": os.path.abspath(config.model_path),
        "host": "127.0.0.1",
        "port": port,
        "api_key": key,
        "weight_version": "0",
        "device": config.device.split(":")[0],
        "dtype": config.dtype,
        "max_running_requests": config.max_num_seqs,
        "context_length": config.max_model_len + CONTEXT_MARGIN,
        "random_seed": config.seed % (1 << 31),
        "tp_size": options.tensor_model_parallel_size,
        "dp_size": options.data_parallel_size,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "incremental_streaming_output": True,
        "enable_deterministic_inference": options.takes_seeds(config),
        "enable_memory_saver": options.releases(config),
        "disable_overlap_schedule": True,  # else the tokens under way at a swap are stamped with the new version
        "log_level": "warning",
        **options.engine_kwargs,
    }
    given: list[str] = []
    for name, value in chosen.items():
        if value is False or value is None:
            continue
        given.append("--" + name.replace("_", "-"))
        if value is not True:
            given += [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]
    return given


def environment(config: RolloutServerConfig, options: SglangOptions) -> dict[str, str]:
    """Of the process. Nothing of our own Python's paths: it is another one's."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    set_here = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the margin, which no request reaches
    }
    if config.device == "cpu":
        set_here |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return inherited | set_here | dict(options.env)
