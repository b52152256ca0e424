"""`ar.pipeline`: loss and gradients of the model that was not cut, at the pace of the theory."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.errors import ContextError, MergeMismatchError
from tests.conftest import mirrored
from tests.strategies.workers import on_workers

pytestmark = pytest.mark.usefixtures("no_task_left")

NUM_EXAMPLES, WIDTH = 12, 5
RNG = np.random.default_rng(7)
INPUTS = RNG.normal(size=(NUM_EXAMPLES, WIDTH))
TARGETS = RNG.normal(size=(NUM_EXAMPLES, 2))
SCHEDULES = pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


def micro_batches(count: int) -> list[tuple[Any, Any]]:
    """Cut the batch into parts that differ in size unless they cannot."""
    return list(zip(np.array_split(INPUTS, count), np.array_split(TARGETS, count), strict=True))


class Model:
    """Layers and a loss, cut into so many stages."""

    def __init__(self, strategy: ar.Strategy, size: int, *, sleeps_s: float = 0.0) -> None:
        rng = np.random.default_rng(3)
        with strategy.scope():
            self.weights = [
                ar.Variable(rng.normal(size=(WIDTH, 2 if i == size - 1 else WIDTH)) * 0.3)
                for i in range(size)
            ]
            self.bias = ar.Variable(np.zeros(2), name="bias")
            self.sgd = ar.optimizers.SGD(0.1)
        self.sleeps_s = sleeps_s
        self.stages = [*map(self.layer, self.weights[:-1]), self.loss]

    def layer(self, weights: ar.Variable) -> Callable[[Any], Any]:
        def apply(x: Any) -> Any:
            if self.sleeps_s:
                time.sleep(self.sleeps_s)
            return anp.tanh(anp.dot(x, weights.value))

        return apply

    def loss(self, x: Any, targets: Any) -> Any:
        if self.sleeps_s:
            time.sleep(self.sleeps_s)
        difference = anp.dot(x, self.weights[-1].value) + self.bias.value - targets
        return ar.Weighted(anp.sum(difference**2), len(targets))

    def whole(self) -> tuple[float, list[Any]]:
        """Return the loss and the gradients of the model in one piece."""

        def loss(arrays: list[Any]) -> Any:
            x = INPUTS
            for weights in arrays[:-2]:
                x = anp.tanh(anp.dot(x, weights))
            difference = anp.dot(x, arrays[-2]) + arrays[-1] - TARGETS
            return anp.sum(difference**2) / NUM_EXAMPLES

        value_and_grad = ar.autodiff.value_and_grad(loss)
        value, gradients = value_and_grad([v.value for v in (*self.weights, self.bias)])
        return float(value), gradients


async def train(
    size: int, count: int, schedule: Any, *, sleeps_s: float = 0.0
) -> tuple[float, list[Any], float]:
    """Take one step; return the loss, what the variables are then, and how long it took."""
    async with mirrored(size) as strategy:
        model = Model(strategy, size, sleeps_s=sleeps_s)

        async def step() -> float:
            parts = micro_batches(count)
            loss, pairs = await ar.pipeline(model.stages, parts, schedule=schedule)
            await model.sgd.apply_gradients(pairs, aggregate=False)
            return float(loss)

        loop = asyncio.get_running_loop()
        begun = loop.time()
        losses = strategy.local_results(await strategy.run(step))
        assert len(set(losses)) == 1
        took_s = loop.time() - begun
        return losses[0], [v.value for v in (*model.weights, model.bias)], took_s


# ---- loss and gradients ------------------------------------------------------------------------


@pytest.mark.asyncio
@SCHEDULES
@SIZES
@pytest.mark.parametrize("count", [1, 5, 12])
async def test_it_is_the_model_in_one_piece(size: int, count: int, schedule: Any) -> None:
    async with mirrored(size) as strategy:
        model = Model(strategy, size)
        loss, gradients = model.whole()
        before = [v.value for v in (*model.weights, model.bias)]
        expected = [b - 0.1 * g for b, g in zip(before, gradients, strict=True)]

    found, after, _ = await train(size, count, schedule)

    assert found == pytest.approx(loss, rel=1e-12)
    for ours, theirs in zip(after, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-12)


@pytest.mark.slow
def test_the_bits_depend_on_no_order_of_events_and_no_schedule() -> None:
    seen: list[tuple[float, list[bytes]]] = []
    for schedule in ("1f1b", "gpipe"):

        async def main(schedule: str = schedule) -> None:
            loss, after, _ = await train(3, 4, schedule)
            seen.append((loss, [each.tobytes() for each in after]))

        art.explore(main, schedules=40).check()

    assert len(seen) >= 80
    assert all(each == seen[0] for each in seen)


@pytest.mark.asyncio
async def test_scalars_are_added_up_and_shared_variables_get_both_gradients() -> None:
    async with mirrored(2) as strategy:
        with strategy.scope():
            shared = ar.Variable(3.0)

        def first(x: Any) -> Any:
            return x * shared.value

        def last(x: Any, target: Any) -> Any:
            return anp.sum(x * shared.value - target)

        async def step() -> Any:
            ones = np.ones(2)
            pairs = [(ones, ones), (2 * ones, ones)]
            loss, [(gradient, variable)] = await ar.pipeline([first, last], pairs)
            assert variable is shared
            return loss, gradient

        loss, gradient = strategy.local_results(await strategy.run(step))[0]

    assert (float(loss), float(gradient)) == (2 * 9 - 2 + 4 * 9 - 2, 6 * 2 * 3)


@pytest.mark.asyncio
async def test_rows_of_a_table_stay_sparse() -> None:
    async with mirrored(2) as strategy:
        with strategy.scope():
            table = ar.Variable(np.ones((6, 2)))

        def first(rows: Any) -> Any:
            return ar.autodiff.embedding_lookup(table, rows)

        def last(x: Any, weight: float) -> Any:
            return ar.Weighted(anp.sum(x), weight)

        async def step() -> Any:
            return await ar.pipeline([first, last], [([0, 2], 1.0), ([2], 3.0)])

        loss, [(gradient, _)] = strategy.local_results(await strategy.run(step))[0]

    assert float(loss) == 1.5
    assert isinstance(gradient, ar.IndexedSlices)
    np.testing.assert_array_equal(gradient.to_dense()[:3], [[0.25] * 2, [0.0] * 2, [0.5] * 2])


@pytest.mark.asyncio
async def test_gradients_that_all_replicas_share_are_read_only() -> None:
    async with mirrored(2) as strategy:
        with strategy.scope():
            table, weight = ar.Variable(np.ones((6, 2))), ar.Variable(np.ones(2))

        def first(rows: Any) -> Any:
            return ar.autodiff.embedding_lookup(table, rows)

        def last(x: Any, weight_of_batch: float | None) -> Any:
            total = anp.sum(x * weight.value)
            return total if weight_of_batch is None else ar.Weighted(total, weight_of_batch)

        async def step(weight_of_batch: float | None) -> None:
            _, pairs = await ar.pipeline([first, last], [([0, 2], weight_of_batch)])
            for gradient, _ in pairs:
                array = gradient.values if isinstance(gradient, ar.IndexedSlices) else gradient
                with pytest.raises(ValueError, match="read-only"):
                    array *= 0.5

        await strategy.run(step, (None,))
        await strategy.run(step, (2.0,))


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
async def test_other_libraries_differentiate_too(backend: str) -> None:
    xp: Any = pytest.importorskip("torch" if backend == "torch" else "jax.numpy")
    async with mirrored(2) as strategy:
        with strategy.scope():
            weights = ar.Variable(INPUTS[:WIDTH].astype("f4"))

        def first(x: Any) -> Any:
            return xp.tanh(xp.asarray(x) @ weights.value)

        def last(x: Any, targets: Any) -> Any:
            return ((x - xp.asarray(targets)) ** 2).sum()

        async def step() -> Any:
            inputs = [INPUTS[i : i + 4].astype("f4") for i in (0, 4, 8)]
            pairs = [(x, np.ones((4, WIDTH), "f4")) for x in inputs]
            return await ar.pipeline([first, last], pairs, backend=backend)  # type: ignore[arg-type]

        loss, [(gradient, _)] = strategy.local_results(await strategy.run(step))[0]

    start = INPUTS[:WIDTH]
    value, [expected] = ar.autodiff.value_and_grad(
        lambda arrays: anp.sum((anp.tanh(anp.dot(INPUTS, arrays[0])) - 1) ** 2)
    )([start])
    assert float(loss) == pytest.approx(float(value), rel=1e-4)
    np.testing.assert_allclose(np.asarray(gradient), expected, rtol=1e-3, atol=1e-4)


async def losses_with_modules(front: Any, back: Any, num_stages: int = 2) -> list[float]:
    """Run a pipeline of torch modules once; return the loss on each replica."""
    torch = pytest.importorskip("torch")
    async with mirrored(num_stages) as strategy:
        with strategy.scope():
            models = [ar.autodiff.torch_module(each) for each in (front, back)]

        def first(x: Any) -> Any:
            return models[0](torch.from_numpy(x))

        def last(x: Any, targets: Any) -> Any:
            return ((models[1](x) - torch.from_numpy(targets)) ** 2).sum()

        def whole(x: Any, targets: Any) -> Any:
            return last(first(x), targets)

        async def step() -> float:
            stages = [whole] if num_stages == 1 else [first, last]
            batch = INPUTS.astype("f4"), TARGETS.astype("f4")
            loss, _ = await ar.pipeline(stages, [batch], backend="torch")
            return float(loss)

        return list(strategy.local_results(await strategy.run(step)))


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_random_layer_that_would_be_run_again_is_refused() -> None:
    nn = pytest.importorskip("torch.nn")
    dropout = nn.Sequential(nn.Linear(WIDTH, 2), nn.Dropout(0.5))

    with pytest.raises(RuntimeError, match=r"in a stage of ar\.pipeline that is run again"):
        await losses_with_modules(dropout, nn.Linear(2, 2))

    last = nn.Sequential(nn.Linear(WIDTH, 2), nn.Dropout(0.5))
    assert len(await losses_with_modules(nn.Linear(WIDTH, WIDTH), last)) == 2
    assert len(await losses_with_modules(dropout, nn.Linear(2, 2), num_stages=1)) == 1


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
async def test_a_stage_that_changes_running_statistics_is_refused(stage: int) -> None:
    nn = pytest.importorskip("torch.nn")
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity()), nn.Linear(WIDTH, 2)]
    modules[stage] = nn.Sequential(nn.BatchNorm1d(WIDTH), modules[stage])

    with pytest.raises(ContextError, match=r"running_mean'.* was changed in a stage"):
        await losses_with_modules(*modules)

    assert len(await losses_with_modules(*modules, num_stages=1)) == 1
    frozen = nn.BatchNorm1d(WIDTH, track_running_stats=False)
    modules[stage] = nn.Sequential(frozen, modules[stage][1])
    assert len(await losses_with_modules(*modules)) == 2


@pytest.mark.asyncio
@pytest.mark.slow
async def test_what_travels_may_be_bfloat16_of_jax() -> None:
    jnp: Any = pytest.importorskip("jax.numpy")
    async with mirrored(2) as strategy:
        with strategy.scope():
            weight = ar.Variable(np.float32(2.0))

        def first(x: Any) -> Any:
            return (jnp.asarray(x) * weight.value).astype(jnp.bfloat16)

        def last(x: Any, target: float) -> Any:
            return (x.astype(jnp.float32) - target).sum()

        async def step() -> Any:
            pairs = [(np.array([1.0, 3.0], "f4"), 1.0)]
            return await ar.pipeline([first, last], pairs, backend="jax")

        loss, [(gradient, _)] = strategy.local_results(await strategy.run(step))[0]

    assert (float(loss), float(gradient)) == (6.0, 4.0)


# ---- pace --------------------------------------------------------------------------------------


@SCHEDULES
def test_four_stages_and_sixteen_micro_batches_take_what_theory_says(schedule: str) -> None:
    """In virtual time: (m + p - 1) / m of what one stage needs for all micro-batches."""
    size, count, sleeps_s = 4, 12, 1.0  # a pass forward is one sleep, a pass backward another

    _, _, took_s = art.run(lambda: train(size, count, schedule, sleeps_s=sleeps_s))

    of_one_stage_s = count * 2 * sleeps_s
    theory = (count + size - 1) / count
    assert took_s / of_one_stage_s <= 1.05 * theory
    assert took_s >= of_one_stage_s


def test_1f1b_keeps_fewer_inputs_than_gpipe() -> None:
    from aioreplica.strategies._pipeline import _turns

    def most_kept(schedule: Any, behind: int) -> int:
        kept, most = 0, 0
        for is_forward in _turns(schedule, behind, 16):
            kept += 1 if is_forward else -1
            most = max(most, kept)
        assert kept == 0
        return most

    assert [most_kept("1f1b", behind) for behind in range(4)] == [1, 2, 3, 4]
    assert [most_kept("gpipe", behind) for behind in range(4)] == [16] * 4


def yielding(x: Any) -> Any:
    yield x


# ---- cancelled, and wrong ----------------------------------------------------------------------


@pytest.mark.slow
@SCHEDULES
def test_cancelled_at_every_await_it_leaves_nothing(schedule: str) -> None:
    report = art.cancel_everywhere(lambda: train(2, 2, schedule))

    report.check()


@pytest.mark.asyncio
async def test_what_a_stage_raises_is_what_the_run_raises() -> None:
    async with mirrored(2) as strategy:
        model = Model(strategy, 2)

        def failing(x: Any) -> Any:
            raise KeyError("mine")

        async def step() -> None:
            await ar.pipeline([failing, model.loss], micro_batches(3))

        with pytest.raises(KeyError, match="mine"):
            await strategy.run(step)


@pytest.mark.asyncio
async def test_different_numbers_of_micro_batches_are_a_mismatch() -> None:
    async with mirrored(2) as strategy:
        model = Model(strategy, 2)

        async def step() -> None:
            context = ar.get_replica_context()
            assert context is not None
            count = 3 + context.replica_id_in_sync_group
            await ar.pipeline(model.stages, micro_batches(12)[:count])

        with pytest.raises(MergeMismatchError, match="receive #4 from replica"):
            await strategy.run(step)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"stages": [abs]}, ValueError, "1 stages for 2 replicas"),
        ({"stages": [abs, asyncio.sleep]}, TypeError, "plain functions"),
        ({"stages": [abs, yielding]}, TypeError, "yielding"),
        ({"micro_batches": []}, ValueError, "no micro-batches"),
        ({"micro_batches": [1]}, ValueError, "Micro-batch 0 must be a pair"),
        ({"schedule": "2f2b"}, ValueError, "Unknown schedule '2f2b'"),
        ({"stages": [lambda x: {"a": x}, abs]}, TypeError, "takes one array"),
        ({"stages": [lambda x: x > 0, abs]}, TypeError, "returned ndarray of bool, and"),
    ],
    ids=range(8),
)
async def test_what_cannot_be_run_is_refused(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    async with mirrored(2) as strategy:
        model = Model(strategy, 2)

        async def step() -> None:
            given: dict[str, Any] = {"stages": model.stages, "micro_batches": micro_batches(2)}
            await ar.pipeline(**{**given, **change})

        with pytest.raises(error, match=text):
            await strategy.run(step)


@pytest.mark.asyncio
async def test_it_is_for_steps_of_one_worker() -> None:
    with pytest.raises(ContextError, match="outside a step"):
        await ar.pipeline([abs], [(1, 1)])

    async def main(strategy: ar.Strategy) -> None:
        async def step() -> None:
            with pytest.raises(ContextError, match="under several workers"):
                await ar.pipeline([abs, abs], [(1, 1)])

        await strategy.run(step)

    await on_workers(2, 1, main)
