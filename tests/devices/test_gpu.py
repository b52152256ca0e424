"""Replicas that share a GPU: streams of their own, ops that overlap, memory that stays flat."""

import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.devices.backends import TorchBackend, reduce_arrays
from aioreplica.typing import ReduceOp
from benchmarks._gpu_place import GPU, shared_gpu
from tests.replica.gated import me, my_id

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

LIMIT_S = 60
LONG = 200_000_000
"""Cycles of a kernel that goes on for a tenth of a second, on one core of the GPU."""


@pytest_asyncio.fixture
async def sharing() -> AsyncIterator[ar.MirroredStrategy]:
    """Two replicas on one GPU."""
    with shared_gpu(2):
        async with ar.MirroredStrategy(["cuda:0", "cuda:1"]) as strategy:
            yield strategy


@pytest.mark.asyncio
async def test_each_device_thread_has_a_stream_of_its_own(sharing: ar.MirroredStrategy) -> None:
    used: dict[int, list[Any]] = {0: [], 1: []}

    def step() -> None:
        used[my_id()].append(torch.cuda.current_stream())

    await sharing.run(step)
    await sharing.run(step)

    assert used[0][0] == used[0][1] != used[1][0] == used[1][1]
    assert torch.cuda.default_stream() not in (used[0][0], used[1][0])
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.asyncio
async def test_ops_of_two_replicas_overlap(sharing: ar.MirroredStrategy) -> None:
    both_are_here = threading.Barrier(2, timeout=LIMIT_S)

    async def do_overlap() -> bool:
        begin, end = ([torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2))

        def step() -> None:
            both_are_here.wait()
            begin[my_id()].record()
            torch.cuda._sleep(LONG)
            end[my_id()].record()

        await sharing.run(step)
        torch.cuda.synchronize()
        times = begin[0].elapsed_time(end[1]), begin[1].elapsed_time(end[0])
        return min(times) > 0

    # The first time loads the kernel, and a thread may come late; on one stream, none ever does.
    assert any([await do_overlap() for _ in range(5)])


@pytest.mark.asyncio
async def test_an_op_has_ended_when_its_work_has(sharing: ar.MirroredStrategy) -> None:
    done = torch.cuda.Event()

    def op() -> None:
        torch.cuda._sleep(LONG)
        done.record()

    async def step() -> None:
        if my_id() == 0:
            await me().run_on_device(op)
            assert done.query()

    await sharing.run(step)


@pytest.mark.asyncio
async def test_steps_leave_no_memory_on_the_device(sharing: ar.MirroredStrategy) -> None:
    weight = torch.eye(64, device=GPU)

    async def step() -> None:
        product = await me().run_on_device(lambda: (weight @ weight).relu())
        mean = await me().all_reduce("mean", product)
        await me().run_on_device(lambda: (mean - product).sum())

    used = []
    for _ in range(3):
        for _ in range(50):
            await sharing.run(step)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())

    assert used[0] == used[1] == used[2]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "bool"])
def test_numbers_survive_the_way_there_and_back(dtype: str) -> None:
    array = np.arange(12.0).reshape(3, 4).astype(dtype)

    tensor = TorchBackend().put(array, GPU)

    assert str(tensor.device) == GPU
    np.testing.assert_array_equal(TorchBackend().get(tensor), array)


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "bool"])
def test_reductions_are_those_of_numpy_bit_by_bit(op: ReduceOp, dtype: str) -> None:
    rng = np.random.default_rng(5)
    arrays = [(4 * rng.normal(size=(3, 5))).astype(dtype) for _ in range(4)]

    total = TorchBackend().reduce(op, [torch.tensor(array, device=GPU) for array in arrays])

    assert str(total.device) == GPU
    np.testing.assert_array_equal(total.cpu().numpy(), reduce_arrays(op, arrays))
