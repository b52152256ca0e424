"""Going on in the middle of a pass: by the source's own state, or by reading again and skipping."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, final, runtime_checkable

from ._stream import Item, Start, Stream

YIELD_EVERY = 64  # skipped items after which other tasks get a turn: a source may never wait


@runtime_checkable
class Stateful(Protocol):
    """A dataset that knows how to go on by itself, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> Any:
        """Return its state behind what it has yielded."""

    def load_state_dict(self, state: Any) -> None:
        """Make the next iterator go on from `state`."""


@final
class SkippingStream(Stream):
    """A pass without the items that were delivered before; they are read and dropped.

    Args:
        upstream: The pass from its beginning.
        start: How many items to drop.
        label: Names the source in errors.
    """

    def __init__(self, upstream: Stream, start: Start, label: str) -> None:
        self._upstream = upstream
        self._goal = start.offset
        self._may_be_over = start.may_be_over
        self._label = label
        self._offset = 0

    async def pull(self) -> Item | None:
        """Return the next item behind the goal.

        Raises:
            ValueError: If the pass ends before it.
        """
        while (item := await self._upstream.pull()) is not None:
            self._offset = item.offset
            if item.offset > self._goal:
                return item
            if item.offset % YIELD_EVERY == 0:
                await asyncio.sleep(0)
        if self._offset < self._goal and not self._may_be_over:
            raise ended_early(self._label, self._goal, self._offset)
        return None

    async def aclose(self) -> None:
        """Close the pass."""
        await self._upstream.aclose()


def ended_early(label: str, goal: int, num_items: int) -> ValueError:
    """Return the error of a source that is shorter than its state says."""
    return ValueError(
        f"{label} cannot go on after item {goal}: it ended after {num_items}. Load the state of "
        "this dataset."
    )
