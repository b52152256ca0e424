"""Which workers the engine on Dask knows: answers that overtake each other, and none in time."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock
from weakref import WeakSet

import pytest

import aioreplica.cluster._dask as module
from aioreplica.cluster import DaskClosureEngine
from aioreplica.cluster._dask_states import _actor_on_worker
from tests.sequencer import idle

pytest.importorskip("distributed")
pytestmark = pytest.mark.asyncio


class Scheduler:
    """Is asked for its workers, and answers when a test wants."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[Any]] = []

    async def identity(self, n_workers: int) -> Any:
        self.asked.append(asyncio.get_running_loop().create_future())
        return {"workers": await self.asked[-1]}

    def answer(self, look: int, *workers: str) -> None:
        told = {w: {"name": w, "nthreads": 1, "resources": {"W": 1.0}} for w in workers}
        self.asked[look].set_result(told)


class Told:
    """Takes note of what it is told."""

    def __init__(self) -> None:
        self.workers: list[list[str]] = []

    def learn_workers(self, workers: Any) -> None:
        self.workers.append(sorted(workers))


@pytest.fixture
def parts() -> tuple[Any, Scheduler, Told]:
    engine: Any = DaskClosureEngine("tls://127.0.0.1:1")
    scheduler, told = Scheduler(), Told()
    engine._client = SimpleNamespace(scheduler=scheduler, scheduler_comm=None)
    engine.watch(told)
    return engine, scheduler, told


async def has(engine: Any, action: str, worker: str) -> None:
    engine._learn_of((0.0, {"action": f"{action}-worker", "worker": worker}))
    await idle()


async def test_a_worker_stays_known_when_an_older_answer_comes_late(parts: Any) -> None:
    """It was thought to be gone, and got no closures until another one came."""
    engine, scheduler, told = parts
    await has(engine, "add", "a")
    await has(engine, "add", "b")
    scheduler.answer(1, "a", "b")
    await idle()
    scheduler.answer(0, "a")
    await idle()
    assert [*engine.workers_now] == ["a", "b"]
    assert told.workers == [["a", "b"]]


async def test_answers_in_order_count_each(parts: Any) -> None:
    engine, scheduler, told = parts
    await has(engine, "add", "a")
    await has(engine, "add", "b")
    scheduler.answer(0, "a")
    await idle()
    await has(engine, "remove", "a")
    scheduler.answer(1, "a", "b")
    await idle()
    assert told.workers == [["a"], [], ["b"]]


async def test_a_scheduler_that_does_not_answer_is_asked_again(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that had come got no closures until another one came."""
    engine, scheduler, told = parts
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.0)
    await has(engine, "add", "a")
    for look in range(3):
        scheduler.asked[look].set_exception(OSError("Timed out trying to connect"))
        await idle()
    scheduler.answer(3, "a")
    await idle()
    assert told.workers == [["a"]]
    await has(engine, "add", "b")
    engine._client = None  # closed
    scheduler.asked[4].set_exception(OSError("Closed"))
    await idle()
    assert len(scheduler.asked) == 5
    assert not engine._background


class Made:
    """Stands for a client, its future, and the actor that is made: the future keeps that."""

    def __init__(self) -> None:
        self.futures: WeakSet[Any] = WeakSet()
        self.scheduler_comm = None

    def as_current(self) -> Any:
        return nullcontext()

    def submit(self, *_args: object, **_options: object) -> Any:
        future = asyncio.get_running_loop().create_future()
        future.set_result(Started())
        self.futures.add(future)
        return future


class Started:
    """Stands for an actor."""

    _address, key = "a", "actor-1"


async def test_a_state_goes_with_its_last_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of closed strategies stayed as long as another one used the engine."""
    engine: Any = DaskClosureEngine("tls://127.0.0.1:1")
    engine._client = made = Made()
    monkeypatch.setattr(engine, "_look", AsyncMock(return_value={}))
    monkeypatch.setattr(module, "_places_of_servers", lambda *_: ["a"])
    first, second = [await engine.create_state("owner", list, (), 0) for _ in range(2)]
    await idle()
    assert len(made.futures) == 2
    del first
    assert len(made.futures) == 1

    engine._learn_of((0.0, {"action": "remove-worker", "worker": "a"}))
    assert second.is_lost
    assert not engine._states


NUM_LOADED: list[None] = []


def _load_second_time() -> str:
    NUM_LOADED.append(None)
    assert len(NUM_LOADED) == 2, "the client was told of something else first"
    return "actor"


class Actor:
    def __reduce__(self) -> tuple[Any, ...]:
        return _load_second_time, ()


async def test_a_client_that_was_told_of_something_first_is_made_again() -> None:
    NUM_LOADED.clear()
    data = pickle.dumps(Actor())

    assert _actor_on_worker(data) == "actor"
    with pytest.raises(AssertionError, match="something else first"):
        _actor_on_worker(data)  # twice is not a race
