"""Who may ask the dashboard what: every refusal of docs/monitoring.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from streamrl.dashboard.access import HEADERS, Access, is_loopback, names_of, split_host
from streamrl.dashboard.app import MAX_BODY, build_app
from streamrl.dashboard.hub import Hub
from tests.dashboard.scripted import Scripted

KEY = "k" * 43
BASE = "http://127.0.0.1:8090"


@pytest.fixture
def run(tmp_path: Path) -> Scripted:
    run = Scripted(tmp_path / "run")
    run.steps(3)
    return run


def client_of(run: Scripted, *, open_reading: bool = True) -> TestClient:
    access = Access(KEY, names_of("127.0.0.1"), open_reading=open_reading, port=8090)
    return TestClient(build_app(Hub(run.path), access), base_url=BASE)


def test_a_key_that_could_be_guessed_is_no_key() -> None:
    with pytest.raises(ValueError, match="32 characters"):
        Access("short", names_of("127.0.0.1"), open_reading=True)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("127.0.0.1:8090", "127.0.0.1"), ("localhost", "localhost"), ("LOCALHOST:1", "localhost"),
        ("[::1]:8090", "::1"),
        ("[::1]", "::1"), ("127.0.0.1:80:80", ""), ("127.0.0.1:x", ""), ("[::1]x", ""), ("[::1", ""), ("", ""),
    ],
)  # fmt: skip
def test_the_name_in_a_host_header(host: str, name: str) -> None:
    assert split_host(host) == name


def test_only_loopback_is_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8090", "", "x@127.0.0.1"]
)
def test_a_name_that_was_rebound_gets_nothing_not_even_a_page(run: Scripted, host: str) -> None:
    with client_of(run) as client:
        for path in ("/", "/api/snapshot", "/api/whoami"):
            assert client.get(path, headers={"Host": host}).status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ],
)
def test_another_sites_page_reads_and_changes_nothing(run: Scripted, headers: dict[str, str]) -> None:
    with client_of(run) as client:
        client.post("/api/login", json={"key": KEY})
        assert client.get("/api/snapshot", headers=headers).status_code == 403
        body = {"partition": "train", "uids": ["a"]}
        assert client.post("/api/replay", json=body, headers=headers).status_code == 403


def test_a_link_on_another_page_opens_the_dashboard(run: Scripted) -> None:
    with client_of(run) as client:
        headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        assert client.get("/", headers=headers).status_code == 200


def test_on_loopback_reading_needs_no_key_and_changing_does(run: Scripted) -> None:
    with client_of(run) as client:
        assert client.get("/api/snapshot").status_code == 200
        assert client.post("/api/replay", json={"partition": "train", "uids": ["a"]}).status_code == 401


def test_elsewhere_nothing_is_read_without_the_key(run: Scripted) -> None:
    with client_of(run, open_reading=False) as client:
        for path in (
            "/api/snapshot",
            "/api/stream",
            "/api/steps",
            "/api/timeline",
            "/api/sessions",
            "/api/names",
            "/api/x",
        ):
            answer = client.get(path)
            assert answer.status_code == 401, path
            assert "calculator" not in answer.text
        assert client.get("/api/snapshot", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
        assert client.get("/api/snapshot", headers={"Authorization": f"Bearer {KEY}x"}).status_code == 401
        assert client.get("/api/whoami").json()["reads"] is False


def test_the_cookie_of_a_login_opens_and_a_logout_closes(run: Scripted) -> None:
    with client_of(run, open_reading=False) as client:
        assert client.post("/api/login", json={"key": "wrong" * 10}).status_code == 401
        answer = client.post("/api/login", json={"key": KEY})
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert KEY not in cookie
        assert client.get("/api/snapshot").status_code == 200
        assert client.get("/api/whoami").json() == client.get("/api/whoami").json() | {"key": True, "reads": True}
        client.post("/api/logout", json={})
        assert client.get("/api/snapshot").status_code == 401


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_no_other_method_is_known(run: Scripted, method: str) -> None:
    with client_of(run) as client:
        assert client.request(method, "/api/snapshot", headers={"Authorization": f"Bearer {KEY}"}).status_code == 405


def test_nothing_changes_by_get_or_by_a_form(run: Scripted) -> None:
    with client_of(run) as client:
        client.post("/api/login", json={"key": KEY})
        for path in ("/api/replay", "/api/login", "/api/logout"):
            assert client.get(path).status_code in (404, 405), path
        assert client.post("/api/replay", data={"partition": "train"}).status_code == 415
        assert client.post("/api/replay", content="{}", headers={"Content-Type": "text/plain"}).status_code == 415


def test_a_body_without_end_is_cut_off_and_a_wrong_one_told(run: Scripted) -> None:
    with client_of(run) as client:
        client.post("/api/login", json={"key": KEY})
        json = {"Content-Type": "application/json"}
        assert client.post("/api/replay", content=b"x" * (MAX_BODY + 1), headers=json).status_code == 413
        for body in (b"", b"[]", b"{", b"[" * 60_000, b"\xff", b'{"partition": 3, "uids": "a"}'):
            assert client.post("/api/replay", content=body, headers=json).status_code == 400, body[:20]


def test_a_replay_without_a_running_queue_says_so(run: Scripted) -> None:
    with client_of(run) as client:
        client.post("/api/login", json={"key": KEY})
        answer = client.post("/api/replay", json={"partition": "train", "uids": ["a"]})
        assert answer.status_code == 409
        assert "does not run" in answer.json()["error"]


def test_every_answer_has_the_headers_that_make_a_page_inert(run: Scripted) -> None:
    with client_of(run) as client:
        for path, headers in (("/", {}), ("/api/snapshot", {}), ("/nothing", {}), ("/", {"Host": "evil.example"})):
            answer = client.get(path, headers=headers)
            assert {name: answer.headers.get(name) for name in HEADERS} == dict(HEADERS), path
        assert "frame-ancestors 'none'" in HEADERS["Content-Security-Policy"]
        assert "unsafe" not in HEADERS["Content-Security-Policy"]
        assert client.get("/api/snapshot").headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "path", ["/../access.py", "/%2e%2e/access.py", "/..%2faccess.py", "//etc/passwd", "/assets/../../app.py"]
)
def test_no_path_leaves_the_pages(run: Scripted, path: str) -> None:
    with client_of(run) as client:
        answer = client.get(path)
        assert answer.status_code in (400, 404), answer.text[:100]
