"""Runs in which replicas wait and nothing happens: warned of once, never ended, at no cost."""

import asyncio
import selectors
import threading
import warnings
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.cluster import LocalClosureEngine
from aioreplica.errors import StallError
from aioreplica.testing._devices import SimLaneTable
from tests.conftest import mirrored

from .workers import on_workers


class _Selector(selectors.SelectSelector):
    """Never waits for a timer: it counts the seconds instead."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(None if timeout is None else 0.0)
        if not found and timeout:
            self.skipped_s += timeout
        return found


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer where a real one would wait."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)
        self.told: list[warnings.WarningMessage] = []

    def time(self) -> float:
        return self._clock.skipped_s

    def block_for_a_minute(self) -> None:
        self._clock.skipped_s += 60


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[list[str], float]:
    """Run a program on such a loop; return the warnings, and how long it took."""
    with (
        warnings.catch_warnings(record=True, action="always") as caught,
        asyncio.Runner(loop_factory=SkippingLoop) as runner,
    ):
        loop = runner.get_loop()
        assert isinstance(loop, SkippingLoop)
        loop.told = caught
        runner.run(main())
        return [str(each.message) for each in caught], loop.time()


def num_timers() -> int:
    loop: Any = asyncio.get_running_loop()
    return len([timer for timer in loop._scheduled if not timer.cancelled()])


def replica() -> ar.ReplicaContext:
    context = ar.get_replica_context()
    assert context is not None
    return context


async def after(delay_s: float, fn: Callable[[], object]) -> None:
    """Do something at a time of the loop's clock."""
    asyncio.get_running_loop().call_later(delay_s, fn)


def test_a_barrier_under_a_lock_is_warned_of_once_with_the_table_and_not_ended() -> None:
    async def main() -> None:
        lock, opened = asyncio.Lock(), asyncio.Event()

        async def step() -> int:
            if replica().replica_id_in_sync_group:
                async with lock:
                    await replica().barrier()
                return 1
            await opened.wait()  # a lock that replica 1 holds, and then lets go after all
            await replica().barrier()
            return 0

        await after(100, opened.set)
        async with mirrored(2) as strategy:
            assert strategy.local_results(await strategy.run(step)) == (0, 1)

    told, took_s = run(main)

    [text] = told
    assert took_s == 100
    assert text.startswith("Step 0 of ")
    assert "may wait for ever: for 10 s" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "cpu:0", "running", "before", "any", "-"] in rows
    assert ["1", "cpu:1", "waiting", "barrier", "#1"] in [row[:5] for row in rows]
    assert "stall_timeout" in text


@pytest.mark.parametrize("is_merging", [False, True])
def test_the_warning_names_the_replica_that_holds_up_the_others(is_merging: bool) -> None:
    async def main() -> None:
        async def merge(_strategy: Any) -> None:
            await asyncio.sleep(100)

        async def step() -> None:
            if not is_merging and replica().replica_id_in_sync_group:
                await asyncio.sleep(100)
            await (replica().merge_call(merge) if is_merging else replica().barrier())

        async with mirrored(2) as strategy:
            await strategy.run(step)

    [text] = run(main)[0]

    assert ("The merge function holds up" in text) == is_merging
    assert ("no other replica came" in text) == (not is_merging)


@pytest.mark.parametrize("is_circle", [False, True])
def test_a_receive_is_warned_of_like_a_collective(is_circle: bool) -> None:
    """In child tasks nothing is known of what their replicas do meanwhile."""

    async def main() -> None:
        async def step() -> None:
            own = replica().replica_id_in_sync_group
            if is_circle:
                await asyncio.gather(replica().receive(from_=1 - own))
            elif own == 0:
                await replica().receive(from_=1)
            else:
                await asyncio.sleep(100)
                await replica().send("late", to=0)

        async with mirrored(2) as strategy:
            try:
                await strategy.run(step, options=ar.RunOptions(stall_timeout=200.0))
            except StallError:
                assert is_circle

    [text] = run(main)[0]

    assert "may wait for ever: for 10 s" in text
    assert "receive #1 from replica 1" in text


def test_a_blocked_loop_does_not_warn() -> None:
    """What the replica waits for has come meanwhile; the loop has not got to it."""

    async def main() -> None:
        async def step() -> None:
            if replica().replica_id_in_sync_group:
                await asyncio.sleep(6)
            await replica().barrier()

        loop = asyncio.get_running_loop()
        assert isinstance(loop, SkippingLoop)
        await after(4, loop.block_for_a_minute)
        async with mirrored(2) as strategy:
            await strategy.run(step)
        assert loop.time() > 60

    assert run(main)[0] == []


def test_closures_of_a_coordinator_are_not_looked_at() -> None:
    """They are under way beside the runs of replicas, and meet in no collective."""
    errors: list[Any] = []

    async def closure() -> int:
        await asyncio.sleep(100)
        return 1

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, each: errors.append(each))
        async with (
            ar.ParameterServerStrategy(LocalClosureEngine(1)) as strategy,
            ar.ClusterCoordinator(strategy) as coordinator,
        ):
            assert await (await coordinator.schedule(closure)).fetch() == 1

    told, took_s = run(main)

    assert (told, errors) == ([], [])
    assert took_s >= 100


def test_each_wait_is_warned_of_once_and_only_those_that_last() -> None:
    async def main() -> None:
        async def step() -> None:
            for delay_s in (9.0, 30.0, 9.0, 30.0):
                if replica().replica_id_in_sync_group:
                    await asyncio.sleep(delay_s)
                await replica().barrier()

        async with mirrored(2) as strategy:
            await strategy.run(step)

    told, _ = run(main)

    assert ["barrier #2" in text or "barrier #4" in text for text in told] == [True, True]


def test_a_running_or_queued_op_does_not_warn() -> None:
    async def main() -> None:
        gate, ready = threading.Event(), threading.Event()

        async def step() -> None:
            context = replica()
            if context.replica_id_in_sync_group:
                await asyncio.gather(
                    context.run_on_device(gate.wait), context.run_on_device(ready.is_set)
                )
            await context.barrier()

        await after(100, gate.set)
        async with mirrored(2) as strategy:
            await strategy.run(step)

    assert run(main)[0] == []


def test_plain_functions_do_not_warn_while_one_of_them_runs() -> None:
    async def main() -> None:
        gate = threading.Event()

        def step() -> None:
            if replica().replica_id_in_sync_group:
                gate.wait()
            replica().blocking.barrier()

        await after(100, gate.set)
        async with mirrored(2) as strategy:
            await strategy.run(step)

    assert run(main)[0] == []


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize("is_at_work", [False, True])
def test_a_merge_function_that_waits_is_warned_of_unless_something_runs(
    is_blocking: bool, is_at_work: bool
) -> None:
    async def main() -> None:
        loop, gate, started = asyncio.get_running_loop(), threading.Event(), asyncio.Event()
        assert isinstance(loop, SkippingLoop)

        def work() -> None:
            loop.call_soon_threadsafe(started.set)
            gate.wait()

        async def merge(_strategy: Any) -> None:
            if is_at_work:
                await asyncio.sleep(100)
            while not (is_at_work or loop.told):
                await asyncio.sleep(1)

        async def step() -> None:
            await replica().merge_call(merge)

        def plain_step() -> None:
            replica().blocking.merge_call(merge)

        working = asyncio.ensure_future(ar.run_on_host(work))
        await started.wait()
        if not is_at_work:
            gate.set()
            await working
        async with mirrored(2) as strategy:
            await strategy.run(plain_step if is_blocking else step)
        gate.set()
        await working

    told = run(main)[0]

    assert [text.count("merging") for text in told] == ([] if is_at_work else [2])


def test_a_run_in_a_merge_function_does_not_warn_of_the_outer_one() -> None:
    async def main() -> None:
        async def inner() -> None:
            await asyncio.sleep(100)

        async def merge(strategy: ar.Strategy) -> None:
            await strategy.run(inner)

        async def step() -> None:
            await replica().merge_call(merge)

        async with mirrored(2) as strategy:
            await strategy.run(step)

    assert run(main)[0] == []


def test_replicas_that_wait_for_something_else_are_not_looked_at() -> None:
    async def main() -> None:
        async def step() -> None:
            await asyncio.sleep(100)

        async with mirrored(2) as strategy:
            await strategy.run(step)

    assert run(main)[0] == []


def test_workers_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are ops of lanes: simulated ones, so that the clock does not jump over them."""

    async def main() -> None:
        async def step() -> float:
            return float(await replica().all_reduce("sum", 1.0))

        async def program(strategy: ar.MultiWorkerMirroredStrategy) -> None:
            await strategy.run(step)
            await asyncio.sleep(60.0 if strategy._runtime.workers.rank else 0.0)
            assert strategy.local_results(await strategy.run(step)) == (3.0,)

        await on_workers(3, 1, program)

    monkeypatch.setattr(SimLaneTable, "is_simulated", False)
    with pytest.warns(RuntimeWarning, match=r"Missing so far: workers 1, 2\.") as caught:
        art.run(main)
    assert len(caught) == 1


def test_workers_that_are_missing_in_a_group_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async def step(rank: int) -> None:
            ctx = replica()
            if rank:
                await asyncio.sleep(60.0 * (rank - 1))
                await ctx.group(range(1, 3)).barrier()

        async def program(strategy: ar.MultiWorkerMirroredStrategy) -> None:
            await strategy.run(step, (strategy._runtime.workers.rank,))

        await on_workers(3, 1, program)

    monkeypatch.setattr(SimLaneTable, "is_simulated", False)
    with pytest.warns(RuntimeWarning, match=r"Missing so far: worker 2\.") as caught:
        art.run(main)
    assert len(caught) == 1


def test_one_timer_serves_all_runs_and_none_is_left_behind() -> None:
    async def main() -> None:
        async def step() -> None:
            await replica().barrier()

        async with mirrored(2) as strategy:
            await asyncio.gather(*(strategy.run(step) for _ in range(20)))
            counts = [num_timers()]
            for _ in range(20):
                await strategy.run(step)
            counts.append(num_timers())
            await asyncio.sleep(100)  # and without runs there is none
            counts.append(num_timers())
            await strategy.run(step)
            counts.append(num_timers())
        counts.append(num_timers())
        await ar.get_strategy().run(step)
        assert [*counts, num_timers()] == [1, 1, 0, 1, 0, 0]

    assert run(main)[0] == []


def test_the_timer_keeps_no_context_of_a_caller() -> None:
    async def main() -> None:
        async def step() -> None:
            await replica().barrier()

        async with mirrored(2) as strategy:
            ContextVar[int]("of a request").set(1)
            await strategy.run(step)
            loop: Any = asyncio.get_running_loop()
            assert [list(timer._context) for timer in loop._scheduled] == [[]]

    run(main)


def test_the_kit_has_no_such_timer() -> None:
    """Its clock jumps too, and a schedule is one of the program's own events."""

    async def main() -> None:
        async def step() -> None:
            if replica().replica_id_in_sync_group:
                await asyncio.sleep(100)
            await replica().barrier()

        async with mirrored(2) as strategy:
            await strategy.run(step)
            assert asyncio.get_running_loop().time() >= 100

    art.explore(main, schedules=5).check()  # a warning would be an error
