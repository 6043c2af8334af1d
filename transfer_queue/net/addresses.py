"""Which way leads to the controller from here: the Unix socket on its own node, CURVE from any other.

address  run, key_file, socket       always; `socket` is unix://PATH
         network, node               when it also listens by network: curve://IP:PORT, and what `node_of` says of
                                     the directory in which the Unix socket lies
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from transfer_queue.errors import Invalid
from transfer_queue.service.lifetime import boot_id

ADDRESS_VARIABLE = "TQ_ADDRESS"
"""Environment variable with the address (JSON) of the queue that this process and its children use."""

DIRECTORY_VARIABLE = "TQ_DIRECTORY"
"""Environment variable with the directory of a queue service that was started by somebody else."""


def check_address(address: object, where: str) -> dict[str, str]:
    """The address, of strings. Raises Invalid naming `where` it stands and what it lacks."""
    if not isinstance(address, Mapping):
        raise Invalid(f"{where}={address!r}; expected dict")
    lacks = [part for part in ("run", "key_file", "socket") if not address.get(part)]
    if lacks:
        raise Invalid(
            f"{where} lacks {', '.join(lacks)}; give the whole address that `init` or `QueueService.start` returned, "
            "or the queue's directory"
        )
    return {str(part): str(text) for part, text in address.items()}


def parse_address(text: str) -> dict[str, str]:
    """An address in JSON, as TQ_ADDRESS holds it. Raises Invalid."""
    try:
        address = json.loads(text)
    except (ValueError, RecursionError):
        address = None
    if not isinstance(address, dict):
        raise Invalid(f"{ADDRESS_VARIABLE} holds {text[:60]!r}, not an address in JSON; unset it")
    return check_address(address, ADDRESS_VARIABLE)


def endpoint_of(address: dict[str, str]) -> str:
    """The endpoint to connect to. TQ_FORCE_REMOTE=1 in the environment takes the network wherever there is one."""
    network = address.get("network")
    if network is None:
        return address["socket"]
    if os.environ.get("TQ_FORCE_REMOTE") == "1":
        return network
    directory = Path(address["socket"].partition("://")[2]).parent
    return address["socket"] if node_of(directory) == address.get("node") else network


def node_of(directory: Path) -> str:
    """Equal for two processes only if a Unix socket in `directory` joins them: one kernel, and the same directory.

    Two pods of one host that share no directory differ by it, and two nodes with the same path on NFS by the kernel.
    Empty if there is no such directory here.
    """
    try:
        info = directory.stat()
    except OSError:
        return ""
    return f"{boot_id()}:{info.st_dev}:{info.st_ino}"
