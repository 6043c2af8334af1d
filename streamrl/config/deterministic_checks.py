"""`trainer.deterministic`: what would make a run differ from its repetition is refused."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.config.root import StreamRLConfig

KEY = "trainer.deterministic=true"


def deterministic(config: StreamRLConfig) -> Iterator[str]:
    trainer = config.trainer
    if not trainer.deterministic:
        return
    mode, sampler = trainer.v1.trainer_mode, trainer.v1.sampler
    if mode == "colocate_async":
        yield f"{KEY}: what carries over a step in trainer_mode={mode} depends on time; use sync or separate_async"
    warmup = trainer.v1.separate_async.num_warmup_batches
    if mode == "separate_async" and warmup != round(warmup):
        yield (
            f"{KEY}: trainer.v1.separate_async.num_warmup_batches={warmup:g} is the lag between the weights that "
            "sample a batch and those trained on it; it takes a whole number"
        )
    bound = sampler.max_off_policy_threshold
    if mode == "separate_async" and sampler.max_off_policy_strategy and bound is not None and trainer.lag >= bound:
        yield (
            f"{KEY}: every sample is num_warmup_batches={trainer.lag} versions old, and "
            f"trainer.v1.sampler.max_off_policy_threshold={bound} allows {bound - 1}; lower the one or raise the other"
        )
    if sampler.custom_sampler.path is not None:
        yield f"{KEY} says which groups are trained; leave trainer.v1.sampler.custom_sampler.path out"
    if config.distillation.on_servers:
        yield (
            f"{KEY}: a teacher's servers score rows in batches that depend on time; set "
            "distillation.teacher_model.placement=ranks"
        )
    if trainer.replay is not None:
        yield f"{KEY} with trainer.replay: a replay trains what was recorded, in that order; leave one of them out"
