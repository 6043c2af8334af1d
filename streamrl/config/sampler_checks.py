"""`trainer.v1.sampler` and how far generation may be ahead: which groups are trained, and how old they may be."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.config.classes import SAMPLER
from streamrl.config.code_checks import file_class
from streamrl.config.root import StreamRLConfig

KEY = "trainer.v1.sampler"


def sampler(config: StreamRLConfig) -> Iterator[str]:
    """Which groups are trained, and how old they may be."""
    v1, chosen, separate = config.trainer.v1, config.trainer.v1.sampler, config.trainer.v1.separate_async
    strategy, bound = chosen.max_off_policy_strategy, chosen.max_off_policy_threshold
    bounds = v1.trainer_mode != "sync" and not config.trainer.deterministic
    if bounds and strategy is not None and bound is None:
        yield (
            f"{KEY}.max_off_policy_threshold=null with {KEY}.max_off_policy_strategy={strategy}: without a bound "
            f"nothing is too old; give one, or set {KEY}.max_off_policy_strategy=null, too"
        )
    fixed = bounds and v1.trainer_mode == "separate_async" and separate.fixed_lag
    if fixed and strategy is not None and bound is not None and separate.num_warmup_batches > bound - 1:
        yield (
            "trainer.v1.separate_async.fixed_lag=true: every sample is num_warmup_batches="
            f"{separate.num_warmup_batches:g} versions old, and {KEY}.max_off_policy_threshold={bound} allows "
            f"{bound - 1}; lower the one or raise the other"
        )
    if chosen.max_masked_ratio < 1 and strategy != "mask":
        yield (
            f"{KEY}.max_masked_ratio={chosen.max_masked_ratio:g} has no effect with {KEY}.max_off_policy_strategy="
            f"{strategy or 'null'}; it goes with mask"
        )
    yield from _custom(config)


def _custom(config: StreamRLConfig) -> Iterator[str]:
    """A class of the user's that chooses."""
    chosen = config.trainer.v1.sampler
    custom = chosen.custom_sampler
    if custom.path is None:
        if chosen.sampler_kwargs:
            yield f"{KEY}.sampler_kwargs without {KEY}.custom_sampler.path: name the file of the class they are for"
        return
    if chosen.max_off_policy_strategy == "wait":
        yield (
            f"{KEY}.custom_sampler.path with {KEY}.max_off_policy_strategy=wait: both choose which groups are trained "
            "next; use drop, mask or null"
        )
    if config.trainer.v1.trainer_mode == "sync":
        yield (
            f"{KEY}.custom_sampler.path with trainer.v1.trainer_mode=sync: a step trains all prompts that were issued "
            "for it, there is nothing to choose; use separate_async or colocate_async, or leave it out"
        )
    said_by = f"{KEY}.sampler_kwargs"
    yield from file_class(
        f"{KEY}.custom_sampler.path", custom.path, custom.name, SAMPLER, chosen.sampler_kwargs, said_by
    )
