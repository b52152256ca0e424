"""Sparse gradients: rows change as the dense rule would change them, and no others."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.optimizers import SGD, Adagrad, Adam
from tests.conftest import mirrored
from tests.optimizers.rules import Descent

SHAPE = (40, 3)
RULES: dict[str, Any] = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "adagrad": lambda: Adagrad(0.1),
    "adam": lambda: Adam(0.1),
}


def rows_of(step: int, replica_id: int) -> ar.IndexedSlices:
    rng = np.random.default_rng((step, replica_id))
    count = int(rng.integers(0, 6))
    return ar.IndexedSlices(rng.normal(size=(count, 3)), rng.integers(0, 12, count), SHAPE)


@pytest.mark.asyncio
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("name", RULES)
async def test_rows_are_updated_as_arrays_of_their_own(name: str, num_replicas: int) -> None:
    """The touched rows of a step, taken out, get the dense update; the rest stays."""
    start = np.random.default_rng(0).normal(size=SHAPE)
    async with mirrored(num_replicas) as strategy:
        with strategy.scope():
            table, optimizer = ar.Variable(start), RULES[name]()
        expected, slots = start.copy(), None

        for number in range(12):

            async def step(slices: Any) -> None:
                await optimizer.apply_gradients([(slices, table)])

            parts = [rows_of(number, i) for i in range(num_replicas)]
            dense = sum(part.to_dense() for part in parts)
            touched = np.unique(np.concatenate([part.indices for part in parts]))
            await strategy.run(step, args=(ar.PerReplica(parts),))

            if slots is None:
                slots = {
                    slot: np.array(optimizer.new_slot(slot, table)) for slot in optimizer.slot_names
                }
            new, new_slots = optimizer.update(
                optimizer.prepare(0.1, number), expected, dense, slots
            )
            expected[touched] = new[touched]
            for slot, values in new_slots.items():
                slots[slot][touched] = values[touched]
            np.testing.assert_allclose(table.value, expected, rtol=1e-12)
        for slot, values in slots.items():
            np.testing.assert_allclose(optimizer.get_slot(table, slot).value, values, rtol=1e-12)


@pytest.mark.asyncio
async def test_other_writes_in_between_are_not_lost(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        table, sgd = ar.Variable(np.zeros(SHAPE)), SGD(1.0)
    one = ar.IndexedSlices(np.ones((1, 3)), [5], SHAPE)
    kept = []

    async def sparse() -> None:
        await sgd.apply_gradients([(one, table)])

    async def dense() -> None:
        await sgd.apply_gradients([(np.ones(SHAPE), table)])

    for number in range(9):
        await pair.run(dense if number % 4 == 3 else sparse)
        if number % 3 == 1:
            await table.assign_add(np.ones(SHAPE))
        if number % 2:
            kept.append((table.value, table.value.copy()))  # a held buffer cannot be used

    assert table.value[5].tolist() == [-18.0 + 3] * 3
    assert table.value[6].tolist() == [-4.0 + 3] * 3
    for held, copy in kept:
        np.testing.assert_array_equal(held, copy)


@pytest.mark.asyncio
@pytest.mark.parametrize("others", ["dense gradients", "another optimizer"])
async def test_steps_in_between_that_use_the_same_buffers_are_not_lost(
    pair: ar.MirroredStrategy, others: str
) -> None:
    """Two steps bring the buffers of a sparse one back, with other rows changed."""
    with pair.scope():
        table, optimizer, second = ar.Variable(np.zeros(SHAPE)), SGD(1.0), SGD(1.0)
    everywhere = np.ones(SHAPE)
    sparse = ar.IndexedSlices(np.ones((1, 3)), [5], SHAPE)
    rows = ar.IndexedSlices(everywhere, np.arange(len(everywhere)), SHAPE)

    async def step() -> None:
        for _ in range(3):
            await optimizer.apply_gradients([(sparse, table)])
            for _ in range(2):
                if others == "dense gradients":
                    await optimizer.apply_gradients([(everywhere, table)])
                else:
                    await second.apply_gradients([(rows, table)])
        await optimizer.apply_gradients([(sparse, table)])

    await pair.run(step)

    expected = np.full(SHAPE, -12.0)
    expected[5] -= 8.0
    np.testing.assert_array_equal(table.value, expected)


@pytest.mark.asyncio
async def test_components_that_differ_are_updated_one_by_one(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        table, sgd = ar.Variable(np.zeros((3, 1))), SGD(1.0)
    table.store.write({table: (np.zeros((3, 1)), np.full((3, 1), 10.0))})

    async def step() -> None:
        await sgd.apply_gradients([(ar.IndexedSlices([[1.0]], [1], (3, 1)), table)])

    for _ in range(4):
        await pair.run(step)

    assert [part[:, 0].tolist() for part in table.components] == [[0, -8, 0], [10, 2, 10]]


@pytest.mark.asyncio
async def test_rules_for_whole_arrays_get_a_dense_gradient() -> None:
    table = ar.Variable(np.zeros((3, 1)))

    await Descent(0.5).apply_gradients([(ar.IndexedSlices([[2.0], [2.0]], [1, 1], (3, 1)), table)])

    assert table.value[:, 0].tolist() == [0.0, -2.0, 0.0]


@pytest.mark.asyncio
async def test_one_replica_may_not_be_dense(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        table, sgd = ar.Variable(np.zeros((3, 1)), name="table"), SGD(1.0)

    async def step(gradient: Any) -> None:
        await sgd.apply_gradients([(gradient, table)])

    parts = [ar.IndexedSlices([[2.0]], [1], (3, 1)), np.zeros((3, 1))]
    with pytest.raises(TypeError, match=r"'table' is an IndexedSlices on replicas \[0\]"):
        await pair.run(step, args=(ar.PerReplica(parts),))
