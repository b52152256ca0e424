"""run_on_host and device_op: where ops run, and what they refuse."""

import asyncio
import contextvars
import functools
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

import aioreplica as ar
from aioreplica.devices import lane_table

LIMIT_S = 60

colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


@ar.device_op
def where() -> str:
    """Tell which thread this is."""
    return threading.current_thread().name


async def coroutine_function() -> None:
    """Something that is asynchronous already."""


@pytest.mark.asyncio
async def test_run_on_host_passes_arguments_and_result() -> None:
    assert await ar.run_on_host(pow, 2, 10) == 1024
    assert await ar.run_on_host(int, "ff", base=16) == 255


@pytest.mark.asyncio
async def test_run_on_host_takes_a_keyword_called_fn() -> None:
    assert await ar.run_on_host(dict, fn=1) == {"fn": 1}


@pytest.mark.asyncio
async def test_run_on_host_runs_in_a_daemon_thread_with_the_callers_context() -> None:
    colour.set("red")

    thread = await ar.run_on_host(threading.current_thread)

    assert thread is not threading.main_thread()
    assert thread.daemon
    assert await ar.run_on_host(colour.get) == "red"


@pytest.mark.asyncio
async def test_host_ops_run_side_by_side() -> None:
    meet = threading.Barrier(3)

    results = await asyncio.gather(*(ar.run_on_host(meet.wait, LIMIT_S) for _ in range(3)))

    assert sorted(results) == [0, 1, 2]


@pytest.mark.asyncio
async def test_run_on_host_raises_the_error_of_the_function() -> None:
    with pytest.raises(ZeroDivisionError):
        await ar.run_on_host(divmod, 1, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("bad", [None, 3, "name"])
async def test_run_on_host_refuses_coroutine_functions_and_other_objects(bad: Any) -> None:
    with pytest.raises(TypeError, match="function"):
        await ar.run_on_host(bad)


@pytest.mark.asyncio
async def test_run_on_host_refuses_an_async_function() -> None:
    with pytest.raises(TypeError, match="function"):
        (await ar.run_on_host(coroutine_function)).close()


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is per thread on Linux only")
@pytest.mark.asyncio
async def test_lane_threads_are_nicer_by_five() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert await ar.run_on_host(niceness) == min(19, niceness() + 5)


@pytest.mark.asyncio
async def test_device_op_runs_on_the_host_outside_a_replica() -> None:
    assert "host" in await where()


@pytest.mark.asyncio
async def test_device_op_runs_on_the_replicas_device(pair: ar.MirroredStrategy) -> None:
    async def step() -> tuple[str, str]:
        context = ar.get_replica_context()
        return await where(), str(context.device)

    threads, devices = await pair.run(step)

    assert devices.values == ("cpu:0", "cpu:1")
    for thread, device in zip(threads, devices, strict=True):
        assert device in thread


@pytest.mark.asyncio
async def test_device_op_runs_on_the_host_in_a_merge_function(pair: ar.MirroredStrategy) -> None:
    async def merge(_strategy: ar.Strategy) -> str:
        return await where()

    async def step() -> str:
        return await ar.get_replica_context().merge_call(merge)

    assert all("host" in name for name in await pair.run(step))


@pytest.mark.asyncio
async def test_device_op_runs_on_the_host_under_the_default_strategy() -> None:
    assert "host" in await ar.get_strategy().run(where)


@pytest.mark.asyncio
async def test_run_on_host_runs_on_the_host_in_a_replica(pair: ar.MirroredStrategy) -> None:
    async def step() -> str:
        return (await ar.run_on_host(threading.current_thread)).name

    assert all("host" in name for name in await pair.run(step))


@pytest.mark.asyncio
async def test_ops_of_one_device_keep_their_order(solo: ar.OneDeviceStrategy) -> None:
    seen: list[int] = []
    note = ar.device_op(seen.append)

    async def step() -> None:
        await asyncio.gather(*(note(i) for i in range(50)))

    await solo.run(step)

    assert seen == list(range(50))


def test_device_op_keeps_name_and_text() -> None:
    assert where.__name__ == "where"
    assert where.__doc__ == "Tell which thread this is."


@pytest.mark.asyncio
async def test_device_op_works_for_methods_and_keywords() -> None:
    class Model:
        scale = 3

        @ar.device_op
        def apply(self, x: int, *, offset: int = 0) -> int:
            return self.scale * x + offset

    assert await Model().apply(2, offset=1) == 7


@pytest.mark.parametrize(
    "bad", [None, 3, coroutine_function, functools.partial(coroutine_function)]
)
def test_device_op_refuses_coroutine_functions_and_other_objects(bad: Any) -> None:
    with pytest.raises(TypeError, match="plain function"):
        ar.device_op(bad)


def test_ops_work_in_one_loop_after_another() -> None:
    names = [asyncio.run(where()), anyio.run(where), asyncio.run(where())]

    assert all("host" in name for name in names)


def test_ops_work_under_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> list[int]:
        return [await ar.run_on_host(int, i) for i in range(100)]

    assert uvloop.run(main()) == list(range(100))


def test_ops_under_trio_name_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trio drives a coroutine by itself; here the test does, in trio's name."""
    trio = SimpleNamespace(lowlevel=SimpleNamespace(in_trio_run=lambda: True))
    monkeypatch.setitem(sys.modules, "trio", trio)
    coroutine = ar.run_on_host(int)

    with pytest.raises(RuntimeError, match=r"(?i)asyncio"):
        coroutine.send(None)


@pytest.mark.asyncio
async def test_the_host_lane_has_statistics() -> None:
    before = lane_table().statistics()["host"].done if "host" in lane_table().statistics() else 0

    await ar.run_on_host(int)

    assert lane_table().statistics()["host"].done == before + 1
