"""Programs for the kit to judge: planted bugs that pass on the stock loop, and correct ones.

Each builds its own state. A buggy one fails only under some other legal order; `DEPTH` says how
many ordering constraints that order must meet.
"""

import asyncio
import random
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import anyio
import anyio.to_thread


async def step(n: int = 1) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


# --- the bugs of the samples, told in our own words -------------------------------------------


async def lost_update() -> None:
    state = {"v": 0}

    async def writer(delay: int) -> None:
        await step(delay)
        seen = state["v"]
        await step()
        state["v"] = seen + 1

    await asyncio.gather(writer(0), writer(2))
    assert state["v"] == 2


async def crossed_locks() -> None:
    a, b = asyncio.Lock(), asyncio.Lock()

    async def take(first: asyncio.Lock, second: asyncio.Lock, delay: int) -> None:
        await step(delay)
        async with first:
            await step()
            async with second:
                pass

    await asyncio.gather(take(a, b, 0), take(b, a, 3))


async def reused_barrier() -> None:
    n = 3
    count, event, slots = 0, asyncio.Event(), [0] * n

    async def merge(i: int, value: int) -> int:
        nonlocal count
        slots[i] = value
        count += 1
        if count == n:
            event.set()
        else:
            await event.wait()
        result = sum(slots)
        count -= 1
        if count == 0:
            event.clear()
        return result

    async def replica(i: int) -> None:
        for k in range(2):
            assert await merge(i, k * 100 + i) == sum(k * 100 + j for j in range(n))
            await step(2)

    await asyncio.gather(*[replica(i) for i in range(n)])


async def completion_order() -> None:
    loop, out = asyncio.get_running_loop(), []
    pools = [ThreadPoolExecutor(1) for _ in range(3)]

    async def replica(i: int) -> None:
        out.append(await loop.run_in_executor(pools[i], lambda: i))

    await asyncio.gather(*[replica(i) for i in range(3)])
    assert out == [0, 1, 2]


async def starved_check() -> None:
    state = {"v": 0}

    async def slow() -> None:
        await step(20)
        state["v"] = 1

    async def check() -> None:
        await step()
        assert state["v"] == 0

    await asyncio.gather(check(), slow())


async def donated_buffer() -> None:
    live = True

    async def reader() -> None:
        await step(3)
        assert live

    async def stepper() -> None:
        nonlocal live
        await step(8)
        live = False

    await asyncio.gather(reader(), stepper(), *[step(6) for _ in range(4)])


# --- further bugs ------------------------------------------------------------------------------


async def lost_wakeup() -> None:
    """A consumer looks, then waits; the producer signals in between and nobody hears it."""
    event, items = asyncio.Event(), []

    async def consumer() -> None:
        if not items:
            await step()
            event.clear()
            await event.wait()
        items.pop()

    async def producer() -> None:
        await step(4)
        items.append(1)
        event.set()

    await asyncio.gather(consumer(), producer())


async def check_then_act() -> None:
    """Two buyers see the last seat free, and both take it."""
    seats, sold = 1, 0

    async def buy(delay: int) -> None:
        nonlocal seats, sold
        await step(delay)
        if seats > 0:
            await step()
            seats -= 1
            sold += 1

    await asyncio.gather(buy(0), buy(3))
    assert sold <= 1


async def used_before_ready() -> None:
    """An order that only the number of steps suggests: initialise, then use."""
    config: dict[str, int] = {}

    async def initialise() -> None:
        await step(2)
        config["size"] = 4

    async def use() -> None:
        await step(5)
        assert config["size"] == 4

    await asyncio.gather(initialise(), use())


async def cancelled_holder() -> None:
    """A task that is cancelled between taking a permit and the `try` keeps it for ever."""
    permits = asyncio.Semaphore(1)

    async def worker() -> None:
        await permits.acquire()
        await step()
        try:
            await step(2)
        finally:
            permits.release()

    task = asyncio.create_task(worker())
    await step(3)
    task.cancel()
    await asyncio.wait([task])
    await permits.acquire()


async def queue_double_get() -> None:
    """Two workers ask `empty` first; one of them then waits for ever."""
    queue: asyncio.Queue[int] = asyncio.Queue()
    queue.put_nowait(1)

    async def worker(delay: int) -> None:
        await step(delay)
        if not queue.empty():
            await step()
            await queue.get()

    await asyncio.gather(worker(0), worker(3))


async def early_sentinel() -> None:
    """A producer that ends first closes the queue under the other one's items."""
    queue: asyncio.Queue[int | None] = asyncio.Queue()
    got: list[int] = []

    async def produce(values: list[int], delay: int) -> None:
        for value in values:
            await step(delay)
            queue.put_nowait(value)

    async def close() -> None:
        await step(9)
        queue.put_nowait(None)

    async def consume() -> None:
        while (item := await queue.get()) is not None:
            got.append(item)

    await asyncio.gather(produce([1, 2], 1), produce([3, 4], 2), close(), consume())
    assert sorted(got) == [1, 2, 3, 4]


async def condition_without_loop() -> None:
    """`if` instead of `while` around a condition: somebody else takes the item in between."""
    condition, items = asyncio.Condition(), []

    async def consumer(delay: int) -> None:
        await step(delay)
        async with condition:
            if not items:
                await condition.wait()
            items.pop()

    async def producer() -> None:
        for _ in range(2):
            await step(4)
            async with condition:
                items.append(1)
                condition.notify()

    await asyncio.gather(consumer(0), consumer(7), producer())


async def timeout_loses_item() -> None:
    """An item that arrives as the patience ends is taken from the queue and dropped."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[int] = asyncio.Queue()
    got: list[int] = []

    async def fetch() -> None:
        await queue.get()
        await asyncio.to_thread(int)
        got.append(1)

    loop.call_later(0.1, queue.put_nowait, 1)
    try:
        await asyncio.wait_for(fetch(), 0.2)
    except TimeoutError:
        assert queue.qsize() == 1, "the item is gone"


async def awaiting_each_other() -> None:
    """Two tasks join each other if each is there in time to see the other."""
    tasks: dict[str, asyncio.Task[None]] = {}

    async def member(own: str, other: str, delay: int) -> None:
        await step(delay)
        peer = tasks.get(other)
        tasks[own] = asyncio.current_task()  # type: ignore[assignment]
        await step(3 - delay)
        peer = peer or tasks.get(other)
        if peer is not None and not peer.done() and delay:
            await peer
        elif own == "a" and other in tasks and not tasks[other].done():
            await tasks[other]

    await asyncio.gather(member("a", "b", 0), step(2), member("b", "a", 3))


async def polite_pair() -> None:
    """Two tasks that step back for each other for ever once they are in time with each other."""
    wants = [False, False]

    async def member(i: int, delay: int) -> None:
        await step(delay)
        while True:
            wants[i] = True
            await step()
            if not wants[1 - i]:
                break
            await step()
            wants[i] = False
            await step()
        wants[i] = False

    await asyncio.gather(member(0, 0), member(1, 4))


async def spin_on_lost_flag() -> None:
    """A flag that is set and cleared again while the task that spins on it is held."""
    flag = False
    seen = False

    async def spinner() -> None:
        nonlocal seen
        while not flag:
            await step()
        seen = True

    async def blinker() -> None:
        nonlocal flag
        await step(3)
        flag = True
        await step(4)
        flag = False

    await asyncio.gather(spinner(), blinker())
    assert seen


async def stale_snapshot() -> None:
    """Two values that belong together are read with an await in between."""
    pair = {"a": 0, "b": 0}

    async def writer() -> None:
        for value in range(1, 4):
            await step(3)
            pair["a"] = value
            pair["b"] = value

    async def reader() -> None:
        a = pair["a"]
        await step()
        assert a == pair["b"]

    await asyncio.gather(reader(), writer())


async def op_reads_reused_buffer() -> None:
    """The buffer of an op is written again while the op is in flight."""
    loop = asyncio.get_running_loop()
    buffer = [1, 1]
    with ThreadPoolExecutor(1) as pool:
        total = loop.run_in_executor(pool, sum, buffer)
        await asyncio.to_thread(int)
        buffer[0] = 5
        assert await total == 2


async def sleep_as_join() -> None:
    """A sleep that is long enough nearly always."""
    done: list[int] = []
    call = asyncio.get_running_loop().run_in_executor(None, done.append, 1)
    await asyncio.sleep(0.1)
    assert done == [1]
    await call


async def double_initialise() -> None:
    """A lazily made resource is made twice."""
    made: list[object] = []
    cache: dict[str, object] = {}

    async def resource(delay: int) -> object:
        await step(delay)
        if "it" not in cache:
            await step(2)
            made.append(object())
            cache["it"] = made[-1]
        return cache["it"]

    first, second = await asyncio.gather(resource(0), resource(4))
    assert first is second


async def three_way() -> None:
    """Depth 3: a value is read, changed and changed back, and that goes unnoticed."""
    state = {"head": "A", "popped": 0}

    async def pop(delay: int) -> None:
        await step(delay)
        seen = state["head"]
        await step(2)
        if state["head"] == seen:
            state["head"] = "B"
            assert state["popped"] == 0, "the head was popped and pushed meanwhile"

    async def shuffle() -> None:
        await step(5)
        if state["head"] == "A":
            state["head"] = "B"
            state["popped"] = 1
            await step()
            state["head"] = "A"
            await step()
            state["popped"] = 0

    await asyncio.gather(pop(0), shuffle())


async def cancelled_too_late() -> None:
    """The result of a call is dropped when the cancellation comes after it."""
    freed = asyncio.Event()
    held: list[int] = []

    async def acquire() -> None:
        held.append(1)
        try:
            await step(2)
        except asyncio.CancelledError:
            held.clear()
            freed.set()
            raise

    async def owner() -> None:
        await acquire()
        await step(2)
        held.clear()
        freed.set()

    task = asyncio.create_task(owner())
    await step(2)
    task.cancel()
    await asyncio.wait([task])
    assert not held


async def first_of_two() -> None:
    """Whoever answers first is taken for the primary."""

    async def ask(name: str) -> str:
        await asyncio.to_thread(int)
        return name

    tasks = [asyncio.create_task(ask(name)) for name in ("primary", "backup")]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    assert "primary" in [task.result() for task in done]
    await asyncio.gather(*pending, return_exceptions=True)


async def semaphore_leak() -> None:
    """A permit is given back twice, so that two tasks are in at once."""
    permits = asyncio.Semaphore(1)
    inside = most = 0

    async def visit(delay: int) -> None:
        nonlocal inside, most
        await step(delay)
        await permits.acquire()
        inside += 1
        most = max(most, inside)
        await step()
        inside -= 1
        permits.release()

    async def impatient() -> None:
        await step(5)
        permits.release()

    await asyncio.gather(visit(0), impatient(), visit(1))
    assert most == 1


BUGGY = [
    lost_update, crossed_locks, reused_barrier, completion_order, starved_check, donated_buffer,
    lost_wakeup, check_then_act, used_before_ready, cancelled_holder, queue_double_get,
    early_sentinel, condition_without_loop, polite_pair, spin_on_lost_flag,
    stale_snapshot, op_reads_reused_buffer, sleep_as_join, double_initialise, three_way,
    cancelled_too_late, first_of_two, semaphore_leak, timeout_loses_item, awaiting_each_other,
]  # fmt: skip


# --- correct programs ---------------------------------------------------------------------------


async def call_soon_keeps_order() -> None:
    loop, out = asyncio.get_running_loop(), []
    done = loop.create_future()
    loop.call_soon(out.append, 1)
    loop.call_soon(out.append, 2)
    loop.call_later(0.01, done.set_result, None)
    await done
    assert out == [1, 2]


async def one_worker_keeps_order() -> None:
    loop, out = asyncio.get_running_loop(), []
    with ThreadPoolExecutor(1) as pool:
        first = loop.run_in_executor(pool, out.append, 1)
        second = loop.run_in_executor(pool, out.append, 2)
        await asyncio.gather(first, second)
    assert out == [1, 2]


async def locked_counter() -> None:
    lock, state = asyncio.Lock(), {"v": 0}

    async def writer() -> None:
        for _ in range(3):
            async with lock:
                seen = state["v"]
                await step()
                state["v"] = seen + 1

    await asyncio.gather(*[writer() for _ in range(3)])
    assert state["v"] == 9


async def fair_lock() -> None:
    """asyncio promises that who waited first goes first."""
    lock, order = asyncio.Lock(), []

    async def enter(i: int) -> None:
        async with lock:
            order.append(i)

    await lock.acquire()
    tasks = []
    for i in range(3):
        tasks.append(asyncio.create_task(enter(i)))
        while len(lock._waiters or ()) <= i:  # type: ignore[attr-defined]
            await step()
    lock.release()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


async def bounded_queue() -> None:
    queue: asyncio.Queue[int | None] = asyncio.Queue(2)
    got: list[int] = []

    async def produce() -> None:
        for i in range(6):
            await queue.put(i)
        await queue.put(None)

    async def consume() -> None:
        while (item := await queue.get()) is not None:
            got.append(item)

    await asyncio.gather(produce(), consume())
    assert got == list(range(6))


async def join_a_queue() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    total = 0

    async def work() -> None:
        nonlocal total
        while True:
            item = await queue.get()
            await step()
            total += item
            queue.task_done()

    workers = [asyncio.create_task(work()) for _ in range(3)]
    for i in range(5):
        queue.put_nowait(i)
    await queue.join()
    for worker in workers:
        worker.cancel()
    assert total == 10


async def condition_with_loop() -> None:
    condition, items, got = asyncio.Condition(), [], []

    async def consumer() -> None:
        async with condition:
            await condition.wait_for(lambda: items)
            got.append(items.pop())

    async def producer() -> None:
        for i in range(3):
            await step()
            async with condition:
                items.append(i)
                condition.notify_all()

    await asyncio.gather(consumer(), consumer(), consumer(), producer())
    assert sorted(got) == [0, 1, 2]


async def counted_barrier() -> None:
    barrier, seen = asyncio.Barrier(3), []

    async def party(i: int) -> None:
        for round_ in range(3):
            seen.append(round_)
            await barrier.wait()
            assert seen.count(round_) == 3
            await barrier.wait()

    await asyncio.gather(*[party(i) for i in range(3)])


async def generous_timeout() -> None:
    async with asyncio.timeout(5):
        await asyncio.sleep(1)
        await asyncio.to_thread(int)
    assert await asyncio.wait_for(asyncio.to_thread(int, "7"), 2) == 7


async def timeout_is_seen() -> None:
    try:
        await asyncio.wait_for(asyncio.Event().wait(), 1)
    except TimeoutError:
        return
    raise AssertionError


async def callbacks_before_waiters() -> None:
    """A done callback that was added before an await runs before it goes on."""
    known: set[asyncio.Task[None]] = set()
    task = asyncio.create_task(step(2))
    known.add(task)
    task.add_done_callback(known.discard)
    await task
    assert not known


async def structured() -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(step(i)) for i in range(4)]
    assert all(task.done() for task in tasks)


async def structured_failure() -> None:
    ended = []

    async def fail() -> None:
        await step(2)
        raise ValueError("on purpose")

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(1)

    started = asyncio.Event()

    async def wait_started() -> None:
        started.set()
        await wait()

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_started())
            await started.wait()
            group.create_task(fail())
    except* ValueError:
        pass
    assert ended == [1]


async def anyio_group() -> None:
    results = []

    async def work(i: int) -> None:
        results.append(await anyio.to_thread.run_sync(lambda: i))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for i in range(3):
                group.start_soon(work, i)
    assert sorted(results) == [0, 1, 2]


async def anyio_cancellation() -> None:
    ended = []

    async def forever() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(1)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(forever)
        await anyio.sleep(1)
        group.cancel_scope.cancel()
    assert ended == [1, 1, 1]


async def anyio_stream() -> None:
    send, receive = anyio.create_memory_object_stream[int](1)
    got = []

    async def produce() -> None:
        async with send:
            for i in range(4):
                await send.send(i)

    async with anyio.create_task_group() as group:
        group.start_soon(produce)
        async with receive:
            got += [item async for item in receive]
    assert got == [0, 1, 2, 3]


async def spins_with_patience() -> None:
    flag = False

    async def later() -> None:
        nonlocal flag
        await step(5)
        flag = True

    task = asyncio.create_task(later())
    while not flag:
        await asyncio.sleep(0)
    await task


async def polls_a_call() -> None:
    done: list[int] = []
    call = asyncio.get_running_loop().run_in_executor(None, done.append, 1)
    while not done:
        await asyncio.sleep(0.01)
    await call


async def spins_on_a_call() -> None:
    call = asyncio.get_running_loop().run_in_executor(None, int)
    while not call.done():
        await asyncio.sleep(0)


async def generator_closed() -> None:
    async def count() -> object:
        for i in range(10):
            await step()
            yield i

    async for i in count():  # type: ignore[attr-defined]
        if i == 2:
            break


async def sleeps_in_order() -> None:
    order = []

    async def nap(seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append(seconds)

    await asyncio.gather(nap(3), nap(1), nap(2))
    assert order == [1, 2, 3]


async def random_but_seeded() -> None:
    for _ in range(random.randrange(5)):
        await step()
    uuid.uuid4()
    start = time.monotonic()
    await asyncio.sleep(3600)
    assert time.monotonic() - start == 3600


async def shielded_work() -> None:
    done = []

    async def work() -> None:
        await step(3)
        done.append(1)

    task = asyncio.create_task(work())
    waiter = asyncio.create_task(asyncio.wait_for(asyncio.shield(task), 10))
    await step()
    waiter.cancel()
    await asyncio.wait([waiter])
    await task
    assert done == [1]


async def single_flight() -> None:
    cache: dict[str, asyncio.Future[int]] = {}
    calls = 0

    async def load() -> int:
        nonlocal calls
        calls += 1
        return await asyncio.to_thread(int, "5")

    async def get() -> int:
        if "it" not in cache:
            cache["it"] = asyncio.ensure_future(load())
        return await cache["it"]

    assert await asyncio.gather(get(), get(), get()) == [5, 5, 5]
    assert calls == 1


CORRECT = [
    call_soon_keeps_order, one_worker_keeps_order, locked_counter, fair_lock, bounded_queue,
    join_a_queue, condition_with_loop, counted_barrier, generous_timeout, timeout_is_seen,
    callbacks_before_waiters, structured, structured_failure, anyio_group, anyio_cancellation,
    anyio_stream, spins_with_patience, polls_a_call, spins_on_a_call, generator_closed,
    sleeps_in_order,
    random_but_seeded, shielded_work, single_flight,
]  # fmt: skip
