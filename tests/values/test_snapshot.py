"""Snapshots: consistent, immutable, numbered; what they hold and what they refuse."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from aioreplica.values import Snapshot, take_snapshot


def new(strategy: ar.Strategy, value: Any = 0.0) -> Any:
    with strategy.scope():
        return ar.Variable(value)


# --- what one is ------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_snapshot_keeps_the_values_of_its_time(strategy: ar.Strategy) -> None:
    a, b = new(strategy, [1.0, 2.0]), new(strategy, 3.0)
    first = strategy.snapshot(a, b)

    await a.assign([5.0, 6.0])
    await b.assign(7.0)
    second = strategy.snapshot(b, a)

    assert (first[a].tolist(), first[b].tolist()) == ([1.0, 2.0], 3.0)
    assert (second[a].tolist(), second[b].tolist()) == ([5.0, 6.0], 7.0)
    assert second.version == first.version + 2 == strategy._runtime.store.version
    assert [*first] == [a, b]
    assert [*second.keys()] == [b, a]
    assert len(first) == 2


def test_no_variables_mean_all_of_the_strategy(pair: ar.Strategy, solo: ar.Strategy) -> None:
    assert len(pair.snapshot()) == 0
    a, b = new(pair, 1.0), new(pair, 2.0)
    new(solo)
    ar.Variable(0.0)

    snapshot = pair.snapshot()

    assert [*snapshot] == [a, b]
    assert [float(value) for value in snapshot.values()] == [1.0, 2.0]


def test_all_variables_include_those_of_an_optimizer(pair: ar.Strategy) -> None:
    with pair.scope():
        adam = ar.optimizers.Adam()

    assert adam.iterations in pair.snapshot()


def test_the_default_strategy_does_not_list_its_variables() -> None:
    a = ar.Variable(1.0)

    assert len(ar.get_strategy().snapshot()) == 0
    assert [*ar.get_strategy().snapshot(a)] == [a]


def test_a_variable_named_twice_is_held_once(pair: ar.Strategy) -> None:
    a = new(pair)

    assert [*pair.snapshot(a, a)] == [a]


@pytest.mark.asyncio
async def test_a_snapshot_shows_the_first_component(pair: ar.Strategy) -> None:
    a = new(pair)
    await pair.extended.update(a, lambda v: v.assign(10.0 + ar.get_update_replica_id()))

    async def step() -> Any:
        return float(a.value), float(pair.snapshot(a)[a])

    own, shown = await pair.run(step)

    assert pair.snapshot(a)[a] == 10.0
    assert own.values == (10.0, 11.0)
    assert shown.values == (10.0, 10.0)


def test_its_arrays_and_items_cannot_be_written(pair: ar.Strategy) -> None:
    a = new(pair, [1.0, 2.0])
    snapshot: Any = pair.snapshot(a)

    with pytest.raises(ValueError, match="read-only"):
        snapshot[a][0] = 9.0
    with pytest.raises(TypeError, match="item assignment"):
        snapshot[a] = np.zeros(2)
    with pytest.raises(TypeError, match="item deletion"):
        del snapshot[a]
    with pytest.raises(AttributeError):
        snapshot.age_s = 0.0
    with pytest.raises(AttributeError):
        snapshot.anything = 0
    assert snapshot[a].tolist() == [1.0, 2.0]


def test_a_new_variable_does_not_come_into_an_old_snapshot(pair: ar.Strategy) -> None:
    old = new(pair)
    snapshot = pair.snapshot()

    assert new(pair) not in snapshot
    assert list(map(id, snapshot)) == [id(old)]


def test_it_copies_nothing(pair: ar.Strategy) -> None:
    a = new(pair, [1.0, 2.0])

    assert pair.snapshot(a)[a] is a.value


def test_its_age_grows(pair: ar.Strategy) -> None:
    snapshot = pair.snapshot(new(pair))

    ages = [snapshot.age_s for _ in range(3)]

    assert ages == sorted(ages)
    assert 0 <= ages[0] < 60


def test_the_repr_tells_version_size_and_age() -> None:
    assert repr(Snapshot(7, {})) == "<Snapshot | version 7, 0 variables, 0.000 s old>"


@pytest.mark.parametrize("key", ["variable", 0, None, []])
def test_an_unknown_key_is_named(pair: ar.Strategy, key: Any) -> None:
    snapshot: Any = pair.snapshot(new(pair))

    with pytest.raises(KeyError, match="is not in this snapshot, which holds 'variable'"):
        snapshot[key]
    assert key not in snapshot
    assert snapshot.get(key) is None


def test_a_variable_that_is_not_in_it_is_named(pair: ar.Strategy) -> None:
    a, other = new(pair), new(pair)

    with pytest.raises(KeyError, match="variable_1"):
        pair.snapshot(a)[other]


def test_a_variable_of_another_strategy_is_refused(pair: ar.Strategy, solo: ar.Strategy) -> None:
    mine = new(pair)
    for other in (new(solo), ar.Variable(0.0)):
        with pytest.raises(ContextError, match="one strategy only"):
            pair.snapshot(mine, other)
    with pytest.raises(ContextError, match="another strategy"):
        ar.get_strategy().snapshot(mine)


@pytest.mark.parametrize("wrong", ["w", np.zeros(2), None])
def test_an_entry_that_is_not_a_variable_is_refused(pair: ar.Strategy, wrong: Any) -> None:
    with pytest.raises(TypeError, match="snapshot takes variables"):
        pair.snapshot(new(pair), wrong)


class Meddled(Sequence[Any]):
    """Variables that somebody writes while a snapshot of them is under way."""

    def __init__(self, variables: Sequence[Any], write: Callable[[int], None]) -> None:
        self._variables = variables
        self._write = write
        self._passes = 0

    def __getitem__(self, index: Any) -> Any:
        return self._variables[index]

    def __len__(self) -> int:
        return len(self._variables)

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        for variable in self._variables:
            yield variable
            self._write(self._passes)


@pytest.mark.parametrize(("num_writes", "expected"), [(1, 0.0), (2, 4.0), (3, 6.0)])
def test_writes_meanwhile_are_left_out_or_it_is_taken_anew(
    pair: ar.Strategy, num_writes: int, expected: float
) -> None:
    a, b = new(pair), new(pair)
    left = [num_writes]

    def write(num_passes: int) -> None:
        while num_passes == 2 and left[0] > 0:  # the first pass checks the arguments
            left[0] -= 1
            value = np.float64(2 * (num_writes - left[0]))
            pair._runtime.store.write(dict.fromkeys((a, b), (value,) * 2))

    snapshot = take_snapshot(pair._runtime.store, Meddled([a, b], write))

    assert (float(snapshot[a]), float(snapshot[b])) == (expected, expected)
    assert snapshot.version == expected / 2
