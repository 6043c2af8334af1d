"""Do generation and training agree on the numbers? The parts `ratio`, `vllm` and `parity`."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from subprocess import run

import numpy as np

from benchmarks.bars import Bar

CALCULATOR = "examples/calculator/model"
TEMPERATURES = (0.7, 1.0, 1.3)
SUITES = {
    "algorithms against float64 references": ["tests/algorithms"],
    "engines on 1, 2 and 4 ranks against plain PyTorch": ["tests/workers/engine"],
}


def ratio() -> list[Bar]:
    from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup
    from streamrl.workers.actor import ActorWorker
    from tests.rollout.conftest import tiny_model
    from tests.rollout.test_on_policy_ratio import sampled
    from tests.workers.tiny import settings

    off: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        models = [CALCULATOR]
        for kind in ("qwen2", "llama"):
            tiny_model(kind).save_pretrained(path := f"{directory}/{kind}")
            models.append(path)
        for path, temperature in itertools.product(models, TEMPERATURES):
            batch, store = sampled(path, temperature)
            for packed, tokens in itertools.product((True, False), (1, 200, 100_000)):
                chosen = settings(path, ppo_max_token_len_per_gpu=tokens)
                chosen = replace(chosen, model=replace(chosen.model, use_remove_padding=packed))
                group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, chosen, store))
                group.init_model()
                group.compute_log_prob(batch)
                group.shutdown()
                old, rollout = store.columns["old_log_probs"], store.columns["rollout_log_probs"]
                off += [float(np.abs(np.expm1(old[key] - rollout[key])).max()) for key in batch.keys]
    return [
        Bar("torch engine against training ranks: rows compared", len(off), "rows"),
        Bar("torch engine against training ranks: largest |ratio - 1|", max(off), "", 1e-4, "at most"),
    ]


def vllm() -> list[Bar]:
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed: its part is left out (pip install 'streamrl[cpu]')", file=sys.stderr)
        return []
    from tests.rollout.test_vllm_log_probs import largest_difference

    return [
        Bar("vLLM against training ranks: largest |log-prob difference|", largest_difference(), "nats", 1e-3, "at most")
    ]


def parity() -> list[Bar]:
    bars: list[Bar] = []
    for name, paths in SUITES.items():
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "junit.xml")
            run([sys.executable, "-m", "pytest", "-q", f"--junitxml={file}", *paths], stdout=sys.stderr, check=False)
            suite = next(ElementTree.parse(file).getroot().iter("testsuite"))
        failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
        bars += [
            Bar(f"{name}: comparisons", int(suite.attrib["tests"]), "tests"),
            Bar(f"{name}: beyond 1e-6", failed, "tests", 0, "at most"),
        ]
    return bars
