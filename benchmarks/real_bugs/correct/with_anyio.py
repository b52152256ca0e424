"""Correct programs over anyio."""

import anyio
from anyio import from_thread, to_thread
from anyio.streams.stapled import StapledObjectStream


async def hand_over_items():
    send, receive = anyio.create_memory_object_stream(2)
    received = []

    async def produce(stream, start):
        async with stream:
            for item in range(start, start + 3):
                await stream.send(item)

    async def consume(stream):
        async with stream:
            async for item in stream:
                received.append(item)

    async with anyio.create_task_group() as group:
        async with send, receive:
            group.start_soon(produce, send.clone(), 0)
            group.start_soon(produce, send.clone(), 10)
            group.start_soon(consume, receive.clone())
            group.start_soon(consume, receive.clone())
    assert sorted(received) == [0, 1, 2, 10, 11, 12]


async def limit_and_time_out():
    limiter = anyio.CapacityLimiter(2)
    busy = most = 0

    async def work():
        nonlocal busy, most
        with anyio.move_on_after(0.5):
            async with limiter:
                busy += 1
                most = max(most, busy)
                try:
                    await anyio.sleep(0.2)
                finally:
                    busy -= 1

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(work)
    assert most == 2
    assert limiter.borrowed_tokens == 0


async def start_and_cancel_services():
    stopped = []

    async def service(name, *, task_status):
        try:
            task_status.started(name)
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0)
                stopped.append(name)

    async with anyio.create_task_group() as group:
        names = [await group.start(service, name) for name in "ab"]
        group.cancel_scope.cancel()
    assert names == ["a", "b"]
    assert sorted(stopped) == ["a", "b"]


async def call_back_from_threads():
    seen = []

    async def remember(value):
        await anyio.sleep(0)
        seen.append(value)

    async with anyio.create_task_group() as group:
        for value in range(3):
            group.start_soon(to_thread.run_sync, from_thread.run, remember, value)
    assert sorted(seen) == [0, 1, 2]


async def echo_over_stapled_streams():
    there, back = anyio.create_memory_object_stream(1), anyio.create_memory_object_stream(1)
    client = StapledObjectStream(there[0], back[1])
    server = StapledObjectStream(back[0], there[1])

    async def serve():
        async with server:
            async for item in server:
                await server.send(item * 2)

    async with anyio.create_task_group() as group:
        group.start_soon(serve)
        async with client:
            for item in range(3):
                await client.send(item)
                assert await client.receive() == item * 2
