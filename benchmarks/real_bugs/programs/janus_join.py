"""A thread works off what an async program puts into a queue."""

import asyncio

import janus


async def main():
    queue = janus.Queue()

    def work():
        for _ in range(2):
            queue.sync_q.get()
            queue.sync_q.task_done()

    async def produce():
        for item in range(2):
            await queue.async_q.put(item)
        await queue.async_q.join()
        return queue.async_q.unfinished_tasks

    _, unfinished = await asyncio.gather(asyncio.to_thread(work), produce())
    queue.close()
    await queue.wait_closed()
    assert unfinished == 0
