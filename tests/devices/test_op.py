"""One op: withdrawn or performed, never both; outcomes that reach the event loop."""

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aioreplica.devices import CompletionQueue, Lane, Op


def new_op(fn: Callable[..., Any], *args: Any) -> Op:
    return Op(CompletionQueue.of_running_loop(), fn, args, {})


def perform(op: Op) -> bool:
    """Run an op as a lane's thread does; False if it was withdrawn."""
    if not op.claim():
        return False
    op.run_claimed()
    return True


@pytest.mark.asyncio
async def test_a_withdrawn_op_is_never_performed() -> None:
    calls: list[int] = []
    op = new_op(calls.append, 1)

    assert op.withdraw()
    assert not op.withdraw()
    assert not perform(op)
    assert calls == []


@pytest.mark.asyncio
async def test_a_performed_op_cannot_be_withdrawn_nor_performed_again() -> None:
    calls: list[int] = []
    op = new_op(calls.append, 1)

    assert perform(op)
    assert not op.withdraw()
    assert not perform(op)
    assert calls == [1]


@pytest.mark.asyncio
async def test_withdraw_and_perform_race_has_one_winner() -> None:
    for _ in range(300):
        op, start = new_op(int), threading.Barrier(2)
        performed: list[bool] = []

        def serve(op: Op = op, start: Any = start, out: list[bool] = performed) -> None:
            start.wait(60)
            out.append(perform(op))

        thread = threading.Thread(target=serve)
        thread.start()
        start.wait(60)
        withdrawn = op.withdraw()
        thread.join(60)

        assert performed == [not withdrawn]


@pytest.mark.asyncio
async def test_an_op_runs_from_its_claim_to_the_end_of_its_call() -> None:
    op, withdrawn = new_op(lambda: op.is_running), new_op(int)

    assert not op.is_running
    assert op.claim()
    assert op.is_running
    op.run_claimed()
    assert not op.is_running
    op.resolve()
    assert await op
    assert withdrawn.withdraw()
    assert not withdrawn.is_running


@pytest.mark.asyncio
async def test_an_op_measures_its_time() -> None:
    op = new_op(sum, range(1000))

    assert op.seconds == 0.0
    perform(op)
    assert op.seconds > 0.0


@pytest.mark.asyncio
async def test_resolving_gives_the_result() -> None:
    op = new_op(divmod, 7, 2)
    perform(op)
    assert not op.is_done

    op.resolve()

    assert op.is_done
    assert await op == (3, 1)


@pytest.mark.asyncio
async def test_cancelling_a_started_op_nobody_awaits_waits_for_its_end() -> None:
    """As asyncio.gather does with the futures it was given."""
    op = new_op(divmod, 1, 0)
    perform(op)

    assert op.cancel()
    assert not op.done()
    op.resolve()

    assert op.cancelled()


@pytest.mark.asyncio
@pytest.mark.parametrize("use", ["await", "gather", "create_task", "wait_for"])
async def test_an_op_on_a_lane_runs_however_it_is_waited_for(lane: Lane, use: str) -> None:
    op = Op(CompletionQueue.of_running_loop(), divmod, (7, 2), {}, lane)

    if use == "await":
        result = await op
    elif use == "gather":
        [result] = await asyncio.gather(op)
    elif use == "create_task":
        result = await asyncio.create_task(op)
    else:
        result = await asyncio.wait_for(op, 60)

    assert result == (3, 1)


@pytest.mark.asyncio
async def test_an_op_that_is_never_awaited_does_not_run_and_warns(lane: Lane) -> None:
    calls: list[int] = []
    op = Op(CompletionQueue.of_running_loop(), calls.append, (1,), {}, lane)

    with pytest.warns(RuntimeWarning, match="never awaited"):
        del op

    assert calls == []
    assert lane.statistics().queued == 0


@pytest.mark.asyncio
async def test_a_task_cancelled_before_its_first_step_leaves_the_op_alone(lane: Lane) -> None:
    calls: list[int] = []
    task = asyncio.create_task(Op(CompletionQueue.of_running_loop(), calls.append, (1,), {}, lane))
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task

    assert calls == []


@pytest.mark.asyncio
@pytest.mark.parametrize("use", ["create_task", "gather"])
async def test_a_cancelled_user_of_a_started_op_ends_after_it(
    lane: Lane, gated_op: Any, use: str
) -> None:
    op = Op(CompletionQueue.of_running_loop(), gated_op, (), {}, lane)
    if use == "create_task":
        task: asyncio.Future[Any] = asyncio.create_task(op)
    else:
        task = asyncio.gather(op)
    await asyncio.sleep(0)
    await gated_op.started.wait()

    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gated_op.release()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert lane.statistics().done == 1


@pytest.mark.asyncio
async def test_resolving_after_the_await_was_cancelled_is_quiet() -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, report: reports.append(report))
    op = new_op(divmod, 1, 0)
    perform(op)
    op.cancel()

    op.resolve()

    assert op.is_done
    del op
    gc.collect()
    assert reports == []


@pytest.mark.asyncio
async def test_an_error_that_is_never_retrieved_is_reported() -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, report: reports.append(report))
    op = new_op(divmod, 1, 0)
    perform(op)
    op.resolve()
    del op
    gc.collect()

    assert [type(report["exception"]) for report in reports] == [ZeroDivisionError]
