"""What deterministic mode refuses, and the lag it takes from the mode."""

from __future__ import annotations

import pytest

from streamrl.config import ConfigError, load_config

ASYNC = ("trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=2")
WARMUP = "trainer.v1.separate_async.num_warmup_batches"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trainer.v1.trainer_mode=colocate_async"], "use sync or separate_async"),
        ([*ASYNC, f"{WARMUP}=1.5"], "takes a whole number"),
        ([*ASYNC, f"{WARMUP}=2", "trainer.v1.sampler.max_off_policy_threshold=2"], "allows 1; lower the one"),
        (["trainer.v1.sampler.custom_sampler.path={model}/config.json"], "leave trainer.v1.sampler.custom_sampler"),
        (["distillation.enabled=true", "distillation.teacher_model.placement=servers"], "placement=ranks"),
    ],
)
def test_what_depends_on_time_is_refused(valid: list[str], arguments: list[str], says: str) -> None:
    model = next(a for a in valid if "model.path" in a).partition("=")[2]
    with pytest.raises(ConfigError) as caught:
        load_config([*valid, "trainer.deterministic=true", *(a.format(model=model) for a in arguments)])
    assert any("trainer.deterministic=true" in problem and says in problem for problem in caught.value.problems)


@pytest.mark.parametrize(("arguments", "lag"), [((), 0), (ASYNC, 1), ((*ASYNC, f"{WARMUP}=3"), 3)])
def test_the_lag_is_that_of_the_mode(valid: list[str], arguments: tuple[str, ...], lag: int) -> None:
    assert load_config([*valid, "trainer.deterministic=true", *arguments]).config.trainer.lag == lag
