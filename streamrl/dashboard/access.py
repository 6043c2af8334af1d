"""Who may ask the dashboard what: checked before any route, for every method, default deny.

* Host: only names of this machine that the server listens on, so a page that rebinds its name to it gets nothing.
* Origin and Sec-Fetch-Site: a request that another site's page makes is refused, also to read.
* Key: needed to read where the server can be reached from elsewhere (or with `--key`), and always to change anything.
  It comes as a bearer, or as the cookie that `POST /api/login` gives for it. The pages themselves (no data) need none.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any

import psutil

LOCAL = ("127.0.0.1", "localhost", "::1")

SAFE = ("GET", "HEAD")

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
"""Of every answer."""


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    why: str


class Access:
    """The decision. `key` opens everything; `open_reading`: whether reading needs it not."""

    def __init__(self, key: str, hosts: frozenset[str], *, open_reading: bool, port: int = 0) -> None:
        if len(key) < 32:
            raise ValueError("the key of the dashboard has at least 32 characters")
        self._key = key.encode()
        self._hosts = hosts
        self.open_reading = open_reading
        self.cookie = f"streamrl_{port}"
        """Cookies know no ports: each server has a name of its own."""
        self.session = hmac.digest(self._key, b"session cookie", hashlib.sha256).hex()
        """The cookie's value: it does not tell the key."""

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Why this request is not answered; None if it is. `headers` by lower-case name."""
        host = headers.get("host", "")
        if split_host(host) not in self._hosts:
            return Refusal(400, f"this server is not called {host[:100]!r}; give its name with --allow-host")
        site = headers.get("sec-fetch-site", "none")
        navigates = method == "GET" and headers.get("sec-fetch-mode") == "navigate" and not path.startswith("/api/")
        if site not in ("same-origin", "none") and not navigates:
            return Refusal(403, "a request of another site's page")
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return Refusal(403, "a request of another site's page")
        if method not in (*SAFE, "POST"):
            return Refusal(405, "only GET, HEAD and POST are known")
        if method == "POST" and headers.get("content-type", "").split(";")[0].strip() != "application/json":
            return Refusal(415, "a JSON body is needed")
        if not path.startswith("/api/") or path in ("/api/login", "/api/whoami"):
            return None
        if (method in SAFE and self.open_reading) or self.knows(headers):
            return None
        return Refusal(401, "the key is needed: open the link that `streamrl dash` printed")

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Whether the request has the key, or the cookie for it."""
        bearer = headers.get("authorization", "").encode("latin-1", "replace")
        if hmac.compare_digest(bearer, b"Bearer " + self._key):
            return True
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return False
        return morsel is not None and hmac.compare_digest(morsel.value.encode(), self.session.encode())

    def is_key(self, given: Any) -> bool:
        return isinstance(given, str) and hmac.compare_digest(given.encode(), self._key)


def split_host(host: str) -> str:
    """The name in a Host header, without its port; empty if it is none."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        port = port.removeprefix(":")
        return name.lower() if bracket and (not port or port.isdigit()) else ""
    name, _, port = host.partition(":")
    return name.lower() if not port or port.isdigit() else ""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_of(host: str, more: tuple[str, ...] = ()) -> frozenset[str]:
    """The names under which a server bound to `host` may be asked for."""
    names = {*LOCAL, host.lower(), *(name.lower() for name in more)}
    if not is_loopback(host):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    if host in ("0.0.0.0", "::"):
        for addresses in psutil.net_if_addrs().values():
            names |= {
                a.address.partition("%")[0].lower() for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)
            }
    return frozenset(names)
