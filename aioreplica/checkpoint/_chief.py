"""Checkpoints of several workers: the first one writes, and each its parts of what is divided.

What survivors of a lost worker have kept in memory comes from the one that has done most steps.

Variables are equal on all workers, so the first one's are saved. On-read variables have components
on every worker; these are gathered. Of divided variables each worker writes its part.
"""

from __future__ import annotations

import json
from asyncio import Future
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, final

import numpy as np

from ..collectives import (
    SLOT_BYTES,
    Carry,
    Turn,
    Wire,
    broadcast_bytes,
    gather_across,
    gather_bytes,
    no_data,
)
from ..errors import (
    CheckpointError,
    CheckpointNotCommittedError,
    CheckpointUncertainError,
    WorkerLostError,
)
from ..tree import Array
from ..typing import VariableSynchronization
from ..values import DividedVariable, Variable, workers_of
from ._claims import Claim, mark_of
from ._format import EntryRecord, dtype_of, dump_entries, parse_entries, parse_share
from ._lane import Stop, run_all
from ._retry import new_stop
from ._state import Cut, Entry, frozen, read_state, take_cut
from ._storage import Storage
from ._writing import StepWriter, not_committed

if TYPE_CHECKING:
    from ..cluster import Workers


async def take_common_cut(
    state: object, step: int, failure: Exception | None
) -> tuple[Cut, Workers | None]:
    """Take a cut, with the components that on-read variables have on all workers.

    Args:
        state: Of what.
        step: Its number.
        failure: Of an earlier save in the background, which is raised on all workers.

    Returns:
        The cut, and the workers of its strategy; None if there is one.

    Raises:
        CheckpointError: The failure, and on the other workers that there was one.
        MergeMismatchError: If workers save different states, or another step.
    """
    cut = await take_cut(state)
    workers = _workers_of(cut.entries)
    if workers is None and failure is None:
        return cut, None
    await agree_on_failure(workers, f"save of step {step}", failure)
    assert workers is not None  # else the failure was raised
    divided = {k: e.thing for k, e in cut.entries.items() if isinstance(e.thing, DividedVariable)}
    keys = [
        key
        for key, entry in cut.entries.items()
        if isinstance(entry.thing, Variable) and not entry.thing.is_mirrored and key not in divided
    ]
    for key, variable in divided.items():
        variable.require_current(workers.num_workers)
        cut.arrays[key] = cut.arrays[key][:1]
        if variable.is_mirrored:
            cut.arrays[key] = [cut.arrays[key][0].reshape(variable.shape)]
        else:
            cut.divisions[key] = variable.division
    text = f"step {step}: {keys}, {[*divided]}"
    async with workers.operation("CheckpointManager.save", text) as turn:
        if not keys:
            await turn.exchange(b"", no_data)
        else:
            stacked = [np.stack(cut.arrays[key]) for key in keys]
            for key, parts in zip(keys, await gather_across(turn, stacked, 0), strict=True):
                cut.arrays[key] = [frozen(component) for part in parts for component in part]
    return cut, workers


def _room_for_all(cut: Cut) -> dict[str, Array]:
    """Return arrays for divided variables as a whole: in an exchange a failure ends the group."""
    return {
        key: np.empty(division.shape, cut.arrays[key][0].dtype)
        for key, division in cut.divisions.items()
    }


async def _bring_together(
    cut: Cut, room: Mapping[str, Array], wire: Wire, _slots: Sequence[bytes]
) -> None:
    """Put divided variables as a whole into the cut of the first worker, who writes them.

    Parts come one by one, so that the others never have more of a variable than a part.
    """
    for key, division in cut.divisions.items():
        variable, part = cut.entries[key].thing, cut.arrays[key][0]
        whole = room.get(key)
        for rank, (begin, end) in enumerate(division.ranges):
            found = await variable.part_from(wire, rank, part)
            if whole is not None:
                whole.reshape(-1)[begin:end] = found
        if whole is not None:
            whole.flags.writeable = False
            cut.arrays[key] = [whole]
    cut.divisions.clear()


# ---- saving ------------------------------------------------------------------------------


async def agree_on_failure(workers: Workers | None, what: str, failure: Exception | None) -> None:
    """Raise on all workers what went wrong in the background on one of them.

    Raises:
        Exception: The failure, where it is.
        CheckpointNotCommittedError: On the other workers.
        CheckpointUncertainError: On the other workers, if that step may be there.
    """

    async def tell() -> None:
        if failure is not None:
            raise failure

    async def hear(turn: Turn) -> None:
        await _done_by_all(turn, f"begin a {what}", "", tell)

    await (tell() if workers is None else _agreed(workers, what, hear))


async def write_once(
    workers: Workers | None, step: int, write: Callable[[], Awaitable[None]]
) -> None:
    """Let the first worker write; return on all when it has, or raise on all.

    Raises:
        CheckpointNotCommittedError: On the other workers, if the first one could not write.
        CheckpointUncertainError: On the other workers, if the first one does not know.
        Exception: On the first worker, what went wrong.
    """
    if workers is None:
        await write()
        return

    async def write_first(turn: Turn) -> None:
        await _done_by_all(turn, f"save step {step}", "", write if turn.rank == 0 else _nothing)

    await _agreed(workers, f"step {step} written", write_first)


async def write_together(
    workers: Workers,
    storage: Storage,
    step: int,
    cut: Cut,
    begin: Callable[[], int],
    end: Callable[[Stop, int], list[str]],
) -> list[str]:
    """Write a cut as a step, of which each worker writes its parts; raises on all, or on none.

    The first worker makes the claim, and tells the others of it. One that finds that very claim
    sees the same directory. It writes its parts there; the first one has written the rest by then,
    and writes the manifest when all are done. If a worker does not see the claim, parts travel to
    the first one, which writes all.

    Args:
        workers: Those of the strategy.
        storage: Where to.
        step: Its number.
        cut: What to write.
        begin: As for `write_cut`, on the first worker.
        end: As for `write_cut`, on all workers, each with the length of its own files.

    Returns:
        What `end` returns, and a text if the first one has written all.

    Raises:
        CheckpointNotCommittedError: If a worker could not write; what was there before still is.
        CheckpointUncertainError: As for `write_cut`.
        WorkerLostError: If a worker was cancelled meanwhile, or is gone; with a note if the step
            may have been saved all the same.

    Cancellation:
        Tells the other workers. Before the manifest takes its name nothing is saved.
    """
    stop = new_stop(storage)
    saving = _Together(storage, step, cut, begin, end, stop, StepWriter(storage, step, cut, stop))
    try:
        await _agreed(workers, f"step {step} in parts", saving.take)
    except BaseException as error:
        await run_all([saving.writer.clean_up], Stop(), shielded=True)
        if isinstance(error, WorkerLostError) and saving.may_be_saved:
            error.add_note(
                f"Step {step} may have been saved in {storage}, or not: its manifest was being "
                "written. `steps()` tells."
            )
        if isinstance(error, (OSError, MemoryError)) and not isinstance(
            error, (CheckpointError, WorkerLostError)
        ):
            raise not_committed(storage, step, error) from error
        raise
    return saving.left


@final
@dataclass(slots=True)
class _Together:
    """One save of several workers, as one of them takes part in it; see `write_together`."""

    storage: Storage
    step: int
    cut: Cut
    begin: Callable[[], int]
    end: Callable[[Stop, int], list[str]]
    stop: Stop
    writer: StepWriter
    left: list[str] = field(default_factory=list)
    may_be_saved: bool = False

    @property
    def _doing(self) -> str:
        return f"save step {self.step}"

    async def take(self, turn: Turn) -> None:
        """Take part in all that the workers agree on, one after the other."""
        is_first = turn.rank == 0
        begun = await self._stage(turn, "the claim", self._claim if is_first else None)
        sequence, mark, self.writer.attempt = json.loads(begun[0])
        claim = Claim(sequence, self.step)
        look = partial(self._look, claim, mark)
        self.writer.claimed = claim, mark
        seen = await self._stage(turn, "the directory", None if is_first else look)
        blind = [rank for rank, found in enumerate(seen) if rank and not found]
        if blind:
            room: dict[str, Array] = {}

            def make_room() -> bytes:
                room.update(_room_for_all(self.cut))
                return b""

            await self._stage(turn, "room for all parts", make_room if is_first else None)
            bring: Carry[None] = partial(_bring_together, self.cut, room)
            await turn.exchange(b"", bring, what="parts")
            if not is_first:
                self.cut.arrays.clear()
        else:
            self.writer.worker = turn.rank
            _keep_share(self.cut, turn.rank)
        shares = await _done_by_all(turn, self._doing, "the files", self._write)
        self.may_be_saved = True
        commit = partial(self._commit, shares)
        await self._stage(turn, "the manifest", commit if is_first else None)
        if not is_first:
            self.left = self.end(self.stop, _bytes_of(shares[turn.rank]))
        elif blind:
            self.left.append(_BLIND.format(", ".join(map(str, blind)), self.storage))

    async def _stage(self, turn: Turn, what: str, work: Callable[[], bytes] | None) -> list[bytes]:
        """Do something on a thread, if anything; return what that gave on all workers."""

        async def on_thread() -> bytes:
            return b"" if work is None else (await run_all([work], self.stop))[0]

        return await _done_by_all(turn, self._doing, what, on_thread)

    def _claim(self) -> bytes:
        sequence = self.begin()
        self.writer.begin(sequence)
        mark = mark_of(self.storage, Claim(sequence, self.step)).decode(errors="replace")
        return json.dumps([sequence, mark, self.writer.attempt]).encode()

    def _look(self, claim: Claim, mark: str) -> bytes:
        found = mark_of(self.storage, claim).decode(errors="replace")
        return b"seen" if found and found == mark else b""

    async def _write(self) -> bytes:
        records = await run_all(self.writer.files(), self.stop)
        [share] = await run_all([partial(self.writer.share, records)], self.stop)
        return share

    def _commit(self, shares: Sequence[bytes]) -> bytes:
        self.writer.commit(self.writer.add_shares(shares))
        self.left = self.end(self.stop, _bytes_of(shares[0]))
        return b""


def _keep_share(cut: Cut, rank: int) -> None:
    """Let go of what this worker does not write: it writes its parts; the first one the rest.

    A divided variable that one worker has whole is written as any other.
    """
    for key in cut.arrays:
        division = cut.divisions.get(key)
        if division is None:
            if rank:
                cut.arrays[key] = []
        elif division.ranges[rank] not in division.held:
            cut.arrays[key] = []
        elif len(division.held) == 1:
            cut.arrays[key] = [cut.arrays[key][0].reshape(division.shape)]


_BLIND = (
    "Worker {} does not see {} as worker 0 does, so worker 0 has written the parts of all, and "
    "held divided variables whole meanwhile. Give all workers one directory, which each of them "
    "needs to restore, too."
)


def _bytes_of(share: bytes) -> int:
    return sum(file.bytes for file in parse_share(share)[0])


@final
class _AgreedError(Exception):
    """Raised on all workers when one of them has failed."""

    def __init__(self, error: Exception) -> None:
        self.error = error


async def _agreed(workers: Workers, text: str, do: Callable[[Turn], Awaitable[None]]) -> None:
    """Do something in an operation; raise what they have agreed on when it is over."""
    failure: Exception | None = None
    async with workers.operation("CheckpointManager.save", text) as turn:
        try:
            await do(turn)
        except _AgreedError as agreed:
            failure = agreed.error
    if failure is not None:
        raise failure


async def _done_by_all(
    turn: Turn, doing: str, what: str, work: Callable[[], Awaitable[bytes | None]]
) -> list[bytes]:
    """Do this worker's part of something; return what all have made, once all are done.

    Raises:
        _AgreedError: On all workers, if one has failed.
    """
    mine, failure = b"", None
    try:
        mine = await work() or b""
    except Exception as error:  # noqa: BLE001 - raised once the others know
        failure = error

    async def carry(wire: Wire, slots: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        return slots, [] if any(map(any, slots)) else await gather_bytes(wire, mine)

    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    exchanging: Future[tuple[list[bytes], list[bytes]]] = turn.exchange(
        text.encode()[:SLOT_BYTES], carry, what=what
    )
    slots, made = await exchanging
    if failure is not None:
        raise _AgreedError(failure)
    for rank, slot in enumerate(slots):
        if any(slot):
            cause = slot.rstrip(b"\0").decode("utf-8", "replace")
            unsure = cause.startswith(CheckpointUncertainError.__name__)
            kind = CheckpointUncertainError if unsure else CheckpointNotCommittedError
            raise _AgreedError(kind(f"Worker {rank} could not {doing}: {cause}"))
    return made


async def _nothing() -> None:
    """Leave it to the first worker."""


# ---- restoring ---------------------------------------------------------------------------


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
    what: str,
) -> Newest:
    """Return what the worker with the highest numbers of steps has; the first of them.

    Args:
        workers: Those of a strategy.
        next_steps: The numbers of this worker's next steps.
        records: Describe what it has.
        arrays: The tensors of that.
        what: For errors, such as "shrink".
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

    async with workers.operation(what, "the newest step") as turn:
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
