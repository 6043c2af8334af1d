"""What a run's key gives: the CURVE pairs of its sockets, the password and the key of its bulk frames.

One secret per run lies in one file of mode 0600 (`read_key`); everything else is derived from it, so there is nothing
more to hand out, to lose or to leave readable. Who has the file may speak for the run; who has not gets nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import zmq
from blake3 import blake3
from zmq.utils import z85

_CONTEXT = "transfer_queue 2026 "
"""Distinguishes our derived keys from those of any other use of the same secret."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Keys in the form in which they are used: CURVE ones in Z85, `bulk` as 32 bytes, `password` in hex.

    The password opens a bulk socket that is not encrypted, and so crosses the network as it is: it proves nothing.
    """

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)
    bulk: bytes = field(repr=False)
    password: bytes = field(repr=False)


@lru_cache(maxsize=8)
def credentials(key: str) -> Credentials:
    """All keys of the run whose key (the text of its key file) is `key`."""
    server, client = (z85.encode(_derive(key, role)) for role in ("curve server", "curve client"))
    password = _derive(key, "bulk password").hex().encode()
    return Credentials(
        zmq.curve_public(server), server, zmq.curve_public(client), client, _derive(key, "bulk"), password
    )


def _derive(key: str, purpose: str) -> bytes:
    return blake3(key.encode(), derive_key_context=_CONTEXT + purpose).digest()
