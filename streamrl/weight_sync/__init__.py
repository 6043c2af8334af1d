"""How new weights travel from the trainer's ranks to the LLM servers.

```
 every rank ──publish(its share, v)──► a version is complete      shm, disk: a file, each rank its rows; delta: changes
                                              │                   collective: held by the ranks
 manager ──prepare(path, v)──► each server has it aside, checked  │ whoever failed is out, the old version is served
         ──commit(v)─────────► between two of its steps
         ──LATEST────────────► what a server that (re)starts loads before it serves
```

The trainer's end is a `Publisher` (publisher.py), chosen by configuration; what becomes of a failure is decided in
two_phase.py; a server reads with `read_weights(path)` or, beside a live model, `load.stage`. `WeightStore` is the
directory of versions, in shared memory or on a disk: a version in it is whole or absent, and LATEST names one that
servers have. plan.py says which rank's numbers belong to which worker of a tensor parallel server.
"""

from __future__ import annotations

from streamrl.weight_sync.protocol import (
    WeightError,
    WeightInfo,
    WeightsDamaged,
    WeightsMismatch,
    WeightsMissing,
    WeightsNotPrivate,
    WeightsNotWritten,
    WeightSync,
)
from streamrl.weight_sync.shared_memory import WeightStore

__all__ = [
    "WeightError",
    "WeightInfo",
    "WeightStore",
    "WeightSync",
    "WeightsDamaged",
    "WeightsMismatch",
    "WeightsMissing",
    "WeightsNotPrivate",
    "WeightsNotWritten",
]
