"""Ops that wait: in virtual time, woken by the schedule, found out where nobody wakes them."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.testing import _threads

PAIR = ["cpu:0", "cpu:1"]
OUTSIDE = threading.Lock()  # made outside every program, so it is real


def my_id() -> int:
    context = ar.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def pause() -> Callable[[float], None]:
    """Return what stands for the blocking sleep inside a run."""
    return vars(time)["sleep"]


# --- planted bugs -----------------------------------------------------------------------------


async def programs_that_wait_for_each_other() -> None:
    events = [threading.Event(), threading.Event()]

    def step() -> None:
        events[1 - my_id()].wait()
        events[my_id()].set()

    async with ar.MirroredStrategy(PAIR) as strategy:
        await strategy.run(step)


async def crossed_thread_locks() -> None:
    first, second = threading.Lock(), threading.Lock()

    def patient(one: threading.Lock, other: threading.Lock) -> None:
        hold = threading.Event()
        with one:
            hold.wait(0.1)
            with other:
                pass

    await asyncio.gather(
        asyncio.to_thread(patient, first, second), asyncio.to_thread(patient, second, first)
    )


def test_programs_that_wait_for_each_other_are_a_deadlock() -> None:
    report = art.explore(programs_that_wait_for_each_other, schedules=20)

    assert report.failure is not None
    error = report.failure.error
    assert isinstance(error, art.DeadlockError)
    waits = {wait.who: wait for wait in error.waits}
    assert waits["replica 0"].awaits.startswith("threading.Event")
    assert waits["replica 1"].site.startswith("test_threads.py:")
    assert "replica 0, replica 1" in waits["main"].awaits


def test_a_deadlock_of_locks_names_holders_and_the_cycle() -> None:
    report = art.explore(crossed_thread_locks, schedules=100)

    assert report.failure is not None
    error = report.failure.error
    assert isinstance(error, art.DeadlockError)
    assert len(error.cycle) == 2
    held = {wait.awaits: wait for wait in error.waits if wait.who in error.cycle}
    assert set(held) == {"threading.Lock 'first'", "threading.Lock 'second'"}
    assert {wait.owner for wait in held.values()} == set(error.cycle)
    assert all("patient" in name for name in error.cycle)


@pytest.mark.parametrize("main", [programs_that_wait_for_each_other, crossed_thread_locks])
def test_a_failure_with_threads_is_replayed(main: Any) -> None:
    failure = art.explore(main, schedules=100).failure
    assert failure is not None
    texts = []
    for _ in range(3):
        with pytest.raises(art.DeadlockError) as caught:
            art.replay(main, failure.token)
        texts.append((str(caught.value), caught.value.__notes__))

    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0] == str(failure.error)


def test_exhaustive_finds_it_too() -> None:
    report = art.exhaustive(crossed_thread_locks)

    assert report.failed
    assert not report.complete


# --- waits that end ---------------------------------------------------------------------------


def test_a_thread_may_wait_for_the_loop() -> None:
    async def main() -> list[Any]:
        loop, event = asyncio.get_running_loop(), threading.Event()

        async def answer() -> int:
            await asyncio.sleep(1)
            return 42

        def ask() -> int:
            return asyncio.run_coroutine_threadsafe(answer(), loop).result()

        async def wake() -> None:
            await asyncio.sleep(2)
            event.set()

        return await asyncio.gather(asyncio.to_thread(ask), asyncio.to_thread(event.wait), wake())

    report = art.explore(main, schedules=100)
    report.check()
    assert art.run(main) == [42, True, None]


def test_timeouts_are_virtual() -> None:
    async def main() -> list[Any]:
        def wait() -> list[Any]:
            start, found = time.monotonic(), []
            found.append(threading.Event().wait(3600))
            try:
                queue.Queue[int]().get(timeout=60)
            except queue.Empty:
                found.append("empty")
            pause()(1)
            lock = threading.Lock()
            lock.acquire()
            found += [lock.acquire(timeout=5), threading.Semaphore(0).acquire(timeout=4)]
            return [*found, round(time.monotonic() - start, 6)]

        return await asyncio.to_thread(wait)

    assert art.run(main) == [False, "empty", False, False, 3670.0]


def test_what_follows_a_blocking_sleep_comes_after_it() -> None:
    async def main() -> None:
        event, loop = threading.Event(), asyncio.get_running_loop()
        told, start = loop.create_future(), loop.time()

        def produce() -> None:
            pause()(5)
            event.set()
            pause()(5)
            loop.call_soon_threadsafe(told.set_result, None)

        producer = asyncio.create_task(asyncio.to_thread(produce))
        assert not await asyncio.to_thread(event.wait, 2)
        assert await asyncio.to_thread(event.wait, 6)
        await told
        assert loop.time() - start >= 10
        await producer

    art.explore(main, schedules=50).check()


def test_an_event_in_time_ends_the_wait() -> None:
    async def main() -> tuple[bool, float]:
        event = threading.Event()
        start = time.monotonic()
        asyncio.get_running_loop().call_later(5, event.set)
        return await asyncio.to_thread(event.wait, 60), time.monotonic() - start

    found, seconds = art.run(main)
    assert found
    assert 5 <= seconds < 6


def test_the_schedule_decides_who_takes_a_lock_next() -> None:
    seen: set[tuple[int, ...]] = set()

    async def main() -> None:
        lock, order = threading.Lock(), list[int]()

        def take(i: int) -> None:
            with lock:
                order.append(i)

        with lock:
            ops = [asyncio.ensure_future(asyncio.to_thread(take, i)) for i in range(3)]
            await asyncio.sleep(1)
            assert order == []
        await asyncio.gather(*ops)
        seen.add(tuple(order))

    art.explore(main, schedules=100).check()
    assert len(seen) == 6


@pytest.mark.slow
def test_a_queue_between_threads_loses_nothing() -> None:
    async def main() -> list[int]:
        items: queue.Queue[int] = queue.Queue(maxsize=1)

        def produce() -> None:
            for i in range(4):
                items.put(i)

        def consume() -> list[int]:
            return [items.get() for _ in range(4)]

        return (await asyncio.gather(asyncio.to_thread(consume), asyncio.to_thread(produce)))[0]

    art.explore(main, schedules=200).check()
    assert art.exhaustive(main, max_preemptions=1).complete
    assert art.run(main) == [0, 1, 2, 3]


def test_a_reentrant_lock_belongs_to_one_op() -> None:
    async def main() -> list[str]:
        condition, order = threading.Condition(), list[str]()

        def wait() -> None:
            with condition, condition:
                order.append("waits")
                assert condition.wait_for(lambda: "set" in order)
                order.append("woken")

        def notify() -> None:
            while "waits" not in order:
                pause()(0.1)
            with condition:
                order.append("set")
                condition.notify_all()
                threading.Event().wait(1)  # the other one cannot go on: the lock is held
                order.append("leaves")

        await asyncio.gather(asyncio.to_thread(wait), asyncio.to_thread(notify))
        return order

    art.explore(main, schedules=100).check()
    assert art.run(main) == ["waits", "set", "leaves", "woken"]


def test_an_op_that_polls_lets_time_pass() -> None:
    async def main() -> float:
        done: list[bool] = []
        asyncio.get_running_loop().call_later(30, done.append, True)
        start = time.monotonic()

        def poll() -> float:
            while not done:
                pause()(0.1)
            return time.monotonic() - start

        return await asyncio.to_thread(poll)

    assert 30 <= art.run(main) < 31


@pytest.mark.xslow
def test_an_op_that_polls_for_ever_starves() -> None:
    async def main() -> None:
        def poll() -> None:
            while True:
                threading.Event().wait(0.1)

        await asyncio.to_thread(poll)

    with pytest.raises(art.StarvationError, match="poll"):
        art.run(main)


# --- the loop's own thread --------------------------------------------------------------------


def test_ops_go_on_while_the_loop_is_blocked() -> None:
    async def main() -> bool:
        event = threading.Event()
        op = asyncio.get_running_loop().run_in_executor(None, event.set)
        found = event.wait()
        await op
        return found

    art.explore(main, schedules=50).check()


def test_a_wait_that_blocks_the_loop_for_ever_is_refused() -> None:
    async def main() -> None:
        lock = threading.Lock()

        def hold() -> None:
            with lock:
                threading.Event().wait()

        op = asyncio.ensure_future(asyncio.to_thread(hold))
        await asyncio.sleep(1)
        with lock:
            await op

    with pytest.raises(art.RealIOError, match=r"blocked on a lock at .*test_threads.py"):
        art.run(main)


# --- ends -------------------------------------------------------------------------------------


def test_a_thread_that_waits_for_ever_has_leaked() -> None:
    async def main() -> None:
        asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
        await asyncio.sleep(1)

    with pytest.raises(art.LeakError, match="threads that waited for ever") as caught:
        art.run(main)

    (thread,) = caught.value.threads
    assert "default pool" in thread


def test_no_thread_outlives_the_exploration() -> None:
    before = threading.enumerate()

    async def cancelled() -> None:
        try:
            await asyncio.wait_for(asyncio.to_thread(threading.Event().wait), 1)
        except TimeoutError:
            raise KeyError("given up") from None

    for main in (programs_that_wait_for_each_other, crossed_thread_locks, cancelled):
        assert art.explore(main, schedules=50).failed

    assert threading.enumerate() == before


def test_an_op_that_will_not_end_is_left() -> None:
    async def main() -> None:
        def stubborn() -> None:
            threading.Event().wait(1)
            while True:
                try:
                    threading.Event().wait()
                except BaseException:
                    continue

        await asyncio.to_thread(stubborn)

    with pytest.raises(art.DeadlockError):
        art.run(main)


def test_an_op_may_catch_what_ends_the_attempt_without_threads() -> None:
    async def main() -> str:
        event = threading.Event()
        asyncio.get_running_loop().call_later(1, event.set)

        def careless() -> str:
            try:
                event.wait()
            except BaseException:
                return "caught"
            return "woken"

        return await asyncio.to_thread(careless)

    assert art.run(main) == "woken"


def test_a_lock_that_is_real_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_threads, "LOOK_S", 0.005)
    monkeypatch.setattr(_threads, "STUCK_LOOKS", 3)

    async def main() -> None:
        def block() -> None:
            threading.Event().wait(1)  # from here on ops have threads
            OUTSIDE.acquire()
            OUTSIDE.release()

        await asyncio.to_thread(block)

    with OUTSIDE, pytest.raises(art.RealIOError, match=r"blocked at .*test_threads.py") as caught:
        art.run(main)
    assert "threading.Lock()" in str(caught.value)


def test_an_interrupt_raised_in_an_op_leaves_the_loop() -> None:
    async def main() -> None:
        def leave() -> None:
            threading.Event().wait(1)
            raise SystemExit(3)

        await asyncio.to_thread(leave)

    with pytest.raises(SystemExit):
        art.run(main)


@pytest.mark.parametrize("has_waited", [False, True])
def test_a_program_may_catch_what_would_end_it(has_waited: bool) -> None:
    async def main() -> object:
        def leave() -> None:
            if has_waited:
                threading.Event().wait(1)
            raise SystemExit(3)

        try:
            await asyncio.to_thread(leave)
        except SystemExit as error:
            return error.code
        return None

    assert art.run(main) == 3


# --- schedules --------------------------------------------------------------------------------


def test_a_schedule_runs_alike_with_threads_and_without() -> None:
    """The op waits in some schedules only, and the bug shows where it does not."""

    async def main() -> None:
        event, seen = threading.Event(), list[bool]()

        def look() -> None:
            seen.append(event.is_set())
            event.wait()

        op = asyncio.ensure_future(asyncio.to_thread(look))
        for _ in range(4):
            await asyncio.sleep(0.1)
        event.set()
        await op
        assert seen == [False]

    failure = art.explore(main, schedules=300).failure
    assert failure is not None
    for _ in range(2):
        with pytest.raises(AssertionError):
            art.replay(main, failure.token)


def test_every_seed_gives_the_same_run_twice() -> None:
    async def main() -> list[Any]:
        order: list[Any] = []
        gate = threading.Semaphore(0)

        def work(i: int) -> None:
            gate.acquire()
            order.append((i, threading.current_thread().name, time.monotonic()))
            gate.release()

        ops = [asyncio.ensure_future(asyncio.to_thread(work, i)) for i in range(4)]
        await asyncio.sleep(0.1)
        gate.release()
        await asyncio.gather(*ops)
        return order

    runs = [[art.run(main, seed=seed) for seed in range(40)] for _ in range(2)]

    assert runs[0] == runs[1]
    assert len({tuple(i for i, *_ in order) for order in runs[0]}) > 5


def test_faults_strike_device_programs() -> None:
    async def main() -> None:
        def train() -> None:
            context = ar.get_replica_context()
            assert context is not None
            context.blocking.barrier()

        async with ar.MirroredStrategy(PAIR) as strategy:
            await strategy.run(train)

    hung = art.explore(main, faults=art.Faults().hang_op("cpu:1"), schedules=50).failure
    assert hung is not None
    assert isinstance(hung.error, art.DeadlockError)
    waits = {wait.who: wait for wait in hung.error.waits}
    assert waits["replica 0"].missing == ("replica 1",)
    assert waits["replica 0"].awaits.startswith("blocking barrier #1")

    failed = art.explore(main, faults=art.Faults().fail_op(fn="train"), schedules=50).failure
    assert failed is not None
    assert "train" in str(failed.error)


# --- what is waited for inside the library ----------------------------------------------------


def stuck_at(main: Callable[[], Any]) -> dict[str, art.Wait]:
    with pytest.raises(art.DeadlockError) as caught:
        art.run(main)
    return {wait.who: wait for wait in caught.value.waits}


def test_a_device_that_waits_for_input_is_described() -> None:
    async def main() -> None:
        async def never() -> Any:
            yield 1
            await asyncio.Event().wait()

        def train(context: object, number: int) -> None: ...

        async with ar.MirroredStrategy(PAIR) as strategy:
            await strategy.run_steps(train, never(), 5)

    waits = stuck_at(main)

    for replica in ("replica 0", "replica 1"):
        assert waits[replica].awaits.startswith("the infeed")


def test_a_device_that_waits_for_the_host_is_described() -> None:
    async def main() -> None:
        async def ask() -> None:
            await asyncio.Event().wait()

        def train() -> None:
            ar.outside_compilation(ask)

        async with ar.MirroredStrategy(["cpu:0"]) as strategy:
            await strategy.run(train)

    waits = stuck_at(main)

    assert waits["replica 0"].awaits.startswith("outside ")
    [host] = [wait for who, wait in waits.items() if who.endswith(" of replica 0")]
    assert host.awaits == "asyncio.Event"


def test_a_blocking_collective_in_an_op_names_who_is_missing() -> None:
    async def main() -> None:
        def meet() -> None:
            context = ar.get_replica_context()
            assert context is not None
            context.blocking.barrier()

        async def train() -> None:
            context = ar.get_replica_context()
            assert context is not None
            if context.replica_id_in_sync_group == 0:
                await context.run_on_device(meet)
            await asyncio.Event().wait()

        async with ar.MirroredStrategy(PAIR) as strategy:
            await strategy.run(train)

    waits = stuck_at(main)

    [op] = [wait for who, wait in waits.items() if who.startswith("op ")]
    assert op.awaits.startswith("blocking barrier")
    assert op.missing == ("replica 1",)


def test_a_reentrant_lock_that_a_program_made_serves_after_it() -> None:
    async def program() -> Any:
        return threading.RLock()

    lock = art.run(program)
    entered: list[bool] = []

    def enter_twice() -> None:
        with lock:
            entered.append(lock.acquire(timeout=0))
            lock.release()

    for _ in range(2):
        thread = threading.Thread(target=enter_twice)
        thread.start()
        thread.join(10)

    assert entered == [True, True]


def test_a_reentrant_lock_is_released_by_whoever_holds_it() -> None:
    """As a real one; who does not is refused, and the lock stays where it is."""

    async def program() -> None:
        order: list[str] = []
        lock, held = threading.RLock(), threading.Event()

        def hold() -> None:
            with lock:
                held.set()
                let_go.wait()
                order.append("held to the end")

        def meddle() -> None:
            held.wait()
            with pytest.raises(RuntimeError, match="cannot release un-acquired lock"):
                lock.release()
            order.append("refused")
            let_go.set()

        let_go = threading.Event()
        with pytest.raises(RuntimeError, match="cannot release un-acquired lock"):
            lock.release()
        await asyncio.gather(asyncio.to_thread(hold), asyncio.to_thread(meddle))
        assert order == ["refused", "held to the end"]
        assert lock.acquire(blocking=False)
        lock.release()

    art.explore(program, schedules=20).check()
