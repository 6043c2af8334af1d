"""Checkpoints: all plain rows of a queue in a directory. Rows of prompt groups are left out: their journal keeps them.
Who needs finished groups beside the journal, in the same form, copies them by themselves (groups.py).

    manifest.json    format, what was saved, and of each partition its file and pages (bytes, xxh3-128); its own digest
    00000.rows       one partition: pages of up to ROWS rows or BYTES, each a msgpack Page and then its aligned columns

A row is saved as it was at one moment, tags included; rows that are put, consumed or cleared while a checkpoint is
written may or may not be so in it. The directory appears when all is on disk; one that was there is exchanged for it in
one step (placing.py). A load checks everything before it changes anything, fills partitions that nobody sees and puts
them in place in one step. Nothing is unpickled: the columns are those of segments.
"""

from transfer_queue.checkpoint.format import read_manifest
from transfer_queue.checkpoint.groups import GroupsCopy, copy_groups, load_groups, write_groups
from transfer_queue.checkpoint.loading import load
from transfer_queue.checkpoint.saving import save

__all__ = ["GroupsCopy", "copy_groups", "load", "load_groups", "read_manifest", "save", "write_groups"]
