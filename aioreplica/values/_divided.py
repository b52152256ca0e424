"""Divided variables: each worker has some elements of the whole, in its order, and no worker all.

What is as large as a model and is only written element by element, as the state of an optimizer
is, need not be on every worker.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, final

import numpy as np

from ..context import PLACE, Place
from ..devices import Publication
from ..errors import ContextError
from ..tree import Array
from ._distributed import Mirrored, PerReplica
from ._division import Division, as_slice, parts_of, rows_in
from ._indexed_slices import IndexedSlices
from ._store import Components, VariableStore
from ._variable import Variable, VariableOptions


@final
class DividedVariable(Variable):
    """A variable of which every worker has a part; `shape` is that of the whole.

    `ar.Variable(value, sharding=ar.Shard())` makes one, and optimizers with `shard_state=True`
    make their slots so. `local` is this worker's part: rows, of a slot a flat array. `await
    variable.read()` brings the whole together, `await variable.read(slice(8))` only what it says.
    A single worker has the whole, which all of its replicas share.
    """

    __slots__ = ()

    def __init__(
        self,
        value: Array,
        options: VariableOptions,
        num_components: int,
        store: VariableStore,
    ) -> None:
        assert options.division is not None
        self._set_up((value,) * num_components, options, store)

    @property
    def division(self) -> Division:
        """Division among the workers there were when it was made, or restored last."""
        assert self._options.division is not None
        return self._options.division

    @property
    def is_mirrored(self) -> bool:
        """True for a single worker: others have different elements."""
        return len(self.division.ranges) == 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return self.division.shape

    @property
    def local(self) -> Array:
        """Part of this worker, read-only: rows, of a slot elements of the whole as a row."""
        return self.components[0]

    @property
    def local_rows(self) -> slice:
        """Rows of the whole that `local` has."""
        return slice(*self.division.rows)

    def read(self, index: object = None) -> Awaitable[Array]:
        """Bring the parts of all workers together; every worker has to call it, as a collective.

        In a step all replicas call it, elsewhere each worker once.

        Args:
            index: What to read of a variable: integers, slices and `...`, as NumPy takes them; the
                same everywhere. Only that travels. None reads the whole.

        Returns:
            An awaitable of it, read-only.

        Raises:
            ContextError: If the number of workers has changed since it was divided.
            IndexError: If an index is out of bounds.
            TypeError: If `index` is none.
            MergeMismatchError: If replicas, or workers, read different parts.
            Exception: What ends an operation between workers.

        Cancellation:
            Changes nothing.
        """
        parts_of(self.shape, index)
        place = PLACE.get()
        self._require_owner_in_charge(place)
        replica: Any = place.replica
        if replica is not None:
            reading: Awaitable[Array] = replica.meet_as(
                "read", _merge_read, (self, str(index), lambda: index), sys._getframe(1)
            )
            return reading
        return self._read(index)

    async def _read(self, index: object) -> Array:
        workers = self.store.owner.workers
        if workers is None:
            return _read_part(self._primary_of(self.components), index)
        self.require_current(workers.num_workers)
        text = f"{self.name!r}: {self.dtype}{self.shape}, {index}"

        async def gather(wire: object, _slots: Sequence[bytes]) -> Array:
            return await self._gathered(wire, index)

        async with workers.operation("read", text) as turn:
            found: Array = await turn.exchange(b"", gather, layout=text)
        return found

    async def _gathered(self, wire: object, index: object) -> Array:
        division, own = self.division, self.local
        if not division.has_rows:
            whole = np.empty(division.shape, self.dtype)
            for rank, (begin, end) in enumerate(division.ranges):
                whole.reshape(-1)[begin:end] = await self.part_from(wire, rank, own)
            return _read_part(whole, index)
        (rows, *others), kept = parts_of(division.shape, index)
        is_down = rows.step < 0
        ascending = rows[::-1] if is_down else rows
        found = np.empty([len(each) for each in (rows, *others)], self.dtype)
        for rank, (begin, end) in enumerate(division.ranges):
            here, there = rows_in(ascending, begin // division.unit, end // division.unit)
            if not found[here].size:
                continue
            sent = np.empty_like(found[here])
            if rank == division.rank:
                sent[...] = own[(there, *map(as_slice, others))]
            found[here] = await _broadcast(wire, sent, rank)
        result = (found[::-1] if is_down else found).reshape(kept)
        result.flags.writeable = False
        return result

    async def part_from(self, wire: object, rank: int, own: Array) -> Array:
        """Send the part of one worker to all, flat; every worker calls it in the same exchange.

        Args:
            wire: Carries it.
            rank: Whose part.
            own: The part of this worker.
        """
        begin, end = self.division.ranges[rank]
        if begin == end:
            return np.empty(0, self.dtype)
        own = own.reshape(-1)
        sent = own if rank == self.division.rank else np.empty(end - begin, self.dtype)
        return await _broadcast(wire, sent, rank)

    def division_now(self) -> Division:
        """Return how it is divided among the workers that there are now."""
        workers = self.store.owner.workers
        if workers is None:
            return self.division.among(0, 1)
        return self.division.among(workers.rank, workers.num_workers)

    def divide_anew(self) -> None:
        """Take note that its parts are those of the workers there are now."""
        self._options = replace(self._options, division=self.division_now())

    def require_current(self, num_workers: int) -> None:
        """Check that it is divided among the workers there are.

        Raises:
            ContextError: If it is not: some were lost, and their parts with them.
        """
        count = len(self.division.ranges)
        if count != num_workers:
            raise ContextError(
                f"Variable {self.name!r} was divided among {count} workers, and now there are "
                f"{num_workers}: the parts of the others are lost. Restore a checkpoint (`await "
                "manager.restore(state)`), which divides it anew."
            )

    def _primary_of(self, components: Components) -> Array:
        """Return the whole of a single worker.

        Raises:
            ContextError: If there are several: a property cannot wait for the others.
        """
        if len(self.division.ranges) > 1:
            raise self._not_here()
        return components[0].reshape(self.shape)

    def _value_at(self, place: Place) -> Array:
        """Refuse, as everywhere."""
        if len(self.division.ranges) > 1:
            raise self._not_here()
        return super()._value_at(place).reshape(self.shape)

    def _publication(self, place: Place) -> Publication:
        """Refuse, as everywhere."""
        if len(self.division.ranges) > 1:
            raise self._not_here()
        return super()._publication(place)

    def _not_here(self) -> ContextError:
        return ContextError(
            f"Variable {self.name!r} is divided among {len(self.division.ranges)} workers, so its "
            "value cannot be read without waiting. Use `await variable.read()` on all workers, or "
            "`variable.local` for the elements that this one has."
        )

    def _shares(self, verb: str, array: Any) -> Sequence[object]:
        """Take this worker's part of what all of them write, outside the replicas.

        Raises:
            ContextError: If it is a slot.
        """
        division = self.division
        if not division.has_rows:
            raise self._no_writes(verb, "it is written by its optimizer only. Restore a checkpoint")
        self.require_current(len(self.division_now().ranges))
        if isinstance(array, IndexedSlices):
            begin, end = division.rows
            is_here = (array.indices >= begin) & (array.indices < end)
            rows, indices = array.values[is_here], array.indices[is_here] - begin
            part: object = IndexedSlices(rows, indices, division.part_shape)
        else:
            part = division.part_of(array)
        return (part,) * len(self._cell.components)

    def _write_in_replica(
        self, verb: str, array: Array, replica: object, frame: FrameType
    ) -> Awaitable[Array]:
        """Refuse: the values of replicas would have to meet for each part.

        Raises:
            ContextError: Always.
        """
        raise self._no_writes(
            verb, "replicas do not write it. Use an optimizer, or write it in a merge function"
        )

    def _no_writes(self, verb: str, why: str) -> ContextError:
        return ContextError(
            f"Variable {self.name!r} is divided among workers and has no {verb} here: {why} to "
            "give it other values."
        )


def _read_part(whole: Array, index: object) -> Array:
    """Return what an index names, read-only."""
    ranges, kept = parts_of(whole.shape, index)
    part = np.asarray(whole[tuple(map(as_slice, ranges))]).reshape(kept)
    part.flags.writeable = False
    return part


async def _broadcast(wire: Any, sent: Array, rank: int) -> Array:
    data: Array = await wire.broadcast(sent.reshape(-1).view(np.uint8), rank)
    return data.view(sent.dtype).reshape(sent.shape)


async def _merge_read(
    _strategy: object, variable: DividedVariable, _text: str, wanted: Any
) -> Mirrored:
    index = (wanted.values[0] if isinstance(wanted, PerReplica) else wanted)()
    found = await variable._read(index)
    return Mirrored((found,) * len(variable.components))
