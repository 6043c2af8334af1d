"""One life of a run: a fork of this process, which saves it Python's start and the imports."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from streamrl.config import StreamRLConfig


def life(config: StreamRLConfig, output: Path, cpu_seconds: float | None) -> bool:
    """One life of a run; whether it was killed. Raises AssertionError for one that ended otherwise than at its end."""
    from streamrl.cli import _launch

    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        code = 70
        try:
            handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            if cpu_seconds is not None:
                signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF, and nobody handles it
            code = _launch(config)
        except BaseException as error:  # noqa: BLE001 - it goes to the file, and the parent looks at the code
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    status = os.waitpid(process, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return True
    assert status == 0, f"a life ended with status {status}:\n{output.read_text()[-3000:]}"
    return False
