"""Sockets that more than this machine can reach: keys or a password of the run, and a gatekeeper that knows them.

    curve://IP:PORT    TCP, encrypted; only who has the run's key file is let in (the controller's socket elsewhere)
    tcp://IP:PORT      TCP, for bulk bytes alone: a password (PLAIN) to be let in, a MAC on each frame (net/bulk.py);
                       nothing is secret, the password neither

Whoever is not let in sends no message: libzmq holds the parts of one until the last has come, and bounds each part, not
their number. The gatekeeper answers its question (ZAP, RFC 27) whether a client's key or password is the run's. It is
there before the socket is bound: a server without one would let anybody in.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Callable, Sequence

import zmq
from zmq.utils import z85

from transfer_queue.errors import Invalid
from transfer_queue.net.credentials import Credentials
from transfer_queue.net.nuisance import Nuisance
from transfer_queue.net.sockets import EventSocket

log = logging.getLogger(__name__)

HANDSHAKE_MS = 5000
"""A connection that has not proved itself by then is closed: half-open ones do not pile up."""

SEALED = 1024
"""Bytes that CURVE adds to a frame at most."""

USUAL = ((zmq.HEARTBEAT_IVL, 2000), (zmq.HEARTBEAT_TIMEOUT, 6000), (zmq.HANDSHAKE_IVL, HANDSHAKE_MS))
"""Both sides of a connection ask for a sign of life: a machine that is gone sends no end of connection."""

_USER = b"transfer_queue"

_ZAP = "inproc://zeromq.zap.01"

_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class NetworkListener:
    """A ROUTER bound to an IP of this machine, in a ZeroMQ context of its own (the gatekeeper's place is per context).

    `endpoint` is where clients connect, with the port filled in. `refused` counts connections that were turned away.
    """

    def __init__(
        self, endpoint: str, keys: Credentials, on_frames: Callable[[list[bytes]], None],
        options: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        """Raises Invalid for an endpoint that is none, or cannot be bound here."""
        scheme, place = check_network_endpoint(endpoint)
        self._context = zmq.Context()
        self._strangers = Nuisance(log, f"{endpoint}: a connection that is not of this run was turned away")
        self._gatekeeper = Gatekeeper(self._context, keys)
        socket = self._context.socket(zmq.ROUTER)
        for option, value in (*options, (zmq.ROUTER_MANDATORY, 1)):
            socket.setsockopt(option, value)
        _set_usual(socket, place)
        if scheme == "curve":
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
        else:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"transfer_queue")
        self._monitor = EventSocket(socket.get_monitor_socket(_FAILURES), self._on_failure)
        try:
            socket.bind(f"tcp://{place}")
        except zmq.ZMQError as error:
            self._end(socket)
            raise Invalid(f"{endpoint} cannot be bound: {error.strerror}; is it an address of this machine?") from None
        self.endpoint = f"{scheme}://{socket.getsockopt_string(zmq.LAST_ENDPOINT).partition('://')[2]}"
        self._socket = EventSocket(socket, on_frames)
        self.send = self._socket.send
        self.drain = self._socket.drain

    @property
    def refused(self) -> int:
        """Handshakes that failed so far: other protocols, other keys."""
        return self._strangers.count

    def close(self, linger_ms: int = 0) -> None:
        if not self._socket.socket.closed:
            self._socket.socket.disable_monitor()
            self._socket.close(linger_ms=linger_ms)
            self._end(self._socket.socket)

    def _end(self, socket: zmq.Socket) -> None:
        self._monitor.close()
        if not socket.closed:
            socket.disable_monitor()
        self._gatekeeper.close()
        socket.close(linger=0)
        self._context.term()

    def _on_failure(self, frames: list[bytes]) -> None:
        self._strangers.note()


class Gatekeeper:
    """Answers the ZAP questions of one context. Invariant: whatever is not exactly as expected is refused."""

    def __init__(self, context: zmq.Context, keys: Credentials) -> None:
        self._allowed = {b"CURVE": [z85.decode(keys.client_public)], b"PLAIN": [_USER, keys.password]}
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_ZAP)
        self._socket = EventSocket(socket, self._on_question)

    def close(self) -> None:
        self._socket.close()

    def _on_question(self, frames: list[bytes]) -> None:
        asker, _, version, request, _, _, _, mechanism, *given = frames
        allowed = self._allowed.get(mechanism, [])
        welcome = version == b"1.0" and 0 < len(allowed) == len(given) and all(map(hmac.compare_digest, given, allowed))
        verdict = (b"200", b"OK") if welcome else (b"400", b"not a key of this run")
        self._socket.send([asker, b"", b"1.0", request, *verdict, b"", b""])


def _set_usual(socket: zmq.Socket, place: str) -> None:
    for option, value in USUAL:
        socket.setsockopt(option, value)
    if "[" in place:
        socket.setsockopt(zmq.IPV6, 1)


def connect_to(socket: zmq.Socket, endpoint: str, keys: Credentials) -> None:
    """Connect a DEALER to a NetworkListener. Raises Invalid for an endpoint that is none."""
    scheme, place = check_network_endpoint(endpoint)
    _set_usual(socket, place)
    if scheme == "curve":
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)
    else:
        socket.setsockopt(zmq.PLAIN_USERNAME, _USER)
        socket.setsockopt(zmq.PLAIN_PASSWORD, keys.password)
    socket.connect(f"tcp://{place}")


def is_network(endpoint: str) -> bool:
    """Whether an endpoint is reached by TCP, and not by a path on this machine."""
    return endpoint.startswith(("curve://", "tcp://"))


def check_network_endpoint(endpoint: str) -> tuple[str, str]:
    """(scheme, "IP:PORT") of an endpoint by TCP. Raises Invalid, also for addresses that mean every interface."""
    scheme, _, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    if scheme not in ("curve", "tcp") or not (port == "*" or (port.isdecimal() and 0 < int(port) < 65536)):
        raise Invalid(f"{endpoint!r} is not an endpoint; expected curve://IP:PORT or tcp://IP:PORT")
    check_ip(host.strip("[]"))
    return scheme, place


def host_of(ip: str) -> str:
    """An IP as it stands in an endpoint."""
    return f"[{ip}]" if ":" in ip else ip


def check_ip(host: str) -> None:
    """Raises Invalid unless `host` is one IP address of one interface."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise Invalid(f"{host!r} is not an IP address; give this node's own, as `hostname -I` shows it") from None
    if address.is_unspecified or address.is_multicast:
        raise Invalid(f"{host} would listen on every interface; give this node's own IP, as `hostname -I` shows it")
