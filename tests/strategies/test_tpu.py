"""TPUStrategy: cores of hosts, steps per run, one infeed per host."""

import asyncio
import copy
import pickle
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.device_loop import Topology, find_topology
from aioreplica.errors import ContextError, DeviceError

pytestmark = pytest.mark.usefixtures("no_task_left")


def resolver(hosts: int = 2, cores: int | None = 2) -> ar.TPUClusterResolver:
    return ar.TPUClusterResolver(hosts, cores)


def assigned(cores: tuple[int, ...], **options: Any) -> ar.TPUStrategy:
    return ar.TPUStrategy(resolver(), device_assignment=ar.DeviceAssignment(cores), **options)


def test_cores_are_counted_host_after_host() -> None:
    strategy = ar.TPUStrategy(resolver(2, 3))

    assert strategy.num_replicas_in_sync == 6
    assert (strategy.num_hosts, strategy.num_replicas_per_host) == (2, 3)
    assert [strategy.host_of(i) for i in range(6)] == [0, 0, 0, 1, 1, 1]
    assert strategy._runtime.host_replicas == ((0, 1, 2), (3, 4, 5))
    assert strategy.replica_names[4] == "/job:tpu_worker/replica:0/task:1/device:CPU:1"
    assert len(set(strategy.replica_names)) == 6
    assert strategy.cluster_resolver == resolver(2, 3)
    assert strategy.extended.require_static_shapes
    assert list(map(str, strategy.extended.worker_devices)) == [f"cpu:{i}" for i in range(6)]
    with pytest.raises(ValueError, match="no replica 6: ids are 0 to 5"):
        strategy.host_of(6)


def test_without_a_resolver_one_host_has_all_devices() -> None:
    strategy = ar.TPUStrategy()

    assert (strategy.num_replicas_in_sync, strategy.num_hosts) == (8, 1)
    assert strategy.cluster_resolver is None
    assert strategy.steps_per_run == 1
    assert ar.TPUStrategy(num_cores=3)._runtime.host_replicas == ((0, 1, 2),)


def test_num_cores_overrides_the_resolver() -> None:
    strategy = ar.TPUStrategy(resolver(2, 4), num_cores=5)

    assert strategy._runtime.host_replicas == ((0, 1, 2, 3), (4,))
    assert strategy.num_hosts == 2


def test_two_strategies_split_the_cores_of_a_host() -> None:
    assignments = [ar.DeviceAssignment((0, 1)), ar.DeviceAssignment(range(2, 4))]
    ours, theirs = (ar.TPUStrategy(resolver(1, 4), device_assignment=a) for a in assignments)

    assert list(map(str, ours.extended.worker_devices)) == ["cpu:0", "cpu:1"]
    assert list(map(str, theirs.extended.worker_devices)) == ["cpu:2", "cpu:3"]
    assert (theirs.num_hosts, theirs.num_replicas_in_sync) == (1, 2)
    assert theirs.replica_names[1] == "/job:tpu_worker/replica:0/task:0/device:CPU:3"


def test_an_assignment_may_leave_out_cores_and_hosts() -> None:
    strategy = ar.TPUStrategy(
        resolver(4, 2), steps_per_run=3, device_assignment=ar.DeviceAssignment((1, 4, 5))
    )

    for made in (strategy, copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert list(map(str, made.extended.worker_devices)) == ["cpu:1", "cpu:4", "cpu:5"]
        assert made._runtime.host_replicas == ((0,), (1, 2))
        assert (made.num_hosts, made.steps_per_run) == (2, 3)
        assert [made.host_of(i) for i in range(3)] == [0, 2, 2]
        assert made.replica_names[2] == "/job:tpu_worker/replica:0/task:2/device:CPU:1"
        assert made.num_replicas_per_host == 2
        assert made.extended.get_host_cpu_device(2) == ar.Device("cpu:0")
        with pytest.raises(ValueError, match=r"no host 1: ids are 0, 2\."):
            made.extended.get_host_cpu_device(1)


@pytest.mark.asyncio
async def test_both_halves_run_at_once() -> None:
    halves = [ar.DeviceAssignment((0, 1)), ar.DeviceAssignment((2, 3))]
    strategies = [ar.TPUStrategy(resolver(1, 4), device_assignment=half) for half in halves]

    def step(loop: ar.MultiStepContext, x: float) -> None:
        loop.set_last_step_output("sum", x, ar.ReduceOp.SUM)

    async with strategies[0], strategies[1]:
        ended = [strategy.run_steps(step, iter([1.0, 2.0]), 2) for strategy in strategies]
        found = await asyncio.gather(*ended)

    assert [each.last_step_outputs["sum"] for each in found] == [4.0, 4.0]


def test_devices_are_shared_out_over_hosts() -> None:
    assert ar.TPUStrategy(resolver(4, None))._runtime.host_replicas == (
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    )
    with pytest.raises(ValueError, match="8 devices cannot be shared out evenly over 3 hosts"):
        ar.TPUStrategy(resolver(3, None))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ar.TPUStrategy(resolver(2, 8)), DeviceError, r"wants 16 cores.*has 8 cpu"),
        (lambda: ar.TPUStrategy(num_cores=9), DeviceError, r"set_logical_devices\('cpu', 9\)"),
        (lambda: ar.TPUStrategy(resolver(), num_cores=5), ValueError, "more than the 4 cores"),
        (lambda: ar.TPUStrategy(num_cores=0), ValueError, "num_cores must be at least 1"),
        (lambda: ar.TPUStrategy(steps_per_run=0), ValueError, "steps_per_run must be at least 1"),
        (lambda: ar.TPUStrategy(steps_per_run=1.5), TypeError, "steps_per_run must be an int"),
        (lambda: ar.TPUStrategy("grpc://tpu"), TypeError, "num_hosts and cores_per_host"),
        (lambda: assigned((0, 4)), ValueError, "has core 4, but cores are 0 to 3"),
        (lambda: assigned((0,), num_cores=1), ValueError, r"num_cores=1 and DeviceAssignment"),
        (lambda: ar.DeviceAssignment((1, 1)), ValueError, r"ascend, got \[1, 1\]"),
        (lambda: ar.DeviceAssignment(()), ValueError, r"got \[\]"),
        (lambda: ar.DeviceAssignment((-1,)), ValueError, r"got \[-1\]"),
        (lambda: ar.DeviceAssignment("ab"), TypeError, "sequence of core numbers, got 'ab'"),
        (lambda: resolver(0), ValueError, "num_hosts must be at least 1"),
        (lambda: resolver(1, True), TypeError, "cores_per_host must be an int"),
    ],
    ids=range(15),
)
def test_bad_numbers_are_refused(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_any_object_with_hosts_and_cores_is_a_resolver() -> None:
    class Mine:
        num_hosts = 2
        cores_per_host = 3

    assert find_topology(Mine(), None, 8) == Topology(6, 3)
    assert ar.TPUStrategy(Mine()).num_hosts == 2


def test_copies_are_equal_and_unopened() -> None:
    strategy = ar.TPUStrategy(resolver(2, 4), steps_per_run=5, num_cores=6)

    for twin in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert twin == strategy
        assert twin.steps_per_run == 5
        assert twin.statistics().state == "new"
    assert strategy != ar.TPUStrategy(resolver(2, 4), steps_per_run=4, num_cores=6)
    with pytest.raises(TypeError, match="shallow"):
        copy.copy(strategy)


@pytest.mark.asyncio
async def test_initialize_and_finalize_are_idempotent() -> None:
    strategy = ar.TPUStrategy(num_cores=2)

    strategy.initialize()
    await strategy.initialize()
    assert strategy.statistics().state == "open"
    await strategy.finalize()
    await strategy.finalize()

    assert strategy.statistics().state == "closed"
    with pytest.raises(ContextError, match="is closed"):
        strategy.initialize()


@pytest.mark.asyncio
async def test_steps_per_run_is_how_many_steps_run() -> None:
    async with ar.TPUStrategy(resolver(2, 2), steps_per_run=5) as strategy:
        with strategy.scope():
            v = ar.Variable(0.0, aggregation="sum")

        def step(ctx: ar.MultiStepContext, x: float) -> None:
            v.blocking.assign_add(x)

        iterator = iter([1.0] * 8)
        runs = [(await strategy.run_steps(step, iterator)).steps_run for _ in range(2)]
        once = await strategy.run_steps(step, iter([1.0]), 1)

    assert (runs, once.steps_run) == ([5, 3], 1)
    assert v.value == 36.0


@pytest.mark.asyncio
async def test_every_host_feeds_its_own_replicas() -> None:
    data = np.arange(32.0).reshape(16, 2)

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        ctx.set_last_step_output("x", x)

    async with (
        ar.TPUStrategy(resolver(2, 2), steps_per_run=9) as strategy,
        strategy.distribute_dataset(ar.ArrayDataset(data, batch_size=8)) as batches,
    ):
        result = await strategy.run_steps(step, batches)

    assert result.steps_run == 2
    np.testing.assert_array_equal(np.concatenate(result.last_step_outputs["x"].values), data[8:])


@pytest.mark.asyncio
async def test_run_takes_options_as_elsewhere() -> None:
    async with ar.TPUStrategy(num_cores=2) as strategy:

        async def step() -> float:
            ctx = ar.get_replica_context()
            assert ctx is not None
            return await ctx.all_reduce("sum", ctx.shared_rng("x").random())

        options = ar.RunOptions(seed=3, stall_timeout=10.0)
        first = await strategy.run(step, options=options)
        with pytest.raises(TypeError, match="RunOptions"):
            await strategy.run(step, options={"seed": 3})  # type: ignore[arg-type]

    assert first[0] == first[1]
