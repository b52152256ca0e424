"""A failed or cancelled loop that is continued: each element is in the weights once, in order."""

import asyncio
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art

NUM_STEPS = 5
POINTS = ("start", "reduced", "applied", "end")  # of the step whose update is between the two
At = tuple[int, int, str]


class FaultError(Exception):
    """Raised by a step on purpose."""


class Training:
    """A loop whose step calls `at(point)` at each of its points."""

    steps_per_update = 1

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.strategy = ar.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
        with self.strategy.scope():
            self.weight = ar.Variable(np.float64(0.0))
            self.optimizer = ar.optimizers.SGD(0.5, momentum=0.5)
        data = ar.ArrayDataset(
            np.arange(1.0, 1 + num_replicas * NUM_STEPS) ** 2, batch_size=num_replicas
        )
        self.batches = self.strategy.distribute_dataset(data)
        self.iterator = aiter(self.batches)
        self.at: Callable[[At], None] = lambda _at: None

    def step(self, ctx: ar.MultiStepContext, x: np.ndarray) -> None:
        replica = ar.get_replica_context()
        assert replica is not None
        blocking, me = replica.blocking, replica.replica_id_in_sync_group
        number = round(float(x[0]) ** 0.5 - 1) // self.num_replicas
        self.at((me, number, "start"))
        gradient = blocking.all_reduce("sum", x[0] + self.weight.value)
        self.at((me, number, "reduced"))
        self.optimizer.blocking.apply_gradients([(gradient, self.weight)])
        self.at((me, number, "applied"))
        blocking.all_reduce("mean", x[0])
        self.at((me, number, "end"))

    def require_agreement(self) -> None:
        """Check that weights, iterations and the state of the dataset are of the same step."""
        done = int(self.optimizer.iterations.value)
        place = self.batches.state_dict()
        read = place["position"] + place["epoch"] * NUM_STEPS * self.num_replicas
        assert read == done * self.num_replicas
        assert self.weight.value == expected(self.num_replicas)[done]

    async def finish(self) -> None:
        """Run what is left; by then every element was applied once."""
        while (await self.strategy.run_steps(self.step, self.iterator, 2)).steps_run:
            self.require_agreement()
        self.require_agreement()
        assert self.optimizer.iterations.value == NUM_STEPS // self.steps_per_update
        await self.batches.aclose()
        await self.strategy.aclose()


class Accumulating(Training):
    """The same with a step that adds two gradients; every second step applies what was added."""

    steps_per_update = 2

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self.window = ar.GradientAccumulator(self.optimizer)

    def step(self, ctx: ar.MultiStepContext, x: np.ndarray) -> None:
        replica = ar.get_replica_context()
        assert replica is not None
        me = replica.replica_id_in_sync_group
        number = round(float(x[0]) ** 0.5 - 1) // self.num_replicas
        self.at((me, number, "start"))
        self.window.blocking.add([(x[0], self.weight)])
        self.at((me, number, "reduced"))
        self.window.blocking.add([(np.float64(0.1), self.weight)])
        if number % 2:
            self.window.blocking.apply()
        self.at((me, number, "applied"))
        replica.blocking.all_reduce("mean", x[0])
        self.at((me, number, "end"))

    def require_agreement(self) -> None:
        """Check that weights, sums and the state of the dataset are of the same step."""
        count, place = self.num_replicas, self.batches.state_dict()
        done = place["position"] // count + place["epoch"] * NUM_STEPS
        elements = np.arange(1.0, 1 + count * NUM_STEPS) ** 2
        weight = velocity = np.float64(0.0)
        sums: dict[int, np.float64] = {}
        for step in range(done):
            for i in range(count):
                sums[i] = sums.get(i, np.float64(0)) + elements[step * count + i] + 0.1
            if step % 2:
                velocity = 0.5 * velocity + sum(sums.values())
                weight -= 0.5 * velocity
                sums = {}
        entries = self.window.checkpoint_entries()
        assert {name: float(state["total"]) for (_, name), state in entries.items()} == {
            f"sum.{i}": total for i, total in sums.items()
        }
        assert {state["count"] for state in entries.values()} == ({2} if sums else set())
        assert self.weight.value == weight
        assert self.optimizer.iterations.value == done // 2


def expected(num_replicas: int) -> list[float]:
    """Compute the weights after 0, 1, ... steps without the library."""
    elements = np.arange(1.0, 1 + num_replicas * NUM_STEPS) ** 2
    weights, velocity = [0.0], 0.0
    for step in range(NUM_STEPS):
        parts = elements[step * num_replicas : (step + 1) * num_replicas]
        gradient = float(sum(x + weights[-1] for x in parts)) * num_replicas  # each brings the sum
        velocity = 0.5 * velocity + gradient
        weights.append(weights[-1] - 0.5 * velocity)
    return weights


async def fail(num_replicas: int, *where: At, kind: type[Training] = Training) -> None:
    """Let replicas raise at these points, one loop after the other; continue each time."""
    training = kind(num_replicas)
    left = set(where)

    def at(here: At) -> None:
        if here in left:
            left.remove(here)
            raise FaultError(here)

    training.at = at
    while left:
        with pytest.raises(FaultError):
            await training.strategy.run_steps(training.step, training.iterator, NUM_STEPS)
        training.require_agreement()
    await training.finish()


async def cancel(num_replicas: int, where: At, kind: type[Training] = Training) -> None:
    """Cancel the loop when a replica comes to a point, from the event loop; continue."""
    training = kind(num_replicas)
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(
        training.strategy.run_steps(training.step, training.iterator, NUM_STEPS)
    )
    is_there = asyncio.Event()

    def at(here: At) -> None:
        if here == where:
            loop.call_soon_threadsafe(is_there.set)

    training.at = at
    await is_there.wait()
    task.cancel()
    await asyncio.wait([task])  # the last steps may have ended before
    training.require_agreement()
    await training.finish()


# Of two replicas one can be ahead of the other; a third one adds orders only to a long search.
COUNTS = [1, 2, pytest.param(3, marks=pytest.mark.xslow)]


def places(num_replicas: int) -> list[At]:
    return list(product(range(num_replicas), (1, NUM_STEPS - 1), POINTS))


@pytest.mark.xslow
@pytest.mark.parametrize("kind", [Training, Accumulating])
@pytest.mark.parametrize("num_replicas", COUNTS)
def test_a_loop_that_failed_anywhere_goes_on_exactly_once(
    num_replicas: int, kind: type[Training]
) -> None:
    for where in places(num_replicas):
        art.explore(lambda where=where: fail(num_replicas, where, kind=kind), schedules=5).check()


@pytest.mark.xslow
@pytest.mark.parametrize("kind", [Training, Accumulating])
@pytest.mark.parametrize("num_replicas", COUNTS)
def test_a_loop_that_was_cancelled_anywhere_goes_on_exactly_once(
    num_replicas: int, kind: type[Training]
) -> None:
    for where in places(num_replicas):
        art.explore(lambda where=where: cancel(num_replicas, where, kind), schedules=5).check()


@pytest.mark.parametrize("kind", [Training, Accumulating])
def test_a_loop_that_fails_again_and_again_goes_on_exactly_once(kind: type[Training]) -> None:
    """Behind the update of a step its element is used up, before it the next loop gets it."""
    again = [(1, 1, "start"), (0, 1, "applied"), (1, 2, "reduced"), (1, 2, "end")]
    art.explore(lambda: fail(2, *again, kind=kind), schedules=20).check()


def test_sums_added_ahead_of_another_replica_are_undone() -> None:
    """Replica 0 is three steps ahead when replica 1 fails; one sum is of arrays, one of rows."""

    async def main() -> None:
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            with strategy.scope():
                dense, sparse = ar.Variable(np.zeros(2)), ar.Variable(np.zeros((4, 1)))
                window = ar.GradientAccumulator(ar.optimizers.SGD(1.0))
            ahead, has_failed = asyncio.Event(), False
            loop = asyncio.get_running_loop()

            def step(_ctx: ar.MultiStepContext, x: int) -> None:
                nonlocal has_failed
                ctx = ar.get_replica_context()
                assert ctx is not None
                me = ctx.replica_id_in_sync_group
                rows = ar.IndexedSlices(np.full((1, 1), 1.0), np.array([x % 4]), (4, 1))
                window.blocking.add([(np.full(2, 10.0**x), dense), (rows, sparse)])
                if me == 1 and x == 1 and not has_failed:
                    ar.outside_compilation(ahead.wait)
                    has_failed = True
                    raise FaultError
                if me == 0 and x == 3:
                    loop.call_soon_threadsafe(ahead.set)

            elements = iter(range(6))
            with pytest.raises(FaultError):
                await strategy.run_steps(step, elements, 5)
            assert window.num_added == 2  # that of step 0 by both replicas
            assert (await strategy.run_steps(step, elements, 5)).steps_run == 5
            await window.apply()
            assert dense.value.tolist() == [-222222.0] * 2
            assert sparse.value[:, 0].tolist() == [-4.0, -4.0, -2.0, -2.0]

    art.explore(main, schedules=10).check()


@pytest.mark.parametrize("kind", ["metric", "on_read", "group"])
def test_writes_ahead_of_another_replica_consume_no_element(kind: str) -> None:
    """Replica 0 has written in later steps when replica 1 fails: these are run again."""

    async def main() -> None:
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            with strategy.scope():
                metric = ar.metrics.Mean()
                own = ar.Variable(np.float64(0), synchronization="on_read", aggregation="sum")
                shared = ar.Variable(np.float64(0), aggregation="sum")
            ahead, seen, has_failed = asyncio.Event(), ([], []), False
            loop = asyncio.get_running_loop()

            def write(ctx: ar.ReplicaContext) -> None:
                if kind == "metric":
                    metric.update_state(1.0)
                elif kind == "on_read":
                    own.blocking.assign_add(1.0)
                else:
                    alone = ctx.blocking.group([ctx.replica_id_in_sync_group])
                    alone.merge_call(
                        lambda _strategy: shared.store.write({shared: shared.components})
                    )

            def step(_ctx: ar.MultiStepContext, x: int) -> None:
                nonlocal has_failed
                ctx = ar.get_replica_context()
                assert ctx is not None
                me = ctx.replica_id_in_sync_group
                if me == 1 and x == 1 and not has_failed:
                    ar.outside_compilation(ahead.wait)
                    has_failed = True
                    raise FaultError
                write(ctx)
                seen[me].append(x)
                if me == 0 and x == 3:
                    loop.call_soon_threadsafe(ahead.set)

            elements = iter(range(5))
            with pytest.raises(FaultError):
                await strategy.run_steps(step, elements, 5)
            assert (await strategy.run_steps(step, elements, 5)).steps_run == 4
            assert seen[1] == [0, 1, 2, 3, 4]
            assert seen[0][-4:] == [1, 2, 3, 4]

    art.explore(main, schedules=10).check()


def test_a_write_of_a_part_of_the_replicas_hides_no_update() -> None:
    """Replica 1 fails behind its update; replica 0 is a step on, and has written in a group."""

    async def main() -> None:
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            with strategy.scope():
                weight = ar.Variable(np.zeros(3), aggregation="sum")
                other = ar.Variable(np.float64(0), aggregation="sum")
                optimizer = ar.optimizers.SGD(1.0)
            loop, ahead, has_failed = asyncio.get_running_loop(), asyncio.Event(), False

            def step(_ctx: ar.MultiStepContext, x: int) -> None:
                nonlocal has_failed
                ctx = ar.get_replica_context()
                assert ctx is not None
                me = ctx.replica_id_in_sync_group
                if me == 0 and x == 1 and not has_failed:
                    ctx.blocking.group([0]).merge_call(lambda _strategy: other.assign(1.0))
                    loop.call_soon_threadsafe(ahead.set)
                gradient = np.zeros(3)
                gradient[x] = -0.5  # each of two replicas
                optimizer.blocking.apply_gradients([(gradient, weight)])
                if me == 1 and x == 0 and not has_failed:
                    ar.outside_compilation(ahead.wait)
                    has_failed = True
                    raise FaultError

            elements = iter(range(3))
            with pytest.raises(FaultError):
                await strategy.run_steps(step, elements, 3)
            assert (await strategy.run_steps(step, elements, 3)).steps_run == 2
            assert weight.value.tolist() == [1.0, 1.0, 1.0]

    art.explore(main, schedules=10).check()


def test_a_state_taken_behind_an_update_holds_its_element() -> None:
    """`state_dict` agrees with the weights while a loop runs, too."""

    async def main() -> None:
        training = Training(2)

        def at(here: At) -> None:
            if here[0] == 0 and here[2] in {"reduced", "applied"}:
                ar.outside_compilation(training.require_agreement)

        training.at = at
        await training.finish()

    art.explore(main, schedules=10).check()


def test_sums_taken_during_a_loop_are_those_of_its_element() -> None:
    async def main() -> None:
        training = Accumulating(2)

        def at(here: At) -> None:
            replica = ar.get_replica_context()
            assert replica is not None
            replica.blocking.barrier()  # else the two are read in different steps
            if here[0] == 0:
                ar.outside_compilation(training.require_agreement)
            replica.blocking.barrier()

        training.at = at
        await training.finish()

    art.explore(main, schedules=10).check()


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [Training, Accumulating])
@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_on_real_threads_too(num_replicas: int, kind: type[Training]) -> None:
    for where in places(num_replicas):
        await fail(num_replicas, where, kind=kind)
        await cancel(num_replicas, where, kind)
