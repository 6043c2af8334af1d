"""What computes: the actor's ranks, their losses, and the engines below them.

actor.py        reads its rows from the queue, makes mini-batches, writes its columns, returns metrics
critic.py       the same for values
held_rows.py    the same methods over a DataProto that the caller holds: padded at this edge only
rollout.py      generation as a method, for loops that wait for a whole batch
losses.py       joins an engine's log-probs to the functions of streamrl.algorithms
engine/         a model, its optimizer and its checkpoints on some number of ranks
sim_actor.py    the actor's methods without a model: they only take time
"""

from __future__ import annotations
