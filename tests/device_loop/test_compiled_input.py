"""Elements of compiled steps: read in chunks, used in order, given back, the same bits."""

import asyncio
import operator
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any
from unittest import mock

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.context import REGISTRY
from aioreplica.device_loop import _feeder
from aioreplica.errors import NonFiniteError
from tests.conftest import mirrored
from tests.replica.gated import me

jax = pytest.importorskip("jax")

from aioreplica.device_loop._compiled import _loop  # noqa: E402
from tests.device_loop.compiled_steps import adam, elements, model  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio, pytest.mark.slow]


async def test_steps_before_the_end_of_the_iterator_are_run(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)

    result = await pair.run_steps(step, iter(elements(pair, 5)), 64, compile="jax")

    assert (result.steps_run, w.version) == (5, 5)


async def test_an_iterator_that_fails_leaves_whole_steps(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)

    def failing() -> Iterator[Any]:
        yield from elements(pair, 3)
        raise ValueError("no more")

    iterator = failing()
    with pytest.raises(ValueError, match="no more") as caught:
        await pair.run_steps(step, iterator, 8, compile="jax")

    assert w.version == 3
    assert "after 3 complete steps" in caught.value.__notes__[0]


async def test_a_cancelled_call_publishes_nothing_of_its_steps(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)
    before = w.value.copy()
    waits = asyncio.Event()

    class Source:
        def __init__(self) -> None:
            self.elements = iter(elements(pair, 3))

        def __aiter__(self) -> "Source":
            return self

        async def __anext__(self) -> Any:
            for element in self.elements:
                return element
            waits.set()
            return await asyncio.Future()

    source = Source()
    run = asyncio.create_task(pair.run_steps(step, source, 8, compile="jax"))
    await waits.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run

    np.testing.assert_array_equal(w.value, before)
    again = await pair.run_steps(step, source, 3, compile="jax")
    assert (again.steps_run, w.version) == (3, 3)  # its elements went back


async def test_chunks_are_stacked_into_memory_that_is_free(pair: ar.Strategy) -> None:
    with pair.scope():
        total = ar.Variable(0, trainable=False, aggregation="sum")
    kept = []

    def step(ctx: ar.MultiStepContext, x: Any, number: Any) -> None:
        total.blocking.assign_add(x[0] * number)
        ctx.set_last_step_output("x", x)

    def numbers(count: int) -> Iterator[Any]:  # whatever is an array or a number is stacked
        for i in range(count):
            yield ar.PerReplica([np.full(3, i, np.int32)] * 2), 2

    for _ in range(2):
        result = await pair.run_steps(step, numbers(300), 300, compile="jax")
        kept.append(result.last_step_outputs["x"].values[0])

    assert total.value == 2 * 2 * 2 * sum(range(300))  # of two calls and two replicas
    np.testing.assert_array_equal(kept, np.full((2, 3), 299))


async def test_an_abort_while_elements_are_read_ahead_waits_for_the_program(
    pair: ar.Strategy,
) -> None:
    _, _, step = model(pair, adam)
    order: list[str] = []
    wait, hold = jax.block_until_ready, _loop.only_one

    @contextmanager
    def only_one(*args: Any) -> Iterator[None]:
        with hold(*args):
            try:
                yield
            finally:
                order.append("next")

    def waited(arrays: Any) -> Any:
        order.append("waited")
        return wait(arrays)

    with (
        mock.patch.object(_loop, "only_one", only_one),
        mock.patch.object(jax, "block_until_ready", waited),
        mock.patch.object(_loop.CompiledLoop, "_ahead", side_effect=RuntimeError("aborted")),
        pytest.raises(RuntimeError, match="aborted"),
    ):
        await pair.run_steps(step, iter(elements(pair, 4)), 4, compile="jax")

    assert order == ["waited", "next"]


async def test_chunks_are_progress_for_a_stall_timeout(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)
    published = w.value

    async def stream() -> AsyncIterator[Any]:
        for number, element in enumerate(elements(pair, 130)):
            if number == 128:
                [group] = pair._runtime.lifecycle.active_groups()
                async with asyncio.timeout(60):
                    while group.progress()[2] < 64:  # the steps of the first chunk
                        await asyncio.sleep(0)
                assert w.value is published
            yield element

    result = await pair.run_steps(step, stream(), 130, compile="jax")

    assert (result.steps_run, w.version) == (130, 130)


# --- whole chunks of iterators in memory ----------------------------------------------------------


async def later(found: Sequence[Any]) -> AsyncIterator[Any]:
    for element in found:
        yield element


KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "list": iter,
    "tuple": lambda found: iter(tuple(found)),
    "dict": lambda found: iter(dict(enumerate(found)).values()),
    "one by one": lambda found: (element for element in found),
    "async": later,
}


def sgd() -> ar.optimizers.Optimizer:
    return ar.optimizers.SGD(0.05)  # nothing but the variable is kept of its steps


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_elements_read_many_at_once_give_the_bits_of_those_read_one_by_one(
    count: int,
) -> None:
    found = {}
    async with mirrored(count) as strategy:
        w, _, step = model(strategy, sgd)
        start, batches = w.value.copy(), elements(strategy, 150)
        random.Random(1).shuffle(batches)
        for kind, iterator_of in KINDS.items():
            await w.assign(start)
            iterator, begun, runs = iterator_of(batches), w.version, []
            for wanted in (65, 70, 64):  # none fills its chunks
                result = await strategy.run_steps(step, iterator, wanted, compile="jax")
                runs.append((result.steps_run, w.version - begun))
            found[kind] = w.value.tobytes(), runs

    assert found["list"][1] == [(65, 65), (70, 135), (15, 150)]
    assert all(each == found["list"] for each in found.values())


async def test_no_more_is_read_from_memory_than_is_wanted(pair: ar.Strategy) -> None:
    _, _, step = model(pair, sgd)
    iterator, left = iter(elements(pair, 140)), []

    for wanted in (21, 64, 50):
        await pair.run_steps(step, iterator, wanted, compile="jax", every=16)
        left.append(operator.length_hint(iterator))

    assert left == [119, 55, 5]


@pytest.mark.parametrize("at", [1, 40, 99])
async def test_a_failed_step_gives_back_the_rest_of_a_chunk_in_order(
    pair: ar.Strategy, at: int
) -> None:
    w, _, step = model(pair, adam)
    batches = elements(pair, 100)
    good = batches[at][0].values[1][0, 0]
    batches[at][0].values[1][0, 0] = np.nan
    iterator, seen = iter(batches), []

    def note(ctx: ar.MultiStepContext, x: Any, y: Any) -> None:
        if me().blocking.replica_id_in_sync_group == 0:
            seen.append(x)

    with pytest.raises(NonFiniteError):
        await pair.run_steps(step, iterator, 100, compile="jax")
    assert w.version == at
    batches[at][0].values[1][0, 0] = good
    first = await pair.run_steps(step, iterator, 1, compile="jax")  # the same one again
    await pair.run_steps(note, iterator, 100)

    assert (first.steps_run, w.version) == (1, at + 1)
    assert [id(x) for x in seen] == [id(x.values[0]) for x, _ in batches[at + 1 :]]


async def test_elements_that_do_not_fit_come_behind_those_that_do(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)
    short = elements(pair, 1, size=3)
    iterator = iter([*elements(pair, 7), *short, *elements(pair, 2, seed=1), *short])

    for number, version in ((7, 7), (1, 8), (2, 10)):
        with pytest.raises(ValueError, match=f"step {number} differs") as caught:
            await pair.run_steps(step, iterator, 64, compile="jax")
        assert f"after {number} complete steps" in caught.value.__notes__[0]
        assert w.version == version

    last = await pair.run_steps(step, iterator, 64, compile="jax")  # a last incomplete batch
    assert (last.steps_run, w.version) == (1, 11)


class Breaking:
    """An iterator whose class a test declares to be in memory; it raises once, behind a few."""

    def __init__(self, found: Sequence[Any], at: int) -> None:
        self.found, self.at = iter(found), at

    def __iter__(self) -> "Breaking":
        return self

    def __next__(self) -> Any:
        self.at -= 1
        if self.at == -1:
            raise OSError("disk")
        return next(self.found)


async def test_an_error_in_memory_comes_behind_the_elements_before_it(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)
    batches = elements(pair, 12)
    bad = batches[3][0].values[0]
    good, bad[0, 0] = bad[0, 0], np.nan
    iterator = Breaking(batches, 9)

    with mock.patch.object(_feeder, "IN_MEMORY", {Breaking}):
        with pytest.raises(NonFiniteError):  # the error is known by then, and not lost
            await pair.run_steps(step, iterator, 64, compile="jax")
        assert w.version == 3
        bad[0, 0] = good
        with pytest.raises(OSError, match="disk") as caught:
            await pair.run_steps(step, iterator, 64, compile="jax")
        assert "after 6 complete steps" in caught.value.__notes__[-1]
        assert w.version == 9
        result = await pair.run_steps(step, iterator, 64, compile="jax")

    assert (result.steps_run, w.version) == (3, 12)


async def test_a_dict_that_grows_meanwhile_ends_the_loop_behind_what_was_read(
    pair: ar.Strategy,
) -> None:
    w, _, step = model(pair, sgd)
    start, batches = w.value.copy(), elements(pair, 200)
    data = dict(enumerate(batches))
    remove = pair.observers.add(
        ar.telemetry.Observer(write_published=lambda _: data.update({-1: batches[0]}))
    )

    with pytest.raises(RuntimeError, match="changed size during iteration") as caught:
        await pair.run_steps(step, iter(data.values()), 200, compile="jax", every=10)

    remove()
    done, found = w.version, w.value.copy()
    assert 10 <= done <= 10 + 2 * 64  # what was read ahead of the first publication
    assert f"after {done} complete steps" in caught.value.__notes__[0]
    await w.assign(start)
    await pair.run_steps(step, iter(batches), done, compile="jax", every=10)
    np.testing.assert_array_equal(w.value, found)


async def test_a_cancelled_call_gives_back_what_was_read_from_memory(pair: ar.Strategy) -> None:
    w, _, step = model(pair, sgd)
    start = w.value.copy()
    await pair.run_steps(step, iter(elements(pair, 100)), 100, compile="jax", every=32)
    expected, iterator = w.value.copy(), iter(elements(pair, 100))
    await w.assign(start)
    waits = asyncio.Event()
    loop, hold = asyncio.get_running_loop(), _loop.only_one

    def only_one(*args: Any) -> Any:
        loop.call_soon_threadsafe(waits.set)
        return hold(*args)

    with REGISTRY.once("compiled_execution", Lock), mock.patch.object(_loop, "only_one", only_one):
        run = asyncio.create_task(pair.run_steps(step, iterator, 90, compile="jax", every=32))
        await waits.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    np.testing.assert_array_equal(w.value, start)
    assert operator.length_hint(iterator) < 100  # elements were read
    again = await pair.run_steps(step, iterator, 200, compile="jax", every=32)
    assert again.steps_run == 100
    np.testing.assert_array_equal(w.value, expected)


async def test_a_dataset_goes_on_behind_its_last_complete_step(pair: ar.Strategy) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(240, 3)).astype(np.float32), rng.normal(size=240).astype(np.float32)
    data = ar.ArrayDataset((x, y), batch_size=8, shuffle=True, seed=3)
    w, _, step = model(pair, sgd)
    start = w.value.copy()
    async with pair.distribute_dataset(data) as batches:
        await pair.run_steps(step, batches, 30, compile="jax", every=3)
    whole = w.value.copy()

    await w.assign(start)
    positions, state = [], None
    for wanted in (7, 4, 19):
        async with pair.distribute_dataset(data) as batches:
            if state is not None:
                batches.load_state_dict(state)
            await pair.run_steps(step, batches, wanted, compile="jax", every=3)
            state = batches.state_dict()
            positions.append((state["epoch"], state["position"]))

    assert positions[:2] == [(0, 56), (0, 88)]
    np.testing.assert_array_equal(w.value, whole)
