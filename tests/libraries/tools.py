"""Queues, locks, caches, limiters, retries and schedulers of other packages, in correct use."""

from __future__ import annotations

import asyncio
import datetime as dt
import tempfile
from pathlib import Path
from typing import Any

import aiobreaker
import aiocache
import aiochannel
import aiofiles
import aioitertools.asyncio
import aiojobs
import aiolimiter
import aiologic
import aiometer
import aiorwlock
import aiostream
import aiotools
import anyio
import asgiref.sync
import async_lru
import async_timeout
import asyncer
import asyncstdlib
import backoff
import cashews
import culsans
import purgatory
import pyee.asyncio
import pyrate_limiter
import reactivex
import reactivex.operators
import reactivex.scheduler.eventloop
import stamina
import svcs
import tenacity
from aiopg.utils import ClosableQueue
from apscheduler.schedulers.asyncio import AsyncIOScheduler


async def double(number: int) -> int:
    """Take a moment, and return twice as much."""
    await asyncio.sleep(0)
    return 2 * number


# ---- queues and streams -------------------------------------------------------------------------


async def aiochannel_until_closed() -> None:
    channel: Any = aiochannel.Channel(2)

    async def produce() -> None:
        for number in range(4):
            await channel.put(number)
        channel.close()

    producing = asyncio.create_task(produce())
    assert [number async for number in channel] == [0, 1, 2, 3]
    await producing


async def culsans_between_a_thread_and_a_task() -> None:
    queue: Any = culsans.Queue(maxsize=1)

    def produce() -> None:
        for number in range(3):
            queue.sync_q.put(number)

    producing = asyncio.ensure_future(asyncio.to_thread(produce))
    assert [await queue.async_q.get() for _ in range(3)] == [0, 1, 2]
    await producing


async def aiostream_with_two_at_once() -> None:
    numbers = aiostream.stream.map(aiostream.stream.range(4), double, task_limit=2)
    assert await aiostream.stream.list(numbers) == [0, 2, 4, 6]


async def aioitertools_with_two_at_once() -> None:
    found = await aioitertools.asyncio.gather(*map(double, range(4)), limit=2)
    assert found == [0, 2, 4, 6]


async def aiometer_with_two_at_once() -> None:
    assert await aiometer.run_on_each(double, range(3), max_at_once=2) is None


async def asyncer_results() -> None:
    async with asyncer.create_task_group() as group:
        one, two = group.soonify(double)(1), group.soonify(double)(2)
    assert (one.value, two.value) == (2, 4)


async def anyio_streams() -> None:
    send, receive = anyio.create_memory_object_stream[int](1)

    async def produce() -> None:
        async with send:
            for number in range(3):
                await send.send(number)

    async with anyio.create_task_group() as group, receive:
        group.start_soon(produce)
        assert [number async for number in receive] == [0, 1, 2]


async def pyee_handlers() -> None:
    emitter, seen = pyee.asyncio.AsyncIOEventEmitter(), list[int]()

    @emitter.on("number")
    async def handle(number: int) -> None:
        seen.append(await double(number))

    for number in range(3):
        emitter.emit("number", number)
    await emitter.wait_for_complete()
    assert sorted(seen) == [0, 2, 4]


async def reactivex_in_virtual_time() -> None:
    loop = asyncio.get_running_loop()
    scheduler = reactivex.scheduler.eventloop.AsyncIOScheduler(loop)
    start, done = loop.time(), loop.create_future()
    ticks = reactivex.timer(60, scheduler=scheduler)
    ticks.subscribe(lambda _: done.set_result(loop.time() - start), scheduler=scheduler)
    assert await done >= 60


# ---- locks and limits ---------------------------------------------------------------------------


async def aiorwlock_of_readers_and_a_writer() -> None:
    lock, reading, text = aiorwlock.RWLock(), 0, "old"

    async def read() -> None:
        nonlocal reading
        async with lock.reader:
            reading += 1
            before = text
            await asyncio.sleep(0)
            assert text == before
            reading -= 1

    async def write() -> None:
        nonlocal text
        async with lock.writer:
            assert not reading
            text = "new"

    await asyncio.gather(read(), write(), read())


async def aiologic_between_tasks() -> None:
    lock, count = aiologic.Lock(), 0

    async def add() -> None:
        nonlocal count
        async with lock:
            seen = count
            await asyncio.sleep(0)
            count = seen + 1

    await asyncio.gather(add(), add(), add())
    assert count == 3


async def aiolimiter_of_two_a_minute() -> None:
    loop, limiter = asyncio.get_running_loop(), aiolimiter.AsyncLimiter(2, 60)
    start = loop.time()

    async def use() -> float:
        async with limiter:
            return loop.time() - start

    times = sorted(await asyncio.gather(use(), use(), use()))
    assert times[1] < 1
    assert times[2] >= 29


async def pyrate_limiter_of_two_a_minute() -> None:
    limiter: Any = pyrate_limiter.Limiter(pyrate_limiter.Rate(2, pyrate_limiter.Duration.MINUTE))
    assert [await limiter.try_acquire_async("name", blocking=False) for _ in range(3)] == [
        True, True, False,
    ]  # fmt: skip


async def async_timeout_of_a_wait() -> None:
    try:
        async with async_timeout.timeout(10):
            await asyncio.sleep(20)
    except TimeoutError:
        return
    raise AssertionError("It has not timed out.")


async def purgatory_circuit() -> None:
    circuits: Any = purgatory.AsyncCircuitBreakerFactory(default_threshold=2, default_ttl=60)
    await circuits.initialize()

    async def fail() -> str:
        try:
            async with await circuits.get_breaker("service"):
                raise ConnectionError
        except Exception as error:
            return type(error).__name__

    assert [await fail() for _ in range(3)] == ["ConnectionError"] * 2 + ["OpenedState"]
    await asyncio.sleep(61)
    assert await fail() == "ConnectionError"


async def aiobreaker_circuit() -> None:
    breaker = aiobreaker.CircuitBreaker(fail_max=2, timeout_duration=dt.timedelta(minutes=1))

    async def fail() -> None:
        raise ConnectionError

    found = [
        type(error).__name__
        for error in [await _error_of(breaker.call_async(fail)) for _ in range(3)]
    ]
    assert found == ["ConnectionError", "CircuitBreakerError", "CircuitBreakerError"]


async def _error_of(work: Any) -> Exception:
    try:
        await work
    except Exception as error:
        return error
    raise AssertionError("It has not failed.")


# ---- caches -------------------------------------------------------------------------------------


async def async_lru_computes_once() -> None:
    computed: list[int] = []

    @async_lru.alru_cache
    async def compute(key: int) -> int:
        computed.append(key)
        return await double(key)

    assert await asyncio.gather(*map(compute, (1, 1, 2))) == [2, 2, 4]
    assert sorted(computed) == [1, 2]
    await compute.cache_close()


async def aiocache_expires() -> None:
    cache: Any = aiocache.SimpleMemoryCache(namespace=str(id(asyncio.get_running_loop())))
    await cache.set("key", 1, ttl=60)
    assert await cache.get("key") == 1
    await asyncio.sleep(61)
    assert await cache.get("key") is None


async def cashews_computes_once() -> None:
    cache: Any = cashews.Cache()
    cache.setup("mem://", check_interval=0)
    computed: list[int] = []

    @cache(ttl="1m", key="double:{key}", lock=True)
    async def compute(key: int) -> int:
        computed.append(key)
        return await double(key)

    assert await asyncio.gather(compute(1), compute(1)) == [2, 2]
    assert computed == [1]
    await cache.close()


async def asyncstdlib_caches() -> None:
    @asyncstdlib.lru_cache(maxsize=2)
    async def compute(key: int) -> int:
        return await double(key)

    assert [await compute(key) for key in (1, 1, 2)] == [2, 2, 4]
    assert compute.cache_info().hits == 1


async def svcs_of_a_request() -> None:
    registry, closed = svcs.Registry(), list[str]()

    async def connect() -> Any:
        yield "connection"
        closed.append("connection")

    registry.register_factory(str, connect)
    async with svcs.Container(registry) as container:
        assert await container.aget(str) == "connection"
    assert closed == ["connection"]


# ---- retries and jobs ---------------------------------------------------------------------------


class Flaky:
    """Fails twice, then works."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self) -> int:
        await asyncio.sleep(0)
        self.calls += 1
        if self.calls < 3:
            raise ConnectionError
        return self.calls


async def tenacity_retries() -> None:
    wait = tenacity.wait_exponential(max=10)
    assert await tenacity.AsyncRetrying(wait=wait)(Flaky()) == 3


async def stamina_retries() -> None:
    flaky = Flaky()
    async for attempt in stamina.retry_context(on=ConnectionError, attempts=5):
        with attempt:
            assert await flaky() == 3


async def backoff_retries() -> None:
    flaky = Flaky()

    @backoff.on_exception(backoff.expo, ConnectionError, max_tries=5)
    async def call() -> int:
        return await flaky()

    assert await call() == 3


async def aiojobs_two_at_once() -> None:
    running = most = 0

    async def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1)
        running -= 1

    scheduler = aiojobs.Scheduler(limit=2)
    for _ in range(4):
        await scheduler.spawn(work())
    await scheduler.wait_and_close()
    assert most == 2


async def apscheduler_every_hour() -> None:
    ran: list[dt.datetime] = []
    scheduler: Any = AsyncIOScheduler(timezone="UTC")
    scheduler.add_job(lambda: ran.append(dt.datetime.now(dt.UTC)), "interval", hours=1)
    scheduler.start()
    await asyncio.sleep(3 * 3600 + 60)
    scheduler.shutdown()
    await asyncio.sleep(0)
    assert len(ran) == 3


async def aiotools_tasks() -> None:
    done: list[int] = []

    async def work(number: int) -> None:
        done.append(await double(number))

    async with aiotools.PersistentTaskGroup() as group:
        for number in range(3):
            group.create_task(work(number))
    assert sorted(done) == [0, 2, 4]


async def asgiref_there_and_back() -> None:
    def work() -> int:
        return int(asgiref.sync.async_to_sync(double)(2))

    assert await asgiref.sync.sync_to_async(work, thread_sensitive=False)() == 4


async def aiofiles_text() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        async with aiofiles.open(path, "w") as file:
            await file.write("text")
        async with aiofiles.open(path) as file:
            assert await file.read() == "text"


PROGRAMS = [
    aiochannel_until_closed, culsans_between_a_thread_and_a_task, aiostream_with_two_at_once,
    aioitertools_with_two_at_once, aiometer_with_two_at_once, asyncer_results, anyio_streams,
    pyee_handlers, reactivex_in_virtual_time, aiorwlock_of_readers_and_a_writer,
    aiologic_between_tasks, aiolimiter_of_two_a_minute,
    pyrate_limiter_of_two_a_minute, async_timeout_of_a_wait, purgatory_circuit,
    aiobreaker_circuit, async_lru_computes_once, aiocache_expires, cashews_computes_once,
    asyncstdlib_caches, svcs_of_a_request, tenacity_retries, stamina_retries, backoff_retries,
    aiojobs_two_at_once, apscheduler_every_hour, aiotools_tasks, asgiref_there_and_back,
    aiofiles_text,
]  # fmt: skip


# ---- a real bug ---------------------------------------------------------------------------------


async def aiopg_notification() -> None:
    """A `get` that times out may take a notification with it."""
    queue: asyncio.Queue[str] = asyncio.Queue()
    notifies: Any = ClosableQueue(queue, asyncio.get_running_loop())
    asyncio.get_running_loop().call_later(1, queue.put_nowait, "news")
    while True:
        try:
            async with asyncio.timeout(1):
                found = await notifies.get()
        except TimeoutError:
            assert asyncio.get_running_loop().time() < 1010, "The notification is lost."
        else:
            break
    assert found == "news"


BUGS = [(aiopg_notification, "The notification is lost.")]
