"""Two consumers of a mailbox; one of them gives up."""

import asyncio


async def main():
    condition = asyncio.Condition()
    mailbox = []

    async def consume():
        async with condition:
            while not mailbox:
                await condition.wait()
            return mailbox.pop()

    async def produce():
        async with condition:
            mailbox.append("letter")
            condition.notify()

    impatient = asyncio.create_task(consume())
    patient = asyncio.create_task(consume())

    async def give_up():
        impatient.cancel()

    await asyncio.gather(produce(), give_up())
    (got,) = await asyncio.gather(impatient, return_exceptions=True)
    if got == "letter":
        await produce()
    assert await patient == "letter"
