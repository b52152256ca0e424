"""The contract of an array backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from ...typing import ReduceOp

Array = Any  # arrays of every library pass through here


class Backend(ABC):
    """Holds, moves and reduces arrays on the devices of one library.

    Found through the entry point group `aioreplica.backends`, whose values are classes that are
    called without arguments.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The entry point's name, such as "numpy"."""

    @property
    @abstractmethod
    def has_streams(self) -> bool:
        """True if what is enqueued on a device has to be waited for before others may read it.

        Not where ops end before they return, nor where arrays are waited for by who reads them.
        """

    @abstractmethod
    def num_devices(self, kind: str) -> int:
        """Return how many physical devices of `kind` there are, 0 for a kind it does not serve."""

    @abstractmethod
    def owns(self, value: object) -> bool:
        """Tell whether `value` is an array of this library."""

    @abstractmethod
    def put(self, value: Array, device: str) -> Array:
        """Return `value` as an array on `device`; no copy where none is needed."""

    @abstractmethod
    def get(self, array: Array) -> Array:
        """Return `array` as a NumPy array on the host; no copy where none is needed."""

    @abstractmethod
    def scope(self, device: str) -> AbstractContextManager[None]:
        """Make `device` the library's own current one; what is done there goes to its stream.

        With streams, to one of the calling thread's own, behind what is by now on the default
        stream of the device, where all threads work outside this scope.
        """

    @abstractmethod
    def synchronise(self, device: str) -> None:
        """Wait until everything that the calling thread has enqueued on `device` is done."""

    @abstractmethod
    def keep(self, array: Array) -> None:
        """Keep the memory of an array that goes from stream to stream, until it is let go by all.

        These are the stream that it was made on, that of the calling thread and the default one.
        """

    @abstractmethod
    def reduce(self, op: ReduceOp, arrays: Sequence[Array]) -> Array:
        """Combine arrays of one shape and dtype in the given order."""
