"""Averages that follow variables: exact, all or nothing, on every kind of replica."""

import asyncio
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, MergeMismatchError
from aioreplica.optimizers import SGD, ExponentialMovingAverage
from tests.optimizers.rules import LARGE, made
from tests.replica.gated import my_id


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("warm_up", [False, True])
async def test_averages_follow_their_variables(
    strategy: ar.Strategy, size: int, warm_up: bool
) -> None:
    w, sgd = made(strategy, np.zeros(size)), SGD(1.0)
    with strategy.scope():
        ema = ExponentialMovingAverage([w], 0.75, warm_up=warm_up)

    async def step() -> None:
        await sgd.apply_gradients([(np.full(size, -1.0), w)])
        await ema.update()

    expected = 0.0
    for i in range(4):
        await strategy.run(step)
        decay = min(0.75, (1 + i) / (10 + i)) if warm_up else 0.75
        expected += (1 - decay) * (float(w.value[0]) - expected)

    average = ema.average(w)
    assert float(average.value[0]) == pytest.approx(expected, rel=1e-12)
    assert (average.version, average.trainable) == (4, False)
    assert {*ema.variables} > {average}


@pytest.mark.asyncio
async def test_plain_steps_and_cross_replica_code_update_too(gang: ar.MirroredStrategy) -> None:
    w = made(gang, [4.0])
    with gang.scope():
        ema = ExponentialMovingAverage([w], 0.5)
    await w.assign([8.0])

    await gang.run(lambda: ema.blocking.update())
    assert ema.average(w).value == 6.0
    await ema.update()
    assert ema.average(w).value == 7.0
    with pytest.raises(ContextError, match=r"await ema\.update"):
        ema.blocking.update()


@pytest.mark.asyncio
async def test_variables_and_averages_are_swapped_for_a_while(pair: ar.MirroredStrategy) -> None:
    w = made(pair, [4.0])
    with pair.scope():
        ema = ExponentialMovingAverage([w], 0.5)
    await w.assign([8.0])

    async def evaluate() -> None:
        async with ema.swapped():
            assert (w.value, ema.average(w).value) == (4.0, 8.0)
            raise KeyError("evaluation failed")

    with pytest.raises(KeyError, match="evaluation failed"):
        await evaluate()
    assert (w.value, ema.average(w).value) == (8.0, 4.0)

    async def step() -> None:
        async with ema.swapped():
            pass

    with pytest.raises(ContextError, match="swapped is a cross-replica method"):
        await pair.run(step)


@pytest.mark.asyncio
async def test_updates_at_the_same_time_all_count(pair: ar.MirroredStrategy) -> None:
    w = made(pair, np.zeros(LARGE))
    with pair.scope():
        ema = ExponentialMovingAverage([w], 0.5)
    await w.assign(np.full(LARGE, 8.0))

    async def step() -> None:
        await ema.update()

    await asyncio.gather(*(pair.run(step) for _ in range(3)))

    assert (ema.average(w).value == 7.0).all()


@pytest.mark.asyncio
async def test_replicas_must_name_the_same_averages(pair: ar.MirroredStrategy) -> None:
    w = made(pair, [4.0])
    with pair.scope():
        both = [ExponentialMovingAverage([w], decay) for decay in (0.5, 0.25)]

    async def step() -> None:
        await both[my_id()].update()

    with pytest.raises(MergeMismatchError, match=r"decay 0\.5.*decay 0\.25"):
        await pair.run(step)


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: ExponentialMovingAverage([]), ValueError, "must be a list of variables"),
        (lambda: ExponentialMovingAverage([1.0]), TypeError, "floating-point variables, got 1"),
        (lambda: ExponentialMovingAverage([ar.Variable(0.0)], 1.0), ValueError, "decay must be in"),
        (
            lambda: ExponentialMovingAverage([ar.Variable(0.0)]).average(ar.Variable(1.0)),
            ValueError,
            "There is no average",
        ),
    ],
)
def test_wrong_arguments_are_refused(make: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        make()
