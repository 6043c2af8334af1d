"""How new weights travel from the trainer's ranks to the LLM servers.

```
 rank 0 ──write(state, v)──► v00000042.safetensors ──► LATEST          (a directory on tmpfs)
                                     │                    │
 manager ──update_weights(path, v)──►│ servers map it     │ a server that (re)starts asks latest() before it serves
```

One interface, `WeightSync`: `write(state, version)` makes a version complete and findable, `latest()` names the newest
complete one, `read(path)` gives its tensors, under Hugging Face's parameter names, full and unsharded. A version is
never half visible: the file appears by rename, and LATEST is replaced after it. The same calls will carry a collective
broadcast (`path` then names a group, not a file) and a plain disk; `shared_memory.WeightStore` is what stands.
"""

from __future__ import annotations

from streamrl.weight_sync.protocol import (
    WeightError,
    WeightInfo,
    WeightsDamaged,
    WeightsMismatch,
    WeightsMissing,
    WeightsNotPrivate,
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
]
