"""Every function that users pass is run, or refused: a stray `yield` must not pass for a call.

Calling a generator function gives a generator and runs nothing. The table has a row for every
parameter of the public API that takes a function, and each is given generator functions of every
shape. What takes generator functions on purpose, and what the library calls itself, is listed.
"""

import asyncio
import contextlib
import functools
import importlib
import inspect
import itertools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import fields
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.checkpoint import CheckpointManager, Savepoint
from aioreplica.cluster import LocalCommunicator
from aioreplica.errors import WorkerLostError
from aioreplica.integrations.asgi import OnlineService
from aioreplica.online import FolderSource, Migration, OnlineLearner
from aioreplica.strategies import MultiWorkerMirroredStrategy
from aioreplica.telemetry import Observer, events_to
from tests.conftest import mirrored
from tests.parameter_server.coordinating import coordinating
from tests.strategies.test_multi_worker_shrink import count, lose
from tests.strategies.workers import communicator_of, on_workers

RAN: list[str] = []
Row = Callable[[Any], Awaitable[object]]


# ---- functions of which nothing runs -------------------------------------------------------------


def plain(*args: Any, **kwargs: Any) -> Iterator[None]:
    RAN.append("plain")
    yield


async def asynchronous(*args: Any, **kwargs: Any) -> AsyncIterator[None]:
    RAN.append("asynchronous")
    yield


class Holder:
    """Has a method with `yield`, and is called as one."""

    def method(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        RAN.append("method")
        yield

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        RAN.append("object")
        yield


def wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


KINDS: dict[str, Callable[..., Any]] = {
    "generator": plain,
    "async generator": asynchronous,
    "partial": functools.partial(plain, more=1),
    "partial of partial": functools.partial(functools.partial(asynchronous), more=1),
    "bound method": Holder().method,
    "callable object": Holder(),
    "wrapper": wrapped(plain),
    "wrapper of an async one": wrapped(asynchronous),
    "wrapper by contextmanager": contextlib.contextmanager(plain),
    "wrapper by asynccontextmanager": contextlib.asynccontextmanager(asynchronous),
    "lambda": lambda *args, **kwargs: plain(*args, **kwargs),
}
SEEN_AT_ONCE = {kind for kind in KINDS if not kind.startswith(("wrapper", "lambda"))}


# ---- one row per parameter -----------------------------------------------------------------------


async def in_step(use: Callable[[ar.ReplicaContext], Awaitable[object]]) -> None:
    async def step() -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        await use(ctx)

    async with mirrored(2) as strategy:
        await strategy.run(step)


async def in_program(use: Callable[[ar.ReplicaContext], object]) -> None:
    def step() -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        use(ctx)

    async with mirrored(2) as strategy:
        await strategy.run(step)


async def retried(fn: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        storage = ar.checkpoint.LocalStorage(folder)

        def refuse(path: str) -> Any:
            raise TimeoutError(path)

        storage.list = refuse  # type: ignore[method-assign]
        await ar.CheckpointManager(storage, retry=fn).save(1, {"a": 1})


async def with_strategy(use: Callable[[Any, ar.Variable], Any]) -> None:
    async with mirrored(2) as strategy:
        with strategy.scope():
            variable = ar.Variable(1.0)
        made = use(strategy, variable)
        if inspect.isawaitable(made):
            await made


async def optimizing(use: Callable[[Any, ar.Variable], Any], *, blocking: bool = False) -> None:
    async with mirrored(1) as strategy:
        with strategy.scope():
            variable, optimizer = ar.Variable(1.0), ar.optimizers.SGD(1.0)

        async def step() -> None:
            await use(optimizer, variable)

        def program() -> None:
            use(optimizer, variable)

        await strategy.run(program if blocking else step)


async def done_callback(ctx: ar.ReplicaContext, fn: Any) -> None:
    """What a wrapper gives is seen by the event loop, which is told of every failing callback."""
    told: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what["exception"]))
    handle = ctx.start_all_reduce("sum", 1)
    handle.add_done_callback(fn)
    await handle
    await ctx.barrier()
    await asyncio.sleep(0)
    if told:
        raise told[0]


def created(strategy: ar.Strategy, creator: Any) -> None:
    with strategy.scope(), strategy.extended.variable_creator_scope(creator):
        ar.Variable(1.0)


async def mapped(fn: Any) -> None:
    async for _ in ar.Dataset([1, 2]).map(fn):
        pass


async def learning(step_fn: Any, validate: Any = None) -> None:
    async with mirrored(2) as strategy:
        with strategy.scope():
            variable = ar.Variable(1.0)
        learner = OnlineLearner(
            strategy, step_fn, [variable], max_batch=1, max_delay_s=0.0, queue_size=4,
            validate=validate,
        )  # fmt: skip
        async with learner:
            ticket = await learner.submit({"x": np.float64(1.0)})
            try:
                await ticket
            except ar.errors.PoisonedExampleError as error:
                raise error.__cause__ or error from None


async def coordinated(use: Callable[[ar.ClusterCoordinator], Awaitable[object]]) -> None:
    async with coordinating(num_workers=1) as (_, coordinator):
        await use(coordinator)


async def fetched(coordinator: ar.ClusterCoordinator, remote: Any) -> None:
    await (await remote if inspect.isawaitable(remote) else remote).fetch()


async def used_resource(coordinator: ar.ClusterCoordinator, fn: Any) -> None:
    resource = coordinator.create_per_worker_resource(fn)
    await fetched(coordinator, coordinator.schedule(lambda made: str(made), (resource,)))


async def saved(fn: Any) -> None:
    """The number is asked for before the work begins, so a wrapper is found out then."""
    with TemporaryDirectory() as folder:
        work = asyncio.Event().wait()
        async with CheckpointManager(folder) as manager:
            saving = asyncio.ensure_future(manager.save_on_cancel(work, {"a": 1}, fn))
            await asyncio.sleep(0)
            saving.cancel()
            try:
                await saving
            except asyncio.CancelledError:
                raise AssertionError("It was saved, or was it?") from None
            finally:
                work.close()


async def rate(fn: Any) -> None:
    variable = ar.Variable(1.0)
    await ar.optimizers.SGD(fn).apply_gradients([(np.float64(1.0), variable)])


async def multiplied(fn: Any) -> None:
    variable = ar.Variable(1.0)
    optimizer = ar.optimizers.SGD(1.0, learning_rate_multipliers=fn)
    await optimizer.apply_gradients([(np.float64(1.0), variable)])


async def explored(call: Callable[[Any], Any], fn: Any) -> None:
    report = await asyncio.to_thread(call, fn)
    if isinstance(report, art.Report):
        report.check()


async def resized(fn: Any) -> None:
    both_ready = asyncio.Barrier(2)

    async def program(strategy: MultiWorkerMirroredStrategy) -> None:
        await strategy.run(count)
        await both_ready.wait()
        if communicator_of(strategy).rank == 0:
            lose(strategy)
            return
        with pytest.raises(WorkerLostError):
            await strategy.run(count)
        strategy.on_resize(fn)
        await strategy.shrink()

    await on_workers(2, 1, program)


async def grown(fn: Any) -> None:
    (communicator,) = LocalCommunicator.group(1, spawn=fn)
    async with ar.MultiWorkerMirroredStrategy(communicator) as strategy:
        await strategy.grow(2, Savepoint([ar.Variable(0.0, name="a")]))


async def modelled(fn: Any) -> None:
    art.linearizable(art.History(), fn)


ROWS: dict[str, Row] = {
    "Strategy.run(fn)": lambda fn: with_strategy(lambda s, _: s.run(fn)),
    "Extended.call_for_each_replica(fn)": lambda fn: with_strategy(
        lambda s, _: s.extended.call_for_each_replica(fn)
    ),
    "Strategy.run_steps(fn)": lambda fn: with_strategy(lambda s, _: s.run_steps(fn, iter([1, 2]))),
    "MultiWorkerMirroredStrategy.on_resize(fn)": resized,
    "LocalCommunicator.group(spawn)": grown,
    "Extended.update(fn)": lambda fn: with_strategy(lambda s, v: s.extended.update(v, fn)),
    "Extended.update_non_slot(fn)": lambda fn: with_strategy(
        lambda s, v: s.extended.update_non_slot(s.extended.non_slot_devices([v]), fn)
    ),
    "Extended.variable_creator_scope(creator)": lambda fn: with_strategy(
        lambda s, _: created(s, fn)
    ),
    "Strategy.distribute_values_from_function(value_fn)": lambda fn: with_strategy(
        lambda s, _: s.distribute_values_from_function(fn)
    ),
    "Collectives.merge_call(merge_fn)": lambda fn: in_step(lambda ctx: ctx.merge_call(fn)),
    "ReplicaContext.update(fn)": lambda fn: with_strategy(
        lambda s, v: s.run(updating, (s.extended, v, fn))
    ),
    "ReplicaContext.run_on_device(fn)": lambda fn: in_step(lambda ctx: ctx.run_on_device(fn)),
    "run_on_host(fn)": lambda fn: ar.run_on_host(fn),
    "device_op(fn)": lambda fn: ar.device_op(fn)(),
    "with_context(fn)": lambda fn: with_strategy(lambda s, _: s.run(ar.with_context(fn))),
    "outside_compilation(fn)": lambda fn: in_program(lambda _: ar.outside_compilation(fn)),
    "Handle.add_done_callback(fn)": lambda fn: in_step(lambda ctx: done_callback(ctx, fn)),
    "Dataset.map(fn)": mapped,
    "OnlineLearner.__init__(step_fn)": learning,
    "OnlineLearner.__init__(validate)": lambda fn: learning(lambda ctx, batch: None, fn),
    "ClusterCoordinator.schedule(fn)": lambda fn: coordinated(lambda c: fetched(c, c.schedule(fn))),
    "ClusterCoordinator.schedule_nowait(fn)": lambda fn: coordinated(
        lambda c: fetched(c, c.schedule_nowait(fn))
    ),
    "ClusterCoordinator.create_per_worker_resource(fn)": lambda fn: coordinated(
        lambda c: used_resource(c, fn)
    ),
    "CheckpointManager.save_on_cancel(step)": saved,
    "CheckpointManager.__init__(retry)": retried,
    "Optimizer.minimize(loss)": lambda fn: optimizing(lambda o, v: o.minimize(fn, [v])),
    "Optimizer.compute_gradients(loss)": lambda fn: optimizing(
        lambda o, v: o.compute_gradients(fn, [v])
    ),
    "BlockingOptimizer.minimize(loss)": lambda fn: optimizing(
        lambda o, v: o.blocking.minimize(fn, [v]), blocking=True
    ),
    "Optimizer.__init__(learning_rate)": rate,
    "Optimizer.__init__(learning_rate_multipliers)": multiplied,
    "value_and_grad(fn)": lambda fn: in_step(
        lambda ctx: ctx.run_on_device(ar.autodiff.value_and_grad(fn), 1.0)
    ),
    "explore(main)": lambda fn: explored(art.explore, fn),
    "exhaustive(main)": lambda fn: explored(art.exhaustive, fn),
    "run(main)": lambda fn: explored(art.run, fn),
    "replay(main)": lambda fn: explored(lambda main: art.replay(main, "token"), fn),
    "cancel_everywhere(main)": lambda fn: explored(art.cancel_everywhere, fn),
    "History.call(fn)": lambda fn: art.History().call(fn),
    "linearizable(model)": modelled,
}


FURTHER = {  # of other types, or of another package
    "Extended.call_for_each_replica(fn)", "Extended.update(fn)", "Extended.update_non_slot(fn)",
    "Extended.variable_creator_scope(creator)",
    "Optimizer.__init__(learning_rate)", "Optimizer.__init__(learning_rate_multipliers)",
}  # fmt: skip


async def updating(extended: Any, variable: ar.Variable, fn: Any) -> None:
    ctx = ar.get_replica_context()
    assert ctx is not None
    await ctx.update(variable, fn)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", ROWS)
async def test_a_function_of_which_nothing_would_run_is_refused(row: str, kind: str) -> None:
    RAN.clear()
    with pytest.raises((TypeError, ValueError)):
        await ROWS[row](KINDS[kind])
    assert RAN == []


@pytest.mark.parametrize("kind", sorted(SEEN_AT_ONCE))
def test_observers_and_services_are_given_functions_that_run(kind: str) -> None:
    """What these return is never looked at, so wrappers are not found out."""
    fn = KINDS[kind]
    for each in fields(Observer):
        with pytest.raises(TypeError, match="contains `yield`"):
            Observer(**{each.name: fn})
    with pytest.raises(TypeError, match="contains `yield`"):
        events_to(fn)
    with pytest.raises(TypeError, match="contains `yield`"):
        Migration(fn)
    for options in (
        {"predict": fn},
        {"predict": len, "report": fn},
        {"predict": len, "validate": fn},
    ):
        with pytest.raises(TypeError, match="contains `yield`"):
            OnlineService(cast("Any", None), input_like={"x": 0.0}, **options)
    RAN.clear()


@pytest.mark.parametrize("kind", ["async def", "async object"])
def test_callbacks_that_are_not_awaited_refuse_coroutine_functions(kind: str) -> None:
    class Called:
        async def __call__(self, *args: Any) -> None: ...

    async def told(*args: Any) -> None: ...

    fn: Any = told if kind == "async def" else Called()
    with pytest.raises(TypeError, match="run_began must be a plain function"):
        Observer(run_began=fn)
    with pytest.raises(TypeError, match="emit must be a plain function"):
        events_to(fn)
    with pytest.raises(TypeError, match="report must be a plain function"):
        OnlineService(cast("Any", None), len, input_like={"x": 0.0}, report=fn)
    with pytest.raises(TypeError, match="validate must be a plain function"):
        OnlineService(cast("Any", None), len, input_like={"x": 0.0}, validate=fn)
    with pytest.raises(TypeError, match="parse must be a plain function"):
        FolderSource("folder", parse=fn)
    with pytest.raises(TypeError, match="examples must be a plain function"):
        Migration(fn)
    with pytest.raises(TypeError, match="spawn must be a plain function"):
        LocalCommunicator.group(1, spawn=fn)


# ---- the table is complete -------------------------------------------------------------------

PACKAGES = (
    "aioreplica", "aioreplica.autodiff", "aioreplica.checkpoint", "aioreplica.cluster",
    "aioreplica.collectives", "aioreplica.device_loop", "aioreplica.metrics", "aioreplica.online",
    "aioreplica.optimizers", "aioreplica.optimizers.schedules", "aioreplica.telemetry",
    "aioreplica.testing", "aioreplica.integrations.asgi",
)  # fmt: skip
NAMES = {"fn", "dataset", "loss", "main", "step_fn", "validate"}  # of parameters that are functions
WITHOUT_A_ROW = {
    "iterated over": (
        "Strategy.distribute_dataset(dataset)",
        "Strategy.distribute_datasets_from_function(dataset_fn)",
        "ClusterCoordinator.create_per_worker_dataset(dataset)",
    ),
    "compared, never called": (
        "Handle.remove_done_callback(fn)", "Faults.fail_op(fn)", "Faults.hang_op(fn)",
        "cancel_everywhere(task)",
    ),
    "has to give a number or an object of another library": (
        "LinearWarmup.__init__(then)", "LossScaling.scaled(loss)", "StepLimits.__init__(loss)",
        "from_torch(scheduler)",
        "Journal.__init__(connect)", "events_to(now)",
    ),
    "tested apart": (
        *(f"Observer.__init__({each.name})" for each in fields(Observer)),
        "OnlineService.__init__(predict)", "OnlineService.__init__(report)",
        "OnlineService.__init__(validate)", "FolderSource.__init__(parse)", "events_to(emit)",
        "Migration.__init__(examples)", "pipeline(stages)",
        *(f"Prequential.__init__({name})" for name in ("predict", "split", "detector", "on_drift")),
        "LocalSGD.minimize(loss)",
    ),
    "called by the library, with functions of its own or checked before": (
        "differentiate_variables(loss)", "Strategy.__init__(new_variable)",
        "DistributedDataset.__init__(known_spec)", "DistributedDataset.__init__(num_replicas)",
        "DistributedDataset.__init__(on_begin)",
        "ClosureEngine.create_state(factory)", "LocalClosureEngine.create_state(factory)",
        "DaskClosureEngine.create_state(factory)", "ClosureWorker.once(make)",
        "StateHandle.when_lost(tell)",
        "Communicator.all_gather_then_reduce(agrees)",
    ),
}  # fmt: skip


def functions_of(module: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public functions and methods of a package, with the names of their classes."""
    package = importlib.import_module(module)
    for name in package.__all__:
        exported = getattr(package, name)
        if not inspect.isclass(exported):
            yield name, exported
            continue
        for owner in exported.__mro__:
            if owner.__module__.startswith("aioreplica"):
                for key, value in vars(owner).items():
                    if key == "__init__" or not key.startswith("_"):
                        yield f"{owner.__name__}.{key}", getattr(value, "__func__", value)


def test_every_parameter_that_takes_a_function_has_a_row() -> None:
    found = {
        f"{name}({parameter.name})"
        for module in PACKAGES
        for name, fn in functions_of(module)
        if inspect.isfunction(fn)
        for parameter in inspect.signature(fn).parameters.values()
        if "Callable" in str(parameter.annotation) or parameter.name in NAMES
    }
    known = {*ROWS, *itertools.chain(*WITHOUT_A_ROW.values())}

    assert found - known == set()
    assert {name for name in known - found if name not in FURTHER} == set()
