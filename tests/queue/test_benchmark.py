"""Every workload of the benchmark runs, at small sizes, against the real service."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from benchmarks.bars import Bar, report
from benchmarks.queue import __main__ as runner
from benchmarks.queue import tables
from benchmarks.queue.all import WORKLOADS
from benchmarks.queue.drivers import Memcpy, Ours
from benchmarks.queue.workload import Figures

pytest.importorskip("tensordict")

SEED = 7


@pytest.fixture(scope="module")
def sides():
    ours, copy = Ours(), Memcpy()
    yield [ours, copy]
    ours.close()
    copy.close()


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_workload_gives_a_finite_figure_for_each_of_its_bars(sides, name):
    workload = WORKLOADS[name]
    figures = runner.measure(workload, sides, quick=True, rounds=1, seed=SEED)
    bars = workload.bars(figures)
    assert figures.rounds["ours"]
    assert all(math.isfinite(bar.value) and bar.value > 0 for bar in bars), bars


def test_a_ratio_to_the_peer_says_how_many_times_we_are_faster():
    figures = Figures()
    for ours in (9.0, 1.0, 2.0, 3.0):  # the first round is a warm-up
        figures.add("ours", {"put": ours, "bytes": 1.0})
        figures.add("peer", {"put": 20.0 * ours, "bytes": 1.0})
    [bar] = WORKLOADS["complex"].bars(figures)
    assert bar.value == pytest.approx(20.0)
    assert figures.median("ours", "put") == 2.0


def test_the_runner_writes_the_bars_a_table_and_a_chart(tmp_path):
    files = {name: tmp_path / name for name in ("json", "markdown", "chart")}
    options = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    command = [sys.executable, "-m", "benchmarks.queue", "--quick", "--workload", "short", *options]
    environment = {name: value for name, value in os.environ.items() if name != "TQ_ADDRESS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "short: get all" in files["json"].read_text()
    assert "| short | put |" in files["markdown"].read_text()
    assert files["chart"].read_text().startswith("<svg")


def test_a_quick_run_judges_what_came_out_right_and_neither_speed_nor_size(capsys):
    slow, loaded = Bar("put", 1.0, "GiB/s", 1.5), Bar("load average", 9.0, "processes")
    lost, whole = (Bar("keys found", found, "of all", 1.0, always=True) for found in (0.5, 1.0))
    assert [bar.verdict(quick=True) for bar in (slow, loaded, lost, whole)] == ["quick", "", "NO", "yes"]
    assert [bar.verdict() for bar in (slow, loaded, lost, whole)] == ["NO", "", "NO", "yes"]
    assert report([slow, loaded, whole], None, quick=True) == 0
    assert report([slow, loaded, lost], None, quick=True) == 1
    assert report([slow, whole], None) == 1
    capsys.readouterr()
    assert "| load average | 9 | processes |  |  |" in tables.markdown({}, [slow, loaded], "title", quick=True)


def test_the_chart_escapes_and_scales_what_it_shows():
    figures = Figures()
    figures.add("ours", {"a < b": 0.001})
    figures.add("peer", {"a < b": 1.0})
    drawn = tables.chart({"x": figures})
    assert "a &lt; b" in drawn
    assert "1 ms" in drawn
    assert "1.00 s" in drawn
