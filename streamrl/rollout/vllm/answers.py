"""What workers of vLLM tell beside its own calls, while its steps go on: JSON in datagrams, to a socket in a private
directory.

A call of a worker's method (`collective_rpc`) holds up the engine until it returns. So what takes long is begun by one,
and its end told here.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
from typing import Any

_NAME = "answers"


def tell(address: str, about: str, answer: list[str]) -> None:
    """From a worker. Nobody listens any more: nobody needs it."""
    data = json.dumps({"about": about, "answer": answer}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(data, address)
        except OSError:
            return


class Answers(asyncio.DatagramProtocol):
    """Those about one question at a time; others are dropped."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="streamrl-vllm-")
        self.address = os.path.join(self._directory, _NAME)
        self._about, self._count = "", 0
        self._found: list[list[str]] = []
        self._all: asyncio.Future[list[list[str]]] | None = None
        self._transport: asyncio.BaseTransport | None = None

    async def listen(self) -> None:
        self._transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: self, local_addr=self.address, family=socket.AF_UNIX
        )

    def expect(self, about: str, count: int) -> asyncio.Future[list[list[str]]]:
        """All answers about it, of `count` workers. To be asked before them."""
        self._about, self._count, self._found = about, count, []
        self._all = asyncio.get_running_loop().create_future()
        return self._all

    def datagram_received(self, data: bytes, addr: Any) -> None:
        try:
            got = json.loads(data)
        except ValueError:
            return
        if self._all is None or self._all.done() or got.get("about") != self._about:
            return
        self._found.append(got["answer"])
        if len(self._found) == self._count:
            self._all.set_result(self._found)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        shutil.rmtree(self._directory, ignore_errors=True)
