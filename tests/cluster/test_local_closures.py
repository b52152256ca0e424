"""The engine for closures of one process: what it has after it was closed; where closures are."""

import asyncio
import weakref
from functools import partial
from typing import Any

import pytest

from aioreplica.cluster import LocalClosureEngine, current_worker_index
from aioreplica.errors import ContextError
from tests.sequencer import idle


class Task:
    """An async closure that waits until it may end."""

    is_async = True

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def run_on_loop(self, _worker: Any) -> str:
        await self.may_end.wait()
        return "ended"


class State:
    """Is on a server, and can be watched."""


@pytest.mark.asyncio
@pytest.mark.parametrize("is_lost", [False, True])
async def test_an_engine_that_was_closed_beside_closures_has_its_workers_again(
    is_lost: bool,
) -> None:
    """A coordinator that was given it next waited for ever."""
    engine = LocalClosureEngine(2)
    for _ in range(2):
        await engine.start(0)
        tasks: list[Any] = [Task(), Task()]
        names = [*engine.workers_now]
        [first], [_second] = (
            engine.submit(name, [task]) for name, task in zip(names, tasks, strict=True)
        )
        await idle()
        tasks[0].may_end.set()
        assert await first.result() == "ended"
        if is_lost:
            engine.lose_worker(names[1])
            engine.add_worker()
            await idle()
        await engine.aclose()
        assert engine.num_workers == 2
        assert "0 workers busy, 2 idle" in repr(engine)


def test_the_index_of_a_worker_is_asked_for_in_a_closure() -> None:
    with pytest.raises(ContextError, match="outside a closure"):
        current_worker_index()


@pytest.mark.asyncio
async def test_a_state_goes_with_its_last_handle() -> None:
    """Those of closed strategies stayed as long as another one used the engine."""
    engine = LocalClosureEngine(1)
    await engine.start(1)
    first, second, third = [await engine.create_state("owner", State, (), 0) for _ in range(3)]
    gone = weakref.ref(first._state)  # type: ignore[attr-defined]
    told: list[str] = []
    for name, handle in (("first", first), ("third", third), ("second", second)):
        handle.when_lost(partial(told.append, name))
    del first, handle
    assert gone() is None

    engine.lose_server(0)
    assert told == ["second", "third"]  # as they were made
    assert second.is_lost
    assert third.is_lost
    await engine.aclose()
