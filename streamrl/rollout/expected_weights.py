"""Which weights a model takes, from its own files: looked at before vLLM overwrites anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

from streamrl.weight_sync import WeightsDamaged, WeightsMismatch, WeightsMissing
from streamrl.weight_sync.digest import weights_digest
from streamrl.weight_sync.shared_memory import read_weights

TIED = "lm_head.weight"
"""May be left out, or not, where the model says that its embeddings are tied."""
_NAMED = 4

Shapes = dict[str, tuple[int, ...]]


class ExpectedWeights:
    """Names and shapes of a model directory's safetensors files; any are taken where there are none."""

    def __init__(self, model_path: str) -> None:
        """Raises WeightsDamaged."""
        directory = Path(model_path)
        self._files = sorted(directory.glob("*.safetensors"))
        self._tied = bool(json.loads((directory / "config.json").read_text()).get("tie_word_embeddings"))
        self._shapes: Shapes = {}
        for file in self._files:
            self._shapes |= self._read(str(file))

    def check(self, path: str) -> None:
        """Raises WeightsMissing, WeightsDamaged, WeightsMismatch unless `path` holds weights of this model."""
        given = self._read(path)
        if not self._files:
            return
        missing, unknown = self._shapes.keys() - given.keys(), given.keys() - self._shapes.keys()
        if missing or unknown:
            raise WeightsMismatch(
                f"not this model's weights: missing {_some(missing)}; unknown {_some(unknown)}; nothing was overwritten"
            )
        for name, shape in given.items():
            if shape != self._shapes[name]:
                raise WeightsMismatch(
                    f"{name} has shape {shape}, the model's {self._shapes[name]}; nothing was overwritten"
                )

    def digest(self) -> str | None:
        """Of the weights as the model was saved."""
        if not self._files:
            return None
        return weights_digest(pair for file in self._files for pair in read_weights(str(file)).items())

    def _read(self, path: str) -> Shapes:
        from safetensors import SafetensorError, safe_open

        try:
            if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
                raise ValueError("it is no regular file")
            with safe_open(path, framework="pt") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            if not os.path.exists(path):
                raise WeightsMissing(
                    f"{path} is not there (the last two versions are kept); load what LATEST names"
                ) from error
            raise WeightsDamaged(f"{path} is no whole safetensors file ({error}); publish again") from error
        return {name: shape for name, shape in shapes.items() if not (self._tied and name == TIED)}


def _some(names: set[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return (", ".join(listed[:_NAMED]) + more) or "none"
