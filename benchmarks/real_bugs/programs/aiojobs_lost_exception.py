"""A job fails; its exception is reported, whenever the scheduler is closed."""

import asyncio

import aiojobs


async def main():
    reported = []

    def report(scheduler, context):
        reported.append(context["exception"])

    scheduler = aiojobs.Scheduler(exception_handler=report)

    async def job():
        await asyncio.sleep(0)
        raise ValueError("the disk is full")

    await scheduler.spawn(job())
    await scheduler.wait_and_close()
    assert len(reported) == 1
