"""Threads that programs and libraries start themselves, and the event loops in them."""

import asyncio
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

import aioreplica.testing as art


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that has imported names before the run."""
    module = ModuleType("imported_before")
    code = "from queue import SimpleQueue\nfrom threading import Lock\nfrom time import monotonic\n"
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


async def worker_thread() -> None:
    """What aiosqlite and its like do: a thread that serves calls from a queue."""
    calls: Any = queue.SimpleQueue()

    def serve() -> None:
        while (call := calls.get()) is not None:
            future, value = call
            future.get_loop().call_soon_threadsafe(future.set_result, value * 2)

    async def ask(value: int) -> int:
        future = asyncio.get_running_loop().create_future()
        calls.put((future, value))
        return int(await future)

    thread = threading.Thread(target=serve, name="worker")
    thread.start()
    assert thread.is_alive()
    assert sorted(await asyncio.gather(ask(1), ask(2), ask(3))) == [2, 4, 6]
    calls.put(None)
    await asyncio.to_thread(thread.join)
    assert not thread.is_alive()


async def loops_in_threads() -> None:
    async def inner(value: int) -> int:
        await asyncio.sleep(0.1)
        return await asyncio.to_thread(int, value)

    def run(value: int) -> int:
        return asyncio.run(inner(value))

    results = await asyncio.gather(*[asyncio.to_thread(run, value) for value in (1, 2)])
    assert results == [1, 2]


async def back_from_threads() -> None:
    async def plus_one(value: int) -> int:
        await anyio.sleep(0.1)
        return value + 1

    def work(value: int) -> int:
        return anyio.from_thread.run_sync(lambda: anyio.from_thread and value) + (
            anyio.from_thread.run(plus_one, value)
        )

    results: list[int] = []

    async def collect(value: int) -> None:
        results.append(await anyio.to_thread.run_sync(work, value))

    async with anyio.create_task_group() as group:
        for value in range(3):
            group.start_soon(collect, value)
    assert sorted(results) == [1, 3, 5]


async def portals() -> None:
    async def plus_one(value: int) -> int:
        await anyio.sleep(0.1)
        return value + 1

    def use(value: int) -> int:
        with anyio.from_thread.start_blocking_portal() as portal:
            return portal.call(plus_one, value)

    assert await asyncio.gather(*[asyncio.to_thread(use, value) for value in (1, 2)]) == [2, 3]
    assert use(3) == 4  # blocks the loop, as it would a real one
    async with anyio.from_thread.BlockingPortal() as portal:
        assert await asyncio.to_thread(portal.call, plus_one, 4) == 5


async def network_between_loops() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()
        await writer.wait_closed()

    async def client() -> bytes:
        reader, writer = await asyncio.open_connection("localhost", 8000)
        writer.write(b"hello\n")
        line = await reader.readline()
        writer.close()
        await writer.wait_closed()
        return line

    async with await asyncio.start_server(echo, "127.0.0.1", 8000):
        assert await asyncio.to_thread(lambda: asyncio.run(client())) == b"hello\n"


@pytest.mark.parametrize(
    "program",
    [worker_thread, loops_in_threads, back_from_threads, portals, network_between_loops],
)
@pytest.mark.parametrize("fidelity", ["asyncio", "reorder"])
def test_a_correct_program_passes_every_schedule(program: Any, fidelity: str) -> None:
    art.explore(program, schedules=40, fidelity=fidelity).check()


def run_in_new_loop(program: Callable[[], Coroutine[Any, Any, float]]) -> float:
    return asyncio.run(program())


def test_a_blocking_sleep_in_the_loop_of_a_thread_takes_its_time() -> None:
    async def inner() -> float:
        start = time.monotonic()
        vars(time)["sleep"](1)
        await asyncio.sleep(0.5)
        return time.monotonic() - start

    async def main() -> None:
        loop = asyncio.get_running_loop()
        call = asyncio.create_task(asyncio.to_thread(run_in_new_loop, inner))
        while not call.done():
            await asyncio.sleep(0.1)
            assert time.monotonic() == loop.time(), "the clock of others runs ahead"
        assert 1.499 <= await call <= 2.6

    art.explore(main, schedules=50).check()


def test_no_thread_is_left() -> None:
    before = threading.enumerate()

    for program in (worker_thread, loops_in_threads, portals):
        art.run(program)

    assert threading.enumerate() == before


def test_a_race_of_threads_is_found_and_replayed() -> None:
    async def main() -> None:
        count = 0

        def add() -> None:
            nonlocal count
            seen = count
            vars(time)["sleep"](0)
            threading.Event().wait(0.001)
            count = seen + 1

        threads = [threading.Thread(target=add) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert count == 2

    failure = art.explore(main, schedules=100).failure

    assert failure is not None
    with pytest.raises(AssertionError):
        art.replay(main, failure.token)


def test_names_that_were_imported_before_are_simulated(imported: Any) -> None:
    real = dict(vars(imported))

    async def main() -> float:
        values = imported.SimpleQueue()
        lock = imported.Lock()
        start = imported.monotonic()

        def put() -> None:
            threading.Event().wait(5)
            with lock:
                values.put("late")

        op = asyncio.ensure_future(asyncio.to_thread(put))
        assert await asyncio.to_thread(values.get) == "late"
        await op
        return float(imported.monotonic() - start)

    assert 5 <= art.run(main) < 6
    assert vars(imported) == real


def test_a_thread_has_its_name_and_its_error_is_reported() -> None:
    names: list[str] = []

    async def main() -> None:
        def fail() -> None:
            names.append(threading.current_thread().name)
            raise KeyError("lost")

        thread = threading.Thread(target=fail, name="mine")
        thread.start()
        await asyncio.to_thread(thread.join)

    with pytest.raises(art.LeakError, match=r"exception in thread 'mine': KeyError\('lost'\)"):
        art.run(main)
    assert set(names) == {"mine"}


@pytest.mark.parametrize("daemon", [False, True])
def test_a_thread_that_waits_for_ever_has_leaked_unless_it_is_a_daemon(daemon: bool) -> None:
    async def main() -> None:
        threading.Thread(target=threading.Event().wait, name="idle", daemon=daemon).start()
        await asyncio.sleep(1)

    if daemon:
        art.explore(main, schedules=20).check()
    else:
        with pytest.raises(art.LeakError, match="thread 'idle'"):
            art.run(main)


def test_a_deadlock_of_started_threads_names_them() -> None:
    async def main() -> None:
        thread = threading.Thread(target=threading.Event().wait, name="stuck")
        thread.start()
        await asyncio.to_thread(thread.join)

    with pytest.raises(art.DeadlockError, match="thread 'stuck'"):
        art.run(main)


def test_a_process_is_refused_where_it_was_started() -> None:
    async def shell() -> None:
        await asyncio.create_subprocess_shell("true")

    async def blocking() -> None:
        await asyncio.to_thread(subprocess.run, ["true"])

    for main in (shell, blocking):
        with pytest.raises(art.RealIOError, match=r"process .*at .*test_started\.py:"):
            art.run(main)
