"""The ledger: who may read what, once. A plain state machine: no clock, no socket, no file."""

from transfer_queue.ledger.dump import dump, load
from transfer_queue.ledger.ledger import Ledger
from transfer_queue.ledger.retelling import again, kept

__all__ = ["Ledger", "again", "dump", "kept", "load"]
