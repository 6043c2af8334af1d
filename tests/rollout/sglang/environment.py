"""The environment in which SGLang itself runs on a CPU: `make sglang-env`.

A virtual environment with SGLang and what it imports beyond vLLM's environment, from which it takes the rest (torch,
transformers, fastapi, ...): `make vllm` comes first. About 1.3 GB, a few minutes. SGLang has no CPU build of its
kernels; `standins/` has modules that take their place (and torchvision's) where they are imported and never called.
This shows its HTTP interface, scheduler and native-torch path, not its kernels; SGLang itself does not support it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

VERSION = "0.5.23"

PACKAGES = [
    f"sglang=={VERSION}", "orjson==3.13.0", "gguf==0.19.0", "soundfile==0.14.0", "triton==3.9.0", "ipython==9.18.1",
    "traitlets==5.16.1", "decorator==5.3.1", "stack_data==0.6.3", "executing==2.3.0", "asttokens==3.0.2",
    "pure_eval==0.2.4", "jedi==0.20.1", "parso==0.8.7", "prompt_toolkit==3.0.53", "wcwidth==0.9.4",
    "matplotlib_inline==0.2.2", "pexpect==4.9.0", "ptyprocess==0.7.0",
]  # fmt: skip
"""Without their dependencies."""

STANDINS = Path(__file__).parent / "standins"


def directory() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "streamrl" / f"sglang-{VERSION}"


def python(root: Path) -> Path | None:
    """Its python; None if it was not made, not to the end, or for another checkout, whose packages it shares."""
    made = (root / ".installed").exists() and _shared(root).read_text() == _paths()
    return root / "bin" / "python" if made else None


def make(root: Path) -> None:
    """Make the environment, unless it is there; one of another checkout is this one's from now on."""
    if importlib.util.find_spec("vllm") is None:
        sys.exit("SGLang's environment takes most of its packages from vLLM's: make vllm first")
    if not (root / ".installed").exists():
        venv.create(root, clear=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        subprocess.run([*pip, "--target", str(_shared(root).parent), *PACKAGES], check=True)
    _shared(root).write_text(_paths())
    root.joinpath(".installed").touch()


def _shared(root: Path) -> Path:
    """The file that names the packages which it has from elsewhere."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(root), "platbase": str(root)}), "shared.pth")


def _paths() -> str:
    return f"{STANDINS}\n{sysconfig.get_path('purelib')}\n"


if __name__ == "__main__":
    make(directory())
