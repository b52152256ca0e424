"""A replica that leaves a collective early: the failure that made it leave is what `run` raises.

Where nothing had failed it is a mismatch. The replica may take a second of loop time to say.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.errors import MergeMismatchError, ReplicaCancelledError, StallError
from tests.replica.gated import cycles, me, my_id
from tests.replica.simulated import program, simulate


class PrefetchError(Exception):
    """What a neighbour of a collective raises."""


async def fails_soon() -> None:
    await asyncio.sleep(0.01)
    raise PrefetchError("the disk is full")


def in_every_order(size: int, step: Callable[[], Any], error: type[BaseException]) -> None:
    """Check under many schedules that the run raises exactly this."""
    run = program(size, step)

    async def main() -> None:
        with pytest.raises(error) as caught:
            await run()
        assert type(caught.value) is error

    art.explore(main, schedules=60).check()


# ---- the failure of a sibling task -------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("meeting", ["all_reduce", "merge_call", "handle", "group"])
def test_a_task_group_whose_other_child_fails_raises_its_group(size: int, meeting: str) -> None:
    """The child's own exception object is in it, the mismatch is a note."""
    error = PrefetchError("the disk is full")

    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise error

    async def meet() -> Any:
        if meeting == "merge_call":
            return await me().merge_call(lambda strategy: 0)
        if meeting == "handle":
            return await me().start_all_reduce("sum", 1)
        if meeting == "group":
            return await me().group(range(2)).all_reduce("sum", 1)
        return await me().all_reduce("sum", 1)

    async def step() -> None:
        if my_id() == 1:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(meet())
                tasks.create_task(fails())
        else:
            await asyncio.sleep(1000)  # the others never come to it

    with pytest.raises(ExceptionGroup) as caught:
        simulate(size, step)

    assert caught.value.exceptions == (error,)
    notes = "\n".join(caught.value.__notes__)
    assert "replica 1 (cpu:1) at step 0" in notes
    if meeting != "handle":  # a handle takes nothing from the others when it is left
        assert "It ended the run for the others: Replica 1 withdrew from" in notes


def test_it_is_the_failure_in_every_order() -> None:
    async def step() -> None:
        if my_id() == 1:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(me().all_reduce("sum", 1))
                tasks.create_task(fails_soon())
        else:
            await asyncio.sleep(1)
            await me().all_reduce("sum", 1)

    in_every_order(3, step, ExceptionGroup)


def test_gather_raises_the_failure_of_a_child() -> None:
    """`gather` leaves the child in the collective, so that nobody withdraws."""

    async def step() -> None:
        if my_id() == 1:
            await asyncio.gather(me().all_reduce("sum", 1), fails_soon())
        await asyncio.sleep(5)

    with pytest.raises(PrefetchError):
        simulate(2, step)


def test_an_exception_raised_while_the_cancelled_child_is_handled() -> None:
    """The withdrawal came first, and what the replica raises about it is the failure."""

    async def step() -> None:
        if my_id() == 1:
            child = asyncio.ensure_future(me().all_reduce("sum", 1))
            await cycles(3)
            child.cancel()
            try:
                await child
            except asyncio.CancelledError:
                raise PrefetchError("gave up") from None
        await asyncio.sleep(5)

    with pytest.raises(PrefetchError, match="gave up"):
        simulate(2, step)


def test_a_failure_handled_while_it_was_cancelled_is_found_behind_the_cancellation() -> None:
    """The replica's own end is a CancelledError; what it was handling says why."""

    async def step() -> None:
        if my_id() == 1:
            child = asyncio.ensure_future(me().all_reduce("sum", 1))
            await cycles(3)
            try:
                raise PrefetchError("first")
            except PrefetchError:
                child.cancel()
                await child
        await asyncio.sleep(5)

    with pytest.raises(PrefetchError, match="first") as caught:
        simulate(2, step)
    assert "Replica 1 withdrew from all_reduce #1" in "\n".join(caught.value.__notes__)


def test_two_that_withdraw_are_explained_by_the_first() -> None:
    async def step() -> None:
        if my_id() == 0:
            await asyncio.sleep(1000)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(me().all_reduce("sum", 1))
            tasks.create_task(fails_soon())

    with pytest.raises(ExceptionGroup) as caught:
        simulate(3, step)
    assert [type(error) for error in caught.value.exceptions] == [PrefetchError]


# ---- timeouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("catch", [False, True])
@pytest.mark.parametrize("how", ["timeout", "wait_for"])
def test_a_local_timeout_is_the_failure_unless_it_is_caught(how: str, catch: bool) -> None:
    async def waits_briefly() -> None:
        if how == "wait_for":
            await asyncio.wait_for(me().all_reduce("sum", 1), 0.5)
        async with asyncio.timeout(0.5):
            await me().all_reduce("sum", 1)

    async def step() -> None:
        if my_id() == 1:
            with suppress(TimeoutError if catch else ()):
                await waits_briefly()
            return
        await asyncio.sleep(2)
        await me().all_reduce("sum", 1)

    with pytest.raises(MergeMismatchError if catch else TimeoutError) as caught:
        simulate(2, step)

    assert not isinstance(caught.value, StallError)
    text = str(caught.value) if catch else "\n".join(caught.value.__notes__)
    assert "Replica 1 withdrew from all_reduce #1" in text


def test_a_caught_timeout_is_a_mismatch_whatever_follows() -> None:
    """The next call of the library raises the cancellation, which nothing explains."""

    async def step() -> None:
        if my_id() == 1:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await me().all_reduce("sum", 1)
            await me().barrier()
        await asyncio.sleep(2)

    with pytest.raises(MergeMismatchError, match="Replica 1 withdrew from all_reduce #1"):
        simulate(3, step)


# ---- a second of loop time ---------------------------------------------------------------------


@pytest.mark.parametrize(("takes_s", "is_failure"), [(0.9, True), (1.1, False)])
def test_it_has_a_second_to_end_by_itself(takes_s: float, is_failure: bool) -> None:
    """After that it is cancelled like the others, and the mismatch is what is raised."""
    times: list[float] = []

    async def step() -> None:
        if my_id() == 1:
            try:
                async with asyncio.timeout(0.5):
                    await me().all_reduce("sum", 1)
            finally:
                began = asyncio.get_running_loop().time()
                try:
                    await asyncio.sleep(takes_s)
                finally:
                    times.append(asyncio.get_running_loop().time() - began)
        await asyncio.sleep(50)

    with pytest.raises(TimeoutError if is_failure else MergeMismatchError) as caught:
        simulate(2, step)

    assert times[0] == pytest.approx(0.9 if is_failure else 1.0)
    if not is_failure:
        assert "Replica 1 withdrew from all_reduce #1" in str(caught.value)


def test_the_others_are_cancelled_at_once() -> None:
    times: dict[int, float] = {}

    async def step() -> None:
        loop = asyncio.get_running_loop()
        try:
            if my_id() == 1:
                try:
                    async with asyncio.timeout(0.5):
                        await me().all_reduce("sum", 1)
                finally:
                    await asyncio.sleep(0.75)
            await asyncio.sleep(50)
        finally:
            times[my_id()] = loop.time()

    with pytest.raises(TimeoutError):
        simulate(3, step)
    assert times[0] == times[2] == pytest.approx(times[1] - 0.75)


def test_one_that_is_cancelled_again_while_it_unwinds_ends_too() -> None:
    """Cancelling `run` meanwhile does not wait for the second to pass."""
    ended: list[float] = []

    async def step() -> None:
        if my_id() == 1:
            try:
                async with asyncio.timeout(0.5):
                    await me().all_reduce("sum", 1)
            finally:
                try:
                    await asyncio.sleep(50)
                finally:
                    ended.append(asyncio.get_running_loop().time())
        await asyncio.sleep(50)

    run = program(2, step)

    async def main() -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.75):
                await run()
        ended.append(began + 0.75)

    art.run(main)
    assert ended[0] == pytest.approx(ended[1])


# ---- a return and a failure in one cycle ------------------------------------------------------


@pytest.mark.parametrize(("returns", "raises"), [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("rest", ["wait", "wait in a group", "wait for a handle"])
def test_a_failure_beats_a_return_in_the_same_cycle(returns: int, raises: int, rest: str) -> None:
    error = PrefetchError("mine")

    async def step() -> None:
        await asyncio.sleep(0)  # the replica that waits has arrived by then
        if my_id() == returns:
            return
        if my_id() == raises:
            raise error
        if rest == "wait in a group":
            await me().group([returns, my_id()]).barrier()
        if rest == "wait for a handle":
            await me().start_all_reduce("sum", 1)
        await me().barrier()

    with pytest.raises(PrefetchError) as caught:
        simulate(3, step)
    assert caught.value is error


def test_a_failure_that_is_ready_when_a_return_is_noticed_comes_first() -> None:
    async def step() -> None:
        if my_id() == 2:
            await me().barrier()
        await cycles(3 + my_id())
        if my_id() == 1:
            raise PrefetchError

    with pytest.raises(PrefetchError):
        simulate(3, step)


def test_a_failure_beats_an_arrival_after_a_return() -> None:
    """The last to arrive finds that a member is gone, in the cycle of the failure."""

    async def step() -> None:
        if my_id() == 0:
            return
        await cycles(3)
        if my_id() == 1:
            await me().barrier()
        raise PrefetchError

    with pytest.raises(PrefetchError):
        simulate(3, step)


def test_a_return_alone_is_a_mismatch_in_every_order() -> None:
    async def step() -> None:
        if my_id() != 1:
            await me().barrier()

    in_every_order(3, step, MergeMismatchError)


# ---- cancellations that nobody sent to the run ------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("how", ["future", "task", "itself", "raised"])
def test_a_cancellation_from_elsewhere_reaches_the_task_group_around_run(
    size: int, how: str
) -> None:
    """A bare CancelledError would end the child silently, as if the step had happened."""

    async def awaits_a_cancelled_one() -> None:
        if how == "raised":
            raise asyncio.CancelledError
        task: Any = asyncio.get_running_loop().create_future()
        if how == "task":
            task = asyncio.ensure_future(asyncio.sleep(50))
        if how == "itself":
            task = asyncio.current_task()
        task.cancel()
        await (asyncio.sleep(50) if how == "itself" else task)

    async def step() -> None:
        if my_id() == size - 1:
            await awaits_a_cancelled_one()
        await me().barrier()

    run = program(size, step)
    after: list[str] = []

    async def child() -> None:
        await run()
        after.append("as if the step had happened")

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(child())
        (error,) = caught.value.exceptions
        assert isinstance(error, ReplicaCancelledError)
        assert isinstance(error.__cause__, asyncio.CancelledError)
        assert f"Raised in replica {size - 1}" in "\n".join(error.__notes__)

    art.run(main)
    assert after == []


def test_cancelling_the_run_is_not_a_failure() -> None:
    async def step() -> None:
        await asyncio.Event().wait()

    run = program(3, step)

    async def main() -> None:
        task = asyncio.ensure_future(run())
        await cycles(10)
        task.cancel("mine")
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert caught.value.args == ("mine",)

    art.run(main)


def test_the_strategy_goes_on_after_an_unwinding() -> None:
    async def withdraws() -> None:
        if my_id():
            await asyncio.wait_for(me().barrier(), 0.1)
        await asyncio.sleep(5)

    async def good() -> int:
        return int(await me().all_reduce("sum", 1))

    async def main() -> None:
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            with pytest.raises(TimeoutError):
                await strategy.run(withdraws)
            assert strategy.local_results(await strategy.run(good)) == (2, 2)

    art.run(main)


def test_a_child_gets_no_result_that_was_ready_when_the_run_ended() -> None:
    """The group's merge and the mismatch come in one cycle, before the child has woken."""
    outcomes: list[str] = []

    async def child() -> None:
        try:
            await me().group([0, 1]).barrier()
        except asyncio.CancelledError:
            outcomes.append("cancelled")
            raise
        outcomes.append("a result of an ended run")

    async def step() -> None:
        if my_id() == 0:
            me().start_all_reduce("max", 1)
            waits = asyncio.ensure_future(child())
            await asyncio.Event().wait()
            await waits
        await cycles(5)
        if my_id() == 1:
            await me().group([0, 1]).barrier()
        me().start_all_reduce("sum", 1)

    with pytest.raises(MergeMismatchError, match="MAX and SUM differ"):
        simulate(3, step)
    assert set(outcomes) == {"cancelled"}


@pytest.mark.parametrize("delay", range(12))
def test_giving_up_in_the_cycle_in_which_a_merge_ends(delay: int) -> None:
    """Either it was in time, and all have the result, or the one who gave up is named."""

    async def slow(strategy: ar.Strategy) -> int:
        await cycles(3)
        return 7

    async def step() -> int:
        if my_id() != 1:
            return int(await me().merge_call(slow))
        child = asyncio.ensure_future(me().merge_call(slow))
        await cycles(delay)
        child.cancel()
        with suppress(asyncio.CancelledError):
            await child
        return 7

    run = program(3, step)

    async def main() -> str:
        try:
            assert await run() == (7, 7, 7)
        except MergeMismatchError as error:
            return error.reason
        return "met"

    outcome = art.run(main)
    assert outcome == "met" or outcome.startswith("Replica 1 withdrew from merge_call #1")
