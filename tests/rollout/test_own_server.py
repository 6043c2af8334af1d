"""A kind of server that is not shipped, by the name of a file or of a registration."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.llm.protocol import LLMServer
from agent_loop.plugins import PluginError
from streamrl.rollout import building
from streamrl.rollout.building import build_server, register_server
from streamrl.rollout.events import ServerEvents
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.rollout.sim.server import SimServer

OWN = """
from streamrl.rollout.sim.server import SimServer

class Mine(SimServer):
    pass

def build(config, events):
    return Mine(max_num_seqs=config.max_num_seqs, server=config.server, events=events)
"""


async def test_a_file_of_ones_own_builds_the_server(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    server = build_server(RolloutServerConfig(f"{tmp_path}/own.py:build", max_num_seqs=3))
    assert type(server).__name__ == "Mine"
    assert (await server.load()).slots == 3
    with pytest.raises(PluginError, match="has no 'biuld'; it has build"):
        build_server(RolloutServerConfig(f"{tmp_path}/own.py:biuld"))


async def test_a_registered_kind_is_built_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_BUILDERS", dict(building._BUILDERS))

    def build(config: RolloutServerConfig, events: ServerEvents | None) -> LLMServer:
        return SimServer(max_num_seqs=config.max_num_seqs)

    with pytest.raises(ValueError, match="there is no such server; known are sglang, sim"):
        build_server(RolloutServerConfig("mine"))
    register_server("mine", build)
    assert (await build_server(RolloutServerConfig("mine", max_num_seqs=5)).load()).slots == 5
