"""How an LLM server is built from its config, in this process.

```
 build_server(config) ──► TorchServer | VllmServer | SglangServer | SimServer | what register_server or a file named
```
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from agent_loop.llm.protocol import LLMServer
from agent_loop.plugins import is_path_spec, load_from_file
from streamrl.rollout.events import ServerEvents
from streamrl.rollout.server_config import RolloutServerConfig

Builder = Callable[[RolloutServerConfig, ServerEvents | None], LLMServer]


def _torch(config: RolloutServerConfig, events: ServerEvents | None) -> LLMServer:
    from streamrl.rollout.torch.server import TorchServer

    return TorchServer(
        config.model_path,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_score_tokens=config.max_score_tokens,
        device=config.device,
        dtype=config.dtype,
        seed=config.seed,
        weights_dir=config.weights_dir,
        server=config.server,
        events=events,
        invariant=config.invariant,
    )


def _sim(config: RolloutServerConfig, events: ServerEvents | None) -> LLMServer:
    from streamrl.rollout.sim.server import SimConfig, SimServer

    model = Path(config.model_path) / "config.json"
    defaults = (
        {"vocab_size": json.loads(model.read_text())["vocab_size"]} if config.model_path and model.is_file() else {}
    )
    return SimServer(
        SimConfig.of(config.sim, **defaults),
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        seed=config.seed,
        weights_dir=config.weights_dir,
        server=config.server,
        events=events,
    )


def _vllm(config: RolloutServerConfig, events: ServerEvents | None) -> LLMServer:
    from streamrl.rollout.vllm.server import VllmServer

    return VllmServer(config, events)


def _sglang(config: RolloutServerConfig, events: ServerEvents | None) -> LLMServer:
    from streamrl.rollout.sglang.server import SglangServer

    return SglangServer(config, events)


_BUILDERS: dict[str, Builder] = {"torch": _torch, "vllm": _vllm, "sglang": _sglang, "sim": _sim}


def register_server(name: str, builder: Builder) -> None:
    """Make a further kind of server buildable by name, in this process."""
    _BUILDERS[name] = builder


def build_server(config: RolloutServerConfig, events: ServerEvents | None = None) -> LLMServer:
    """A server ready to serve, with the newest weights. Raises ValueError for a config that cannot be."""
    builder = load_from_file(config.name, "LLM server") if is_path_spec(config.name) else _BUILDERS.get(config.name)
    if builder is None:
        raise ValueError(
            f"rollout.name {config.name!r}: there is no such server; known are {', '.join(sorted(_BUILDERS))}"
        )
    return builder(config, events)
