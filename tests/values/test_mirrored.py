"""Mirrored variables: written by all replicas together, read without tearing."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, MergeMismatchError

VERBS = ["assign", "assign_add", "assign_sub"]
START = [10.0, 20.0]


def new(strategy: ar.Strategy, value: Any = START, aggregation: str = "none") -> Any:
    with strategy.scope():
        name = None if strategy._runtime.variable_table.has("w") else "w"
        return ar.Variable(value, name=name, aggregation=aggregation)


def naive(verb: str, old: Any, value: Any) -> Any:
    return {"assign": value, "assign_add": old + value, "assign_sub": old - value}[verb]


def components(variable: Any) -> list[Any]:
    return [part.tolist() for part in variable.components]


async def assign_in_replicas(
    strategy: ar.Strategy, variable: Any, verb: str, values: list[Any]
) -> None:
    async def step(value: Any) -> None:
        await getattr(variable, verb)(value)

    await strategy.run(step, args=(ar.PerReplica(values),))


# --- in replica context -----------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
async def test_replicas_write_the_aggregate(
    gang: ar.MirroredStrategy, verb: str, aggregation: str
) -> None:
    variable = new(gang, aggregation=aggregation)
    values = [np.array([1.0, 2.0]) * (i + 1) for i in range(gang.num_replicas_in_sync)]
    aggregate = {"sum": sum(values), "mean": sum(values) / len(values)}.get(aggregation, values[0])

    await assign_in_replicas(gang, variable, verb, values)

    expected = naive(verb, np.array(START), aggregate).tolist()
    assert components(variable) == [expected] * len(values)
    assert variable.version == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
async def test_without_an_aggregation_replicas_cannot_write(
    pair: ar.MirroredStrategy, verb: str
) -> None:
    variable = new(pair)

    with pytest.raises(ValueError, match=r"(?s)'w'.*aggregation=.*cross-replica"):
        await assign_in_replicas(pair, variable, verb, [np.zeros(2)] * 2)
    assert components(variable) == [START] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
@pytest.mark.parametrize("kind", ["list", "tuple", "variable", "number"])
async def test_replicas_may_write_anything_that_becomes_an_array(
    pair: ar.MirroredStrategy, aggregation: str, kind: str
) -> None:
    """What works in cross-replica context works here."""
    start: Any = 1.0 if kind == "number" else [1.0, 1.0]
    value: Any = {"list": [2.0, 4.0], "tuple": (2.0, 4.0), "number": 2.0}.get(kind)
    if kind == "variable":
        value = new(pair, [2.0, 4.0])
    variable = new(pair, start, aggregation)

    await assign_in_replicas(pair, variable, "assign", [value, value])

    factor = 2.0 if aggregation == "sum" else 1.0
    assert components(variable) == [(factor * np.asarray(value)).tolist()] * 2


@pytest.mark.asyncio
async def test_the_sum_is_in_replica_order(triple: ar.MirroredStrategy) -> None:
    variable = new(triple, np.float32(0.0), "sum")

    await assign_in_replicas(triple, variable, "assign", list(np.float32([1e8, -1e8, 1.0])))

    assert components(variable) == [1.0] * 3


@pytest.mark.asyncio
async def test_one_replica_writes_its_own_value(solo: ar.OneDeviceStrategy) -> None:
    variable = new(solo, aggregation="mean")

    await assign_in_replicas(solo, variable, "assign_add", [np.array([1.0, 1.0])])

    assert components(variable) == [[11.0, 21.0]]


@pytest.mark.asyncio
async def test_each_replica_reads_its_component(pair: ar.MirroredStrategy) -> None:
    variable = new(pair, 0.0)
    await pair.extended.update(
        variable, lambda v: v.assign(float(ar.get_update_replica_id() or 0) + 5.0)
    )

    async def step() -> float:
        return float(variable.value)

    assert (await pair.run(step)).values == (5.0, 6.0)
    assert float(variable.value) == 5.0


@pytest.mark.asyncio
async def test_after_the_await_every_replica_reads_the_new_value(
    gang: ar.MirroredStrategy,
) -> None:
    variable = new(gang, 0.0, "sum")

    async def step() -> tuple[float, float]:
        before = float(variable.value)
        await variable.assign_add(1.0)
        return before, float(variable.value)

    before, after = await gang.run(step)

    count = gang.num_replicas_in_sync
    assert before.values == (0.0,) * count
    assert after.values == (float(count),) * count


@pytest.mark.asyncio
async def test_a_value_may_be_reused_after_the_await(pair: ar.MirroredStrategy) -> None:
    variable = new(pair, np.zeros(2), "only_first_replica")

    async def step() -> None:
        value = np.ones(2)
        await variable.assign(value)
        value[:] = 9.0

    await pair.run(step)

    assert components(variable) == [[1.0, 1.0]] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("value", [np.zeros(3), 1.0, np.zeros((2, 1)), np.zeros(2, complex)])
async def test_replicas_cannot_write_values_of_another_shape_or_dtype(
    pair: ar.MirroredStrategy, value: Any
) -> None:
    variable = new(pair, aggregation="mean")

    with pytest.raises(ValueError, match="'w'"):
        await assign_in_replicas(pair, variable, "assign", [value, value])
    assert (components(variable), variable.version) == ([START] * 2, 0)


@pytest.mark.asyncio
async def test_replicas_that_write_different_variables_do_not_meet(
    pair: ar.MirroredStrategy,
) -> None:
    variables = [new(pair, 0.0, "sum"), new(pair, 0.0, "sum")]

    async def step() -> None:
        index = ar.get_replica_context().replica_id_in_sync_group
        await variables[index].assign(1.0)

    with pytest.raises(MergeMismatchError):
        await pair.run(step)
    assert [components(variable) for variable in variables] == [[0.0, 0.0]] * 2


@pytest.mark.asyncio
async def test_a_write_that_is_never_awaited_fails_the_run(pair: ar.MirroredStrategy) -> None:
    variable = new(pair, 0.0, "sum")

    async def step() -> None:
        variable.assign(1.0)

    with pytest.raises(ContextError, match=r"assign.*test_mirrored\.py"):
        await pair.run(step)
    assert components(variable) == [0.0, 0.0]


# --- in cross-replica context -----------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("where", ["outside", "scope", "merge"])
async def test_one_value_goes_to_all_components(
    pair: ar.MirroredStrategy, verb: str, where: str
) -> None:
    variable = new(pair)
    value = np.array([1.0, 2.0])

    async def merge(_strategy: ar.Strategy) -> None:
        await getattr(variable, verb)(value)

    async def step() -> None:
        await ar.get_replica_context().merge_call(merge)

    if where == "merge":
        await pair.run(step)
    elif where == "scope":
        with pair.scope():
            await merge(pair)
    else:
        await merge(pair)

    assert components(variable) == [naive(verb, np.array(START), value).tolist()] * 2
    assert variable.version == 1


@pytest.mark.asyncio
async def test_a_mirrored_value_is_unwrapped(pair: ar.MirroredStrategy) -> None:
    variable = new(pair)

    await variable.assign(ar.Mirrored([np.array([1.0, 2.0])] * 2))

    assert components(variable) == [[1.0, 2.0]] * 2


@pytest.mark.asyncio
async def test_a_mirrored_value_of_another_strategy_does_not_fit(pair: ar.MirroredStrategy) -> None:
    variable = new(pair)

    with pytest.raises(ValueError, match="'w'"):
        await variable.assign(ar.Mirrored([np.zeros(2)] * 3))


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
async def test_a_per_replica_value_must_be_reduced_first(
    pair: ar.MirroredStrategy, verb: str
) -> None:
    variable = new(pair)

    with pytest.raises(ValueError, match=r"PerReplica.*reduce"):
        await getattr(variable, verb)(ar.PerReplica([np.zeros(2)] * 2))
    assert components(variable) == [START] * 2


@pytest.mark.asyncio
async def test_another_strategy_in_charge_is_a_context_error(pair: ar.MirroredStrategy) -> None:
    variable = new(pair)
    other = ar.OneDeviceStrategy("cpu:2")

    async def step() -> None:
        await variable.assign(np.zeros(2))

    async with other:
        with other.scope(), pytest.raises(ContextError, match="'w'"):
            await variable.assign(np.zeros(2))
        with pytest.raises(ContextError, match="'w'"):
            await other.run(step)
    assert components(variable) == [START] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("float32", 1, True),
        ("float32", 1.5, True),
        ("float32", np.float64(1.5), True),
        ("float32", np.int64(2), True),
        ("int32", 3, True),
        ("uint8", 3, True),
        ("int32", 1.5, False),
        ("int32", np.float32(1), False),
        ("float64", 1j, False),
        ("complex64", 1.5, True),
        ("bool", True, True),
        ("bool", 2.0, False),
        ("float32", "1", False),
        ("float32", None, False),
    ],
)
async def test_a_value_of_another_kind_does_not_fit(
    pair: ar.MirroredStrategy, dtype: str, value: Any, fits: bool
) -> None:
    variable = new(pair, np.zeros((), dtype))

    if fits:
        await variable.assign(value)
        assert components(variable) == [np.asarray(value).astype(dtype).tolist()] * 2
    else:
        with pytest.raises((ValueError, TypeError), match="'w'"):
            await variable.assign(value)
    assert variable.dtype == dtype


@pytest.mark.asyncio
async def test_plain_and_mirrored_variables_round_alike(pair: ar.MirroredStrategy) -> None:
    start, step = np.float32(1.0), np.float64(2.0**-24 + 2.0**-50)
    mirrored, plain = new(pair, start), ar.Variable(start)

    await mirrored.assign_add(step)
    await plain.assign_add(step)

    assert float(mirrored.value) == float(plain.value)


# --- versions ---------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
async def test_a_reader_keeps_what_it_read(pair: ar.MirroredStrategy, verb: str) -> None:
    variable = new(pair, aggregation="mean")
    held, parts = variable.value, variable.components

    await assign_in_replicas(pair, variable, verb, [np.ones(2)] * 2)
    await getattr(variable, verb)(np.ones(2))

    assert held.tolist() == START
    assert [part.tolist() for part in parts] == [START] * 2
    assert not variable.value.flags.writeable
    assert variable.version == 2


@pytest.mark.asyncio
async def test_a_written_array_is_not_shared_with_the_variable(pair: ar.MirroredStrategy) -> None:
    variable, source = new(pair), np.array([1.0, 2.0])

    await variable.assign(source)
    source[0] = 99.0

    assert components(variable) == [[1.0, 2.0]] * 2
    assert source.flags.writeable


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_thread_never_reads_half_a_write(pair: ar.MirroredStrategy) -> None:
    variable = new(pair, np.zeros(10_000))
    torn: list[int] = []
    reads, begun, stop = [0], asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def read() -> None:
        loop.call_soon_threadsafe(begun.set)
        while not stop.is_set():
            value = variable.value
            torn.extend([1] * int(value.min() != value.max()))
            reads[0] += 1

    reading = asyncio.create_task(ar.run_on_host(read))
    await begun.wait()
    for i in range(2000):
        await variable.assign(np.full(10_000, float(i)))
        if i % 50 == 0:
            await asyncio.sleep(0)
    stop.set()
    await reading

    assert torn == []
    assert reads[0] > 0


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", ["u1", "i4", "i8"])
async def test_a_mean_of_whole_numbers_is_rounded(pair: ar.MirroredStrategy, dtype: str) -> None:
    with pair.scope():
        variable = ar.Variable(np.zeros(2, dtype), aggregation="mean")

    async def step(x: int) -> None:
        await variable.assign(np.array([x, 2 * x], dtype))

    await pair.run(step, args=(ar.PerReplica([1, 2]),))

    assert variable.dtype == dtype
    assert variable.value.tolist() == [2, 3]  # 1.5 rounded to even, and 3
