"""Elements of per-worker datasets: each is for one closure, and is learned when that succeeds.

A dataset has a split for each worker that there was when it was made. What a closure takes is
leased to it: a run of it that comes again gets the same, what ended badly gives it back, and a
worker whose own split is at its end goes on with those of others.
"""

from __future__ import annotations

import copy
import heapq
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, final


@final
class Element(NamedTuple):
    """Name of an element: which split, and which one of it, from 0."""

    split: int
    position: int


@final
@dataclass(slots=True)
class _Split:
    """A split: what nobody has had, what was given back, and the end, once that is known."""

    next: int = 0
    given_back: list[int] = field(default_factory=list)
    end: int | None = None

    @property
    def has_more(self) -> bool:
        return bool(self.given_back) or self.end is None or self.next < self.end

    def take(self) -> int:
        if self.given_back:
            return heapq.heappop(self.given_back)
        self.next += 1
        return self.next - 1

    def give_back(self, positions: Collection[int]) -> None:
        for position in positions:
            if self.end is None or position < self.end:
                heapq.heappush(self.given_back, position)

    def end_at(self, end: int) -> None:
        self.end = end if self.end is None else min(end, self.end)
        self.given_back = [position for position in self.given_back if position < self.end]
        heapq.heapify(self.given_back)


@final
class Leases:
    """Decides which closure gets which elements of one iterator.

    Plain synchronous code, part of a parameter server.

    Invariants:
        * An element is with one closure at a time; those of one closure are of one split.

    Args:
        num_splits: How many splits the dataset has.
    """

    def __init__(self, num_splits: int) -> None:
        self._splits = [_Split() for _ in range(num_splits)]
        self._taken: dict[int, list[Element]] = {}
        self._learned: dict[int, tuple[Element, ...]] = {}  # some 200 bytes each, for one epoch

    def take(self, closure: int, ordinal: int, index: int) -> Element | None:
        """Return an element for a closure; None if there is no more for it.

        Args:
            closure: Its number.
            ordinal: How many it has taken before, in this run.
            index: Of its worker, whose own split comes first.
        """
        learned = self._learned.get(closure)
        if learned is not None:  # its result was lost, and is made again
            return learned[ordinal] if ordinal < len(learned) else None
        taken = self._taken.get(closure, [])
        if ordinal < len(taken):
            return taken[ordinal]
        split = taken[0].split if taken else self._split_for(index)
        if split is None or not self._splits[split].has_more:
            return None
        element = Element(split, self._splits[split].take())
        self._taken.setdefault(closure, taken).append(element)
        return element

    def _split_for(self, index: int) -> int | None:
        left = [i for i, split in enumerate(self._splits) if split.has_more]
        if index in left:
            return index
        return min(left, key=lambda i: (self._splits[i].next, i), default=None)

    def has_learned(self, closure: int) -> bool:
        """Tell whether a closure is over, and what it took was learned."""
        return closure in self._learned

    def end(self, closure: int, split: int, end: int) -> None:
        """Learn that a split has so many elements; what the closure has taken beyond is nothing."""
        self._splits[split].end_at(end)
        kept = [each for each in self._taken.pop(closure, []) if each.position < end]
        if kept:
            self._taken[closure] = kept

    def as_learned(self) -> Leases:
        """Return what is left for others if all that was taken is learned."""
        left = Leases(0)
        left._splits = copy.deepcopy(self._splits)
        return left

    def settle(
        self, oldest: int, failed: Collection[int] = (), finished: Collection[int] = ()
    ) -> None:
        """Learn which closures are over: those that failed give back what they took."""
        over = [c for c in self._taken if c < oldest or c in failed or c in finished]
        for closure in over:
            taken = self._taken.pop(closure)
            if closure in failed:
                self._splits[taken[0].split].give_back([each.position for each in taken])
            else:
                self._learned[closure] = tuple(taken)

    def __repr__(self) -> str:
        return f"<Leases | {len(self._splits)} splits, {len(self._taken)} closures have some>"


@final
class EndOfSplitError(Exception):
    """Error that says that a split ends before an element."""

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end


@final
class SplitReader:
    """Reads elements of splits on a worker; goes on where it was, or begins anew and skips.

    Args:
        make: Makes the dataset of a split.
    """

    def __init__(self, make: Callable[[int], Iterator[object]]) -> None:
        self._make = make
        self._open: dict[int, tuple[Iterator[object], int]] = {}
        self._lock = threading.Lock()

    def read(self, element: Element) -> Any:
        """Return an element.

        Raises:
            EndOfSplitError: If there is none.
            Exception: What the dataset raises; it is made anew after that.
        """
        split, position = element
        with self._lock:
            iterator, at = self._open.pop(split, (None, 0))
            if iterator is None or at > position:
                iterator, at = self._make(split), 0
            while True:
                try:
                    found = next(iterator)
                except StopIteration:
                    raise EndOfSplitError(at) from None
                if at == position:
                    self._open[split] = iterator, at + 1
                    return found
                at += 1


class Taker(Protocol):
    """Interface of a closure for its iterators."""

    def take(
        self, iterator: int, num_splits: int, ordinal: int, ended: Element | None
    ) -> Element | None:
        """Ask for an element; `ended` has a split, and the number of elements it has."""

    def read(self, reader: SplitReader, element: Element) -> Any:
        """Read an element, as the worker that the split was made for."""


@final
class LeasedIterator:
    """An iterator in a closure: each element is this closure's alone.

    Args:
        number: Of the iterator.
        num_splits: Of its dataset.
        reader: Reads the splits on this worker.
        closure: Who takes elements.
    """

    def __init__(self, number: int, num_splits: int, reader: SplitReader, closure: Taker) -> None:
        self._number = number
        self._num_splits = num_splits
        self._reader = reader
        self._closure = closure
        self._num_taken = 0

    def __iter__(self) -> LeasedIterator:
        return self

    def __next__(self) -> Any:
        ended: Element | None = None
        while True:
            element = self._closure.take(self._number, self._num_splits, self._num_taken, ended)
            if element is None:
                raise StopIteration
            try:
                found = self._closure.read(self._reader, element)
            except EndOfSplitError as error:
                ended = Element(element.split, error.end)
                continue
            self._num_taken += 1
            return found
