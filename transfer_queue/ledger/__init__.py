"""The ledger: who may read what, once. A plain state machine: no clock, no socket, no file."""

from transfer_queue.ledger.ledger import Ledger

__all__ = ["Ledger"]
