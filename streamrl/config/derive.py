"""Fills the keys whose default is "derived", and makes paths absolute. The result is what `--dry-run` prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agent_loop.plugins import PluginError
from streamrl.algorithms.advantages import estimator
from streamrl.config import data_files
from streamrl.config.paths import find, split_file_object
from streamrl.config.root import ActorRolloutRefConfig, StreamRLConfig
from streamrl.config.sections.actor import ActorConfig, CriticConfig, ModelConfig, RefConfig
from streamrl.config.sections.algorithm import AlgorithmConfig, DistillationConfig, RewardConfig
from streamrl.config.sections.data import DataConfig
from streamrl.config.sections.rollout import RolloutConfig, WeightSyncConfig
from streamrl.config.sections.services import TransferQueueConfig
from streamrl.config.sections.trainer import SamplerConfig, TrainerConfig


def estimator_needs(algorithm: AlgorithmConfig) -> frozenset[str]:
    """What the advantage estimator needs; nothing where there is no such one, which the checks report."""
    try:
        return estimator(algorithm.adv_estimator).needs
    except PluginError:
        return frozenset()


def derive(config: StreamRLConfig) -> StreamRLConfig:
    """A path that names nothing stays as it was given; `streamrl.config.checks` reports it."""
    seed = config.trainer.seed
    parts = config.actor_rollout_ref
    return replace(
        config,
        data=_data(config.data, seed),
        actor_rollout_ref=ActorRolloutRefConfig(
            model=_model(parts.model),
            actor=_actor(parts.actor, config.data),
            ref=_ref(parts.ref, parts.actor),
            rollout=_rollout(parts.rollout, config.data, seed, nodes=config.trainer.nnodes),
        ),
        critic=_critic(config.critic, config),
        algorithm=_algorithm(config.algorithm, config.trainer),
        reward=_reward(config.reward),
        distillation=_distillation(config.distillation, parts.actor, replayed=config.trainer.replay is not None),
        trainer=_trainer(config.trainer, parts.rollout.num_replicas),
        transfer_queue=_queue(config.transfer_queue),
    )


def _data(data: DataConfig, seed: int) -> DataConfig:
    return replace(
        data,
        train_files=tuple(map(data_files.absolute, data.train_files)),
        val_files=tuple(map(data_files.absolute, data.val_files)),
        custom_cls=replace(data.custom_cls, path=_existing(data.custom_cls.path) if data.custom_cls.path else None),
        seed=seed if data.seed is None else data.seed,
    )


def _model(model: ModelConfig) -> ModelConfig:
    path = _existing(model.path)
    return replace(model, path=path, tokenizer_path=_existing(model.tokenizer_path) if model.tokenizer_path else path)


def _actor(actor: ActorConfig, data: DataConfig) -> ActorConfig:
    return replace(
        actor,
        strategy="fsdp2" if actor.strategy == "fsdp" else actor.strategy,
        policy_loss=replace(actor.policy_loss, loss_mode=_code(actor.policy_loss.loss_mode)),
        clip_ratio_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        loss_scale_factor=actor.loss_scale_factor or float(data.max_response_length),
    )


def _ref(ref: RefConfig, actor: ActorConfig) -> RefConfig:
    return replace(
        ref,
        log_prob_max_token_len_per_gpu=ref.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
        log_prob_micro_batch_size_per_gpu=ref.log_prob_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu,
        log_prob_use_dynamic_bsz=(
            actor.use_dynamic_bsz if ref.log_prob_use_dynamic_bsz is None else ref.log_prob_use_dynamic_bsz
        ),
    )


def _critic(critic: CriticConfig, config: StreamRLConfig) -> CriticConfig:
    actor, path = config.actor_rollout_ref.actor, critic.model.path or config.actor_rollout_ref.model.path
    return replace(
        critic,
        enable="values" in estimator_needs(config.algorithm) if critic.enable is None else critic.enable,
        strategy="fsdp2" if critic.strategy == "fsdp" else critic.strategy,
        model=replace(critic.model, path=_existing(path)),
        ppo_mini_batch_size=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        ppo_epochs=critic.ppo_epochs or actor.ppo_epochs,
        loss_scale_factor=critic.loss_scale_factor or float(config.data.max_response_length),
    )


def _rollout(rollout: RolloutConfig, data: DataConfig, seed: int, *, nodes: int) -> RolloutConfig:
    turns = rollout.multi_turn.max_assistant_turns or data.max_response_length  # a turn takes a token at least
    return replace(
        rollout,
        seed=seed if rollout.seed is None else rollout.seed,
        max_model_len=rollout.max_model_len or data.max_prompt_length + data.max_response_length,
        weight_sync=_weight_sync(rollout, nodes),
        multi_turn=replace(rollout.multi_turn, max_assistant_turns=turns),
        agent=replace(rollout.agent, default_agent_loop=_code(rollout.agent.default_agent_loop)),
        tools={_code(name): settings for name, settings in rollout.tools.items()},
    )


def _weight_sync(rollout: RolloutConfig, nodes: int) -> WeightSyncConfig:
    sync = rollout.weight_sync
    beyond = "collective" if sync.path is None and rollout.name in ("torch", "sim") and not rollout.server else "disk"
    backend = sync.backend if sync.backend != "auto" else "shm" if nodes == 1 and sync.path is None else beyond
    return replace(sync, backend=backend, path=_absolute(sync.path))


def _algorithm(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> AlgorithmConfig:
    correction = algorithm.rollout_correction
    bypass = correction.bypass_mode
    if bypass is None:
        bypass = correction.pi_old == "bypass" if correction.pi_old else trainer.v1.trainer_mode != "sync"
    return replace(
        algorithm,
        adv_estimator=_code(algorithm.adv_estimator),
        rollout_correction=replace(correction, bypass_mode=bypass),
    )


def _distillation(distillation: DistillationConfig, actor: ActorConfig, *, replayed: bool) -> DistillationConfig:
    """A replay has no servers, and what was recorded no teacher's log-probs: then the ranks compute them."""
    teacher = distillation.teacher_model
    if replayed:
        teacher = replace(teacher, placement="ranks", num_replicas=1)
    return replace(
        distillation,
        teacher_model=replace(
            teacher,
            path=_existing(teacher.path) if teacher.path else None,
            max_token_len_per_gpu=teacher.max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
        ),
    )


def _reward(reward: RewardConfig) -> RewardConfig:
    custom = reward.custom_reward_function
    path = _existing(custom.path) if custom.path else None
    model = reward.reward_model
    scorer = replace(model, model_path=_existing(model.model_path) if model.model_path else None)
    return replace(reward, custom_reward_function=replace(custom, path=path), reward_model=scorer)


def _trainer(trainer: TrainerConfig, servers: int) -> TrainerConfig:
    separate = trainer.v1.separate_async
    weights = separate.validation_weights or ("pin" if servers > separate.validation_servers else "mixed")
    return replace(
        trainer,
        runs_dir=str(Path(trainer.runs_dir).expanduser().absolute()),
        resume_from_path=_existing(trainer.resume_from_path) if trainer.resume_from_path else None,
        replay=_existing(trainer.replay) if trainer.replay else None,
        v1=replace(
            trainer.v1,
            sampler=_sampler(trainer.v1.sampler),
            separate_async=replace(separate, validation_weights=weights),
        ),
        rollout_data_dir=None if trainer.replay else _absolute(trainer.rollout_data_dir),  # recorded rows have no texts
        validation_data_dir=_absolute(trainer.validation_data_dir),
        val_before_train=trainer.val_before_train and not trainer.replay,
        test_freq=-1 if trainer.replay else trainer.test_freq,
        logger=tuple(map(_code, trainer.logger)),
    )


def _sampler(sampler: SamplerConfig) -> SamplerConfig:
    custom = sampler.custom_sampler
    return replace(sampler, custom_sampler=replace(custom, path=_existing(custom.path) if custom.path else None))


def _queue(queue: TransferQueueConfig) -> TransferQueueConfig:
    return replace(
        queue,
        storage_dir=_existing(queue.storage_dir) if queue.storage_dir else None,
        spill_dir=_existing(queue.spill_dir) if queue.spill_dir else None,
    )


def _code(name: str) -> str:
    """A registered name as it is; of `path.py:Name` the path absolute."""
    custom = split_file_object(name)
    return f"{_existing(custom[0])}:{custom[1]}" if custom else name


def _absolute(path: str | None) -> str | None:
    return str(Path(path).expanduser().absolute()) if path else None


def _existing(path: str) -> str:
    found = find(path) if path else None
    return path if found is None else str(found)
