"""Who advances and who closes the iterator of a device loop, and what is left of that."""

import asyncio
import gc
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica._gil import has_gil
from aioreplica.errors import ContextError, StallError
from tests.conftest import mirrored
from tests.replica.gated import me, my_id, spawn
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")

ROOT = Path(__file__).resolve().parents[2]


def nothing(ctx: ar.MultiStepContext, *inputs: Any) -> None:
    """A step that does nothing."""


class Numbers:
    """An iterable: every loop over it begins anew."""

    def __init__(self) -> None:
        self.advanced: set[int] = set()
        self.closed: list[int] = []

    def __iter__(self) -> Iterator[int]:
        try:
            for number in range(100):
                self.advanced.add(threading.get_ident())
                yield number
        finally:
            self.closed.append(threading.get_ident())


class LaterNumbers:
    """The same for an async loop; remembers tasks."""

    def __init__(self) -> None:
        self.advanced: set[Any] = set()
        self.closed: list[Any] = []

    async def __aiter__(self) -> AsyncIterator[int]:
        try:
            for number in range(100):
                self.advanced.add(asyncio.current_task())
                yield number
        finally:
            self.closed.append(asyncio.current_task())


def iter_of(*numbers: int) -> Iterator[int]:
    """An iterator that has to be advanced on a thread, as it might block."""
    return (number for number in numbers)


async def later_of(*numbers: int) -> AsyncIterator[int]:
    for number in numbers:
        yield number


def input_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("aioreplica input")]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [Numbers, LaterNumbers])
async def test_an_iterator_made_for_the_loop_is_closed_where_it_was_advanced(
    pair: ar.MirroredStrategy, kind: Any
) -> None:
    """A cancel scope of anyio and an SQLite connection both belong to whoever opened them."""
    source = kind()

    await pair.run_steps(nothing, source, 3)

    assert source.advanced == set(source.closed)
    assert len(source.closed) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [Numbers, LaterNumbers])
async def test_it_is_closed_if_a_step_fails(pair: ar.MirroredStrategy, kind: Any) -> None:
    source = kind()

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await pair.run_steps(step, source, 100)

    assert len(source.closed) == len(source.advanced)  # none if it was never advanced


@pytest.mark.asyncio
async def test_an_error_while_closing_the_iterator_is_raised_after_the_loop(
    pair: ar.MirroredStrategy,
) -> None:
    ran: list[int] = []

    class Source:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(9)
            finally:
                raise OSError("disk")

    with pytest.raises(OSError, match="disk") as caught:
        await pair.run_steps(lambda ctx, x: ran.append(x), Source(), 2)

    assert sorted(ran) == [0, 0, 1, 1]
    assert "after 2 complete steps" in caught.value.__notes__[0]


@pytest.mark.asyncio
async def test_a_wait_for_an_iterator_that_does_not_close_can_be_cancelled(
    pair: ar.MirroredStrategy,
) -> None:
    closing, gate = threading.Event(), threading.Event()

    class Source:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(9)
            finally:
                closing.set()
                gate.wait(10)

    running = spawn(pair.run_steps(nothing, Source(), 2))
    await asyncio.to_thread(closing.wait, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    gate.set()


@pytest.mark.skipif(not has_gil(), reason="other threads' references are counted later there")
@pytest.mark.asyncio
async def test_a_loop_makes_no_reference_cycles(pair: ar.MirroredStrategy) -> None:
    """What the infeed held goes when the loop ends, without waiting for the collector."""

    async def later() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        me().blocking.barrier()
        ar.outside_compilation(str)

    sources: list[Any] = [[1, 2], iter([1, 2]), later(), Numbers(), LaterNumbers()]
    await pair.run_steps(step, [1], 2)
    gc.collect()
    gc.freeze()  # what other tests have left, and somebody lets go of meanwhile, is not looked at
    gc.disable()
    try:
        for source in sources:
            await pair.run_steps(step, source, 2)
            assert gc.collect() == 0, f"{source} leaves cycles"
    finally:
        gc.enable()


@pytest.mark.asyncio
async def test_without_a_thread_for_the_iterator_no_program_begins(
    pair: ar.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    await pair.run_steps(nothing, iter_of(1))  # the device threads exist

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            await pair.run_steps(lambda ctx, x: ran.append(x), iter_of(1))

    assert pair.statistics().num_active == 0
    assert sum(lane.queued for lane in pair.statistics().lanes.values()) == 0
    assert (await pair.run_steps(lambda ctx, x: ran.append(x), [5])).steps_run == 1
    assert ran == [5, 5]


PROGRAM = """
import asyncio, os, signal
import aioreplica as ar

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have turned it off
ar.set_logical_devices("cpu", 2)

class Source:
    async def __aiter__(self):
        try:
            yield 1
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            print("source closed")

async def main():
    async with ar.MirroredStrategy() as strategy:
        await strategy.run_steps(lambda ctx, x: None, Source(), 9)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_an_interrupt_says_nothing_but_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert (done.stdout.split("\n")[:2], done.stderr) == (["source closed", "interrupted"], "")


# --- from one call to the next --------------------------------------------------------------------


KINDS = {
    "generator": iter_of,
    "async": later_of,
    "in memory": lambda *numbers: iter(numbers),
    "not weakly": lambda *numbers: map(abs, numbers),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_step_that_failed_gets_its_element_again(
    pair: ar.MirroredStrategy, kind: str
) -> None:
    """And nothing that was read ahead is lost."""
    iterator, ran, fails = KINDS[kind](*range(9)), [], True

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        me().blocking.barrier()
        if x == 3 and fails and my_id() == 1:
            raise ValueError("mine")
        me().blocking.barrier()
        if my_id() == 0:
            ran.append(x)

    with pytest.raises(ValueError, match="mine"):
        await pair.run_steps(step, iterator, 9)
    assert ran == [0, 1, 2]
    fails = False
    runs = [(await pair.run_steps(step, iterator, n)).steps_run for n in (2, 9)]

    assert (ran, runs) == ([*range(9)], [2, 4])


@pytest.mark.asyncio
async def test_loops_that_fail_one_after_another_keep_the_order(pair: ar.MirroredStrategy) -> None:
    """The second one has begun to read what the first has given back."""
    all_read, seen, fails = threading.Event(), [], True

    def numbers() -> Iterator[int]:
        for number in range(6):
            if number == 3:
                all_read.set()
            yield number

    def step(_ctx: ar.MultiStepContext, x: int) -> None:
        assert all_read.wait(60)
        if fails:
            raise ValueError("mine")
        if my_id() == 0:
            seen.append(x)

    iterator = numbers()
    for iterations in (4, 2):
        with pytest.raises(ValueError, match="mine"):
            await pair.run_steps(step, iterator, iterations)
    fails = False

    assert (await pair.run_steps(step, iterator, 9)).steps_run == 6
    assert seen == [*range(6)]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_an_element_is_skipped_by_a_step_that_does_nothing(
    pair: ar.MirroredStrategy, kind: str
) -> None:
    iterator, ran = KINDS[kind](*range(4)), []

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        me().blocking.barrier()  # both are done with the step before, so its element is taken
        if x == 1:
            raise ValueError("bad data")
        if my_id() == 0:
            ran.append(x)

    with pytest.raises(ValueError, match="bad data"):
        await pair.run_steps(step, iterator, 9)
    await pair.run_steps(nothing, iterator, 1)
    await pair.run_steps(step, iterator, 9)

    assert ran == [0, 2, 3]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_loop_loses_no_element(pair: ar.MirroredStrategy, kind: str) -> None:
    iterator, ran = KINDS[kind](*range(6)), []
    blocked, forever = threading.Event(), asyncio.Event()

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        me().blocking.barrier()
        if x == 2 and not forever.is_set():
            blocked.set()
            ar.outside_compilation(forever.wait)
        if my_id() == 0:
            ran.append(x)

    running = spawn(pair.run_steps(step, iterator, 6))
    await asyncio.to_thread(blocked.wait, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    forever.set()
    assert (await pair.run_steps(step, iterator, 9)).steps_run == 4

    assert ran == [*range(6)]


@pytest.mark.asyncio
async def test_an_error_of_the_iterator_comes_after_its_elements(
    pair: ar.MirroredStrategy,
) -> None:
    """A step fails first: the error of the iterator, which has ended by it, is not lost."""
    mine, fails, failed = OSError("disk"), True, threading.Event()
    both_there = threading.Barrier(2)

    def source() -> Iterator[int]:
        yield from range(3)
        failed.set()
        raise mine

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        assert failed.wait(10)
        if x == 1 and fails:
            both_there.wait(10)  # else the other replica may not have ended step 0 yet
            raise ValueError("mine")

    iterator = source()
    with pytest.raises(ValueError, match="mine"):
        await pair.run_steps(step, iterator, 9)
    fails = False
    with pytest.raises(OSError, match="disk") as caught:
        await pair.run_steps(step, iterator, 9)

    assert caught.value is mine
    assert "after 2 complete steps" in mine.__notes__[-1]
    assert (await pair.run_steps(step, iterator, 9)).steps_run == 0


@pytest.mark.asyncio
async def test_an_error_of_a_dataset_comes_after_its_elements(pair: ar.MirroredStrategy) -> None:
    fails, failed = True, threading.Event()

    def source() -> Iterator[Any]:
        yield from (np.full(2, k) for k in range(2))
        failed.set()
        raise OSError("disk")

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        assert failed.wait(10)
        if fails:
            raise ValueError("mine")

    async with pair.distribute_dataset(source) as batches:
        iterator = aiter(batches)
        with pytest.raises(ValueError, match="mine"):
            await pair.run_steps(step, iterator, 9)
        fails = False
        with pytest.raises(OSError, match="disk") as caught:
            await pair.run_steps(step, iterator, 9)
        assert "after 2 complete steps" in caught.value.__notes__[-1]
        assert batches.statistics().num_delivered == 2


@pytest.mark.asyncio
async def test_batches_of_a_loop_that_was_replaced_are_not_given_again(
    pair: ar.MirroredStrategy,
) -> None:
    is_there, goes_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        is_there.set()
        await goes_on.wait()

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        ar.outside_compilation(wait)
        raise ValueError("mine")

    async with pair.distribute_dataset([np.full(2, k) for k in range(4)]) as batches:
        iterator = aiter(batches)
        running = spawn(pair.run_steps(step, iterator, 4))
        await is_there.wait()
        newer = aiter(batches)
        await anext(newer)
        goes_on.set()
        with pytest.raises(ValueError, match="mine"):
            await running
        with pytest.raises(ContextError, match="another loop over its dataset began"):
            await anext(iterator)
        assert (await anext(newer))[0][0] == 1


@pytest.mark.asyncio
async def test_numbers_of_steps_are_given_back_to_no_other_loop(pair: ar.MirroredStrategy) -> None:
    """The first loop ends early, while the second one goes on with the numbers behind it."""
    is_there, goes_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        is_there.set()
        await goes_on.wait()

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        if my_id() == 0:
            ar.outside_compilation(wait)
        me().blocking.barrier()

    first = spawn(pair.run_steps(step, iter([1]), 5))
    await is_there.wait()
    second = spawn(pair.run_steps(nothing, iter([1, 2]), 2))
    await idle()
    goes_on.set()
    await first
    await second
    await pair.run_steps(nothing, iter([1]), 1)

    begins = [event.step for event in pair.events.events("loop") if event.name == "begin"]
    assert begins == [0, 5, 7]


@pytest.mark.asyncio
async def test_an_element_that_does_not_fit_begins_the_next_loop(pair: ar.MirroredStrategy) -> None:
    iterator, seen = iter([1, 2, 3.0, 4.0]), []

    def step(ctx: ar.MultiStepContext, x: float) -> None:
        if my_id() == 0:
            seen.append(x)

    with pytest.raises(ValueError, match="step 2 differs"):
        await pair.run_steps(step, iterator, 9)
    await pair.run_steps(step, iterator, 9)

    assert seen == [1, 2, 3.0, 4.0]


@pytest.mark.asyncio
async def test_an_iterator_left_blocking_its_thread_loses_nothing(
    pair: ar.MirroredStrategy,
) -> None:
    gate, seen = threading.Event(), []

    def source() -> Iterator[int]:
        yield 0
        gate.wait(10)
        yield from (1, 2)

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        if my_id() == 0:
            seen.append(x)

    iterator = source()
    with pytest.raises(StallError):
        await pair.run_steps(step, iterator, 9, options=ar.RunOptions(stall_timeout=0.2))
    running = spawn(pair.run_steps(step, iterator, 9))
    await idle()
    gate.set()
    await running

    assert seen == [0, 1, 2]


@pytest.mark.asyncio
async def test_an_iterator_keeps_its_thread(pair: ar.MirroredStrategy) -> None:
    """So one that holds an SQLite cursor can be read in several calls."""
    rows: list[int] = []

    def source() -> Iterator[int]:
        with closing(sqlite3.connect(":memory:")) as database:
            yield from (n for (n,) in database.execute("VALUES (1), (2), (3), (4), (5)"))

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        if my_id() == 0:
            rows.append(x)

    iterator = source()
    for _ in range(3):
        await pair.run_steps(step, iterator, 2)

    assert rows == [1, 2, 3, 4, 5]
    assert input_threads() == []  # it has ended, and its thread with it


@pytest.mark.asyncio
async def test_a_thread_ends_with_its_iterator_or_its_strategy(pair: ar.MirroredStrategy) -> None:
    dropped, kept = iter_of(1, 2), iter_of(1, 2)
    await pair.run_steps(nothing, dropped, 1)
    (first,) = input_threads()
    await pair.run_steps(nothing, kept, 1)
    assert len(input_threads()) == 2

    del dropped
    await idle()
    await asyncio.to_thread(first.join, 10)
    assert (await pair.run_steps(nothing, kept, 9)).steps_run == 1
    for thread in input_threads():  # it may have a moment left to live
        await asyncio.to_thread(thread.join, 10)
    assert input_threads() == []
    left = iter_of(1, 2)
    await pair.run_steps(nothing, left, 1)
    await pair.aclose()

    assert input_threads() == []


@pytest.mark.asyncio
async def test_only_a_few_iterators_are_kept_alive(pair: ar.MirroredStrategy) -> None:
    """Those without weak references; the strategy cannot know which of them are in use."""
    threads: list[threading.Thread] = []
    for _ in range(20):
        await pair.run_steps(nothing, map(abs, range(9)), 1)
        threads += [thread for thread in input_threads() if thread not in threads]
    await idle()
    for thread in threads[:-8]:
        await asyncio.to_thread(thread.join, 10)
    assert len(input_threads()) == 8


@pytest.mark.asyncio
async def test_a_dataset_goes_on_at_the_first_step_that_is_not_complete(
    pair: ar.MirroredStrategy,
) -> None:
    data = np.arange(24.0)
    seen: list[list[float]] = []

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        whole = me().blocking.all_gather(x, 0)
        if 12.0 in whole and fails:
            raise ValueError("mine")
        if my_id() == 0:
            seen.append(whole.tolist())

    async with pair.distribute_dataset(ar.ArrayDataset(data, batch_size=4)) as batches:
        iterator, fails = aiter(batches), True
        with pytest.raises(ValueError, match="mine"):
            await pair.run_steps(step, iterator, 9)
        state = batches.state_dict()
        assert (state["position"], batches.statistics().num_delivered) == (12, 3)
        fails = False
        assert (await pair.run_steps(step, iterator, 9)).steps_run == 3
        assert (batches.state_dict()["epoch"], batches.state_dict()["position"]) == (1, 0)
        assert (await pair.run_steps(step, iterator, 9)).steps_run == 0
    assert np.concatenate(seen).tolist() == data.tolist()

    seen.clear()
    async with pair.distribute_dataset(ar.ArrayDataset(data, batch_size=4)) as batches:
        batches.load_state_dict(state)
        await pair.run_steps(step, batches, 9)
    assert np.concatenate(seen).tolist() == data[12:].tolist()


@pytest.mark.asyncio
async def test_batches_of_a_failed_loop_can_be_taken_by_hand(pair: ar.MirroredStrategy) -> None:
    """What was put back comes first, also if the source had been read to its end or closed."""

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        raise ValueError("mine")

    async with pair.distribute_dataset([np.full(2, float(k)) for k in range(3)]) as batches:
        iterator = aiter(batches)
        with pytest.raises(ValueError, match="mine"):
            await pair.run_steps(step, iterator, 9)
        assert batches.epoch == 0
        assert [batch[0][0] async for batch in iterator] == [0.0, 1.0, 2.0]
        assert batches.epoch == 1

        iterator = aiter(batches)
        with pytest.raises(ValueError, match="mine"):
            await pair.run_steps(step, iterator, 9)
        async for batch in batches:  # another loop begins: the place of the one before is left
            assert batch[0][0] == 0.0
            break
        with pytest.raises(ContextError, match="another loop"):
            await anext(iterator)


@pytest.mark.asyncio
async def test_a_state_within_a_loop_counts_complete_steps(pair: ar.MirroredStrategy) -> None:
    positions: list[int] = []

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        me().blocking.barrier()
        if my_id() == 0:
            position = ar.outside_compilation(lambda: batches.state_dict()["position"])
            positions.append(position)
        me().blocking.barrier()

    data = ar.ArrayDataset(np.arange(16.0), batch_size=4)
    async with pair.distribute_dataset(data) as batches:
        await pair.run_steps(step, batches, 9)
        positions.append(batches.statistics().position)

    assert positions == [0, 4, 8, 12, 0]


@pytest.mark.asyncio
async def test_random_numbers_do_not_depend_on_the_hops_of_an_epoch(
    pair: ar.MirroredStrategy,
) -> None:
    """Steps that were asked for but not run use no numbers."""

    async def draw(hop: int) -> list[float]:
        drawn: list[float] = []

        def step(ctx: ar.MultiStepContext, x: int) -> None:
            number = me().rng("dropout").random()
            if my_id() == 0:
                drawn.append(number)

        async with mirrored(2) as strategy:
            for _ in range(3):
                iterator = iter(range(5))
                while (await strategy.run_steps(step, iterator, hop)).steps_run:
                    pass
        return drawn

    assert await draw(1) == await draw(4) == await draw(100)


@pytest.mark.asyncio
async def test_a_cancellation_while_the_iterator_is_closed_is_raised(
    pair: ar.MirroredStrategy,
) -> None:
    """The steps are complete by then; the caller asked to stop all the same."""
    closing_began, gate = threading.Event(), threading.Event()

    class Source:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(9)
            finally:
                closing_began.set()
                gate.wait(10)

    running = spawn(pair.run_steps(nothing, Source(), 2))
    await asyncio.to_thread(closing_began.wait, 10)
    async with asyncio.timeout(60):
        while any(lane.running for lane in pair.statistics().lanes.values()):
            await asyncio.sleep(0)
    await idle()
    running.cancel()
    await idle()
    gate.set()

    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.asyncio
async def test_an_async_iterator_of_its_own_is_closed_if_no_program_began(
    pair: ar.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop ends before the task that reads it has taken its first step."""
    closed: list[str] = []

    class Source:
        def __aiter__(self) -> "Source":
            return self

        async def __anext__(self) -> int:
            raise AssertionError("read after the loop has failed")

        async def aclose(self) -> None:
            closed.append("closed")

    class Given:
        def __aiter__(self) -> Source:
            return Source()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            await pair.run_steps(nothing, Given(), 2)

    assert closed == ["closed"]
