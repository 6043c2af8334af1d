"""The interface of weight sync and its errors. Imports no torch: managers and monitors use it too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from streamrl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    State = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """One version that is complete. `seconds` is what writing it took (0.0 when it was looked up)."""

    version: int
    path: str
    """Where servers find it: a safetensors file, the directory of a delta, or a `collective:` address."""
    bytes: int
    seconds: float = 0.0
    digest: str = ""
    """Of the trainer's tensors (weight_sync.digest); empty: not known."""
    staged: bool = False
    """LATEST does not name it yet: that is done once servers have it."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds: "gather" until a rank has its share in host memory, "transfer" until all of it lies at `path`."""


class WeightError(Exception):
    """Base of what can go wrong with published weights. A server that raises it still serves its old weights."""


class WeightsMissing(WeightError, FileNotFoundError):
    """The file is not there: never written, or two newer versions have been published since."""


class WeightsDamaged(WeightError, ValueError):
    """The file or LATEST is not what a writer of this package leaves behind, or its checksum is another."""


class WeightsNotWritten(WeightError, OSError):
    """A version could not be made complete; nothing of it is left, and what was published before is still there."""


class WeightsNotPrivate(WeightError, UserError):
    """Other users of the machine could read or replace the weights: the directory is a link, theirs, or open to them.
    Nothing was read or written."""


class WeightsMismatch(WeightError, ValueError):
    """The names or shapes are not those of the model. Nothing was overwritten."""


def check_digest(found: str | None, info: WeightInfo, who: str = "what was read") -> None:
    """Raises WeightsDamaged if the checksum is known on both sides and not the same."""
    if found and info.digest and found != info.digest:
        raise WeightsDamaged(
            f"{info.path}: {who} has checksum {found}, the trainer wrote {info.digest}; publish it again"
        )


class WeightSync(Protocol):
    """How versions travel. There is one writer; readers are many and in other processes."""

    def write(self, state: State, version: int) -> WeightInfo:
        """Make `version` complete, then findable. `state`: full tensors under Hugging Face names."""
        ...

    def latest(self) -> WeightInfo | None:
        """The newest complete version, None before the first. Raises WeightsDamaged."""
        ...

    def read(self, path: str) -> dict[str, Tensor]:
        """The tensors of one version. Raises WeightsMissing, WeightsDamaged."""
        ...
