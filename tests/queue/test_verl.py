"""verl 0.9.1's own replay buffer, agent loop worker and worker bridge run on this queue, by their real code.

They run in an environment of their own (`make verl-env`; without it this is skipped), under Ray, their worker in
another process than the trainer's parts. Only the LLM server is a fake.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent / "verl"

_spec = importlib.util.spec_from_file_location("verl_environment", HERE / "environment.py")
assert _spec is not None
assert _spec.loader is not None
environment = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(environment)

PYTHON = environment.python(environment.directory())

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(PYTHON is None, reason=f"no environment in {environment.directory()}: run `make verl-env`"),
]


@pytest.fixture(scope="module")
def scenes() -> dict[str, Any]:
    """What the program said, by scene."""
    env = {name: value for name, value in os.environ.items() if name not in ("TQ_ADDRESS", "RAY_ADDRESS")}
    env |= {"PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(PYTHON), str(HERE / "program.py")], capture_output=True, text=True, env=env, timeout=360, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"scene"')]
    return {line["scene"]: line for line in lines}


def test_it_is_verls_own_tensordict(scenes):
    assert scenes["versions"]["tensordict"] == "0.10.0"


def test_an_agent_loop_worker_stores_its_trajectories_and_their_states(scenes):
    scene = scenes["agent loop worker"]
    assert scene["rows"] == ["u0_0_0", "u0_1_0"]
    assert scene["tags"]["u0"] == {"is_prompt": True, "status": "finished", "global_steps": 3}
    assert scene["tags"]["u1"]["status"] == "failure"
    assert scene["tags"]["u0_0_0"] == {
        "status": "success", "prompt_len": 24, "response_len": 4, "seq_len": 28, "global_steps": 3,
        "min_global_steps": 3, "max_global_steps": None,
    }  # fmt: skip
    assert scene["fields"] == ["input_ids", "num_turns", "raw_prompt", "responses"]
    assert scene["responses"] == [[5, 6, 7, 2], [5, 6, 7, 2]]
    assert scene["lengths"] == [28, 28]
    worker = {name: scene["calls"][name] for name in ("init", "async_kv_put", "async_kv_batch_put")}
    assert worker == {"init": 1, "async_kv_put": 4, "async_kv_batch_put": 2}


@pytest.mark.parametrize(
    ("buffer", "keys", "refilled", "left", "calls"),
    [
        ("ReplayBuffer", ["p0", "p2"], [], ["p0", "p1", "p2", "p3"], {"kv_list": 1, "kv_clear": 1}),
        ("ReplayBufferAsync", ["p0", "p1"], [1], ["p0", "p1", "p3"], {"kv_list": 2, "kv_clear": 2}),
    ],
)
def test_a_replay_buffer_samples_and_evicts_whole_groups(scenes, buffer, keys, refilled, left, calls):
    """p0, p1, p2 are done, from steps 4, 5 and 1; p3 still runs. The async one drops what is too old."""
    scene = scenes[buffer]
    assert sorted(scene["keys"]) == [f"{uid}_{session}_0" for uid in keys for session in (0, 1)]
    assert {tag["seq_len"] for tag in scene["tags"]} == {2, 3}
    assert scene["refilled"] == refilled
    assert sorted({key.split("_")[0] for key in scene["left"]}) == left
    assert scene["calls"] == calls


def test_a_worker_reads_and_writes_columns_through_the_bridge(scenes):
    scene = scenes["worker bridge"]
    assert scene["keys"] == ["c", "a", "b"]
    assert scene["tags"] == [{"i": 2}, {"i": 0}, {"i": 1}]
    assert scene["fields"] == [["doubled", "length", "responses"], ["doubled", "later", "length", "responses"]]
    assert scene["doubled"] == [[0, 2], [0, 2, 4], [0]]
    assert scene["length"] == [2, 3, 1]
    assert scene["later"] == [[1.0, 1.0]] * 3
    assert (scene["pieces"], scene["same"], scene["empty"]) == ([2, 1], True, 0)
    assert scene["calls"] == {
        "init": 1, "async_kv_retrieve_meta": 5, "async_get_data": 2, "async_put": 2, "async_kv_retrieve_keys": 2,
        "kv_batch_get": 1,
    }  # fmt: skip
