"""Objects of a TensorDict are wrapped by copying a prototype: nobody can tell it from tensordict's own constructor."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")

from tensordict import NonTensorData, NonTensorStack, TensorDict  # noqa: E402

from transfer_queue.clients import tensordicts  # noqa: E402

VALUES = ["a", b"b", 3, 2.5, True, None, {"a": [1, {"b": 2}]}, ["x", ["y"]], (1, "z"), {}, [], "", "a"]


def theirs(values: list) -> NonTensorStack:
    return NonTensorStack(*(NonTensorData(value) for value in values))


def ours(values: list) -> NonTensorStack:
    return NonTensorStack(*tensordicts.wrapped(values))


def state(data: NonTensorData) -> tuple:
    outer = dict(vars(data))
    inner = dict(vars(outer.pop("_tensordict")))
    return outer, inner


def test_a_wrapped_value_has_the_state_that_the_constructor_makes():
    for value, made in zip(VALUES, tensordicts.wrapped(VALUES), strict=True):
        assert type(made) is NonTensorData
        assert state(made) == state(NonTensorData(value))
        assert made.data is value or made.data == value


USES = {
    "tolist": lambda s: s.tolist(),
    "index": lambda s: [s[i].data for i in range(len(s))],
    "slice": lambda s: s[2:7].tolist(),
    "mask": lambda s: s[torch.arange(len(s)) % 2 == 0].tolist(),
    "list index": lambda s: s[[3, 1, 1]].tolist(),
    "pickle": lambda s: pickle.loads(pickle.dumps(s)).tolist(),  # noqa: S301
    "deepcopy": lambda s: copy.deepcopy(s).tolist(),
    "clone": lambda s: s.clone().tolist(),
    "cat": lambda s: torch.cat([s, s]).tolist(),
    "stack": lambda s: torch.stack([s, s]).tolist(),
    "chunk": lambda s: [part.tolist() for part in s.chunk(3)],
    "unbind": lambda s: [part.data for part in s.unbind(0)],
    "in a TensorDict": lambda s: TensorDict({"f": s, "n": torch.arange(len(s))}, batch_size=[len(s)])[3:5][
        "f"
    ].tolist(),
    "select": lambda s: sorted(TensorDict({"f": s, "g": s}, batch_size=[len(s)]).select("f").keys()),
    "get": lambda s: TensorDict({"f": s}, batch_size=[len(s)])["f"],
    "repr": lambda s: repr(TensorDict({"f": s}, batch_size=[len(s)])),
    "shape": lambda s: (s.batch_size, s.device, len(s), type(s)),
    "to": lambda s: s.to("cpu").tolist(),
}


@pytest.mark.parametrize("values", [VALUES, ["a", "b", "c", "d", "e", "f", "g", "h"]], ids=["mixed", "alike"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_stack_of_wrapped_values_does_what_a_constructed_one_does(use, values):
    found, expected = use(ours(values)), use(theirs(values))
    if hasattr(expected, "tolist"):
        found, expected = found.tolist(), expected.tolist()
    assert found == expected


def test_wrapped_values_share_nothing():
    stack = ours(["a", "b", "c"])
    td = TensorDict({"f": stack}, batch_size=[3])
    td[1]["f"]
    stack[0].data = "changed"
    assert stack.tolist() == ["changed", "b", "c"]
    first, second = (vars(stack.tensordicts[i])["_tensordict"] for i in (0, 1))
    first["extra"] = torch.zeros(())
    assert "extra" not in second.keys()  # noqa: SIM118
    del td["f"]
    assert list(td.keys()) == []


def test_a_form_of_tensordict_that_is_not_known_falls_back_to_its_constructor(monkeypatch):
    class Other:
        def __init__(self, data):
            self.data = data

    monkeypatch.setattr(tensordict, "NonTensorData", Other)
    assert [made.data for made in tensordicts.wrapped(VALUES)] == VALUES
