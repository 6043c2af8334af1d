"""A checkpoint becomes a model directory that `transformers` opens and that computes what was trained."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.config.sections.actor import CheckpointConfig
from streamrl.errors import UserError
from streamrl.runtime.export import export, main
from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup
from streamrl.trainer.checkpoint import CheckpointStore, TrainerState
from streamrl.workers.actor import ActorWorker
from tests.workers.engine.cases import Case, make_models
from tests.workers.engine.scenarios import train_and_save
from tests.workers.engine.world import World
from tests.workers.tiny import make_model, make_rows, settings

pytestmark = pytest.mark.timeout(240)  # the first test of ranks waits for their imports

IDS = torch.arange(1, 13)[None]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = make_model(tmp_path_factory.mktemp("model"))
    (Path(path) / "tokenizer.json").write_text("{}")
    return path


async def trained_run(model: str, run: Path, *, lora_rank: int = 0, hf: bool = False) -> torch.Tensor:
    """A run directory with the checkpoint of a model after an update; the logits of that model."""
    batch, store = make_rows(4, 2)
    saved = CheckpointConfig(save_contents=("model", "hf_model") if hf else ("model",))
    chosen = settings(model, lr=1e-2, checkpoint=saved, strategy="ddp")  # its parameters are plain tensors
    chosen = replace(chosen, model=replace(chosen.model, lora_rank=lora_rank, lora_alpha=8))
    group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, chosen, store))
    await group.init_model()
    await group.update_actor(batch)

    async def save(directory: Path) -> None:
        await group.save_checkpoint(str(directory / "actor"))

    await CheckpointStore(run / "checkpoints").save(TrainerState(3, 8), save)
    named = {"path": model, "tokenizer_path": None, "lora_rank": lora_rank, "lora_alpha": 8}
    (run / "config.yaml").write_text(json.dumps({"actor_rollout_ref": {"model": named}}))
    [worker] = group._ranks._workers.values()  # type: ignore[attr-defined]
    lm: Any = worker.engine.module.lm.eval()
    lm.set_attn_implementation("sdpa")  # the engine's own wants packed rows
    with torch.no_grad():
        logits = lm(input_ids=IDS).logits.float()
    await group.close()
    return logits


def logits_of(directory: Path | str) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(input_ids=IDS).logits


async def test_an_export_opens_in_transformers_and_computes_what_was_trained(model: str, tmp_path: Path) -> None:
    trained = await trained_run(model, tmp_path / "run")
    assert "step 3 of" in export(tmp_path / "run", tmp_path / "out")
    torch.testing.assert_close(logits_of(tmp_path / "out"), trained, atol=1e-4, rtol=1e-4)
    assert (trained - logits_of(model)).abs().max() > 1e-2
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"config.json", "tokenizer.json", "model.safetensors"}


def sharded_run(world: World, models: dict[str, Path], run: Path, case: Case) -> dict[str, Any]:
    """A run directory with the checkpoint that the ranks of `case` wrote; what rank 0 had when it did."""
    directory = run / "checkpoints" / "global_step_2"
    found = world.run(case.ranks, train_and_save, (case, models, str(directory / "actor")))[0]

    async def seal() -> None:
        store = CheckpointStore(run / "checkpoints")
        draft = store.draft(2)
        directory.joinpath("actor").rename(draft / "actor")
        await store.seal(draft, TrainerState(2, 8), "the configuration")

    asyncio.run(seal())
    named = {"path": str(models[case.model]), "tokenizer_path": None, "lora_rank": 0}
    (run / "config.yaml").write_text(json.dumps({"actor_rollout_ref": {"model": named}}))
    return found


@pytest.mark.parametrize("name", ["qwen2", "llama"], ids=["tied embeddings", "a head of its own"])
def test_an_export_joins_the_shards_of_two_ranks(
    world: World, models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    from transformers import AutoModelForCausalLM

    trained = sharded_run(world, models, tmp_path / "run", Case("fsdp2", 2, model=name))["state"]
    export(tmp_path / "run" / "checkpoints" / "global_step_2", tmp_path / "out")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert (opened.lm_head.weight is opened.model.embed_tokens.weight) == (name == "qwen2")
    weights = dict(opened.named_parameters())
    assert weights.keys() == trained.keys()
    for key, value in trained.items():
        torch.testing.assert_close(weights[key], torch.from_numpy(value), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"hidden_size": 64}, "has no such place in it"),
     ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "nothing was trained for"),
     ({"tie_word_embeddings": False}, "nothing was trained for lm_head.weight")],
    ids=["wider", "deeper", "untied"],
)  # fmt: skip
def test_a_base_model_that_was_changed_since_is_no_base_for_an_export(
    world: World, models: dict[str, Path], tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    changed = tmp_path / "model"
    shutil.copytree(models["qwen2"], changed)
    sharded_run(world, {**models, "qwen2": changed}, tmp_path / "run", Case("fsdp2", 2))
    config = Qwen2Config.from_pretrained(changed, **change)
    Qwen2ForCausalLM(config).save_pretrained(changed)
    with pytest.raises(UserError, match=f"is not the model that was trained: .*{says}|{says}"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_an_export_keeps_the_names_and_the_dtype_of_the_model(model: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(half)
    await trained_run(str(half), tmp_path / "run")
    export(tmp_path / "run" / "checkpoints" / "global_step_3", tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (half, tmp_path / "out"))
    assert {name: (t.dtype, t.shape) for name, t in after.items()} == {n: (t.dtype, t.shape) for n, t in before.items()}


async def test_with_hf_model_each_checkpoint_holds_the_model(model: str, tmp_path: Path) -> None:
    trained = await trained_run(model, tmp_path / "run", hf=True)
    saved = CheckpointStore(tmp_path / "run/checkpoints").path(3) / "actor/huggingface"
    torch.testing.assert_close(logits_of(saved), trained, atol=1e-4, rtol=1e-4)


async def test_adapters_are_merged_or_written_alone(model: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    trained = await trained_run(model, tmp_path / "run", lora_rank=4)
    export(tmp_path / "run", tmp_path / "merged")
    torch.testing.assert_close(logits_of(tmp_path / "merged"), trained, atol=1e-4, rtol=1e-4)
    export(tmp_path / "run", tmp_path / "adapter", adapter=True)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(input_ids=IDS).logits
    torch.testing.assert_close(logits, trained, atol=1e-4, rtol=1e-4)
    assert not (tmp_path / "adapter/model.safetensors").exists()


async def test_what_cannot_be_exported_is_told_before_anything_is_written(model: str, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    await trained_run(model, run)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "empty").mkdir()
    for source, out, adapter, says in (
        (tmp_path / "none", "out", False, "there is no directory"),
        (tmp_path / "empty", "out", False, "neither a run directory"),
        (run, "full", False, "exists and is not an empty directory"),
        (run, "out", True, "has no adapters"),
    ):
        with pytest.raises(UserError, match=says):
            export(source, tmp_path / out, adapter=adapter)
    next((run / "checkpoints/global_step_3/actor/shards").iterdir()).write_bytes(b"")
    assert main([str(run), str(tmp_path / "out")]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
