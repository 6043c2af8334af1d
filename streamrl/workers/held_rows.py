"""Rows that the caller holds: what a method does with rows of the queue, it does with those of a `DataProto` as well.

    DataProto ──references_to──► keys, tags ──split by rank──► HeldRows ──HeldStore──► the method, as ever
       [B, P+R], [B, R]                                                                    │
    DataProto of the columns that it wrote, and its metrics  ◄─────────────────────────────┘

The one place where rows are padded. Fields, with padding wherever `attention_mask` is 0:

| field | what |
|---|---|
| input_ids | i64[B, P+R], or jagged: prompt and response of each row |
| attention_mask | [B, P+R]: 1 for a token; in the last R columns ones come first. Not with jagged fields |
| responses or response_mask | [B, R]: say what R is; response_mask is 1 for a token that was sampled |
| any other column | [B, R], or jagged |
| uid, session | of `non_tensor_batch`: whose prompt a row answers, in which session (absent: each in its own) |
| advantage | of `non_tensor_batch`, f64[B]: a scalar per row, of estimators that work on sessions |

`meta_info` is `extra_info` (see `contract`); the scores in it come from `token_level_scores` or `rm_scores`. A row
without a prompt or without a response is no row: it is not computed, and counts nowhere.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from agent_loop.rows import RAGGED_FIELDS
from streamrl.single_controller.batches import HeldRows
from streamrl.single_controller.data_proto import METRICS, DataProto
from streamrl.single_controller.decorator import MeshDispatch, register
from streamrl.single_controller.metrics import Mean, is_metrics
from streamrl.workers.contract import WRITES
from transfer_queue.keys import row_key
from transfer_queue.metadata import KVBatchMeta

if TYPE_CHECKING:
    import torch

    from agent_loop.trajectory import Trajectory

F = TypeVar("F", bound=Callable[..., Any])

PARTITION = "held"
SCORES = ("token_level_scores", "rm_scores")
OF_TRAJECTORIES = ("response_mask", "rollout_log_probs", "weight_versions")
INSTEAD = {"loss_mask": "response_mask"}
"""A column, and the one that stands for it where it is absent."""


def rows_or_references(mesh: str) -> Callable[[F], F]:
    """Register a method of a `TrainingWorker` that takes references, so that it also takes a `DataProto`."""

    def mark(method: F) -> F:
        @functools.wraps(method)
        def either(worker: Any, batch: KVBatchMeta | HeldRows) -> Any:
            if isinstance(batch, KVBatchMeta):
                return method(worker, batch)
            if not isinstance(batch, HeldRows):
                raise TypeError(f"{method.__name__} takes a KVBatchMeta or a DataProto, not {type(batch).__name__}")
            store = HeldStore(batch)
            with worker.rows_from(store):
                measured = method(worker, store.references)
            return store.result(WRITES[method.__name__], measured)

        return register(MeshDispatch(mesh, references_to))(either)  # type: ignore[return-value]

    return mark


def references_to(data: DataProto) -> KVBatchMeta:
    """Keys, lengths and control information of the rows. Raises ValueError naming what does not fit."""
    lengths = Spans(data)
    tags = [
        {"prompt_len": whole - response, "response_len": response, "seq_len": whole}
        for whole, response in zip(lengths.whole, lengths.responses, strict=True)
    ]
    keys, there = _keys(data), data.batch if data.batch is not None else {}
    info: dict[str, Any] = {name: value for name, value in data.meta_info.items() if name != METRICS}
    if name := next((name for name in SCORES if name in there), None):
        info["scores"] = _scores(keys, lengths.column(name))
    if "advantage" in data.non_tensor_batch:
        info["advantages"] = dict(zip(keys, map(float, data.non_tensor_batch["advantage"]), strict=True))
    info["reward_columns"], info["advantage_columns"] = "token_level_rewards" in there, "advantages" in there
    return KVBatchMeta(keys, tags, PARTITION, extra_info=info)


class Spans:
    """Where the tokens are in a batch: columns in and out of their padding."""

    def __init__(self, data: DataProto) -> None:
        """Raises ValueError for fields that are missing or do not fit together."""
        self._data, self._batch = data, data.batch
        self.width: int | None = None
        """R; None for jagged fields."""
        self.whole: list[int] = []
        """P + R of each row."""
        self.responses: list[int] = []
        if not len(data):
            return
        response = next((name for name in ("response_mask", "responses") if name in self._named()), "response_mask")
        ids, responses = self._tensor("input_ids"), self._tensor(response)
        if ids.is_nested:
            self.whole, self.responses = ([len(row) for row in tensor.unbind()] for tensor in (ids, responses))
            return
        mask = self._tensor("attention_mask").cpu().numpy() > 0
        if mask.shape != tuple(ids.shape) or not 0 < responses.shape[1] < ids.shape[1]:
            raise ValueError(
                f"input_ids {list(ids.shape)}, attention_mask {list(mask.shape)} and {response} "
                f"{list(responses.shape)} do not fit: the first two are [B, P+R], the last is [B, R]"
            )
        self.width = int(responses.shape[1])
        self._mask, of_response = mask, mask[:, -self.width :]
        if (of_response[:, 1:] > of_response[:, :-1]).any():
            raise ValueError("attention_mask has a 0 before a 1 within a response; responses are padded on the right")
        self.whole, self.responses = mask.sum(1).tolist(), of_response.sum(1).tolist()

    def column(self, name: str) -> list[np.ndarray]:
        """One array per row, without padding; whole numbers as i64, others as f32."""
        tensor = self._tensor(name if name in self._named() else INSTEAD.get(name, name)).detach().cpu()
        if tensor.is_nested:
            rows = [row.numpy() for row in tensor.unbind()]
        elif name == "input_ids":
            rows = [ids[mask] for ids, mask in zip(tensor.numpy(), self._mask, strict=True)]
        elif tensor.shape[1] != self.width:
            raise ValueError(f"{name} is {list(tensor.shape)}; a column of the responses is [B, {self.width}]")
        else:
            rows = [row[:count] for row, count in zip(tensor.numpy(), self.responses, strict=True)]
        kind = np.float32 if tensor.is_floating_point() else np.int64
        return [np.ascontiguousarray(row, kind) for row in rows]

    def padded(self, rows: Sequence[np.ndarray]) -> torch.Tensor:
        """f32[B, R], or jagged: the inverse of `column`."""
        import torch

        if self.width is None:
            return torch.nested.nested_tensor([torch.from_numpy(row) for row in rows], layout=torch.jagged)
        found = torch.zeros(len(rows), self.width)
        for place, row in zip(found, rows, strict=True):
            place[: len(row)] = torch.from_numpy(row)
        return found

    def _named(self) -> set[str]:
        return set() if self._batch is None else set(map(str, self._batch.keys()))

    def _tensor(self, name: str) -> torch.Tensor:
        if self._batch is None or name not in self._named():
            raise ValueError(f"the DataProto has no tensor {name!r}; it has {self._data.fields()}")
        return self._batch[name]


class HeldStore:
    """Implements RowStore over a rank's share of the rows; remembers what was written."""

    def __init__(self, held: HeldRows) -> None:
        self._spans, self._all = Spans(held.rows), held.references.keys
        self._place = {key: i for i, key in enumerate(self._all)}
        pairs = zip(self._all, self._spans.whole, self._spans.responses, strict=True)
        self.references = held.references.select_keys([key for key, whole, r in pairs if 0 < r < whole])
        self._written: dict[str, dict[str, np.ndarray]] = {}

    def get(self, partition: str, keys: list[str], fields: list[str] | None = None) -> dict[str, list[np.ndarray]]:
        columns = {name: self._spans.column(name) for name in fields or ()}
        return {name: [column[self._place[key]] for key in keys] for name, column in columns.items()}

    def put(
        self, partition: str, keys: list[str], columns: Mapping[str, Any], *,
        tags: list[dict[str, Any]] | None = None, token: Any = None,
    ) -> None:  # fmt: skip
        for name, values in columns.items():
            self._written.setdefault(name, {}).update(zip(keys, values, strict=True))

    def close(self) -> None: ...

    def result(self, names: Sequence[str], measured: Any) -> DataProto:
        """The columns, for all rows of the share, and in `meta_info` what was measured."""
        if "scores" in measured:  # compute_rm_scores
            measured = measured["metrics"]
        elif not is_metrics(measured):  # compute_rewards
            measured = {"actor/reward_kl_penalty": Mean(measured["kl"], measured["rows"])}
        nothing = dict(zip(self._all, (np.zeros(count, np.float32) for count in self._spans.responses), strict=True))
        columns = {name: self._spans.padded([*(nothing | self._written.get(name, {})).values()]) for name in names}
        return DataProto.from_dict(columns, meta_info={METRICS: measured})


def padded_trajectories(
    trajectories: Sequence[Trajectory], prompt_length: int, response_length: int
) -> dict[str, torch.Tensor]:
    """As tensors: prompts [B, P], padded on the left; responses, response_mask, rollout_log_probs, weight_versions
    [B, R], padded on the right; input_ids, attention_mask, position_ids [B, P+R]. Raises ValueError for a row that is
    longer."""
    import torch

    size, width = len(trajectories), prompt_length + response_length
    ids, mask = (np.zeros((size, width), np.int64) for _ in range(2))
    columns = {name: np.zeros((size, response_length), RAGGED_FIELDS[name]) for name in OF_TRAJECTORIES}
    for i, trajectory in enumerate(trajectories):
        p, r = len(trajectory.prompt_ids), len(trajectory.response_ids)
        if p > prompt_length or r > response_length:
            raise ValueError(
                f"row {i} has {p} prompt and {r} response tokens; there is room for {prompt_length} and "
                f"{response_length}"
            )
        span = slice(prompt_length - p, prompt_length + r)
        ids[i, span], mask[i, span] = trajectory.prompt_ids + trajectory.response_ids, 1
        for name, column in columns.items():
            column[i, :r] = getattr(trajectory, name)
    found = {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0), **columns}
    tensors = {name: torch.from_numpy(values) for name, values in found.items()}
    whole = tensors["input_ids"]
    return {"prompts": whole[:, :prompt_length], "responses": whole[:, prompt_length:], **tensors}


def _keys(data: DataProto) -> list[str]:
    """uid, session and, where a session has several rows, the place of the row in it."""
    others = data.non_tensor_batch
    uids = [str(uid) for uid in others["uid"]] if "uid" in others else [f"row{i}" for i in range(len(data))]
    sessions, rows, keys = Counter[str](), Counter[tuple[str, int]](), []
    for i, uid in enumerate(uids):
        session = int(others["session"][i]) if "session" in others else sessions[uid]
        sessions[uid] += 1
        keys.append(row_key(uid, session, rows[uid, session]))
        rows[uid, session] += 1
    return keys


def _scores(keys: Sequence[str], column: Sequence[np.ndarray]) -> dict[str, float]:
    """The one score of each row, wherever in it. Raises ValueError for a row with several."""
    for key, values in zip(keys, column, strict=True):
        if np.count_nonzero(values) > 1:
            raise ValueError(
                f"row {key} has scores at {np.count_nonzero(values)} tokens; scores are one per row. What each token "
                "earns goes in token_level_rewards, which compute_advantage takes as it is"
            )
    return {key: float(values.sum()) for key, values in zip(keys, column, strict=True)}
