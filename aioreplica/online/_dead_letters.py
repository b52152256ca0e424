"""Dead letters: examples that were set aside, in the journal or in memory."""

from __future__ import annotations

from collections import deque
from time import time
from typing import final

from ..errors import JournalError
from ._example import pack_example
from ._intake import Taken
from ._journal import OpenJournal
from ._journal_file import Dead
from ._records import DeadLetter

KEPT_IN_MEMORY = 1000
"""How many are kept without a journal, the newest ones."""


@final
class DeadLetters:
    """Keeps what was set aside.

    Attributes:
        num_added: How many were set aside.
    """

    def __init__(self, journal: OpenJournal | None) -> None:
        self.num_added = 0
        self._journal = journal
        self._kept: deque[DeadLetter] = deque(maxlen=KEPT_IN_MEMORY)  # without a journal
        self._unsaved: list[Dead] = []

    def take_over(self, other: DeadLetters) -> None:
        """Take what an earlier opening keeps in memory, or has not written down."""
        self._kept, self._unsaved = other._kept, other._unsaved

    async def add(self, taken: Taken, error: str) -> None:
        """Set an example aside. If the journal cannot be written, `save` tries again."""
        self.num_added += 1
        if self._journal is None:
            self._kept.append(DeadLetter(taken.number, taken.example, error, time()))
            return
        self._unsaved.append(Dead(taken.number, pack_example(taken.example), error, time()))
        await self.save()

    async def save(self) -> str:
        """Write down what is not yet; return why that failed, "" if it did not."""
        if self._unsaved and self._journal is not None:
            try:
                await self._journal.set_aside(self._unsaved)
            except JournalError as error:
                return str(error)
            self._unsaved = []
        return ""

    async def list(self, after: int, limit: int) -> tuple[DeadLetter, ...]:
        """Return those behind a number, in order."""
        if self._journal is None:
            return tuple(each for each in self._kept if each.number > after)[:limit]
        return tuple(await self._journal.dead_letters(after, limit))

    async def find(self, number: int) -> DeadLetter:
        """Return one; KeyError if there is none of that number."""
        found = await self.list(number - 1, 1)
        if not found or found[0].number != number:
            raise KeyError(number)
        return found[0]

    async def discard(self, number: int) -> None:
        """Delete one; KeyError if there is none of that number."""
        if self._journal is None:
            self._kept.remove(await self.find(number))
        elif not await self._journal.discard(number):
            raise KeyError(number)
