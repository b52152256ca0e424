"""The store: numbered writes, published as a whole; waiting for a version."""

import asyncio
import threading
from collections.abc import Callable, ItemsView
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from aioreplica.values import VariableStore
from tests.sequencer import idle


def new(strategy: ar.Strategy, value: Any = 0.0) -> Any:
    with strategy.scope():
        return ar.Variable(value)


def parts(variable: Any, value: float) -> tuple[np.ndarray, ...]:
    array = np.full(variable.shape, value, variable.dtype)
    array.flags.writeable = False
    return (array,) * len(variable.components)


class Halfway(dict[Any, Any]):
    """Changes that let somebody look before each variable is written, and after the last."""

    def __init__(self, changes: dict[Any, Any], look: Callable[[], None]) -> None:
        super().__init__(changes)
        self._look = look

    def items(self) -> ItemsView[Any, Any]:
        def pairs() -> Any:
            for pair in dict.items(self):
                self._look()
                yield pair
            self._look()

        return pairs()


# --- writes -----------------------------------------------------------------------------------


def test_writes_are_numbered_per_store_and_counted_per_variable(pair: ar.Strategy) -> None:
    a, b = new(pair), new(pair)
    store = pair._runtime.store

    numbers = [store.write(changes) for changes in ({a: parts(a, 1)}, {b: parts(b, 2)})]
    numbers.append(store.write({a: parts(a, 3), b: parts(b, 4)}))

    assert numbers == [1, 2, 3]
    assert store.version == 3
    assert (a.version, b.version) == (2, 2)
    assert (a.value, b.value) == (3.0, 4.0)


def test_stores_of_different_strategies_count_apart(pair: ar.Strategy, solo: ar.Strategy) -> None:
    a, b = new(pair), new(solo)

    pair._runtime.store.write({a: parts(a, 1)})

    assert (pair._runtime.store.version, solo._runtime.store.version) == (1, 0)
    assert (a.version, b.version) == (1, 0)


def test_nothing_of_a_write_is_visible_before_all_of_it(pair: ar.Strategy) -> None:
    a, b = new(pair, 1.0), new(pair, 2.0)
    pair._runtime.store.write({a: parts(a, 3), b: parts(b, 6)})
    seen: list[Any] = []

    def look() -> None:
        snapshot = pair.snapshot(a, b)
        values = [float(x) for x in (a.value, b.value, snapshot[a], snapshot[b])]
        seen.append((values, a.version, b.version, snapshot.version, pair._runtime.store.version))

    pair._runtime.store.write(Halfway({a: parts(a, 5), b: parts(b, 10)}, look))

    assert seen == [([3.0, 6.0, 3.0, 6.0], 1, 1, 1, 1)] * 3
    look()
    assert seen[-1] == ([5.0, 10.0, 5.0, 10.0], 2, 2, 2, 2)


def test_a_reader_of_an_old_value_never_sees_it_change(pair: ar.Strategy) -> None:
    a = new(pair, [1.0, 1.0])
    held = [a.value]

    for number in range(2, 6):
        pair._runtime.store.write({a: parts(a, number)})
        held.append(a.value)

    assert [array.tolist() for array in held] == [[n, n] for n in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert not any(array.flags.writeable for array in held)


@pytest.mark.asyncio
async def test_one_assign_and_one_update_are_one_write_each(pair: ar.Strategy) -> None:
    a, b = new(pair), new(pair)

    await a.assign(1.0)
    assert pair._runtime.store.version == 1

    async def both(v: Any) -> None:
        await v.assign_add(1.0)
        await b.assign_add(2.0)
        await v.assign_add(1.0)

    await pair.extended.update(a, both)

    assert pair._runtime.store.version == 2
    assert (a.version, b.version) == (2, 1)
    assert (a.value, b.value) == (3.0, 2.0)


@pytest.mark.asyncio
async def test_one_apply_gradients_is_one_write(gang: ar.Strategy) -> None:
    a, b = new(gang), new(gang)
    with gang.scope():
        adam = ar.optimizers.Adam()
    before = gang._runtime.store.version

    async def step() -> None:
        await adam.apply_gradients([(1.0, a), (1.0, b)])

    await gang.run(step)

    assert gang._runtime.store.version == before + 1
    slots = [adam.get_slot(v, name) for v in (a, b) for name in ("m", "v")]
    assert {v._cell.number for v in (a, b, adam.iterations, *slots)} == {before + 1}


def test_writes_of_several_threads_have_different_numbers(pair: ar.Strategy) -> None:
    variables = [new(pair) for _ in range(4)]
    numbers: list[int] = []

    def write(variable: Any) -> None:
        numbers.extend(
            pair._runtime.store.write({variable: parts(variable, n)}) for n in range(100)
        )

    threads = [threading.Thread(target=write, args=(variable,)) for variable in variables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(numbers) == list(range(1, 401))
    assert [variable.version for variable in variables] == [100] * 4


def test_the_repr_shows_the_version_and_the_waits() -> None:
    assert repr(VariableStore()) == "<VariableStore | version 0, 0 waiting>"


# --- waiting ----------------------------------------------------------------------------------


def num_waiting(strategy: ar.Strategy) -> int:
    return int(repr(strategy._runtime.store).split(", ")[1].split()[0])


async def started(*coroutines: Any) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    await asyncio.sleep(0)
    return tasks


@pytest.mark.asyncio
@pytest.mark.parametrize("version", [-1, 0, 1, 2])
async def test_a_version_that_is_reached_is_not_waited_for(
    strategy: ar.Strategy, version: int
) -> None:
    a = new(strategy)
    await a.assign(1.0)
    await a.assign(2.0)

    assert await asyncio.wait_for(strategy.wait_for_version(a, version), 60) == 2
    assert num_waiting(strategy) == 0


@pytest.mark.asyncio
async def test_a_version_is_waited_for_until_it_is_reached(strategy: ar.Strategy) -> None:
    a, other = new(strategy), new(strategy)
    (task,) = await started(strategy.wait_for_version(a, 2))

    await a.assign(1.0)
    await other.assign(1.0)
    await other.assign(1.0)
    await asyncio.sleep(0)
    assert not task.done()
    assert num_waiting(strategy) == 1

    await a.assign(2.0)
    assert await asyncio.wait_for(task, 60) == 2
    assert num_waiting(strategy) == 0


@pytest.mark.asyncio
async def test_every_waiter_wakes_at_its_own_version(pair: ar.Strategy) -> None:
    a = new(pair)
    tasks = await started(*[pair.wait_for_version(a, n) for n in (1, 3, 2, 1)])
    done: list[list[bool]] = []

    for value in range(3):
        await a.assign(float(value))
        await idle()
        done.append([task.done() for task in tasks])

    assert done == [[True, False, False, True], [True, False, True, True], [True] * 4]
    assert await asyncio.gather(*tasks) == [1, 3, 2, 1]


@pytest.mark.asyncio
@pytest.mark.parametrize("is_reached", [False, True])
async def test_a_cancelled_wait_leaves_nothing_behind(
    pair: ar.Strategy, is_reached: bool, no_task_left: None
) -> None:
    a = new(pair)
    first, second = await started(*[pair.wait_for_version(a, 1) for _ in range(2)])

    if is_reached:
        await a.assign(1.0)
    first.cancel()

    with pytest.raises(asyncio.CancelledError):
        await first
    await a.assign(2.0)
    assert await asyncio.wait_for(second, 60) in (1, 2)
    assert num_waiting(pair) == 0


@pytest.mark.asyncio
async def test_a_write_in_another_thread_wakes(pair: ar.Strategy) -> None:
    a = new(pair)
    tasks = await started(*[pair.wait_for_version(a, n) for n in (1, 50)])

    def write() -> None:
        for value in range(50):
            pair._runtime.store.write({a: parts(a, value)})

    await asyncio.to_thread(write)

    reached = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert 1 <= reached[0] <= reached[1] == 50


def test_loops_of_several_threads_wait_for_one_variable() -> None:
    a = ar.Variable(0.0)
    reached: list[int] = []

    def wait() -> None:
        waiting = ar.get_strategy().wait_for_version(a, 1)
        reached.append(asyncio.run(asyncio.wait_for(waiting, 60)))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    a.store.write({a: parts(a, 1)})
    for thread in threads:
        thread.join()

    assert reached == [1, 1, 1]


@pytest.mark.asyncio
async def test_only_variables_of_the_strategy_are_waited_for(
    pair: ar.Strategy, solo: ar.Strategy
) -> None:
    with pytest.raises(ContextError, match="another strategy"):
        await pair.wait_for_version(new(solo), 1)
    with pytest.raises(TypeError, match="takes variables"):
        await pair.wait_for_version("w", 1)  # type: ignore[arg-type]  # on purpose
