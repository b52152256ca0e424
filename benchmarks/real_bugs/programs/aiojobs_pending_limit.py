"""More jobs are spawned than may run or wait; in the end all have run."""

import asyncio
import warnings

import aiojobs

warnings.simplefilter("ignore")


async def main():
    scheduler = await aiojobs.create_scheduler(limit=1, pending_limit=1)
    finished = []

    async def job(number):
        await asyncio.sleep(0.1)
        finished.append(number)

    jobs = [await scheduler.spawn(job(number)) for number in range(4)]
    await asyncio.gather(*(each.wait() for each in jobs))
    await scheduler.close()
    assert sorted(finished) == [0, 1, 2, 3]
