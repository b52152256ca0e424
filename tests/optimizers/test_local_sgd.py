"""LocalSGD: steps by oneself, exchanges, what differs in between, and what it is worth."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import Savepoint
from aioreplica.cluster import Communicator, LocalCommunicator
from aioreplica.collectives import Float16, TopK
from aioreplica.errors import ContextError, MergeMismatchError, WorkerLostError
from aioreplica.optimizers import SGD, Adagrad, LocalSGD, RMSprop
from tests.sequencer import idle

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]
Program = Callable[[Communicator, ar.MirroredStrategy], Awaitable[Any]]
NESTEROV = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}


async def on_workers(
    programs: Sequence[Program], num_replicas: int = 1, **exceptions: bool
) -> list[Any]:
    """Run a program on each worker, with a strategy of its own devices."""
    group = LocalCommunicator.group(len(programs))

    async def worker(c: Communicator, program: Program) -> Any:
        first = c.rank * num_replicas
        devices = [f"cpu:{i}" for i in range(first, first + num_replicas)]
        async with c, ar.MirroredStrategy(devices) as strategy:
            return await program(c, strategy)

    pairs = zip(group, programs, strict=True)
    return await asyncio.gather(*(worker(*pair) for pair in pairs), **exceptions)


class Descent:
    """Two variables that every worker pulls to a place of its own."""

    def __init__(
        self,
        c: Communicator,
        strategy: ar.MirroredStrategy,
        *,
        rate: float = 0.25,
        size: int = 3,
        **options: Any,
    ) -> None:
        self.strategy, self.goal = strategy, np.float32(10 * c.rank + np.arange(size))
        with strategy.scope():
            self.w = ar.Variable(np.full(size, 100 * c.rank, "f4"), name="w")
            self.b = ar.Variable(np.zeros((), "f4"), name="b")
            self.sgd = SGD(rate)
            self.local = LocalSGD(c, self.sgd, **{"every": 4, **options})

    async def step(self) -> None:
        pairs = [(np.float32(self.w.value - self.goal), self.w), (np.float32(1.0), self.b)]
        await self.local.apply_gradients(pairs)

    async def steps(self, count: int) -> None:
        for _ in range(count):
            await self.strategy.run(self.step)

    def values(self) -> list[Any]:
        return [self.w.value.tolist(), float(self.b.value)]


def trained(num_steps: int, **options: Any) -> Program:
    async def program(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        descent = Descent(c, strategy, **options)
        await descent.local.start()
        await descent.steps(num_steps)
        return descent.values()

    return program


def by_hand(num_workers: int, num_exchanges: int, every: int, outer: bool) -> list[Any]:
    """Return the values after exchanges, computed in float64."""
    anchor, momentum = np.zeros(4), np.zeros(4)
    for _ in range(num_exchanges):
        ends = []
        for rank in range(num_workers):
            x = anchor.copy()
            for _ in range(every):
                x -= 0.25 * np.append(x[:3] - (10 * rank + np.arange(3)), 1.0)
            ends.append(anchor - x)
        mean = np.mean(ends, 0)
        momentum = 0.9 * momentum + mean
        anchor = anchor - (0.7 * (0.9 * momentum + mean) if outer else mean)
    return [anchor[:3].tolist(), float(anchor[3])]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("has_outer", [False, True])
async def test_exchanges_average_or_follow_the_outer_optimizer(
    num_workers: int, has_outer: bool
) -> None:
    async def program(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        with strategy.scope():
            outer = SGD(**NESTEROV) if has_outer else None
        return await trained(12, outer=outer)(c, strategy)

    results = await on_workers([program] * num_workers)

    assert results == [results[0]] * num_workers
    w, b = by_hand(num_workers, 3, 4, has_outer)
    assert np.allclose(results[0][0], w, rtol=1e-5)
    assert np.isclose(results[0][1], b, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"compression": TopK(0.25)}, {"has_outer": True}])
async def test_values_assigned_before_the_start_are_where_all_begin(options: Any) -> None:
    async def program(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        with strategy.scope():
            outer = SGD(**NESTEROV) if options.get("has_outer") else None
        descent = Descent(c, strategy, every=1, outer=outer, compression=options.get("compression"))
        await descent.w.assign([10.0, 20.0, 30.0])  # as a model that was trained before
        await descent.local.start()
        assert descent.values()[0] == [10.0, 20.0, 30.0]

        async def step() -> None:
            await descent.local.apply_gradients([(np.zeros(3, np.float32), descent.w)])

        await strategy.run(step)
        return descent.values()[0]

    assert await on_workers([program] * 2) == [[10.0, 20.0, 30.0]] * 2


@pytest.mark.parametrize("has_outer", [False, True])
async def test_counts_and_flags_begin_alike_and_are_each_workers_own(has_outer: bool) -> None:
    """They were averaged, wrongly, or an error at the first exchange."""

    async def program(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        with strategy.scope():
            step_count = ar.Variable(0, name="global_step")
            small = ar.Variable(np.uint8(10 + c.rank))
            flags = ar.Variable(np.array([True, bool(c.rank)]))
            outer = SGD(**NESTEROV) if has_outer else None
        descent = Descent(c, strategy, every=2, outer=outer)
        if c.rank == 0:
            await step_count.assign(5)
        await descent.local.start()
        begun = int(step_count.value), int(small.value), flags.value.tolist()

        async def loss_step() -> None:
            await descent.local.minimize(
                lambda: (descent.w.value**2).sum(), [descent.w], step_count
            )

        for _ in range(3):
            await strategy.run(loss_step)
        if c.rank:
            await small.assign(np.uint8(250))
        await strategy.run(loss_step)
        assert descent.local.at_exchange
        return begun, int(step_count.value), int(small.value), descent.values()

    first, second = await on_workers([program] * 2)
    assert first[0] == second[0] == (5, 10, [True, False])
    assert (first[1:3], second[1:3]) == ((9, 10), (9, 250))
    assert first[3] == second[3]


async def test_in_between_workers_differ_and_it_says_so() -> None:
    async def program(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        descent = Descent(c, strategy)
        await descent.local.start()
        seen = []
        for _ in range(6):
            await descent.steps(1)
            seen.append((descent.local.at_exchange, descent.values()))
        await descent.local.exchange()
        await descent.local.exchange()  # does nothing
        assert repr(descent.local) == "<LocalSGD | 0 of 4 steps, 2 exchanges>"
        return [*seen, (descent.local.at_exchange, descent.values())]

    first, second = await on_workers([program] * 2)

    assert [at for at, _ in first] == [False] * 3 + [True] + [False] * 2 + [True]
    assert [a == b for a, b in zip(first, second, strict=True)] == [at for at, _ in first]


async def test_replicas_of_a_worker_meet_in_every_step() -> None:
    async def program(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        with strategy.scope():
            w = ar.Variable(np.zeros(2))
            local = LocalSGD(c, SGD(1.0), every=2)

        async def step() -> None:
            ctx = ar.get_replica_context()
            assert ctx is not None
            await local.apply_gradients([(np.full(2, 1.0 + ctx.replica_id_in_sync_group), w)])

        await local.start()
        for _ in range(2):
            await strategy.run(step)
        await strategy.check_in_sync([w])
        return w.components

    for components in await on_workers([program] * 2, num_replicas=2):
        assert [each.tolist() for each in components] == [[-6.0, -6.0]] * 2


def count_bytes(c: Communicator, sent: dict[Any, int], name: object) -> None:
    """Add up under a name what a worker sends from now on."""
    enqueue = c._enqueue

    def counted(call: Any) -> None:
        size = call.array.nbytes + sum(each.nbytes for each in call.summands)
        sent[name] = sent.get(name, 0) + size * (call.kind == "agreement")
        enqueue(call)

    c._enqueue = counted  # type: ignore[method-assign]


async def test_an_exchange_is_a_third_of_a_message_per_step() -> None:
    """Bytes over H, in one call of the communicator; with Float16 a half of that."""
    sent: dict[str, int] = {}

    def counting(name: str, **options: Any) -> Program:
        async def program(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
            count_bytes(c, sent, name)
            with strategy.scope():
                w = ar.Variable(np.zeros(1000, "f4"))
                local = LocalSGD(c, SGD(1.0), **options)

            async def step() -> None:
                await local.apply_gradients([(np.ones(1000, "f4"), w)])

            await local.start()
            for _ in range(6):
                await strategy.run(step)

        return program

    await on_workers([counting("1", every=1)])
    await on_workers([counting("3", every=3)])
    await on_workers([counting("half", every=3, compression=Float16())])
    await on_workers([counting("few", every=3, compression=TopK(0.01))])
    head, whole = 16, 4000
    assert sent == {
        "1": 7 * head + 6 * whole, "3": 3 * head + 2 * whole, "half": 3 * head + whole,
        "few": 3 * head,  # its rows follow, 20 of them
    }  # fmt: skip


@pytest.mark.parametrize("compression", [Float16(error_feedback=True), TopK(0.7)], ids=repr)
async def test_compressed_differences_lose_nothing_for_long(compression: Any) -> None:
    """The means of what workers want are reached, all the same on all of them."""
    made = [type(compression)(**vars_of(compression)) for _ in range(2)]

    async def program(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        return await trained(400, rate=0.02, compression=made[c.rank])(c, strategy)

    first, second = await on_workers([program] * 2)
    assert first == second
    assert np.allclose(first[0], np.arange(3) + 5.0, atol=0.3)


def vars_of(compression: Any) -> dict[str, Any]:
    options = {"error_feedback": compression.error_feedback}
    return options | ({"fraction": compression.fraction} if isinstance(compression, TopK) else {})


# ---- the first step, restoring -----------------------------------------------------------------


async def test_a_state_that_one_worker_has_put_back_is_taken_by_all() -> None:
    async def program(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        with strategy.scope():
            outer = SGD(**NESTEROV)
        descent = Descent(c, strategy, outer=outer)
        await descent.local.start()
        await descent.steps(4)
        state = {"w": descent.w, "b": descent.b, "local": descent.local}
        kept = Savepoint(state)
        await descent.steps(8)
        expected = descent.values()
        if c.rank == 0:
            kept.put_back()
        await descent.local.start()
        await descent.steps(8)
        return expected, descent.values()

    for expected, again in await on_workers([program] * 2):
        assert again == expected


@pytest.mark.parametrize("difference", ["every", "shape", "late"])
async def test_workers_that_differ_are_told(difference: str) -> None:
    async def program(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        if difference == "every":
            return await trained(4, every=2 + c.rank)(c, strategy)
        if difference == "shape":
            return await trained(4, size=3 + c.rank)(c, strategy)
        descent = Descent(c, strategy)
        await descent.local.start()
        if c.rank:
            await descent.steps(4)
        return await descent.local.start()

    text = (
        "worker 0 at its start, worker 1 at exchange 0"
        if difference == "late"
        else "names, dtypes or shapes"
    )
    for error in await on_workers([program] * 2, return_exceptions=True):
        assert isinstance(error, MergeMismatchError), error
        assert text in error.reason


OUTER: dict[str, Callable[[int], Any]] = {
    "rate": lambda rank: SGD(0.7 - 0.6 * rank),
    "schedule": lambda rank: SGD(lambda i: 0.7 if i < 1 else 0.5 - 0.1 * rank),
    "slots": lambda rank: SGD(0.7, momentum=0.9 * rank),
    "number": lambda rank: SGD(0.7, momentum=0.9 - 0.1 * rank),
    "flag": lambda rank: SGD(0.7, momentum=0.9, nesterov=bool(rank)),
    "class": lambda rank: [Adagrad, RMSprop][rank](0.7),
    "none": lambda rank: SGD(1.0) if rank else None,
}


@pytest.mark.parametrize("make", OUTER.values(), ids=OUTER)
async def test_outer_optimizers_that_differ_are_told(make: Callable[[int], Any]) -> None:
    """Each worker went on with its own, and nothing said so."""

    async def program(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        with strategy.scope():
            outer = make(c.rank)
        return await trained(12, outer=outer)(c, strategy)

    for error in await on_workers([program] * 2, return_exceptions=True):
        assert isinstance(error, MergeMismatchError), error
        assert "`outer` (its class, numbers or learning rate)" in error.reason


async def test_a_rate_changed_on_one_worker_is_told_and_a_schedule_is_asked_once() -> None:
    asked: list[int] = []

    async def program(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        with strategy.scope():
            outer = SGD(lambda i: asked.append(i) or 0.7)  # type: ignore[func-returns-value]
        descent = Descent(c, strategy, outer=outer)
        await descent.local.start()
        await descent.steps(8)
        outer.learning_rate = 0.7 if c.rank else 0.6
        await descent.steps(4)

    for error in await on_workers([program] * 2, return_exceptions=True):
        assert isinstance(error, MergeMismatchError), error
    assert sorted(asked) == [0, 0, 1, 1]


async def test_a_cancelled_step_completes_the_exchange_that_it_has_begun() -> None:
    reached = asyncio.Event()

    async def impatient(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        descent = Descent(c, strategy, every=1)
        await descent.local.start()
        await descent.steps(1)
        step = asyncio.ensure_future(strategy.run(descent.step))
        await idle()
        step.cancel()
        reached.set()
        with pytest.raises(asyncio.CancelledError):
            await step
        return descent.values()

    async def patient(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        descent = Descent(c, strategy, every=1)
        await descent.local.start()
        await descent.steps(1)
        await reached.wait()
        await descent.steps(1)
        return descent.values()

    first, second = await on_workers([impatient, patient])
    assert first == second


async def test_a_worker_that_leaves_is_named() -> None:
    async def leaving(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        await trained(4)(c, strategy)

    async def staying(c: Communicator, strategy: ar.MirroredStrategy) -> Any:
        await trained(8)(c, strategy)

    _, error = await on_workers([leaving, staying], return_exceptions=True)
    assert isinstance(error, WorkerLostError)
    assert error.ranks == (0,)


async def test_wrong_arguments_are_refused() -> None:
    async def program(c: Communicator, strategy: ar.MirroredStrategy) -> None:
        with strategy.scope():
            sgd = SGD(0.1)
            count = ar.Variable(0)
            with pytest.raises(ValueError, match="Make it behind the model"):
                LocalSGD(c, sgd, every=2)
            half = ar.Variable(np.zeros(2, "f2"), name="half")
            with pytest.raises(TypeError, match="'half' is float16"):
                LocalSGD(c, sgd, every=2)
        del count, half
        wrong: list[tuple[Any, type[Exception], str]] = [
            ((None, sgd, 2), TypeError, "takes an ar.cluster.Communicator"),
            ((c, None, 2), TypeError, "takes an optimizer"),
            ((c, sgd, 2.0), TypeError, "a number of steps, got 2.0"),
            ((c, sgd, 0), ValueError, "at least 1, got 0"),
            ((c, sgd, 2, 0.7), TypeError, "outer is None or an optimizer"),
            ((c, SGD(0.1), 2), ContextError, "Make both in the scope of one"),
        ]
        for arguments, kind, text in wrong:
            with pytest.raises(kind, match=text):
                LocalSGD(*arguments)

    await on_workers([program])


async def test_steps_without_a_start_are_refused() -> None:
    async def program(c: Communicator, strategy: ar.MirroredStrategy) -> None:
        descent = Descent(c, strategy)
        with pytest.raises(ContextError, match=r"await local\.start"):
            await descent.steps(1)
        with pytest.raises(ContextError, match=r"await local\.start"):
            await descent.local.exchange()
        await descent.local.start()
        with pytest.raises(ContextError, match="inside async step functions"):
            await descent.step()
        with strategy.scope():
            kept = ar.Variable(0.0)
        with pytest.raises(ContextError, match="Make it behind the model"):
            await descent.local.start()
        del kept

    await on_workers([program])


# ---- what it is worth ---------------------------------------------------------------------------


@pytest.mark.slow
async def test_digits_are_learned_as_well_with_a_sixteenth_of_the_exchanges() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    x = np.float32(digits.data / 16)
    y = np.eye(10, dtype="f4")[digits.target]
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    train, test = slice(0, 1408), slice(1408, None)

    sent: dict[Any, int] = {}

    def program(every: int, has_outer: bool) -> Program:
        async def learn(c: Communicator, strategy: ar.MirroredStrategy) -> float:
            with strategy.scope():
                w = ar.Variable(np.zeros((64, 10), "f4"))
                outer = SGD(**NESTEROV) if has_outer else None
                local = LocalSGD(c, SGD(0.5), every=every, outer=outer)

            async def step(inputs: Any, targets: Any) -> None:
                scores = np.exp(inputs @ w.value)
                gradient = inputs.T @ (scores / scores.sum(1, keepdims=True) - targets)
                await local.apply_gradients([(gradient / len(inputs), w)])

            await local.start()
            count_bytes(c, sent, (every, has_outer))
            own = [x[train][c.rank :: 2], y[train][c.rank :: 2]]
            for epoch in range(15):
                mixed = np.random.default_rng(epoch).permutation(704)
                for start in range(0, 704, 44):
                    rows = mixed[start : start + 44]
                    await strategy.run(step, (own[0][rows], own[1][rows]))
            right = (x[test] @ w.value).argmax(1) == y[test].argmax(1)
            return float(right.mean())

        return learn

    each_step = await on_workers([program(1, False)] * 2)
    averaged = await on_workers([program(16, False)] * 2)
    with_outer = await on_workers([program(16, True)] * 2)
    assert min(each_step) > 0.93
    assert min(*averaged, *with_outer) > min(each_step) * 0.99
    assert sent[1, False] == 16 * sent[16, False] == 16 * sent[16, True]


@pytest.mark.xslow
async def test_a_recommender_learns_as_well_with_a_sixteenth_of_the_exchanges() -> None:
    """Beside workers that sum gradients in every step, and beside an exchange in every step."""
    from sklearn.metrics import roc_auc_score

    from examples import recommender_ps as example

    data = example.make_data(0)
    tested = np.arange(example.NUM_EXAMPLES) % 5 == 0
    sent: dict[Any, int] = {}

    async def scores(
        c: Communicator, strategy: ar.Strategy, every: int | None, num_epochs: int = 3
    ) -> tuple[float, float]:
        with strategy.scope():
            model = example.Recommender(np.random.default_rng(0))
            if every is not None:
                # most rows are trained by one worker only, so differences are added up
                local: Any = LocalSGD(c, model.optimizer, every=every, outer=SGD(2.0))
                model.optimizer = local
        if every is not None:
            await local.start()
            count_bytes(c, sent, every)
        rng = np.random.default_rng(0)
        for _ in range(num_epochs):
            mixed = rng.permutation(np.flatnonzero(~tested))
            for batch in mixed.reshape(192, 250):
                await strategy.run(model.train, (data, batch[c.rank :: 2]))
        users, items, liked = (column[tested] for column in data)
        rows = model.users.value[users] * model.items.value[items]
        found = rows.sum(axis=1) + model.liking.value[items]
        return float(np.mean((found > 0) == liked)), float(roc_auc_score(liked, found))

    def program(every: int, num_epochs: int) -> Program:
        return lambda c, strategy: scores(c, strategy, every, num_epochs)

    async def synchronous(c: Communicator) -> Any:
        async with ar.MultiWorkerMirroredStrategy(c) as strategy:
            return await scores(c, strategy, None)

    in_step, again = await asyncio.gather(*map(synchronous, LocalCommunicator.group(2)))
    local, other = await on_workers([program(16, 3)] * 2)
    await on_workers([program(1, 1)] * 2)

    assert in_step == again
    assert local == other
    assert in_step[0] > 0.7
    assert local[0] > in_step[0] * 0.99
    assert local[1] > in_step[1] * 0.99
    assert sent[1] * 3 == 16 * sent[16]
