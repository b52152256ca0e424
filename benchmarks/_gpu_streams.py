"""Two replicas on one GPU: do their ops overlap, where are sums made, what do batches cost."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import psutil

import aioreplica as ar

from ._gpu_place import Place
from ._measure import take_turns, timed
from ._row import Row, Target, compared_row

MIB = 1024 * 1024
OVERLAP = Target("ratio", 1.5)
"""Of two ops at once to one of them: 2.0 if they do not overlap."""
OVER_HOST = Target("ratio", 0.5)
HIDDEN = Target("ratio", 1.2)
GROWTH_MIB = {"device": 1.0, "reserved": 64.0, "host": 32.0}


async def measure_overlap(place: Place) -> list[Row]:
    """Compare an op in each of two replicas at once with one in the first alone."""
    ms, num_ops = 5.0, 4 if place.is_quick else 20

    async def step(num_busy: int) -> None:
        if _my_id() < num_busy:
            for _ in range(num_ops):
                await _me().run_on_device(place.work, ms)

    async with place.strategy() as strategy:
        samples = await take_turns(
            {
                name: timed(partial(strategy.run, step, args=(count,)), num_units=num_ops * 1000)
                for name, count in (("both", 2), ("one", 1))
            },
            num_rounds=place.num_rounds,
        )
    return [
        compared_row(
            "ops of two replicas at once", "asyncio", 2, "ms", ours=samples["both"],
            against="of one of them", floor=samples["one"], target=OVERLAP,
        )
    ]  # fmt: skip


async def measure_all_reduce(place: Place) -> list[Row]:
    """Compare a sum of two replicas' arrays with the same by hand, and over the host.

    Raises:
        AssertionError: If the result is wrong or elsewhere, or something went over the host.
    """
    import torch

    size = (MIB if place.is_quick else 64 * MIB) // 4
    num_times = 2 if place.is_quick else 10
    arrays = [torch.arange(size, dtype=torch.float32, device=place.device) + i for i in range(2)]
    found: list[Any] = []

    async def step() -> None:
        for _ in range(num_times):
            total = await _me().all_reduce("sum", arrays[_my_id()])
        if _my_id() == 0:
            found[:] = [total]

    def by_hand() -> None:
        found[:] = [arrays[0] + arrays[1]]

    def over_host() -> None:
        found[:] = [(arrays[0].cpu() + arrays[1].cpu()).to(place.device)]

    async with place.strategy() as strategy:

        async def ours() -> None:
            await strategy.run(step)
            place.wait()

        await ours()
        assert torch.equal(found[0], arrays[0] + arrays[1]), "The sum is wrong."
        assert found[0].device == arrays[0].device, f"The sum is on {found[0].device}."
        await _require_no_copies(place, ours)
        samples = await take_turns(
            {
                "ours": timed(ours, num_units=num_times),
                "hand": timed(_repeated(by_hand, num_times, place), num_units=num_times),
                "host": timed(_repeated(over_host, num_times, place), num_units=num_times),
            },
            num_rounds=place.num_rounds,
        )
    return [
        compared_row(
            f"all_reduce, {size * 4 // MIB} MiB each", "asyncio", 2, "us", ours=samples["ours"],
            against=against, floor=samples[key], target=target,
        )
        for key, against, target in (
            ("hand", "a sum by hand", None), ("host", "a sum on the host", OVER_HOST)
        )
    ]  # fmt: skip


async def measure_input(place: Place) -> list[Row]:
    """Compare steps with batches from the host with steps that have theirs, and ways to copy."""
    import torch

    from aioreplica.devices.backends import TorchBackend

    num_batches, ms = 4 if place.is_quick else 50, 5.0
    size = (MIB if place.is_quick else 32 * MIB) // 4  # of a batch, half of it for each replica
    batch = np.zeros((2, size // 2), np.float32)
    pinned = torch.zeros(batch.shape, pin_memory=place.is_gpu)

    async def step(x: Any) -> None:
        assert str(x.device) == place.device if place.is_gpu else isinstance(x, np.ndarray)
        await _me().run_on_device(place.work, ms)

    async with place.strategy() as strategy:
        there = ar.PerReplica([torch.zeros(1, device=place.device) for _ in range(2)])
        there = there if place.is_gpu else ar.PerReplica([np.zeros(1)] * 2)

        async def ours() -> None:
            async with strategy.distribute_dataset([batch] * num_batches) as batches:
                async for each in batches:
                    await strategy.run(step, args=(each,))

        async def floor() -> None:
            for _ in range(num_batches):
                await strategy.run(step, args=(there,))

        def put() -> None:
            TorchBackend().put(batch, place.device)

        def put_pinned() -> None:
            pinned.to(place.device, non_blocking=True)

        samples = await take_turns(
            {
                "ours": timed(ours, num_units=num_batches),
                "floor": timed(floor, num_units=num_batches),
                "put": timed(_repeated(put, num_batches, place), num_units=num_batches),
                "pinned": timed(_repeated(put_pinned, num_batches, place), num_units=num_batches),
            },
            num_rounds=place.num_rounds,
        )
    what = f"{size * 4 // MIB} MiB"
    return [
        compared_row(
            f"a step of {ms:g} ms, batches of {what}", "asyncio", 2, "us", ours=samples["ours"],
            against="batches that are there", floor=samples["floor"], target=HIDDEN,
        ),
        compared_row(
            f"a copy of {what} to the device", "asyncio", 1, "us", ours=samples["put"],
            against="from pinned memory", floor=samples["pinned"],
        ),
    ]  # fmt: skip


async def measure_memory(place: Place) -> list[Row]:
    """Compare memory after many steps with that after a tenth of them."""
    import torch

    num_steps = 100 if place.is_quick else 10_000
    weight = torch.eye(256, device=place.device) / 2

    async def step(x: Any) -> None:
        product = await _me().run_on_device(_rectified, x, weight)
        mean = await _me().all_reduce("mean", product)
        await _me().run_on_device(_distance, mean, product)

    async with place.strategy() as strategy:
        used: list[dict[str, float]] = []
        x = ar.PerReplica([torch.ones(64, 256, device=place.device) for _ in range(2)])
        for count in (num_steps // 10, num_steps - num_steps // 10):
            for _ in range(count):
                await strategy.run(step, args=(x,))
            used.append(_used_mib(place))
    return [
        compared_row(
            f"{name} memory after {num_steps} steps", "asyncio", 2, "MiB", ours=[used[1][name]],
            against=f"after {num_steps // 10}", floor=[used[0][name]],
            target=Target("difference", GROWTH_MIB[name]),
        )
        for name in used[0]
    ]  # fmt: skip


def _rectified(x: Any, weight: Any) -> Any:
    return (x @ weight).relu()


def _distance(x: Any, y: Any) -> Any:
    return (x - y).abs().sum()


def _used_mib(place: Place) -> dict[str, float]:
    gc.collect()
    place.wait()
    used = {"host": psutil.Process().memory_info().rss / MIB}
    if place.is_gpu:
        import torch

        used["device"] = torch.cuda.memory_allocated() / MIB
        used["reserved"] = torch.cuda.memory_reserved() / MIB
    return used


async def _require_no_copies(place: Place, action: Callable[[], Awaitable[object]]) -> None:
    """Check with the profiler that nothing goes between host and device."""
    if not place.is_gpu:
        return
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        await action()
    events = profiled.events()
    if not any(event.device_type == DeviceType.CUDA for event in events):
        print("all_reduce: copies were not looked for, as the profiler sees nothing of the GPU")
    copies = {event.name for event in events if "DtoH" in event.name or "HtoD" in event.name}
    assert not copies, f"all_reduce copied between host and device: {sorted(copies)}."


def _repeated(
    action: Callable[[], None], num_times: int, place: Place
) -> Callable[[], Awaitable[None]]:
    async def repeat() -> None:
        for _ in range(num_times):
            action()
        place.wait()

    return repeat


def _me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def _my_id() -> int:
    return _me().replica_id_in_sync_group
