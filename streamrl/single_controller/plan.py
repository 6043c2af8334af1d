"""From a call to the ranks' shares, and from their results to one value.

    plan = make_plan(spec, layout, args, kwargs)
    results = [run(rank, *share) for rank, share in enumerate(plan.shares)]
    value = plan.collect(results)

Pure: what a mode means can be tested without ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from streamrl.single_controller.batches import HeldRows, cut, is_batch, join, references_of, take
from streamrl.single_controller.data_proto import DataProto
from streamrl.single_controller.decorator import Dispatch, Execute, MeshDispatch, MethodSpec
from streamrl.single_controller.dispatch import balanced_rows, split_batch
from streamrl.single_controller.functions import NamedFunction
from streamrl.single_controller.mesh import Layout
from streamrl.single_controller.metrics import is_metrics, merge_metrics
from transfer_queue.metadata import KVBatchMeta

Share = tuple[tuple, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Plan:
    shares: list[Share]
    """Of the ranks that run the method: the first ones, nearly always all."""
    collect: Callable[[list[Any]], Any]
    """From one result per share, in order, to what the call gives."""


def make_plan(spec: MethodSpec, layout: Layout, args: tuple, kwargs: dict[str, Any]) -> Plan:
    """`layout` of all ranks in the method's mesh. Raises ValueError or TypeError for what cannot be split."""
    world_size, mode = len(layout.dp_ranks), spec.dispatch
    if mode is Dispatch.RANK_ZERO or spec.execute is Execute.RANK_ZERO:
        return Plan([(args, kwargs)] * (1 if spec.execute is Execute.RANK_ZERO else world_size), lambda r: r[0])
    if mode is Dispatch.ONE_TO_ALL:
        return Plan([(args, kwargs)] * world_size, list)
    if mode is Dispatch.ALL_TO_ALL:
        return Plan(_shares(args, kwargs, world_size, lambda value: _one_per_rank(spec, value, world_size)), list)
    if mode is Dispatch.DP_COMPUTE:
        return Plan(_shares(args, kwargs, world_size, lambda value: _split_references(value, world_size)), _merged)
    if mode is Dispatch.DP_COMPUTE_PROTO_WITH_FUNC:
        if not args:
            raise TypeError(f"{spec.name}: the first argument is a function, by name")
        args = (NamedFunction.of(args[0]), *args[1:])
    if isinstance(mode, MeshDispatch) and mode.references is not None:
        args = tuple(_held(mode, value) for value in args)
        kwargs = {name: _held(mode, value) for name, value in kwargs.items()}
    return _by_rows(spec.name, layout, args, kwargs, measures=mode is Dispatch.DP_COMPUTE_METRIC)


def _by_rows(method: str, layout: Layout, args: tuple, kwargs: dict[str, Any], *, measures: bool) -> Plan:
    """`measures`: what comes back is no rows, but figures in which each row counts once."""
    batches = [value for value in (*args, *kwargs.values()) if is_batch(value)]
    rows = RowShares.of(method, batches, layout.dp_size, once=measures)
    split = _shares(args, kwargs, layout.dp_size, lambda v: cut(v, rows.rows) if is_batch(v) else [v] * layout.dp_size)

    def collect(results: list[Any]) -> Any:
        kept = [results[rank] for rank in layout.collectors]
        return rows.restored(method, kept) if all(map(is_batch, kept)) and not measures else _merged(kept)

    return Plan([split[dp_rank] for dp_rank in layout.dp_ranks], collect)


@dataclass(frozen=True, slots=True)
class RowShares:
    """Which rows each share has. Invariant: every row of `size` is in a share; `padding` of them once more."""

    rows: list[list[int]]
    size: int

    @property
    def padding(self) -> int:
        return sum(map(len, self.rows)) - self.size

    @classmethod
    def of(cls, method: str, batches: Sequence[Any], parts: int, *, once: bool = False) -> RowShares:
        """References decide, if there are any: their tags say what a row costs. Else consecutive shares of one size,
        the first rows repeated at the end where it does not divide; or with `once` of sizes that differ by one."""
        sizes = {len(batch) for batch in batches}
        if len(sizes) > 1:
            raise ValueError(f"{method}: batches of {sorted(sizes)} rows in one call; they are split by the same rows")
        size = sizes.pop() if sizes else 0
        references = next((found for batch in batches if (found := references_of(batch)) is not None), None)
        if references is not None:
            return cls(balanced_rows(references, parts), size)
        if once:
            bounds = [part * size // parts for part in range(parts + 1)]
            return cls([list(range(a, b)) for a, b in pairwise(bounds)], size)
        each = -(-size // parts)
        padded = [row % size for row in range(each * parts)]
        return cls([padded[part * each : (part + 1) * each] for part in range(parts)], size)

    def restored(self, method: str, results: list[Any]) -> Any:
        """One batch in the order of the rows given, without the padding's; k rows for each row given, k >= 0."""
        given, got = [len(rows) for rows in self.rows], [len(result) for result in results]
        whole = join(results)
        per_row = sum(got) // sum(given) if sum(given) else 0
        if not sum(got) or not sum(given):
            return whole
        if got != [count * per_row for count in given]:
            if not self.padding:
                return whole
            raise ValueError(
                f"{method}: results of {got} rows for shares of {given}; {self.padding} of these repeat others to make "
                "the shares equal, and which rows come from them cannot be told. Give a batch whose rows divide by "
                f"{len(given)}"
            )
        place: dict[int, int] = {}
        for position, row in enumerate(row for share in self.rows for row in share):
            place.setdefault(row, position)
        order = [place[row] * per_row + i for row in range(self.size) for i in range(per_row)]
        return whole if order == list(range(sum(got))) else take(whole, order)


def _shares(args: tuple, kwargs: dict[str, Any], parts: int, split: Callable[[Any], Sequence[Any]]) -> list[Share]:
    """Every argument split in `parts`, put together again by part."""
    by_place, by_name = [split(value) for value in args], {name: split(value) for name, value in kwargs.items()}
    return [
        (tuple(values[part] for values in by_place), {name: values[part] for name, values in by_name.items()})
        for part in range(parts)
    ]


def _held(mode: MeshDispatch, value: Any) -> Any:
    return HeldRows(mode.references(value), value) if mode.references and isinstance(value, DataProto) else value


def _split_references(value: Any, parts: int) -> list[Any]:
    return list(split_batch(value, parts)) if isinstance(value, KVBatchMeta) else [value] * parts


def _one_per_rank(spec: MethodSpec, value: Any, parts: int) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or len(value) != parts:
        what = f"{len(value)} elements" if isinstance(value, list | tuple) else type(value).__name__
        raise ValueError(f"{spec.name} (ALL_TO_ALL): every argument is a list of {parts}, one per rank; got {what}")
    return value


def _merged(results: list[Any]) -> Any:
    return merge_metrics(results) if all(map(is_metrics, results)) else results
