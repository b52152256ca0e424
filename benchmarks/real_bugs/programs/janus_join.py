"""A thread and a task work off what another task puts into a queue."""

import asyncio

import janus


async def main():
    queue = janus.Queue()

    def work():
        queue.sync_q.get()
        queue.sync_q.task_done()

    async def work_too():
        await queue.async_q.get()
        queue.async_q.task_done()

    async def produce():
        for item in range(2):
            await asyncio.sleep(0)  # reads the item
            await queue.async_q.put(item)
        await queue.async_q.join()
        return queue.async_q.unfinished_tasks

    *_, unfinished = await asyncio.gather(asyncio.to_thread(work), work_too(), produce())
    queue.close()
    await queue.wait_closed()
    assert unfinished == 0
