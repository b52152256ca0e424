"""Closures that do not behave: each is an error that says what it was, and the cluster goes on."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.errors import StallError
from tests.parameter_server_engine import closures
from tests.parameter_server_engine.conftest import coordinating, table_of, until_workers

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened() -> Any:
    async with coordinating(num_workers=2) as both:
        yield both


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(opened: Any) -> Any:
    """The cluster of the module; whatever a test did, closures run on it afterwards."""
    strategy, coordinator = opened
    yield strategy, coordinator
    async with asyncio.timeout(closures.LIMIT_S):
        await until_workers(strategy, 2)
        remotes = [await coordinator.schedule(closures.identity, (i,)) for i in range(8)]
        await coordinator.join()
        assert await coordinator.fetch(remotes) == list(range(8))


@pytest.mark.parametrize("fn", [closures.sleep, closures.sleep_async, closures.hold_gil])
async def test_one_that_does_not_end_in_time(cluster: Any, fn: Any) -> None:
    _, coordinator = cluster
    async with asyncio.timeout(30):
        remote = await coordinator.schedule(fn, (20.0,), timeout_s=0.5)
        with pytest.raises(StallError, match=fn.__name__):
            await coordinator.join()
        with pytest.raises(StallError, match=r"0\.5"):
            await remote.fetch()


async def test_one_that_holds_the_gil_for_a_while_is_waited_for(cluster: Any) -> None:
    _, coordinator = cluster
    remote = await coordinator.schedule(closures.hold_gil, (3.0,))
    assert await remote.fetch() == "held"


@pytest.mark.parametrize("fn", [closures.raise_base, closures.raise_base_async])
@pytest.mark.parametrize(
    "name",
    ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError", "BaseException"],
)
async def test_a_closure_that_raises_a_base_exception(cluster: Any, fn: Any, name: str) -> None:
    _, coordinator = cluster
    remote = await coordinator.schedule(fn, (name,))
    with pytest.raises(Exception, match=name):
        await coordinator.join()
    with pytest.raises(Exception, match=name):
        await remote.fetch()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_one_that_ends_every_worker_it_runs_on(cluster: Any, number: int) -> None:
    _, coordinator = cluster
    await coordinator.schedule(closures.die, (number,))
    with pytest.raises(Exception, match="die"):
        await coordinator.join()


async def test_one_that_ends_its_first_worker(cluster: Any, tmp_path: Path) -> None:
    _, coordinator = cluster
    remote = await coordinator.schedule(closures.die_once, (str(tmp_path / "mark"),))
    assert await remote.fetch() == "second run"


@pytest.mark.parametrize("place", ["captured", "argument", "nested"])
async def test_one_that_cannot_be_pickled_names_what(cluster: Any, place: str) -> None:
    _, coordinator = cluster
    lock = threading.Lock()

    def with_lock() -> bool:
        return lock.locked()

    before = coordinator.statistics()
    calls = {"captured": (with_lock, ()), "argument": (closures.identity, (lock,)),
             "nested": (closures.identity, ({"inside": [lock]},))}  # fmt: skip
    with pytest.raises((TypeError, ValueError), match="lock"):
        await coordinator.schedule(*calls[place])
    assert coordinator.statistics() == before


async def test_one_whose_result_cannot_travel(cluster: Any) -> None:
    _, coordinator = cluster
    remote = await coordinator.schedule(closures.unpicklable)
    with pytest.raises(Exception, match="lock"):
        await remote.fetch()
    with pytest.raises(Exception, match="lock"):
        await coordinator.join()


async def test_one_that_returns_something_huge(cluster: Any) -> None:
    _, coordinator = cluster
    remote = await coordinator.schedule(closures.bytes_of, (256 << 20,))
    assert (await remote.fetch()).nbytes == 256 << 20


async def test_one_that_takes_something_huge(cluster: Any) -> None:
    _, coordinator = cluster
    array = np.ones(64 << 20, np.uint8)
    remote = await coordinator.schedule(closures.identity, (array,))
    assert np.array_equal(await remote.fetch(), array)


async def test_a_variable_of_another_strategy(cluster: Any) -> None:
    _, coordinator = cluster
    async with ar.MirroredStrategy(["cpu:0"]) as other:
        with other.scope():
            foreign = ar.Variable(np.zeros(3), name="foreign")
        with pytest.raises((ValueError, TypeError, RuntimeError), match="foreign"):  # noqa: PT012
            await coordinator.schedule(closures.total, (foreign,))
            await coordinator.join()


async def test_an_error_has_the_frames_of_the_closure(cluster: Any) -> None:
    _, coordinator = cluster
    await coordinator.schedule(closures.fail)
    with pytest.raises(ValueError, match="bad batch") as caught:
        await coordinator.join()
    names = [each.name for each in caught.traceback]
    notes = getattr(caught.value, "__notes__", [])
    assert "fail" in names or any("fail" in note for note in notes)


async def test_pushes_before_an_error_have_been_applied(cluster: Any) -> None:
    strategy, coordinator = cluster
    table = table_of(strategy)
    await coordinator.schedule(push_and_fail, (table,))
    with pytest.raises(ValueError, match="after the push"):
        await coordinator.join()
    assert np.sum(await table.read()) in (0, 48)


async def test_an_error_of_a_server_that_cannot_be_built_anew_is_told_in_words(
    cluster: Any,
) -> None:
    strategy, coordinator = cluster
    with strategy.scope():
        refusing = ar.Variable(np.zeros(3), name="refusing", constraint=closures.refuse)
        optimizer = ar.optimizers.SGD(1.0)
    remote = await coordinator.schedule(descend, (optimizer, refusing), isolate=True)
    with pytest.raises(RuntimeError, match="OddError: not zero 7"):
        await remote.fetch()
    np.testing.assert_array_equal(await refusing.read(), np.zeros(3))


def descend(optimizer: Any, variable: Any) -> None:
    optimizer.apply_gradients([(np.ones(3), variable)])


def push_and_fail(table: Any) -> None:
    table.assign_add(np.ones(table.shape))
    raise ValueError("after the push")
