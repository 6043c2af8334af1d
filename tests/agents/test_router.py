"""The router's invariants, and the examples that explain them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.llm.router import Router, Ticket


def test_ties_rotate() -> None:
    router = Router(["a", "b", "c"])
    chosen = []
    for i in range(6):
        ticket = router.acquire(f"s{i}", 10)
        assert ticket
        chosen.append(ticket.server)
        router.release(ticket)
    assert sorted(chosen[:3]) == ["a", "b", "c"]
    assert chosen[:3] == chosen[3:]


def test_the_server_with_fewest_tokens_in_flight_is_chosen() -> None:
    router = Router(["a", "b"])
    first = router.acquire("long", 1000)
    others = [router.acquire(f"s{i}", 100) for i in range(9)]
    assert first
    assert all(ticket and ticket.server != first.server for ticket in others)


def test_a_session_stays_with_its_server_until_the_load_differs_too_much() -> None:
    router = Router(["a", "b"], sticky_requests=4)
    home = router.acquire("s", 10)
    assert home
    router.release(home)
    weights = {name: state for name, state in router.servers.items()}
    weights[home.server].tokens = 40
    again = router.acquire("s", 10)
    assert again
    assert again.server == home.server
    away = router.acquire("s", 10)
    assert away
    assert away.server != home.server


def test_a_failed_server_is_out_at_once_and_back_only_with_the_version_in_service() -> None:
    router = Router(["a", "b"])
    ticket = router.acquire("s", 10)
    assert ticket
    assert router.fail(ticket, "died")
    router.release(ticket)
    router.observe("b", 7)
    others = [router.acquire("s", 10) for _ in range(4)]
    assert all(other and other.server != ticket.server for other in others)
    assert not router.readmit(ticket.server, 6)
    assert "holds weight version 6 while 7 is in service" in router.out()[ticket.server]
    assert router.readmit(ticket.server, 7)
    assert router.out() == {}


def test_a_late_failure_of_an_earlier_incarnation_does_not_take_the_server_out() -> None:
    router = Router(["a"])
    early, late = router.acquire("s1", 10), router.acquire("s2", 10)
    assert early
    assert late
    assert router.fail(early, "died")
    assert router.readmit("a", 0)
    assert not router.fail(late, "died, noticed late")
    assert router.acquire("s3", 10)


def test_an_exchanged_server_does_not_inherit_or_refund_the_load_of_its_predecessor() -> None:
    router = Router(["a"])
    ticket = router.acquire("s", 10)
    assert ticket
    router.remove("a")
    router.add("a")
    assert router.readmit("a", 0)
    router.release(ticket)
    assert router.servers["a"].tokens == 0


def test_a_ticket_is_released_once() -> None:
    router = Router(["a"])
    ticket = router.acquire("s", 10)
    assert ticket
    router.release(ticket)
    with pytest.raises(KeyError):
        router.release(ticket)


operations = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "release", "fail", "readmit", "observe"]), st.integers(0, 30), st.integers(1, 500)
    ),
    max_size=80,
)


@given(operations)
def test_load_is_the_sum_of_unreleased_tickets_and_only_healthy_servers_are_chosen(
    steps: list[tuple[str, int, int]],
) -> None:
    names = ["a", "b", "c"]
    router = Router(names)
    held: list[Ticket] = []
    for step, pick, amount in steps:
        name = names[pick % 3]
        match step:
            case "acquire":
                before = {n: s.tokens for n, s in router.servers.items()}
                healthy = [n for n, s in router.servers.items() if s.healthy]
                ticket = router.acquire(f"session{pick}", amount)
                assert (ticket is None) == (not healthy)
                if ticket:
                    assert ticket.server in healthy
                    assert before[ticket.server] <= min(before[n] for n in healthy) + 4 * amount
                    held.append(ticket)
            case "release" if held:
                router.release(held.pop(pick % len(held)))
            case "fail" if held:
                router.fail(held[pick % len(held)], "died")
            case "readmit":
                assert router.readmit(name, amount) == (amount >= router.version)
            case "observe":
                router.observe(name, amount)
        for n, state in router.servers.items():
            mine = [t for t in held if t.server == n]
            assert (state.tokens, state.requests) == (sum(t.tokens for t in mine), len(mine))
    for ticket in held:
        router.release(ticket)
    assert all(s.tokens == s.requests == 0 for s in router.servers.values())
    assert router.in_flight() == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.integers(1, 500)), max_size=200))
def test_a_new_session_gets_a_least_loaded_healthy_server_however_loads_came_about(
    steps: list[tuple[bool, int, int]],
) -> None:
    router = Router([f"server-{i}" for i in range(5)])
    held: list[Ticket] = []
    for place, (acquires, pick, amount) in enumerate(steps):
        if acquires or not held:
            least = min(((s.tokens, s.last_chosen) for s in router.servers.values() if s.healthy), default=None)
            states = {name: (s.tokens, s.last_chosen) for name, s in router.servers.items()}
            ticket = router.acquire(f"new {place}", amount)
            assert (states[ticket.server] if ticket else None) == least
            held += [ticket] if ticket else []
        elif pick % 10 == 0:
            router.fail(held[pick % len(held)], "died")
        elif pick % 10 == 1:
            router.readmit(f"server-{pick % 5}", router.version)
        else:
            router.release(held.pop(pick % len(held)))
