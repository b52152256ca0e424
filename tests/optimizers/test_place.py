"""Where optimizers may be made and applied, and whose variables they may write."""

from collections.abc import Sequence
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.context import CLOSURE
from aioreplica.errors import ContextError
from aioreplica.values import Done
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


class Elsewhere:
    """A closure whose variables live elsewhere: it notes what is pushed there."""

    def __init__(self, *variables: ar.Variable) -> None:
        self._variables = frozenset(variables)
        self.pushed: list[Any] = []

    def takes(self, pairs: Sequence[Any]) -> bool:
        return any(variable in self._variables for _, variable in pairs)

    def apply_gradients(self, _optimizer: Any, pairs: Sequence[Any], global_step: Any) -> Any:
        self.pushed += [(float(gradient), variable.name) for gradient, variable in pairs]
        self.pushed.append(global_step)
        return Done()


@pytest.mark.asyncio
async def test_a_closure_pushes_the_gradients_of_its_variables_and_no_others() -> None:
    here, there, steps = ar.Variable(1.0), ar.Variable(1.0, name="there"), ar.Variable(0)
    optimizer = Descent()
    closure = Elsewhere(there)
    CLOSURE.set(closure)  # in the context of this test's task

    await optimizer.apply_gradients([(1.0, here)])
    assert (here.version, closure.pushed) == (1, [])

    await optimizer.apply_gradients([(2.0, there)], steps)
    await optimizer.minimize(lambda: there.value * 3.0)
    assert closure.pushed == [(2.0, "there"), steps, (3.0, "there"), None]
    assert (there.version, steps.version, optimizer.iterations.value) == (0, 0, 1)


@pytest.mark.asyncio
async def test_blocking_calls_of_a_closure_push_too() -> None:
    there = ar.Variable(1.0, name="there")
    optimizer, closure = Descent(), Elsewhere(there)
    CLOSURE.set(closure)

    optimizer.blocking.apply_gradients([(2.0, there)])
    assert optimizer.blocking.minimize(lambda: there.value * 3.0) == 3.0
    assert closure.pushed == [(2.0, "there"), None, (3.0, "there"), None]
    assert there.version == 0
    with pytest.raises(ContextError, match="apply_gradients was called"):
        optimizer.blocking.apply_gradients([(2.0, ar.Variable(1.0))])
