"""What a run of the demo listens to. Ray's own servers listen on every interface, behind its token; nothing of ours
does, and a run without Ray cannot be reached from another machine at all."""

from __future__ import annotations

import contextlib
import ipaddress

import psutil
import pytest

from tests.runtime.jobs import Job
from transfer_queue.operations.listeners import tcp_listeners

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def listeners_of(job: Job) -> dict[str, list[tuple[str, int]]]:
    """TCP listeners of every process of the job, by command line."""
    assert job.process is not None
    found = {}
    for process in [psutil.Process(job.process.pid), *job.processes()]:
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):  # it has ended meanwhile
            found[" ".join(process.cmdline()).strip()] = tcp_listeners(process.pid)
    return found


def run_of(tmp_path, *arguments: str) -> dict[str, list[tuple[str, int]]]:
    job = Job(tmp_path, *arguments, steps=50, seconds=180.0)
    job.start()
    try:
        job.wait_for_step(1)
        return listeners_of(job)
    finally:
        job.kill()


def far(ports: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return [port for port in ports if not ipaddress.ip_address(port[0]).is_loopback]


def test_a_run_without_ray_listens_on_loopback_only(tmp_path):
    found = run_of(tmp_path, "runtime=local", "trainer.n_gpus_per_node=1")
    assert found
    assert [line for line, ports in found.items() if far(ports)] == []


def test_the_queue_of_a_run_under_ray_listens_to_no_port_and_no_process_of_ours_opens_a_second(tmp_path):
    found = run_of(tmp_path)
    queue = {line: ports for line, ports in found.items() if "transfer_queue.service.child" in line}
    assert len(queue) >= 3
    assert not any(queue.values())
    agents = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
    mine = [line for line in found if "streamrl.main" in line or ("ray::" in line and not line.startswith(agents))]
    ours = {line: far(found[line]) for line in mine}
    assert len(ours) >= 3
    assert {line: ports for line, ports in ours.items() if len(ports) > 1} == {}  # the one of Ray's core worker
