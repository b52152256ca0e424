"""Several tasks read and write; never do two of them write."""

import asyncio

import aiorwlock


async def main():
    lock = aiorwlock.RWLock()
    writing = most = 0

    async def write():
        nonlocal writing, most
        async with lock.writer_lock:
            writing += 1
            most = max(most, writing)
            await asyncio.sleep(0)
            writing -= 1

    async def read():
        async with lock.reader_lock:
            await asyncio.sleep(0)

    await asyncio.gather(write(), read(), write(), write())
    assert most == 1
