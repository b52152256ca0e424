"""Newest values of variables for all device processes, one copy for each version.

Things that ops refer to by name are numbered here, once in a process. A value is copied into shared
memory when the first op that reads it is sent; every device process maps that copy.

Invariants:
    * An extent is in use while its value is the newest of its thing, or a device process holds it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from itertools import count
from typing import Protocol, final

import numpy as np

from ...context import REGISTRY, Place
from .._lane import Publication
from ._messages import Value
from ._parcel import Reduced
from ._segments import SHARED_BYTES, Arena, Extent


class Published(Protocol):
    """Something that ops read by name, such as a variable."""

    def _stand_in(self) -> Reduced:
        """Return what stands for it in a device process: a call, and its arguments."""

    def _publication(self, place: Place) -> Publication:
        """Return the value that is read at a place; its key begins with the number of a write."""


@final
class Publications:
    """The names of the process, and the values that device processes share.

    Attributes:
        arena: Where the values are; under `lock`.
        lock: Held while the arena is used.
    """

    def __init__(self) -> None:
        self.arena = Arena()
        self.lock = threading.Lock()
        self._numbers = count(1)
        self._names: dict[int, tuple[weakref.ref[object], int]] = {}
        self._dead: deque[int] = deque()  # of things that are gone; a finaliser takes no lock
        self._newest: dict[int, dict[Hashable, Extent]] = {}
        self._writes: dict[int, int] = {}
        self._holders: dict[Extent, int] = {}
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()

    def new_reader(self) -> Reader:
        """Return the accounts of a new device process."""
        reader = Reader(self)
        with self.lock:
            self._readers.add(reader)
        return reader

    def number_of(self, thing: object) -> int:
        """Return the name of a thing, for as long as it lives."""
        entry = self._names.get(id(thing))
        if entry is not None and entry[0]() is thing:
            return entry[1]
        with self.lock:
            entry = self._names.get(id(thing))
            if entry is not None and entry[0]() is thing:
                return entry[1]
            key, number = id(thing), next(self._numbers)
            names, dead = self._names, self._dead

            def forget(reference: weakref.ref[object]) -> None:
                if names.get(key, (None,))[0] is reference:
                    del names[key]
                dead.append(number)

            names[key] = weakref.ref(thing, forget), number
        return number

    def publish(self, number: int, found: Publication) -> tuple[Value, Extent | None]:
        """Return a value as messages have it, copied if no device process has asked for it yet.

        Returns:
            The value, and its extent, which the caller then holds; None for a small one.

        Raises:
            NoSharedMemoryError: If there is no shared memory for it.
        """
        array = found.array
        strides = None if array.flags.c_contiguous else np.empty_like(array).strides
        if array.nbytes < SHARED_BYTES:
            packed = array if strides is None else np.copy(array, order="K")
            data = packed.ravel(order="K").tobytes()
            value = Value(number, found.num_writes, data, array.dtype, array.shape, strides)
            return value, None
        with self.lock:
            self._collect()
            extent = self._extent(number, found, strides)
            self._holders[extent] = self._holders.get(extent, 0) + 1
        return Value(number, found.num_writes, extent, array.dtype, array.shape, strides), extent

    def release(self, extent: Extent) -> None:
        """Let go of an extent that `publish` gave; under the lock."""
        left = self._holders[extent] - 1
        if left:
            self._holders[extent] = left
            return
        del self._holders[extent]
        self.arena.free(extent)

    def forget_reader(self, reader: Reader) -> None:
        """Tell a device process that has ended nothing more; under the lock."""
        self._readers.discard(reader)

    def _extent(self, number: int, found: Publication, strides: tuple[int, ...] | None) -> Extent:
        newest = self._newest.setdefault(number, {})
        extent = newest.get(found.key)
        if extent is not None:
            return extent
        array = found.array
        extent, memory = self.arena.take(array.nbytes)
        np.copyto(np.ndarray(array.shape, array.dtype, memory.data, strides=strides), array)
        if found.key[0] < self._writes.get(number, 0):
            return extent  # an older value, for this one op
        if found.key[0] > self._writes.get(number, 0):
            self._writes[number] = found.key[0]
            self._retire(number)
            self._newest[number] = newest = {}
        newest[found.key] = extent
        self._holders[extent] = 1
        return extent

    def _retire(self, number: int) -> None:
        for extent in self._newest.pop(number, {}).values():
            self.release(extent)

    def collect(self) -> None:
        """Forget what is gone, and have those told who know it."""
        if self._dead:
            with self.lock:
                self._collect()

    def _collect(self) -> None:
        while self._dead:
            number = self._dead.popleft()
            self._retire(number)
            self._writes.pop(number, None)
            for reader in self._readers:
                if reader.knows(number):
                    reader.forgotten.append(number)


@final
class Reader:
    """Publications that one device process knows and holds.

    Attributes:
        forgotten: Names of things that are gone, to be told.
    """

    def __init__(self, publications: Publications) -> None:
        self._publications = publications
        self._known: set[int] = set()
        self._has: dict[int, Hashable] = {}
        self._held: list[Extent] = []
        self.forgotten: deque[int] = deque()

    def knows(self, number: int) -> bool:
        """Tell whether the device process was told what a name stands for."""
        return number in self._known

    def was_told(self, number: int) -> None:
        """Learn that it was."""
        self._known.add(number)

    def was_not_told(self, number: int) -> None:
        """Learn that it was not, after all."""
        self._known.discard(number)

    def value(self, number: int, found: Publication) -> Value | None:
        """Return a value that the device process has not got; None if it has.

        Raises:
            NoSharedMemoryError: If there is no shared memory for it.
        """
        if self._has.get(number) == found.key:
            return None
        value, extent = self._publications.publish(number, found)
        self._has[number] = found.key
        if extent is not None:
            self._held.append(extent)
        return value

    def take_back(self, value: Value) -> None:
        """Learn that a value was not sent after all."""
        self._has.pop(value.number, None)
        if isinstance(value.data, Extent):
            self.released([value.data])

    def released(self, extents: Sequence[Extent]) -> None:
        """Learn which extents the device process holds no longer."""
        if not extents:
            return
        with self._publications.lock:
            for extent in extents:
                self._held.remove(extent)
                self._publications.release(extent)

    def take_forgotten(self) -> list[int]:
        """Return the names to forget."""
        self._publications.collect()
        taken = [self.forgotten.popleft() for _ in range(len(self.forgotten))]
        for number in taken:
            self._known.discard(number)
            self._has.pop(number, None)
        return taken

    def close(self) -> None:
        """Let go of everything: the device process has ended."""
        with self._publications.lock:
            for extent in self._held:
                self._publications.release(extent)
            self._held.clear()
            self._publications.forget_reader(self)


def publications() -> Publications:
    """Return the publications of the process."""
    return REGISTRY.once("publications", _new_publications)


def _new_publications() -> Publications:
    # The child of a fork must not write into what the device processes of its parent read.
    os.register_at_fork(after_in_child=lambda: REGISTRY.replace("publications", None) and None)
    return Publications()
