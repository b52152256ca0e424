"""check_in_sync: equal bits pass, the first difference is named, misuse is refused."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, OutOfSyncError

pytestmark = pytest.mark.usefixtures("no_task_left")


def variable(strategy: ar.Strategy, *components: Any, name: str = "w") -> ar.Variable:
    """A variable with these components, as an update of single components would leave it."""
    with strategy.scope():
        made = ar.Variable(components[0], name=name)
    arrays = tuple(np.array(part) for part in components)
    made.store.write({made: arrays})
    return made


async def failure(strategy: ar.Strategy, *variables: ar.Variable) -> OutOfSyncError:
    with pytest.raises(OutOfSyncError) as caught:
        await strategy.check_in_sync(variables)
    return caught.value


@pytest.mark.asyncio
async def test_new_and_written_variables_are_in_sync(strategy: ar.Strategy) -> None:
    with strategy.scope():
        made = [ar.Variable(np.zeros(3)), ar.Variable(1), ar.Variable(np.zeros((0, 2)))]
    await made[0].assign_add(np.ones(3))

    await strategy.check_in_sync(made)
    await strategy.check_in_sync(iter(made))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "value",
    [1.5, np.nan, np.ones((2, 3), "f2"), np.zeros((0, 4)), np.array(True), np.ones(2, "c16"),
     np.ones(40_000), np.ones(2, np.longdouble), np.zeros((2, 0), np.longdouble),
     np.arange(6.0).reshape(2, 3).T],
    ids=["float", "nan", "half", "empty", "bool", "complex", "large", "extended",
         "empty extended", "transposed"],
)  # fmt: skip
async def test_equal_components_in_different_arrays(pair: ar.MirroredStrategy, value: Any) -> None:
    await pair.check_in_sync([variable(pair, value, np.array(value, order="F"))])


@pytest.mark.asyncio
async def test_the_bytes_between_extended_numbers_do_not_count(pair: ar.MirroredStrategy) -> None:
    parts = [np.full(64, byte, np.uint8).view(np.longdouble) for byte in (0, 255)]
    for part in parts:
        part[...] = 1.5

    await pair.check_in_sync([variable(pair, *parts)])


@pytest.mark.asyncio
async def test_the_error_says_where_and_how_much(pair: ar.MirroredStrategy) -> None:
    first = np.zeros((2, 3))
    other = first.copy()
    other[0, 2], other[1, 1] = 0.5, -4.0

    error = await failure(pair, variable(pair, first, other))

    assert (error.variable, error.replica_id, error.index) == ("w", 1, (0, 2))
    assert error.max_difference == 4.0
    assert str(error).startswith(
        "Variable 'w' is out of sync: replica 1 holds 0.5 at index (0, 2) but replica 0 holds 0.0. "
        "2 of 6 elements differ, by at most 4. Write one value to all replicas"
    )


@pytest.mark.asyncio
async def test_the_first_variable_and_the_first_replica_are_named(
    triple: ar.MirroredStrategy,
) -> None:
    fine = variable(triple, 0.0, 0.0, 0.0, name="fine")
    late = variable(triple, 0.0, 0.0, 7.0, name="late")
    both = variable(triple, 0.0, 1.0, 2.0, name="both")

    error = await failure(triple, fine, late, both)
    assert (error.variable, error.replica_id, error.index) == ("late", 2, ())
    error = await failure(triple, both, late)
    assert (error.variable, error.replica_id, error.max_difference) == ("both", 1, 1.0)


@pytest.mark.asyncio
async def test_large_variables_are_hashed_off_the_loop(pair: ar.MirroredStrategy) -> None:
    first = np.zeros(100_000, "f4")
    other = first.copy()
    other[99_999] = 1

    error = await failure(pair, variable(pair, first, other))

    assert error.index == (99_999,)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("first", "other", "largest"),
    [
        (0.0, -0.0, 0.0),
        (1.0, np.nan, np.inf),
        (np.inf, -np.inf, np.inf),
        (1e308, -1e308, np.inf),
        (np.int64(-(2**63)), np.int64(2**63 - 1), 2.0**64),
        (np.uint64(2**63 + 1), np.uint64(2**63), 1.0),
        (np.uint8(0), np.uint8(255), 255.0),
        (True, False, 1.0),
        (3 + 4j, 0j, 5.0),
        (np.float16(60000), np.float16(-60000), 120000.0),
    ],
)
async def test_the_largest_difference(
    pair: ar.MirroredStrategy, first: Any, other: Any, largest: float
) -> None:
    error = await failure(pair, variable(pair, [first, first], [first, other]))

    assert error.index == (1,)
    assert error.max_difference == largest


@pytest.mark.asyncio
@pytest.mark.parametrize("other", [np.zeros(3), np.zeros(2, "f4")], ids=["shape", "dtype"])
async def test_another_shape_or_dtype(pair: ar.MirroredStrategy, other: Any) -> None:
    error = await failure(pair, variable(pair, np.zeros(2), other))

    assert f"{other.dtype} {other.shape}" in str(error)
    assert (error.index, error.max_difference) == ((), np.inf)


@pytest.mark.asyncio
async def test_updates_of_single_components_are_found_and_mended(gang: ar.MirroredStrategy) -> None:
    with gang.scope():
        made = ar.Variable(np.zeros(2), name="b")
    await gang.extended.update(
        made,
        lambda v, i: v.assign(np.full(2, float(i))),
        args=(ar.Mirrored([0.0, 1.0, 2.0, 3.0][: gang.num_replicas_in_sync]),),
    )

    error = await failure(gang, made)
    assert (error.variable, error.replica_id) == ("b", 1)
    await made.assign(made.value)
    await gang.check_in_sync([made])


# --- misuse -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_arguments_other_than_lists_of_variables_are_refused(
    pair: ar.MirroredStrategy,
) -> None:
    made = variable(pair, 0.0, 0.0)

    with pytest.raises(ValueError, match="at least one"):
        await pair.check_in_sync([])
    for wrong in (made, None, 3, [made, 1.0], "w"):
        with pytest.raises(TypeError, match="needs a list of variables"):
            await pair.check_in_sync(wrong)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_variables_of_others(pair: ar.MirroredStrategy, solo: ar.OneDeviceStrategy) -> None:
    with solo.scope():
        foreign = ar.Variable(0.0)

    for wrong in (foreign, ar.Variable(0.0)):
        with pytest.raises(ContextError, match="does not belong"):
            await pair.check_in_sync([wrong])


@pytest.mark.asyncio
async def test_where_it_may_be_called(pair: ar.MirroredStrategy) -> None:
    made = variable(pair, 0.0, 0.0)

    async def merge(strategy: ar.Strategy) -> None:
        await strategy.check_in_sync([made])

    async def step() -> None:
        with pytest.raises(ContextError, match="merge_call"):
            await pair.check_in_sync([made])
        await ar.get_replica_context().merge_call(merge)

    await pair.run(step)
    with pair.scope():
        await pair.check_in_sync([made])
