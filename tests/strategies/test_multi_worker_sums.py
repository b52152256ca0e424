"""Sums over workers: what is compared is what is sent, and which sums are equal in every bit."""

import dataclasses
import gc
import itertools
import warnings
import weakref
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import MergeMismatchError
from aioreplica.strategies import MultiWorkerMirroredStrategy
from tests.strategies.workers import on_workers

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]
Strategy = MultiWorkerMirroredStrategy
LARGE = np.arange(1000.0)
DIVISIONS = [(4, 1), (2, 2)]


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def rank_of(strategy: Strategy) -> int:
    assert strategy._runtime.workers is not None
    return strategy._runtime.workers.rank


# ---- what is compared is what is sent --------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "total"),
    [
        ((1.5, np.float64(2.0)), 3.5),
        ((np.float64(1.5), 2), 3.5),
        ((True, np.float64(2.5)), 3.5),
        ((np.complex128(1j), 2.0), 2 + 1j),
        ((1j, np.complex128(2.0)), 2 + 1j),
    ],
)
@pytest.mark.parametrize("beside", [np.arange(3.0), LARGE], ids=["small", "large"])
async def test_a_python_number_and_its_twin_in_numpy_are_added_up(
    own: tuple[Any, Any], total: Any, beside: Any
) -> None:
    async def step(value: Any) -> Any:
        return await me().all_reduce("sum", value)

    async def program(strategy: Strategy) -> Any:
        value = {"loss": own[rank_of(strategy)], "other": beside, "count": 1}
        return strategy.local_results(await strategy.run(step, (value,)))[0]

    for rank, found in enumerate(await on_workers(2, 1, program)):
        assert found["loss"] == total
        assert isinstance(found["loss"], np.generic) is isinstance(own[rank], np.generic)
        assert found["other"].tolist() == (2 * beside).tolist()
        assert found["count"] == 2


async def test_weights_and_reduce_take_either_kind_of_number() -> None:
    async def step(weight: Any) -> Any:
        total = await me().all_reduce("sum", ar.Weighted(np.float64(6.0), weight))
        return total.mean()

    async def program(strategy: Strategy) -> Any:
        number = (2.0, np.float64(4.0))[rank_of(strategy)]
        mean = strategy.local_results(await strategy.run(step, (number,)))[0]
        parts = strategy.distribute_values_from_function(lambda _: number)
        tree = await strategy.reduce("sum", {"a": parts, "b": ar.Weighted(parts, parts)})
        return mean, tree["a"], tree["b"].total, tree["b"].weight

    assert await on_workers(2, 1, program) == [(2.0, 6.0, 6.0, 6.0)] * 2


async def test_two_workers_add_up_or_both_are_told() -> None:
    """All pairs of kinds, dtypes and shapes beside an array: never a number that nobody brought."""
    values = [
        1, 1.0, True, 1 + 0j, np.float64(1), np.float32(1), np.int64(1), np.bool_(True),
        np.complex128(1), np.array(1.0), np.ones(1), np.ones(1, "f4"), np.ones(2, "i4"),
        np.ones(400, "f4"), np.ones(200), np.ones((2, 100)),
        ar.IndexedSlices(np.ones((1, 2)), [0], (4, 2)),
        ar.IndexedSlices(np.ones((1, 2), "f4"), [0], (4, 2)),
        ar.IndexedSlices(np.ones((1, 2)), [0], (5, 2)),
    ]  # fmt: skip
    pairs = list(itertools.combinations_with_replacement(range(len(values)), 2))

    async def step(value: Any) -> Any:
        return await me().all_reduce("sum", [value, LARGE, 5])

    async def program(strategy: Strategy) -> list[Any]:
        found: list[Any] = []
        for pair in pairs:
            try:
                result = await strategy.run(step, (values[pair[rank_of(strategy)]],))
            except MergeMismatchError:
                found.append(None)
            else:
                total, other, five = strategy.local_results(result)[0]
                assert (other.tolist(), five) == ((2 * LARGE).tolist(), 10)
                found.append(total.to_dense() if isinstance(total, ar.IndexedSlices) else total)
        return found

    for pair, *totals in zip(pairs, *await on_workers(2, 1, program), strict=True):
        assert [total is None for total in totals] in ([True] * 2, [False] * 2), pair
        if totals[0] is not None:
            assert np.asarray(totals[0]).max() == np.asarray(totals[1]).max() == 2, pair
        else:
            assert pair[0] != pair[1]


async def test_a_sum_that_is_sent_in_another_form_is_a_mismatch() -> None:
    """The bytes decide, even where the calls are alike: the error shows what is sent."""

    async def step(value: Any) -> Any:
        return await me().all_reduce("mean", value)

    async def program(strategy: Strategy) -> Any:
        value = np.ones(3, ("i8", "f8")[rank_of(strategy)])
        with pytest.raises(MergeMismatchError) as caught:
            await strategy.run(step, (value,))
        return caught.value.reason

    for reason in await on_workers(2, 2, program):
        assert "MEAN; int64[3] sent as float64[3] on worker 0" in reason
        assert "MEAN; float64[3] on worker 1" in reason


# ---- which sums are equal in every bit -------------------------------------------------------


def numbers(dtype: str, *, exact: bool) -> list[Any]:
    """Return what four replicas bring; sums of float32 are exact if asked for."""
    rng = np.random.default_rng(3)
    values = rng.integers(-40, 40, (4, 50)) if exact else rng.normal(size=(4, 50)) * 100
    return list(values.astype(dtype))


async def reduced(division: tuple[int, int] | None, op: str, rows: list[Any]) -> list[bytes]:
    async def step() -> Any:
        ctx = me()
        return await ctx.all_reduce(op, rows[ctx.replica_id_in_sync_group])

    async def program(strategy: ar.Strategy) -> Any:
        return strategy.local_results(await strategy.run(step))[0]

    if division is None:
        async with ar.MirroredStrategy([f"cpu:{i}" for i in range(4)]) as strategy:
            found = [await program(strategy)]
    else:
        found = await on_workers(*division, program)
    return [np.asarray(each).tobytes() for each in found]


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f4", "f8", "c16", "i4", "?"])
async def test_the_table_of_equal_sums(dtype: str, op: str) -> None:
    """The rows of the page: one replica each as one worker of all, others where sums are exact."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    if dtype == "c16" and op in ("min", "max"):
        pytest.skip("complex numbers have no order")
    rows = numbers(dtype, exact=False)
    one = await reduced(None, op, rows)
    assert set(await reduced((4, 1), op, rows)) == set(one)
    if dtype in ("i4", "?") or op in ("min", "max"):
        assert set(await reduced((2, 2), op, rows)) == set(one)
    exact = numbers(dtype, exact=True)
    assert set(await reduced((2, 2), op, exact)) == set(await reduced(None, op, exact))


@pytest.mark.parametrize("aggregation", [*ar.VariableAggregation][1:])
async def test_on_read_variables_of_half_precision_stay_so(
    aggregation: ar.VariableAggregation,
) -> None:
    async def program(strategy: ar.Strategy) -> Any:
        with strategy.scope():
            v = ar.Variable(
                np.float16([1, 2]), aggregation=aggregation,
                synchronization=ar.VariableSynchronization.ON_READ,
            )  # fmt: skip
        value = await strategy.extended.read_var(v)
        assert value.dtype == np.float16
        return value.tolist()

    first, second = await on_workers(2, 1, program)
    assert first == second == ([2, 4] if aggregation.name == "SUM" else [1, 2])


@pytest.mark.parametrize("division", DIVISIONS)
async def test_half_precision_is_rounded_once_over_all_workers(division: tuple[int, int]) -> None:
    """In between it is float32: no overflow that the end has not, and no second rounding."""
    rows = [np.float16([v, w, 1]) for v, w in [(6e4, 2048), (6e4, 1), (-6e4, 1), (-6e4, 2)]]
    slices = [ar.IndexedSlices(row.reshape(3, 1), [0, 1, 2], (4, 1)) for row in rows]

    async def step() -> Any:
        ctx = me()
        i = ctx.replica_id_in_sync_group
        return await ctx.all_reduce("sum", (rows[i], slices[i], rows[i][1]))

    async def program(strategy: ar.Strategy) -> Any:
        dense, sparse, number = strategy.local_results(await strategy.run(step))[0]
        parts = strategy.distribute_values_from_function(lambda v: rows[v.replica_id_in_sync_group])
        outside = await strategy.reduce("sum", parts)
        over_axis = await strategy.reduce("sum", parts, axis=0)
        assert {dense.dtype, sparse.dtype, number.dtype, outside.dtype} == {np.dtype("f2")}
        return dense, sparse.to_dense()[:3, 0], outside, [number], [over_axis]

    for found in await on_workers(*division, program):
        assert [np.asarray(each).tolist() for each in found] == [
            [0, 2052, 4], [0, 2052, 4], [0, 2052, 4], [2052], [2056],
        ]  # fmt: skip


async def test_variables_and_gradients_of_half_precision_are_rounded_once() -> None:
    brought = [2048.0, 1.0, 1.0, 2.0]

    async def program(strategy: ar.Strategy) -> Any:
        with strategy.scope():
            mirrored = ar.Variable(np.zeros(1, "f2"), aggregation="sum")
            own = ar.Variable(np.zeros(1, "f2"), synchronization="on_read", aggregation="sum")
            trained = ar.Variable(np.zeros(1, "f2"))
            sgd = ar.optimizers.SGD(1.0)

        async def step() -> None:
            mine = np.float16([brought[me().replica_id_in_sync_group]])
            await mirrored.assign(mine)
            own.assign(mine)
            await sgd.apply_gradients([(mine, trained)])

        await strategy.run(step)
        return mirrored.value[0], (await strategy.extended.read_var(own))[0], trained.value[0]

    for found in await on_workers(2, 2, program):
        assert found == (2052, 2052, -2052)


# ---- over an axis, and in other libraries ----------------------------------------------------


@pytest.mark.parametrize("dtype", ["f8", "f2", "i2", "u1", "?", "bfloat16"])
@pytest.mark.parametrize("op", ["min", "max"])
async def test_a_worker_without_elements_has_a_part_in_the_extreme(op: str, dtype: str) -> None:
    """The last batch may leave it nothing; what the others have decides."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    sign = -1 if op == "max" and dtype != "u1" else 1
    rows = (sign * np.array([[2, 3], [3, 2]])).astype(dtype)
    if dtype == "?":
        rows = np.full((2, 2), op == "min")

    async def program(strategy: Strategy) -> Any:
        own = rows[:0] if rank_of(strategy) == 1 else rows
        parts = [own, rows[:0]]
        return await strategy.reduce(op, ar.PerReplica(parts), axis=0)

    for found in await on_workers(2, 2, program):
        assert found.dtype == rows.dtype
        assert found.tolist() == getattr(np, op)(rows, axis=0).tolist()


@pytest.mark.parametrize("op", ["min", "max", "mean"])
async def test_all_workers_say_that_there_are_no_elements(op: str) -> None:
    async def program(strategy: Strategy) -> Any:
        parts = strategy.distribute_values_from_function(lambda _: np.zeros(0))
        with pytest.raises(ValueError, match=f"{op.upper()} over axis 0 of empty components"):
            await strategy.reduce(op, {"loss": parts}, axis=0)
        return await strategy.reduce("sum", parts, axis=0)

    assert await on_workers(2, 1, program) == [0.0] * 2


@pytest.mark.slow  # torch is imported
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "int32"])
async def test_tensors_come_back_as_tensors_of_their_dtype(name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)

    async def step() -> Any:
        ctx = me()
        x = torch.ones(4, dtype=dtype)
        tree = {op: await ctx.all_reduce(op, x) for op in ("sum", "mean", "min", "max")}
        tree["gather"] = await ctx.all_gather(x, 0)
        tree["all to all"] = await ctx.all_to_all(x)
        tree["scatter"] = await ctx.reduce_scatter("max", x)
        return tree

    async def program(strategy: Strategy) -> Any:
        found = dict(strategy.local_results(await strategy.run(step))[0])
        parts = strategy.distribute_values_from_function(lambda _: torch.ones(3, dtype=dtype))
        for op in ("sum", "mean", "min", "max"):
            found[f"axis {op}"] = await strategy.reduce(op, parts, axis=0)
        found["outside"] = await strategy.gather(parts, 0)
        return found

    for found in await on_workers(2, 2, program):
        for what, tensor in found.items():
            assert isinstance(tensor, torch.Tensor), what
            if name != "int32" or what not in ("mean", "sum", "axis mean", "axis sum"):
                assert tensor.dtype == dtype, what
        assert found["axis mean"].tolist() == 1
        assert found["axis max"].tolist() == 1


# ---- options of a call -----------------------------------------------------------------------


async def test_what_is_compared_does_not_depend_on_the_calls_before() -> None:
    """Another worker has made other calls before, and would see a difference."""

    async def step(rank: int) -> None:
        whole, point = (ar.CommunicationOptions(timeout_seconds=each) for each in (30, 30.0))
        await me().all_reduce("sum", np.ones(3), whole)
        await me().all_reduce("sum", np.ones(3 + rank), point)

    with pytest.raises(MergeMismatchError, match=r"seconds=30\.0\); float64\[3\] on worker 0"):
        await on_workers(2, 1, lambda strategy: strategy.run(step, args=(rank_of(strategy),)))


@dataclasses.dataclass
class Halved(ar.collectives.Compression):
    """A user's own, which compares by value and so has no hash."""

    bits: int = 16

    def __post_init__(self) -> None:
        super().__init__(error_feedback=False)

    def encode(self, value: Any) -> Any:
        return value.astype(np.float16)

    def decode(self, code: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return code.astype(dtype)


async def test_a_compression_needs_no_hash() -> None:
    totals: list[Any] = []

    async def step() -> None:
        options = ar.CommunicationOptions(compression=Halved())
        totals.append(await me().all_reduce("sum", np.full(1000, 1.5, np.float32), options))

    await on_workers(2, 1, lambda strategy: strategy.run(step))
    assert [total.dtype for total in totals] == [np.float32] * 2
    assert np.all(np.array(totals) == 3)


async def test_nothing_holds_the_options_of_a_call_when_it_is_over() -> None:
    held: list[weakref.ref[Any]] = []

    async def program(strategy: Strategy) -> None:
        options = ar.CommunicationOptions(compression=ar.collectives.TopK(0.01))
        held.append(weakref.ref(options.compression))

        async def step() -> Any:
            return await me().all_reduce("sum", np.ones(10_000, np.float32), options)

        await strategy.run(step)

    await on_workers(2, 1, program)
    gc.collect()
    assert [each() for each in held] == [None, None]


# ---- in which context ------------------------------------------------------------------------


async def test_observers_are_told_of_every_collective_in_the_context_of_its_call() -> None:
    request = ContextVar("request", default="")
    told: set[tuple[str, str]] = set()

    def note(merge: Any, _error: object) -> None:
        told.add((merge.describe().split()[0], request.get()))

    async def step() -> None:
        await me().all_reduce("sum", np.ones(3))
        await me().start_all_reduce("sum", np.ones(300))
        await me().all_gather(np.ones(3), 0)

    async def program(strategy: Strategy) -> None:
        strategy.observers.add(ar.telemetry.Observer(merge_ended=note))
        request.set("request 7")
        await strategy.run(step)

    await on_workers(2, 1, program)
    assert told == {
        ("all_reduce", "request 7"),
        ("start_all_reduce", "request 7"),
        ("all_gather", "request 7"),
    }


async def test_a_small_sum_obeys_the_errstate_of_its_call() -> None:
    found: list[float] = []

    async def step() -> None:
        with np.errstate(over="ignore"):
            found.extend(await me().all_reduce("sum", np.full(3, 3e38, np.float32)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await on_workers(2, 1, lambda strategy: strategy.run(step))
    assert found == [np.inf] * 6
