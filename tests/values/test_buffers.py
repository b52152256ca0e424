"""Buffers: used again when nobody holds them, and never while somebody does."""

import asyncio
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.devices import run_on_host
from aioreplica.values import CAN_COUNT_REFERENCES
from aioreplica.values._variable import INLINE_WRITE_BYTES

reuses = pytest.mark.skipif(not CAN_COUNT_REFERENCES, reason="references cannot be counted")

SIZE = 4


def new(strategy: ar.Strategy, size: int = SIZE, aggregation: str = "none") -> Any:
    with strategy.scope():
        return ar.Variable(np.ones(size), aggregation=aggregation)


def newest(variable: Any) -> weakref.ref[Any]:
    """A weak reference to the array of a variable: it tells whether an object is the same."""
    return weakref.ref(variable.value)


def suspended(array: Any) -> Any:
    def generate() -> Any:
        kept = array
        yield
        yield kept

    generator = generate()
    next(generator)
    return generator


def closed_over(array: Any) -> Callable[[], Any]:
    return lambda: array


def raised(array: Any) -> BaseException:
    try:
        raise ValueError(array.shape)
    except ValueError as error:
        return error  # its traceback holds the frame, and that the array


HOLDERS: dict[str, Callable[[ar.Strategy, Any], Any]] = {
    "array": lambda _, v: v.value,
    "np.asarray": lambda _, v: np.asarray(v),
    "view": lambda _, v: v.value[1:],
    "view of a view": lambda _, v: v.value[1:].reshape(-1, 1)[::2],
    "transposed": lambda _, v: v.value.T,
    "other dtype": lambda _, v: v.value.view(np.int64),
    "memoryview": lambda _, v: memoryview(v.value),
    "part of a memoryview": lambda _, v: memoryview(v.value)[1:3],
    "frombuffer": lambda _, v: np.frombuffer(v.value),
    "iterator": lambda _, v: iter(v.value),
    "flat": lambda _, v: v.value.flat,
    "flags": lambda _, v: v.value.flags,
    "ctypes": lambda _, v: v.value.ctypes,
    "dlpack": lambda _, v: v.value.__dlpack__(max_version=(1, 0)),
    "bound method": lambda _, v: v.value.sum,
    "list": lambda _, v: [v.value],
    "closure": lambda _, v: closed_over(v.value),
    "generator": lambda _, v: suspended(v.value),
    "traceback": lambda _, v: raised(v.value),
    "components": lambda _, v: v.components,
    "iterator of components": lambda _, v: iter(v.components),
    "cell": lambda _, v: v._cell,
    "snapshot": lambda s, v: s.snapshot(v),
    "items of a snapshot": lambda s, v: list(s.snapshot(v).items()),
    "PerReplica": lambda _, v: ar.PerReplica([v.value]),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("num_before", [0, 1, 2])
@pytest.mark.parametrize("holder", HOLDERS)
async def test_an_array_that_is_held_is_never_written(
    pair: ar.Strategy, holder: str, num_before: int
) -> None:
    variable = new(pair)
    for _ in range(num_before):
        await variable.assign_add(np.ones(SIZE))
    old, expected = newest(variable), variable.value.tolist()
    held = HOLDERS[holder](pair, variable)

    for _ in range(4):
        await variable.assign_add(np.ones(SIZE))
        array = old()
        assert array is not None
        assert array is not variable.value
        assert array.tolist() == expected
        assert not array.flags.writeable
        del array

    assert variable.value.tolist() == [5.0 + num_before] * SIZE
    del held


@reuses
@pytest.mark.asyncio
@pytest.mark.parametrize("holder", HOLDERS)
async def test_reuse_goes_on_once_the_holder_is_gone(pair: ar.Strategy, holder: str) -> None:
    variable = new(pair)
    held = HOLDERS[holder](pair, variable)
    await variable.assign_add(np.ones(SIZE))
    old = newest(variable)
    del held

    await variable.assign_add(np.ones(SIZE))
    await variable.assign_add(np.ones(SIZE))

    assert old() is variable.value


@reuses
@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, SIZE, INLINE_WRITE_BYTES // 8 + 1])
@pytest.mark.parametrize("verb", ["assign", "assign_add", "assign_sub"])
async def test_an_unheld_buffer_is_used_again(strategy: ar.Strategy, verb: str, size: int) -> None:
    variable = new(strategy, size)
    value = np.ones(size)
    await getattr(variable, verb)(value)
    arrays = [newest(variable)]
    await getattr(variable, verb)(value)
    arrays.append(newest(variable))

    for number in range(4):
        await getattr(variable, verb)(value)
        assert arrays[number % 2]() is variable.value

    expected = {"assign": 1.0, "assign_add": 7.0, "assign_sub": -5.0}[verb]
    assert (variable.value == expected).all()
    assert not variable.value.flags.writeable


@reuses
@pytest.mark.asyncio
async def test_writes_of_replicas_use_buffers_again(gang: ar.Strategy) -> None:
    variable = new(gang, aggregation="sum")

    async def step() -> None:
        await variable.assign_add(np.ones(SIZE))

    await gang.run(step)
    old = newest(variable)
    await gang.run(step)
    await gang.run(step)

    assert old() is variable.value


@reuses
@pytest.mark.asyncio
async def test_steady_writes_allocate_nothing(gang: ar.Strategy) -> None:
    size = 2**16
    variable = new(gang, size)
    value = np.ones(size)
    for _ in range(3):
        await variable.assign_add(value)

    tracemalloc.start()
    try:
        for _ in range(20):
            await variable.assign_add(value)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < value.nbytes / 4


@pytest.mark.asyncio
async def test_where_references_cannot_be_counted_every_write_allocates(
    pair: ar.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.values._store.CAN_COUNT_REFERENCES", False)
    variable = new(pair)
    seen = [newest(variable)]

    for _ in range(4):
        await variable.assign_add(np.ones(SIZE))
        assert all(array() is not variable.value for array in seen)
        seen.append(newest(variable))

    assert variable.value.tolist() == [5.0] * SIZE


@pytest.mark.asyncio
@pytest.mark.parametrize("which", ["components", "previous"])
async def test_holding_a_cell_holds_both_of_its_values(pair: ar.Strategy, which: str) -> None:
    variable = new(pair)
    await variable.assign_add(np.ones(SIZE))
    cell = variable._cell
    expected = getattr(cell, which)[0].tolist()

    for _ in range(4):
        await variable.assign_add(np.ones(SIZE))
        assert getattr(cell, which)[0].tolist() == expected


@pytest.mark.asyncio
async def test_components_that_differ_are_not_used_again(gang: ar.Strategy) -> None:
    variable = new(gang)

    def update(v: Any) -> None:
        v.assign(np.full(SIZE, float(ar.get_update_replica_id())))

    await gang.extended.update(variable, update)
    olds = [weakref.ref(part) for part in variable.components]
    await variable.assign(np.full(SIZE, 7.0))
    await variable.assign(np.full(SIZE, 8.0))

    assert all(old() is not part for old in olds for part in variable.components)
    assert [part.tolist() for part in variable.components] == [[8.0] * SIZE] * len(olds)


@pytest.mark.asyncio
async def test_a_component_that_an_update_left_alone_is_not_written(pair: ar.Strategy) -> None:
    variable = new(pair)

    def update_first(v: Any) -> None:
        if ar.get_update_replica_id() == 0:
            v.assign_add(np.ones(SIZE))

    for number in range(2, 6):
        await pair.extended.update(variable, update_first)
        assert [part.tolist() for part in variable.components] == [[number] * SIZE, [1.0] * SIZE]


# --- where the values of writes come from -----------------------------------------------------


@pytest.mark.asyncio
async def test_an_old_value_can_be_assigned_and_added(strategy: ar.Strategy) -> None:
    variable = new(strategy)
    old = variable.value
    await variable.assign(np.full(SIZE, 5.0))

    await variable.assign_add(old)
    assert variable.value.tolist() == [6.0] * SIZE
    await variable.assign_sub(variable.value[::-1])
    assert variable.value.tolist() == [0.0] * SIZE
    await variable.assign(old)
    assert variable.value.tolist() == old.tolist() == [1.0] * SIZE


@pytest.mark.asyncio
async def test_a_write_that_waits_holds_its_buffer(strategy: ar.Strategy) -> None:
    variable = new(strategy)
    pending = variable.assign(variable.value)

    await variable.assign(np.full(SIZE, 2.0))
    await variable.assign(np.full(SIZE, 3.0))
    await pending

    assert variable.value.tolist() == [1.0] * SIZE


@pytest.mark.asyncio
async def test_the_array_that_was_assigned_stays_the_callers(strategy: ar.Strategy) -> None:
    variable = new(strategy)
    mine = np.full(SIZE, 2.0)

    await variable.assign(mine)
    mine[:] = 9.0

    assert variable.value.tolist() == [2.0] * SIZE
    assert mine.flags.writeable


# --- device ops -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_queued_op_holds_its_arguments(pair: ar.Strategy) -> None:
    variable = new(pair, aggregation="mean")

    async def step() -> Any:
        op = ar.get_replica_context().run_on_device(np.copy, variable.value)
        for number in (2.0, 3.0, 4.0):
            await variable.assign(np.full(SIZE, number))
        return await op

    results = await pair.run(step)

    assert [result.tolist() for result in results.values] == [[1.0] * SIZE] * 2
    assert variable.value.tolist() == [4.0] * SIZE


@pytest.mark.asyncio
async def test_a_started_op_holds_its_arguments(pair: ar.Strategy) -> None:
    variable = new(pair)
    is_started, may_read = threading.Event(), threading.Event()

    def read(array: Any) -> Any:
        is_started.set()
        assert may_read.wait(60)
        return array.tolist()

    task = asyncio.create_task(run_on_host(read, variable.value))
    while not is_started.is_set():
        await asyncio.sleep(0)
    for number in (2.0, 3.0, 4.0):
        await variable.assign(np.full(SIZE, number))
    may_read.set()

    assert await task == [1.0] * SIZE


@reuses
@pytest.mark.asyncio
async def test_a_finished_op_holds_nothing(pair: ar.Strategy) -> None:
    variable = new(pair)
    old = newest(variable)
    op = run_on_host(np.sum, variable.value)

    assert await op == SIZE
    await variable.assign(np.full(SIZE, 2.0))
    await variable.assign(np.full(SIZE, 3.0))

    assert old() is variable.value
