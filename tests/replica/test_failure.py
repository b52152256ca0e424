"""A replica that fails: siblings are cancelled, and the run raises the replica's own exception."""

import asyncio
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.errors import (
    ContextError,
    MergeMismatchError,
    ReplicaCancelledError,
    WorkerLostError,
)
from aioreplica.replica import add_note_once
from aioreplica.replica._failure import Failures, resolve_failures

pytestmark = pytest.mark.usefixtures("no_task_left")

DEVICES = [f"cpu:{i}" for i in range(20)]


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def my_id() -> int:
    return me().replica_id_in_sync_group


# ---- choosing the exception ---------------------------------------------------------------------


def test_one_failure_is_raised_itself_with_a_note() -> None:
    error = ValueError("x")

    assert resolve_failures([(1, error)], DEVICES[:2], 17, "step") is error
    assert error.__notes__ == ["Raised in replica 1 (cpu:1) at step 17 of step."]


def test_alike_failures_give_the_lowest_one() -> None:
    errors = [ValueError("x") for _ in range(3)]

    chosen = resolve_failures([(2, errors[2]), (0, errors[0])], DEVICES[:3], 0, "step")

    assert chosen is errors[0]
    assert errors[0].__notes__ == ["Raised in replicas 0 (cpu:0), 2 (cpu:2) at step 0 of step."]
    assert not hasattr(errors[2], "__notes__")


def test_the_same_lost_workers_are_one_failure_whatever_each_replica_did_with_them() -> None:
    errors = [WorkerLostError(f"gone, in group {i}", ranks=(1,)) for i in range(2)]

    assert resolve_failures(list(enumerate(errors)), DEVICES[:2], 0, "step") is errors[0]

    others = [*errors[:1], WorkerLostError("gone, too", ranks=(2,))]
    chosen = resolve_failures(list(enumerate(others)), DEVICES[:2], 0, "step")
    assert isinstance(chosen, ExceptionGroup)


@pytest.mark.parametrize("other", [ValueError("y"), TypeError("x"), KeyboardInterrupt("x")])
def test_different_failures_give_a_group_in_replica_order(other: BaseException) -> None:
    error = ValueError("x")

    chosen = resolve_failures([(3, other), (1, error)], DEVICES[:4], 5, "step")

    assert isinstance(chosen, BaseExceptionGroup)
    assert isinstance(chosen, ExceptionGroup) == isinstance(other, Exception)
    assert list(chosen.exceptions) == [error, other]
    assert chosen.message == "2 of 4 replicas failed at step 5 of step"
    assert error.__notes__ == ["Raised in replica 1 (cpu:1) at step 5."]
    assert other.__notes__ == ["Raised in replica 3 (cpu:3) at step 5."]


def test_many_replicas_are_shortened() -> None:
    error = ValueError("x")

    resolve_failures([(i, error) for i in range(20)], DEVICES, 0, "step")

    assert error.__notes__[0].count("cpu:") == 8
    assert "and 12 more" in error.__notes__[0]


def test_a_note_is_added_once() -> None:
    error = ValueError("x")

    for note in ("a", "b", "a"):
        add_note_once(error, note)

    assert error.__notes__ == ["a", "b"]


def test_unwinding_is_mentioned_in_replica_order() -> None:
    error = ValueError("x")

    outcome = Failures(DEVICES[:3], 0, "step")
    outcome.cause = error
    outcome.unwound(2, KeyError("late"))
    outcome.unwound(1, error)
    outcome.unwound(0, OSError("gone"))

    assert outcome.error() is error

    assert [note.split(",")[1].split()[1] for note in error.__notes__] == ["0", "2"]
    assert "KeyError('late')" in error.__notes__[1]


# ---- in a run -----------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("where", ["barrier", "event", "op", "sleep"])
async def test_one_that_fails_ends_the_run(gang: ar.MirroredStrategy, who: int, where: str) -> None:
    error = ValueError("mine")
    unwound: list[int] = []

    async def step() -> None:
        await me().barrier()
        if my_id() == who:
            await asyncio.sleep(0)
            raise error
        try:
            match where:
                case "barrier":
                    await me().barrier()
                case "event":
                    await asyncio.Event().wait()
                case "op":
                    await me().run_on_device(int)
                    await asyncio.Event().wait()
                case "sleep":
                    await asyncio.sleep(3600)
        except asyncio.CancelledError:
            unwound.append(my_id())
            raise

    with pytest.raises(ValueError, match="mine") as caught:
        await gang.run(step)

    assert caught.value is error
    assert sorted(unwound) == [i for i in range(gang.num_replicas_in_sync) if i != who]
    [note] = error.__notes__
    assert f"replica {who} (cpu:{who}) at step 0" in note
    assert "step" in note.split(" of ")[1]


@pytest.mark.asyncio
@pytest.mark.parametrize("plain", [False, True], ids=["async def", "def"])
async def test_all_raising_alike_give_one_exception(strategy: ar.Strategy, plain: bool) -> None:
    async def step() -> None:
        raise KeyError("all")

    def plain_step() -> None:
        raise KeyError("all")

    with pytest.raises(KeyError, match="all") as caught:
        await strategy.run(plain_step if plain else step)

    assert "replica" in caught.value.__notes__[0]
    if not plain:
        for replica_id in range(strategy.num_replicas_in_sync):
            assert f"{replica_id} (" in caught.value.__notes__[0]


@pytest.mark.asyncio
async def test_two_that_fail_differently_give_a_group(gang: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if my_id() == 1:
            raise ValueError("one")
        if my_id() == 0:
            raise TypeError("zero")
        await me().barrier()

    with pytest.raises(ExceptionGroup) as caught:
        await gang.run(step)

    assert [type(error) for error in caught.value.exceptions] == [TypeError, ValueError]


@pytest.mark.asyncio
async def test_a_group_raised_by_a_replica_stays_that_group(pair: ar.MirroredStrategy) -> None:
    error = ExceptionGroup("own", [ValueError(1)])

    async def step() -> None:
        if my_id():
            raise error
        await me().barrier()

    with pytest.raises(ExceptionGroup) as caught:
        await pair.run(step)

    assert caught.value is error


@pytest.mark.asyncio
async def test_a_failure_beats_the_mismatch_it_causes(triple: ar.MirroredStrategy) -> None:
    """Replica 0 waits and replica 2 returns: both follow from what happened to replica 1."""

    async def step() -> None:
        if my_id() == 1:
            raise ValueError("root")
        if my_id() == 0:
            await me().barrier()

    with pytest.raises(ValueError, match="root"):
        await triple.run(step)


@pytest.mark.asyncio
async def test_errors_while_unwinding_are_notes(gang: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if my_id() == 0:
            await asyncio.sleep(0)
            raise ValueError("root")
        try:
            await asyncio.Event().wait()
        finally:
            if my_id() == 1:
                raise KeyError("cleaning up")

    with pytest.raises(ValueError, match="root") as caught:
        await gang.run(step)

    assert "While being cancelled, replica 1 raised KeyError('cleaning up')." in (
        caught.value.__notes__
    )


@pytest.mark.asyncio
async def test_after_the_abort_every_library_await_raises_cancelled(
    pair: ar.MirroredStrategy,
) -> None:
    with pair.scope():
        variable = ar.Variable(0.0, aggregation="sum")
    square = ar.device_op(lambda x: x * x)
    refused: list[str] = []

    async def step() -> None:
        ctx = me()
        if my_id():
            await asyncio.sleep(0)
            raise ValueError("root")
        try:
            await asyncio.Event().wait()
        finally:
            for name, call in {
                "barrier": ctx.barrier,
                "all_reduce": lambda: ctx.all_reduce("sum", 1),
                "merge_call": lambda: ctx.merge_call(lambda _s: None),
                "run_on_device": lambda: ctx.run_on_device(int),
                "run_on_host": lambda: ar.run_on_host(int),
                "device_op": lambda: square(2),
                "assign": lambda: variable.assign(1.0),
            }.items():
                try:
                    await call()
                except asyncio.CancelledError:
                    refused.append(name)

    with pytest.raises(ValueError, match="root"):
        await pair.run(step)

    assert refused == [
        "barrier", "all_reduce", "merge_call", "run_on_device", "run_on_host", "device_op",
        "assign",
    ]  # fmt: skip
    assert variable.value == 0.0


@pytest.mark.asyncio
async def test_a_replica_that_ends_cancelled_by_itself_has_failed(
    pair: ar.MirroredStrategy,
) -> None:
    async def step() -> None:
        if my_id():
            cancelled = asyncio.get_running_loop().create_future()
            cancelled.cancel()
            await cancelled
        await me().barrier()

    with pytest.raises(ReplicaCancelledError, match="not cancelled") as caught:
        await pair.run(step)
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    assert caught.value.step == 0
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.asyncio
async def test_stop_iteration_does_not_get_lost(strategy: ar.Strategy) -> None:
    def fail(*_args: Any) -> None:
        raise StopIteration(7)

    async def merging() -> None:
        await me().merge_call(fail)

    async def on_device() -> None:
        await me().run_on_device(fail)

    for step in (merging, on_device, fail):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await strategy.run(step)


# ---- plain functions ----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_plain_functions_fail_like_async_ones(pair: ar.MirroredStrategy) -> None:
    def step() -> None:
        if my_id():
            raise ValueError("one")

    with pytest.raises(ValueError, match="one") as caught:
        await pair.run(step)

    assert "replica 1 (cpu:1) at step 0" in caught.value.__notes__[0]


@pytest.mark.asyncio
async def test_a_failure_is_not_a_library_error(pair: ar.MirroredStrategy) -> None:
    """Nothing is wrapped: user code catches what user code raised."""

    async def step() -> None:
        raise LookupError

    with pytest.raises(LookupError) as caught:
        await pair.run(step)

    assert not isinstance(caught.value, (ContextError, MergeMismatchError))
    assert caught.value.__cause__ is None


class FalsyError(Exception):
    """An exception that is false, as one with the methods of a container may be."""

    def __len__(self) -> int:
        return 0


@pytest.mark.asyncio
async def test_an_exception_that_is_false_is_raised(strategy: ar.Strategy) -> None:
    async def step() -> None:
        raise FalsyError("empty")

    with pytest.raises(FalsyError, match="empty"):
        await strategy.run(step)
