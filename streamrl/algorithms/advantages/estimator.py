"""What an advantage estimator is, and how one is found by name.

    @register_advantage("mine")
    def mine(scores, group_index, *, lengths): ...

The arguments of a function say what it needs (`lengths`, `baselines`, `components`, `values`) and which settings it
takes (`norm_by_std`, `weights`, `gamma`, `lam`); it is given exactly those.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from agent_loop.plugins import PluginError, Registry, is_path_spec, load_from_file
from streamrl.errors import UserError

Arrays = Sequence[np.ndarray]
F = TypeVar("F", bound=Callable[..., Any])

NEEDS = {"lengths": "lengths", "baselines": "baseline", "components": "components", "values": "values"}
"""Argument of an estimator → the need it expresses: `lengths`, sampled tokens per session; `baseline`, the score of the
greedy answer to the same prompt; `components`, the parts of the score; `values`, a critic."""


class EstimatorError(UserError, ValueError):
    """A function that returned no advantages. The message names it, what it returned and what was expected."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """Exactly one of `per_session` and `per_token` is set. Call it through `sessions` or `tokens`."""

    name: str
    per_session: Callable[..., np.ndarray] | None
    """In the trainer: one scalar per session."""
    per_token: Callable[..., tuple[list[np.ndarray], list[np.ndarray]]] | None
    """On the ranks: advantages and returns, one per token."""
    whiten: bool
    """Token advantages are whitened over the loss tokens of the update's set."""
    needs: frozenset[str]
    """Of "values", "baseline", "lengths", "components"."""

    @property
    def function(self) -> Callable[..., Any]:
        found = self.per_session or self.per_token
        assert found is not None, f"advantage estimator {self.name!r} computes nothing"
        return found

    def sessions(
        self,
        scores: np.ndarray,
        group_index: np.ndarray,
        *,
        norm_by_std: bool = True,
        lengths: np.ndarray | None = None,
        baselines: np.ndarray | None = None,
        components: np.ndarray | None = None,
        weights: Sequence[float] | None = None,
    ) -> np.ndarray:
        """f64[N] from scores f64[N] and group_index i64[N]; lengths f64[N], baselines f64[N], components f64[N, K],
        their weights f64[K]. Raises ValueError when something it needs is missing, EstimatorError for what is no such
        array."""
        if self.per_session is None:
            raise ValueError(f"advantage estimator {self.name!r} works on tokens: call it on the ranks")
        given = {
            "norm_by_std": norm_by_std,
            "lengths": lengths,
            "baselines": baselines,
            "components": components,
            "weights": weights,
        }
        made = self.per_session(scores, group_index, **self._accepted(self.per_session, given))
        values = self._numbers(made, len(scores), "one number per session")
        if not np.isfinite(values).all():
            raise self._nonsense("one finite number per session", made)
        return values

    def tokens(
        self, rewards: Arrays, masks: Arrays, values: Arrays | None = None, *, gamma: float = 1.0, lam: float = 1.0
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(advantages, returns), f64[R] per row, before whitening. Raises ValueError when values are missing,
        EstimatorError for what are no such arrays."""
        if self.per_token is None:
            raise ValueError(f"advantage estimator {self.name!r} works on sessions: call it in the trainer")
        given = {"values": values, "gamma": gamma, "lam": lam}
        made = self.per_token(rewards, masks, **self._accepted(self.per_token, given))
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise self._nonsense("(advantages, returns)", made)
        return self._per_row(made[0], rewards), self._per_row(made[1], rewards)

    def _per_row(self, made: Any, rewards: Arrays) -> list[np.ndarray]:
        if not isinstance(made, Sequence | np.ndarray) or len(made) != len(rewards):
            raise self._nonsense(f"a list of {len(rewards)} arrays, one per row", made)
        return [
            self._numbers(row, len(reward), "one number per token of the row")
            for row, reward in zip(made, rewards, strict=True)
        ]

    def _numbers(self, made: Any, size: int, meaning: str) -> np.ndarray:
        """f64[size]."""
        try:
            found = np.asarray(made)
        except (ValueError, TypeError) as error:  # a ragged list
            raise self._nonsense(f"{size} numbers, {meaning}", made) from error
        if found.shape != (size,) or found.dtype.kind not in "fiub":
            raise self._nonsense(f"{size} numbers, {meaning}", made)
        return found.astype(np.float64, copy=False)

    def _nonsense(self, expected: str, made: Any) -> EstimatorError:
        shaped = isinstance(made, np.ndarray) and made.ndim != 1
        what = f"of shape {made.shape}" if shaped else reprlib.repr(made)
        return EstimatorError(
            f"advantage estimator {self.name!r} should return {expected}; it returned {type(made).__name__} {what}"
        )

    def _accepted(self, function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
        taken = {name: value for name, value in given.items() if name in inspect.signature(function).parameters}
        missing = [name for name, value in taken.items() if value is None and NEEDS.get(name) in self.needs]
        if missing:
            raise ValueError(f"advantage estimator {self.name!r} needs {', '.join(missing)}")
        return taken


ADVANTAGE_ESTIMATORS: Registry[Estimator] = Registry("advantage estimator")
"""`algorithm.adv_estimator`."""


def register_advantage(
    name: str, *, per: Literal["session", "token"] = "session", whiten: bool = False
) -> Callable[[F], F]:
    """A decorator; the function stays what it is."""

    def add(function: F) -> F:
        ADVANTAGE_ESTIMATORS.register(name)(_estimator_of(function, name, per, whiten))
        return function

    return add


def estimator(spec: str) -> Estimator:
    """The estimator registered as `spec`, or `path/to/file.py:function` (per session, unless the function is registered
    otherwise in that file). Raises PluginError."""
    if spec in ADVANTAGE_ESTIMATORS or not is_path_spec(spec):
        return ADVANTAGE_ESTIMATORS.resolve(spec)
    found = load_from_file(spec, "advantage estimator")
    for name in ADVANTAGE_ESTIMATORS.names():
        known = ADVANTAGE_ESTIMATORS.resolve(name)
        if known.function is found:
            return known
    if not callable(found):
        raise PluginError(f"advantage estimator {spec!r} is {found!r}; expected a function of (scores, group_index)")
    return _estimator_of(found, spec, "session", False)


def _estimator_of(function: Callable[..., Any], name: str, per: str, whiten: bool) -> Estimator:
    needs = frozenset(need for argument, need in NEEDS.items() if argument in inspect.signature(function).parameters)
    session = per == "session"
    return Estimator(name, function if session else None, None if session else function, whiten, needs)
