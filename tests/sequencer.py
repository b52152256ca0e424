"""Forcing the order in which replicas and other tasks go on."""

import asyncio
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

MANY = 100_000
IDLE: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Event] = WeakKeyDictionary()


class Sequencer:
    """Lets tasks pass one after the other, in a given order of names.

    The next one is let go after the one before has run until it waits again.
    """

    def __init__(self, order: Sequence[object]) -> None:
        self._order = list(order)
        self._gates = [asyncio.Event() for _ in order]
        self._gates[0].set()

    async def turn(self, name: object) -> None:
        """Wait until it is the turn of `name`; each entry of the order is one turn."""
        position = self._order.index(name)
        self._order[position] = None
        await self._gates[position].wait()
        if position + 1 < len(self._gates):
            asyncio.get_running_loop().call_soon(self._gates[position + 1].set)


async def idle() -> None:
    """Let all others run until each of them waits: for this task, a thread, a timer or a socket.

    In place of a number of loop cycles, which is too small some day. Several tasks may call it;
    they go on together. On asyncio's own loop.
    """
    loop: Any = asyncio.get_running_loop()
    if (others := IDLE.get(loop)) is not None:
        await others.wait()
        return
    IDLE[loop] = asyncio.Event()
    try:
        for _ in range(MANY):
            if not loop._ready:  # there is no public name for it
                return
            await asyncio.sleep(0)
        raise AssertionError(f"The event loop was busy for {MANY} cycles: something spins.")
    finally:
        IDLE.pop(loop).set()
