"""Running awaitable code of the library on a device thread, where its waits block instead.

An optimizer's `apply_gradients` is a coroutine whose only waits are collectives and device ops of
its replica. While it is driven, `ReplicaContext` does both at once in the calling thread and hands
out what is ready, so one step of the coroutine takes it to its end. No code exists twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from ..errors import ContextError

if TYPE_CHECKING:
    from ._context import ReplicaContext

T = TypeVar("T")


@final
class Ready(Generic[T]):
    """An awaitable whose result is there already."""

    __slots__ = ("_result",)

    def __init__(self, result: T) -> None:
        self._result = result

    def __await__(self) -> Generator[Any, None, T]:
        return self._result
        yield


def drive(
    replica: ReplicaContext,
    name: str,
    frame: FrameType,
    make: Callable[..., Awaitable[T]],
    *args: Any,
) -> T:
    """Call `make(*args)` and run what it gives to its end, on the device thread.

    Args:
        replica: Whose waits it may hold.
        name: What errors call it.
        frame: Where tables say that its collectives were called.
        make: Gives the awaitable.
        *args: Passed on.

    Raises:
        ContextError: If called elsewhere than on the replica's device thread, or if the awaitable
            waits for something else than the replica.
        Exception: What the awaitable raises.
    """
    replica.blocking.require_here(name)
    with replica.driving(frame):
        steps = make(*args).__await__()
        try:
            steps.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        steps.close()
    raise ContextError(
        f"{name} had to wait for something that only an event loop can wait for. Use the awaitable "
        "method in an `async def` step."
    )
