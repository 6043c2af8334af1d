"""What was trained, kept so that it can be trained again: `trainer.record` writes it, `trainer.replay` reads it.

    training ranks ──RecordWriter──► <run>/trajectories/step-*.safetensors
                                              │
    <run>/batches.jsonl (which groups) ───────┴──► Recording ──ReplayAgents──► queue ──► the same trainer

A replayed run has no agents and no LLM servers: the trajectories come from the record, everything after them is real.
The same configuration gives the same numbers; another loss or estimator sees exactly the same data.
"""

from __future__ import annotations
