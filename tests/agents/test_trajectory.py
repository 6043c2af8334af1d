"""A trajectory with values that cannot be trained on is refused where it is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agent_loop.trajectory import Trajectory


def made(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "prompt_ids": [1], "response_ids": [2, 3], "response_mask": [1, 0],
        "rollout_log_probs": [-0.5, 0.0], "weight_versions": [0, -1],
    }  # fmt: skip
    return Trajectory(**{**fields, **changes})


def test_a_sound_trajectory_passes() -> None:
    made().validate()
    made(response_ids=[np.int64(2), np.int32(3)], rollout_log_probs=[5e-4, np.float32(0)]).validate()


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"prompt_ids": [-1]}, "prompt token 0 is -1"),
        ({"prompt_ids": [1.5]}, "prompt token 0 is 1.5, a float"),
        ({"response_ids": [2, 2**31]}, "response token 1 is 2147483648"),
        ({"response_ids": [2, True]}, "response token 1 is True, a bool"),
        ({"weight_versions": [2**31, -1]}, "weight version of response token 0 is 2147483648"),
        ({"weight_versions": [0, -2]}, "weight version of response token 1 is -2"),
        ({"weight_versions": [float("nan"), -1]}, "weight version of response token 0 is nan, a float"),
        ({"rollout_log_probs": [float("nan"), 0.0]}, "response token 0: log-prob nan"),
        ({"rollout_log_probs": [float("-inf"), 0.0]}, "response token 0: log-prob -inf"),
        ({"rollout_log_probs": [0.1, 0.0]}, "response token 0: log-prob 0.1"),
        ({"rollout_log_probs": [0.0, float("nan")]}, "response token 1: log-prob nan"),
    ],
)
def test_what_cannot_be_trained_on_is_named(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        made(**changes).validate()
