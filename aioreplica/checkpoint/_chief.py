"""Checkpoints of several workers: the first one writes, with what the others have of their own.

What survivors of a lost worker have kept in memory comes from the one that has done most steps.

Variables are equal on all workers, so the first one's are saved. On-read variables have components
on every worker; these are gathered.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final

import numpy as np

from ..collectives import SLOT_BYTES, Carry, Wire, broadcast_bytes, gather_across, no_data
from ..errors import CheckpointNotCommittedError
from ..tree import Array
from ..typing import VariableSynchronization
from ..values import DividedVariable, Variable, workers_of
from ._format import EntryRecord, dtype_of, dump_entries, parse_entries
from ._state import Cut, Entry, frozen, read_state, take_cut

if TYPE_CHECKING:
    from ..cluster import Workers


async def take_common_cut(state: object, step: int) -> tuple[Cut, Workers | None]:
    """Take a cut, with the components that on-read variables have on all workers.

    Returns:
        The cut, and the workers of its strategy; None if there is one.

    Raises:
        MergeMismatchError: If workers save different states, or another step.
    """
    cut = await take_cut(state)
    workers = _workers_of(cut.entries)
    if workers is None:
        return cut, None
    divided = {k: e.thing for k, e in cut.entries.items() if isinstance(e.thing, DividedVariable)}
    keys = [
        key
        for key, entry in cut.entries.items()
        if isinstance(entry.thing, Variable) and not entry.thing.is_mirrored and key not in divided
    ]
    for variable in divided.values():
        variable.require_current(workers.num_workers)
    text = f"step {step}: {keys}, {[*divided]}"
    async with workers.operation("CheckpointManager.save", text) as turn:
        if divided:
            bring: Carry[None] = partial(_bring_together, cut, divided)
            await turn.exchange(b"", bring, what="parts")
        if not keys:
            await turn.exchange(b"", no_data)
        else:
            stacked = [np.stack(cut.arrays[key]) for key in keys]
            for key, parts in zip(keys, await gather_across(turn, stacked, 0), strict=True):
                cut.arrays[key] = [frozen(component) for part in parts for component in part]
    return cut, workers


async def _bring_together(
    cut: Cut, divided: Mapping[str, DividedVariable], wire: Wire, _slots: Sequence[bytes]
) -> None:
    """Put divided variables as a whole into the cut of the first worker, who writes them.

    Parts come one by one, so that the others never have more of a variable than a part.
    """
    for key, variable in divided.items():
        part = cut.arrays[key][0]
        division, whole = variable.division, np.empty(0, part.dtype)
        if division.rank == 0:
            whole = np.empty(division.shape, part.dtype)
        for rank, (begin, end) in enumerate(division.ranges):
            found = await variable.part_from(wire, rank, part)
            if whole.size:
                whole.reshape(-1)[begin:end] = found
        whole.flags.writeable = False
        cut.arrays[key] = [whole]


async def write_once(
    workers: Workers | None, step: int, write: Callable[[], Awaitable[None]]
) -> None:
    """Let the first worker write; return on all when it has, or raise on all.

    Raises:
        CheckpointNotCommittedError: On the other workers, if the first one could not write.
        Exception: On the first worker, what went wrong.
    """
    if workers is None:
        await write()
        return
    async with workers.operation("CheckpointManager.save", f"step {step} written") as turn:
        failure: Exception | None = None
        if turn.rank == 0:
            try:
                await write()
            except Exception as error:  # noqa: BLE001 - raised below, once the others know
                failure = error
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        slots = await turn.exchange(text.encode()[:SLOT_BYTES], no_data)
    if failure is not None:
        raise failure
    if slots[0]:
        cause = slots[0].decode("utf-8", "replace")
        raise CheckpointNotCommittedError(f"Worker 0 could not save step {step}: {cause}")


async def agree_on_restored(workers: Workers | None, step: int) -> None:
    """Check that all workers have restored the same step.

    Raises:
        MergeMismatchError: If they have not; names the steps.
    """
    if workers is not None:
        async with workers.operation("CheckpointManager.restore", f"step {step}") as turn:
            await turn.exchange(b"", no_data)


@final
@dataclass(frozen=True, slots=True)
class Newest:
    """Savepoint of the worker that has completed most steps.

    Attributes:
        next_steps: The numbers of its next steps.
        records: Describe its entries, by key.
        arrays: Their tensors, but for on-read variables.
    """

    next_steps: tuple[int, ...]
    records: dict[str, EntryRecord]
    arrays: dict[str, list[Array]]


async def exchange_newest(
    workers: Workers,
    next_steps: tuple[int, ...],
    records: Mapping[str, EntryRecord],
    arrays: Mapping[str, Sequence[Array]],
) -> Newest:
    """Return what the worker with the highest numbers of steps has; the first of them.

    Args:
        workers: Those of a strategy.
        next_steps: The numbers of this worker's next steps.
        records: Describe what it has.
        arrays: The tensors of that.
    """
    mine = dump_entries(records)

    async def carry(wire: Wire, slots: list[bytes]) -> Newest:
        told: list[list[int]] = [json.loads(slot) for slot in slots]
        best = max(told, key=lambda each: each[1:])
        root = told.index(best)
        data = await broadcast_bytes(wire, mine if root == rank else b"", best[0], root)
        found = Newest(tuple(best[1:]), parse_entries(data), {})
        for key, record in found.records.items():
            if record.synchronization != VariableSynchronization.ON_READ.value:
                found.arrays[key] = []
                for number in range(len(record.tensors)):
                    shape, dtype = record.form_of(number)
                    own = arrays[key][number] if root == rank else np.empty(shape, dtype_of(dtype))
                    found.arrays[key].append(frozen(await wire.broadcast(own, root)))
        return found

    async with workers.operation("shrink", "the newest step") as turn:
        rank = turn.rank
        found: Newest = await turn.exchange(json.dumps([len(mine), *next_steps]).encode(), carry)
    return found


def is_first(workers: Workers | None) -> bool:
    """Tell whether this worker is the one that writes."""
    return workers is None or workers.rank == 0


async def write_nothing(_step: int, _cut: Cut) -> None:
    """Leave it to the first worker."""


def workers_of_state(state: object) -> Workers | None:
    """Return the workers of the strategy whose variables are in a state, None if it has none.

    Raises:
        TypeError: As `read_state`.
        ValueError: As `read_state`.
    """
    return _workers_of(read_state(state).entries)


def _workers_of(entries: Mapping[str, Entry]) -> Workers | None:
    for entry in entries.values():
        if isinstance(entry.thing, Variable):
            workers: Workers | None = workers_of(entry.thing)
            if workers is not None:
                return workers
    return None
