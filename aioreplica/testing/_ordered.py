"""asyncio functions that return or walk sets, in an order that every run shares."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any, final

from ._task import SimTask

real_wait = asyncio.wait
real_as_completed = asyncio.as_completed
real_all_tasks = asyncio.all_tasks


@final
class OrderedSet(set[Any]):
    """A set that is walked, and popped, in the order it was made in."""

    def __init__(self, members: Iterable[Any]) -> None:
        self._order = tuple(dict.fromkeys(members))
        super().__init__(self._order)

    def __iter__(self) -> Iterator[Any]:
        inside = super().__contains__
        known = set(self._order)
        yield from [each for each in self._order if inside(each)]
        yield from [each for each in super().__iter__() if each not in known]

    def pop(self) -> Any:
        """Take out the first member."""
        for each in self:
            self.remove(each)
            return each
        return super().pop()


async def wait(
    fs: Iterable[Any], *, timeout: float | None = None, return_when: str = asyncio.ALL_COMPLETED
) -> tuple[set[Any], set[Any]]:
    """Wait as `asyncio.wait` does; both sets keep the order of `fs`."""
    if asyncio.isfuture(fs) or asyncio.iscoroutine(fs):
        return await real_wait(fs, timeout=timeout, return_when=return_when)
    members = list(fs)
    done, pending = await real_wait(members, timeout=timeout, return_when=return_when)
    return (
        OrderedSet(each for each in members if each in done),
        OrderedSet(each for each in members if each in pending),
    )


def as_completed(fs: Iterable[Any], *, timeout: float | None = None) -> Any:
    """Yield as `asyncio.as_completed` does; tasks are made in the order of `fs`."""
    if asyncio.isfuture(fs) or asyncio.iscoroutine(fs):
        return real_as_completed(fs, timeout=timeout)
    return real_as_completed([asyncio.ensure_future(each) for each in fs], timeout=timeout)


def all_tasks(loop: Any = None) -> set[Any]:
    """Return all tasks, in the order of their making."""
    return OrderedSet(sorted(real_all_tasks(loop), key=_number))


def _number(task: Any) -> int:
    return task.number if isinstance(task, SimTask) else -1
