"""The environment in which verl's own code runs against this package: `make verl-env`.

A virtual environment with verl and the tensordict that it pins; what else verl imports and is large (torch, ray,
transformers, ...) it takes from the environment that makes it. About 300 MB, a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

VERSION = "0.9.1"

PACKAGES = [
    f"verl=={VERSION}", "tensordict==0.10.0", "codetiming", "datasets", "dill", "fastapi", "multiprocess", "orjson",
    "pandas", "pillow", "pyarrow", "python-dateutil", "pytz", "six", "starlette", "torchdata", "tzdata", "uvicorn",
]  # fmt: skip
"""What importing verl's replay buffer, agent loop worker and worker bridge needs; without their dependencies."""


def directory() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "streamrl" / f"verl-{VERSION}"


def python(root: Path) -> Path | None:
    """Its python; None if it was not made, or not to the end."""
    return root / "bin" / "python" if (root / ".installed").exists() else None


def make(root: Path) -> None:
    """Make the environment, unless it is there."""
    if python(root) is not None:
        return
    venv.create(root, clear=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(root), "platbase": str(root)}))
    packages.joinpath("shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(packages), *PACKAGES], check=True)
    root.joinpath(".installed").touch()


if __name__ == "__main__":
    make(directory())
