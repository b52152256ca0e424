"""Readers and a writer share a lock; the client of one goes away."""

import asyncio

import aiorwlock


async def main():
    lock = aiorwlock.RWLock()

    async def write():
        async with lock.writer_lock:
            await asyncio.sleep(0)

    async def read():
        async with lock.reader_lock:
            await asyncio.sleep(0)

    requests = [asyncio.create_task(work()) for work in (write, read, write)]

    async def client_gone():
        requests[1].cancel()

    await asyncio.gather(*requests, client_gone(), return_exceptions=True)
    await write()
