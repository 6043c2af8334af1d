"""The rows of a finished session, as the queue stores them: the one place for the names and dtypes an agent writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent_loop.trajectory import Trajectory
from transfer_queue.keys import row_key
from transfer_queue.storage.columns import Column

PROMPT_FIELDS = (
    "raw_prompt", "data_source", "reward_model", "extra_info", "agent_name", "tools_kwargs", "tool_selection",
    "images", "videos", "audios",
)  # fmt: skip
"""Object columns of a prompt row, written at admission."""

COPIED_FIELDS = ("raw_prompt", "data_source", "reward_model", "extra_info")
"""Of these, the ones that each trajectory row repeats."""

SCORE_FIELD = "rm_scores"
RAGGED_FIELDS: dict[str, type[np.generic]] = {
    "prompts": np.int64, "responses": np.int64, "input_ids": np.int64, "position_ids": np.int64,
    "response_mask": np.int64, "rollout_log_probs": np.float32, "weight_versions": np.int32, SCORE_FIELD: np.float32,
}  # fmt: skip

MULTI_MODAL_FIELD = "multi_modal_inputs"
"""Object column of rows whose prompt has images: name -> array (agent_loop/rendering/images.py)."""

TEACHER_FIELD = "teacher_log_prob"
"""float32[R], of a row that a teacher's servers scored before it was put (agent_loop/teacher.py)."""

MAX_COMPONENTS = 8
"""Named parts of a score that travel with a row, to the trainer, which sees a bounded number of bytes of each."""

_OWN_FIELDS = frozenset(RAGGED_FIELDS) | frozenset(COPIED_FIELDS) | {
    TEACHER_FIELD, MULTI_MODAL_FIELD, "uid", "num_turns", "metrics", "reward_extra_info",
}  # fmt: skip


class Prompt(dict[str, Any]):
    """The fields of one prompt row, which its sessions share: nobody may change them."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        """`columns`: PROMPT_FIELDS, of one row."""
        super().__init__({name: columns[name][0] for name in PROMPT_FIELDS})
        self.columns = columns

    def fresh(self) -> dict[str, Any]:
        """The same, for a session to change."""
        return {name: self.columns[name][0] for name in PROMPT_FIELDS}


@dataclass(frozen=True, slots=True)
class SessionRows:
    """Arguments of one put."""

    keys: list[str]
    columns: dict[str, Any]
    tags: list[dict[str, Any]]


def session_rows(
    prompt: Mapping[str, Any],
    uid: str,
    session: int,
    trajectories: Sequence[Trajectory],
    scores: Sequence[float | None],
    metrics: Mapping[str, float],
    reward_details: Mapping[str, Any],
    components: Mapping[str, float] | None = None,
    *,
    scored_later: bool = False,
) -> SessionRows:
    """One row per trajectory, in order; `components` are the named parts of the session's score. `scored_later`: a
    score may be None, and SCORE_FIELD is left to who gives the one that counts. Raises ValueError for a trajectory that
    breaks an invariant or whose `extra_fields` take a name of the schema, and for too many components."""
    components = components or {}
    if len(components) > MAX_COMPONENTS:
        raise ValueError(f"{len(components)} components of a score; at most {MAX_COMPONENTS} travel with a row")
    for trajectory in trajectories:
        trajectory.validate()
    rows = len(trajectories)
    ragged = [_arrays(trajectory) for trajectory in trajectories]
    if not scored_later:
        for row, trajectory, score in zip(ragged, trajectories, scores, strict=True):
            row[SCORE_FIELD] = _outcome(trajectory, score)
    columns: dict[str, Any] = {
        name: [np.asarray(row[name], dtype=dtype) for row in ragged]
        for name, dtype in RAGGED_FIELDS.items()
        if name in ragged[0]
    }
    columns |= repeated(prompt, rows)
    columns["uid"] = [uid] * rows
    columns["num_turns"] = np.asarray([trajectory.num_turns for trajectory in trajectories], dtype=np.int64)
    columns["metrics"] = [dict(metrics)] * rows
    columns["reward_extra_info"] = [dict(reward_details)] * rows
    if any(trajectory.multi_modal_inputs for trajectory in trajectories):
        columns[MULTI_MODAL_FIELD] = [trajectory.multi_modal_inputs for trajectory in trajectories]
    columns |= _extra_columns(trajectories)
    began = next(v for v in trajectories[0].weight_versions if v >= 0)
    parts = {component_tag(name): float(value) for name, value in components.items()}
    tags = [
        _tag(trajectory, score, session, began) | parts for trajectory, score in zip(trajectories, scores, strict=True)
    ]
    return SessionRows([row_key(uid, session, index) for index in range(rows)], columns, tags)


def repeated(prompt: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """COPIED_FIELDS, as columns of so many rows."""
    if rows == 1 and isinstance(prompt, Prompt):  # as they are, without making them again
        return {name: prompt.columns[name] for name in COPIED_FIELDS}
    return {name: [prompt.get(name)] * rows for name in COPIED_FIELDS}


def component_tag(name: str) -> str:
    """The tag that holds a component of the session's score."""
    return f"score/{name}"


def _outcome(trajectory: Trajectory, score: float | None) -> np.ndarray:
    """f32[R]: the score at the last sampled token, else 0."""
    found = np.zeros(len(trajectory.response_ids), dtype=np.float32)
    found[int(np.flatnonzero(trajectory.response_mask)[-1])] = score
    return found


def _arrays(trajectory: Trajectory) -> dict[str, Any]:
    ids = trajectory.prompt_ids + trajectory.response_ids
    return {
        "prompts": trajectory.prompt_ids,
        "responses": trajectory.response_ids,
        "input_ids": ids,
        "position_ids": np.arange(len(ids)),
        "response_mask": trajectory.response_mask,
        "rollout_log_probs": trajectory.rollout_log_probs,
        "weight_versions": trajectory.weight_versions,
    }


def _extra_columns(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    names = sorted({name for trajectory in trajectories for name in trajectory.extra_fields})
    if taken := [name for name in names if name in _OWN_FIELDS]:
        raise ValueError(f"extra_fields may not be called {', '.join(taken)}: those are columns of every row")
    return {name: [trajectory.extra_fields.get(name) for trajectory in trajectories] for name in names}


def _tag(trajectory: Trajectory, score: float | None, session: int, began: int) -> dict[str, Any]:
    """`global_steps` is the weight version of the session's first token, the others of this row's tokens."""
    scored = {} if score is None else {"score": float(score)}
    versions = [version for version in trajectory.weight_versions if version >= 0]
    prompt_len, response_len = len(trajectory.prompt_ids), len(trajectory.response_ids)
    return {
        "status": "success",
        "prompt_len": prompt_len,
        "response_len": response_len,
        "seq_len": prompt_len + response_len,
        "global_steps": began,
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
        **scored,
        "session": session,
        "num_turns": trajectory.num_turns,
    }
