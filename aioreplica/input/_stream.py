"""What every stage of an input pipeline is: a source that can be opened, a stream of items.

A source is opened once per loop and gives a stream: one pass, pulled item by item, closed by
whoever opened it. Each item carries the offset of its source behind it, through every stage that
it passes. So the newest item delivered says where to go on, however many others were read ahead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, final


@final
@dataclass(frozen=True, slots=True)
class Start:
    """Where a pass over a source begins.

    Attributes:
        epoch: Number of the pass, which shuffling depends on.
        offset: How much of the pass is done, in the source's own units (examples or items).
        own_state: The source's own state at that place, if it keeps one.
        may_be_over: Whether the pass may end before the offset: other sources went on longer.
    """

    epoch: int = 0
    offset: int = 0
    own_state: Any = None
    may_be_over: bool = False


@final
class Item(NamedTuple):
    """One value of a stream.

    Attributes:
        value: What the source gave, or what became of it.
        offset: The source's offset behind it.
        own_state: The source's own state behind it, if it keeps one.
    """

    value: Any
    offset: int
    own_state: Any = None


class Stream(ABC):
    """One pass over a source."""

    @abstractmethod
    async def pull(self) -> Item | None:
        """Return the next item, or None at the end."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close what the stream has opened; idempotent, and after a pull that was cancelled too."""


class Source(ABC):
    """Something that can be read in passes."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What to call it in messages."""

    @property
    def is_inline(self) -> bool:
        """Whether a pull takes microseconds and never waits: then reading ahead gains nothing."""
        return False

    @property
    def counts_examples(self) -> bool:
        """Whether offsets count examples; if not, they count items."""
        return False

    @abstractmethod
    def open(self, start: Start) -> Stream:
        """Return a new pass; nothing is read before its first pull.

        Raises:
            ContextError: If the source can be read once only, and was.
        """

    @property
    @abstractmethod
    def identity(self) -> tuple[Any, ...]:
        """Plain values that differ from those of another source, so far as one can tell."""

    def num_items(self) -> int | None:
        """Return how many items a pass has, if that is known."""
        return None

    def offset_after(self, num_items: int) -> int:
        """Return the offset behind the first `num_items` items of a pass."""
        return num_items

    def first(self) -> Any | None:
        """Return an item like the first one, if that costs nothing; else None."""
        return None

    async def aclose(self) -> None:
        """Close what the source holds outside its passes; idempotent."""
        return
