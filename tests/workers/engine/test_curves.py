"""One loss curve, whatever the engine, the number of ranks and the layout: that of plain PyTorch, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config.sections.actor import FSDPConfig
from streamrl.workers.batch import MicroBatching
from tests.workers.engine.cases import Case, Reference, train
from tests.workers.engine.world import World

pytestmark = pytest.mark.timeout(240)  # the first test waits for the ranks' imports

BOTH = ("fsdp2", "ddp")
EXACT = FSDPConfig(model_dtype="fp64")
OFFLOADED = FSDPConfig(model_dtype="fp64", param_offload=True, optimizer_offload=True)
RESHARDED = FSDPConfig(model_dtype="fp64", reshard_after_forward=True)
BY_ROWS, WHOLE = MicroBatching(max_rows=2), MicroBatching()

LANGUAGE = {
    "one rank": Case(),
    "one rank, one micro-batch": Case(micro=WHOLE),
    "one rank, padded": Case(packed=False),
    "one rank, padded, by rows": Case(packed=False, micro=BY_ROWS),
    "two ranks": Case(ranks=2),
    "two ranks, padded": Case(ranks=2, packed=False),
    "two ranks, llama": Case(ranks=2, model="llama"),
    "two ranks, by rows": Case(ranks=2, micro=BY_ROWS),
    "two ranks share rows": Case(ranks=2, sequence_parallel=2),
    "two ranks share rows, checkpointing": Case(ranks=2, sequence_parallel=2, checkpointing=True, model="llama"),
    "two ranks, checkpointing, resharded": Case(ranks=2, checkpointing=True, fsdp=RESHARDED),
    "two ranks, offload": Case(ranks=2, fsdp=OFFLOADED),
    "four ranks": Case(ranks=4),
    "four ranks, padded, by rows": Case(ranks=4, packed=False, micro=BY_ROWS),
    "four ranks, pairs share rows": Case(ranks=4, sequence_parallel=2, fsdp=OFFLOADED),
    "four ranks share rows, two key-value heads": Case(ranks=4, sequence_parallel=4),
    "four ranks, three rows": Case(ranks=4, rows=3),
}
VALUE = {
    "one rank": Case(),
    "one rank, padded": Case(packed=False, model="llama"),
    "two ranks, checkpointing": Case(ranks=2, checkpointing=True),
    "two ranks share rows, offload": Case(ranks=2, sequence_parallel=2, fsdp=OFFLOADED),
    "four ranks": Case(ranks=4),
    "four ranks, padded, by rows": Case(ranks=4, packed=False, micro=BY_ROWS),
}
_references: dict[tuple[str, str, int], dict[str, Any]] = {}


def reference(case: Case, models: dict[str, Path]) -> dict[str, Any]:
    key = (case.model, case.kind, case.rows)
    if key not in _references:
        _references[key] = Reference(models[case.model], case.kind, case.rows).train()
    return _references[key]


def assert_same(world: World, models: dict[str, Path], case: Case) -> None:
    expected = reference(case, models)
    for found in world.run(case.ranks, train, (case, models)):
        np.testing.assert_allclose(found["curve"], expected["curve"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-6)
        for name, column in found["inferred"].items():
            for index, values in column.items():
                assert values.dtype == np.float64
                np.testing.assert_allclose(values, expected["inferred"][index][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("name", LANGUAGE)
def test_a_policy_learns_the_same_on_any_layout(world: World, models: dict[str, Path], backend: str, name: str) -> None:
    assert_same(world, models, LANGUAGE[name].with_(backend=backend))


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("name", VALUE)
def test_a_critic_learns_the_same_on_any_layout(world: World, models: dict[str, Path], backend: str, name: str) -> None:
    assert_same(world, models, VALUE[name].with_(backend=backend, kind="value_model"))


def test_the_curve_goes_down(models: dict[str, Path]) -> None:
    for kind in ("language_model", "value_model"):
        curve = reference(Case(kind=kind), models)["curve"]
        assert curve[-1] < curve[0] - 1e-2


def test_ranks_run_as_many_micro_batches_as_the_busiest(world: World, models: dict[str, Path]) -> None:
    found = world.run(2, train, (Case(ranks=2, rows=3, micro=MicroBatching(max_rows=1)), models))
    assert [result["rows"] for result in found] == [[0, 2], [1]]
    assert [result["micro_batches"][0] for result in found] == [2, 2]
