"""The queues of a device loop, as plain objects: order, bounds and waking."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from aioreplica.context import LoopStep
from aioreplica.device_loop import Infeed
from aioreplica.device_loop._feeder import KeptIterators, new_feeder
from aioreplica.device_loop._infeed import DeviceQueue, Mark


def look() -> None:
    raise AssertionError("nothing should have to wait")


def fill(infeed: Infeed, count: int, leaf: Any = 0) -> None:
    for k in range(count):
        infeed.put([(k, leaf)] * 2)


def test_elements_come_out_in_order_and_then_the_end() -> None:
    infeed = Infeed([[0, 1]])
    fill(infeed, 2)
    infeed.end()

    assert [infeed.take(0) for _ in range(3)] == [(0, 0), (1, 0), None]
    assert [infeed.take(1) for _ in range(3)] == [(0, 0), (1, 0), None]


def test_what_is_ready_is_what_lies_in_front_of_the_end() -> None:
    infeed = Infeed([[0, 1]])
    fill(infeed, 2)
    assert infeed.num_ready(0) == 2
    infeed.end(has_failed=True)
    infeed.take(0)

    assert [infeed.num_ready(0), infeed.num_ready(1)] == [1, 2]
    infeed.take(0)
    assert infeed.num_ready(0) == 0
    assert infeed.has_failed


def test_nothing_is_ready_once_it_is_aborted() -> None:
    infeed = Infeed([[0, 1]])
    fill(infeed, 1)
    infeed.abort()

    with pytest.raises(asyncio.CancelledError):
        infeed.num_ready(0)


def test_hosts_are_filled_one_after_the_other() -> None:
    infeed = Infeed([[1], [0]])
    infeed.put([("of 0",), ("of 1",)])

    assert (infeed.take(0), infeed.take(1)) == (("of 0",), ("of 1",))


@pytest.mark.parametrize(("size", "capacity"), [(1, 64), (2**20, 2), (2**17, 4)])
def test_large_elements_make_it_shallow(size: int, capacity: int) -> None:
    infeed = Infeed([[0, 1]])
    fill(infeed, 1, np.zeros(size))

    assert infeed.capacity == capacity


def test_the_slowest_device_decides_about_room() -> None:
    infeed = Infeed([[0, 1]])
    fill(infeed, 64)

    infeed.take(0)
    assert not infeed.has_room
    infeed.take(1)
    assert infeed.has_room


def test_a_waiting_filler_is_woken_once_when_half_is_free() -> None:
    infeed, woken = Infeed([[0, 1]]), []
    fill(infeed, 64)
    assert infeed.wait_for_room(lambda: woken.append(1))

    for k in range(32):
        infeed.take(0)
        infeed.take(1)
        assert len(woken) == (k == 31)
    infeed.abort()

    assert woken == [1]


def test_nobody_is_woken_where_there_is_room() -> None:
    infeed = Infeed([[0, 1]])

    assert not infeed.wait_for_room(look)


def test_abort_wakes_devices_and_the_filler() -> None:
    infeed, woken = Infeed([[0, 1]]), []
    fill(infeed, 64)
    assert infeed.wait_for_room(lambda: woken.append(1))
    for _ in range(40):
        infeed.take(0)
    infeed.abort()
    infeed.abort()

    assert woken == [1]
    assert not infeed.wait_for_room(look)
    for _ in range(24):
        infeed.take(0)
    with pytest.raises(asyncio.CancelledError):
        infeed.take(0)


def test_room_made_while_the_filler_looks_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices take everything just after the feeder saw no room: nobody would wake it later."""
    infeed, woken = Infeed([[0, 1]]), []
    fill(infeed, 64)

    def drained_meanwhile(self: Infeed) -> bool:
        monkeypatch.undo()
        had_room = self.has_room
        for k in range(128):
            self.take(k % 2)
        return had_room

    monkeypatch.setattr(Infeed, "has_room", property(drained_meanwhile))
    has_to_wait = infeed.wait_for_room(lambda: woken.append(1))

    assert woken == [1] if has_to_wait else woken == []


class ScriptedGate:
    """Puts items into a queue while its thread would wait, and notes when it is opened."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.queue: DeviceQueue | None = None
        self.opened_behind: list[Any] = []

    def open(self) -> None:
        self.opened_behind.append(self.last)

    def wait(self) -> None:
        assert self.queue is not None
        already = len(self.opened_behind)
        while len(self.opened_behind) == already:
            self.last = self.items.pop(0)
            self.queue.put(self.last)


@pytest.mark.parametrize(
    ("items", "wakes"),
    [(["a", "b", "c", "d"], "c"), (["a", Mark.END], Mark.END), ([Mark.ABORTED], Mark.ABORTED)],
)
def test_a_thread_that_wants_several_is_woken_once(items: list[Any], wakes: Any) -> None:
    first, gate = items[0], ScriptedGate(items)
    queue = gate.queue = DeviceQueue(gate)  # type: ignore[arg-type]  # a script

    queue.wait_for(3)
    queue.wait_for(1)  # they are there

    assert gate.opened_behind == [wakes]
    assert queue.take() == first


def test_no_more_is_waited_for_than_fits() -> None:
    infeed = Infeed([[0, 1]])
    fill(infeed, 2, np.zeros(2**20))
    assert infeed.capacity == 2

    infeed.wait_for(64)

    assert infeed.take(1) is not None


def test_one_thread_takes_all_that_is_there() -> None:
    infeed, woken = Infeed([[0, 1]]), []
    fill(infeed, 64)
    assert infeed.wait_for_room(lambda: woken.append(1))

    found, is_end = infeed.take_all(10)
    assert (found, is_end) == ([[(k, 0) for k in range(10)]] * 2, False)
    assert (infeed.has_room, woken) == (True, [])

    assert list(map(len, infeed.take_all(100)[0])) == [54, 54]
    assert woken == [1]  # once
    assert infeed.take_all(3) == ([[], []], False)

    fill(infeed, 1)
    infeed.end()
    assert infeed.take_all(3) == ([[(0, 0)]] * 2, True)


def test_an_abort_between_the_queues_is_seen() -> None:
    infeed = Infeed([[0, 1]])
    fill(infeed, 1)
    infeed.abort()
    assert infeed.take_all(1) == ([[(0, 0)]] * 2, False)
    with pytest.raises(asyncio.CancelledError):
        infeed.take_all(1)


def test_several_are_put_as_one_by_one() -> None:
    infeed = Infeed([[2], [0, 1]])
    infeed.put(*[[(k, i) for i in range(3)] for k in range(3)])
    infeed.put([(3, i) for i in range(3)])
    assert (infeed.num_put, infeed.room) == (4, 60)

    assert [infeed.take(2) for _ in range(2)] == [(0, 2), (1, 2)]
    infeed.end()
    assert [infeed.take(0) for _ in range(5)] == [(0, 0), (1, 0), (2, 0), (3, 0), None]


@pytest.mark.parametrize("aborts_at", [None, 1, 700])
def test_a_thread_that_takes_all_misses_nothing_of_one_that_puts_many(
    aborts_at: int | None,
) -> None:
    """On free threads puts, takes and an abort meet in any order; each step is there for all."""
    infeed, total = Infeed([[0, 2], [1]]), 2000
    infeed.capacity = 8  # the first element is put below, so it stays
    gone = threading.Event()

    def put_all() -> None:
        number = 0
        while number < total and not infeed.is_aborted:
            room, waiter = infeed.room, threading.Event()
            if room <= 0:
                if infeed.wait_for_room(waiter.set):
                    assert waiter.wait(60)
                continue
            count = min(1 + number % 5, room, total - number)
            infeed.put(*[[(number + k, i) for i in range(3)] for k in range(count)])
            number += count
        infeed.end()

    def abort() -> None:
        assert gone.wait(60)
        infeed.abort()

    threads = [threading.Thread(target=put_all)]
    if aborts_at is not None:
        threads.append(threading.Thread(target=abort))
    for thread in threads:
        thread.start()
    found: list[list[Any]] = [[], [], []]
    is_end = False
    try:
        while not is_end:
            taken, is_end = infeed.take_all(3)
            for own, items in zip(found, taken, strict=True):
                own.extend(items)
            if aborts_at is not None and len(found[0]) >= aborts_at:
                gone.set()
    except asyncio.CancelledError:
        assert aborts_at is not None
    for thread in threads:
        thread.join(60)

    assert [own == [(k, i) for k in range(len(own))] for i, own in enumerate(found)] == [True] * 3
    if aborts_at is None:
        assert len(found[0]) == total


def test_a_compiled_loop_reads_a_chunk_ahead() -> None:
    infeed = Infeed([[0, 1]], fills_chunks=True)
    fill(infeed, 1, np.zeros(2**17))

    assert infeed.capacity == 32  # of 2 MiB


@pytest.mark.parametrize("num_there", [150, 100])
def test_elements_in_memory_are_read_without_an_event_loop(num_there: int) -> None:
    """By the thread that takes them in chunks; up to the number that is wanted, or to their end."""
    step, infeed = LoopStep(0, [0], [0]), Infeed([[0]], fills_chunks=True)
    source = iter([np.full(2, k) for k in range(num_there)])
    feeder = new_feeder(source, None, infeed, [step], 130)

    feeder.start()
    found: list[Any] = []
    is_end = False
    while len(found) < 130 and not is_end:
        assert not infeed.is_empty(0)
        [own], is_end = infeed.take_all(64)
        assert len(own) <= 64
        found += own
        step.ended(len(own))

    assert [int(x[0]) for (x,) in found] == list(range(min(num_there, 130)))
    assert is_end is (num_there < 130)
    assert feeder.error is None
    assert len(list(source)) == max(0, num_there - 130)  # not one more was read


class ToldLock:
    """A lock that tells when it is asked for."""

    def __init__(self, asked: threading.Event) -> None:
        self._lock, self._asked = threading.Lock(), asked

    def __enter__(self) -> None:
        if self._lock.locked():
            self._asked.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_what_a_device_reads_while_its_loop_is_settled_is_kept() -> None:
    """The loop was dropped, so nothing has waited for the thread that was reading."""
    step, infeed = LoopStep(0, [0], [0]), Infeed([[0]], fills_chunks=True)
    kept, source = KeptIterators(), iter(list(range(10)))
    feeder: Any = new_feeder(source, kept, infeed, [step], 10)
    has_read, goes_on = threading.Event(), threading.Event()
    feeder._lock, read_many = ToldLock(goes_on), feeder._read_many

    def reads(count: int) -> list[Any]:
        found: list[Any] = read_many(count)
        has_read.set()
        assert goes_on.wait(60)
        return found

    feeder._read_many = reads
    device = threading.Thread(target=feeder.start)
    device.start()
    assert has_read.wait(60)
    infeed.abort()
    feeder.settle()
    goes_on.set()  # unless it was by the lock
    device.join(60)

    _, unrun = kept.find(source)
    assert [*unrun, *source] == list(range(10))
    kept.close()
