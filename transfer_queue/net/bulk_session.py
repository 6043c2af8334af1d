"""Who may move bulk bytes, and that nobody changed or repeats a frame: a keyed BLAKE3 over each.

    client  Open(mine)                      ->   unit
    client  <- Opened(mine, theirs, MAC with the run's bulk key)      session key = KDF(bulk key, mine, theirs)
    client  [header][bytes][MAC over direction, id, lengths, header, bytes]   ->   unit, and back in the same form

`mine` is fresh for each client object, `theirs` for each life of a unit, so a frame recorded in one session has no
meaning in another one; within a session request ids only grow. The unit keeps no state of anybody who has not sent a
frame with a right MAC. BLAKE3 makes 5 GiB/s on one core where BLAKE2b makes 0.9 (measured on 8 MiB frames).
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections import OrderedDict

from blake3 import blake3

NONCE = 16
"""Bytes of each side's nonce."""

MAC = 32
"""Bytes of a MAC."""

TO_UNIT, TO_CLIENT = 0, 1

KEPT_SESSIONS = 65536
"""Sessions of which a unit remembers the last request id; those heard from last are kept."""

_PREFIX = struct.Struct("<BQQQ")

_OPENED = b"transfer_queue bulk opened"

_SESSION = b"transfer_queue bulk session"


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE)


def opened_mac(bulk_key: bytes, mine: bytes, theirs: bytes) -> bytes:
    """What a unit shows to prove that it has the run's key."""
    return blake3(_OPENED + mine + theirs, key=bulk_key).digest()


def session_key(bulk_key: bytes, mine: bytes, theirs: bytes) -> bytes:
    return blake3(_SESSION + mine + theirs, key=bulk_key).digest()


def frame_mac(key: bytes, direction: int, request: int, header: bytes, data: bytes | memoryview) -> bytes:
    """Over all that gives a frame its meaning; the lengths, so that no byte can pass from one part to the other."""
    hasher = blake3(_PREFIX.pack(direction, request, len(header), len(data)), key=key)
    hasher.update(header)
    hasher.update(data)
    return hasher.digest()


class Sessions:
    """The unit's side. Invariant: of one session no request id is accepted twice, nor a smaller one than before."""

    def __init__(self, bulk_key: bytes) -> None:
        self._bulk_key = bulk_key
        self._known: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()  # nonce -> session key, last id
        self.nonce = new_nonce()

    def opened(self, mine: bytes) -> bytes:
        """The MAC for Opened. Keeps nothing."""
        return opened_mac(self._bulk_key, mine, self.nonce)

    def accept(self, mine: bytes, request: int, header: bytes, data: bytes, mac: bytes) -> bytes | None:
        """The session's key if the frame is genuine and new, else None."""
        key, last = self._known.get(mine) or (session_key(self._bulk_key, mine, self.nonce), 0)
        if request <= last or not hmac.compare_digest(mac, frame_mac(key, TO_UNIT, request, header, data)):
            return None
        self._known[mine] = key, request
        self._known.move_to_end(mine)
        if len(self._known) > KEPT_SESSIONS:
            self._known.popitem(last=False)
        return key
