"""Models that somebody else serves: `reward.judge.*` and `distillation.teacher_model.remote.*`."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

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
    url = urlsplit(chosen.base_url or "")
    if chosen.base_url and (url.scheme not in ("http", "https") or not url.hostname):
        yield f"{key}.base_url={chosen.base_url}: expected https://host/v1, or http://host:port/v1"
    if url.username or url.password:
        yield f"{key}.base_url holds a user or a password; give a key by key_env or key_file"
    if config.actor_rollout_ref.rollout.is_virtual:
        yield f"{key}: a remote model takes real time; actor_rollout_ref.rollout.sim.clock=virtual knows none"
