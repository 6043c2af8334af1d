"""`distillation.*`: a teacher must speak the policy's tokens, and have servers that can be started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamrl.config.remote_checks import remote_model
from streamrl.config.root import StreamRLConfig

TEACHER = "distillation.teacher_model"
MODEL = "actor_rollout_ref.model"


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
        own, policy = (_json(Path(path, "config.json")) for path in paths)
    except (OSError, ValueError):
        return  # the policy's model is reported elsewhere
    sizes = own.get("vocab_size"), policy.get("vocab_size")
    if None not in sizes and sizes[0] != sizes[1]:
        yield f"{key}: the teacher's vocabulary has {sizes[0]} tokens, the policy's {sizes[1]}; they must be the same"
        return
    yield from _tokenizer(Path(chosen.path), Path(config.actor_rollout_ref.model.tokenizer_path or ""))
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
        yield from _tokenizer(Path(chosen.path), Path(config.actor_rollout_ref.model.tokenizer_path or ""))


def _tokenizer(own: Path, policy: Path) -> Iterator[str]:
    """The teacher is given the policy's token ids, so each of them must be the same token to both."""
    key = f"{TEACHER}.path"
    if not (policy / "tokenizer.json").is_file():
        return  # reported elsewhere
    if not (own / "tokenizer.json").is_file():
        yield (
            f"{key}: {own} has no tokenizer.json, so nobody can tell whether its tokens are the policy's; if they are, "
            f"copy {policy / 'tokenizer.json'} there"
        )
        return
    if (own / "tokenizer.json").read_bytes() == (policy / "tokenizer.json").read_bytes():
        return
    from tokenizers import Tokenizer

    try:
        ours, theirs = (Tokenizer.from_file(str(p / "tokenizer.json")).get_vocab() for p in (policy, own))
    except Exception as error:  # noqa: BLE001  # the library raises Exception itself
        yield f"{key}: a tokenizer.json cannot be read ({str(error).splitlines()[0]})"
        return
    differ = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differ:
        first = differ[0]
        yield (
            f"{key}: {len(differ)} tokens have other ids in the teacher's tokenizer than in the policy's ({MODEL}."
            f"tokenizer_path), for instance {first!r}: {theirs.get(first, 'none')} there, {ours.get(first, 'none')} "
            "here; a teacher must have the policy's tokenizer"
        )


def _json(path: Path) -> dict[str, Any]:
    read = json.loads(path.read_text())
    if not isinstance(read, dict):
        raise ValueError(f"{path} is no JSON object")
    return read
