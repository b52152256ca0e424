"""A savepoint: a state as it is now, kept in memory, to be put back as a checkpoint would be."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import TYPE_CHECKING, final

from ..tree import Array
from ..values import DividedVariable, Variable
from ._chief import exchange_newest
from ._format import EntryRecord, Manifest, TensorRecord
from ._restoring import apply_plan, make_plan
from ._state import Cut, Deferring, Entry, StoredTensor, dtype_name, look, read_state

if TYPE_CHECKING:
    from ..cluster import Workers

NOWHERE = TensorRecord(0, 0, 0, 0)


@final
class Savepoint:
    """References to everything in a state; what is not a variable is copied.

    Take one, and put it back, between two steps: no step that writes the state may be under way.
    The old arrays live as long as the savepoint does.

    Args:
        state: As for `CheckpointManager.save`.

    Raises:
        TypeError: If something in it cannot be saved.
        ValueError: If it is not a container, or two of its entries have one name.

    Example:
        >>> import asyncio
        >>> from aioreplica import Variable
        >>> w = Variable([1.0, 2.0])
        >>> savepoint = Savepoint([w])
        >>> asyncio.run(w.assign([0.0, 5.0]))
        array([0., 5.])
        >>> savepoint.written()
        [('0', array([0., 5.]))]
        >>> savepoint.put_back()
        >>> w.value
        array([1., 2.])
    """

    __slots__ = ("_cut", "_state")

    def __init__(self, state: object) -> None:
        self._state = state
        self._cut = look(read_state(state))
        self._cut.check()
        for entry in self._cut.entries.values():
            if isinstance(entry.thing, DividedVariable):
                raise TypeError(
                    f"{entry.key!r} is divided among workers, and a Savepoint is kept by each: the "
                    "part of a worker that is lost would be lost. Save checkpoints, or make the "
                    "optimizer without shard_state=True."
                )

    def written(self) -> list[tuple[str, Array]]:
        """Return the arrays of variables that were written since, each with the key of its entry.

        Slots that an optimizer has made since are among them.
        """
        written = []
        for key, variable in read_state(self._state).variables.items():
            old = {*map(id, self._cut.arrays.get(key, ()))}
            for array in variable.components:
                if id(array) not in old:
                    old.add(id(array))  # replicas have one array where they are equal
                    written.append((key, array))
        return written

    def put_back(self) -> None:
        """Put the whole state back; the variables of a strategy in one publication.

        Slots made since are forgotten; so is what a dict or list of the state held in another's
        place. What was added to one stays. The numbers of steps stay as they are.
        """
        for entry in self._cut.entries.values():
            if entry.container is not None:  # it may hold something else by now
                _hold_again(entry)
        records = _described(self._cut)
        self._put(Manifest(0, 0, self._cut.next_steps, (), records), self._cut.arrays)

    async def put_back_newest(self, workers: Workers, what: str = "put_back_newest") -> None:
        """Put back the savepoint of the worker that has done most steps; the first one of several.

        Every worker has to call this. On-read variables keep what this worker's own savepoint has,
        for its replicas. The numbers of steps become those of the savepoint that is put back, and
        this savepoint becomes an equal of it.

        Args:
            workers: The workers of the strategy that the variables belong to.
            what: The call that errors name.

        Raises:
            CheckpointError: If the savepoint does not fit the state of this worker.
            Exception: What ends an operation between workers.
        """
        own = self._cut
        records = _described(own)
        found = await exchange_newest(workers, own.next_steps, records, own.arrays, what)
        manifest = Manifest(0, 0, found.next_steps, (), found.records)
        now = read_state(self._state)
        for key, variable in now.variables.items():
            if not variable.is_mirrored:  # these are not sent
                found.arrays[key] = own.arrays.get(key) or [*variable.components]
        self._put(manifest, found.arrays, of_another=True)
        self._cut = look(read_state(self._state))

    def _put(
        self, manifest: Manifest, arrays: dict[str, list[Array]], *, of_another: bool = False
    ) -> None:
        now = read_state(self._state)
        plan = make_plan(now, manifest, partial=not of_another)
        apply_plan(now, plan, manifest, arrays, with_steps=of_another, is_of_this_worker=True)

    def __repr__(self) -> str:
        return f"<Savepoint | {len(self._cut.entries)} entries>"


def model_variables(state: object) -> dict[str, Variable]:
    """Return the variables of a state by key, without those of optimizers.

    Raises:
        TypeError: As `Savepoint`.
        ValueError: As `Savepoint`.
    """
    found = read_state(state)
    return {
        key: variable
        for key, variable in found.variables.items()
        if not isinstance(found.entries[key].composite, Deferring)
    }


def _hold_again(entry: Entry) -> None:
    if isinstance(entry.container, MutableSequence) and entry.index == len(entry.container):
        entry.container.append(entry.thing)
    else:
        entry.container[entry.index] = entry.thing


def _described(cut: Cut) -> dict[str, EntryRecord]:
    records = {}
    for key in cut.entries:
        forms = [(array.shape, dtype_name(array.dtype, key)) for array in cut.arrays[key]]
        stored = {i: StoredTensor(NOWHERE, form) for i, form in enumerate(forms)}
        records[key] = cut.record_of(key, stored)
    return records
