"""`trainer.v1.sampler`: what cannot be is said before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import load_config
from streamrl.config.notes import notes
from streamrl.errors import ConfigError

SAMPLER = "trainer.v1.sampler"
BASE = ("experiment=calculator", "trainer.v1.trainer_mode=separate_async")
FILE = """
class Good:
    def choose(self, ready, count, version):
        return ready[:count]

class OfVerl:
    def sample(self, partition, count):
        return None

class Inherits(Good):
    pass

class Made(Good):
    def __init__(self, spare, *, slow=False):
        self.spare = spare

class Inherited(Made):
    pass

class Takes(Good):
    def __init__(self, **kwargs):
        pass

@dataclass
class Decorated(Good):
    spare: int

class Far(elsewhere.Sampler):
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return f"{SAMPLER}.custom_sampler.path={tmp_path}/mine.py"


def problem(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*BASE, *arguments])
    return str(caught.value)


@pytest.mark.parametrize("name", ["Good", "Inherits"])
def test_a_class_that_can_choose_is_taken(file: str, name: str) -> None:
    config = load_config([*BASE, file, f"{SAMPLER}.custom_sampler.name={name}"]).config
    assert config.trainer.v1.sampler.custom_sampler.name == name


def test_a_class_that_cannot_choose_is_refused_and_verls_is_known(file: str) -> None:
    said = problem(file, f"{SAMPLER}.custom_sampler.name=OfVerl")
    assert "OfVerl has no method choose(ready, count, version)" in said
    assert "it is written for verl" in said
    assert "defines no Missing" in problem(file, f"{SAMPLER}.custom_sampler.name=Missing")


def test_two_that_choose_are_one_too_many(file: str) -> None:
    said = problem(file, f"{SAMPLER}.custom_sampler.name=Good", f"{SAMPLER}.max_off_policy_strategy=wait")
    assert "both choose which groups are trained next; use drop, mask or null" in said


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (f"{SAMPLER}.max_masked_ratio=0.5", "has no effect with trainer.v1.sampler.max_off_policy_strategy=drop"),
        (f"+{SAMPLER}.sampler_kwargs.spare=1", "sampler_kwargs without trainer.v1.sampler.custom_sampler.path"),
    ],
)
def test_what_has_no_effect_is_refused(argument: str, says: str) -> None:
    assert says in problem(argument)


def test_more_batches_ahead_than_may_be_old_are_a_note() -> None:
    ahead = (f"{SAMPLER}.max_off_policy_threshold=2", "trainer.v1.separate_async.num_warmup_batches=3")
    [note] = [each for each in notes(load_config([*BASE, *ahead]).config) if "num_warmup_batches" in each]
    assert "batches issued ahead are at most 1, since more would be too old" in note
    unbound = load_config([*BASE, *ahead, f"{SAMPLER}.max_off_policy_strategy=null"]).config
    assert not any("num_warmup_batches" in each for each in notes(unbound))


@pytest.mark.parametrize("strategy", ["drop", "wait", "mask"])
def test_a_policy_about_age_without_a_bound_is_refused(strategy: str) -> None:
    unbound = (f"{SAMPLER}.max_off_policy_threshold=null", f"{SAMPLER}.max_off_policy_strategy={strategy}")
    assert "without a bound nothing is too old" in problem(*unbound)
    load_config([*BASE, unbound[0], f"{SAMPLER}.max_off_policy_strategy=null"])


def test_a_fixed_lag_beyond_the_bound_is_refused() -> None:
    fixed = ("trainer.v1.separate_async.fixed_lag=true", "trainer.v1.separate_async.num_warmup_batches=2")
    said = problem(*fixed, f"{SAMPLER}.max_off_policy_threshold=2")
    assert "fixed_lag=true: every sample is num_warmup_batches=2 versions old" in said
    assert "max_off_policy_threshold=2 allows 1" in said
    load_config([*BASE, *fixed, f"{SAMPLER}.max_off_policy_threshold=3"])


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("Made", "+{s}.sampler_kwargs.spare=1 +{s}.sampler_kwargs.speed=2", "unexpected keyword argument 'speed'"),
        ("Made", "", "missing a required argument: 'spare'"),
        ("Good", "+{s}.sampler_kwargs.speed=2", "unexpected keyword argument 'speed'"),
        ("Inherits", "+{s}.sampler_kwargs.speed=2", "unexpected keyword argument 'speed'"),
    ],
)
def test_what_its_constructor_does_not_take_is_refused_by_class_and_key(
    file: str, name: str, given: str, says: str
) -> None:
    said = problem(file, f"{SAMPLER}.custom_sampler.name={name}", *given.format(s=SAMPLER).split())
    assert says in said
    assert f"is made as {name}(" in said
    assert "(trainer.v1.sampler.sampler_kwargs)" in said


@pytest.mark.parametrize(
    ("name", "given"),
    [("Made", ["spare"]), ("Inherited", ["spare"]), ("Takes", ["anything"]), ("Decorated", ["spare"]), ("Far", ["x"])],
)
def test_what_it_takes_or_does_not_show_passes(file: str, name: str, given: list[str]) -> None:
    kwargs = [f"+{SAMPLER}.sampler_kwargs.{keyword}=1" for keyword in given]
    load_config([*BASE, file, f"{SAMPLER}.custom_sampler.name={name}", *kwargs])
