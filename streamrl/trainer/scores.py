"""The sessions of leased groups as arrays: what each scored, and to which rows its advantage goes.

Only scalars pass here (scores, lengths, versions); the tokens stay in the queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from agent_loop.rows import component_tag
from agent_loop.session import SAMPLED_SESSIONS
from streamrl.algorithms.advantages import Estimator
from streamrl.algorithms.filters import zero_variance
from streamrl.algorithms.overlong import overlong_penalty
from streamrl.config.sections.algorithm import OverlongBufferConfig
from streamrl.errors import UserError
from transfer_queue.net.messages import Group, Row

FUNCTION = "function"
"""The component of a score that the reward function gave, where a reward model's score is the one that counts."""


class NoSuchComponent(UserError, ValueError):
    """A row without a component of its score that the estimator needs. The message names both."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """N sessions that are trained on; a greedy session, which only gives its group a baseline, is none of them."""

    scores: np.ndarray
    """f64[N]: of the session's last row, shaped."""
    group: np.ndarray
    """i64[N]: place of its group in the batch."""
    lengths: np.ndarray
    """f64[N]: response tokens over all its rows."""
    baselines: np.ndarray | None
    """f64[N]: score of the greedy session of its group; None where no group has one."""
    rows: list[list[Row]]
    components: np.ndarray | None = None
    """f64[N, K]: parts of the score; None where nobody asked for them."""

    @property
    def row_scores(self) -> dict[str, float]:
        """By row key: the score of its session."""
        return self.spread(self.scores)

    def spread(self, values: np.ndarray) -> dict[str, float]:
        """A value per session as one per row: every row of a session gets the session's."""
        return {row.key: float(v) for v, rows in zip(values, self.rows, strict=True) for row in rows}

    def advantages(
        self, estimator: Estimator, *, norm_by_std: bool, scores: np.ndarray | None = None,
        weights: Sequence[float] | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """By row key, of an estimator that works on sessions. `weights` are those of the components; None: 1."""
        return self.spread(
            estimator.sessions(
                self.scores if scores is None else scores, self.group, norm_by_std=norm_by_std,
                lengths=self.lengths, baselines=self.baselines, components=self.components, weights=weights,
            )
        )  # fmt: skip

    def summed(self, by_row: Mapping[str, float]) -> np.ndarray:
        """f64[N]: a value per row, added up over the rows of each session."""
        return np.array([sum(by_row[row.key] for row in rows) for rows in self.rows], np.float64)


def sessions_of(
    groups: Sequence[Group], *, overlong: OverlongBufferConfig | None = None, max_response_length: int = 0,
    components: Sequence[str] = (),
) -> Sessions:  # fmt: skip
    """Raises ValueError for a group without a single trained session, NoSuchComponent for a session whose score lacks
    one of `components`."""
    trained: list[tuple[int, list[Row]]] = []
    greedy: dict[int, float] = {}
    for place, group in enumerate(groups):
        for session, rows in _by_session(group).items():
            if session >= sampled_sessions(group):
                greedy[place] = _score(rows)
            else:
                trained.append((place, rows))
    scores = np.array([_score(rows) for _, rows in trained], np.float64)
    lengths = np.array([sum(float(row.tag["response_len"]) for row in rows) for _, rows in trained], np.float64)
    if overlong is not None and overlong.enable:
        last = np.array([float(rows[-1].tag["response_len"]) for _, rows in trained], np.float64)
        scores = scores + overlong_penalty(
            last, max_length=max_response_length, buffer=overlong.len, penalty_factor=overlong.penalty_factor
        )
    place_of = np.array([place for place, _ in trained], np.int64)
    if missing := set(range(len(groups))) - set(place_of.tolist()):
        raise ValueError(f"group {groups[min(missing)].uid} has no session to train on")
    baselines = np.array([greedy[place] for place, _ in trained], np.float64) if greedy else None
    parts = np.array([_components(rows[-1], components) for _, rows in trained], np.float64) if components else None
    return Sessions(scores, place_of, lengths, baselines, [rows for _, rows in trained], parts)


def sampled_sessions(group: Group) -> int:
    """Sessions from this number on are greedy ones."""
    return int(group.tag.get(SAMPLED_SESSIONS, group.n))


def all_equal(group: Group, components: Sequence[str] = ()) -> bool:
    """Whether the group's sampled sessions all scored the same, or did in each of `components` where these are what is
    compared, so that comparing them teaches nothing. Raises NoSuchComponent."""
    sampled = [rows for session, rows in _by_session(group).items() if session < sampled_sessions(group)]
    found = [_components(rows[-1], components) if components else [_score(rows)] for rows in sampled]
    return all(zero_variance(column) for column in np.array(found, np.float64).T)


def last_rows(groups: Sequence[Group]) -> list[Row]:
    """Of each session, greedy ones as well."""
    return [rows[-1] for group in groups for rows in _by_session(group).values()]


def rescored(groups: Sequence[Group], scores: Mapping[str, float], *, keep: bool) -> list[Group]:
    """The groups with other scores: a session's is the one of its last row in `scores`, by row key. `keep`: the one
    that a row had becomes its component FUNCTION."""

    def row_with(row: Row, score: float) -> Row:
        own = {component_tag(FUNCTION): row.tag["score"]} if keep and "score" in row.tag else {}
        return replace(row, tag={**row.tag, **own, "score": score})

    found = []
    for group in groups:
        by_session = {session: scores[rows[-1].key] for session, rows in _by_session(group).items()}
        rows = [row_with(row, by_session[int(row.tag["session"])]) for row in group.rows]
        found.append(replace(group, rows=rows))
    return found


def _by_session(group: Group) -> dict[int, list[Row]]:
    sessions: dict[int, list[Row]] = {}
    for row in group.rows:
        sessions.setdefault(int(row.tag["session"]), []).append(row)
    return sessions


def _score(rows: list[Row]) -> float:
    """The outcome: that of the session's last row."""
    return float(rows[-1].tag["score"])


def _components(row: Row, names: Sequence[str]) -> list[float]:
    """Of the session's score, as its last row tells them."""
    if missing := [name for name in names if component_tag(name) not in row.tag]:
        raise NoSuchComponent(
            f"row {row.key}: its score has no component {missing[0]!r}, which algorithm.gdpo_reward_keys names; the "
            'reward returns it beside "score", for every row (an agent that scores itself: Trajectory.score_components)'
        )
    return [float(row.tag[component_tag(name)]) for name in names]


def advantage_metrics(sessions: Sessions, advantages: Mapping[str, float]) -> dict[str, float]:
    """Of the response tokens: each has the advantage of its row."""
    rows = [row for rows in sessions.rows for row in rows]
    values = np.array([advantages[row.key] for row in rows])
    lengths = np.array([float(row.tag["response_len"]) for row in rows])
    mean = float((values * lengths).sum() / lengths.sum()) if lengths.sum() else 0.0
    return {"critic/advantages/mean": mean, "critic/advantages/max": float(values.max()),
            "critic/advantages/min": float(values.min())}  # fmt: skip


def score_metrics(
    groups: Sequence[Group], version: int, components: Sequence[str] = (), *, max_prompt_length: int = 0,
    max_response_length: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Scalars of the rows that a step trained at weights `version`, under verl's names. A length that is known to be
    limited has the share of rows that reached it."""
    sampled = [[row for row in group.rows if int(row.tag["session"]) < sampled_sessions(group)] for group in groups]
    tags = [row.tag for rows in sampled for row in rows]

    def column(name: str) -> np.ndarray:
        return np.array([float(tag[name]) for tag in tags])

    if all(component_tag(FUNCTION) in tag for tag in tags):
        components = (*components, FUNCTION)
    lengths, prompts = column("response_len"), column("prompt_len")
    oldest, newest = column("min_global_steps"), column("max_global_steps")
    scores = [np.array([float(row.tag["score"]) for row in rows]) for rows in sampled]
    found = {
        "perf/total_num_tokens": float(lengths.sum() + prompts.sum()),
        "rows/trained": float(len(tags)),
        "groups/trained": float(len(groups)),
        "groups/zero_variance": float(sum(zero_variance(each) for each in scores)),
    }
    for name, values, longest in (
        ("prompt_length", prompts, max_prompt_length),
        ("response_length", lengths, max_response_length),
    ):
        if longest:
            found[f"{name}/clip_ratio"] = float((values >= longest).mean())
    for name, values in (
        ("critic/score", np.concatenate(scores)),
        *((f"critic/score/{name}", column(component_tag(name))) for name in components),
        ("response_length", lengths),
        ("prompt_length", prompts),
        ("training/num_turns", column("num_turns")),
        ("training/off_policy/trajectory_staleness", version - newest),
        ("training/off_policy/trajectory_staleness_worst", version - oldest),
        ("training/off_policy/trajectory_spans", newest - oldest),
    ):
        found |= {f"{name}/{stat}": float(getattr(values, stat)()) for stat in ("mean", "max", "min")}
    return found
