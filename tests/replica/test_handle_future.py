"""A handle is a future; crossed handles that child tasks await are warned of, never misjudged."""

import asyncio
import gc
import sys
import warnings
import weakref
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.errors import MergeMismatchError, StallError
from tests.replica.gated import cycles, me, my_id
from tests.replica.simulated import program, simulate
from tests.sequencer import idle

# ---- what a future has -------------------------------------------------------------------------


def test_the_states_of_a_handle_before_and_after_it_is_done() -> None:
    async def step() -> int:
        if my_id() == 1:
            await asyncio.sleep(1)
        handle = me().start_all_reduce("sum", my_id() + 1)
        if my_id() == 0:
            assert not handle.done()
            assert not handle.cancelled()
            for early in (handle.result, handle.exception):
                with pytest.raises(asyncio.InvalidStateError, match="await the handle"):
                    early()
        await asyncio.sleep(2)
        assert handle.done()
        assert not handle.cancelled()
        assert handle.exception() is None
        assert handle.result() == handle.result() == 3
        return int(await handle)

    assert simulate(2, step) == (3, 3)


def test_looking_at_the_result_counts_as_asking_for_it() -> None:
    """No warning says that it was lost."""

    async def step() -> int:
        handle = me().start_all_reduce("sum", 1)
        await me().barrier()
        return int(handle.result())

    assert simulate(2, step) == (2, 2)


def test_callbacks_are_called_soon_and_once() -> None:
    calls: list[tuple[int, str, bool]] = []

    async def step() -> None:
        if my_id():
            await asyncio.sleep(1)
        handle = me().start_all_reduce("sum", 1)

        def early(done: ar.Handle) -> None:
            calls.append((my_id(), "early", done is handle and done.done()))

        def removed(done: ar.Handle) -> None:
            raise AssertionError("it was taken back")

        handle.add_done_callback(early)
        if not handle.done():
            handle.add_done_callback(removed)
            handle.add_done_callback(removed)
            assert handle.remove_done_callback(removed) == 2
        assert handle.remove_done_callback(removed) == 0
        assert not [call for call in calls if call[0] == my_id()]
        await handle
        await cycles(3)
        handle.add_done_callback(lambda done: calls.append((my_id(), "late", done.done())))
        assert (my_id(), "late", True) not in calls  # soon, not at once
        await cycles(2)

    simulate(2, step)
    assert sorted(calls) == [(i, when, True) for i in (0, 1) for when in ("early", "late")]


def test_a_callback_has_its_context_variables() -> None:
    variable: ContextVar[str] = ContextVar("variable")
    seen: list[str] = []

    async def step() -> None:
        handle = me().start_all_reduce("sum", 1)
        variable.set(f"caller {my_id()}")
        handle.add_done_callback(lambda done: seen.append(variable.get()))
        variable.set("later")
        await handle
        await cycles(2)

    simulate(2, step)
    assert sorted(seen) == ["caller 0", "caller 1"]


class RefusedError(Exception):
    """What a reduction raises."""


class Refuses(ar.collectives.Compression):
    """Fails when it encodes."""

    def __init__(self) -> None:
        super().__init__(error_feedback=False)

    def encode(self, value: Any) -> Any:
        raise RefusedError("cannot encode")

    def decode(self, code: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        raise AssertionError("never encoded")


def test_an_error_is_got_from_exception_result_and_await_alike() -> None:
    options = ar.CommunicationOptions(compression=Refuses())

    async def step() -> None:
        handle = me().start_all_reduce("sum", np.ones(3), options)
        await asyncio.wait([handle])
        error = handle.exception()
        assert isinstance(error, RefusedError)
        with pytest.raises(RefusedError) as caught:
            handle.result()
        assert caught.value is error
        with pytest.raises(RefusedError) as caught:
            await handle
        assert caught.value is error

    simulate(2, step)


def test_after_the_run_was_ended_it_is_cancelled() -> None:
    kept: list[ar.Handle] = []

    async def step() -> None:
        if my_id():
            await asyncio.sleep(1)
            raise RefusedError
        kept.append(me().start_all_reduce("sum", 1))
        await kept[-1]

    with pytest.raises(RefusedError):
        simulate(2, step)
    for handle in kept:
        assert handle.done()
        assert handle.cancelled()
        for ask in (handle.result, handle.exception):
            with pytest.raises(asyncio.CancelledError):
                ask()


# ---- in asyncio's own tools --------------------------------------------------------------------


async def by_wait(handle: ar.Handle) -> Any:
    done, pending = await asyncio.wait([handle], return_when=asyncio.FIRST_EXCEPTION)
    assert done == {handle}
    assert not pending
    return handle.result()


async def by_gather(handle: ar.Handle) -> Any:
    first, second = await asyncio.gather(handle, handle)
    assert first == second
    return first


async def by_task_group(handle: ar.Handle) -> Any:
    async def wait() -> Any:
        return await handle

    async with asyncio.TaskGroup() as tasks:
        children = [tasks.create_task(wait()) for _ in range(2)]
    first, second = (child.result() for child in children)
    assert first == second
    return first


async def by_as_completed(handle: ar.Handle) -> Any:
    (only,) = asyncio.as_completed([handle])
    return await only


async def by_wait_for_again(handle: ar.Handle) -> Any:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle, 0.25)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle, 0.25)
    return await handle


async def by_wait_again(handle: ar.Handle) -> Any:
    done, pending = await asyncio.wait([handle], timeout=0.5)
    assert not done
    assert pending == {handle}
    return await handle


async def by_shield(handle: ar.Handle) -> Any:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await asyncio.shield(handle)
    return await asyncio.shield(handle)


async def by_callback(handle: ar.Handle) -> Any:
    found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    handle.add_done_callback(lambda done: found.set_result(done.result()))
    return await found


TOOLS = [by_wait, by_gather, by_task_group, by_as_completed, by_callback]
AGAIN = [by_wait_for_again, by_wait_again, by_shield]


@pytest.mark.parametrize("tool", [*TOOLS, *AGAIN])
def test_it_works_as_other_futures_do(tool: Callable[[ar.Handle], Awaitable[Any]]) -> None:
    """Giving up a wait takes nothing from the others, nor from a later wait."""

    async def step() -> int:
        if tool in AGAIN and my_id():
            await asyncio.sleep(2)
            return int(await me().start_all_reduce("sum", my_id() + 1))
        return int(await tool(me().start_all_reduce("sum", my_id() + 1)))

    assert simulate(3, step) == (6, 6, 6)


@pytest.mark.parametrize("tool", TOOLS)
def test_it_does_in_every_order(tool: Callable[[ar.Handle], Awaitable[Any]]) -> None:
    async def step() -> int:
        return int(await tool(me().start_all_reduce("sum", my_id() + 1)))

    run = program(2, step)

    async def main() -> None:
        assert await run() == (3, 3)

    art.explore(main, schedules=40).check()


def test_the_first_of_several_that_is_done() -> None:
    async def step() -> list[Any]:
        pair, every = me().group([my_id()]), me()
        quick = pair.start_all_reduce("sum", 10)
        if my_id():
            await asyncio.sleep(1)
        slow = every.start_all_reduce("sum", 1)
        done, pending = await asyncio.wait([slow, quick], return_when=asyncio.FIRST_COMPLETED)
        assert quick in done
        if my_id() == 0:
            assert pending == {slow}
        return [quick.result(), await slow]

    assert simulate(2, step) == ([10, 2], [10, 2])


# ---- many in flight ----------------------------------------------------------------------------


def calls_for(count: int, tool: str) -> int:
    """Count the function calls that so many reductions in flight take."""

    async def step() -> None:
        handles = [me().start_all_reduce("sum", 1) for _ in range(count)]
        if tool == "await":
            for handle in handles:
                await handle
        else:
            await asyncio.gather(*handles)

    async def main() -> None:
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            await strategy.run(step)

    number = 0

    def count_call(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal number
        number += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        asyncio.run(main())
    finally:
        sys.setprofile(before)
    return number


@pytest.mark.xslow
@pytest.mark.parametrize("tool", ["await", "gather"])
def test_the_cost_of_handles_in_flight_is_linear(tool: str) -> None:
    calls_for(10, tool)  # what is done once
    small, large = calls_for(1000, tool), calls_for(4000, tool)

    assert large < 4.5 * small


# ---- crossed groups ----------------------------------------------------------------------------


async def in_child(handle: ar.Handle) -> Any:
    """As `wait_for` does on Python 3.11."""
    return await asyncio.ensure_future(handle)


async def shielded(handle: ar.Handle) -> Any:
    return await asyncio.shield(handle)


CHILDREN = [in_child, shielded, by_task_group, by_gather]


def crossed(wait: Callable[[ar.Handle], Awaitable[Any]], late_s: float = 0) -> Callable[[], Any]:
    """Make a step whose replicas 0 and 1 each wait for what the other would start after that."""

    async def step() -> None:
        if my_id() == 2:
            await me().start_all_reduce("sum", 1)
            return
        first, second = (0, 1) if my_id() == 0 else (1, 0)
        if my_id() == 1:
            await asyncio.sleep(late_s)
        groups = [me().group([0, 1]), me().group([0, 1, 2])]
        await wait(groups[first].start_all_reduce("sum", 1))
        await wait(groups[second].start_all_reduce("sum", 1))

    return step


@pytest.mark.parametrize("wait", CHILDREN)
@pytest.mark.parametrize("late_s", [0, 0.5, 5])
def test_a_circle_through_child_tasks_is_warned_of_and_stalls(
    wait: Callable[[ar.Handle], Awaitable[Any]], late_s: float
) -> None:
    """The warning comes a second after the circle closed, with the table; then the stall."""
    with (
        pytest.warns(RuntimeWarning, match="seem to wait for each other") as caught,
        pytest.raises(StallError) as stalled,
    ):
        simulate(3, crossed(wait, late_s), stall_timeout=30)

    text = str(caught[0].message)
    assert "start_all_reduce #1 (SUM)" in text
    assert "cpu:0" in text
    assert "cpu:1" in text
    assert [row.state for row in stalled.value.rows] == ["waiting"] * 3


def test_one_circle_is_warned_of_once_however_long_it_lasts() -> None:
    run = program(3, crossed(in_child), stall_timeout=10)

    async def main() -> None:
        with pytest.raises(StallError):
            await run()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        art.run(main)
    assert len([w for w in caught if "seem to wait" in str(w.message)]) == 1


@pytest.mark.parametrize("stall_timeout", [None, 30])
def test_the_replicas_own_task_makes_it_a_mismatch_at_once(stall_timeout: float | None) -> None:
    async def own(handle: ar.Handle) -> Any:
        return await handle

    with pytest.raises(MergeMismatchError) as caught:
        simulate(3, crossed(own), stall_timeout=stall_timeout)
    assert "start_all_reduce #1 (SUM) in group (0, 1)" in str(caught.value)


def test_a_slow_partner_is_not_a_circle() -> None:
    """A child that waits long for one who is merely late is not warned of."""

    async def step() -> int:
        if my_id() == 1:
            await asyncio.sleep(20)
        return int(await asyncio.wait_for(me().start_all_reduce("sum", 1), None))

    assert simulate(2, step) == (2, 2)


def test_a_circle_of_child_waits_resolved_in_time_is_not_an_error() -> None:
    """The replica itself goes on, so what looked like a circle was none."""

    async def step() -> list[int]:
        first, second = (0, 1) if my_id() == 0 else (1, 0)
        if my_id() == 2:
            return [await me().start_all_reduce("sum", 1)]
        groups = [me().group([0, 1]), me().group([0, 1, 2])]
        child = asyncio.ensure_future(in_child(groups[first].start_all_reduce("sum", 1)))
        await asyncio.sleep(0.5)
        other = await groups[second].start_all_reduce("sum", 1)
        return sorted([await child, other])

    assert simulate(3, step) == ([2, 3], [2, 3], [3])


def test_the_arguments_are_let_go_in_the_run_once_it_is_done() -> None:
    async def step() -> bool:
        value = np.ones(3)
        gone = weakref.ref(value)
        await me().start_all_reduce("sum", value)
        del value
        await me().barrier()
        await idle()
        gc.collect()
        return gone() is None

    assert asyncio.run(program(2, step)()) == (True, True)
