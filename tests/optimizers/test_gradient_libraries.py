"""Gradients as arrays of other libraries."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.optimizers import SGD
from tests.conftest import mirrored


def arrays_of(library: str) -> Any:
    """What makes an array of a library from a NumPy array."""
    module = pytest.importorskip(library)
    return module.asarray if library == "torch" else module.numpy.asarray


@pytest.mark.asyncio
@pytest.mark.parametrize("library", ["torch", "jax"])
async def test_they_are_applied_like_those_of_numpy(library: str) -> None:
    make = arrays_of(library)
    async with mirrored(2) as strategy:
        with strategy.scope():
            ours, theirs = (ar.Variable(np.ones(3, np.float32)) for _ in range(2))
            sgds = SGD(0.1), SGD(0.1)

        async def step() -> None:
            replica_id = ar.get_replica_context().replica_id_in_sync_group
            gradient = np.arange(3, dtype=np.float32) + replica_id
            await sgds[0].apply_gradients([(ar.Weighted(make(gradient), 2), ours)])
            await sgds[1].apply_gradients([(ar.Weighted(gradient, 2), theirs)])

        await strategy.run(step)

    assert ours.value.tobytes() == theirs.value.tobytes() != np.ones(3, np.float32).tobytes()


@pytest.mark.asyncio
@pytest.mark.parametrize("library", ["torch", "jax"])
async def test_their_shapes_are_checked(library: str) -> None:
    gradient = arrays_of(library)(np.ones(2, np.float32))

    with pytest.raises(ValueError, match=r"'w' has shape \(2,\), but the variable has shape \(3,"):
        await SGD(0.1).apply_gradients([(gradient, ar.Variable(np.ones(3, np.float32), name="w"))])


@pytest.mark.asyncio
async def test_a_tensor_that_is_traced_is_refused() -> None:
    torch = pytest.importorskip("torch")
    w = ar.Variable(np.ones(2, np.float32), name="w")

    with pytest.raises(TypeError, match=r"'w' is a tensor that requires a gradient.*detach"):
        await SGD(0.1).apply_gradients([(torch.ones(2, requires_grad=True), w)])
