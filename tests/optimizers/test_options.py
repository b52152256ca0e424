"""What may be asked of a step: values beside the loss, sums brought along, norms, constraints."""

from pathlib import Path
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, MergeMismatchError
from aioreplica.optimizers import SGD, Adam, DynamicLossScale
from aioreplica.optimizers.schedules import LinearWarmup, ReduceOnPlateau
from tests.optimizers.rules import Descent, made
from tests.replica.gated import my_id


@pytest.mark.asyncio
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("is_weighted", [False, True])
async def test_minimize_returns_what_comes_with_the_loss(
    pair: ar.MirroredStrategy, scale: Any, is_weighted: bool
) -> None:
    with pair.scope():
        w, sgd = ar.Variable([1.0, 2.0]), SGD(0.5, loss_scale=scale)

    def loss() -> Any:
        predictions = w.value * 3.0
        total = anp.sum(predictions)
        return (ar.Weighted(total, 1) if is_weighted else total), {"predictions": predictions}

    async def step() -> Any:
        value, aux = await sgd.minimize(loss, has_aux=True)
        return getattr(value, "total", value), aux["predictions"]

    def plain() -> Any:
        value, aux = sgd.blocking.minimize(loss, has_aux=True)
        return getattr(value, "total", value), aux["predictions"]

    values, predictions = await pair.run(step)
    assert (values[0], predictions[1].tolist()) == (9.0, [3.0, 6.0])
    values, predictions = await pair.run(plain)
    assert predictions[1].tolist() == ([-1.5, 1.5] if is_weighted else [-6.0, -3.0])


@pytest.mark.asyncio
async def test_a_loss_without_its_pair_is_an_error() -> None:
    w = ar.Variable([1.0])

    with pytest.raises(TypeError, match="has_aux"):
        await SGD(loss_scale=2.0).minimize(lambda: w.value[0] * 2.0, [w], has_aux=True)


@pytest.mark.asyncio
@pytest.mark.parametrize("reduction", ["sum", "mean"])
async def test_gradients_that_are_summed_already_are_not_summed_again(
    gang: ar.MirroredStrategy, reduction: str
) -> None:
    w = made(gang, [0.0])
    with gang.scope():
        sgd = SGD(1.0, loss_reduction=reduction)

    async def step() -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        total = await ctx.all_reduce("sum", np.array([1.0]))
        await sgd.apply_gradients([(total, w)], aggregate=False)

    def plain() -> None:
        sgd.blocking.apply_gradients([(np.array([1.0]), w)], aggregate=False)

    await gang.run(step)
    assert w.value == -gang.num_replicas_in_sync
    await gang.run(plain)
    assert w.value == -gang.num_replicas_in_sync - 1


@pytest.mark.asyncio
async def test_replicas_must_agree_on_the_summing(pair: ar.MirroredStrategy) -> None:
    w = made(pair, [0.0])
    with pair.scope():
        sgd = SGD(1.0)

    async def step() -> None:
        await sgd.apply_gradients([(np.ones(1), w)], aggregate=my_id() == 0)

    with pytest.raises(MergeMismatchError, match="aggregate is True here and False there"):
        await pair.run(step)


@pytest.mark.asyncio
async def test_the_norm_of_a_step_can_be_read(pair: ar.MirroredStrategy) -> None:
    a, b = made(pair, [0.0], "a"), made(pair, [0.0], "b")
    with pair.scope():
        measured, clipped = SGD(1.0, measure_norm=True), SGD(1.0, global_clipnorm=1.0)

    async def step(optimizer: Any, factor: float) -> None:
        pairs = [(factor * np.array([1.5]), a), (factor * np.array([2.0]), b)]
        await optimizer.apply_gradients(pairs)

    for optimizer in (measured, clipped):
        for factor in (1.0, 2.0):
            await pair.run(step, args=(optimizer, factor))
            assert optimizer.gradient_norm.value == 5.0 * factor  # of the sum, before clipping
        assert optimizer.gradient_norm in {*optimizer.variables}
    assert SGD(clipnorm=1.0).gradient_norm is None


@pytest.mark.asyncio
async def test_the_learning_rate_can_be_set() -> None:
    w, sgd = ar.Variable(0.0), SGD(1.0)
    await sgd.apply_gradients([(1.0, w)])
    sgd.learning_rate = 0.25
    await sgd.apply_gradients([(1.0, w)])
    sgd.learning_rate = lambda iteration: 10.0 * iteration
    await sgd.apply_gradients([(1.0, w)])

    assert w.value == -21.25
    with pytest.raises(ValueError, match=r"learning_rate must be >= 0, got -1"):
        sgd.learning_rate = -1
    with pytest.raises(TypeError, match="learning_rate must be a number, got 'fast'"):
        sgd.learning_rate = "fast"


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [lambda: SGD(1.0), Descent], ids=["blocks", "arrays"])
@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_a_constraint_is_applied_to_the_new_value(make: Any, num_replicas: int) -> None:
    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]) as strategy:
        with strategy.scope():
            w = ar.Variable([1.0, 5.0], constraint=lambda value: np.maximum(value, 0.0))
            optimizer = make()

        async def step() -> None:
            await optimizer.apply_gradients([(np.array([2.0, 1.0]), w)])

        await strategy.run(step)

        assert w.value.tolist() == [0.0, 5.0 - num_replicas]
        assert not w.value.flags.writeable
        assert len(set(map(id, w.components))) == 1


@pytest.mark.asyncio
async def test_a_constraint_that_fails_leaves_everything_as_it_was() -> None:
    w = ar.Variable([1.0], constraint=lambda value: value[:0], name="w")
    adam = Adam()

    with pytest.raises(ValueError, match=r"'w' has shape \(0,\)"):
        await adam.apply_gradients([(np.ones(1), w)])

    assert (w.version, adam.iterations.version) == (0, 0)


# ---- plateaus ----------------------------------------------------------------------------------


def rates_of(metrics: Any, **options: Any) -> list[float]:
    schedule = ReduceOnPlateau(1.0, factor=0.5, **options)
    rates = []
    for metric in metrics:
        schedule.observe(metric)
        rates.append(schedule(0))
    return rates


@pytest.mark.parametrize(
    ("metrics", "options"),
    [
        ([5, 4, 4, 4, 4, 3, 3, 3, 3], {"patience": 1}),
        ([1, 2, 2, 2, 2, 2.00001, 2, 2, 2], {"patience": 2, "mode": "max"}),
        ([5, 5, 5, 5, 5, 5, 5, 5, 5], {"patience": 0, "cooldown": 2}),
        ([5, 4.99, 4.98, 4.97, 4.96, 1, 1, 1, 1], {"patience": 1, "threshold": 0.1}),
        ([5, 5, 5, 5, 5, 5, 5, 5, 5], {"patience": 0, "minimum": 0.2}),
        ([5, float("nan"), float("nan"), float("nan"), 5], {"patience": 1}),
        ([-5, -5.1, -5.6, -5.6, -5.6, -5.6], {"patience": 0, "threshold": 0.1}),
    ],
)
def test_plateaus_lower_the_rate_as_in_torch(metrics: Any, options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    plain = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = dict(options)
    theirs["min_lr"] = theirs.pop("minimum", 0.0)
    threshold = theirs.pop("threshold", 1e-4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        plain, factor=0.5, threshold=threshold, **theirs
    )
    expected = []
    for metric in metrics:
        scheduler.step(metric)
        expected.append(plain.param_groups[0]["lr"])
    if metrics[0] < 0:  # torch takes the threshold of a negative best the wrong way round
        expected = [1.0, 0.5, 0.5, 0.25, 0.125, 0.0625]

    assert rates_of(metrics, **options) == expected


@pytest.mark.asyncio
async def test_a_plateau_schedule_is_part_of_its_optimizer(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        w, rate = ar.Variable(0.0), ReduceOnPlateau(1.0, factor=0.5, patience=0)
        sgd = SGD(rate)

    async def step() -> None:
        await sgd.apply_gradients([(1.0, w)])
        with pytest.raises(ContextError, match="outside the step"):
            rate.observe(1.0)

    rate.observe(1.0)
    await pair.run(step)
    rate.observe(1.0)
    await pair.run(step)

    assert w.value == -3.0
    assert {*rate.variables} < {*sgd.variables}


@pytest.mark.asyncio
async def test_a_plateau_behind_a_warm_up_is_part_of_its_optimizer(tmp_path: Path) -> None:
    def made() -> tuple[ReduceOnPlateau, SGD]:
        rate = ReduceOnPlateau(1.0, factor=0.5, patience=0)
        return rate, SGD(LinearWarmup(LinearWarmup(rate, 2), 2))

    rate, sgd = made()
    assert {*rate.variables} < {*sgd.variables}
    for _ in range(2):
        rate.observe(1.0)
    later, restored = made()
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, {"sgd": sgd})
        await manager.restore({"sgd": restored})

    assert (rate(0), later(0)) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"factor": 1.0}, r"factor must be in \(0, 1\), got 1\.0"),
        ({"mode": "best"}, 'mode must be "min" or "max", got \'best\''),
        ({"patience": -1}, "patience must be >= 0, got -1"),
    ],
)
def test_plateaus_are_checked(options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ReduceOnPlateau(1.0, **options)


def test_a_dynamic_scale_and_a_plateau_are_both_remembered() -> None:
    sgd = SGD(ReduceOnPlateau(1.0), loss_scale=DynamicLossScale(), measure_norm=True)

    assert len(sgd.variables) == len({*sgd.variables}) == 1 + 1 + 1 + 2 + 4


def test_a_minimum_above_the_rate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"minimum=0\.1 is above initial_learning_rate=0\.01"):
        ReduceOnPlateau(0.01, minimum=0.1)
    assert ReduceOnPlateau(0.1, minimum=0.1)(0) == 0.1
