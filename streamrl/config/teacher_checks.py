"""`distillation.*`: a teacher must speak the policy's tokens, and have servers that can be started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from streamrl.config.remote_checks import remote_model
from streamrl.config.root import StreamRLConfig
from streamrl.config.tokenizer_checks import json_object, same_tokens

TEACHER = "distillation.teacher_model"


def teacher(config: StreamRLConfig) -> Iterator[str]:
    chosen, key = config.distillation.teacher_model, f"{TEACHER}.path"
    if not config.distillation.enabled:
        return
    if chosen.name == "openai" and not config.trainer.replay:
        yield from _remote(config)
        return
    if chosen.remote.given and not config.trainer.replay:
        yield f"{TEACHER}.remote is for {TEACHER}.name=openai, not for name={chosen.name}"
    if chosen.placement == "ranks" and chosen.num_replicas > 1:
        yield f"{TEACHER}.num_replicas={chosen.num_replicas} needs {TEACHER}.placement=servers; the ranks hold one"
    if chosen.placement == "ranks" and config.actor_rollout_ref.actor.strategy == "sim":
        yield f"actor_rollout_ref.actor.strategy=sim holds no teacher; set {TEACHER}.placement=servers"
    if chosen.path is None or not Path(chosen.path, "config.json").is_file():
        yield f"{key}={chosen.path or 'null'}: distillation.enabled=true needs the directory of a model (config.json)"
        return
    try:
        paths = (chosen.path, config.actor_rollout_ref.model.path)
        own, policy = (json_object(Path(path, "config.json")) for path in paths)
    except (OSError, ValueError):
        return  # the policy's model is reported elsewhere
    sizes = own.get("vocab_size"), policy.get("vocab_size")
    if None not in sizes and sizes[0] != sizes[1]:
        yield f"{key}: the teacher's vocabulary has {sizes[0]} tokens, the policy's {sizes[1]}; they must be the same"
        return
    yield from same_tokens(key, "teacher", Path(chosen.path), _policy(config))
    limit, asked = own.get("max_position_embeddings"), config.actor_rollout_ref.rollout.max_model_len
    if isinstance(limit, int) and asked is not None and asked > limit:
        yield (
            f"{key}: the teacher knows {limit} positions (max_position_embeddings), rows have up to {asked} "
            "(actor_rollout_ref.rollout.max_model_len); lower that, or take another teacher"
        )


def _remote(config: StreamRLConfig) -> Iterator[str]:
    chosen, rollout = config.distillation.teacher_model, config.actor_rollout_ref.rollout
    if chosen.placement != "servers":
        yield f"{TEACHER}.name=openai: the training ranks cannot hold it; set {TEACHER}.placement=servers"
    if chosen.num_replicas != 1:
        yield f"{TEACHER}.num_replicas={chosen.num_replicas}: a remote model is one, whoever serves it"
    if rollout.temperature != 1.0:
        yield (
            f"actor_rollout_ref.rollout.temperature={rollout.temperature:g}: a remote teacher ({TEACHER}.name=openai) "
            "tells log-probs at temperature 1 alone; sample at 1, or take a teacher with name=torch"
        )
    yield from remote_model(f"{TEACHER}.remote", chosen.remote, config)
    if chosen.path is not None:
        yield from same_tokens(f"{TEACHER}.path", "teacher", Path(chosen.path), _policy(config))


def _policy(config: StreamRLConfig) -> Path:
    """With its tokenizer."""
    return Path(config.actor_rollout_ref.model.tokenizer_path or "")
