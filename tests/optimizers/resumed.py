"""Going on from a checkpoint with an optimizer that has made nothing yet."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import aioreplica as ar
from tests.replica.gated import my_id


async def assert_fresh_one_goes_on(
    strategy: ar.Strategy, folder: Path, make: Callable[[], Any], dtype: Any = np.float32
) -> None:
    """Train, save, train on; restore a fresh one from there, train that on, and compare all."""

    def build() -> dict[str, Any]:
        with strategy.scope():
            return {"model": [ar.Variable(np.array([1.0, 2.0], dtype))], "by": make()}

    async def train(state: dict[str, Any], numbers: range) -> None:
        async def step(number: int) -> None:
            gradient = np.array([number, my_id()], dtype)
            await state["by"].apply_gradients([(gradient, state["model"][0])])

        for number in numbers:
            await strategy.run(step, args=(number,))

    manager, whole, fresh = ar.CheckpointManager(folder), build(), build()
    await train(whole, range(4))
    await manager.save(4, whole)
    await train(whole, range(4, 8))
    await manager.restore(fresh)
    assert manager.restored is not None
    assert manager.restored.deferred
    await train(fresh, range(4, 8))

    kept = [[*state["model"], *state["by"].variables] for state in (whole, fresh)]
    assert len(kept[0]) > 2
    for expected, found in zip(*kept, strict=True):
        np.testing.assert_array_equal(found.value, expected.value)
