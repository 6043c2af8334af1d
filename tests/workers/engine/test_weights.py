"""Which weights an engine computes with, saves and gives away."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config.sections.actor import FSDPConfig
from streamrl.errors import ConfigError
from streamrl.single_controller.worker import RankInfo
from streamrl.workers.engine import EngineSettings, LoRASettings
from streamrl.workers.engine.checkpoint import ForeignCheckpoint
from streamrl.workers.engine.sequence_parallel import check_heads
from tests.workers.engine.cases import LR, Case, loss_of, make_rows
from tests.workers.engine.scenarios import (
    Trainer,
    keep_a_snapshot,
    load_and_train,
    save_and_train_meanwhile,
    train_adapters,
    train_and_save,
)
from tests.workers.engine.world import World

pytestmark = pytest.mark.timeout(240)  # the first test waits for the ranks' imports

BOTH = ("fsdp2", "ddp")
LORA = LoRASettings(rank=4, alpha=8)
ONE = RankInfo()


@pytest.mark.parametrize("backend", BOTH)
def test_a_snapshot_answers_as_the_weights_did_when_it_was_taken(
    world: World, models: dict[str, Path], backend: str
) -> None:
    for found in world.run(2, keep_a_snapshot, (Case(backend=backend, ranks=2), models, "")):
        assert np.array_equal(found["snapshot"], found["before"])
        assert np.array_equal(found["later"], found["before"])
        assert np.array_equal(found["again"], found["after"])
        assert np.abs(found["after"] - found["before"]).max() > 1e-3


@pytest.mark.parametrize("backend", BOTH)
def test_a_frozen_engine_is_its_own_reference_and_trains_nothing(models: dict[str, Path], backend: str) -> None:
    case = Case(backend=backend)
    offload = FSDPConfig(model_dtype="fp64", param_offload=True, optimizer_offload=True)
    engine, rows = case.start(ONE, models, optim=None, fsdp=offload), make_rows(4)
    found = [engine.infer(rows, temperature=1.0, micro=case.micro, weights=w) for w in ("current", "reference")]
    for a, b in zip(found[0]["log_probs"], found[1]["log_probs"], strict=True):
        assert np.array_equal(a, b)
    with pytest.raises(RuntimeError, match="frozen"):
        engine.train_batch(rows, loss_of(case.kind, 1.0), lr=LR, temperature=1.0, micro=case.micro)
    engine.close()


@pytest.mark.parametrize(("weights", "advice"), [("reference", "an engine of its own"), ("snapshot", "call snapshot")])
def test_weights_that_an_engine_does_not_have_are_an_error(models: dict[str, Path], weights: str, advice: str) -> None:
    trainer = Trainer(ONE, Case(), models)
    with pytest.raises(ValueError, match=advice):
        trainer.infer(weights)
    trainer.engine.close()


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Case("fsdp2", 2), Case("fsdp2", 1)),
        (Case("fsdp2", 2), Case("fsdp2", 4)),
        (Case("fsdp2", 2, kind="value_model"), Case("fsdp2", 4, kind="value_model")),
        (Case("fsdp2", 2, lora=LORA), Case("fsdp2", 4, lora=LORA)),
        (Case("fsdp2", 2), Case("ddp", 1)),
        (Case("ddp", 2), Case("fsdp2", 2)),
        (Case("fsdp2", 2, kind="value_model"), Case("ddp", 2, kind="value_model")),
        (Case("fsdp2", 2, lora=LORA), Case("fsdp2", 1, lora=LORA)),
        (Case("ddp", 1, lora=LORA), Case("fsdp2", 2, lora=LORA)),
    ],
    ids=lambda case: f"{case.backend}-{case.ranks}-{case.kind}-{'lora' if case.lora else 'full'}",
)
def test_a_checkpoint_goes_on_on_other_ranks_and_engines(
    world: World, models: dict[str, Path], tmp_path: Path, saved: Case, loaded: Case
) -> None:
    before = world.run(saved.ranks, train_and_save, (saved, models, str(tmp_path)))[0]
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json", ".safetensors"}
    after = world.run(loaded.ranks, load_and_train, (loaded, models, str(tmp_path)))[0]
    for part in ("state", "all"):
        assert before[part].keys() == after[part].keys()
        assert all(np.array_equal(before[part][name], after[part][name]) for name in before[part])
    assert sum(name.startswith("exp_avg_sq ") for name in after["all"]) > 4
    assert after["next"] == pytest.approx(before["next"], abs=1e-9)


def test_ranks_that_did_not_exist_at_the_save_get_generators_of_their_own(
    world: World, models: dict[str, Path], tmp_path: Path
) -> None:
    before = world.run(2, train_and_save, (Case(ranks=2), models, str(tmp_path)))
    job = (Case(ranks=4), models, str(tmp_path))
    once, again = ([rank["rng"] for rank in world.run(4, load_and_train, job)] for _ in range(2))
    assert once == again
    assert once[:2] == [rank["rng"] for rank in before]
    assert len(set(once)) == 4


@pytest.mark.parametrize(
    "case",
    [Case("fsdp2", 2), Case("ddp", 2), Case("fsdp2", 2, lora=LORA)],
    ids=lambda c: c.backend + "-lora" * bool(c.lora),
)
def test_what_is_held_is_saved_as_it_was_then_whatever_is_trained_meanwhile(
    world: World, models: dict[str, Path], tmp_path: Path, case: Case
) -> None:
    before = world.run(case.ranks, save_and_train_meanwhile, (case, models, str(tmp_path)))[0]
    after = world.run(1, load_and_train, (case.with_(ranks=1), models, str(tmp_path / "second")))[0]
    assert before["all"].keys() == after["all"].keys()
    assert all(np.array_equal(before["all"][name], after["all"][name]) for name in before["all"])
    assert after["next"] == pytest.approx(before["next"], abs=1e-9)


@pytest.mark.parametrize(
    ("saved", "loaded", "says"),
    [
        (Case(), Case(model="llama"), "does not hold lm_head.weight, which this model has"),
        (Case(), Case(kind="value_model"), "does not hold score.bias, which this model has"),
        (Case(lora=LORA), Case(lora=LoRASettings(rank=8, alpha=8)), r"lora_A.* as \[4, 64\].* has it as \[8, 64\]"),
    ],
    ids=["another family", "a critic", "another rank of adapters"],
)
def test_a_checkpoint_of_another_model_is_refused_and_what_differs_is_named(
    models: dict[str, Path], tmp_path: Path, saved: Case, loaded: Case, says: str
) -> None:
    trainer = Trainer(ONE, saved, models)
    trainer.step()
    trainer.engine.save(str(tmp_path))
    trainer.engine.close()
    other = Trainer(ONE, loaded, models)
    with pytest.raises(ForeignCheckpoint, match=says):
        other.engine.load(str(tmp_path))
    other.engine.close()


def test_a_checkpoint_of_adapters_is_small_and_loads_into_adapters_only(
    world: World, models: dict[str, Path], tmp_path: Path
) -> None:
    world.run(1, train_and_save, (Case(lora=LORA), models, str(tmp_path / "lora")))
    world.run(1, train_and_save, (Case(), models, str(tmp_path / "full")))
    sizes = [sum(f.stat().st_size for f in (tmp_path / n / "shards").iterdir()) for n in ("lora", "full")]
    assert sizes[0] < sizes[1]
    trainer = Trainer(ONE, Case(), models)
    with pytest.raises(ValueError, match="holds adapters only"):
        trainer.engine.load(str(tmp_path / "lora"))
    trainer.engine.close()


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("model", ["qwen2", "llama"])
def test_adapters_train_beside_a_frozen_reference_and_are_merged_for_the_rollout(
    world: World, models: dict[str, Path], backend: str, model: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    case = Case(backend=backend, model=model, lora=LORA, checkpointing=model == "llama")
    one = world.run(1, train_adapters, (case, models, ""))[0]
    two = world.run(2, train_adapters, (case.with_(ranks=2), models, ""))
    np.testing.assert_allclose(two[0]["curve"], one["curve"], rtol=0, atol=1e-9)
    assert one["curve"][-1] < one["curve"][0]
    for found in (one, *two):
        assert np.array_equal(found["reference"], found["base"])
        assert np.abs(found["current"] - found["base"]).max() > 1e-3

    plain = AutoModelForCausalLM.from_pretrained(models[model], dtype=torch.float64)
    merged = {name: torch.from_numpy(tensor) for name, tensor in one["state"].items()}
    assert merged.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(merged, strict=False)
    rows = one["rows"]
    with torch.no_grad():
        logs = torch.log_softmax(plain(input_ids=torch.from_numpy(rows.input_ids[0])[None]).logits[0, :-1], -1)
    expected = logs.gather(1, torch.from_numpy(rows.input_ids[0])[1:, None])[-rows.responses[0] :, 0]
    np.testing.assert_allclose(one["current"][: rows.responses[0]], expected.numpy(), atol=1e-9)


def test_a_critic_keeps_the_head_that_its_model_has(models: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(models["llama"], num_labels=1)
    model.score.weight.data.fill_(0.25)
    model.save_pretrained(tmp_path)
    trainer = Trainer(ONE, Case(kind="value_model", model="scored"), models | {"scored": tmp_path})
    assert (trainer.state()["score.weight"] == 0.25).all()
    trainer.engine.close()


def test_a_critic_with_adapters_trains_its_head(models: dict[str, Path]) -> None:
    trainer = Trainer(ONE, Case(kind="value_model", lora=LORA), models)
    before = trainer.state()
    losses = [trainer.step() for _ in range(3)]
    after = trainer.state()
    assert losses[-1] < losses[0]
    assert np.abs(after["score.weight"] - before["score.weight"]).max() > 1e-3
    trainer.engine.close()


def test_adapters_without_peft_say_what_to_install(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"streamrl\[lora\]"):
        Case(lora=LORA).start(ONE, models)


@pytest.mark.parametrize("backend", BOTH)
def test_bfloat16_computes_low_and_keeps_float32_weights(models: dict[str, Path], backend: str) -> None:
    exact, low = (
        Trainer(ONE, Case(backend=backend, fsdp=FSDPConfig(dtype=dtype)), models) for dtype in ("float32", "bfloat16")
    )
    difference = np.abs(low.infer() - exact.infer()).max()
    assert low.infer().dtype == np.float32
    assert 1e-6 < difference < 0.05
    low.step()
    assert {tensor.dtype for tensor in low.state().values()} == {np.dtype(np.float32)}
    exact.engine.close()
    low.engine.close()


@pytest.mark.parametrize(("heads", "key_value_heads", "ranks"), [(4, 2, 3), (6, 6, 4), (12, 4, 6)])
def test_heads_that_do_not_divide_are_an_error_at_the_start(heads: int, key_value_heads: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"ulysses_sequence_parallel_size={ranks} does not divide"):
        check_heads(heads, key_value_heads, ranks)
    check_heads(heads, key_value_heads, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_parallel": 2, "packed": False}, "use_remove_padding=true"),
        ({"fsdp": FSDPConfig(model_dtype="fp64", dtype="bfloat16")}, "fp64 computes in float64"),
        ({"sequence_parallel": 0}, "at least one rank"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineSettings(model_path="", **options)


def test_ranks_that_rows_cannot_be_shared_by_are_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="does not divide 3 ranks"):
        Case(sequence_parallel=2).start(RankInfo(world_size=3), models)
