"""What a run needs of this machine, looked at before anything starts: CPUs, memory, room for the queue's rows."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from agent_loop.llm.keys import ApiKey, KeyMissing
from streamrl.config import StreamRLConfig
from streamrl.errors import UserError
from streamrl.monitor.trackers import missing
from streamrl.rollout.vllm import options as vllm_options
from streamrl.runtime.settings import judge, remote_teacher
from transfer_queue.errors import Invalid
from transfer_queue.storage.place import choose_storage

TEACHER = "distillation.teacher_model.remote"
GIB = 1 << 30
COMPUTE_BYTES = int(0.5 * GIB)
"""A process that imports torch, before its model: 0.4 to 0.5 GiB measured."""
SERVICE_BYTES = int(0.12 * GIB)
"""A process that does not."""
VLLM_BYTES = int(1.0 * GIB)
"""What an LLM server of vLLM takes beyond that: the engine's process beside the server's, its KV cache on a CPU."""
RAY_BYTES = int(0.7 * GIB)
"""Ray's own processes."""
TRAINING_COPIES = 4
"""Weights, gradients and two moments, in float32."""


def check_machine(config: StreamRLConfig) -> None:
    """Raise UserError, saying what is needed, what there is and which key to change."""
    for problem in not_installed(config):
        raise UserError(problem)
    _check_storage(config)
    if config.runtime == "local" or os.environ.get("RAY_ADDRESS"):
        return  # one process; or a cluster, whose nodes Ray and the placement know
    _check_gpus(config)
    _check_cpus(config)
    _check_memory(config)


def not_installed(config: StreamRLConfig) -> Iterator[str]:
    """What the configuration asks for and this machine lacks: a run is refused, a dry run tells."""
    if absent := missing(config.trainer.logger):
        yield (
            f"trainer.logger: {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed; "
            f"pip install {' '.join(absent)} (or streamrl[{','.join(absent)}]), or leave it out"
        )
    if config.actor_rollout_ref.rollout.name == "vllm" and not vllm_options.installed():
        yield f"actor_rollout_ref.{vllm_options.NOT_INSTALLED}"
    for key, remote in (("reward.judge", judge(config)), (TEACHER, remote_teacher(config))):
        try:
            if remote is not None:
                ApiKey.find(env=remote.key_env, file=remote.key_file)
        except KeyMissing as error:
            yield f"{key}: {error}"


async def check_remote_teacher(config: StreamRLConfig) -> None:
    """That the teacher which somebody else serves answers, and can score. Raises UserError."""
    if (remote := remote_teacher(config)) is None:
        return
    from agent_loop.llm.remote_teacher import check_teacher

    try:
        await check_teacher(remote)
    except ValueError as error:
        raise UserError(f"{TEACHER}: {error}") from error


def _check_gpus(config: StreamRLConfig) -> None:
    needed, there = config.trainer.n_gpus_per_node, len(glob.glob("/dev/nvidia[0-9]*"))
    if config.trainer.device == "cuda" and needed > there:
        raise UserError(
            f"trainer.device=cuda: trainer.n_gpus_per_node={needed} GPUs are needed, this machine has {there}; set "
            "trainer.device=cpu, or fewer ranks"
        )


def _check_cpus(config: StreamRLConfig) -> None:
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    cpus = config.ray_kwargs.ray_init.num_cpus or len(os.sched_getaffinity(0))
    if ranks > cpus:
        raise UserError(
            f"{ranks} training ranks (trainer.n_gpus_per_node) need {ranks} CPUs, this machine has {cpus}; "
            "start fewer, or tell Ray of more logical ones (ray_kwargs.ray_init.num_cpus)"
        )


def _check_memory(config: StreamRLConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    model = _model_bytes(config.actor_rollout_ref.model.path)
    chosen = config.distillation.teacher_model
    teachers = chosen.num_replicas if config.distillation.on_servers and chosen.name != "openai" else 0
    scorer = config.reward.reward_model
    services = 4 + rollout.agent.num_workers + 2 * config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    needed = (
        RAY_BYTES
        + services * SERVICE_BYTES
        + ranks * COMPUTE_BYTES
        + TRAINING_COPIES * model
        + (_model_bytes(scorer.model_path or "") if scorer.enable else 0)
        + rollout.num_replicas * (COMPUTE_BYTES + model + (VLLM_BYTES if rollout.name == "vllm" else 0))
        + teachers * (COMPUTE_BYTES + _model_bytes(chosen.path or ""))
    )
    free = psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"{ranks} training ranks and {rollout.num_replicas + teachers} LLM servers need about {needed / GIB:.1f} "
            f"GiB of memory, {free / GIB:.1f} GiB are free; lower trainer.n_gpus_per_node or rollout.num_replicas"
        )


def _check_storage(config: StreamRLConfig) -> None:
    queue = config.transfer_queue
    try:
        choose_storage(queue.storage_dir, queue.backend.SimpleStorage.num_data_storage_units, queue.unit_budget_bytes)
    except (Invalid, OSError) as error:
        raise UserError(f"{error} (transfer_queue.unit_budget_bytes, transfer_queue.storage_dir)") from error


def _model_bytes(path: str) -> int:
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
