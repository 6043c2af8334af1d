"""Models named as on the hub: from the cache, downloaded, or refused. No network here."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.cli import train
from streamrl.config import ConfigError, hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline cache with one model in it, laid out as the hub's client does."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--some--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(("path", "named"), [("Qwen/Qwen2.5-0.5B", True), ("./model", False), ("/abs/model", False), ("model", False), ("a/b/c", False), ("examples/calculator", False)])  # fmt: skip # noqa: E501
def test_what_names_a_model_on_the_hub(path: str, named: bool):
    assert hub.is_hub_id(path) is named


def test_a_model_in_the_cache_is_used_and_nothing_is_asked_for(cache: Path, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import snapshot_download

    directory = snapshot_download("some/model", local_files_only=True, cache_dir=cache)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: directory)
    assert hub.fetch("some/model") == directory
    assert Path(directory, "config.json").exists()


def test_offline_a_model_that_is_not_there_is_refused_with_what_to_do(cache: Path):
    with pytest.raises(ConfigError, match=r"not in the cache .* HF_HUB_OFFLINE is set; name a directory"):
        hub.fetch("some/other")


def test_the_command_line_fetches_a_model_and_a_dry_run_does_not(
    valid: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[str] = []

    def fetch(name: str) -> str:
        asked.append(name)
        raise ConfigError(f"model {name!r} could not be downloaded: no network; name a directory instead")

    monkeypatch.setattr(hub, "fetch", fetch)
    arguments = [*valid, "actor_rollout_ref.model.path=some/model"]
    assert train([*arguments, "--dry-run"]) == 2
    assert "without --dry-run `streamrl train` downloads it from the hub" in capsys.readouterr().err
    assert asked == []
    assert train(arguments) == 2
    assert "could not be downloaded: no network" in capsys.readouterr().err
    assert asked == ["some/model"]
