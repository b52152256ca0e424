"""Correct programs over asyncio alone, as its documentation teaches them, and websockets."""

import asyncio

from websockets_cancelled_ping import connect


async def work_off_a_queue():
    queue, finished = asyncio.Queue(maxsize=2), []

    async def worker():
        while True:
            item = await queue.get()
            await asyncio.sleep(0)
            finished.append(item)
            queue.task_done()

    workers = [asyncio.create_task(worker()) for _ in range(3)]
    for item in range(6):
        await queue.put(item)
    await queue.join()
    for each in workers:
        each.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    assert sorted(finished) == list(range(6))


async def first_answer_wins():
    async def mirror(seconds):
        await asyncio.sleep(seconds)
        return seconds

    mirrors = [asyncio.create_task(mirror(seconds)) for seconds in (3, 1, 2)]
    done, pending = await asyncio.wait(mirrors, return_when=asyncio.FIRST_COMPLETED)
    for each in pending:
        each.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    assert {each.result() for each in done} == {1}


async def one_failure_ends_the_group():
    cancelled = []

    async def fail():
        await asyncio.sleep(1)
        raise ValueError("no")

    async def wait():
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait())
            group.create_task(wait())
            group.create_task(fail())
    except* ValueError:
        pass
    assert cancelled == [True, True]


async def talk_over_a_web_socket():
    client, server = connect()

    async def echo():
        async for message in server:
            await server.send(message)

    echoing = asyncio.create_task(echo())
    for message in "ab":
        await client.send(message)
        assert await client.recv() == message
    echoing.cancel()
    await asyncio.gather(echoing, return_exceptions=True)
