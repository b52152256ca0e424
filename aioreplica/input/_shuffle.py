"""Shuffling: the place of each example is computed from seed, epoch and index.

Up to `MAX_SORTED` examples are put into the order of as many random numbers: every permutation is
equally likely, and the list is made in less time than what follows.

More are shuffled without a list, by a Feistel network over a rectangle of numbers slightly larger
than the dataset: a number is split into row and column, and in turns one of them is shifted by an
amount looked up with the other. Each shift can be undone, so the whole is a permutation. Numbers
beyond the dataset are sent through again until they fall inside ("cycle walking"), which keeps it
one. Where both sides are odd every shift is an even permutation, and a few shifts of a few numbers
do not reach all orders equally often: that is why small datasets are sorted.

Each table has as many entries as the square root of the dataset: 2.5 MB in all for a billion
examples, where a stored permutation would take 8 GB, made anew in every epoch.
"""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt
from typing import final

import numpy as np
import numpy.typing as npt

from ._source import VERSION

MAX_SORTED = 4096  # sorting takes as long as making the tables at about 6000
NUM_ROUNDS = 10  # five shifts of each half; four suffice for pseudorandomness, one is to spare
Indices = npt.NDArray[np.int64]


@final
class KeyedPermutation:
    """A permutation of `range(num_examples)` that is a pure function of seed, epoch and index.

    Args:
        num_examples: How many there are.
        seed: An int of any size.
        epoch: Each has a permutation of its own.
        version: That of the state which is resumed: 1 shuffles any number without a list.

    Determinism:
        The same numbers on every platform and with every version of NumPy.

    Example:
        >>> import numpy as np
        >>> KeyedPermutation(5, seed=0, epoch=0)(np.arange(5)).tolist()
        [0, 2, 3, 1, 4]

    Source:
        Random numbers, whose order the examples take, and table entries: the output function of
        SplitMix64 (Steele, Lea and Flood, 2014), which gives no number twice.
        Feistel networks over Z_a x Z_b, and cycle walking: Black and Rogaway, "Ciphers with
        Arbitrary Finite Domains", 2002.
    """

    __slots__ = ("_columns", "_num_examples", "_order", "_rows", "_tables")

    def __init__(self, num_examples: int, *, seed: int, epoch: int, version: int = VERSION) -> None:
        self._num_examples = num_examples
        digest = blake2b(f"aioreplica shuffle {seed} {epoch}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little")
        self._order: Indices | None = None
        if version > 1 and num_examples <= MAX_SORTED:
            self._order = np.argsort(_random_numbers(key, 0, num_examples)).astype(np.int64)
            return
        self._columns = max(1, isqrt(max(0, num_examples - 1)) + 1)
        self._rows = max(1, -(-num_examples // self._columns))
        self._tables = [self._table(key, number) for number in range(NUM_ROUNDS)]

    def __call__(self, indices: npt.ArrayLike) -> Indices:
        """Return the examples at these places of the shuffled order.

        Raises:
            IndexError: If an index is not in `range(num_examples)`.

        Shapes:
            indices: (n,). Result: (n,).
        """
        chosen = np.asarray(indices, np.int64)
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < self._num_examples):
            raise IndexError(
                f"Indices from {chosen.min()} to {chosen.max()} are not all among "
                f"{self._num_examples} examples."
            )
        if self._order is not None:
            return self._order[chosen]
        result = self._walk(chosen)
        outside = np.flatnonzero(result >= self._num_examples)
        while outside.size:
            again = self._walk(result[outside])
            result[outside] = again
            outside = outside[again >= self._num_examples]
        return result

    def _walk(self, numbers: Indices) -> Indices:
        rows, columns = np.divmod(numbers, self._columns)
        for number, table in enumerate(self._tables):
            if number % 2:
                columns = (columns + table[rows]) % self._columns
            else:
                rows = (rows + table[columns]) % self._rows
        return rows * self._columns + columns

    def _table(self, key: int, number: int) -> Indices:
        """Return one round's shifts: of rows by column if even, of columns by row if odd."""
        size, limit = self._columns, self._rows
        if number % 2:
            size, limit = limit, size
        return (_random_numbers(key, number << 56, size) % np.uint64(limit)).astype(np.int64)


def _random_numbers(key: int, first: int, count: int) -> npt.NDArray[np.uint64]:
    """Return SplitMix64's numbers `first` to `first + count`, counted from `key`."""
    counter = np.arange(count, dtype=np.uint64) + np.uint64(first % 2**64)
    state = counter * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
