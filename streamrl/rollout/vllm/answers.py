"""What workers of vLLM tell beside its own calls, while its steps go on: JSON in datagrams, to a name that ends with
the server's process.

A call of a worker's method (`collective_rpc`) holds up the engine until it returns. So what takes long is begun by one,
and its end told here. The name is no file (Linux' abstract namespace): other users could send to it, and are not heard.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import struct

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the sender, as the kernel says."""
_LARGEST = 1 << 16
"""Bytes of an answer."""


def tell(address: str, about: str, answer: list[str]) -> None:
    """From a worker. Where nobody listens any more, nobody needs it."""
    data = json.dumps({"about": about, "answer": answer}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(data, f"\0{address}")
        except OSError:
            return


class Answers:
    """Those about one question at a time; others are dropped."""

    def __init__(self) -> None:
        self.address = f"streamrl-vllm-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{self.address}")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._about, self._count = "", 0
        self._found: list[list[str]] = []
        self._all: asyncio.Future[list[list[str]]] | None = None

    def expect(self, about: str, count: int) -> asyncio.Future[list[list[str]]]:
        """All answers about it, of `count` workers. To be called before they are asked."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket, self._hear)
        self._about, self._count, self._found = about, count, []
        self._all = self._loop.create_future()
        return self._all

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
        self._socket.close()

    def _hear(self) -> None:
        try:
            data, told, *_ = self._socket.recvmsg(_LARGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return
        users = [_CREDENTIALS.unpack(value)[1] for _, kind, value in told if kind == socket.SCM_CREDENTIALS]
        if users != [os.getuid()] or self._all is None or self._all.done():
            return
        got = json.loads(data)
        if got["about"] != self._about:
            return
        self._found.append(got["answer"])
        if len(self._found) == self._count:
            self._all.set_result(self._found)
