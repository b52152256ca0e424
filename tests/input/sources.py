"""Sources that tell what is done to them, and every kind of source with the same batches."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np

import aioreplica as ar

Batch = tuple[np.ndarray, np.ndarray]


def batch(number: int, size: int = 4) -> Batch:
    """Return the batch of this number: its examples are numbered through."""
    first = number * size
    return np.arange(first, first + size), np.full((size, 2), number, np.float32)


class Watched:
    """A restartable source: what was pulled from it, and how often it was opened and closed.

    Args:
        num_batches: How many it has.
        fail_at: Raise ValueError in place of the batch of this number.
    """

    def __init__(self, num_batches: int = 6, fail_at: int | None = None) -> None:
        self.num_batches = num_batches
        self.fail_at = fail_at
        self.pulled: list[int] = []
        self.num_opened = 0
        self.num_closed = 0
        self.threads: set[str] = set()

    def generate(self) -> Iterator[Batch]:
        self.num_opened += 1
        try:
            for number in range(self.num_batches):
                self.threads.add(threading.current_thread().name)
                if number == self.fail_at:
                    raise ValueError(f"bad record {number}")
                self.pulled.append(number)
                yield batch(number)
        finally:
            self.threads.add(threading.current_thread().name)
            self.num_closed += 1

    async def agenerate(self) -> AsyncIterator[Batch]:
        for item in self.generate():
            yield item

    def __iter__(self) -> Iterator[Batch]:
        return self.generate()


class WatchedAsync(Watched):
    """The same, async only."""

    __iter__ = None  # type: ignore[assignment]

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self.agenerate_closing()

    async def agenerate_closing(self) -> AsyncIterator[Batch]:
        self.num_opened += 1
        try:
            for number in range(self.num_batches):
                if number == self.fail_at:
                    raise ValueError(f"bad record {number}")
                self.pulled.append(number)
                yield batch(number)
        finally:
            self.num_closed += 1


def all_arrays(num_batches: int) -> Batch:
    batches = [batch(number) for number in range(num_batches)]
    return tuple(np.concatenate(column) for column in zip(*batches, strict=True))


RESTARTABLE: dict[str, Callable[[int], Any]] = {
    "arrays": lambda n: ar.ArrayDataset(all_arrays(n), 4),
    "list": lambda n: [batch(number) for number in range(n)],
    "iterable": Watched,
    "generator function": lambda n: Watched(n).generate,
    "function of a list": lambda n: lambda: [batch(number) for number in range(n)],
    "async iterable": WatchedAsync,
    "async generator function": lambda n: WatchedAsync(n).agenerate_closing,
    "function of an async iterable": lambda n: lambda: WatchedAsync(n),
    "pipeline": lambda n: ar.Dataset(Watched(n)).map(lambda item: item).prefetch(2),
    "pipeline of examples": lambda n: ar.Dataset(
        lambda: zip(*all_arrays(n), strict=True) if n else []
    ).batch(4),
    "files": lambda n: ar.input.Files(range(n), lambda number: [batch(number)]) if n else [],
}

ONE_SHOT: dict[str, Callable[[int], Any]] = {
    "generator": lambda n: Watched(n).generate(),
    "iterator": lambda n: iter([batch(number) for number in range(n)]),
    "async generator": lambda n: WatchedAsync(n).agenerate_closing(),
}


def examples(batches: list[Any]) -> list[list[list[int]]]:
    """Return, for each batch, the numbers of the examples that each replica got."""
    found = []
    for numbers, rows in batches:
        parts = numbers.values if isinstance(numbers, ar.PerReplica) else (numbers,)
        others = rows.values if isinstance(rows, ar.PerReplica) else (rows,)
        assert [len(part) for part in parts] == [len(other) for other in others]
        found.append([part.tolist() for part in parts])
    return found


def split(num_batches: int, num_replicas: int) -> list[list[list[int]]]:
    """Return what `examples` gives for a whole epoch."""
    return [
        [part.tolist() for part in np.array_split(batch(number)[0], num_replicas)]
        for number in range(num_batches)
    ]
