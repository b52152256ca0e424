"""What tests of cancelled runs share: who runs, loop cycles, and an op that waits to be let go."""

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from typing import Any

import aioreplica as ar


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def my_id() -> int:
    return me().replica_id_in_sync_group


async def cycles(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def spawn(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


class GatedOp:
    """A device op that runs until it is let go."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.gate = threading.Event()
        self.ended = 0

    def __call__(self) -> str:
        self.started.set()
        assert self.gate.wait(60)
        self.ended += 1
        return "done"


def here(offset: int = 0) -> str:
    """Return the caller's file and line, so many lines further down."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{frame.f_back.f_code.co_filename}:{frame.f_back.f_lineno + offset}"
