"""Numbers with limits. msgspec checks a value against them; an error message is made from them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from streamrl.rollout.requests import MIN_TEMPERATURE

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Generators take a signed 64-bit integer."""
Temperature = Annotated[float, Meta(ge=MIN_TEMPERATURE)]
"""Below, logits divided by it overflow and every probability is NaN."""
LearningRate = Annotated[float, Meta(gt=0, le=10)]
"""Above, a step is nothing but overflow."""
Slots = Annotated[int, Meta(ge=1, le=65_536)]
"""Requests that decode together; each takes memory for its context."""
GroupSize = Annotated[int, Meta(ge=1, le=4096)]
"""Samples of one prompt; each is a task in an agent worker."""
Batches = Annotated[float, Meta(ge=0, le=1000)]
"""Of prompts, issued ahead."""
Fraction = Annotated[float, Meta(ge=0, le=1)]
OpenFraction = Annotated[float, Meta(gt=0, le=1)]
Beta = Annotated[float, Meta(ge=0, lt=1)]
"""What an average keeps of itself in a step; at 1 it never learns of a gradient."""
EveryOrNever = Annotated[int, Meta(ge=-1)]
"""A period in steps; -1 (or 0) means never."""
SampleLimit = Annotated[int, Meta(ge=-1)]
"""A number of rows; -1 means all."""
Port = Annotated[int, Meta(ge=0, le=65535)]
"""0 means any free one."""
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
"""Becomes part of a directory name."""
Scalar = str | int | float | bool | None
