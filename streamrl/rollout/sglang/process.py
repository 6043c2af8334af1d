"""An SGLang server as a process group of its own, which ends with this process however that ends.

```
 this process ── stdin: arguments, then a lifeline ──► child.py ── HTTP server, scheduler, workers
              ◄─ HTTP on loopback, with a key made here ──┘      └── log file
```
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from agent_loop.llm.keys import ApiKey
from streamrl.rollout.sglang.options import SglangOptions, arguments, environment
from streamrl.rollout.sglang.wire import SglangHttp

if TYPE_CHECKING:
    from streamrl.rollout.server_config import RolloutServerConfig

READY_EVERY = 0.25
"""A server that starts tells nobody when it is ready; it is asked this often (seconds)."""
TERM_SECONDS = 3.0
"""For the group to end by itself; then it is killed."""
_CHILD = Path(__file__).with_name("child.py")
_LOG_SHOWN = 2000


class SglangProcess:
    """`url` and `key` reach it. Belongs to the event loop that started it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, key: ApiKey, directory: Path) -> None:
        self.url, self.key, self.directory = url, key, directory
        self._process = process

    @classmethod
    async def start(cls, config: RolloutServerConfig, options: SglangOptions) -> SglangProcess:
        """Ready on return. Raises ValueError: what keeps it from starting, with the end of its log."""
        assert options.python is not None
        python = os.path.expanduser(options.python)  # noqa: ASYNC240  # touches no file
        if not os.access(python, os.X_OK):
            raise ValueError(f"rollout.sglang.python {options.python!r} is no interpreter that can be run")
        key, port = ApiKey(secrets.token_urlsafe(32)), _free_port()
        given = arguments(config, options, port=port, key=key.value)
        directory = Path(tempfile.mkdtemp(prefix="streamrl-sglang-"))
        with (directory / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                python, "-u", _CHILD,
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                env=environment(config, options), start_new_session=True,
            )  # fmt: skip
        started = cls(process, f"http://127.0.0.1:{port}", key, directory)
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(given).encode() + b"\n")
            async with asyncio.timeout(options.start_seconds):
                await started._ready()
        except TimeoutError:
            why = f"it was not ready within {options.start_seconds:.0f} s"
            raise await started._failed(why) from None
        except ChildProcessError as error:
            raise await started._failed(str(error)) from None
        except BaseException:
            await started.end()
            raise
        return started

    @property
    def pid(self) -> int:
        """Of the group, too."""
        return self._process.pid

    async def ended(self) -> str:
        """Returns when the process has ended: how."""
        code = await self._process.wait()
        return f"its process has ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def log(self) -> str:
        """The end of what it wrote."""
        with contextlib.suppress(OSError):
            return (self.directory / "log").read_text(errors="replace")[-_LOG_SHOWN:]
        return ""

    async def end(self) -> None:
        """The whole group, and what it left. Ending twice is fine."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TERM_SECONDS):
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    async def _ready(self) -> None:
        http = SglangHttp(self.url, self.key)
        ended = asyncio.ensure_future(self.ended())
        try:
            while not await http.is_ready():
                if (await asyncio.wait({ended}, timeout=READY_EVERY))[0]:
                    raise ChildProcessError(ended.result())
        finally:
            ended.cancel()
            await http.close()

    async def _failed(self, why: str) -> ValueError:
        log = self.log()
        await self.end()
        return ValueError(f"SGLang does not start: {why}. The end of its log:\n{log}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
