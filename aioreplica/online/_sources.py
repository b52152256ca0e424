"""Sources: where a learner reads examples itself, each one once.

A source gives each example with an offset, text that says how far it has been read. The journal
keeps the offset of the last example in the transaction that appends it, and the next read begins
behind that: whatever crashes, an example is appended and passed, or neither.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from ..tree import Tree
from ._example import as_example
from ._failures import Backoff, described
from ._intake import ExampleGroup, Intake, is_unicode
from ._journal import OpenJournal
from ._journal_format import Entry, Progress
from ._ticket import Ticket

FIRST_WAIT_S = 0.1
MOST_WAIT_S = 30.0
"""Seconds until a source that failed, or the journal, is asked again: at first, and at most."""

LOGGER = logging.getLogger("aioreplica.online")


class Source(Protocol):
    """Examples that a learner reads by itself: `OnlineLearner(sources={"clicks": source})`."""

    async def read(self, *, after: str | None) -> Sequence[tuple[str, object]]:
        """Return the examples that come next, each with its offset; wait until there are some.

        One learner calls it, one call at a time. If it returns none it is asked again after 0.1 s;
        what it raises is told in the statistics, and it is asked again after 0.1 s, 0.2 s and so on
        up to 30 s.

        Args:
            after: The offset of the last example that was taken; None at first.

        Returns:
            Pairs of an offset and an example. An exception in an example's place says why there is
            none; it is counted as refused.

        Cancellation:
            Nothing may be lost: the next call has the same `after`.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """Counters of a source since the learner was opened, and where it stands.

    Attributes:
        offset: That of the last example that was taken or refused, None if none ever was.
        num_taken: Examples taken.
        num_refused: Examples that were none, or that `validate` has refused.
        refused: Why the last one of these was, and its offset; "" if none was.
        error: Why the source cannot be read, or the journal not be written; "" if they can.
    """

    offset: str | None
    num_taken: int
    num_refused: int
    refused: str
    error: str


@final
class Follower:
    """Follows a source: reads, checks, and hands over as fast as examples are learned.

    Args:
        name: Its name in the journal.
        source: What is read.
        validate: Called with each example; None for nothing.
        size: Most examples of one submission.
        intake: Takes them.
        journal: Keeps them, and the offset.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        validate: Callable[[Tree], Tree] | None,
        size: int,
        intake: Intake,
        journal: OpenJournal,
    ) -> None:
        self.name = name
        self._source = source
        self._validate = validate
        self._size = size
        self._intake = intake
        self._journal = journal
        self._backoff = Backoff(FIRST_WAIT_S, MOST_WAIT_S)
        self._offset: str | None = None
        self._num_taken = 0
        self._num_refused = 0
        self._refused = ""
        self._error = ""

    def statistics(self) -> SourceStatistics:
        """Return what it has done, and where it stands."""
        return SourceStatistics(
            self._offset, self._num_taken, self._num_refused, self._refused, self._error
        )

    async def run(self) -> None:
        """Follow until the intake is closed."""
        loop = asyncio.get_running_loop()
        while not self._intake.is_closed:
            try:
                await self._follow()
            except Exception as error:  # noqa: BLE001 - sources of users raise anything
                if not self._intake.is_closed:
                    self._error = described(error)
                    self._backoff.failed(loop.time())
                    await asyncio.sleep(self._backoff.until - loop.time())

    async def _follow(self) -> None:
        # Asked after each failure: one of the journal may have written it all the same.
        written = self._offset = await self._journal.offset(self.name)
        while True:
            found = await self._source.read(after=self._offset)
            self._error = ""
            for start in range(0, len(found), self._size):
                pairs = found[start : start + self._size]
                examples = [example for pair in pairs for example in self._checked(*pair)]
                last = pairs[-1][0]
                if examples:
                    await self._take(examples, Progress(self.name, written, last))
                    written = last
                self._offset = last
            self._backoff.succeeded()  # the journal, too, has taken what there was
            if not found:
                await asyncio.sleep(FIRST_WAIT_S)

    def _checked(self, offset: str, given: object) -> list[object]:
        """Return the example, or none if it is refused.

        Raises:
            TypeError: If the offset is no text, or holds what no file takes.
        """
        if not isinstance(offset, str) or not is_unicode(offset):
            raise TypeError(
                "A source gives pairs of an offset, which is text without lone surrogates; got "
                f"{offset!r}."
            )
        try:
            if isinstance(given, Exception):
                raise ValueError(described(given))
            return [as_example(given if self._validate is None else self._validate(given))]
        except (TypeError, ValueError) as error:
            self._num_refused += 1
            self._refused = f"at {offset}: {described(error)}"
            LOGGER.warning("The source %r has no example %s", self.name, self._refused)
            return []

    async def _take(self, examples: list[object], progress: Progress) -> None:
        tickets = tuple(Ticket() for _ in examples)
        group = ExampleGroup(examples, tickets, Entry(examples, progress=progress))
        await self._intake.take(group)
        await tickets[0].saved()
        self._num_taken += len(examples)


def checked_sources(sources: object, has_journal: bool) -> dict[str, Source]:
    """Return the sources of a learner by their names.

    Raises:
        TypeError: If something is no source.
        ValueError: If there is no journal.
    """
    if not isinstance(sources, dict):
        raise TypeError(f"sources are a dict of sources by name, got {sources!r}.")
    for name, source in sources.items():
        is_name = isinstance(name, str) and is_unicode(name)
        if not is_name or not callable(getattr(source, "read", None)):
            raise TypeError(
                f"sources are objects with `async def read(self, *, after)` by name, got {name!r}: "
                f"{source!r}."
            )
    if sources and not has_journal:
        raise ValueError("sources need a journal, which keeps their offsets. Pass journal=path.")
    return dict(sources)


def followers(
    sources: Mapping[str, Source],
    validate: Callable[[Tree], Tree] | None,
    size: int,
    intake: Intake,
    journal: OpenJournal | None,
) -> tuple[Follower, ...]:
    """Return what reads the sources of a learner, in groups of a size; none without a journal."""
    if journal is None:
        return ()
    return tuple(
        Follower(name, source, validate, size, intake, journal) for name, source in sources.items()
    )
