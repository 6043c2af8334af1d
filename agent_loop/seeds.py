"""Seeds derive from names, never from arrival: (run seed, uid, session, turn) gives the same number everywhere."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the parts, their order and their types. Stable across processes and Python versions."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = repr(part).encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> 1
