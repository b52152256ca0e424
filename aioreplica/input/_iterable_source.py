"""Sequences, iterables, iterators and functions that make them, as sources."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence, Sized
from typing import Any, final

from ..errors import ContextError
from ._async_stream import AsyncStream
from ._lane_stream import LaneStream
from ._resume import SkippingStream, Stateful, ended_early
from ._stream import Item, Source, Start, Stream


@final
class SequenceSource(Source):
    """A list or tuple of batches: there already, so taken without a thread."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    @property
    def label(self) -> str:
        """What kind of sequence it is."""
        return f"<{type(self._batches).__name__} of {len(self._batches)}>"

    @property
    def is_inline(self) -> bool:
        """Always."""
        return True

    @property
    def identity(self) -> tuple[Any, ...]:
        """Type and length."""
        return (self.label,)

    def open(self, start: Start) -> Stream:
        """Return the rest of the sequence."""
        if start.offset > len(self._batches) and not start.may_be_over:
            raise ended_early(self.label, start.offset, len(self._batches))
        return _SequenceStream(self._batches, start.offset)

    def num_items(self) -> int:
        """Its length."""
        return len(self._batches)

    def first(self) -> Any | None:
        """Its first entry."""
        return self._batches[0] if self._batches else None


@final
class _SequenceStream(Stream):
    def __init__(self, batches: Sequence[Any], offset: int) -> None:
        self._batches: Sequence[Any] = batches
        self._offset = offset

    async def pull(self) -> Item | None:
        if self._offset >= len(self._batches):
            return None
        self._offset += 1
        return Item(self._batches[self._offset - 1], self._offset)

    async def aclose(self) -> None:
        self._batches = ()


@final
class IterableSource(Source):
    """Any other iterable, async or not, or a function that returns a new one for each pass.

    Args:
        dataset: What the user gave.
        make: Gives the iterable of a pass.
        is_async: Whether it is read on the event loop; if not, on a thread of its own.
        first_made: What the first pass uses in place of a call of `make`.

    An iterator, which is its own iterable, can be passed once only. A dataset with `state_dict`
    and `load_state_dict` goes on by itself; any other is read again up to the place.
    """

    def __init__(
        self, dataset: Any, make: Callable[[], Any], *, is_async: bool, first_made: Any = None
    ) -> None:
        self._dataset = dataset
        self._make = make
        self._is_async = is_async
        self._first_made = first_made
        self._is_one_shot = first_made is None and isinstance(dataset, (Iterator, AsyncIterator))
        self._is_used = False

    @property
    def label(self) -> str:
        """Type, or name of the function."""
        return label_of(self._dataset)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Label and, if it has one, length."""
        return (self.label, self.num_items())

    @property
    def is_one_shot(self) -> bool:
        """Whether it can be read once only."""
        return self._is_one_shot

    def remade_by(self, make: Callable[[], Any]) -> IterableSource:
        """Return a source that reads this iterator first, and in later passes what `make` gives."""
        return IterableSource(
            self._dataset, make, is_async=self._is_async, first_made=self._dataset
        )

    def open(self, start: Start) -> Stream:
        """Return a new pass.

        Raises:
            ContextError: If it is an iterator that was used before.
        """
        if self._is_one_shot and self._is_used:
            raise ContextError(
                f"{self.label} is an iterator: it can be read once only, and another loop has "
                "begun to. Pass the generator function itself, or an object whose __iter__ starts "
                "anew."
            )
        self._is_used = True
        is_remade = self._first_made is not None
        own = self._dataset if isinstance(self._dataset, Stateful) and not is_remade else None
        stream: Stream
        if self._is_async:
            stream = AsyncStream(self._next_made, start, own)
        else:
            stream = LaneStream(self._next_made, start, own, self.label)
        is_there = own is not None and start.own_state is not None
        return stream if is_there else SkippingStream(stream, start, self.label)

    def num_items(self) -> int | None:
        """Its length, if it has one."""
        if not isinstance(self._dataset, Sized):
            return None
        try:
            return len(self._dataset)
        except (TypeError, NotImplementedError):  # as a DataLoader over an iterable dataset does
            return None

    async def aclose(self) -> None:
        """Close an iterator that was given but never used."""
        if self._is_used:
            return
        given = self._dataset if self._is_one_shot else self._first_made
        self._is_used = True
        for name in ("aclose", "close"):
            close = getattr(given, name, None)
            if callable(close) and isinstance(given, (Iterator, AsyncIterator)):
                outcome = close()
                if inspect.isawaitable(outcome):
                    await outcome
                return

    def _next_made(self) -> Any:
        made, self._first_made = self._first_made, None
        return self._make() if made is None else made


def label_of(dataset: Any) -> str:
    """Return what to call a dataset of the user's in messages."""
    name = getattr(dataset, "__qualname__", None) or getattr(dataset, "__name__", None)
    if inspect.isgenerator(dataset) or inspect.isasyncgen(dataset):
        return f"generator {name}"
    if callable(dataset) and name is not None:
        return f"function {name}"
    return f"<{type(dataset).__qualname__}>"
