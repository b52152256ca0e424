"""Restoring parts of a state, and being refused: what the checkpoint has nothing for stays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import Savepoint

pytestmark = pytest.mark.asyncio


class Refusing:
    def state_dict(self) -> dict[str, int]:
        return {"place": 1}

    def load_state_dict(self, _state: Any) -> None:
        raise ValueError("another dataset")


def training(strategy: ar.Strategy) -> dict[str, Any]:
    with strategy.scope():
        return {
            "trunk": ar.Variable(np.zeros(2)),
            "head": ar.Variable(np.zeros(3)),
            "adam": ar.optimizers.Adam(0.1),
            "window": ar.GradientAccumulator(ar.optimizers.SGD(1.0)),
        }


async def train(strategy: ar.Strategy, state: dict[str, Any], *names: str) -> None:
    variables = [state[name] for name in names]

    async def step() -> None:
        context = ar.get_replica_context()
        assert context is not None
        number = 1.0 + context.replica_id_in_sync_group
        await state["adam"].apply_gradients([(np.full(v.shape, number), v) for v in variables])
        await state["window"].add([(np.full(v.shape, number), v) for v in variables])

    await strategy.run(step)


def slots(state: dict[str, Any], name: str) -> list[Any]:
    return [state["adam"].get_slot(state[name], slot).value.tolist() for slot in ("m", "v")]


async def applied(strategy: ar.Strategy, state: dict[str, Any], name: str) -> list[float]:
    """Return by how much the sums of gradients change a variable."""
    before = state[name].value
    with strategy.scope():
        await state["window"].apply()
    return (before - state[name].value).tolist()


async def save_trunk(strategy: ar.Strategy, folder: Path) -> list[Any]:
    """Save a checkpoint of another program, which has no head; return the slots in it."""
    state = training(strategy)
    await train(strategy, state, "trunk")
    await ar.CheckpointManager(folder).save(1, {"trunk": state["trunk"], "adam": state["adam"]})
    return slots(state, "trunk")


async def test_a_variable_that_a_partial_restore_leaves_keeps_its_slots_and_sums(
    tmp_path: Path, pair: ar.Strategy
) -> None:
    saved = await save_trunk(pair, tmp_path)
    state, manager = training(pair), ar.CheckpointManager(tmp_path)
    for _ in range(2):
        await train(pair, state, "trunk", "head")
    expected, head = slots(state, "head"), state["head"].value.tolist()

    await manager.restore(state, partial=True)

    assert manager.restored is not None
    assert set(manager.restored.missing) == {
        "head", "adam/slots/head/m", "adam/slots/head/v", "window/slots/head/sum.0",
        "window/slots/head/sum.1",
    }  # fmt: skip
    assert slots(state, "trunk") == saved
    assert (slots(state, "head"), state["head"].value.tolist()) == (expected, head)
    assert await applied(pair, state, "head") == [6.0, 6.0, 6.0]


async def test_sums_for_a_variable_that_is_restored_are_those_of_the_checkpoint(
    tmp_path: Path, pair: ar.Strategy
) -> None:
    await save_trunk(pair, tmp_path)  # which has none
    state = training(pair)
    await train(pair, state, "trunk", "head")

    await ar.CheckpointManager(tmp_path).restore(state, partial=True)

    assert await applied(pair, state, "trunk") == [0.0, 0.0]


async def test_slots_that_wait_to_be_made_outlast_a_partial_restore_of_something_else(
    tmp_path: Path, pair: ar.Strategy
) -> None:
    old, manager = training(pair), ar.CheckpointManager(tmp_path / "whole")
    await train(pair, old, "trunk", "head")
    await manager.save(1, old)
    await train(pair, old, "trunk", "head")
    expected = [slots(old, "trunk"), slots(old, "head")]
    await save_trunk(pair, tmp_path / "trunk")
    await ar.CheckpointManager(tmp_path / "weights").save(1, {"trunk": old["trunk"]})
    for other, same in (("weights", 0), ("trunk", 1)):
        state = training(pair)
        await manager.restore(state)
        await ar.CheckpointManager(tmp_path / other).restore(state, partial=True)
        await train(pair, state, "trunk", "head")
        assert [slots(state, "trunk"), slots(state, "head")][same:] == expected[same:]


async def test_a_savepoint_puts_back_that_there_were_no_sums_and_slots(pair: ar.Strategy) -> None:
    state = training(pair)
    savepoint = Savepoint(state)
    await train(pair, state, "trunk", "head")
    savepoint.put_back()
    assert state["adam"].get_slot(state["head"], "m") is None
    assert state["window"].num_added == 0


@pytest.mark.parametrize("refusing", ["an object behind it", "another dataset"])
async def test_a_restore_that_is_refused_leaves_the_loop_over_a_dataset_open(
    refusing: str, tmp_path: Path, pair: ar.Strategy
) -> None:
    def dataset(count: int) -> ar.DistributedDataset:
        return pair.distribute_dataset(ar.ArrayDataset(np.arange(count), 2))

    manager, state = ar.CheckpointManager(tmp_path), {"data": dataset(8), "other": dataset(6)}
    if refusing == "an object behind it":
        state["other"] = Refusing()
    await manager.save(1, state)
    if refusing == "another dataset":
        state["other"] = dataset(10)
    async with state["data"] as data:
        batches = aiter(data)
        await anext(batches)
        with pytest.raises(ValueError, match="another dataset"):
            await manager.restore(state)
        assert len([batch async for batch in batches]) == 3
