"""What a process listens to, as the kernel says: TCP ports and Unix sockets."""

from __future__ import annotations

import ipaddress
import os
import struct
from pathlib import Path

_LISTEN = "0A"
_ACCEPTS = 0x10000


def tcp_listeners(pid: int) -> list[tuple[str, int]]:
    """(IP, port) of each TCP socket on which process `pid` accepts connections. Raises OSError if it is not ours."""
    mine = _socket_inodes(pid)
    found = []
    for table in ("tcp", "tcp6"):
        for line in _lines(Path(f"/proc/{pid}/net/{table}")):
            local, state, inode = line[1], line[3], line[9]
            if state == _LISTEN and inode in mine:
                address, _, port = local.partition(":")
                found.append((_ip(address), int(port, 16)))
    return sorted(found)


def unix_listeners(pid: int) -> list[str]:
    """Paths of the Unix sockets on which process `pid` accepts connections. Raises OSError if it is not ours."""
    mine = _socket_inodes(pid)
    lines = (line for line in _lines(Path(f"/proc/{pid}/net/unix")) if len(line) > 7)
    return sorted(line[7] for line in lines if int(line[3], 16) & _ACCEPTS and line[6] in mine)


def _lines(table: Path) -> list[list[str]]:
    return [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _ip(text: str) -> str:
    """The kernel writes each 32-bit word of an address as a number of this machine's byte order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))
