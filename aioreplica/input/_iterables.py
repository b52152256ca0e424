"""Sequences, iterables, iterators and functions that make them, as sources.

An iterator is made, advanced and closed on a lane of its own. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import sys
import warnings
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import aclosing
from typing import Any, Protocol, TypeGuard, TypeVar, final, runtime_checkable

import numpy as np

from ..devices import OwnLane
from ..errors import ContextError
from ..values import DistributedValues
from ._source import Item, Pass, Source, Start

_END, _IS_ASYNC = object(), object()  # what a reader gives in place of a value
YIELD_EVERY = 64  # skipped items after which other tasks get a turn: a source may never wait

EXPECTED = (
    "An iterable or async iterable of batches, an ar.ArrayDataset, an ar.Dataset, a generator "
    "function or a DataLoader is a dataset"
)

T = TypeVar("T")
CURE = (
    "Use torchdata's StatefulDataLoader, which keeps its own state; or a sampler whose order "
    "follows from the epoch; or ar.ArrayDataset(..., shuffle=True)."
)


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state as plain data: a dataset of ours, a `StatefulDataLoader`."""

    def state_dict(self) -> object:
        """Return the state; of a dataset, behind what it has yielded."""

    def load_state_dict(self, state: Any, /) -> object:
        """Take a state back; the next iterator of a dataset goes on from it."""


def source_of(dataset: Any) -> Source:
    """Return a source that reads a sequence, an iterable, or what a function returns.

    Raises:
        TypeError: If it is nothing that yields batches.
    """
    _require_dataset(dataset)
    if type(dataset) in (list, tuple):
        return _sequence_source(dataset)
    if isinstance(dataset, Iterable):
        return iterable_source(dataset, lambda: dataset, is_async=False)
    if isinstance(dataset, AsyncIterable):
        return iterable_source(dataset, lambda: dataset, is_async=True)
    plain = dataset
    while isinstance(plain, functools.partial):
        plain = plain.func
    if inspect.iscoroutinefunction(plain):
        raise TypeError(
            f"A dataset function yields batches, but {dataset!r} is a coroutine function. Use "
            "`yield` in it, which makes it an async generator function."
        )
    return iterable_source(plain, dataset, is_async=inspect.isasyncgenfunction(plain))


def _require_dataset(dataset: object) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, (Mapping, DistributedValues)) or hasattr(dataset, "__array__"):
        raise TypeError(
            f"{EXPECTED}, but a {kind} holds data of one piece. Say how to cut it into batches: "
            "ar.ArrayDataset(arrays, batch_size)."
        )
    if _is_tuple_of_columns(dataset):
        raise TypeError(
            f"{EXPECTED}, but a tuple of arrays of the shapes "
            f"{', '.join(str(np.shape(each)) for each in dataset)} holds columns of one piece. Say "
            "how to cut them into batches: ar.ArrayDataset(arrays, batch_size)."
        )
    if isinstance(dataset, (str, bytes, type)) or inspect.isawaitable(dataset):
        raise TypeError(f"{EXPECTED}, got {dataset!r} ({kind}).")
    if not isinstance(dataset, (Iterable, AsyncIterable)) and not callable(dataset):
        raise TypeError(
            f"{EXPECTED}, got {dataset!r} ({kind}), which cannot be iterated. Examples that can be "
            "read by number go into a DataLoader, or as arrays into ar.ArrayDataset."
        )


def _is_tuple_of_columns(dataset: object) -> TypeGuard[tuple[Any, ...]]:
    """Tell whether it is arrays of one length and other numbers of axes: these are no batches."""
    if type(dataset) is not tuple or not all(hasattr(each, "__array__") for each in dataset):
        return False
    shapes = [np.shape(each) for each in dataset]
    return len({*map(len, shapes)}) > 1 and all(shapes) and len({each[0] for each in shapes}) == 1


def _sequence_source(batches: Sequence[object]) -> Source:
    """Return a list or tuple of batches as a source: there already, so taken without a thread."""
    label = f"<{type(batches).__name__} of {len(batches)}>"

    async def rest(offset: int) -> AsyncGenerator[Item, None]:
        while offset < len(batches):
            offset += 1
            yield Item(batches[offset - 1], offset)

    def read(start: Start) -> Pass:
        if start.offset > len(batches) and not start.may_be_over:
            raise _ended_early(label, start.offset, len(batches))
        return rest(start.offset)

    return Source(
        label,
        read,
        lambda: (label,),
        lambda: (type(batches).__name__,),
        num_items=lambda: len(batches),
        like=lambda: batches[0] if batches else None,
        is_inline=True,
        is_kept=True,
    )


def iterable_source(
    dataset: object, make: Callable[[], object], *, is_async: bool, first_made: object = None
) -> Source:
    """Return an iterable, or a function that returns a new one for each pass, as a source.

    Args:
        dataset: What the user gave.
        make: Gives the iterable of a pass.
        is_async: Whether it is read on the event loop; if not, on a thread of its own.
        first_made: What the first pass uses in place of a call of `make`.

    An iterator, which is its own iterable, can be passed once only. A dataset with `state_dict`
    and `load_state_dict` goes on by itself; any other is read again up to the place.
    """
    label = label_of(dataset)
    is_iterator = isinstance(dataset, (Iterator, AsyncIterator))
    is_one_shot = is_iterator and first_made is None
    own = dataset if isinstance(dataset, Stateful) and first_made is None else None
    unused = [dataset if is_one_shot else first_made] if is_iterator else []
    is_taken = False

    def next_made() -> object:
        return unused.pop() if unused else make()

    def read(start: Start) -> Pass:
        nonlocal is_taken
        if is_one_shot and is_taken:
            raise ContextError(
                f"{label} is an iterator: it can be read once only, and another loop has begun to. "
                "Pass the generator function itself, or an object whose __iter__ starts anew."
            )
        is_taken = True  # and still unused: the pass may be closed before its first item
        own_start = start if own is not None and start.own_state is not None else Start()
        items: Pass
        if is_async:
            items = _read_on_loop(next_made, own_start, own)
        else:
            items = _read_on_thread(next_made, own_start, own, label)
        return _skip(items, start, label) if start.offset and own_start is not start else items

    def check_start(start: Start) -> None:
        if start.offset and start.own_state is None:
            warn_if_shuffled(dataset)

    return Source(
        label,
        read,
        lambda: (label, _length_of(dataset)),
        lambda: (label,),
        num_items=lambda: _length_of(dataset),
        aclose=lambda: _close_unused(unused),
        check_start=check_start,
        differs="is an iterator, of which each worker has its own"
        if is_one_shot
        else (difference_of_loader(dataset)),
    )


def _length_of(dataset: object) -> int | None:
    if not isinstance(dataset, Sized):
        return None
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # as a DataLoader over an iterable dataset does
        return None


async def _close_unused(unused: list[object]) -> None:
    """Close an iterator that was given but never read."""
    given = unused.pop() if unused else None
    for name in ("aclose", "close"):
        close = getattr(given, name, None)
        if callable(close):
            outcome = close()
            if inspect.isawaitable(outcome):
                await outcome
            return


# ---- passes ----------------------------------------------------------------------------------


async def _read_on_loop(
    make: Callable[[], Any], start: Start, own: Stateful | None
) -> AsyncGenerator[Item, None]:
    """Advance an async iterable, made at the first item, and close it if it has `aclose`."""
    offset, own_state = start.offset, start.own_state
    if own is not None and own_state is not None:
        own.load_state_dict(copy.deepcopy(own_state))
    iterator = aiter(make())
    try:
        async for value in iterator:
            offset += 1
            if own is not None:
                own_state = copy.deepcopy(own.state_dict())
            yield Item(value, offset, own_state)
    finally:
        await _aclose(iterator)


async def _aclose(iterator: AsyncIterator[object]) -> None:
    close = getattr(iterator, "aclose", None)
    if not callable(close):
        return
    try:
        await close()
    except BaseExceptionGroup as group:
        # A task group that is open over a `yield` reports that its generator was closed.
        rest = group.split(GeneratorExit)[1]
        if rest is not None:
            raise rest from None


async def _read_on_thread(
    make: Callable[[], object], start: Start, own: Stateful | None, label: str
) -> AsyncGenerator[Item, None]:
    """Make, advance and close an iterable on one thread; one that is async only, on the loop.

    A call that still runs because of an interrupt is left alone, and so is its iterator.
    """
    lane, reader = OwnLane(), _ThreadReader(make, start, own, label)
    offset = start.offset
    try:
        while (value := await lane.run(reader.advance)) is not _END:
            if value is _IS_ASYNC:
                async with aclosing(_read_on_loop(lambda: reader.made, start, own)) as items:
                    async for item in items:
                        yield item
                return
            offset += 1
            yield Item(value, offset, reader.own_state)
    finally:
        try:
            if reader.iterator is not None and not lane.is_busy:
                await lane.run(reader.close)
        finally:
            lane.close()


@final
class _ThreadReader:
    """Reads an iterable; all but the construction happens on its thread."""

    __slots__ = ("_label", "_make", "_own", "iterator", "made", "own_state")

    def __init__(
        self, make: Callable[[], object], start: Start, own: Stateful | None, label: str
    ) -> None:
        self._make = make
        self._own = own
        self._label = label
        self.own_state = start.own_state
        self.iterator: Iterator[object] | None = None
        self.made: Any = None

    def advance(self) -> object:
        """Return the next value; make the iterator if there is none."""
        if self.iterator is None:
            if self._own is not None and self.own_state is not None:
                self._own.load_state_dict(copy.deepcopy(self.own_state))
            made = self._make()
            if isinstance(made, AsyncIterable) and not isinstance(made, Iterable):
                self.made = made
                return _IS_ASYNC
            if not isinstance(made, Iterable):
                raise TypeError(
                    f"{self._label} returned {made!r} ({type(made).__name__}), which is no "
                    "iterable of batches."
                )
            self.iterator = iter(made)
        value = next(self.iterator, _END)
        if self._own is not None:
            self.own_state = copy.deepcopy(self._own.state_dict())
        return value

    def close(self) -> None:
        """Close the iterator, and let it go."""
        iterator, self.iterator = self.iterator, None
        close_iterator(iterator)


def close_iterator(iterator: object) -> None:
    """Close a plain iterator that is not read on: a generator, a file, a loader with workers."""
    close = getattr(iterator, "close", None)
    if callable(close):
        close()
    else:
        shut_down_workers(iterator)


async def _skip(items: Pass, start: Start, label: str) -> AsyncGenerator[Item, None]:
    """Read and drop what was delivered before.

    Raises:
        ValueError: If the pass ends before that place.
    """
    offset = 0
    async with aclosing(items):
        async for item in items:
            offset = item.offset
            if offset > start.offset:
                yield item
            elif offset % YIELD_EVERY == 0:
                await asyncio.sleep(0)
    if offset < start.offset and not start.may_be_over:
        raise _ended_early(label, start.offset, offset)


def _ended_early(label: str, goal: int, num_items: int) -> ValueError:
    return ValueError(
        f"{label} cannot go on after item {goal}: it ended after {num_items}. Load the state of "
        "this dataset."
    )


def label_of(dataset: object) -> str:
    """Return what to call a dataset of the user's in messages."""
    name = getattr(dataset, "__qualname__", None) or getattr(dataset, "__name__", None)
    if inspect.isgenerator(dataset) or inspect.isasyncgen(dataset):
        return f"generator {name}"
    if callable(dataset) and name is not None:
        return f"function {name}"
    return f"<{type(dataset).__qualname__}>"


def warn_if_shuffled(dataset: object) -> None:
    """Warn if `dataset` is a DataLoader that will not give again what it gave before.

    Reading it again up to a place then skips examples that were not seen, and repeats others.
    """
    sampler = _random_sampler(dataset)
    if sampler is not None:
        warnings.warn(
            f"The DataLoader draws its order anew in each pass ({type(sampler).__name__}), so "
            f"going on in the middle of one repeats some examples and skips others. {CURE}",
            UserWarning,
            stacklevel=4,
        )


def difference_of_loader(dataset: object) -> str:
    """Say why a DataLoader may give other workers other batches; empty if it does not."""
    torch = sys.modules.get("torch.utils.data")
    for each in _samplers_of(dataset):
        if torch is not None and isinstance(each, torch.distributed.DistributedSampler):
            return f"has a {type(each).__name__}, which shares out the examples already"
    sampler = _random_sampler(dataset)
    if sampler is not None and sampler.generator is None:
        name = type(sampler).__name__
        return f"draws its order on each worker anew ({name} without a generator)"
    return ""


def _random_sampler(dataset: object) -> Any:
    """Return what draws the order of a DataLoader; None if nothing of torch's does."""
    torch = sys.modules.get("torch.utils.data")
    if torch is None:
        return None
    random = (torch.RandomSampler, torch.SubsetRandomSampler, torch.WeightedRandomSampler)
    return next((each for each in _samplers_of(dataset) if isinstance(each, random)), None)


def _samplers_of(dataset: object) -> tuple[object, ...]:
    """Return what may choose the order of a DataLoader; nothing for other datasets.

    Beside a `batch_sampler` of the user's, `sampler` is one that torch has made up.
    """
    torch = sys.modules.get("torch.utils.data")
    if torch is None or not isinstance(dataset, torch.DataLoader):
        return ()
    outer = dataset.batch_sampler
    return dataset.sampler, outer, getattr(outer, "sampler", None)


def shut_down_workers(iterator: object) -> None:
    """End the worker processes of a DataLoader's iterator, which has no public method for it.

    Without it they live as long as the iterator, which the traceback of an error keeps. Workers
    that the user wants to persist belong to the loader, which uses them again.
    """
    torch = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(torch, "_BaseDataLoaderIter", None)  # torchdata's iterators are of it too
    if kind is None or not isinstance(iterator, kind):
        return
    shut_down = getattr(iterator, "_shutdown_workers", None)  # only of one that has processes
    if callable(shut_down) and not getattr(iterator, "_persistent_workers", False):
        shut_down()
