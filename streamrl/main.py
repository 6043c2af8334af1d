"""Where the process begins: Ctrl-C is taken before anything is imported that takes time.

`python -m streamrl.main key=value ...` is `streamrl train --verl key=value ...`, for scripts written for verl.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from streamrl.runtime.interrupts import INTERRUPTS

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """`streamrl ...`; the exit status."""
    try:
        with INTERRUPTS.taken():
            status = _run(argv)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        status = INTERRUPTED
    return status


def _run(argv: Sequence[str] | None) -> int:
    try:
        from streamrl.cli import main as run

        return run(argv)
    except Exception:
        INTERRUPTS.check()  # it may be what became of an interrupt
        raise


def script() -> NoReturn:
    """The process `streamrl`. Python itself would end with the signal instead of our status, if a KeyboardInterrupt
    passed through an exec() on its way (imports are full of them)."""
    status = main()
    if status == INTERRUPTED:
        atexit._run_exitfuncs()  # Ray's, which ends its processes
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    sys.argv[1:1] = ["train", "--verl"]
    script()
