"""`reward.reward_model.*`: a model that can score the policy's rows, and nothing that needs a score before it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamrl.config.root import StreamRLConfig
from streamrl.config.tokenizer_checks import json_object, same_tokens, vocabulary

REWARD_MODEL = "reward.reward_model"
KEY = f"{REWARD_MODEL}.model_path"
ENABLED = f"{REWARD_MODEL}.enable=true"


def reward_model(config: StreamRLConfig) -> Iterator[str]:
    if not config.reward.reward_model.enable:
        return
    yield from _scores_before(config)
    yield from _validation(config)
    if config.actor_rollout_ref.actor.strategy != "sim":  # which gives scores without a model
        yield from _model(config)


def _scores_before(config: StreamRLConfig) -> Iterator[str]:
    """What looks at scores before a batch is leased and scored, or at parts that a reward model's has not."""
    algorithm = config.algorithm
    if algorithm.filter_groups.enable:
        yield (
            f"algorithm.filter_groups.enable=true with {ENABLED}: groups of equal scores are left out before they are "
            "scored; set it to false (they have advantage 0, and a reward model hardly ever gives two answers the same)"
        )
    if algorithm.adv_estimator == "gdpo":
        yield (
            f"algorithm.adv_estimator=gdpo with {ENABLED}: a reward model's score has no components; use grpo, or a "
            "reward function alone"
        )


def _validation(config: StreamRLConfig) -> Iterator[str]:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    validates = bool(config.data.val_files) and (trainer.val_before_train or trainer.test_freq > 0)
    if trainer.v1.trainer_mode == "colocate_async" and rollout.sleep_level == 2 and validates:
        yield (
            f"actor_rollout_ref.rollout.sleep_level=2 with {ENABLED}: the servers sleep while a validation is scored, "
            "and would wake up without weights; set sleep_level=1, or trainer.val_before_train=false and "
            "trainer.test_freq=-1"
        )


def _model(config: StreamRLConfig) -> Iterator[str]:
    path, policy = config.reward.reward_model.model_path, config.actor_rollout_ref.model
    if path is None or not Path(path, "config.json").is_file():
        yield f"{KEY}={path or 'null'}: {ENABLED} needs the directory of a model (config.json)"
        return
    try:
        own = json_object(Path(path, "config.json"))
    except (OSError, ValueError) as error:
        yield f"{KEY}: {path} has no config.json that can be read ({error})"
        return
    classes = own.get("architectures") or []
    if not any(str(name).endswith("ForSequenceClassification") for name in classes):
        given = ", ".join(map(str, classes)) or "of no class"
        yield f"{KEY}: {path} is {given}; a reward model is a ...ForSequenceClassification"
    elif (labels := _labels(own)) != 1:
        yield f"{KEY}: the model in {path} has {labels} labels (id2label); a reward model has one, its score"
    tokenizer = Path(policy.tokenizer_path or "")
    problems = list(same_tokens(KEY, "reward model", Path(path), tokenizer, may_know_more=True))
    yield from problems
    if not problems:
        yield from _sizes(own, config, tokenizer)


def _labels(own: dict[str, Any]) -> int:
    """As `transformers` reads it."""
    return len(own["id2label"]) if own.get("id2label") else int(own.get("num_labels", 2))


def _sizes(own: dict[str, Any], config: StreamRLConfig, tokenizer: Path) -> Iterator[str]:
    """Vocabularies may be padded differently; every token must be known."""
    size = own.get("vocab_size")
    try:
        policy = json_object(Path(config.actor_rollout_ref.model.path, "config.json")).get("vocab_size")
        known = max(vocabulary(tokenizer).values()) + 1 if size != policy else 0
    except Exception:  # noqa: BLE001  # the library raises Exception itself; the policy's files are reported elsewhere
        return
    if isinstance(size, int) and size < known:
        yield f"{KEY}: the reward model's vocabulary has {size} tokens, the policy's tokenizer {known}"
    limit, asked = own.get("max_position_embeddings"), config.actor_rollout_ref.rollout.max_model_len
    if isinstance(limit, int) and asked is not None and asked > limit:
        yield (
            f"{KEY}: the reward model knows {limit} positions (max_position_embeddings), rows have up to {asked} "
            "(actor_rollout_ref.rollout.max_model_len); lower that, or take another reward model"
        )
