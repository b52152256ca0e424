"""What the kit knows of the library it has from observers, so that a rename cannot take it away."""

import asyncio
import importlib
import inspect
from typing import Any

import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.telemetry import Observer, Observers, observe_everywhere
from aioreplica.testing._points import AWAITED_METHODS

PAIR = ["cpu:0", "cpu:1"]


def test_observers_see_the_ops_of_simulated_devices() -> None:
    seen: list[tuple[str, str]] = []

    def note(kind: str) -> Any:
        return lambda op, lane: seen.append((kind, lane))

    async def train() -> None:
        context = ar.get_replica_context()
        assert context is not None
        await context.run_on_device(int)

    async def main() -> None:
        async with ar.MirroredStrategy(PAIR) as strategy:
            await strategy.run(train)

    observer = Observer(
        op_queued=note("queued"), op_started=note("started"), op_ended=note("ended")
    )
    remove = observe_everywhere(observer)
    try:
        art.run(main)
    finally:
        remove()

    for lane in PAIR:
        assert [kind for kind, where in seen if where == lane] == ["queued", "started", "ended"]


def test_a_collective_is_named_where_its_caller_stands() -> None:
    def nothing(strategy: ar.Strategy) -> None: ...

    async def train() -> None:
        context = ar.get_replica_context()
        assert context is not None
        if context.replica_id_in_sync_group:
            await asyncio.sleep(1)
        await context.merge_call(nothing)
        raise ValueError

    async def main() -> None:
        async with ar.MirroredStrategy(PAIR) as strategy:
            await strategy.run(train)

    failure = art.explore(main).failure

    assert failure is not None
    assert "merge_call #1 (" in failure.timeline
    line = inspect.getsourcelines(train)[1] + 5
    assert f" at test_library.py:{line}" in failure.timeline


def test_no_observer_is_left_behind() -> None:
    async def main() -> None:
        async with ar.MirroredStrategy(PAIR) as strategy:
            await strategy.run(lambda: None)
        raise ValueError

    before = repr(Observers())

    assert art.explore(main).failed
    assert repr(Observers()) == before


@pytest.mark.parametrize("name", sorted(AWAITED_METHODS))
def test_every_method_that_is_known_by_name_is_there(name: str) -> None:
    """asyncio, anyio, threading and queue have no observers: there a name is all there is."""
    owner, method = name.split(".")
    modules = [
        importlib.import_module(each)
        for each in (
            "asyncio", "threading", "queue", "concurrent.futures", "anyio", "anyio.streams.memory",
            "asyncio.taskgroups", "aioreplica.testing._locks", "aioreplica.testing._pools",
        )
    ]  # fmt: skip

    assert any(hasattr(getattr(module, owner, None), method) for module in modules)
