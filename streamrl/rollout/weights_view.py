"""A model's directory with other weights, for engines that load a directory in Hugging Face's layout."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_LEFT_OUT = ("config.json", "generation_config.json")


class WeightsView:
    """A private directory of links: the model's files, with its own weights or, as `model.safetensors`, others.

    Costs no copy; whoever reads it must see the same file system. The config names no end-of-sequence token: which
    tokens end a request is the request's to say.
    """

    def __init__(self, model_path: str) -> None:
        """Raises OSError, ValueError (no config.json that can be read)."""
        model = Path(model_path).absolute()
        config = json.loads((model / "config.json").read_text()) | {"eos_token_id": None}
        self.directory = tempfile.mkdtemp(prefix="streamrl-weights-")
        self._own: list[Path] = []
        Path(self.directory, "config.json").write_text(json.dumps(config))
        for file in model.iterdir():
            if file.is_file() and file.name not in _LEFT_OUT:
                link = Path(self.directory, file.name)
                link.symlink_to(file)
                if file.name.endswith(_WEIGHTS):
                    self._own.append(link)

    def show(self, path: str) -> str:
        """The directory, from now on with `path` as its weights."""
        while self._own:
            self._own.pop().unlink()
        fresh = Path(self.directory, ".next")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(os.path.abspath(path))
        os.replace(fresh, Path(self.directory, "model.safetensors"))
        return self.directory

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
