"""One program, unchanged, on asyncio, uvloop, anyio, eager tasks and in a web handler."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import aioreplica as ar
from aioreplica.errors import MergeMismatchError
from tests.conftest import STRATEGIES


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


async def program(make: Callable[[], ar.Strategy]) -> dict[str, Any]:
    """A bit of everything; returns what must be the same wherever it runs."""
    strategy = make()
    with strategy.scope():
        weight = ar.Variable(np.zeros(2), aggregation="mean")

    async def merge(current: ar.Strategy, value: Any) -> str:
        await asyncio.sleep(0)
        return "merged"

    async def step(x: float) -> dict[str, Any]:
        ctx = me()
        own = x + ctx.replica_id_in_sync_group
        await weight.assign_add(np.full(2, own))
        async with asyncio.TaskGroup() as group:
            square = group.create_task(ctx.run_on_device(pow, own, 2))
        return {
            "sum": await ctx.all_reduce("sum", square.result()),
            "merge": await ctx.merge_call(merge, (own,)),
            "stop": await asyncio.wait_for(ctx.any(own > 1), 60),
        }

    async def mismatched() -> None:
        if me().replica_id_in_sync_group:
            await me().barrier()

    async def endless(end: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_soon(end)
        await asyncio.Event().wait()

    report: dict[str, Any] = {}
    async with strategy:
        results = await asyncio.gather(*(strategy.run(step, (float(i),)) for i in range(3)))
        report["results"] = [strategy.local_results(result)[0] for result in results]
        report["plain"] = strategy.local_results(await strategy.run(lambda: 7))
        try:
            await strategy.run(mismatched)
        except MergeMismatchError as error:
            report["mismatch"] = error.reason
        try:
            async with asyncio.timeout(60) as limit:
                await strategy.run(endless, (partial(limit.reschedule, 0.0),))
        except TimeoutError:
            report["timeout"] = True
        with anyio.move_on_after(60) as scope:
            await strategy.run(endless, (partial(setattr, scope, "deadline", 0.0),))
        report["scope"] = scope.cancelled_caught
        report["weight"] = weight.value.tolist()
    return report


def on_asyncio(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(main)


def on_debug_asyncio(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(main, debug=True)


def on_uvloop(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def on_anyio(main: Coroutine[Any, Any, Any]) -> Any:
    async def entry() -> Any:
        async with anyio.create_task_group():
            return await main

    return anyio.run(entry, backend="asyncio")


def on_anyio_uvloop(main: Coroutine[Any, Any, Any]) -> Any:
    async def entry() -> Any:
        return await main

    return anyio.run(entry, backend="asyncio", backend_options={"use_uvloop": True})


def with_eager_tasks(main: Coroutine[Any, Any, Any]) -> Any:
    """Before Python 3.12, tasks of a user's own factory."""
    factory = getattr(asyncio, "eager_task_factory", None)

    async def entry() -> Any:
        asyncio.get_running_loop().set_task_factory(
            factory or (lambda loop, coro, **kwargs: asyncio.Task(coro, loop=loop, **kwargs))
        )
        return await main

    return asyncio.run(entry())


def in_starlette(main: Coroutine[Any, Any, Any]) -> Any:
    found: list[Any] = []

    async def handler(_request: Request) -> JSONResponse:
        found.append(await main)
        return JSONResponse({"ok": True})

    async def entry() -> Any:
        app = Starlette(routes=[Route("/", handler)])
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.get("/")
        assert response.json() == {"ok": True}
        return found[0]

    return asyncio.run(entry())


WAYS = [on_debug_asyncio, on_uvloop, on_anyio, on_anyio_uvloop, with_eager_tasks, in_starlette]


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_everywhere(way: Callable[[Any], Any], kind: str) -> None:
    expected = on_asyncio(program(STRATEGIES[kind]))

    assert way(program(STRATEGIES[kind])) == expected
    assert expected["timeout"] is expected["scope"] is True
    assert ("mismatch" in expected) == (not kind.startswith(("default", "one")))


def test_parity_covers_eager_tasks_where_there_are_any() -> None:
    assert hasattr(asyncio, "eager_task_factory") == (sys.version_info >= (3, 12))


@pytest.mark.asyncio
async def test_requests_share_a_strategy() -> None:
    """Each handler runs a step of its own; a client that goes away cancels only its own."""

    async def step(x: int) -> int:
        await me().run_on_device(int)
        return await me().all_reduce("sum", x)

    async def endless(end: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_soon(end)
        await asyncio.Event().wait()

    async def handler(request: Request) -> JSONResponse:
        x = int(request.query_params["x"])
        if x < 0:
            await strategy.run(endless)
        return JSONResponse(strategy.local_results(await strategy.run(step, (x,)))[0])

    app = Starlette(routes=[Route("/", handler)])
    transport = httpx.ASGITransport(app=app)
    async with (
        STRATEGIES["mirrored 2"]() as strategy,
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):

        async def ask(x: int) -> int:
            return (await client.get("/", params={"x": x})).json()

        lost = asyncio.get_running_loop().create_task(ask(-1))
        answers = await asyncio.gather(*map(ask, range(10)))
        lost.cancel()
        await asyncio.wait([lost])
        assert answers == [2 * x for x in range(10)]
        assert strategy.statistics().num_active == 0
