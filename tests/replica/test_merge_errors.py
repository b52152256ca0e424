"""What a merge raises: the same object on every replica, with its own frames, whatever it is."""

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from tests.replica.gated import me, my_id
from tests.replica.simulated import program, simulate

Meet = Callable[[], Awaitable[Any]]


class MergeError(Exception):
    """What merge functions raise."""


class HardError(BaseException):
    """What is no Exception."""


def deep_inside(error: BaseException) -> None:
    raise error.with_traceback(None)  # the program may be run again


def fails(error: BaseException) -> Callable[..., Any]:
    def fails_at_once(strategy: Any, *args: Any) -> None:
        deep_inside(error)

    return fails_at_once


def fails_later(error: BaseException) -> Callable[..., Any]:
    async def fails_after_a_while(strategy: Any, *args: Any) -> None:
        await asyncio.sleep(1)
        deep_inside(error)

    return fails_after_a_while


async def update(fn: Callable[..., Any]) -> None:
    variable = await me().variable(0.0)
    await me().update(variable, fn)


async def update_all(fn: Callable[..., Any]) -> None:
    variable = await me().variable(0.0)
    await me().update(variable, fn, group=False)


async def merge_in_group(fn: Callable[..., Any]) -> None:
    ctx = me()
    await ctx.group(range(ctx.num_replicas_in_sync)).merge_call(fn)


MEETINGS: dict[str, Callable[[Callable[..., Any]], Awaitable[None]]] = {
    "merge_call": lambda fn: me().merge_call(fn),
    "update": update,
    "update, all results": update_all,
    "group": merge_in_group,
}


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


# ---- frames ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [fails, fails_later])
@pytest.mark.parametrize("meeting", MEETINGS)
def test_the_frames_of_the_merge_function_are_in_the_traceback(
    meeting: str, make: Callable[[BaseException], Callable[..., Any]], size: int
) -> None:
    error = MergeError("in the merge")
    fn = make(error)

    async def step() -> None:
        await MEETINGS[meeting](fn)

    with pytest.raises(MergeError) as caught:
        simulate(size, step)

    assert caught.value is error
    names = frames(error)
    assert names[-2:] == [fn.__name__, "deep_inside"]
    assert "step" in names  # and the replica's own, once
    assert names.count(fn.__name__) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_each_replica_that_catches_it_sees_the_frames(size: int) -> None:
    """Raised again on every replica, the object does not gather the frames of the others."""
    seen: list[list[str]] = []

    async def step() -> None:
        try:
            await me().merge_call(fails(MergeError("once")))
        except MergeError as error:
            seen.append(frames(error))

    simulate(size, step)

    assert len(seen) == size
    for names in seen:
        assert names[0] == "step"
        assert names[-2:] == ["fails_at_once", "deep_inside"]
        assert names.count("step") == 1


@pytest.mark.parametrize("size", [2, 3])
def test_errors_of_a_handle_have_its_frames_each_time(size: int) -> None:
    class Refuses(ar.collectives.Compression):
        def __init__(self) -> None:
            super().__init__(error_feedback=False)

        def encode(self, value: Any) -> Any:
            deep_inside(MergeError("cannot"))

        def decode(self, code: Any, shape: tuple[int, ...], dtype: Any) -> Any:
            raise AssertionError("never encoded")

    options = ar.CommunicationOptions(compression=Refuses())
    lengths: list[int] = []

    async def step() -> None:
        handle = me().start_all_reduce("sum", np.ones(3), options)
        for _ in range(3):
            with pytest.raises(MergeError) as caught:
                await handle
            lengths.append(len(frames(caught.value)))
            assert frames(caught.value)[-2:] == ["encode", "deep_inside"]
            with pytest.raises(MergeError) as caught:
                handle.result()
            assert frames(caught.value)[-2:] == ["encode", "deep_inside"]
            assert handle.exception() is caught.value

    simulate(size, step)
    assert len(set(lengths)) == 1  # no longer each time


# ---- what is no Exception ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("make", [fails, fails_later])
def test_a_base_exception_reaches_every_replica(
    size: int, make: Callable[[BaseException], Callable[..., Any]]
) -> None:
    error = HardError("stop")
    caught: list[BaseException] = []

    async def step(*, catch: bool) -> int:
        try:
            await me().merge_call(make(error))
        except HardError as raised:
            caught.append(raised)
            if not catch:
                raise
        return int(await me().all_reduce("sum", 1))

    async def main() -> None:
        async with ar.MirroredStrategy([f"cpu:{i}" for i in range(size)]) as strategy:
            result = await strategy.run(step, kwargs={"catch": True})
            assert strategy.local_results(result) == (size,) * size
            assert caught == [error] * size
            with pytest.raises(HardError) as raised:
                await strategy.run(step, kwargs={"catch": False})
            assert raised.value is error

    art.run(main)


def test_it_reaches_every_replica_in_every_order() -> None:
    caught: list[int] = []

    async def step() -> None:
        try:
            await me().merge_call(fails(HardError()))
        except HardError:
            caught.append(my_id())

    run = program(3, step)

    async def main() -> None:
        caught.clear()
        await run()
        assert sorted(caught) == [0, 1, 2]

    art.explore(main, schedules=60).check()


@pytest.mark.parametrize("make", [fails, fails_later])
def test_a_merge_that_is_cancelled_by_something_else_is_an_error(
    make: Callable[[BaseException], Callable[..., Any]],
) -> None:
    """The run was not cancelled, so it must not end as if it had been."""

    async def step() -> None:
        await me().merge_call(make(asyncio.CancelledError()))

    with pytest.raises(ar.errors.ReplicaCancelledError):
        simulate(3, step)


# ---- exceptions whose own methods fail ---------------------------------------------------------


class RefusesNotesError(Exception):
    """Takes no notes."""

    def add_note(self, note: str) -> None:
        raise AttributeError("no notes here")


class RefusesStrError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ArithmeticError("no text here")


class RefusesReprError(RefusesStrError):
    """Has neither text nor repr."""

    def __repr__(self) -> str:
        raise ArithmeticError("no repr here")


class RefusesEqualityError(Exception):
    """Cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("no comparison here")

    __hash__ = Exception.__hash__


class OddNotesError(Exception):
    """Has notes of its own kind."""

    __notes__ = 7  # type: ignore[assignment]  # it is hostile


HOSTILE = [
    RefusesNotesError,
    RefusesStrError,
    RefusesReprError,
    RefusesEqualityError,
    OddNotesError,
]

hostile = pytest.mark.parametrize("kind", HOSTILE)


async def in_the_step(error: BaseException) -> None:
    raise error


async def in_a_merge(error: BaseException) -> None:
    await me().merge_call(fails(error))


async def in_a_later_merge(error: BaseException) -> None:
    await me().merge_call(fails_later(error))


async def in_an_op(error: BaseException) -> None:
    await me().run_on_device(deep_inside, error)


async def in_unwinding(error: BaseException) -> None:
    try:
        await asyncio.wait_for(me().all_reduce("sum", 1), 0.1)
    except TimeoutError:
        raise error from None


WHERE = [in_the_step, in_a_merge, in_a_later_merge, in_an_op]


@hostile
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("where", WHERE)
def test_a_hostile_exception_is_raised_itself(
    kind: type[Exception], where: Callable[[BaseException], Awaitable[None]], size: int
) -> None:
    error = kind("mine")

    async def step() -> None:
        if where is in_a_merge or where is in_a_later_merge or my_id() == size - 1:
            await where(error)
        await me().barrier()

    assert raised_by(size, step) is error


@hostile
def test_a_hostile_exception_is_the_reason_of_a_withdrawal(kind: type[Exception]) -> None:
    error = kind("mine")

    async def step() -> None:
        if my_id() == 1:
            await in_unwinding(error)
        await asyncio.sleep(5)

    assert raised_by(2, step) is error


@hostile
def test_a_hostile_exception_behind_a_cancellation(kind: type[Exception]) -> None:
    error = kind("mine")

    async def step() -> None:
        if my_id() == 1:
            child = asyncio.ensure_future(me().all_reduce("sum", 1))
            await asyncio.sleep(0.1)
            try:
                raise error
            except kind:
                child.cancel()
                await child
        await asyncio.sleep(5)

    assert raised_by(2, step) is error


@hostile
def test_hostile_exceptions_of_several_replicas(kind: type[Exception]) -> None:
    """Two objects that cannot be compared as texts are two failures."""
    errors = [kind(str(i)) for i in range(2)]

    async def step() -> None:
        raise errors[my_id()]

    raised = raised_by(2, step)
    assert isinstance(raised, BaseExceptionGroup)
    assert [one is other for one, other in zip(raised.exceptions, errors, strict=True)] == [
        True
    ] * 2


@hostile
def test_a_hostile_exception_raised_while_being_cancelled_hides_nothing(
    kind: type[Exception],
) -> None:
    first = MergeError("first")

    async def step() -> None:
        if my_id() == 0:
            raise first
        try:
            await me().barrier()
        finally:
            raise kind("while unwinding")

    assert raised_by(2, step) is first
    assert "While being cancelled, replica 1 raised" in "\n".join(first.__notes__)


def raised_by(size: int, step: Callable[[], Any]) -> BaseException:
    """Return what a run raises, without its text being asked for."""
    found: list[BaseException] = []
    run = program(size, step)

    async def main() -> None:
        try:
            await run()
        except Exception as error:
            found.append(error)

    art.run(main)
    (error,) = found
    return error
