"""Which kind of source an object of the user's is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Any

from ..values import DistributedValues
from ._array_dataset import ArrayDataset, ArraySource
from ._files import Files, FilesSource
from ._iterable_source import IterableSource, SequenceSource
from ._stream import Source

EXPECTED = (
    "An iterable or async iterable of batches, an ar.ArrayDataset, an ar.Dataset, a generator "
    "function or a DataLoader is a dataset"
)


def find_source(dataset: Any) -> Source:
    """Return a source that reads `dataset`.

    Raises:
        TypeError: If it is nothing that yields batches.
    """
    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, ArrayDataset):
        return ArraySource(dataset)
    if isinstance(dataset, Files):
        return FilesSource(dataset)
    _require_dataset(dataset)
    if type(dataset) in (list, tuple):
        return SequenceSource(dataset)
    if isinstance(dataset, Iterable):
        return IterableSource(dataset, lambda: dataset, is_async=False)
    if isinstance(dataset, AsyncIterable):
        return IterableSource(dataset, lambda: dataset, is_async=True)
    plain = dataset
    while isinstance(plain, functools.partial):
        plain = plain.func
    if inspect.iscoroutinefunction(plain):
        raise TypeError(
            f"A dataset function yields batches, but {dataset!r} is a coroutine function. Use "
            "`yield` in it, which makes it an async generator function."
        )
    return IterableSource(plain, dataset, is_async=inspect.isasyncgenfunction(plain))


def _require_dataset(dataset: Any) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, (Mapping, DistributedValues)) or hasattr(dataset, "__array__"):
        raise TypeError(
            f"{EXPECTED}, but a {kind} holds data of one piece. Say how to cut it into batches: "
            "ar.ArrayDataset(arrays, batch_size)."
        )
    if isinstance(dataset, (str, bytes, type)) or inspect.isawaitable(dataset):
        raise TypeError(f"{EXPECTED}, got {dataset!r} ({kind}).")
    if not isinstance(dataset, (Iterable, AsyncIterable)) and not callable(dataset):
        raise TypeError(
            f"{EXPECTED}, got {dataset!r} ({kind}), which cannot be iterated. Examples that can be "
            "read by number go into a DataLoader, or as arrays into ar.ArrayDataset."
        )
