"""A DataProto in one safetensors file that holds no pickle.

batch/NAME      a dense field
jagged/NAME     the rows of a jagged field, one after the other; lengths/NAME i64[rows], how long each is
others          uint8: non_tensor_batch and meta_info as the queue stores objects (transfer_queue.storage.objects)
fields (JSON, in the header)      the fields of `batch` in their order, or null; `format` names this layout
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.single_controller.data_proto import DataProto
from transfer_queue.errors import Corrupt
from transfer_queue.storage.objects import decode_object, encode_object

FORMAT = "streamrl.DataProto.1"


def save(data: DataProto, path: str | os.PathLike[str]) -> None:
    """Write the file whole or not at all. Raises TypeError naming what it cannot hold."""
    import torch
    from safetensors.torch import save_file

    columns: dict[str, torch.Tensor] = {}
    fields = None if data.batch is None else [str(name) for name in data.batch.keys()]  # noqa: SIM118
    for name in fields or ():
        value = data.batch.get(name)  # type: ignore[union-attr]
        if not isinstance(value, torch.Tensor) or (value.is_nested and value.layout is not torch.jagged):
            raise TypeError(f"batch[{name!r}] is {type(value).__name__}; a file holds dense and jagged tensors only")
        if value.is_nested:
            rows = value.unbind()
            columns[f"jagged/{name}"] = torch.cat(rows) if rows else value.values()
            columns[f"lengths/{name}"] = torch.tensor([len(row) for row in rows], dtype=torch.long)
        else:
            columns[f"batch/{name}"] = value
    others = {name: _packed(values) for name, values in data.non_tensor_batch.items()}
    rest = encode_object([others, data.meta_info], field="non_tensor_batch and meta_info")
    columns["others"] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
    path = Path(path)
    draft = path.with_name(f"{path.name}.draft")
    save_file(_own(columns), draft, metadata={"format": FORMAT, "fields": json.dumps(fields)})
    os.replace(draft, path)


def load(path: str | os.PathLike[str]) -> DataProto:
    """What `save` wrote, on the CPU. Raises ValueError for a file that is no such one, FileNotFoundError."""
    from safetensors import SafetensorError, safe_open
    from tensordict import TensorDict

    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header.get("format") != FORMAT:
            raise ValueError(f"its format is {header.get('format')!r}, not {FORMAT!r}")
        others, meta = decode_object(columns["others"].numpy())
        fields, batch = json.loads(header["fields"]), None
        if fields is not None:
            found: dict[str, Any] = {name: _field(columns, name) for name in fields}
            rows = {value.size(0) for value in found.values()}
            if len(rows) > 1:
                raise ValueError(f"fields of {sorted(rows)} rows")
            batch = TensorDict(found, batch_size=[rows.pop() if rows else 0])
        return DataProto(batch, {name: _unpacked(values) for name, values in others.items()}, meta)
    except (SafetensorError, Corrupt, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{os.fspath(path)} holds no DataProto: {type(error).__name__}: {error}") from error


def _packed(values: np.ndarray) -> dict[str, Any]:
    return {"objects": list(values)} if values.dtype == object and values.ndim == 1 else {"array": values}


def _unpacked(held: dict[str, Any]) -> np.ndarray:
    if "array" in held:
        return held["array"]
    found = np.empty(len(held["objects"]), dtype=object)
    found[:] = held["objects"]
    return found


def _field(columns: dict[str, Any], name: str) -> Any:
    import torch

    from streamrl.single_controller.tensordicts import no_jagged_rows

    if f"batch/{name}" in columns:
        return columns[f"batch/{name}"]
    flat, lengths = columns[f"jagged/{name}"], columns[f"lengths/{name}"].tolist()
    if not lengths:
        return no_jagged_rows(flat)
    return torch.nested.as_nested_tensor(list(flat.split(lengths)), layout=torch.jagged)


def _own(columns: dict[str, Any]) -> dict[str, Any]:
    """Contiguous, and no two of the same memory, which safetensors refuses."""
    seen: set[int] = set()
    found = {}
    for name, value in columns.items():
        value = value.detach().cpu().contiguous()
        place = value.untyped_storage().data_ptr()
        found[name] = value.clone() if place in seen else value
        seen.add(place)
    return found
