"""The router's invariants, and the examples that explain them."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.llm.router import Router, ServerNews, ServerState, Ticket


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
    router.servers[home.server].tokens = 40
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
    router.release(early)
    assert router.readmit("a", 0)
    assert not router.fail(late, "died, noticed late")
    router.release(late)
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


def test_a_readmitted_server_has_one_request_until_its_first_token() -> None:
    router = Router(["a"])
    ticket = held(router, "s", 10)
    router.fail(ticket, "died")
    router.release(ticket)
    assert router.readmit("a", 0)
    first = held(router, "s", 10)
    assert router.acquire("t", 10) is None
    router.observe("a", 0)
    assert router.acquire("t", 10)
    router.release(first)
    assert router.servers["a"].failures == 0


def test_a_server_that_dies_under_its_first_request_again_and_again_has_failed_as_often() -> None:
    router = Router(["a"])
    for times in range(1, 4):
        ticket = held(router, "s", 10)
        assert router.fail(ticket, "died")
        router.release(ticket)
        assert router.servers["a"].failures == times
        router.readmit("a", 0)


def test_a_server_at_its_limit_takes_nothing_more_until_a_request_ends() -> None:
    router = Router(["a", "b"])
    router.hear({"a": ServerNews(max_requests=1), "b": ServerNews(max_tokens=100)}, routers=1)
    tickets = [held(router, f"s{i}", 60) for i in range(3)]
    assert sorted(ticket.server for ticket in tickets) == ["a", "b", "b"]
    assert router.acquire("more", 60) is None
    router.release(next(ticket for ticket in tickets if ticket.server == "a"))
    assert held(router, "more", 60).server == "a"


def test_a_request_larger_than_the_limit_goes_to_an_empty_server() -> None:
    router = Router(["a"])
    router.hear({"a": ServerNews(max_tokens=100)}, routers=1)
    assert router.acquire("large", 1000)
    assert router.acquire("small", 1) is None


def test_a_drained_server_gets_nothing_and_its_sessions_go_elsewhere() -> None:
    router = Router(["a", "b"])
    home = held(router, "s", 10)
    router.drain(home.server)
    assert {held(router, "s", 10).server for _ in range(5)} == {"a", "b"} - {home.server}
    assert router.held()[home.server] == (1, 10)
    router.release(home)
    router.remove(home.server)
    assert list(router.servers) == list({"a", "b"} - {home.server})


def test_a_server_that_is_out_is_not_back_with_weights_older_than_those_that_a_beat_told_of() -> None:
    router = Router(["a", "b"])
    router.eject("a", "it did not take version 2")
    router.hear({"b": ServerNews(version=2)}, routers=1)
    assert not router.readmit("a", 1)
    assert router.readmit("a", 2)


def test_a_drained_server_that_is_undrained_gets_requests_and_one_that_is_out_does_not() -> None:
    router = Router(["a", "b"])
    router.drain("a")
    router.undrain("a")
    assert {held(router, f"s{i}", 10).server for i in range(2)} == {"a", "b"}
    router.eject("b", "gone")
    router.undrain("b")
    assert router.draining() == set()
    assert {held(router, f"t{i}", 10).server for i in range(4)} == {"a"}


def test_a_reserved_server_gets_those_that_ask_for_one_and_nobody_else() -> None:
    router = Router(["a", "b", "c"])
    router.reserve(["a"])
    asked = [router.acquire(f"v{i}", 10, reserved=True) for i in range(3)]
    others = [router.acquire(f"s{i}", 10) for i in range(4)]
    assert [ticket and ticket.server for ticket in asked] == ["a", "a", "a"], "also when others are idle"
    assert {ticket.server for ticket in others if ticket} == {"b", "c"}
    failing = asked[0]
    assert failing
    router.fail(failing, "gone")
    assert router.acquire("v3", 10, reserved=True) is None, "it waits until the reserved one is back"
    router.remove("a")
    assert router.acquire("v3", 10, reserved=True), "unless that left for good"
    router.add("a", healthy=True)
    assert all((ticket := router.acquire(f"t{i}", 1)) and ticket.server != "a" for i in range(3)), "still reserved"
    router.reserve([])
    ticket = router.acquire("s9", 10)
    assert ticket
    assert ticket.server == "a", "free again, and idle"


def test_servers_that_lag_are_used_only_when_no_other_is_left() -> None:
    router = Router(["new", "next", "old"], max_lag=1)
    router.hear({"new": ServerNews(7), "next": ServerNews(6), "old": ServerNews(5)}, routers=1)
    assert {held(router, f"s{i}", 10).server for i in range(8)} == {"new", "next"}
    for name in ("new", "next"):
        router.eject(name, "died")
    assert held(router, "s", 10).server == "old"


def test_a_request_that_needs_a_version_never_gets_an_older_one() -> None:
    router = Router(["new", "old"])
    router.hear({"new": ServerNews(7), "old": ServerNews(6)}, routers=1)
    assert {held(router, f"s{i}", 10, version=7).server for i in range(5)} == {"new"}
    router.eject("new", "died")
    assert router.acquire("s", 10, version=7) is None
    assert router.acquire("s", 10)


def test_what_other_routers_hold_counts() -> None:
    router = Router(["a", "b"])
    router.hear({"a": ServerNews(others_tokens=300), "b": ServerNews()}, routers=2)
    assert [held(router, f"s{i}", 50).server for i in range(3)] == ["b", "b", "b"]
    assert held(router, "t", 50).server == "a"  # 3 x 50 of ours, and as much of the other one, stand at b


def test_a_router_may_hold_its_share_of_a_limit_whatever_the_others_hold() -> None:
    router = Router(["a"])
    router.hear({"a": ServerNews(max_requests=8, others_requests=8)}, routers=4)
    assert held(router, "s", 10)
    assert held(router, "t", 10)
    assert router.acquire("u", 10) is None


@pytest.mark.parametrize("routers", [2, 4, 8])
def test_several_routers_that_hear_each_other_once_a_beat_stay_even(routers: int) -> None:
    """Two hundred requests in flight on 8 servers, of random lengths, ended and begun at random; a beat per 100 of
    them. One router does far more than the others."""
    random = Random(routers)
    all_of = [Router([f"server-{i}" for i in range(8)], offset=place) for place in range(routers)]
    tickets: list[tuple[Router, Ticket]] = []
    unevenness: list[float] = []
    for turn in range(4000):
        while len(tickets) < 200:
            router = all_of[0] if random.random() < 0.5 else random.choice(all_of)
            tickets.append((router, held(router, f"new {turn} {len(tickets)}", 100)))
        router, ticket = tickets.pop(random.randrange(len(tickets)))
        router.release(ticket)
        if turn % 100 == 0:
            tell_each_other(all_of)
        if turn >= 500:
            loads = [sum(router.servers[name].requests for router in all_of) for name in all_of[0].servers]
            unevenness.append(max(loads) / (sum(loads) / len(loads)) - 1)
    assert sum(unevenness) / len(unevenness) < 0.12


def tell_each_other(routers: list[Router]) -> None:
    holding = [router.held() for router in routers]
    for router, own in zip(routers, holding, strict=True):
        news: dict[str, ServerNews] = {}
        for name, (requests, tokens) in own.items():
            everybodys = [each[name] for each in holding]
            news[name] = ServerNews(
                others_requests=sum(r for r, _ in everybodys) - requests,
                others_tokens=sum(t for _, t in everybodys) - tokens,
                told_requests=requests,
                told_tokens=tokens,
            )
        router.hear(news, len(routers))


NEWS = st.builds(
    ServerNews,
    version=st.integers(0, 5),
    max_requests=st.none() | st.integers(1, 6),
    max_tokens=st.none() | st.integers(1, 900),
    others_requests=st.integers(0, 6),
    others_tokens=st.integers(0, 2000),
)
EVERYTHING = st.lists(
    st.tuples(
        st.sampled_from(
            ["acquire", "acquire", "acquire", "release", "release", "fail", "eject", "readmit", "observe", "served",
             "drain", "hear", "add", "remove", "reserve"]
        ),
        st.integers(0, 30), st.integers(1, 500), st.dictionaries(st.sampled_from("abcd"), NEWS, max_size=4),
    ),
    max_size=60,
)  # fmt: skip


@given(EVERYTHING)
def test_a_ticket_is_given_if_and_only_if_a_server_may_take_one_whatever_has_happened(
    steps: list[tuple[str, int, int, dict[str, ServerNews]]],
) -> None:
    router = Router("abcd")
    tickets: list[Ticket] = []
    for step, pick, amount, news in steps:
        name, ticket = "abcd"[pick % 4], tickets[pick % len(tickets)] if tickets else None
        match step:
            case "acquire":
                fit = {n for n, s in router.servers.items() if may_take(router, s)}
                needed = pick % 7
                fit = {n for n in fit if router.servers[n].version >= needed}
                given_ = router.acquire(f"session {pick % 5}", amount, version=needed)
                assert (given_ is None) == (not fit)
                if given_ is not None:
                    assert given_.server in fit
                    kept = {n for n in fit if not router.servers[n].lags}
                    assert needed or given_.server in (kept or fit)
                    tickets.append(given_)
            case "release" if ticket:
                router.release(tickets.pop(pick % len(tickets)))
            case "fail" if ticket:
                router.fail(ticket, "died")
            case "served" if ticket:
                router.served(ticket)
            case "eject":
                router.eject(name, "died")
            case "readmit":
                router.readmit(name, amount % 6)
            case "observe":
                router.observe(name, amount % 6)
            case "drain":
                router.drain(name)
            case "hear":
                router.hear(news, 1 + pick % 4)
            case "add":
                router.add(name, healthy=pick % 2 == 0)
            case "remove":
                router.remove(name)
            case "reserve":
                router.reserve([name] if pick % 3 == 0 else [])
    for ticket in tickets:
        router.release(ticket)
    assert router.in_flight() == 0
    assert all(state.tokens == state.requests == 0 for state in router.servers.values())


def may_take(router: Router, state: ServerState) -> bool:
    """As the docstrings say it, without the router's numbers."""
    mine, others = state.requests, router.routers - 1
    requests = mine + max(0, state.others_requests + others * (mine - state.told_requests))
    tokens = state.tokens + max(0, state.others_tokens + others * (state.tokens - state.told_tokens))
    if router.routers == 1:
        tokens = state.tokens
    if not state.in_service or state.reserved or (state.status == "probation" and mine):
        return False
    limit = state.max_requests
    if limit is not None and requests >= limit and mine >= max(1, limit // router.routers):
        return False
    limit = state.max_tokens
    return limit is None or not mine or tokens < limit or state.tokens < limit // router.routers


def held(router: Router, session: str, tokens: int, **needs: int) -> Ticket:
    ticket = router.acquire(session, tokens, **needs)
    assert ticket is not None
    return ticket


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
                healthy = [
                    n for n, s in router.servers.items() if s.status == "serving" or (s.in_service and not s.requests)
                ]
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
            may = [s for s in router.servers.values() if s.status == "serving" or (s.in_service and not s.requests)]
            least = min(((s.tokens, s.last_chosen) for s in may), default=None)
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
