"""The jax backend, and collectives on its arrays from end to end."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.devices.backends import JaxBackend, backend_of, reduce_arrays
from aioreplica.typing import ReduceOp
from tests.replica.gated import me, my_id

jax = pytest.importorskip("jax")

pytestmark = pytest.mark.slow  # every first op is compiled


def test_it_is_found_for_its_arrays() -> None:
    assert backend_of(jax.numpy.zeros(2)).name == "jax"
    assert not JaxBackend().owns(np.zeros(2))


def test_the_hosts_cpus_are_not_counted_twice() -> None:
    assert JaxBackend().num_devices("cpu") == 0


def test_numbers_survive_the_way_there_and_back() -> None:
    array = JaxBackend().put(np.float32([1.0, 2.0]), "cpu:3")

    np.testing.assert_array_equal(JaxBackend().get(array), np.float32([1.0, 2.0]))
    with JaxBackend().scope("cpu:0"):
        JaxBackend().synchronise("cpu:0")


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
def test_reductions_are_those_of_numpy(op: ReduceOp, dtype: str) -> None:
    rng = np.random.default_rng(5)
    arrays = [(4 * rng.normal(size=(3, 5))).astype(dtype) for _ in range(4)]

    total = JaxBackend().reduce(op, [jax.numpy.asarray(array) for array in arrays])

    expected = reduce_arrays(op, arrays)
    np.testing.assert_array_equal(np.asarray(total), expected.astype(total.dtype))
    assert total.dtype.kind == expected.dtype.kind


def test_nothing_cannot_be_reduced() -> None:
    with pytest.raises(ValueError, match="at least one array"):
        JaxBackend().reduce(ReduceOp.SUM, [])


@pytest.mark.asyncio
async def test_collectives_take_and_give_its_arrays(pair: ar.MirroredStrategy) -> None:
    seen: dict[int, Any] = {}

    async def step() -> None:
        mine = jax.numpy.asarray([1.0, 2.0]) * (my_id() + 1)
        results = (
            await me().all_reduce("sum", mine),
            await me().all_gather(mine[: my_id() + 1], 0),
            await me().broadcast(mine, source=1),
            await me().reduce_scatter("mean", mine),
            await me().all_to_all(mine),
        )
        assert all(isinstance(array, jax.Array) for array in results)
        seen[my_id()] = [array.tolist() for array in results]

    await pair.run(step)

    assert seen[0] == [[3.0, 6.0], [1.0, 2.0, 4.0], [2.0, 4.0], [1.5], [1.0, 2.0]]
    assert seen[1] == [[3.0, 6.0], [1.0, 2.0, 4.0], [2.0, 4.0], [3.0], [2.0, 4.0]]


TWO_DEVICES = """
import asyncio, jax
import aioreplica as ar

async def step():
    ctx = ar.get_replica_context()
    i = ctx.replica_id_in_sync_group
    own = jax.devices("cpu")[i]
    mine = jax.device_put(jax.numpy.asarray([1.0, 2.0]) * (i + 1), own)
    scattered, swapped = await ctx.reduce_scatter("sum", mine), await ctx.all_to_all(mine)
    assert scattered.devices() == swapped.devices() == {own}
    return [*scattered.tolist(), *swapped.tolist()]

async def main():
    ar.set_logical_devices("cpu", 2)
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        print(strategy.local_results(await strategy.run(step)))

asyncio.run(main())
"""


def test_every_replica_gets_its_part_on_its_own_device() -> None:
    """In a process of its own: jax fixes its devices at its start."""
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "([3.0, 1.0, 2.0], [6.0, 2.0, 4.0])"


@pytest.mark.asyncio
async def test_the_strategy_reduces_and_gathers_its_arrays(pair: ar.MirroredStrategy) -> None:
    parts = ar.PerReplica([jax.numpy.asarray([1.0, 2.0]), jax.numpy.asarray([3.0])])

    assert float(await pair.reduce("mean", parts, axis=0)) == 2.0
    assert float(await pair.reduce("max", parts, axis=0)) == 3.0
    assert (await pair.gather(parts, 0)).tolist() == [1.0, 2.0, 3.0]


# ---- no streams are needed: jax's own waits, and its holds of memory ------------------------


@jax.jit
def added_late(xs: Any, big: Any) -> Any:
    """Read `xs` some time after the call has returned, where jax runs ahead."""
    for _ in range(4):
        big = jax.numpy.tanh(big @ big)
    return [x + 0 * big.sum() for x in xs]


def variables_that_share() -> tuple[list[ar.Variable], list[Any]]:
    """Return variables whose memory jax's arrays share: those that malloc has put on 64 bytes."""
    variables = [ar.Variable(np.full(64, 1.0, "f4")) for _ in range(64)]
    arrays = [JaxBackend().put(variable.value, "cpu:0") for variable in variables]
    shared = [
        (variable, array)
        for variable, array in zip(variables, arrays, strict=True)
        if array.unsafe_buffer_pointer() == variable.value.ctypes.data
    ]
    assert shared
    return [variable for variable, _ in shared], [array for _, array in shared]


@pytest.mark.asyncio
@pytest.mark.parametrize("is_held", [True, False])
async def test_variables_are_not_written_where_jax_still_reads(is_held: bool) -> None:
    variables, arrays = variables_that_share()
    big = jax.numpy.ones((700, 700)) / 700
    results = added_late(arrays, big)
    if not is_held:
        arrays.clear()  # jax holds what its computations are still to read
    for _ in range(3):
        for variable in variables:
            await variable.assign_add(np.ones(variable.shape, "f4"))

    for seen in (*results, *arrays):
        np.testing.assert_array_equal(np.asarray(seen), 1.0)


@pytest.mark.asyncio
async def test_what_an_op_returns_is_waited_for_by_whoever_reads_it(
    pair: ar.MirroredStrategy,
) -> None:
    big = jax.numpy.ones((700, 700)) / 700

    async def step() -> Any:
        one = jax.numpy.ones(3) * (my_id() + 1)
        mine = await me().run_on_device(added_late, [one], big)  # an op that has only enqueued it
        total = await me().all_reduce("sum", mine[0])
        del mine
        part = await me().run_on_device(lambda: me().blocking.all_reduce("mean", total))
        return np.stack([total, part]).tolist()

    found = pair.local_results(await pair.run(step))

    assert [np.ravel(each).tolist() for each in found] == [[3.0] * 6] * 2
