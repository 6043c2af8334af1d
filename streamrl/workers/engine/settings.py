"""What an engine is told at its construction: the model, how it lies on the ranks, and how it is stepped."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamrl.config.sections.actor import FSDPConfig, OptimConfig
from streamrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRASettings:
    """Adapters W + alpha / rank * B A beside frozen weights (arXiv:2106.09685)."""

    rank: int
    alpha: float = 16
    target_modules: str | tuple[str, ...] = "all-linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """All an engine knows of a run. Losses, advantages and data are its caller's."""

    model_path: str
    gradient_checkpointing: bool = False
    packed: bool = True
    """Rows of a micro-batch one after the other, without padding; models that cannot, get padded rows."""
    lora: LoRASettings | None = None
    optim: OptimConfig | None = None
    """None: the model is frozen and has no optimizer."""
    grad_clip: float = 1.0
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    sequence_parallel: int = 1
    """Ranks that share each row (Ulysses)."""
    target_kl: float | None = None
    """No step on a mini-batch with a larger mean of the sums `rollout_k3_kl` over `tokens`."""
    entropy_grad: bool = False
    """The loss has an entropy term: keep its graph."""
    seed: int = 42
    deterministic: bool = False
    """On a GPU, only operations that give the same again; an error names one that does not."""

    def __post_init__(self) -> None:
        if self.sequence_parallel < 1:
            raise ConfigError(f"sequence_parallel={self.sequence_parallel}: at least one rank has to hold a row")
        if self.sequence_parallel > 1 and not self.packed:
            raise ConfigError(
                f"sequence_parallel={self.sequence_parallel} cuts packed rows; set use_remove_padding=true"
            )
        if self.fsdp.model_dtype == "fp64" and self.fsdp.dtype is not None:
            raise ConfigError(
                f"fsdp_config.model_dtype=fp64 computes in float64; fsdp_config.dtype={self.fsdp.dtype} would undo it"
            )
