"""What deterministic mode promises to be the same of two runs, read from their directories."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from streamrl.monitor.metrics_log import read_metrics, read_validations
from streamrl.trainer.batch_log import read_batch_log
from streamrl.trainer.deterministic import comparable


def result(run: Path) -> dict[str, Any]:
    """What has to be the same: weights and optimizer as the last checkpoint has them, batches, metrics, validations."""
    newest = max((run / "checkpoints").glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    return {
        "state": {str(file.relative_to(newest)): content(file) for file in sorted(newest.glob("actor/**/*"))},
        "batches": [(step.step, step.uids) for step in read_batch_log(run / "batches.jsonl")],
        "metrics": [told(comparable(line)) for line in read_metrics(run)],
        "validations": list(read_validations(run)),
    }


def told(metrics: dict[str, float]) -> dict[str, str]:
    """Exact, and equal to itself where it is not a number."""
    return {name: repr(value) for name, value in metrics.items()}


def content(file: Path) -> str:
    """Digest of what is in a file: of tensors without the header, whose order is the library's."""
    if file.suffix != ".safetensors":
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        digest.update(f"{name}{tensor.shape}{tensor.dtype}".encode() + tensor.tobytes())
    return digest.hexdigest()
