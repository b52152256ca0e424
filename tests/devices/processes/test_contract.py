"""What an op may rely on, on a thread and in a device process alike."""

import asyncio
import contextvars
import decimal
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.cluster import LocalCommunicator

colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


async def in_step(strategy: ar.OneDeviceStrategy, step: Callable[[Any], Any]) -> Any:
    """Run an async function of the replica context as a step."""

    results = []

    async def run() -> None:
        results.append(await step(ar.get_replica_context()))

    async with strategy:
        await strategy.run(run)
    return results[0]


async def run_op(strategy: ar.OneDeviceStrategy, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one op in a step."""
    return await in_step(strategy, lambda ctx: ctx.run_on_device(fn, *args, **kwargs))


class RefusedError(Exception):
    """An error of the user, with a field."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def refuse(reason: str) -> None:
    raise RefusedError(reason)


def wait_for(started: str, released: str, log: str) -> None:
    """Tell that it runs, wait until it may end, and write that down; through named pipes."""
    Path(started).write_text("go")
    Path(released).read_text()
    append(log, "long")


def append(log: str, word: str) -> None:
    with Path(log).open("a") as file:
        file.write(word + " ")


def words_in(log: str) -> list[str]:
    return Path(log).read_text().split()


@pytest.fixture
def pipes(tmp_path: Path) -> tuple[str, str, str]:
    """Names of two pipes and a file, as `wait_for` takes them."""
    for name in ("started", "released"):
        os.mkfifo(tmp_path / name)
    return str(tmp_path / "started"), str(tmp_path / "released"), str(tmp_path / "log")


@pytest.mark.asyncio
async def test_arguments_and_results_of_all_kinds_come_through(
    strategy: ar.OneDeviceStrategy,
) -> None:
    cube = np.arange(24.0).reshape(2, 3, 4)
    given = {"list": [1, "two", None], "array": cube.transpose(2, 0, 1), "empty": np.empty((0, 3))}

    result = await run_op(strategy, lambda tree, *, factor: {**tree, "twice": factor * 2}, given,
                          factor=21)  # fmt: skip

    assert result["list"] == [1, "two", None]
    assert result["twice"] == 42
    np.testing.assert_array_equal(result["array"], given["array"])
    assert result["empty"].shape == (0, 3)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 700_000])
async def test_arrays_of_any_size_come_through_and_may_be_written(
    strategy: ar.OneDeviceStrategy, size: int
) -> None:
    result = await run_op(strategy, lambda array: (array.flags.writeable, array + 1),
                          np.arange(float(size)))  # fmt: skip

    assert result[0]
    np.testing.assert_array_equal(result[1], np.arange(1.0, size + 1.0))
    result[1][:] = 0


@pytest.mark.asyncio
async def test_arrays_of_any_kind_come_through_as_they_are(strategy: ar.OneDeviceStrategy) -> None:
    frozen = np.arange(5000.0)
    frozen.flags.writeable = False
    pairs = np.zeros(3, [("x", "f4"), ("y", "i8")])
    arrays = [
        *(np.ones((60, 70), kind) for kind in "?bBhHiIlLqQefdgFD"),
        *(np.ones((2, 3), kind, order="F") for kind in "?efD"),
        np.zeros((0, 4)), np.array(2.5), np.asfortranarray(np.ones((90, 80))), frozen, pairs,
        np.array(["2024-01-01"], "M8[D]"), np.array(["text"]), np.arange(4, dtype=">i4"),
        np.array([None, "object"]),
    ]  # fmt: skip

    result = await run_op(strategy, lambda: arrays)

    for got, sent in zip(result, arrays, strict=True):
        np.testing.assert_array_equal(got, sent)
        assert got.dtype == sent.dtype
        assert got.flags.f_contiguous == sent.flags.f_contiguous


@pytest.mark.asyncio
async def test_numbers_are_the_same_bit_by_bit(strategy: ar.OneDeviceStrategy) -> None:
    rng = np.random.default_rng(0)
    cube = rng.standard_normal((64, 48, 30), dtype=np.float32)
    whole = [cube, cube.T, cube.transpose(1, 2, 0), np.asfortranarray(cube)]
    gaps = cube[::-1, ::2]  # travels without its gaps, for which BLAS may round in another way

    def op() -> list[Any]:
        products = [(np.dot(each[0].T, each[0]),) for each in whole]
        return [*products, *((each.sum(), each.mean(axis=1)) for each in [*whole, gaps])]

    result = await run_op(strategy, op)

    for got, wanted in zip(result, op(), strict=True):
        for one, other in zip(got, wanted, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.asyncio
async def test_an_error_is_the_users_own_with_its_traceback_and_a_note(
    strategy: ar.OneDeviceStrategy,
) -> None:
    with pytest.raises(RefusedError, match="too late") as caught:
        await run_op(strategy, refuse, "too late")

    error = caught.value
    trace = error.__traceback__
    names = []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert error.reason == "too late"
    assert "in refuse" in str(error.__cause__) or "refuse" in names
    assert any("replica 0" in note for note in error.__notes__)


@pytest.mark.asyncio
async def test_context_variables_reach_the_op_and_changes_stay_there(
    strategy: ar.OneDeviceStrategy,
) -> None:
    nested: contextvars.ContextVar[str] = contextvars.ContextVar("nested", default="nested")

    def op() -> Any:
        seen = colour.get(), nested.get(), str(decimal.Decimal(1) / 3)
        colour.set("lost")
        with np.errstate(divide="ignore"):
            ignored = np.float64(1) / np.zeros(1)
        return *seen, np.geterr()["over"], ignored

    async def step(ctx: Any) -> Any:
        colour.set("red")
        decimal.getcontext().prec = 5
        with np.errstate(over="raise"):
            first = await ctx.run_on_device(op)
        return first, colour.get(), await ctx.run_on_device(op)

    first, after, second = await in_step(strategy, step)

    assert first[:4] == ("red", "nested", "0.33333", "raise")
    assert after == "red"
    assert second[:4] == ("red", "nested", "0.33333", "warn")


@pytest.mark.asyncio
async def test_a_variable_of_a_module_that_cannot_be_imported_there_has_a_twin(
    strategy: ar.OneDeviceStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, request = (
        ModuleType("loaded_from_a_file"),
        contextvars.ContextVar("request", default="none"),
    )
    vars(plugin)["request_id"] = request
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    token = request.set("x")
    try:
        assert await run_op(strategy, pow, 2, 3) == 8
        assert await run_op(strategy, lambda: request.get()) == "x"
    finally:
        request.reset(token)


@pytest.mark.asyncio
async def test_context_variables_of_the_library_stay_in_the_program(
    strategy: ar.OneDeviceStrategy,
) -> None:
    with strategy.scope():
        v = ar.Variable(1.0)
    with strategy.extended.colocate_vars_with(v):
        assert await run_op(strategy, pow, 2, 3) == 8


@pytest.mark.asyncio
async def test_ops_run_in_order_and_a_queued_one_can_be_taken_back(
    strategy: ar.OneDeviceStrategy, pipes: tuple[str, str, str]
) -> None:
    started, released, log = pipes

    async def step(ctx: Any) -> None:
        long = asyncio.create_task(ctx.run_on_device(wait_for, *pipes))
        second = asyncio.create_task(ctx.run_on_device(append, log, "second"))
        third = asyncio.create_task(ctx.run_on_device(append, log, "third"))
        await asyncio.sleep(0)
        await asyncio.to_thread(Path(started).read_text)
        second.cancel()
        await asyncio.wait([second])
        await asyncio.to_thread(Path(released).write_text, "go")
        await asyncio.gather(long, third)
        assert second.cancelled()

    await in_step(strategy, step)

    assert words_in(log) == ["long", "third"]


@pytest.mark.asyncio
async def test_cancelling_waits_for_the_op_that_runs(
    strategy: ar.OneDeviceStrategy, pipes: tuple[str, str, str]
) -> None:
    started, released, log = pipes
    run = asyncio.ensure_future(run_op(strategy, wait_for, *pipes))
    await asyncio.to_thread(Path(started).read_text)

    run.cancel()
    await asyncio.sleep(0)
    assert not run.done()
    await asyncio.to_thread(Path(released).write_text, "go")
    with pytest.raises(asyncio.CancelledError):
        await run

    assert words_in(log) == ["long"]
    assert await run_op(strategy, pow, 2, 10) == 1024


@pytest.mark.asyncio
async def test_the_replica_is_known_and_draws_the_same_numbers(
    strategy: ar.OneDeviceStrategy,
) -> None:
    async def step(ctx: Any) -> Any:
        def op() -> Any:
            here = ar.get_replica_context()
            assert here is not None
            return (
                here.replica_id_in_sync_group, ctx.num_replicas_in_sync, here.device,
                ar.current_device(), ctx.rng("a").random(3).tolist(),
                here.shared_rng("b").random(), ar.get_strategy().num_replicas_in_sync,
            )  # fmt: skip

        return await ctx.run_on_device(op), op()

    (*in_op, _), (*here, _) = await in_step(strategy, step)

    assert in_op == here


@pytest.mark.asyncio
async def test_records_logs_and_warnings_of_an_op_arrive(
    strategy: ar.OneDeviceStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    def op(ctx: Any) -> None:
        ctx.record("loss", 0.25)
        logging.getLogger("tests.op").warning("step %d", 7)
        warnings.warn("odd numbers", UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await in_step(strategy, lambda ctx: ctx.run_on_device(op, ctx))

    assert [event.value for event in strategy.events.events("scalar")] == [0.25]
    assert caplog.messages == ["step 7"]
    assert [(str(w.message), w.filename) for w in caught] == [("odd numbers", __file__)]


@pytest.mark.asyncio
async def test_a_warning_that_is_an_error_fails_the_op(strategy: ar.OneDeviceStrategy) -> None:
    with pytest.raises(UserWarning, match="odd"):
        await run_op(strategy, lambda: warnings.warn("odd", UserWarning, stacklevel=1))


@pytest.mark.asyncio
async def test_filters_by_module_judge_warnings_of_ops(strategy: ar.OneDeviceStrategy) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module=__name__.replace(".", r"\."))
        with pytest.raises(UserWarning, match="odd"):
            await run_op(strategy, lambda: warnings.warn("odd", UserWarning, stacklevel=1))


@pytest.mark.asyncio
async def test_numbers_and_texts_can_be_recorded_and_nothing_else(
    strategy: ar.OneDeviceStrategy,
) -> None:
    class Name(StrEnum):
        LOSS = "loss"

    def record(name: str, make_value: Callable[[], Any]) -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        ctx.record(name, make_value())

    for make_value in (lambda: np.ones(3), threading.Lock):  # the second cannot be pickled
        with pytest.raises(TypeError, match=r"Event 'loss' takes a number or a text"):
            await run_op(strategy, record, "loss", make_value)
    await run_op(strategy, record, "loss", lambda: np.ones(1))
    await run_op(strategy, lambda: record(Name.LOSS, lambda: Name.LOSS))

    scalars = strategy.events.events("scalar")
    assert [(event.name, event.value) for event in scalars] == [("loss", 1.0), ("loss", "loss")]


@pytest.mark.asyncio
async def test_ops_read_the_newest_values_of_variables_and_cannot_write_them(
    strategy: ar.OneDeviceStrategy,
) -> None:
    with strategy.scope():
        large = ar.Variable(np.zeros((100, 90), order="F"), name="large")
        small = ar.Variable(1.0, name="small")
        table = ar.Variable(np.arange(6.0).reshape(3, 2), name="table")

    def op() -> Any:
        rows = ar.autodiff.embedding_lookup(table, [2, 0])
        return (large.value.sum(), small + 1, large.name, large.version, large.shape, rows,
                large.value.flags.writeable, large.value.flags.f_contiguous)  # fmt: skip

    def spoil() -> None:
        large.value[0] = 1.0

    for i in range(3):
        await large.assign(np.full((100, 90), float(i), order="F"))
        total, more, *rest = await run_op(strategy, op)
        assert (total, more) == (9000.0 * i, 2.0)
        assert rest[:3] == ["large", i + 1, (100, 90)]
        np.testing.assert_array_equal(rest[3], [[4.0, 5.0], [0.0, 1.0]])
        assert not rest[4]
    with pytest.raises(ValueError, match="read-only"):
        await run_op(strategy, spoil)


@pytest.mark.asyncio
async def test_ops_read_variables_of_a_strategy_that_cannot_be_pickled(
    devices: tuple[str, str],
) -> None:
    (worker,) = LocalCommunicator.group(1)
    async with ar.MultiWorkerMirroredStrategy(worker) as strategy:
        with strategy.scope():
            w = ar.Variable(np.arange(4.0))

        async def step() -> float:
            ctx = ar.get_replica_context()
            assert ctx is not None
            return await ctx.run_on_device(lambda: float(w.value.sum()))

        assert strategy.local_results(await strategy.run(step)) == (6.0,) * len(devices)


@pytest.mark.asyncio
async def test_large_gradients_are_added_to_the_sums_of_the_program(
    devices: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.optimizers._accumulator.INLINE_STEP_BYTES", 0)
    async with ar.MirroredStrategy(list(devices)) as strategy:
        with strategy.scope():
            w, window = ar.Variable(np.zeros(3)), ar.GradientAccumulator(ar.optimizers.SGD(1.0))

        async def step() -> None:
            await window.add([(np.ones(3), w)])
            await window.add([(np.full(3, 2.0), w)])
            await window.apply()

        await strategy.run(step)

    assert w.value.tolist() == [-6.0] * 3


async def minimize_on(strategy: ar.OneDeviceStrategy) -> list[Any]:
    """Train for three steps; return all numbers that come of it."""
    x = np.random.default_rng(0).standard_normal((32, 200))
    with strategy.scope():
        optimizer = ar.optimizers.Adam(0.01, loss_scale=4.0)
        w = ar.Variable(np.ones((200, 30)), name="w")
        b = ar.Variable(np.zeros(30), name="b")

    def loss() -> Any:
        return ar.Weighted(anp.sum(anp.tanh(b.value + x @ w.value) ** 2), len(x))

    async def step(_ctx: Any) -> Any:
        value = await optimizer.minimize(loss)
        [(gradient, variable)] = await optimizer.compute_gradients(loss, [b])
        assert variable is b
        return value.total, np.asarray(gradient.total)

    told = [await in_step(strategy, step) for _ in range(3)]
    return [w.value, b.value, *(number for each in told for number in each)]


@pytest.mark.asyncio
async def test_minimize_takes_the_same_step_bit_by_bit(devices: tuple[str, str]) -> None:
    found = [await minimize_on(ar.OneDeviceStrategy(name)) for name in devices]

    for one, other in zip(*found, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.asyncio
async def test_a_loss_that_reads_no_variables_list_sorts_them_by_creation(
    strategy: ar.OneDeviceStrategy,
) -> None:
    with strategy.scope():
        optimizer = ar.optimizers.SGD(0.5)
        first, second = ar.Variable(1.0, name="first"), ar.Variable(2.0, name="second")

    pairs = await in_step(
        strategy, lambda _: optimizer.compute_gradients(lambda: second.value * first.value)
    )

    assert [variable for _, variable in pairs] == [first, second]
    assert [float(gradient) for gradient, _ in pairs] == [2.0, 1.0]
