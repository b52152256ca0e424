"""A task group inside another; both have a task that fails."""

import asyncio


async def main():
    went_on = False

    async def fail():
        await asyncio.sleep(0)
        raise ValueError("no")

    try:
        async with asyncio.TaskGroup() as outer:
            outer.create_task(fail())
            try:
                async with asyncio.TaskGroup() as inner:
                    inner.create_task(fail())
            except* ValueError:
                pass
            await asyncio.sleep(1)
            went_on = True
    except* ValueError:
        pass
    assert not went_on
