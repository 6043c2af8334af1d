"""The hook that fails a test in which a decoder unpickles: it sees what it should, and nothing else."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tests import unpickling

POISON = pickle.dumps(Path("x"))


def load_as(file: str) -> object:
    """Unpickle as if the code stood in `file`."""
    code = compile("import pickle\nfound = pickle.loads(poison)", file, "exec")
    names = {"poison": POISON}
    exec(code, names)  # noqa: S102
    return names["found"]


@pytest.mark.parametrize("file", ["transfer_queue/net/codec.py", "streamrl/trainer/checkpoint.py"])
def test_a_decoder_that_unpickles_is_noticed(file):
    load_as(f"{unpickling.ROOT}/{file}")
    assert "pathlib" in unpickling.breaches[0]
    assert unpickling.breaches[0].endswith(f"{file}:2")
    unpickling.breaches.clear()


@pytest.mark.parametrize(
    "file", ["/usr/lib/python3/multiprocessing/queues.py", "/x/ray/_private/serialization.py", "/home/me/test_x.py"]
)
def test_others_may(file):
    load_as(file)
    assert unpickling.breaches == []


def test_a_torch_file_is_only_read_by_what_resolves_no_names(tmp_path):
    import torch

    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    decoder = f"{unpickling.ROOT}/transfer_queue/checkpoint/loading.py"
    code = compile("torch.load(path, weights_only=False)", decoder, "exec")
    exec(code, {"torch": torch, "path": tmp_path / "w.pt"})  # noqa: S102
    assert unpickling.breaches
    unpickling.breaches.clear()
