"""Which way leads to the controller from here: the Unix socket on its own node, CURVE from any other.

address  run, key_file, socket       always; `socket` is unix://PATH
         network, node               when it also listens by network: curve://IP:PORT, and what `node_of` says of
                                     the directory in which the Unix socket lies
"""

from __future__ import annotations

import os
from pathlib import Path

from transfer_queue.service.lifetime import boot_id


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
