"""Calls of closures, packed: what many have in common is kept once, and is of its time."""

from __future__ import annotations

import functools
import gc
import pickle
import tracemalloc
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.cluster import LocalClosureEngine
from aioreplica.devices.processes._parcel import SEPARATE_BYTES
from aioreplica.strategies.parameter_server._packing import (
    HomeSide,
    Packed,
    SharedParts,
    pack_call,
    unpack_call,
)
from tests.parameter_server.coordinating import coordinating

pytestmark = pytest.mark.asyncio

COUNT = 300
BYTES_EACH = 100 * 1024**2 // 100_000


def of_main(fn: Any) -> Any:
    """Return a function as one of the program's own file, which is sent by value."""
    made = FunctionType(fn.__code__, {**fn.__globals__, "__name__": "__main__"}, fn.__name__)
    made.__module__ = "__main__"
    return made


def scaled(counter: Any, amount: int) -> int:
    counter.assign_add(amount)
    return amount * 10


async def test_a_queued_closure_is_small() -> None:
    """At this size 100,000 of them take 100 MiB; they took 189 with a function of a program."""
    strategy = ar.ParameterServerStrategy(LocalClosureEngine(1))
    coordinator = ar.ClusterCoordinator(strategy, queue_size=2 * COUNT)
    async with strategy, coordinator:
        with strategy.scope():
            counter, fn = ar.Variable(0, name="counter"), of_main(scaled)
        remote = [coordinator.schedule_nowait(fn, (counter, 1))]
        gc.collect()
        tracemalloc.start()
        try:
            remote += [coordinator.schedule_nowait(fn, (counter, i)) for i in range(COUNT)]
            gc.collect()
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert taken / COUNT < BYTES_EACH
        await coordinator.join()
        assert await remote[-1].fetch() == (COUNT - 1) * 10
        assert int(await counter.read()) == 1 + sum(range(COUNT))  # type: ignore[attr-defined]


async def test_what_changes_between_two_schedules_is_of_its_time() -> None:
    async with coordinating() as (_, coordinator):
        cell, default = [1], [10]

        def read(extra: Any, kept: Any = default) -> Any:
            return cell[0] + kept[0] + extra

        remote = []
        for i in range(4):
            cell[0], default[0] = i, 10 * i
            remote.append(await coordinator.schedule(read, (100,)))
        read.__defaults__ = ([1000],)
        remote.append(await coordinator.schedule(read, (100,)))
        await coordinator.join()
        assert await coordinator.fetch(remote) == [100, 111, 122, 133, 1103]


def is_first_seen(kept: Any, given: Any, *, named: Any) -> tuple[bool, bool]:
    return kept is given, named is given


async def test_what_a_function_and_its_arguments_share_is_one_object() -> None:
    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            v = ar.Variable(1.0)
        for thing in ([1, 2], v):
            fn = functools.partial(is_first_seen, thing)
            remote = await coordinator.schedule(fn, (thing,), {"named": thing})
            assert await remote.fetch() == (True, True)


async def test_calls_share_equal_parts_only_and_let_them_go() -> None:
    parts: SharedParts = WeakValueDictionary()
    async with coordinating() as (strategy, _):
        with strategy.scope():
            v, w = ar.Variable(1.0), ar.Variable(2.0)

        def packed(fn: Any, *args: Any) -> Packed:
            return pack_call(fn, args, {}, HomeSide(strategy, parts), "The closure")

        first, second = packed(scaled, v, 1), packed(scaled, v, 2)
        assert first.shared is second.shared
        others = [packed(scaled, w, 1), packed(is_first_seen, v, 1), packed(scaled, v, w)]
        assert len({id(each.shared) for each in (first, *others)}) == len(parts) == 4
        del first, second, others
        gc.collect()
        assert not parts


async def test_a_call_is_whole_where_it_was_sent() -> None:
    size = SEPARATE_BYTES // 8
    kept, given = np.arange(size), np.arange(size) + 0.5
    async with coordinating() as (strategy, _):
        call = pack_call(np.add, (kept, given), {"out": None}, HomeSide(strategy), "The closure")
        bound = pack_call(
            functools.partial(np.add, kept), (given,), {}, HomeSide(strategy), "The closure"
        )
    assert len(bound.buffers) == len(call.buffers) == 2
    for each in (call, bound):
        sent = pickle.loads(pickle.dumps(each))
        assert sent.shared is None
        assert sent.num_bytes == each.num_bytes
        for one in (each, sent):
            fn, args, kwargs = unpack_call(one, None)
            np.testing.assert_array_equal(fn(*args, **kwargs), kept + given)
