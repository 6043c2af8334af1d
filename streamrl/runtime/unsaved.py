"""Steps that were trained and never saved (trainer.save_freq=-1), when a run is resumed that was killed.

Without checkpoints an ack is final at once, so the queue knows the prompts of these steps as done, and their weights
died with the process. So the queue begins anew, and the prompts are issued again, from the dataset, as for a run that
has lost its queue (streamrl/trainer/queue_cut.py).
"""

from __future__ import annotations

import os
import shutil

from streamrl.errors import UserError
from streamrl.runtime.run_dir import RunDirectory
from streamrl.runtime.runs import free_held
from streamrl.trainer.batch_log import last_committed
from streamrl.trainer.checkpoint import CheckpointStore
from transfer_queue.errors import Invalid
from transfer_queue.storage.unit_files import lock_file

DYING_SECONDS = 20.0
"""For the queue's processes of a run that was killed to be gone."""


def give_up_unsaved(run: RunDirectory) -> str:
    """What to tell of such steps of a run that is about to go on; empty if there are none. The queue directory is gone
    then. Raises DamagedFileError for the run's batch log, UserError where the queue is still served."""
    newest = max(CheckpointStore(run.checkpoints).steps(), default=0)
    lost = last_committed(run.batches, unsaved=True)
    if lost <= newest or last_committed(run.batches) > newest:  # that checkpoint is missed, and will be asked for
        return ""
    if run.queue.is_dir():
        try:
            os.close(lock_file(run.queue / "service.lock", "this run", wait=DYING_SECONDS))
        except Invalid as error:
            raise UserError(str(error)) from error
        free_held(run.path)
        shutil.rmtree(run.queue)
    steps = f"step {lost} was" if lost == newest + 1 else f"steps {newest + 1} to {lost} were"
    place = f"the checkpoint of step {newest}" if newest else "the beginning, as there is no checkpoint"
    return (
        f"{steps} trained and never saved (trainer.save_freq=-1), so the run goes on from {place}; their prompts are "
        "trained again"
    )
