"""Where optimizers may be made and applied, and whose variables they may write."""

from typing import Any

import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from tests.optimizers.rules import Descent, made


@pytest.mark.asyncio
async def test_cross_replica_context_is_an_error_that_names_the_form(
    pair: ar.MirroredStrategy,
) -> None:
    w = made(pair)
    optimizer = Descent()

    with pair.scope():
        with pytest.raises(RuntimeError, match=r"strategy\.run\(step"):
            optimizer.apply_gradients([(1.0, w)])
        with pytest.raises(ContextError, match=r"optimizer\.minimize"):
            optimizer.minimize(lambda: w.value)
        pairs = await optimizer.compute_gradients(lambda: w.value**2)

    assert [variable for _, variable in pairs] == [w]


@pytest.mark.asyncio
async def test_calls_in_a_merge_function_are_refused(pair: ar.MirroredStrategy) -> None:
    w = made(pair)
    optimizer = Descent()

    def merge(_strategy: Any) -> Any:
        optimizer.apply_gradients([(1.0, w)])

    async def step() -> Any:
        await ar.get_replica_context().merge_call(merge)

    with pytest.raises(ContextError, match="merge function"):
        await pair.run(step)


@pytest.mark.asyncio
async def test_variables_must_belong_to_the_strategy(
    pair: ar.MirroredStrategy, solo: ar.OneDeviceStrategy
) -> None:
    optimizer = Descent()
    theirs, plain = made(solo, 0.0, "theirs"), ar.Variable(0.0, name="plain")

    async def step(w: Any) -> Any:
        await optimizer.apply_gradients([(1.0, w)])

    for variable in (theirs, plain):
        with pytest.raises(ContextError, match=variable.name):
            await pair.run(step, args=(variable,))
    with pytest.raises(ContextError, match="'theirs'"):
        optimizer.apply_gradients([(1.0, theirs)])
    with pytest.raises(ContextError, match="'theirs'"):
        optimizer.apply_gradients([(1.0, plain)], global_step=theirs)


@pytest.mark.asyncio
async def test_optimizers_are_made_outside_the_step(pair: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        Descent()

    with pytest.raises(ContextError, match="Descent was made inside a step"):
        await pair.run(step)
