"""The simulated loop: virtual time, documented orders, pools with latency, nothing real."""

import _thread
import asyncio
import gc
import importlib
import multiprocessing
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
import pytest

import aioreplica.testing as art
from aioreplica.errors import ContextError

VARIABLE: ContextVar[str] = ContextVar("variable", default="unset")


def virtual_sleep() -> Callable[[float], None]:
    """Return what stands for the blocking sleep inside a run."""
    return vars(time)["sleep"]


# --- time -------------------------------------------------------------------------------------


def test_time_is_virtual_and_exact() -> None:
    async def main() -> list[float]:
        loop, start = asyncio.get_running_loop(), time.monotonic()
        await asyncio.sleep(3600)
        return [loop.time() - start, time.monotonic() - start]

    assert art.run(main) == [3600.0, 3600.0]


def test_blocking_sleep_moves_time_for_everybody() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        asyncio.get_running_loop().call_later(1, order.append, "timer")
        virtual_sleep()(2)
        order.append("main")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return order

    assert art.run(main) == ["main", "timer"]


def test_a_program_may_spin_until_a_time() -> None:
    async def main() -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + 3
        while loop.time() < end:
            await asyncio.sleep(0)
        return True

    assert art.run(main)


def test_everything_is_real_again_afterwards() -> None:
    names = ("time", "monotonic", "perf_counter", "sleep")
    before = [getattr(time, name) for name in names]
    random.seed(5)
    expected = random.Random(5).random()

    art.explore(sleeper, schedules=5)

    assert [getattr(time, name) for name in names] == before
    assert random.random() == expected
    assert asyncio.Task.__name__ == "Task"
    assert len({os.urandom(8) for _ in range(3)}) == 3


async def sleeper() -> None:
    random.random()
    await asyncio.sleep(1)


# --- randomness -------------------------------------------------------------------------------


def test_randomness_is_the_same_in_every_run() -> None:
    async def main() -> tuple[float, str, bytes]:
        return random.random(), str(uuid.uuid4()), os.urandom(4)

    assert art.run(main) == art.run(main)
    assert art.run(main, seed=1) != art.run(main, seed=2)


def test_sets_of_tasks_are_walked_in_order() -> None:
    async def main() -> list[str]:
        tasks = [asyncio.create_task(asyncio.sleep(0), name=f"t{i}") for i in range(12)]
        done, _ = await asyncio.wait(set(tasks))
        return [task.get_name() for task in done]

    assert art.run(main) == [f"t{i}" for i in range(12)]


@pytest.mark.parametrize("fidelity", ["reorder", "asyncio"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_task_that_has_ended_is_kept_by_nobody(fails: bool, fidelity: str) -> None:
    class Held:
        """Something that a task refers to."""

    async def hold(held: Held) -> None:
        await asyncio.sleep(0)
        if fails:
            raise ValueError(held)

    async def main() -> None:
        held = Held()
        kept = weakref.ref(held)
        task = asyncio.create_task(hold(held))
        ended = weakref.ref(task)
        await asyncio.wait([task])
        if fails:
            task.exception().with_traceback(None)  # type: ignore[union-attr]
        del held, task
        for _ in range(2):  # others end meanwhile
            await asyncio.create_task(asyncio.sleep(0))
        assert kept() is None
        assert ended() is None

    art.explore(main, schedules=20, fidelity=fidelity).check()


# --- contexts ---------------------------------------------------------------------------------


def test_the_callers_context_is_seen_and_kept() -> None:
    async def main() -> str:
        seen = VARIABLE.get()
        VARIABLE.set("changed")
        return seen

    token = VARIABLE.set("outer")
    try:
        assert [art.run(main), art.run(main), VARIABLE.get()] == ["outer"] * 3
    finally:
        VARIABLE.reset(token)


# --- pools ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["to_thread", "executor", "anyio", "submit"])
def test_a_call_is_seen_in_flight(how: str) -> None:
    async def main() -> None:
        log: list[str] = []
        loop = asyncio.get_running_loop()
        pool = ThreadPoolExecutor(1)

        async def call() -> None:
            if how == "to_thread":
                await asyncio.to_thread(log.append, "op")
            elif how == "executor":
                await loop.run_in_executor(pool, log.append, "op")
            elif how == "anyio":
                await anyio.to_thread.run_sync(log.append, "op")
            else:
                await asyncio.wrap_future(pool.submit(log.append, "op"))

        async def other() -> None:
            for _ in range(3):
                await asyncio.sleep(0)
                log.append("other")

        await asyncio.gather(call(), other())
        pool.shutdown()
        assert log.index("op") != 1, "a step before, a step after"

    assert art.explore(main, schedules=300).failed


def test_a_call_takes_virtual_time() -> None:
    async def main() -> float:
        start = time.monotonic()
        await asyncio.to_thread(partial(virtual_sleep(), 0.5))
        return time.monotonic() - start

    assert 0.5 < art.run(main) < 1.0


def test_a_timeout_beats_a_call_that_sleeps_longer() -> None:
    async def main() -> str:
        try:
            await asyncio.wait_for(asyncio.to_thread(virtual_sleep(), 5), 1)
        except TimeoutError:
            return "timeout"
        return "done"

    assert art.run(main) == "timeout"


def test_no_more_calls_are_in_flight_than_workers() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        out: list[int] = []
        with ThreadPoolExecutor(2) as pool:
            await asyncio.gather(*[loop.run_in_executor(pool, out.append, i) for i in range(4)])
        assert out[0] in {0, 1}
        assert out.index(3) > 1

    art.explore(main, schedules=300).check()


def test_leaving_a_pool_waits_for_its_calls() -> None:
    async def main() -> list[int]:
        out: list[int] = []
        with ThreadPoolExecutor(1) as pool:
            pool.submit(out.append, 1)
            assert pool.submit(int, "7").result() == 7
            asyncio.get_running_loop().run_in_executor(pool, out.append, 2)
        return out

    assert art.run(main) == [1, 2]


def test_a_call_does_not_see_the_loop_or_the_context() -> None:
    def look() -> tuple[str, bool]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return VARIABLE.get(), False
        return VARIABLE.get(), True

    async def main() -> list[Any]:
        VARIABLE.set("mine")
        loop = asyncio.get_running_loop()
        return [await loop.run_in_executor(None, look), await asyncio.to_thread(look)]

    assert art.run(main) == [("unset", False), ("mine", False)]


# --- what is real is refused ------------------------------------------------------------------


def start_thread() -> None:
    _thread.start_new_thread(print, ())


def connect_to_the_world() -> None:
    socket.create_connection(("example.org", 80))


def block_the_loop() -> None:
    socket.create_connection(("127.0.0.1", 80))


def start_process() -> None:
    subprocess.Popen(["true"])


def start_shell() -> None:
    os.system("true")


def spawn_process() -> None:
    os.posix_spawn("/bin/true", ["true"], {})


def spawn_python() -> None:
    multiprocessing.get_context("spawn").Process(target=print).start()


def watch_descriptor() -> None:
    asyncio.get_running_loop().add_reader(0, print)


@pytest.mark.parametrize(
    "reach_out",
    [
        start_thread, connect_to_the_world, block_the_loop, start_process, start_shell,
        spawn_process, spawn_python, watch_descriptor,
    ],
)  # fmt: skip
def test_real_io_raises_with_its_call_site(reach_out: Any) -> None:
    async def main() -> None:
        reach_out()

    with pytest.raises(art.RealIOError, match=r"test_simulation\.py") as caught:
        art.run(main)

    line = reach_out.__code__.co_firstlineno + 1
    assert caught.value.site.endswith(f"test_simulation.py:{line}")


# --- locks of threads -------------------------------------------------------------------------


async def holds_a_thread_lock_across_an_await() -> None:
    lock = threading.Lock()

    async def work(delay: int) -> None:
        for _ in range(delay):
            await asyncio.sleep(0)
        with lock:
            await asyncio.sleep(0)

    await asyncio.gather(work(0), work(4))


def test_a_thread_lock_that_blocks_for_ever_is_an_error() -> None:
    failure = art.explore(holds_a_thread_lock_across_an_await).failure

    assert failure is not None
    assert isinstance(failure.error, art.RealIOError)
    assert "blocked on a lock" in str(failure.error)
    assert len(failure.constraints) == 1


def test_thread_locks_that_do_not_block_work() -> None:
    async def main() -> float:
        lock, count = threading.Lock(), 0

        def add() -> None:
            nonlocal count
            with lock:
                count += 1

        await asyncio.gather(*[asyncio.to_thread(add) for _ in range(3)])
        assert lock.acquire()
        assert lock.locked()
        assert not lock.acquire(blocking=False)
        before = time.monotonic()
        assert not lock.acquire(timeout=3)
        lock.release()
        assert count == 3
        return time.monotonic() - before

    real = threading.Lock
    assert art.run(main) == 3
    assert threading.Lock is real


def test_all_randomness_is_seeded() -> None:
    async def main() -> list[object]:
        return [
            secrets.token_hex(),
            random.SystemRandom().random(),
            random.Random().random(),
            np.random.default_rng().random(),
            str(uuid.uuid4()),
        ]

    state = random.getstate()
    assert art.run(main) == art.run(main)
    assert art.run(main) != art.run(main, seed=1)
    assert random.getstate() == state
    assert random.Random().random() != random.Random().random()


def test_work_done_by_an_import_belongs_to_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "imported_by_a_run"
    (tmp_path / f"{module}.py").write_text("import random\nrandom.random()\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    async def main() -> None:
        importlib.import_module(module)
        for _ in range(random.randrange(100)):
            await asyncio.sleep(0)

    for call in (art.explore, art.exhaustive, art.cancel_everywhere):
        monkeypatch.delitem(sys.modules, module, raising=False)
        call(main).check()


def test_an_interrupted_run_leaves_no_task_behind(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    async def other() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("other")

    async def main() -> None:
        task = asyncio.create_task(other())
        await asyncio.sleep(1)
        assert not task.done()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        art.run(main)

    gc.collect()
    assert ended == ["other"]
    assert not caplog.records


def test_other_threads_are_left_alone() -> None:
    seen: list[float] = []

    async def main() -> None:
        await asyncio.sleep(1e6)

    thread = threading.Thread(target=lambda: seen.append(time.monotonic()))
    art.run(main)
    thread.start()
    thread.join()

    assert abs(seen[0] - time.monotonic()) < 1000


# --- fidelity, and several explorations -------------------------------------------------------


async def relies_on_call_soon() -> None:
    out: list[int] = []
    loop = asyncio.get_running_loop()
    loop.call_soon(out.append, 1)
    loop.call_soon(out.append, 2)
    await asyncio.sleep(1)
    assert out == [1, 2]


def test_adversarial_keeps_no_order() -> None:
    art.explore(relies_on_call_soon, schedules=200).check()

    assert art.explore(relies_on_call_soon, schedules=200, fidelity="adversarial").failed


def test_an_interrupted_exploration_puts_everything_back() -> None:
    async def main() -> None:
        raise KeyboardInterrupt

    before = time.monotonic, asyncio.Task, random.getstate()
    with pytest.raises(KeyboardInterrupt):
        art.explore(main)

    assert (time.monotonic, asyncio.Task, random.getstate()) == before


def test_threads_explore_one_after_the_other() -> None:
    reports: list[art.Report] = []
    threads = [
        threading.Thread(target=lambda: reports.append(art.explore(sleeper, schedules=30)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [report.failed for report in reports] == [False] * 3


# --- bad input --------------------------------------------------------------------------------


async def takes_arguments(number: int) -> None: ...


def plain() -> None: ...


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (takes_arguments, "cannot be called without arguments"),
        (plain, "is not an async function"),
        (7, "pass an async function"),
        (lambda: 7, "nothing to await"),
    ],
)
@pytest.mark.parametrize("call", [art.run, art.explore, art.exhaustive, art.cancel_everywhere])
def test_an_argument_that_is_not_a_program_is_refused(call: Any, program: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        check(call(program))


def check(result: Any) -> None:
    """Raise what a report holds: whether a function is async may show only when it is called."""
    result.check()


def test_a_coroutine_is_refused() -> None:
    with pytest.raises(TypeError, match="Pass the function itself"):
        art.explore(sleeper())  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_a_running_loop_is_refused() -> None:
    with pytest.raises(ContextError, match="inside a running event loop"):
        art.explore(sleeper)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"schedules": 0}, "at least 1, got 0"),
        ({"strategy": "exhaustive"}, r"Call art\.exhaustive"),
        ({"strategy": "best"}, "Unknown strategy 'best'"),
        ({"fidelity": "high"}, "Unknown fidelity 'high'"),
    ],
)
def test_wrong_options_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        art.explore(sleeper, **arguments)
