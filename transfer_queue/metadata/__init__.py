"""References to rows: what a control plane passes around instead of the rows themselves.

kv.py       KVBatchMeta: rows by key, with tags
batch.py    BatchMeta: rows by serial, columnar
schema.py   what is known of a field without its data
"""

from transfer_queue.metadata.batch import BatchMeta
from transfer_queue.metadata.kv import KVBatchMeta
from transfer_queue.metadata.schema import extract_field_schema

__all__ = ["BatchMeta", "KVBatchMeta", "extract_field_schema"]
