"""Who holds which lock: asyncio does not keep that, so the rerun that tells a story watches."""

from __future__ import annotations

import asyncio
from typing import Any, final

PRIMITIVES = (asyncio.Lock, asyncio.Semaphore)


@final
class Owners:
    """Watches `acquire` and `release` of asyncio's locks and semaphores.

    Watching changes no schedule: the watched `acquire` awaits the real one and nothing else.
    """

    def __init__(self) -> None:
        self._holders: dict[int, list[Any]] = {}
        self._undo: list[tuple[type, str, Any]] = []

    def install(self) -> None:
        """Begin to watch."""
        for cls in PRIMITIVES:
            self._watch(cls)

    def remove(self) -> None:
        """Stop watching; idempotent."""
        for cls, name, real in self._undo:
            setattr(cls, name, real)
        self._undo.clear()

    def holders(self, primitive: Any) -> list[Any]:
        """Return the tasks that hold a lock, or permits of a semaphore."""
        return list(self._holders.get(id(primitive), ()))

    def _watch(self, cls: type) -> None:
        real_acquire, real_release = vars(cls)["acquire"], vars(cls)["release"]
        holders = self._holders

        async def acquire(self: Any) -> Any:
            taken = await real_acquire(self)
            holders.setdefault(id(self), []).append(asyncio.current_task())
            return taken

        def release(self: Any) -> None:
            held_by = holders.get(id(self), [])
            task = asyncio.current_task()
            if task in held_by:
                held_by.remove(task)
            elif held_by:
                held_by.pop(0)
            real_release(self)

        self._undo += [(cls, "acquire", real_acquire), (cls, "release", real_release)]
        cls.acquire = acquire  # type: ignore[attr-defined]
        cls.release = release  # type: ignore[attr-defined]
