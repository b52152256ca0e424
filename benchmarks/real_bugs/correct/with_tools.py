"""Correct programs over tenacity, aiojobs, aiolimiter, aiorwlock, aiostream, asyncstdlib."""

import asyncio

import aiojobs
import aiorwlock
import asyncstdlib
from aiolimiter import AsyncLimiter
from aiostream import pipe, stream
from async_timeout import timeout
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed


async def retry_until_it_works():
    attempts = {}

    @retry(stop=stop_after_attempt(3), wait=wait_fixed(1), retry=retry_if_exception_type(OSError))
    async def fetch(key):
        attempts[key] = attempts.get(key, 0) + 1
        await asyncio.sleep(0)
        if attempts[key] < 3:
            raise OSError("not yet")
        return key

    assert await asyncio.gather(fetch("a"), fetch("b")) == ["a", "b"]
    assert attempts == {"a": 3, "b": 3}


async def run_jobs_and_close():
    finished = []

    async def job(number):
        await asyncio.sleep(number)
        finished.append(number)

    async with aiojobs.Scheduler() as scheduler:
        for number in range(3):
            await scheduler.spawn(job(number))
    assert sorted(finished) == [0, 1, 2]


async def close_a_scheduler_early():
    stopped = []

    async def job(number):
        try:
            await asyncio.sleep(100)
        finally:
            stopped.append(number)

    scheduler = aiojobs.Scheduler()
    for number in range(3):
        await scheduler.spawn(job(number))
    await asyncio.sleep(1)
    await scheduler.close()
    assert sorted(stopped) == [0, 1, 2]


async def keep_a_rate():
    limiter = AsyncLimiter(2, 1)
    loop = asyncio.get_running_loop()
    times = []

    async def work():
        async with limiter:
            times.append(loop.time())

    await asyncio.gather(*(work() for _ in range(5)))
    assert max(times) - min(times) >= 1


async def read_and_write_with_a_lock():
    lock = aiorwlock.RWLock()
    state = {"writers": 0, "readers": 0}

    async def write():
        async with lock.writer_lock:
            assert state == {"writers": 0, "readers": 0}
            state["writers"] += 1
            await asyncio.sleep(0)
            state["writers"] -= 1

    async def read():
        async with lock.reader_lock:
            assert state["writers"] == 0
            state["readers"] += 1
            await asyncio.sleep(0)
            state["readers"] -= 1

    await asyncio.gather(write(), read(), read(), write())


async def merge_streams():
    async def count(start):
        for number in range(start, start + 3):
            await asyncio.sleep(0)
            yield number

    merged = stream.merge(count(0), count(10)) | pipe.map(lambda number: number * 2)
    async with merged.stream() as streamer:
        items = [item async for item in streamer]
    assert sorted(items) == [0, 2, 4, 20, 22, 24]


async def map_a_stream_concurrently():
    async def double(number, *_):
        await asyncio.sleep(0)
        return number * 2

    items = await stream.list(stream.range(4) | pipe.map(double, ordered=True, task_limit=2))
    assert items == [0, 2, 4, 6]


async def split_a_stream():
    async def numbers():
        for number in range(3):
            await asyncio.sleep(0)
            yield number

    async def collect(iterator):
        return [item async for item in iterator]

    async with asyncstdlib.tee(numbers(), n=2, lock=asyncio.Lock()) as (left, right):
        assert await asyncio.gather(collect(left), collect(right)) == [[0, 1, 2]] * 2


async def borrow_a_generator():
    closed = []

    async def numbers():
        try:
            for number in range(10):
                await asyncio.sleep(0)
                yield number
        finally:
            closed.append(True)

    async def first(count):
        async with asyncstdlib.scoped_iter(numbers()) as items:
            return [item async for item in asyncstdlib.islice(items, count)]

    assert await asyncio.gather(first(2), first(3)) == [[0, 1], [0, 1, 2]]
    assert closed == [True, True]


async def give_up_in_time():
    gave_up = []

    async def work(seconds):
        try:
            async with timeout(1):
                await asyncio.sleep(seconds)
        except TimeoutError:
            gave_up.append(seconds)

    await asyncio.gather(work(0.5), work(2), work(3))
    assert sorted(gave_up) == [2, 3]
