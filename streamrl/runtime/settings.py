"""From the one configuration to what each component is told. Pure; nothing starts here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_loop.llm.protocol import SamplingParams
from agent_loop.llm.remote_model import RemoteModel
from agent_loop.loop import Budgets
from agent_loop.worker import WorkerConfig
from streamrl.config import StreamRLConfig
from streamrl.config.sections.algorithm import RemoteModelConfig
from streamrl.recording.record import DIRECTORY
from streamrl.runtime.run_dir import LOGS, RunDirectory
from streamrl.single_controller import ClassWithInitArgs, ResourcePoolManager, Role
from streamrl.weight_sync.leftovers import PREFIX

if TYPE_CHECKING:
    from streamrl.rollout.manager import SyncPolicy
    from streamrl.rollout.server_config import RolloutServerConfig

SGLANG_MARGIN = 0.95
"""Of the time that a server has to start: SGLang's own start ends before, and says why."""

SHARED = Path("/dev/shm")


def weights_dir(run: RunDirectory) -> Path:
    """Where weight versions pass from the trainer to the servers: in shared memory, named after the run."""
    root = SHARED if SHARED.is_dir() else run.path
    return root / f"{PREFIX}{run.path.name}-{run.path.stat().st_ino}"


def sync_dir(config: StreamRLConfig, run: RunDirectory) -> Path:
    """The directory of weight versions: `weights_dir`, unless they go by a disk."""
    sync = config.actor_rollout_ref.rollout.weight_sync
    if sync.backend not in ("disk", "delta"):
        return weights_dir(run)
    return Path(sync.path, run.path.name) if sync.path else run.path / "weights"


def sync_policy(config: StreamRLConfig) -> SyncPolicy:
    from streamrl.rollout.manager import SyncPolicy

    sync = config.actor_rollout_ref.rollout.weight_sync
    return SyncPolicy(sync.order, sync.requests, sync.timeout)


def resource_pools(config: StreamRLConfig) -> ResourcePoolManager:
    """Actor, reference and critic share the processes of one pool."""
    trainer = config.trainer
    mapping = {Role.ActorRolloutRef: "global_pool"} | ({Role.Critic: "global_pool"} if config.critic.enable else {})
    spec = {"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes}
    return ResourcePoolManager(spec, mapping, device=trainer.device)


def rank_workers(config: StreamRLConfig, run: RunDirectory, queues: Mapping[str, Any]) -> dict[str, ClassWithInitArgs]:
    """What each training rank holds, by role. `queues`: what the worker of a role reads its rows from."""
    from streamrl.workers.actor import ActorWorker
    from streamrl.workers.critic import CriticWorker
    from streamrl.workers.settings import ActorSettings, CriticSettings
    from streamrl.workers.training_worker import Profile

    chosen = config.global_profiler
    directory = chosen.save_path or str(run.path / "profile")
    profile = Profile(frozenset(chosen.steps), directory) if chosen.tool else None
    actor = ClassWithInitArgs(
        ActorWorker, ActorSettings.of(config), queue=queues["actor"], weights_dir=str(sync_dir(config, run)),
        record_dir=str(run.path / DIRECTORY) if config.trainer.record else "", profile=profile,
    )  # fmt: skip
    if not config.critic.enable:
        return {"actor": actor}
    critic = ClassWithInitArgs(CriticWorker, CriticSettings.of(config), queues["critic"], profile)
    return {"actor": actor, "critic": critic}


def agent_worker(config: StreamRLConfig, *, virtual_clock: bool = False) -> WorkerConfig:
    rollout, data, reward = config.actor_rollout_ref.rollout, config.data, config.reward
    function = reward.custom_reward_function
    turns = rollout.multi_turn
    return WorkerConfig(
        model_path=config.actor_rollout_ref.model.tokenizer_path or config.actor_rollout_ref.model.path,
        template_kwargs=data.apply_chat_template_kwargs,
        vocab_size=_vocab_size(config),
        max_sessions=rollout.agent.max_sessions,
        session_timeout=rollout.agent.session_timeout,
        default_agent_loop=rollout.agent.default_agent_loop,
        tools=rollout.tools,
        reward=reward.function,
        scored_later=reward.reward_model.enable,
        reward_kwargs=function.reward_kwargs,
        reward_timeout=reward.timeout,
        reward_threads=not virtual_clock,
        judge=judge(config),
        teacher=remote_teacher(config),
        reward_components=config.algorithm.gdpo_reward_keys,
        sampling=SamplingParams(1, rollout.temperature, rollout.top_p, rollout.top_k),
        budgets=Budgets(
            response_length=data.max_response_length,
            max_turns=turns.max_assistant_turns,
            max_tool_response_length=turns.max_tool_response_length,
            tool_response_truncate_side=turns.tool_response_truncate_side,
            max_parallel_calls=turns.max_parallel_calls,
            tool_timeout=turns.tool_timeout,
        ),
        seed=config.trainer.seed if rollout.seed is None else rollout.seed,
    )


def _vocab_size(config: StreamRLConfig) -> int | None:
    """As the model's own config says it; simulated servers may speak another one."""
    if config.actor_rollout_ref.rollout.name == "sim":
        return None
    try:
        told = json.loads(Path(config.actor_rollout_ref.model.path, "config.json").read_text())
        return int((told.get("text_config") or told)["vocab_size"])
    except (OSError, KeyError, ValueError):  # whoever loads the model says what is wrong with it
        return None


def rollout_server(config: StreamRLConfig, run: RunDirectory, replica: int) -> RolloutServerConfig:
    from streamrl.rollout.server_config import RolloutServerConfig

    rollout, data = config.actor_rollout_ref.rollout, config.data
    seed = config.trainer.seed if rollout.seed is None else rollout.seed
    return RolloutServerConfig(
        name=rollout.server or rollout.name,
        model_path=config.actor_rollout_ref.model.path,
        weights_dir=str(sync_dir(config, run)),
        awaits_weights=rollout.weight_sync.backend == "collective",
        max_num_seqs=rollout.max_num_seqs,
        max_model_len=rollout.max_model_len or data.max_prompt_length + data.max_response_length,
        device=config.trainer.device,
        seed=seed + replica,
        sim=rollout.sim,
        vllm={
            "tensor_model_parallel_size": rollout.tensor_model_parallel_size,
            "data_parallel_size": rollout.data_parallel_size,
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "enforce_eager": rollout.enforce_eager,
            "sleep_level": rollout.sleep_level,
            "engine_kwargs": rollout.engine_kwargs.vllm,
        },
        sglang=asdict(rollout.sglang)
        | {
            "tensor_model_parallel_size": rollout.tensor_model_parallel_size,
            "data_parallel_size": rollout.data_parallel_size,
            "start_seconds": rollout.start_timeout * SGLANG_MARGIN,
        },
        server=f"server-{replica}",
        events_dir=str(run.path / "events"),
        log_dir=str(run.path / LOGS),
        start_timeout=rollout.start_timeout,
        update_timeout=rollout.weight_sync.timeout,
        invariant=config.trainer.deterministic,
    )


def judge(config: StreamRLConfig) -> RemoteModel | None:
    """Of the reward, if it has one."""
    return _remote_model(config.reward.judge) if config.reward.judge.given else None


def remote_teacher(config: StreamRLConfig) -> RemoteModel | None:
    """The one that somebody else serves, if that is the teacher."""
    teacher = config.distillation.teacher_model
    return _remote_model(teacher.remote) if config.distillation.on_servers and teacher.name == "openai" else None


def _remote_model(chosen: RemoteModelConfig) -> RemoteModel:
    url, model = chosen.base_url or "", chosen.model or ""  # checked with the configuration
    return RemoteModel(url, model, chosen.key_env, chosen.key_file, chosen.concurrency, chosen.timeout)


def teacher_servers(config: StreamRLConfig, run: RunDirectory) -> dict[str, RolloutServerConfig]:
    """By name; none where the ranks hold the teacher, or there is none. They serve their model as it is saved."""
    from streamrl.rollout.server_config import RolloutServerConfig

    rollout, teacher = config.actor_rollout_ref.rollout, config.distillation.teacher_model
    if not config.distillation.on_servers or teacher.name == "openai":
        return {}
    served = RolloutServerConfig(
        name=teacher.name,
        model_path=teacher.path or "",
        max_num_seqs=rollout.max_num_seqs if teacher.name == "sim" else 1,  # torch: slots, whose cache nobody needs
        max_model_len=rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length,
        max_score_tokens=teacher.max_token_len_per_gpu or config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu,
        device=config.trainer.device,
        sim=rollout.sim,
        events_dir=str(run.path / "events"),
        log_dir=str(run.path / LOGS),
        start_timeout=rollout.start_timeout,
    )
    names = [f"teacher-{i}" for i in range(teacher.num_replicas)]
    return {name: replace(served, server=name) for name in names}
