"""Sync-on-read variables: written by each replica alone, combined for whoever reads outside."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioreplica as ar

AGGREGATIONS = ["none", "sum", "mean", "only_first_replica"]
READABLE = AGGREGATIONS[1:]
VERBS = ["assign", "assign_add", "assign_sub"]


def new(strategy: ar.Strategy, value: Any, aggregation: str = "sum", **options: Any) -> Any:
    with strategy.scope():
        return ar.Variable(value, synchronization="on_read", aggregation=aggregation, **options)


def components(variable: Any) -> list[Any]:
    return [part.tolist() for part in variable.components]


def my_id() -> int:
    return ar.get_replica_context().replica_id_in_sync_group


async def write_each(strategy: ar.Strategy, variable: Any, values: list[Any]) -> None:
    async def step() -> None:
        await variable.assign(values[my_id()])

    await strategy.run(step)


# --- creation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["on_read", "ON_READ", ar.VariableSynchronization.ON_READ])
def test_the_strategy_makes_it(pair: ar.MirroredStrategy, given: Any) -> None:
    with pair.scope():
        variable = ar.Variable([1, 2], synchronization=given, aggregation="sum", name="total")

    assert isinstance(variable, ar.SyncOnReadVariable)
    assert variable.synchronization is ar.VariableSynchronization.ON_READ
    assert not variable.is_mirrored
    assert pair.extended.variable_created_in_scope(variable)
    assert components(variable) == [[1, 2]] * 2
    assert variable.component_names == ("total", "total/replica_1")
    assert repr(variable) == "<SyncOnReadVariable total | int64 (2,), v0>"


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_it_is_not_trainable(pair: ar.MirroredStrategy, aggregation: str) -> None:
    variable = new(pair, 0.0, aggregation, trainable=True)

    assert not variable.trainable
    assert pair.trainable_variables == ()


def test_one_device_makes_one_too(solo: ar.OneDeviceStrategy) -> None:
    variable = new(solo, 3)

    assert isinstance(variable, ar.SyncOnReadVariable)
    assert variable.value == 3


def test_synchronization_none_is_not_supported(pair: ar.MirroredStrategy) -> None:
    with pair.scope(), pytest.raises(ValueError, match=r"'w'.*'none'.*'auto'.*'on_read'"):
        ar.Variable(0.0, name="w", synchronization="none")
    assert len(pair._runtime.variable_table) == 0
    with pair.scope():
        assert ar.Variable(0.0, name="w").name == "w"


@pytest.mark.parametrize("bad", ["sometimes", "", 3, ar.VariableAggregation.SUM])
def test_an_unknown_synchronization_names_the_variable_and_the_legal_ones(bad: Any) -> None:
    legal = r"(?s)'w'.*'auto'.*'none'.*'on_write'.*'on_read'"

    with pytest.raises(ValueError, match=legal):
        ar.Variable(0.0, name="w", synchronization=bad)


# --- writing in a replica ---------------------------------------------------------------------


@pytest.mark.asyncio
async def test_replicas_write_as_often_as_they_like(gang: ar.MirroredStrategy) -> None:
    """No collective: one that replicas did not all call would be a mismatch."""
    variable = new(gang, 0)

    async def step() -> int:
        for _ in range(my_id()):
            await variable.assign_add(10)
            await asyncio.sleep(0)
        return int(variable.value)

    seen = await gang.run(step)

    expected = [10 * i for i in range(gang.num_replicas_in_sync)]
    assert list(gang.local_results(seen)) == expected == components(variable)
    assert variable.value == sum(expected)
    assert variable.version == sum(range(gang.num_replicas_in_sync))


@pytest.mark.asyncio
async def test_a_write_takes_effect_at_the_call(pair: ar.MirroredStrategy) -> None:
    variable = new(pair, 0)

    async def step() -> list[int]:
        seen = []
        for verb, value in zip(VERBS, [5, 2, 1], strict=True):
            getattr(variable, verb)(value + my_id())
            seen.append(int(variable.value))
        return seen

    seen = await pair.run(step)

    assert pair.local_results(seen) == ([5, 7, 6], [6, 9, 7])


@pytest.mark.asyncio
async def test_a_write_does_not_give_way_to_others(pair: ar.MirroredStrategy) -> None:
    variable = new(pair, 0)
    order: list[tuple[int, int]] = []

    async def step() -> None:
        for turn in range(3):
            await variable.assign_add(1)
            order.append((my_id(), turn))

    await pair.run(step)

    assert order == [(i, turn) for i in range(2) for turn in range(3)]


@pytest.mark.asyncio
async def test_a_reader_keeps_what_it_read(pair: ar.MirroredStrategy) -> None:
    variable = new(pair, [1.0, 2.0])

    async def step() -> None:
        first = variable.value
        for _ in range(3):
            await variable.assign_add([1.0, 1.0])
        assert first.tolist() == [1.0, 2.0]
        assert not variable.value.flags.writeable

    await pair.run(step)

    assert components(variable) == [[4.0, 5.0]] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("value", [1.5, [1, 2], np.zeros((1, 1)), "ab"])
async def test_values_of_another_shape_or_dtype_are_refused_alike(
    pair: ar.MirroredStrategy, value: Any
) -> None:
    variable = new(pair, 0, name="w")

    with pytest.raises(ValueError, match="'w'"):
        await write_each(pair, variable, [value, value])
    assert components(variable) == [0, 0]


@pytest.mark.asyncio
async def test_nothing_is_written_once_the_run_was_aborted(pair: ar.MirroredStrategy) -> None:
    variable = new(pair, 0)
    after: list[str] = []

    async def step() -> None:
        if my_id() == 0:
            raise RuntimeError("broken")
        try:
            await ar.get_replica_context().barrier()
        finally:
            try:
                await variable.assign(7)
            except asyncio.CancelledError:
                after.append("refused")
                raise

    with pytest.raises(RuntimeError, match="broken"):
        await pair.run(step)
    assert after == ["refused"]
    assert components(variable) == [0, 0]


# --- reading outside --------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("aggregation", "expected"), [("sum", 10.0), ("mean", 2.5), ("only_first_replica", 1.0)]
)
async def test_a_reader_outside_gets_the_aggregate(aggregation: str, expected: float) -> None:
    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(4)]) as strategy:
        variable = new(strategy, 0.0, aggregation)
        await write_each(strategy, variable, [1.0, 2.0, 3.0, 4.0])
        in_merge: list[float] = []

        async def step() -> None:
            await ar.get_replica_context().merge_call(
                lambda _s: in_merge.append(float(variable.value))
            )

        await strategy.run(step)

        assert variable.value == expected
        assert not variable.value.flags.writeable
        assert in_merge == [expected]
        assert variable + 1 == expected + 1
        assert await strategy.extended.read_var(variable) == expected
        with strategy.scope():
            assert variable.value == expected


@pytest.mark.asyncio
async def test_without_an_aggregation_there_is_no_value_outside(pair: ar.MirroredStrategy) -> None:
    variable = new(pair, 0.0, "none", name="w")
    await write_each(pair, variable, [1.0, 2.0])

    with pytest.raises(ValueError, match=r"'w'.*aggregation=.*local_results"):
        _ = variable.value
    assert pair.local_results(variable) == (1.0, 2.0)


@pytest.mark.asyncio
async def test_reduce_and_local_results_take_the_components(gang: ar.MirroredStrategy) -> None:
    """What is reduced is what replicas hold, whatever the variable's own aggregation."""
    count = gang.num_replicas_in_sync
    values = [float(i + 1) for i in range(count)]
    for aggregation in AGGREGATIONS:
        variable = new(gang, 0.0, aggregation)
        await write_each(gang, variable, values)

        assert gang.local_results(variable) == tuple(values)
        assert await gang.reduce("sum", variable) == sum(values)
        assert await gang.reduce("mean", variable) == sum(values) / count
        assert await gang.reduce("max", variable) == count


@pytest.mark.asyncio
async def test_check_in_sync_passes_it_over(pair: ar.MirroredStrategy) -> None:
    variable = new(pair, 0.0)
    await write_each(pair, variable, [1.0, 2.0])

    await pair.check_in_sync([variable])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("aggregation", "expected"), [("sum", 3.0), ("mean", 1.5), ("only_first_replica", 1.0)]
)
async def test_a_snapshot_gives_the_aggregate_of_its_moment(
    pair: ar.MirroredStrategy, aggregation: str, expected: float
) -> None:
    variable = new(pair, 0.0, aggregation)
    await write_each(pair, variable, [1.0, 2.0])

    snapshot = pair.snapshot(variable)
    await write_each(pair, variable, [50.0, 60.0])
    await write_each(pair, variable, [70.0, 80.0])

    assert snapshot[variable] == expected
    assert pair.snapshot(variable)[variable] != expected


def test_a_snapshot_without_an_aggregation_has_no_value(pair: ar.MirroredStrategy) -> None:
    variable = new(pair, 0.0, "none", name="w")

    snapshot = pair.snapshot(variable)
    with pytest.raises(ValueError, match="'w'"):
        _ = snapshot[variable]
    assert variable in snapshot
    assert new(pair, 0.0) not in snapshot


# --- writing outside: what was read is restored -----------------------------------------------


@given(
    value=st.integers(-(2**63), 2**63 - 1),
    num_replicas=st.integers(1, 8),
)
def test_shares_of_whole_numbers_add_up_to_the_value(value: int, num_replicas: int) -> None:
    variable = new(ar.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]), 0)

    asyncio.run(_assign(variable, value))

    shares = [int(part) for part in variable.components]
    assert sum(shares) == value == int(variable.value)
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


@given(
    dtype=st.sampled_from(["int8", "uint8", "int16", "uint16", "int32", "uint32", "uint64"]),
    data=st.data(),
)
def test_shares_of_every_whole_dtype_add_up(dtype: str, data: st.DataObject) -> None:
    limits = np.iinfo(dtype)
    values = data.draw(st.lists(st.integers(limits.min, limits.max), max_size=5))
    num_replicas = data.draw(st.integers(1, 8))
    strategy = ar.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    variable = new(strategy, np.zeros(len(values), dtype))

    asyncio.run(_assign(variable, np.array(values, dtype)))

    assert variable.value.tolist() == values
    assert variable.value.dtype == dtype
    totals = [sum(map(int, column)) for column in zip(*components(variable), strict=True)]
    assert totals == values


@pytest.mark.asyncio
@pytest.mark.parametrize("value", [True, False, [True, False, True]])
async def test_a_truth_that_is_assigned_is_read_as_one(
    gang: ar.MirroredStrategy, value: Any
) -> None:
    variable = new(gang, np.zeros(np.shape(value), bool))

    await write_each(gang, variable, [np.ones(np.shape(value), bool)] * gang.num_replicas_in_sync)
    await variable.assign(value)

    nothing = np.zeros(np.shape(value), bool).tolist()
    assert components(variable) == [value] + [nothing] * (gang.num_replicas_in_sync - 1)
    assert variable.dtype == bool
    assert (variable.value == value).all()


async def _assign(variable: Any, value: Any) -> None:
    await variable.assign(value)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("none", [9.0] * 4),
        ("sum", [2.25] * 4),
        ("mean", [9.0] * 4),
        ("only_first_replica", [9.0] * 4),
    ],
)
async def test_restoring_divides_a_sum_and_copies_the_rest(
    aggregation: str, expected: list[float]
) -> None:
    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(4)]) as strategy:
        variable = new(strategy, 1.0, aggregation)

        await variable.assign(9.0)

        assert components(variable) == expected


@pytest.mark.asyncio
@pytest.mark.parametrize("aggregation", READABLE)
async def test_a_saved_value_is_restored_on_another_number_of_replicas(aggregation: str) -> None:
    async with (
        ar.MirroredStrategy(["cpu:0", "cpu:1"]) as two,
        ar.MirroredStrategy([f"cpu:{i}" for i in range(4)]) as four,
    ):
        old, restored = new(two, 0.0, aggregation), new(four, 0.0, aggregation)
        await write_each(two, old, [3.0, 4.0])

        await restored.assign(old.value)

        assert restored.value == old.value


@pytest.mark.asyncio
@pytest.mark.parametrize("aggregation", READABLE)
async def test_adding_outside_adds_to_the_aggregate(
    gang: ar.MirroredStrategy, aggregation: str
) -> None:
    variable = new(gang, 0.0, aggregation)
    await write_each(gang, variable, [float(i) for i in range(gang.num_replicas_in_sync)])
    before = float(variable.value)

    await variable.assign_add(6.0)
    assert variable.value == before + 6.0
    await variable.assign_sub(8.0)
    assert variable.value == before - 2.0


@pytest.mark.asyncio
@pytest.mark.parametrize("aggregation", ["sum", "mean"])
async def test_large_ones_are_written_on_the_host(
    pair: ar.MirroredStrategy, aggregation: str
) -> None:
    variable = new(pair, np.zeros(600_000), aggregation)

    await variable.assign(np.full(600_000, 3.0))

    assert variable.value[[0, -1]].tolist() == [3.0, 3.0]
    assert variable.version == 1


@pytest.mark.asyncio
async def test_a_mirrored_is_one_value_and_a_per_replica_is_refused(
    pair: ar.MirroredStrategy,
) -> None:
    variable = new(pair, 0.0, name="w")

    await variable.assign(ar.Mirrored([4.0, 4.0]))
    assert variable.value == 4.0
    with pytest.raises(ValueError, match=r"'w'.*PerReplica"):
        await variable.assign(ar.PerReplica([1.0, 2.0]))
    assert components(variable) == [2.0, 2.0]


# --- the update context -----------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
async def test_an_update_reads_and_writes_the_component(
    pair: ar.MirroredStrategy, aggregation: str
) -> None:
    variable = new(pair, 0.0, aggregation)
    await write_each(pair, variable, [1.0, 2.0])
    version = variable.version

    async def double(v: Any) -> float:
        await v.assign_add(v.value)
        return float(v.value)

    results = await pair.extended.update(variable, double)

    assert results.values == (2.0, 4.0)
    assert components(variable) == [2.0, 4.0]
    assert variable.version == version + 1


@pytest.mark.asyncio
async def test_replicas_of_a_plain_function_lose_no_write(pair: ar.MirroredStrategy) -> None:
    """They run on two threads at once."""
    with pair.scope():
        seen: Any = ar.Variable(0, synchronization="on_read", aggregation="sum")

    def step() -> None:
        for _ in range(2000):
            seen.assign_add(1)

    await pair.run(step)

    assert seen.value == 4000


@pytest.mark.asyncio
async def test_rows_are_shared_out_too(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        table: Any = ar.Variable([0, 0, 0], synchronization="on_read", aggregation="sum")

    await table.assign_add(ar.IndexedSlices([5, 2], [2, 0], (3,)))

    assert table.value.tolist() == [2, 0, 5]


@pytest.mark.asyncio
async def test_an_update_never_awaited_fails_the_run(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        weight: Any = ar.Variable(0.0)

    async def step() -> None:
        pair.extended.update(weight, lambda v: v.assign(1.0))

    with pytest.raises(ar.errors.ContextError, match="never awaited"):
        await pair.run(step)
    assert weight.value == 0.0
