"""`python -m streamrl.main key=value ...` is `streamrl train key=value ...`, for scripts written for verl."""

from __future__ import annotations

import sys

from streamrl.cli import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
