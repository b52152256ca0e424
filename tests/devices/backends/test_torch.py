"""The torch backend, and collectives on tensors from end to end."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.devices.backends import TorchBackend, backend_of, reduce_arrays
from aioreplica.errors import MergeMismatchError
from aioreplica.typing import ReduceOp
from tests.replica.gated import me, my_id

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("made_on_device")


def test_it_is_found_for_tensors() -> None:
    assert backend_of(torch.zeros(2)).name == "torch"
    assert not TorchBackend().owns(np.zeros(2))


def test_the_hosts_cpus_are_not_counted_twice() -> None:
    assert TorchBackend().num_devices("cpu") == 0


@pytest.mark.parametrize("is_writable", [True, False])
def test_numbers_survive_the_way_there_and_back(is_writable: bool) -> None:
    array = np.arange(3.0)
    array.flags.writeable = is_writable

    tensor = TorchBackend().put(array, "cpu:1")

    assert tensor.dtype == torch.float64
    np.testing.assert_array_equal(TorchBackend().get(tensor), array)
    assert TorchBackend().put(tensor, "cpu:0") is tensor
    tensor.zero_()
    assert array.tolist() == [0.0, 1.0, 2.0]
    with torch.device("meta"):
        assert TorchBackend().put(array, "cpu:0").tolist() == [0.0, 1.0, 2.0]
    with TorchBackend().scope("cpu:0"):
        TorchBackend().synchronise("cpu:0")


def test_bfloat16_arrives_as_float32() -> None:
    array = TorchBackend().get(torch.tensor([1.5], dtype=torch.bfloat16))

    assert array.dtype == np.float32
    assert array[0] == 1.5


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "bool"])
def test_reductions_are_those_of_numpy_bit_by_bit(op: ReduceOp, dtype: str) -> None:
    rng = np.random.default_rng(5)
    arrays = [(4 * rng.normal(size=(3, 5))).astype(dtype) for _ in range(4)]

    total = TorchBackend().reduce(op, [torch.tensor(array) for array in arrays])

    expected = reduce_arrays(op, arrays)
    assert total.numpy().dtype == expected.dtype
    np.testing.assert_array_equal(total.numpy(), expected)


def test_one_array_is_reduced_to_a_copy() -> None:
    tensor = torch.ones(2)

    total = TorchBackend().reduce(ReduceOp.SUM, [tensor])
    total.zero_()

    assert tensor.tolist() == [1.0, 1.0]


def test_nothing_cannot_be_reduced() -> None:
    with pytest.raises(ValueError, match="at least one array"):
        TorchBackend().reduce(ReduceOp.SUM, [])


@pytest.mark.asyncio
async def test_every_replica_may_write_its_own_result(pair: ar.MirroredStrategy) -> None:
    seen: dict[int, Any] = {}

    async def step() -> None:
        mine = torch.tensor([1.0, 2.0]) * (my_id() + 1)
        summed = await me().all_reduce("sum", {"g": mine, "n": 1})
        joined = await me().all_gather(mine[: my_id() + 1], 0)
        given = await me().broadcast(mine, source=1)
        part = await me().reduce_scatter("mean", mine)
        dealt = await me().all_to_all(mine)
        await me().barrier()
        for tensor in (summed["g"], joined, given):
            tensor.mul_(10.0 ** my_id())
        await me().barrier()
        results = (summed["g"], joined, given, part, dealt, mine)
        assert summed["n"] == 2
        seen[my_id()] = [tensor.tolist() for tensor in results]

    await pair.run(step)

    assert seen[0] == [[3.0, 6.0], [1.0, 2.0, 4.0], [2.0, 4.0], [1.5], [1.0, 2.0], [1.0, 2.0]]
    assert seen[1] == [
        [30.0, 60.0],
        [10.0, 20.0, 40.0],
        [20.0, 40.0],
        [3.0],
        [2.0, 4.0],
        [2.0, 4.0],
    ]


@pytest.mark.asyncio
async def test_the_strategy_reduces_and_gathers_tensors(pair: ar.MirroredStrategy) -> None:
    parts = ar.PerReplica([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    whole = ar.PerReplica([torch.tensor([1, 2]), torch.tensor([3, 4])])

    assert torch.equal(await pair.reduce("mean", whole), torch.tensor([2.0, 3.0]).double())
    assert float(await pair.reduce("mean", parts, axis=0)) == 2.0
    assert torch.equal(await pair.gather(parts, 0), torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.asyncio
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
async def test_a_tensor_with_a_graph_is_not_cut_off_silently(
    pair: ar.MirroredStrategy, collective: str
) -> None:
    async def step() -> Any:
        traced = torch.ones(2, requires_grad=True)
        if collective == "all_reduce":
            return await me().all_reduce("sum", traced)
        return await me().all_gather(traced, 0)

    with pytest.raises(TypeError, match=r"requires a gradient.*ar\.autodiff"):
        await pair.run(step)


@pytest.mark.asyncio
async def test_tensors_and_arrays_do_not_mix(pair: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        return await me().all_reduce("sum", torch.ones(2) if my_id() else np.ones(2))

    with pytest.raises(
        MergeMismatchError, match=f"ndarray and {type(torch.ones(1)).__name__} differ"
    ):
        await pair.run(step)
