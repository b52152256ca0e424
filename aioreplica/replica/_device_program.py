"""A device program: a plain function of one replica, run whole on its device thread."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..context import PLACE

if TYPE_CHECKING:
    from ._context import ReplicaContext


def run_device_program(
    context: ReplicaContext, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call `fn` on the calling thread, where the blocking collectives of `context` are live.

    Raises:
        TypeError: If `fn` gives a coroutine, which nobody here can await.
    """
    blocking = context.blocking
    blocking.enter(PLACE.get())
    try:
        result = fn(*args, **kwargs)
    finally:
        blocking.leave()
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(
            f"The plain step function {fn!r} returned a coroutine. Declare it with `async def`, "
            "so that run knows it is asynchronous."
        )
    return result
