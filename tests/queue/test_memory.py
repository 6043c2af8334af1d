"""Results that reuse the memory of freed results: independent while they live, bounded when they do not."""

from __future__ import annotations

import random
import threading
import time
import weakref

import numpy as np
import pytest

from transfer_queue.storage import idle
from transfer_queue.storage.memory import LEAST, ResultPool, size_class


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_a_size_class_wastes_at_most_an_eighth_and_is_its_own_class():
    rng = random.Random(1)
    for nbytes in [rng.randrange(64 << 10, 1 << 34) for _ in range(10_000)]:
        size = size_class(nbytes)
        assert nbytes <= size <= nbytes * 9 / 8 + 4096
        assert size_class(size) == size


def test_a_freed_result_is_the_memory_of_the_next():
    pool = ResultPool()
    first = pool.empty((LEAST // 8,), np.int64)
    where = address(first)
    del first
    assert pool.idle_bytes() == size_class(LEAST)
    assert address(pool.empty((2, LEAST // 8), np.float32)) == where
    assert pool.idle_bytes() == size_class(LEAST)


@pytest.mark.parametrize("keep", [lambda a: a[5:9], lambda a: a.view(np.uint8).reshape(-1, 8)[::2], memoryview])
def test_memory_is_not_reused_while_any_view_of_it_lives(keep):
    pool = ResultPool()
    first = pool.empty((LEAST,), np.uint8)
    where, kept = address(first), keep(first)
    del first
    assert pool.idle_bytes() == 0
    second = pool.empty((LEAST,), np.uint8)
    assert address(second) != where
    del kept
    assert address(pool.empty((LEAST,), np.uint8)) == where


def test_a_tensor_keeps_the_memory_of_its_result():
    torch = pytest.importorskip("torch")
    pool = ResultPool()
    tensor = torch.from_numpy(pool.empty((LEAST,), np.uint8))
    tensor.fill_(3)
    for _ in range(3):
        pool.empty((LEAST,), np.uint8)[:] = 9
    assert (tensor == 3).all()


def test_the_pool_is_bounded_and_small_results_are_not_kept():
    pool = ResultPool(max_idle=3 * LEAST)
    results = [pool.empty((LEAST,), np.uint8) for _ in range(8)]
    small = pool.empty((10,), np.int64)
    assert small.flags.owndata
    results.clear()
    assert pool.idle_bytes() == 3 * LEAST
    late = pool.empty((LEAST,), np.uint8)
    pool.release()
    assert pool.idle_bytes() == 0
    del late
    assert pool.idle_bytes() == 0


def test_results_of_many_threads_never_share_memory():
    pool, wrong = ResultPool(), []

    def work(number: int) -> None:
        rng = random.Random(number)
        held = []
        for _ in range(300):
            array = pool.empty((LEAST + rng.randrange(LEAST),), np.uint8)
            array[::4096] = number
            held.append(array)
            if len(held) > 3:
                wrong.extend(1 for a in held if (a[::4096] != number).any())
                held.pop(rng.randrange(len(held)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Kept:
    def __init__(self) -> None:
        self.swept, self.released = 0, threading.Event()

    def sweep(self) -> None:
        self.swept += 1

    def release(self) -> None:
        self.released.set()


def test_the_thread_ends_when_the_last_keeper_keeps_nothing():
    kept, other = Kept(), Kept()
    watch = idle._Watch()
    for keeper in (kept, other):
        watch.note_use(keeper)
    (thread,) = [thread for thread in threading.enumerate() if getattr(thread, "_target", None) == watch._run]
    watch.forget(kept)
    watch.forget(kept)
    thread.join(0.1)
    assert thread.is_alive()
    watch.forget(other)
    thread.join(5)
    assert not thread.is_alive()
    assert not kept.released.is_set()


def test_what_is_kept_is_released_after_a_while_without_use_and_the_thread_ends(monkeypatch):
    monkeypatch.setattr(idle, "IDLE", 0.2)
    monkeypatch.setattr(idle, "SWEEP_AFTER", 0.02)
    watch, kept, before = idle._Watch(), Kept(), set(threading.enumerate())
    watch.note_use(kept)
    (thread,) = set(threading.enumerate()) - before
    assert kept.released.wait(10)
    thread.join(10)
    assert not thread.is_alive()
    assert kept.swept == 1, "one look for one use, and none while nothing happens"


def test_uses_one_after_the_other_are_swept_again_and_again_and_not_released(monkeypatch):
    monkeypatch.setattr(idle, "SWEEP_AFTER", 0.02)
    watch, kept = idle._Watch(), Kept()
    deadline = time.monotonic() + 10
    while kept.swept < 3 and time.monotonic() < deadline:
        watch.note_use(kept)
        time.sleep(0.005)
    assert kept.swept >= 3
    assert not kept.released.is_set()


def test_who_is_gone_is_not_kept_alive_by_being_watched(monkeypatch):
    monkeypatch.setattr(idle, "IDLE", 60.0)
    watch = idle._Watch()
    kept = Kept()
    gone = weakref.ref(kept)
    watch._used[kept] = 0.0
    del kept
    assert gone() is None
    watch.look()
    assert not watch._wait(), "nothing is left to wait for"
