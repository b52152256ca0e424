"""The loops over a strategy's datasets that have not ended: closed with the strategy."""

from __future__ import annotations

import sys
import warnings
from typing import final

from ._loop import Loop

MAX_LEFT = 64


@final
class OpenLoops:
    """Knows every loop from its first batch to its proper end.

    A loop that was broken off outside `async with` is closed as soon as its iterator is dropped,
    and remembered, so that closing the strategy can warn of it.
    """

    __slots__ = ("_loops", "_num_forgotten")

    def __init__(self) -> None:
        self._loops: dict[Loop, None] = {}  # a set in order
        self._num_forgotten = 0

    def add(self, loop: Loop) -> None:
        """Take note of a loop that begins."""
        if len(self._loops) >= MAX_LEFT:
            for left in [known for known in self._loops if known.is_over and not known.is_closing]:
                del self._loops[left]
                self._num_forgotten += not left.is_managed
        self._loops[loop] = None

    def discard(self, loop: Loop) -> None:
        """Take note of its proper end."""
        self._loops.pop(loop, None)

    @property
    def num_open(self) -> int:
        """How many loops go on, or were broken off and not closed by hand."""
        return len(self._loops) + self._num_forgotten

    def leave(self, reason: str) -> None:
        """End all loops without waiting, as their event loop is closed."""
        for loop in tuple(self._loops):
            loop.leave(reason)
        self._loops.clear()
        self._num_forgotten = 0

    async def aclose(self, label: str) -> None:
        """Close all loops; warn of those that nobody would have closed. Idempotent.

        Raises:
            Exception: What closing a source raised; an ExceptionGroup if several did.

        Cancellation:
            Raised again once all are closed.
        """
        errors: list[BaseException] = []
        unmanaged = [loop.name for loop in self._loops if not loop.is_managed]
        num_left = len(unmanaged) + self._num_forgotten
        self._num_forgotten = 0
        while self._loops:
            loop, _ = self._loops.popitem()
            reason = f"{loop.name} was ended because {label} was closed."
            try:
                await loop.aclose(reason)
            except BaseException as error:  # noqa: BLE001 - raised below, once all are closed
                errors.append(error)
        if errors:
            raise_all(errors, f"Closing loops of {label} failed.")
        if num_left:
            last = f" (the last one: {unmanaged[-1]})" if unmanaged else ""
            _warn(
                f"{num_left} loops over distributed datasets were broken off and not closed{last}. "
                "Write `async with strategy.distribute_dataset(...) as batches:` around such a "
                "loop."
            )


def _warn(text: str) -> None:
    """Warn, but never in place of an exception that is on its way already."""
    on_its_way = sys.exception()
    try:
        warnings.warn(text, ResourceWarning, stacklevel=4)
    except ResourceWarning:  # warnings are errors here
        if on_its_way is None:
            raise
        on_its_way.add_note(text)


def raise_all(errors: list[BaseException], message: str) -> None:
    """Raise one error as it is, a cancellation first, and several as a group."""
    for error in errors:
        if len(errors) == 1 or not isinstance(error, Exception):
            raise error
    raise ExceptionGroup(message, [error for error in errors if isinstance(error, Exception)])
