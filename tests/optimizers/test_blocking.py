"""Optimizers and accumulators on device threads: results, call sites, and wrong ways to call."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, MergeMismatchError
from aioreplica.optimizers import SGD, Adam
from tests.conftest import mirrored
from tests.replica.gated import me, my_id

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


def made(strategy: ar.Strategy, **options: Any) -> tuple[ar.Variable, Adam]:
    with strategy.scope():
        return ar.Variable(np.zeros(3), name="w"), Adam(0.1, **options)


def batch(k: int, i: int) -> np.ndarray:
    return np.random.default_rng([k, i]).normal(size=3)


# --- accumulators ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["sum", "mean"])
async def test_an_accumulator_gives_the_same_bits_on_device_threads(
    gang: ar.MirroredStrategy, reduction: str
) -> None:
    other = mirrored(gang.num_replicas_in_sync)
    (v, adam), (w, twin) = (
        made(gang, loss_reduction=reduction),
        made(other, loss_reduction=reduction),
    )
    ours, theirs = ar.GradientAccumulator(adam), ar.GradientAccumulator(twin)

    def step(ctx: ar.MultiStepContext, k: int) -> None:
        ours.blocking.add([(batch(k, my_id()), v)])
        if k % 3 == 2:
            ours.blocking.apply()

    async def awaiting(k: int) -> None:
        await theirs.add([(batch(k, my_id()), w)])
        if k % 3 == 2:
            await theirs.apply()

    await gang.run_steps(step, iter(range(9)), 9)
    for k in range(9):
        await other.run(awaiting, args=(k,))

    assert v.value.tobytes() == w.value.tobytes()
    assert int(adam.iterations.value) == 3
    await other.aclose()


async def test_awaitable_methods_of_an_accumulator_are_refused_in_plain_functions(
    pair: ar.MirroredStrategy,
) -> None:
    v, adam = made(pair)
    window = ar.GradientAccumulator(adam)

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        with pytest.raises(ContextError, match=r"accumulator\.blocking\.add"):
            window.add([(np.ones(3), v)])
        with pytest.raises(ContextError, match=r"accumulator\.blocking\.apply\("):
            window.apply()

    await pair.run_steps(step, iter([1]))
    with pytest.raises(ContextError, match=r"`await accumulator\.add\(\.\.\.\)`"):
        window.blocking.add([(np.ones(3), v)])
    assert window.num_added == 0
    assert repr(window.blocking).startswith("<BlockingAccumulator of <GradientAccumulator")


# --- call sites -----------------------------------------------------------------------------------


CALLS: dict[str, Callable[[ar.Variable, Adam], None]] = {
    "apply_gradients": lambda v, adam: adam.blocking.apply_gradients([(np.ones(3), v)]),
    "minimize": lambda v, adam: adam.blocking.minimize(lambda: v.value.sum(), [v]),
    "apply": lambda v, adam: ar.GradientAccumulator(adam).blocking.apply(),
}


@pytest.mark.parametrize("name", CALLS)
async def test_tables_name_the_line_of_the_caller(pair: ar.MirroredStrategy, name: str) -> None:
    v, adam = made(pair)

    def step() -> None:
        if my_id() == 0:
            CALLS[name](v, adam)
        else:
            me().blocking.barrier()

    with pytest.raises(MergeMismatchError) as caught:
        await pair.run(step)

    line = CALLS[name].__code__.co_firstlineno
    assert caught.value.rows[0].site == f"{__file__}:{line}"


# --- minimize -------------------------------------------------------------------------------------


async def test_minimize_without_blocking_is_refused_at_the_call(pair: ar.MirroredStrategy) -> None:
    v, adam = made(pair)

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        with pytest.raises(ContextError, match=r"optimizer\.blocking\.minimize"):
            adam.minimize(lambda: v.value.sum(), [v])

    await pair.run_steps(step, iter([1]))


async def test_minimize_takes_a_backend(pair: ar.MirroredStrategy) -> None:
    v, adam = made(pair)

    def step() -> None:
        with pytest.raises(ValueError, match="no such backend"):
            adam.blocking.minimize(lambda: v.value.sum(), [v], backend="no such backend")

    await pair.run(step)


async def test_a_loss_cannot_await_although_minimize_is_driven(pair: ar.MirroredStrategy) -> None:
    """What the collective would give there is no number, and nobody would take it out."""
    with pair.scope():
        v, sgd = ar.Variable(1.0), SGD(0.1)

    def loss() -> Any:
        me().all_reduce("sum", 1.0)
        return v.value

    with pytest.raises(ContextError, match=r"ctx\.blocking\.all_reduce"):
        await pair.run(lambda: sgd.blocking.minimize(loss, [v]))
