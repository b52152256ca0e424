"""A strategy's life: bound to one loop, closed once, dead after a fork, a clear word under trio."""

import asyncio
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.devices import lane_table
from aioreplica.errors import ContextError
from aioreplica.values import CAN_COUNT_REFERENCES
from tests.conftest import mirrored
from tests.sequencer import idle

BOUND = [lambda: ar.OneDeviceStrategy("cpu:0"), lambda: mirrored(2)]
no_task_left = pytest.mark.usefixtures("no_task_left")


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


async def add_one(x: int) -> int:
    await me().run_on_device(int)
    return x + await me().all_reduce("max", 1)


# ---- opening and closing ------------------------------------------------------------------------


@pytest.mark.asyncio
@no_task_left
async def test_used_lazily_without_async_with(strategy: ar.Strategy) -> None:
    assert strategy.statistics().state == "new"
    await strategy.run(add_one, (1,))
    bound = not isinstance(strategy, ar.DefaultStrategy)
    assert strategy.statistics().state == ("open" if bound else "new")


@pytest.mark.asyncio
@no_task_left
@pytest.mark.parametrize("make", BOUND)
async def test_async_with_opens_and_closes(make: Any) -> None:
    async with make() as strategy:
        assert strategy.statistics().state == "open"
        names = strategy._runtime.device_names
        await strategy.run(add_one, (1,))
        assert set(names) <= set(lane_table().statistics())

    assert strategy.statistics().state == "closed"
    assert "closed" in repr(strategy)
    assert not set(names) & set(lane_table().statistics())


@pytest.mark.asyncio
@no_task_left
@pytest.mark.parametrize("make", BOUND)
async def test_a_lane_lives_as_long_as_one_strategy_uses_it(make: Any) -> None:
    async with make() as first:
        await first.run(add_one, (1,))
        async with make() as second:
            await second.run(add_one, (1,))
        assert "cpu:0" in lane_table().statistics()
        await first.run(add_one, (1,))
    assert "cpu:0" not in lane_table().statistics()


@pytest.mark.asyncio
@no_task_left
@pytest.mark.skipif(not CAN_COUNT_REFERENCES, reason="no memory is kept without it")
async def test_a_closed_strategy_keeps_no_memory_of_reductions() -> None:
    strategy = mirrored(2)
    size = 20_000
    parts = ar.PerReplica([np.ones(size), np.ones(size)])
    buffer = await strategy.reduce("sum", parts)
    while isinstance(buffer.base, np.ndarray):
        buffer = buffer.base
    kept = weakref.ref(buffer)
    del buffer
    assert kept() is not None  # for the next reduction of that size

    await strategy.aclose()

    assert kept() is None


@pytest.mark.asyncio
@no_task_left
@pytest.mark.parametrize("make", BOUND)
async def test_after_aclose_it_is_refused(make: Any) -> None:
    strategy = make()
    await strategy.run(add_one, (1,))
    for _ in range(3):
        await strategy.aclose()

    values = ar.PerReplica([1] * strategy.num_replicas_in_sync)
    for call in (
        lambda: strategy.run(add_one, (1,)),
        lambda: strategy.reduce("sum", values),
        lambda: strategy.gather(values, 0),
    ):
        with pytest.raises(ContextError, match="closed"):
            await call()


@pytest.mark.asyncio
@no_task_left
@pytest.mark.parametrize("make", BOUND)
async def test_closed_before_its_first_use(make: Any) -> None:
    strategy = make()
    await strategy.aclose()

    with pytest.raises(ContextError, match="closed"):
        await strategy.run(add_one, (1,))


@pytest.mark.asyncio
@no_task_left
async def test_the_default_strategy_outlives_aclose() -> None:
    strategy = ar.DefaultStrategy()
    await strategy.aclose()
    assert await strategy.run(add_one, (1,)) == 2


@pytest.mark.asyncio
@no_task_left
async def test_aclose_inside_a_replica_is_refused(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        with pytest.raises(ContextError, match="replica"):
            await pair.aclose()

    await pair.run(step)
    assert pair.statistics().state == "open"


CLOSE_IN_MERGE = """
import asyncio
import aioreplica as ar
from aioreplica.errors import ContextError

async def merge(strategy):
    try:
        await strategy.aclose()
    except ContextError:
        return "refused"

async def step():
    return await ar.get_replica_context().merge_call(merge)

async def main():
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        assert (await strategy.run(step)).values == ("refused", "refused")

asyncio.run(main())
"""


@pytest.mark.slow
def test_aclose_inside_a_merge_function_is_refused() -> None:
    """It would wait for the run that it is part of, through every cancellation."""
    done = in_a_process(CLOSE_IN_MERGE)

    assert done.returncode == 0, done.stderr


def in_a_process(program: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a program that may hang or fork."""
    return subprocess.run(
        [sys.executable, "-c", program, *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Gate:
    """A device op that runs until it is let go."""

    def __init__(self) -> None:
        self.started, self.gate = threading.Event(), threading.Event()
        self.ended = False

    def __call__(self) -> None:
        self.started.set()
        assert self.gate.wait(10)
        self.ended = True


async def hold(gate: Gate) -> None:
    await (me().barrier() if me().replica_id_in_sync_group else me().run_on_device(gate))


@pytest.mark.asyncio
@no_task_left
async def test_aclose_ends_a_run_in_progress() -> None:
    strategy, gate = mirrored(2), Gate()
    run = asyncio.get_running_loop().create_task(strategy.run(hold, (gate,)))
    assert await ar.run_on_host(gate.started.wait, 10)
    closing = asyncio.get_running_loop().create_task(strategy.aclose())
    await idle()
    assert not closing.done()
    gate.gate.set()
    await closing

    with pytest.raises(ContextError, match="closed during step 0"):
        await run
    assert gate.ended
    assert strategy.statistics().num_active == 0


@pytest.mark.asyncio
@no_task_left
async def test_two_tasks_may_close_it_at_once() -> None:
    strategy, gate = mirrored(2), Gate()
    loop = asyncio.get_running_loop()
    run = loop.create_task(strategy.run(hold, (gate,)))
    assert await ar.run_on_host(gate.started.wait, 10)
    closing = [loop.create_task(strategy.aclose()) for _ in range(2)]
    await idle()
    gate.gate.set()
    await asyncio.wait([run])

    done, _ = await asyncio.wait(closing, timeout=10)
    assert len(done) == 2
    assert run.exception() is not None


@pytest.mark.asyncio
@no_task_left
async def test_while_it_closes_it_takes_no_new_run() -> None:
    strategy, gate = mirrored(2), Gate()
    loop = asyncio.get_running_loop()
    run = loop.create_task(strategy.run(hold, (gate,)))
    assert await ar.run_on_host(gate.started.wait, 10)
    closing = loop.create_task(strategy.aclose())
    await idle()
    try:
        with pytest.raises(ContextError, match="clos"):
            await strategy.run(idle)
    finally:
        gate.gate.set()
        await asyncio.wait([run, closing])


@pytest.mark.asyncio
@no_task_left
async def test_a_cancelled_aclose_still_waits_for_the_runs() -> None:
    strategy, gate = mirrored(2), Gate()
    loop = asyncio.get_running_loop()
    run = loop.create_task(strategy.run(hold, (gate,)))
    assert await ar.run_on_host(gate.started.wait, 10)
    closing = loop.create_task(strategy.aclose())
    await idle()
    closing.cancel()
    await idle()
    assert not closing.done()
    gate.gate.set()
    await asyncio.wait([run, closing])

    assert closing.cancelled(), "aclose swallowed its cancellation"
    assert strategy.statistics().state == "closed"


@pytest.mark.asyncio
@no_task_left
async def test_while_it_closes_a_source_it_is_not_opened_again() -> None:
    strategy, closes, may_end = mirrored(2), asyncio.Event(), asyncio.Event()

    class Source:
        async def __aiter__(self) -> AsyncIterator[Any]:
            try:
                yield np.ones(2)
            finally:
                closes.set()
                await may_end.wait()

    async def open_again() -> None:
        await closes.wait()
        try:
            with pytest.raises(ContextError, match="is being closed"):
                await strategy.__aenter__()
        finally:
            may_end.set()

    batches = aiter(strategy.distribute_dataset(Source()))
    await anext(batches)
    opening = asyncio.create_task(open_again())
    with pytest.warns(ResourceWarning, match="broken off"):
        await strategy.aclose()
    await opening

    async with strategy:
        await strategy.run(add_one, (1,))


# ---- loops --------------------------------------------------------------------------------------


def test_the_default_strategy_belongs_to_no_loop() -> None:
    strategy = ar.get_strategy()

    assert [asyncio.run(strategy.run(add_one, (i,))) for i in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("make", [*BOUND, ar.DefaultStrategy])
def test_without_an_event_loop_the_error_names_asyncio_run(make: Any) -> None:
    with pytest.raises(ContextError, match=r"asyncio\.run"):
        make().run(add_one, (1,)).send(None)


@pytest.mark.parametrize("make", [*BOUND, ar.DefaultStrategy])
def test_under_trio_the_error_names_trio(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("trio")
    fake.lowlevel = SimpleNamespace(in_trio_run=lambda: True)
    monkeypatch.setitem(sys.modules, "trio", fake)

    with pytest.raises(ContextError, match="trio"):
        make().run(add_one, (1,)).send(None)


def test_under_trio_the_default_context_names_trio(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("trio")
    monkeypatch.setitem(sys.modules, "trio", fake)
    fake.lowlevel = SimpleNamespace(in_trio_run=lambda: False)
    assert me().num_replicas_in_sync == 1

    fake.lowlevel = SimpleNamespace(in_trio_run=lambda: True)
    with pytest.raises(ContextError, match=r"default replica context needs .* but trio"):
        me()


# ---- forks --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_close_of_the_parent_does_not_hold_up_the_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy, table = ar.MirroredStrategy(["cpu:0"]), lane_table()
    with strategy._runtime.lifecycle.closing():
        with pytest.raises(ContextError, match="is being closed"):
            await strategy.__aenter__()
        monkeypatch.setattr(table, "generation", table.generation + 1)  # as in a child
        async with strategy:
            assert (await strategy.run(lambda: 1)).values == (1,)


@pytest.mark.asyncio
async def test_a_close_that_is_dropped_with_its_loop_abandons_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, workers = ar.MirroredStrategy(["cpu:0"])._runtime, mock.Mock()

    async def hang(_who: str) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(runtime, "workers", workers)
    monkeypatch.setattr(runtime.lifecycle, "open_loops", mock.Mock(aclose=hang))
    closing = runtime._let_go()
    closing.send(None)

    closing.close()

    assert [call[0] for call in workers.method_calls] == ["abandon"]


FORK = """
import asyncio, os, sys, traceback, warnings
warnings.simplefilter("ignore")
import aioreplica as ar

def step(): return 1

async def inside(strategy):
    await strategy.run(step)
    return os.fork()

def child(what):
    if what == "state":
        assert strategy.statistics().state == "closed", strategy.statistics()
    elif what == "aclose":
        asyncio.run(strategy.aclose())
    elif what == "run":
        try:
            asyncio.run(strategy.run(step))
        except RuntimeError as error:
            assert "fork" in str(error) or "clos" in str(error), error
        else:
            raise AssertionError("ran")
    elif what == "new":
        fresh = ar.MirroredStrategy(["cpu:0", "cpu:1"])
        assert asyncio.run(fresh.run(step)).values == (1, 1)

runner = asyncio.Runner()
for what in ("state", "aclose", "run", "new"):
    strategy = ar.MirroredStrategy(["cpu:0", "cpu:1"])
    if sys.argv[1] == "in the loop":
        pid = runner.run(inside(strategy))
    else:
        asyncio.run(strategy.run(step))
        pid = os.fork()
    if not pid:
        try:
            child(what)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1] != 0:
        sys.exit(f"{what} failed in the child")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("where", ["in the loop", "after the loop"])
def test_a_fork_closes_it_in_the_child(where: str) -> None:
    done = in_a_process(FORK, where)

    assert done.returncode == 0, done.stderr


FORK_LOOP = """
import asyncio, os, signal, sys, traceback, warnings
warnings.simplefilter("ignore")
import aioreplica as ar

strategy, ran = ar.MirroredStrategy(["cpu:0", "cpu:1"]), []

def step(ctx, x):
    if ar.get_replica_context().replica_id_in_sync_group == 0:
        ran.append(x)

async def child(numbers):
    async with strategy:
        return await strategy.run_steps(step, numbers, 3)

numbers = (number for number in range(5))
asyncio.run(strategy.run_steps(step, numbers, 2))
pid = os.fork()
if not pid:
    signal.alarm(20)
    try:
        result = asyncio.run(child(numbers))
        assert (result.steps_run, ran) == (3, [0, 1, 2, 3, 4]), (result, ran)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
sys.exit(os.waitpid(pid, 0)[1] != 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_loop_goes_on_with_its_iterator_in_the_child_of_a_fork() -> None:
    done = in_a_process(FORK_LOOP)

    assert done.returncode == 0, done.stderr
