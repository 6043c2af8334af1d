"""One client loop under callers of every kind: threads, other event loops, forks, Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from transfer_queue.errors import Disconnected
from transfer_queue.net.client_loop import REST, ClientLoop

SEED = 11


@pytest.fixture
def loop():
    loop = ClientLoop("test")
    yield loop
    loop.close()


async def where(seconds: float = 0.0) -> threading.Thread:
    await asyncio.sleep(seconds)
    return threading.current_thread()


def test_a_thread_without_a_loop_drives_itself_and_the_helper_comes_back_later(loop):
    assert loop.run(where()) is threading.current_thread()
    assert loop.run(where()) is threading.current_thread()
    ticked = threading.Event()
    loop.run(later(ticked.set, 3 * REST))
    assert ticked.wait(10)


async def later(call, delay: float) -> None:
    asyncio.get_running_loop().call_later(delay, call)


def test_threads_that_call_at_once_all_get_their_results(loop):
    def one(i: int) -> int:
        async def work() -> int:
            await asyncio.sleep(0.001 * (i % 3))
            return i

        return loop.run(work())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(400))) == list(range(400))


def test_a_short_call_is_not_held_up_by_a_long_one(loop):
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(loop.run, where(1.0))
        time.sleep(2 * REST)
        began = time.monotonic()
        loop.run(where())
        assert time.monotonic() - began < 0.5
        assert not long.done()


def test_work_handed_over_goes_on_when_the_caller_that_drove_it_has_left(loop):
    async def main() -> threading.Thread:
        return await loop.arun(where(0.05))

    with ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            other = pool.submit(asyncio.run, main())
            loop.run(where(0.01))
            other.result(5)


def test_every_fresh_loop_may_await_it(loop):
    async def gathered() -> list[int]:
        async def one(i: int) -> int:
            await asyncio.sleep(0)
            return i

        return await asyncio.gather(*(loop.arun(one(i)) for i in range(64)))

    for _ in range(20):
        assert asyncio.run(gathered()) == list(range(64))


async def test_a_blocking_call_inside_a_running_loop_works(loop):
    assert loop.run(where()) is not threading.current_thread()
    assert await loop.arun(where()) is not threading.current_thread()


async def test_a_result_dies_with_its_last_reference_and_waits_for_no_garbage_collection(loop):
    class Result:
        pass

    freed: list[threading.Event] = []

    async def make() -> Result:
        result = Result()
        freed.append(threading.Event())
        weakref.finalize(result, freed[-1].set)
        return result

    gc.disable()
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: [loop.run(make()), None][1]).result(10)
        loop.run(make())
        await loop.arun(make())
        await asyncio.sleep(0)  # the turn that brought it here refers to it
        assert [event.wait(1) for event in freed] == [True, True, True]
    finally:
        gc.enable()


async def test_a_call_from_the_loop_itself_is_an_error_and_no_deadlock(loop):
    async def inner() -> None:
        with pytest.raises(RuntimeError, match="from its own event loop"):
            loop.run(where())
        assert isinstance(await loop.arun(where()), threading.Thread)

    await loop.arun(inner())


async def test_giving_up_cancels_the_work(loop):
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(loop.arun(work()), 0.05)
    assert await asyncio.to_thread(ended.wait, 5)


def test_errors_arrive_at_whoever_waits(loop):
    async def fails() -> None:
        raise ValueError("this one")

    async def main() -> None:
        await loop.arun(fails())

    for call in (lambda: loop.run(fails()), lambda: asyncio.run(main())):
        with pytest.raises(ValueError, match="this one"):
            call()


def test_a_loop_that_has_ended_with_its_work_still_running_disturbs_nobody(loop):
    async def leave() -> None:
        task = asyncio.create_task(loop.arun(where(0.02)))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    time.sleep(0.05)
    assert loop.run(where()) is threading.current_thread()


def test_after_close_every_call_says_so_and_waiting_ones_end(loop):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asyncio.run, _arun(loop, where(60)))
        time.sleep(0.05)
        loop.close()
        with pytest.raises((asyncio.CancelledError, Disconnected)):
            waiting.result(5)
    with pytest.raises(Disconnected, match="'test' was closed"):
        loop.run(where())
    assert not loop.alive


async def _arun(loop: ClientLoop, work):
    return await loop.arun(work)


def test_a_forked_process_is_told_to_connect_anew(loop):
    loop.run(where())
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            loop.run(where())
        except Disconnected as error:
            os.write(writable, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"which forked this one: connect anew here" in os.read(readable, 1000)
    assert loop.run(where()) is threading.current_thread()


def test_a_process_forked_after_init_attaches_anew_and_both_go_on(tmp_path):
    code = f"""
        import asyncio, os, sys
        import numpy as np
        import transfer_queue as tq
        tq.init({{"directory": {str(tmp_path / "queue")!r}, "storage_dir": {str(tmp_path)!r}, "units": 1}})
        tq.kv_put("a", "p", fields={{"x": np.arange(3)}})
        child = os.fork()
        mine = "child" if child == 0 else "parent"
        for i in range(30):
            tq.kv_put(f"{{mine}}-{{i}}", "p", fields={{"x": np.arange(3)}})
            asyncio.run(tq.async_kv_put(f"{{mine}}-{{i}}", "p", tag={{"i": i}}))
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(tq.kv_list("p")["p"]) == 61
        tq.close()
    """
    environment = {name: value for name, value in os.environ.items() if name != "TQ_ADDRESS"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60, env=environment)


def test_ctrl_c_cancels_the_work_and_the_loop_goes_on():
    code = """
        import asyncio, os, signal, threading
        from transfer_queue.net.client_loop import ClientLoop
        loop = ClientLoop("test")
        cancelled = []
        async def work():
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.append(True)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            loop.run(work())
        except KeyboardInterrupt:
            pass
        assert cancelled
        assert loop.run(asyncio.sleep(0, "on")) == "on"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        loop.close()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=30)


def test_ctrl_c_while_the_helper_is_busy_holds_up_nobody_after_it():
    code = """
        import asyncio, os, signal, threading, time
        from transfer_queue.net.client_loop import ClientLoop
        loop = ClientLoop("test")
        async def busy():
            await asyncio.sleep(0.05)
            for _ in range(3_000_000):  # one turn of the loop, in the helper
                pass
            time.sleep(0.5)
        async def handed(work):
            return await loop.arun(work)
        other = threading.Thread(target=asyncio.run, args=(handed(busy()),))
        other.start()
        time.sleep(0.2)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            loop.run(asyncio.sleep(60))
        except KeyboardInterrupt:
            pass
        else:
            raise SystemExit("was not interrupted")
        other.join()
        assert asyncio.run(handed(asyncio.sleep(0, "on"))) == "on"
        assert (loop._callers, loop._driver in (None, loop._helper)) == (0, True)
        loop.close()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=30)


def test_a_second_ctrl_c_leaves_work_that_does_not_end_and_hits_nobody_else():
    code = """
        import asyncio, os, signal, threading, time
        from transfer_queue.net.client_loop import ClientLoop
        loop = ClientLoop("test")
        ended = threading.Event()
        async def stubborn():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                try:
                    await asyncio.sleep(60)
                finally:
                    await asyncio.sleep(0.5)
                    ended.set()
        async def other():
            for _ in range(800):
                await asyncio.sleep(0.001)
            return "whole"
        async def handed(work):
            return await loop.arun(work)
        found = []
        worker = threading.Thread(target=lambda: found.append(asyncio.run(handed(other()))))
        worker.start()
        for delay in (0.2, 0.4):
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        try:
            loop.run(stubborn())
        except KeyboardInterrupt:
            assert time.monotonic() - began < 0.8
        assert ended.wait(10)
        worker.join()
        assert found == ["whole"]
        loop.close()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=30)


def test_under_a_hail_of_ctrl_c_every_call_ends_and_the_loop_goes_on():
    code = """
        import asyncio, os, random, signal, threading, time
        from transfer_queue.net.client_loop import ClientLoop
        print("seed", SEED)
        rng = random.Random(SEED)
        loop = ClientLoop("test")
        over, counts, errors = threading.Event(), {"async": 0, "sync": 0}, []
        async def answer(i):
            await asyncio.sleep(0.0002 * (i % 3))
            return i
        async def several():
            return await asyncio.gather(*(loop.arun(answer(i)) for i in range(5)))
        def caller(kind):
            try:
                while not over.is_set():
                    if kind == "async":
                        assert asyncio.run(several()) == list(range(5))
                    else:
                        assert loop.run(answer(7)) == 7
                    counts[kind] += 1
            except BaseException as error:
                errors.append(error)
        def hail():
            while not over.is_set():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(rng.random() / 500)
        threads = [threading.Thread(target=caller, args=(kind,)) for kind in counts] + [threading.Thread(target=hail)]
        end, hits, i = time.monotonic() + 3, 0, 0
        while True:
            try:
                if not threads[-1].ident:
                    [thread.start() for thread in threads if not thread.ident]
                while time.monotonic() < end:
                    i += 1
                    assert loop.run(answer(i)) == i
                over.set()
                break
            except KeyboardInterrupt:
                hits += 1
        for thread in threads:
            while thread.is_alive():
                try:
                    thread.join(10)
                except KeyboardInterrupt:
                    pass
        assert not errors, errors
        assert hits > 100 and min(counts.values()) > 20, (hits, counts)
        assert loop.run(answer(3)) == 3 and asyncio.run(several()) == list(range(5))
        assert loop._callers == 0
        loop.close()
    """
    code = textwrap.dedent(code).replace("SEED", str(SEED))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_any_mix_of_callers_is_served(loop):
    """Random callers for a while: nothing hangs, nothing is mixed up."""
    rng = random.Random(SEED)

    async def answer(i: int, delay: float) -> int:
        await asyncio.sleep(delay)
        return i

    async def several(ids: list[int]) -> list[int]:
        return await asyncio.gather(*(loop.arun(answer(i, rng.random() / 500)) for i in ids))

    def caller(seed: int) -> None:
        own = random.Random(seed)
        for i in range(40):
            if own.random() < 0.5:
                assert loop.run(answer(i, own.random() / 500)) == i
            else:
                assert asyncio.run(several(list(range(i)))) == list(range(i))
            if own.random() < 0.05:
                time.sleep(1.5 * REST)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(caller, range(SEED, SEED + 4)))
