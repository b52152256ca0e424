"""The jax backend, and collectives on its arrays from end to end."""

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


@pytest.mark.asyncio
async def test_the_strategy_reduces_and_gathers_its_arrays(pair: ar.MirroredStrategy) -> None:
    parts = ar.PerReplica([jax.numpy.asarray([1.0, 2.0]), jax.numpy.asarray([3.0])])

    assert float(await pair.reduce("mean", parts, axis=0)) == 2.0
    assert float(await pair.reduce("max", parts, axis=0)) == 3.0
    assert (await pair.gather(parts, 0)).tolist() == [1.0, 2.0, 3.0]
