"""Models that somebody else serves: `reward.judge.*` and `distillation.teacher_model.remote.*`."""

from __future__ import annotations

from collections.abc import Iterator

from agent_loop.llm.remote_url import remote_url
from streamrl.config.root import StreamRLConfig
from streamrl.config.sections.algorithm import RemoteModelConfig

JUDGE = "reward.judge"


def judge(config: StreamRLConfig) -> Iterator[str]:
    chosen = config.reward.judge
    if not chosen.given:
        return
    yield from remote_model(JUDGE, chosen, config)
    if config.reward.custom_reward_function.path is None:
        yield f"{JUDGE}: registered rewards ask no judge; name your function in reward.custom_reward_function.path"


def remote_model(key: str, chosen: RemoteModelConfig, config: StreamRLConfig) -> Iterator[str]:
    """What is wrong with one that is to be used."""
    for name in ("base_url", "model"):
        if not getattr(chosen, name):
            yield f"{key}.{name} is not set: a remote model needs base_url (https://host/v1) and model"
    if chosen.base_url:
        try:
            remote_url(chosen.base_url)
        except ValueError as error:
            yield f"{key}.base_url {error}"
    if config.actor_rollout_ref.rollout.is_virtual:
        yield f"{key}: a remote model takes real time; actor_rollout_ref.rollout.sim.clock=virtual knows none"
