"""A service is started with a time limit on the start."""

import asyncio

import anyio


async def main():
    async def service(*, task_status):
        await asyncio.sleep(0)  # connects
        task_status.started()
        await anyio.sleep(1)

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as start:

            async def lose_patience():
                start.cancel()

            group.start_soon(lose_patience)
            await group.start(service)
