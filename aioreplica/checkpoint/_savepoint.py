"""A savepoint: a state as it is now, kept in memory, to be put back as a checkpoint would be."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any, final

from ..values import Variable
from ._format import Array, EntryRecord, Manifest, TensorRecord, dtype_name
from ._restoring import apply_plan, make_plan
from ._state import Cut, Deferring, Entry, StoredTensor, look, read_state

NOWHERE = TensorRecord(0, 0, 0, 0)


@final
class Savepoint:
    """References to everything in a state; what is no variable is copied.

    Take one, and put it back, between two steps: no step that writes the state may be under way.
    The old arrays live as long as the savepoint does.

    Args:
        state: As for `CheckpointManager.save`.

    Raises:
        TypeError: If something in it cannot be saved.
        ValueError: If it is no container, or two of its entries have one name.

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

    def __init__(self, state: Any) -> None:
        self._state = state
        self._cut = look(read_state(state))
        self._cut.check()

    def written(self) -> list[tuple[str, Array]]:
        """Return the arrays of variables that were written since, each with the key of its entry.

        Slots that an optimizer has made since are among them.
        """
        arrays = []
        for key, variable in read_state(self._state).variables.items():
            old = {id(array) for array in self._cut.arrays.get(key, ())}
            new = {id(array): array for array in variable.components}
            arrays += [(key, array) for mark, array in new.items() if mark not in old]
        return arrays

    def put_back(self) -> None:
        """Put the whole state back; the variables of a strategy in one publication.

        Slots made since are forgotten; so is what a dict or list of the state held in another's
        place. What was added to one stays. The numbers of steps stay as they are.
        """
        cut = self._cut
        for entry in cut.entries.values():
            if entry.container is not None:  # it may hold something else by now
                _hold_again(entry)
        records = {key: _described(cut, key) for key in cut.entries}
        manifest = Manifest(0, 0, cut.next_steps, (), records)
        now = read_state(self._state)
        plan = make_plan(now, manifest, partial=True)
        apply_plan(now, plan, manifest, cut.arrays, with_steps=False)

    def __repr__(self) -> str:
        return f"<Savepoint | {len(self._cut.entries)} entries>"


def model_variables(state: Any) -> dict[str, Variable]:
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


def _described(cut: Cut, key: str) -> EntryRecord:
    forms = [(array.shape, dtype_name(array.dtype, key)) for array in cut.arrays[key]]
    return cut.record_of(key, {i: StoredTensor(NOWHERE, form) for i, form in enumerate(forms)})
