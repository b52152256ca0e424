"""Ops on a device with streams: nothing is read before it is there, or after it was given back.

Each wait of the library was taken out once, and a test here failed. With a GPU all of it runs
there, too.
"""

import asyncio
import gc
import inspect
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.cluster import LocalCommunicator
from aioreplica.devices import lane_table, list_devices
from aioreplica.devices.backends import Backend, TorchBackend
from aioreplica.errors import ContextError
from aioreplica.strategies import _multi_worker
from benchmarks._gpu_place import SharedGpu
from tests.replica.gated import me, my_id

torch = pytest.importorskip("torch")
streams: Any = pytest.importorskip("tests.devices.streams")
upload, read, PoisonError = streams.upload, streams.read, streams.PoisonError

DEVICES = ["cuda:0", "cuda:1"]
GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest_asyncio.fixture(params=["late", "early", GPU])
async def pair(request: Any) -> AsyncIterator[ar.MirroredStrategy]:
    """Two replicas on devices with streams, in place of the machine's own; or both on its GPU."""
    gpu = SharedGpu(2) if request.param == "gpu" else None
    with streams.installed(request.param, gpu):
        async with ar.MirroredStrategy(DEVICES) as strategy:
            yield strategy


def is_on_gpu() -> bool:
    return bool(streams.MODE["is"] == "gpu")


def backend() -> Backend:
    return SharedGpu(2) if is_on_gpu() else streams.StreamBackend()


def numbers(start: float = 0.0) -> Any:
    """Return two numbers that are on the device later."""
    if not is_on_gpu():
        return upload([start + 1.0, start + 2.0])
    torch.cuda._sleep(2_000_000)  # a millisecond
    return torch.arange(start + 1.0, start + 3.0, device=DEVICES[0])


def doubled(x: Any) -> Any:
    return x * 2


async def each(strategy: ar.MirroredStrategy, step: Any, *args: Any) -> list[Any]:
    """Run a step; return what it returned in each replica, as it was."""
    seen: dict[int, Any] = {}

    async def in_task(*parts: Any) -> None:
        seen[my_id()] = await step(*parts)

    def in_thread(*parts: Any) -> None:
        seen[my_id()] = step(*parts)

    is_async = inspect.iscoroutinefunction(step)
    await strategy.run(in_task if is_async else in_thread, args=args)
    return [seen[0], seen[1]]


# ---- the device itself ---------------------------------------------------------------------


def test_what_another_stream_reads_too_early_is_poison() -> None:
    with streams.own_stream("cuda:7"):
        x = numbers() * 2

    with pytest.raises(PoisonError):
        read(x + 1)


def test_what_waits_for_the_stream_reads_numbers() -> None:
    with streams.own_stream("cuda:7"):
        x = numbers() * 2
        assert x.tolist() == [2.0, 4.0]

    assert read(x + 1).tolist() == [3.0, 5.0]


@pytest.mark.parametrize("is_kept", [False, True])
def test_memory_is_given_back_under_a_stream_that_nobody_told_of(
    is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(streams.MODE, "is", "early")
    with streams.own_stream("cuda:7"):
        x = numbers() * 2
        assert x.tolist() == [2.0, 4.0]
    y = x + 1
    if is_kept:
        streams.StreamBackend().keep(x)
    del x

    if is_kept:
        assert read(y).tolist() == [3.0, 5.0]
    else:
        with pytest.raises(PoisonError):
            read(y)


def test_memory_that_is_given_back_in_the_middle_of_work_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by the collector, which runs wherever Python makes an object."""
    monkeypatch.setitem(streams.MODE, "is", "early")
    dropped, seen, stream = [numbers()], list[str](), streams.DEFAULT
    stream.enqueue(lambda: (dropped.clear(), seen.append("first")))
    stream.enqueue(lambda: seen.append("second"))

    stream.synchronise()

    assert seen == ["first", "second"]


@pytest.mark.parametrize("values", [[1.0, 2.0], [[1], [2]], 3.0, [], [True]])
def test_a_copy_comes_from_pinned_memory_and_has_to_be_waited_for(values: Any) -> None:
    array = np.array(values)
    with streams.own_stream("cuda:7"):
        x, y = (streams.StreamBackend().put(array, "cuda:7") for _ in range(2))
    assert x.dtype == y.dtype == torch.tensor(array).dtype
    array[...] = False  # it has been read

    if array.size and array.dtype != bool:
        with pytest.raises(PoisonError):
            read(x)
    with streams.own_stream("cuda:7"):
        assert y.tolist() == values


def test_pinned_memory_is_handed_out_behind_the_copy() -> None:
    with streams.Copies():
        memory = torch.empty(2, dtype=torch.float64, pin_memory=True)
        memory.copy_(torch.tensor([1.0, 2.0]))
        with streams.own_stream("cuda:7"):
            told = memory.to(streams.DEVICE, non_blocking=True)
        alias = memory.detach()
        del memory

    assert alias.tolist() == [1.0, 2.0]
    with streams.own_stream("cuda:7"):
        assert told.tolist() == [1.0, 2.0]
    assert alias.isnan().all()


# ---- ops -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_lane_of_the_device_has_streams(pair: ar.MirroredStrategy) -> None:
    name = backend().name
    assert repr(lane_table().lane("cuda:0").streams) == f"<DeviceStreams cuda:0 of {name}>"
    assert lane_table().lane("host").streams is None


@pytest.mark.asyncio
async def test_the_result_of_an_op_can_be_read_anywhere(pair: ar.MirroredStrategy) -> None:
    async def step() -> list[Any]:
        x = await me().run_on_device(lambda: doubled(numbers(my_id())))
        on_loop = (x + 1).tolist()
        on_lane = await me().run_on_device(lambda: (x + 1).tolist())
        on_host = await ar.run_on_host(lambda: (x + 1).tolist())
        return [on_loop, on_lane, on_host]

    assert await each(pair, step) == [[[3.0, 5.0]] * 3, [[5.0, 7.0]] * 3]


@pytest.mark.asyncio
async def test_an_op_comes_behind_what_the_loop_has_enqueued(pair: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        made_on_loop = numbers() + my_id()
        return await me().run_on_device(lambda x: doubled(x).tolist(), made_on_loop)

    assert await each(pair, step) == [[2.0, 4.0], [4.0, 6.0]]


@pytest.mark.asyncio
async def test_an_ops_arguments_are_held_until_its_work_is_done(pair: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        op = me().run_on_device(doubled, numbers())  # nobody else holds it
        return (await op).tolist()

    assert await each(pair, step) == [[2.0, 4.0], [2.0, 4.0]]


@pytest.mark.asyncio
async def test_what_a_failed_op_has_enqueued_is_waited_for(pair: ar.MirroredStrategy) -> None:
    kept: list[Any] = []

    def fail() -> None:
        kept.append(numbers() * 2)
        raise LookupError

    async def step() -> Any:
        with pytest.raises(LookupError):
            await me().run_on_device(fail)
        return [x.tolist() for x in kept]

    await pair.run(step)

    assert [(x + 0).tolist() for x in kept] == [[2.0, 4.0]] * 2


@pytest.mark.asyncio
async def test_a_result_dropped_on_the_loop_is_given_back_behind_its_reader(
    pair: ar.MirroredStrategy,
) -> None:
    async def step() -> Any:
        x = await me().run_on_device(lambda: {"x": [numbers() * 2]})
        y = x["x"][0] + 1  # enqueued, and not done
        del x
        await asyncio.sleep(0)  # asyncio holds what woke the task until the task waits again
        return y.tolist()

    assert await each(pair, step) == [[3.0, 5.0], [3.0, 5.0]]


# ---- collectives ---------------------------------------------------------------------------

EXPECTED = [
    [[3.0, 6.0], [1.0, 2.0, 2.0, 4.0], [2.0, 4.0], [1.5], [1.0, 2.0]],
    [[3.0, 6.0], [1.0, 2.0, 2.0, 4.0], [2.0, 4.0], [3.0], [2.0, 4.0]],
]


@pytest.mark.asyncio
async def test_collectives_of_tasks(pair: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        mine = await me().run_on_device(lambda: numbers() * (my_id() + 1))
        found = [
            await me().all_reduce("sum", mine),
            await me().all_gather(mine, 0),
            await me().broadcast(mine, source=1),
            await me().reduce_scatter("mean", mine),
            await me().all_to_all(mine),
        ]
        del mine
        on_lane = await me().run_on_device(lambda *xs: [doubled(x).tolist() for x in xs], *found)
        assert on_lane == [[2 * each for each in x.tolist()] for x in found]
        return [x.tolist() for x in found]

    assert await each(pair, step) == EXPECTED


@pytest.mark.asyncio
async def test_sums_of_one_devices_arrays_are_made_there(
    pair: ar.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("An array came to the host.")

    async def step() -> Any:
        mine = await me().run_on_device(lambda: numbers() * (my_id() + 1))
        found = [await me().all_reduce(op, mine) for op in ("sum", "mean", "min", "max")]
        return found + await me().run_on_device(lambda: [me().blocking.all_reduce("sum", mine)])

    with monkeypatch.context() as patched:
        for kind in (TorchBackend, streams.StreamBackend):
            patched.setattr(kind, "get", refuse)
        for name in ("numpy", "tolist"):
            patched.setattr(streams.DeviceArray, name, refuse)
        found = await each(pair, step)

    expected = [[3.0, 6.0], [1.5, 3.0], [1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]
    assert [[x.tolist() for x in of_one] for of_one in found] == [expected] * 2


def blocking_collectives() -> Any:
    ctx = me().blocking
    mine = numbers() * (my_id() + 1)
    found = [
        ctx.all_reduce("sum", mine),
        ctx.all_gather(mine, 0),
        ctx.broadcast(mine, source=1),
        ctx.reduce_scatter("mean", mine),
        ctx.all_to_all(mine),
    ]
    del mine
    after = [x + 1 for x in found]
    before = [[each - 1 for each in x.tolist()] for x in after]
    ctx.barrier()
    del found
    return before


@pytest.mark.asyncio
async def test_collectives_of_device_threads(pair: ar.MirroredStrategy) -> None:
    assert await each(pair, blocking_collectives) == EXPECTED


@pytest.mark.asyncio
async def test_collectives_of_threads_in_ops(pair: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        return await me().run_on_device(blocking_collectives)

    assert await each(pair, step) == EXPECTED


@pytest.mark.asyncio
async def test_a_merge_of_device_threads_is_done_before_they_go_on(
    pair: ar.MirroredStrategy,
) -> None:
    def merge(_strategy: object, xs: ar.PerReplica) -> Any:
        return xs.values[0] + xs.values[1]

    def step() -> Any:
        total = me().blocking.merge_call(merge, (numbers(my_id()),))
        return (total * 2).tolist()

    assert await each(pair, step) == [[6.0, 10.0], [6.0, 10.0]]


@pytest.mark.asyncio
async def test_what_an_op_brings_to_a_started_collective_is_there(
    pair: ar.MirroredStrategy,
) -> None:
    async def step() -> Any:
        ctx, loop = me(), asyncio.get_running_loop()
        go_on = threading.Event()

        def backward() -> Any:
            handle = ctx.start_all_reduce("sum", numbers(my_id()) * 2)
            loop.call_soon_threadsafe(handles.append, handle)
            assert go_on.wait(60)  # the op goes on while the sum is made
            return handle

        handles: list[Any] = []
        op = asyncio.gather(ctx.run_on_device(backward))
        while not (handles and handles[0].done()):
            await asyncio.sleep(0)
        go_on.set()
        [handle] = await op
        return (await handle).tolist()

    assert await each(pair, step) == [[6.0, 10.0], [6.0, 10.0]]


@pytest.mark.asyncio
async def test_a_device_loop_goes_on_behind_what_the_loop_has_made(
    pair: ar.MirroredStrategy,
) -> None:
    seen: list[Any] = []

    async def made() -> AsyncIterator[Any]:
        for number in range(3):
            await asyncio.sleep(0)
            yield ar.PerReplica([numbers(number) * 2 for _ in DEVICES])

    def step(_ctx: Any, x: Any) -> None:
        seen.append((x + 1).tolist())

    await pair.run_steps(step, made(), 3)

    assert sorted(seen) == [[3.0, 5.0]] * 2 + [[5.0, 7.0]] * 2 + [[7.0, 9.0]] * 2


# ---- what a thread lets go of while others read it -------------------------------------------


async def let_go() -> None:
    """Have asyncio let go of what woke the task, and the collector of what was left in circles."""
    await asyncio.sleep(0)
    gc.collect()


@pytest.mark.asyncio
async def test_what_an_op_has_sent_is_given_back_behind_its_reader(
    pair: ar.MirroredStrategy,
) -> None:
    async def step() -> Any:
        if my_id():
            await me().run_on_device(lambda: me().blocking.send(numbers() * 2, to=0))
        await me().barrier()
        if my_id():
            return None
        x = await me().receive(from_=1)
        y = x + 1  # enqueued, and not done
        del x
        await let_go()
        return y.tolist()

    assert await each(pair, step) == [[3.0, 5.0], None]


@pytest.mark.asyncio
async def test_what_an_op_brings_to_a_started_collective_is_given_back_behind_it(
    pair: ar.MirroredStrategy,
) -> None:
    async def step() -> Any:
        def begin() -> Any:
            return me().start_all_reduce("sum", numbers(my_id()) * 2)

        total = await (await me().run_on_device(begin))
        await me().barrier()  # the run has let go of the one before, too
        await let_go()
        await me().run_on_device(int)  # the device thread goes on, and its allocator with it
        return total.tolist()

    assert await each(pair, step) == [[6.0, 10.0], [6.0, 10.0]]


@pytest.mark.asyncio
async def test_what_the_host_has_got_is_given_back_behind_its_reader(
    pair: ar.MirroredStrategy,
) -> None:
    kept: list[Any] = []
    seen: list[Any] = []

    def take(x: Any) -> None:
        kept.append(x)
        seen.append((x + 1).tolist())

    def step(_ctx: Any, _x: Any) -> None:
        ar.outside_compilation(take, numbers() * 2)

    await pair.run_steps(step, [0], 1)
    found = [kept.pop() + 1 for _ in DEVICES]  # the device threads have let go of them long ago

    assert [x.tolist() for x in found] == seen == [[3.0, 5.0]] * 2


# ---- messages, variables, input --------------------------------------------------------------


def other() -> int:
    return 1 - my_id()


@pytest.mark.asyncio
async def test_messages_of_device_threads(pair: ar.MirroredStrategy) -> None:
    def step() -> Any:
        ctx = me().blocking
        if my_id():
            ctx.send(numbers() * 2, to=other())
            return (ctx.receive(from_=other()) + 1).tolist()
        found = ctx.receive(from_=other())
        ctx.send(found * 2, to=other())
        return (found + 1).tolist()

    assert await each(pair, step) == [[3.0, 5.0], [5.0, 9.0]]


@pytest.mark.asyncio
async def test_batches_are_on_the_device_before_a_step_has_them(pair: ar.MirroredStrategy) -> None:
    data = [np.arange(4.0), np.arange(4.0)]

    async def step(x: Any) -> Any:
        assert x.is_cuda if is_on_gpu() else isinstance(x, streams.DeviceArray)
        return (x + 1).tolist(), await me().run_on_device(lambda: doubled(x).tolist())

    async with pair.distribute_dataset(data) as batches:
        seen = [await each(pair, step, batch) async for batch in batches]

    assert seen == [[([1.0, 2.0], [0.0, 2.0]), ([3.0, 4.0], [4.0, 6.0])]] * 2


@pytest.mark.asyncio
async def test_a_batch_that_is_dropped_is_given_back_behind_its_readers(
    pair: ar.MirroredStrategy,
) -> None:
    async with pair.distribute_dataset([np.arange(4.0)]) as batches:
        iterator = aiter(batches)
        results = [x + 1 for x in pair.local_results(await anext(iterator))]  # enqueued
        assert [result async for result in iterator] == []  # nobody has the batch any more

        assert [result.tolist() for result in results] == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.asyncio
async def test_batches_come_to_a_device_whose_thread_waits_for_them(
    pair: ar.MirroredStrategy,
) -> None:
    """The thread of a device loop: a copy that is queued behind it would never begin."""
    seen: list[Any] = []

    def step(_ctx: Any, x: Any) -> None:
        assert x.is_cuda if is_on_gpu() else isinstance(x, streams.DeviceArray)
        seen.append(doubled(x).tolist())

    data = ar.ArrayDataset(np.arange(16.0), 4)
    async with pair.distribute_dataset(data) as batches, asyncio.timeout(60):
        iterator = aiter(batches)
        first = await pair.run_steps(step, iterator, 3)
        rest = await pair.run_steps(step, iterator, 3)

    assert (first.steps_run, rest.steps_run) == (3, 1)
    assert sorted(seen) == [[4.0 * i, 4.0 * i + 2.0] for i in range(8)]


@pytest.mark.asyncio
async def test_a_variable_takes_the_numbers_of_an_op(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        total = ar.Variable(np.zeros(2), aggregation="sum")

    async def step() -> None:
        grad = await me().run_on_device(lambda: numbers() * 2)
        reduced = await me().all_reduce("sum", grad)
        await total.assign_add(backend().get(reduced) / 2)

    await pair.run(step)

    assert total.value.tolist() == [4.0, 8.0]


@pytest.mark.asyncio
async def test_prepare_says_that_modules_of_the_host_compute_there(
    pair: ar.MirroredStrategy,
) -> None:
    def train(model: Any, optimizer: Any, batches: Any) -> Any:
        for x in batches:
            model(x).sum().backward()
            optimizer.step()
        return model.weight.detach().clone()

    module = torch.nn.Linear(2, 1, bias=False)
    start, data = module.weight.detach().clone(), [torch.ones(4, 2)]
    sgd = torch.optim.SGD(module.parameters(), 0.5)

    with pytest.warns(UserWarning, match=r"on cuda:0, cuda:1, but Linear is on the CPU.*torch_mod"):
        prepared = ar.prepare(module, sgd, data, strategy=pair)
    found = pair.local_results(await pair.run(train, args=prepared))
    async with ar.OneDeviceStrategy("cuda:0") as one:
        with pytest.warns(UserWarning, match=r"on cuda:0, but.*Move module and batches with \.to"):
            ar.prepare(module, sgd, data, strategy=one)
    for worker in LocalCommunicator.group(2):  # with one GPU each
        with pytest.MonkeyPatch.context() as here:
            here.setattr(
                _multi_worker, "chosen_devices", lambda *_: tuple(list_devices("cuda")[:2])
            )
            several = ar.MultiWorkerMirroredStrategy(worker)
        with pytest.warns(
            UserWarning, match=r"on cuda:., but.*for GPUs use ar\.autodiff\.torch_mod"
        ):
            ar.prepare(module, sgd, data, strategy=several)
    module.weight = torch.nn.Parameter(numbers()[None])
    with pytest.raises(TypeError, match=r"'weight' is on cuda:0, but ar\.prepare averages"):
        ar.prepare(module, sgd, data, strategy=pair)

    assert [each.tolist() for each in found] == [(start - 1.0).tolist()] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("called", ["autodiff.all_reduce", "outside_compilation"])
@pytest.mark.parametrize("is_on_own_thread", [True, False])
async def test_gradients_that_meet_others_are_of_the_thread_that_has_the_stream(
    pair: ar.MirroredStrategy, is_on_own_thread: bool, called: str
) -> None:
    def step() -> Any:
        x = numbers(my_id()).requires_grad_()
        if called == "outside_compilation":
            total = ar.outside_compilation(doubled, x)
        else:
            total = ar.autodiff.all_reduce("sum", x * x)
        loss = (total * total).sum()
        if is_on_own_thread:
            with torch.autograd.set_multithreading_enabled(False):
                loss.backward()
            return x.grad.tolist()
        with ThreadPoolExecutor(1) as threads:  # as torch has them for GPUs
            return threads.submit(loss.backward).result()

    if is_on_own_thread:
        reduced, outside = [[40.0, 208.0], [80.0, 312.0]], [[8.0, 16.0], [16.0, 24.0]]
        assert await each(pair, step) == (reduced if "all_reduce" in called else outside)
        return
    with pytest.raises(ContextError, match=rf"gradient of {called} on a thread of its own"):
        await pair.run(step)


# ---- models ----------------------------------------------------------------------------------


class Counting(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A model with parameters of two layers, and a buffer that calls write."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
        self.register_buffer("sums", torch.zeros(2))

    def forward(self, x: Any, scale: Any) -> Any:
        self.sums += x.detach().sum(0)
        return self.out(torch.relu(self.hidden(x))) * scale


async def trained(strategy: ar.Strategy) -> list[float]:
    """Train a model on batches of the strategy's devices; return the numbers of all that came."""
    torch.manual_seed(7)
    with strategy.scope():
        model = ar.autodiff.torch_module(Counting())
        sgd = ar.optimizers.SGD(0.05)
    rng = np.random.default_rng(3)
    data = ar.ArrayDataset((rng.random((16, 2), np.float32), rng.random((16, 1), np.float32)), 4)
    losses: list[Any] = []

    async def step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            once, again = model(x, np.float32([2.0])), model(x, scale=np.float32([0.5]))
            difference = once + again - y
            return (difference * difference).mean()

        return await sgd.minimize(loss, model.variables)

    async with strategy.distribute_dataset(data) as batches:
        async for batch in batches:
            parts = [as_tensors(strategy, each) for each in batch]
            losses.extend(strategy.local_results(await strategy.run(step, args=parts)))
    numbers = [*losses, *model.state_dict().values()]
    return [float(x) for each in numbers for x in np.ravel(each)]


def as_tensors(strategy: ar.Strategy, value: Any) -> ar.PerReplica:
    return ar.PerReplica([torch.as_tensor(each) for each in strategy.local_results(value)])


@pytest.mark.asyncio
async def test_a_torch_module_is_trained_on_the_device_of_its_arguments(
    pair: ar.MirroredStrategy,
) -> None:
    found = await trained(pair)
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as on_host:
        expected = await trained(on_host)

    assert found == (pytest.approx(expected, rel=1e-4) if is_on_gpu() else expected)
