"""The fleet over HTTP: what it answers, and whom it refuses."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streamrl.rollout.fleet import Fleet
from streamrl.rollout.fleet_api import FleetApi
from streamrl.rollout.manager import LLMServerManager
from streamrl.rollout.sim.server import SimServer
from streamrl.runtime.servers import ENDPOINT_FILE, KEY_FILE, main

Ask = Callable[..., Any]


def serving(test: Callable[[Ask, Path, LLMServerManager], Any], directory: Path) -> None:
    """`ask(method, path, body, **headers)` gives (status, answer), from a thread as a client would be elsewhere."""

    async def start(name: str) -> SimServer:
        return SimServer(server=name)

    async def run() -> None:
        manager = LLMServerManager({"server-0": SimServer(), "server-1": SimServer()})
        fleet = Fleet(manager, dict, start=start)
        await fleet.beat()
        api = FleetApi(fleet, directory / KEY_FILE, directory / ENDPOINT_FILE)
        key = (directory / KEY_FILE).read_text().strip()

        def ask(method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
            connection = http.client.HTTPConnection(api.endpoint, timeout=10)
            connection.request(method, path, body, {"Authorization": f"Bearer {key}", **headers})
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text.startswith(b"{") else text.decode()

        try:
            await asyncio.to_thread(test, ask, directory, manager)
        finally:
            await api.close()
        assert not (directory / KEY_FILE).exists()

    asyncio.run(run())


def test_servers_are_listed_added_drained_and_removed(tmp_path: Path) -> None:
    def test(ask: Ask, directory: Path, manager: LLMServerManager) -> None:
        status, answer = ask("GET", "/servers")
        assert status == 200
        assert [(row["name"], row["status"]) for row in answer["servers"]] == [
            ("server-0", "serving"), ("server-1", "serving"),
        ]  # fmt: skip
        assert ask("POST", "/servers", b"{}") == (200, {"added": "server-2"})
        assert ask("POST", "/servers", b'{"name": "big"}') == (200, {"added": "big"})
        assert ask("POST", "/servers/server-0/drain", b'{"deadline": 1}') == (200, {"drained": "server-0"})
        assert ask("POST", "/servers/server-0/undrain", b"{}") == (200, {"undrained": "server-0"})
        assert {row["status"] for row in ask("GET", "/servers")[1]["servers"]} == {"serving"}
        assert ask("DELETE", "/servers/server-1?deadline=1") == (200, {"removed": "server-1"})
        assert sorted(manager.servers) == ["big", "server-0", "server-2"]

    serving(test, tmp_path)


def test_without_the_key_nothing_is_told(tmp_path: Path) -> None:
    def test(ask: Ask, directory: Path, manager: LLMServerManager) -> None:
        assert stat.S_IMODE((directory / KEY_FILE).stat().st_mode) == 0o600
        assert ask("GET", "/servers", Authorization="Bearer x")[0] == 401
        assert ask("DELETE", "/servers/server-1", Authorization="")[0] == 401
        assert ask("GET", "/servers", Host="evil.example")[0] == 400
        assert ask("PUT", "/servers")[0] == 405
        assert ask("GET", "/metrics")[0] == 404
        assert len(manager.servers) == 2

    serving(test, tmp_path)


def test_the_key_of_a_killed_run_is_not_used_again(tmp_path: Path) -> None:
    old = "x" * 43
    (tmp_path / KEY_FILE).write_text(old)
    (tmp_path / KEY_FILE).chmod(0o600)

    def test(ask: Ask, directory: Path, manager: LLMServerManager) -> None:
        assert ask("GET", "/servers", Authorization=f"Bearer {old}")[0] == 401
        assert ask("GET", "/servers")[0] == 200

    serving(test, tmp_path)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/servers", b'{"nam": "x"}', 400, "unknown field `nam`"),
        ("POST", "/servers", b'{"name": "../x"}', 400, "letters, digits"),
        ("POST", "/servers", b"{", 400, "truncated"),
        ("POST", "/servers", b'{"name": "server-1"}', 409, "there is a server server-1 already"),
        ("POST", "/servers/server-1/drain", b'{"deadline": -1}', 400, "deadline"),
        ("POST", "/servers/none/drain", b"{}", 409, "there is no server none; there are server-0, server-1"),
        ("POST", "/servers/none/undrain", b"", 409, "there is no server none; there are server-0, server-1"),
        ("POST", "/servers/server-1/undrain", b'{"deadline": 1}', 400, "unknown field `deadline`"),
        ("DELETE", "/servers/server-1?deadline=soon", None, 400, "deadline"),
        ("GET", "/servers/server-1", None, 404, "GET /servers"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(
    tmp_path: Path, method: str, path: str, body: bytes | None, status: int, says: str
) -> None:
    def test(ask: Ask, directory: Path, manager: LLMServerManager) -> None:
        got, answer = ask(method, path, body)
        assert (got, says in answer["error"]) == (status, True), answer

    serving(test, tmp_path)


WHOLE = b'{"deadline": 1}'


@pytest.mark.parametrize(
    ("headers", "body", "status", "says"),
    [
        ({"Transfer-Encoding": "chunked"}, b"f\r\n" + WHOLE + b"\r\n0\r\n\r\n", 411, "not in chunks"),
        ({"Content-Length": "15"}, b"", 400, "the body has 0 bytes, and its Content-Length is 15"),
        ({"Content-Length": "0, 15"}, WHOLE, 400, "one Content-Length"),
        ({"Content-Length": "-1"}, WHOLE, 400, "one Content-Length"),
        ({"Content-Length": "15", "content-length": "0"}, WHOLE, 400, "one Content-Length"),
        ({"Host": "evil.example"}, b"", 400, "Host"),
        ({"Authorization": "Bearer x"}, b"", 401, "key"),
        ({"X": "x" * 70_000}, b"", 431, "Too Large"),
    ],
)
def test_a_body_that_is_not_read_whole_changes_nothing_and_every_refusal_is_json(
    tmp_path: Path, headers: dict[str, str], body: bytes, status: int, says: str
) -> None:
    def test(ask: Ask, directory: Path, manager: LLMServerManager) -> None:
        key = (directory / KEY_FILE).read_text().strip()
        host, _, port = (directory / ENDPOINT_FILE).read_text().strip().partition(":")
        told = {"Host": host, "Authorization": f"Bearer {key}"} | headers
        lines = [f"{name}: {value}\r\n" for name, value in told.items()]
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            with suppress(OSError):  # it may have answered and closed before all is sent
                connection.sendall(
                    "".join(["POST /servers/server-0/drain HTTP/1.1\r\n", *lines, "\r\n"]).encode() + body
                )
                connection.shutdown(socket.SHUT_WR)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert (answer.status, answer.headers["Content-Type"]) == (status, "application/json")
            assert says in json.loads(answer.read())["error"]
        assert {row["status"] for row in ask("GET", "/servers")[1]["servers"]} == {"serving"}

    serving(test, tmp_path)


def test_the_command_line_lists_and_changes_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def test(ask: Ask, directory: Path, manager: LLMServerManager) -> None:
        assert main([str(directory), "add"]) == 0
        assert main([str(directory), "remove", "server-0", "--deadline", "1"]) == 0
        assert main([str(directory), "drain", "server-9"]) == 1
        assert main([str(directory), "drain", "server-1", "--deadline", "1"]) == 0
        assert main([str(directory), "undrain", "server-1"]) == 0
        assert main([str(directory), "list"]) == 0

    serving(test, tmp_path)
    told = capsys.readouterr()
    assert "added server-2\nremoved server-0\ndrained server-1\nundrained server-1\n" in told.out
    assert "server-1" in told.out
    assert "error: there is no server server-9" in told.err
    assert main([str(tmp_path), "list"]) == 2
    assert "has no servers that can be asked" in capsys.readouterr().err
