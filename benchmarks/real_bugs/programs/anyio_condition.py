"""Two consumers of a mailbox; one of them gives up."""

import anyio


async def main():
    condition = anyio.Condition()
    mailbox, hasty, patient = [], [], []
    patience = anyio.CancelScope()

    async def consume(letters):
        async with condition:
            while not mailbox:
                await condition.wait()
            letters.append(mailbox.pop())

    async def consume_impatiently():
        with patience:
            await consume(hasty)

    async def produce():
        async with condition:
            mailbox.append("letter")
            condition.notify()

    async def give_up():
        patience.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(consume, patient)
        async with anyio.create_task_group() as hurry:
            hurry.start_soon(consume_impatiently)
            hurry.start_soon(produce)
            hurry.start_soon(give_up)
        if hasty:
            await produce()
    assert patient == ["letter"]
