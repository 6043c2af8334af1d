"""The first process of an SGLang server: run as a script, by the Python of SGLang's own environment.

Knows nothing but the standard library. Its arguments come as one JSON line on its standard input, so that the API key
stands in no list of processes; the end of that input is the end of who started it, and of this process group.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _main() -> None:
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("no arguments on the standard input: this file is started by streamrl.rollout.sglang.process")
        line += byte
    sys.argv = ["sglang", *json.loads(line)]
    del sys.path[0]  # of this file: its neighbours would be taken for packages of the environment
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
