"""Checkpoints of several workers: the first one writes, with what the others have of their own.

Variables are equal on all workers, so the first one's are saved. On-read variables have components
on every worker; these are gathered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from ..collectives import SLOT_BYTES, gather_across, no_data
from ..errors import CheckpointNotCommittedError
from ..values import Variable
from ._state import Cut, frozen, read_state, take_cut


async def take_common_cut(state: Any, step: int) -> tuple[Cut, bool]:
    """Take a cut, with the components that on-read variables have on all workers.

    Returns:
        The cut, and whether this worker is the one that writes.

    Raises:
        MergeMismatchError: If workers save different states, or another step.
    """
    cut, workers = await take_cut(state), _workers_of(state)
    if workers is None:
        return cut, True
    keys = [
        key
        for key, entry in read_state(state).entries.items()
        if isinstance(entry.thing, Variable) and not entry.thing.is_mirrored
    ]
    async with workers.operation("CheckpointManager.save", f"step {step}: {keys}") as turn:
        if not keys:
            await turn.exchange(b"", no_data)
        else:
            stacked = [np.stack(cut.arrays[key]) for key in keys]
            for key, parts in zip(keys, await gather_across(turn, stacked, 0), strict=True):
                cut.arrays[key] = [frozen(component) for part in parts for component in part]
    return cut, workers.rank == 0


async def write_once(state: Any, step: int, write: Callable[[], Awaitable[None]]) -> None:
    """Let the first worker write; return on all when it has, or raise on all.

    Raises:
        CheckpointNotCommittedError: On the other workers, if the first one could not write.
        Exception: On the first worker, what went wrong.
    """
    workers = _workers_of(state)
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


async def agree_on_restored(state: Any, step: int) -> None:
    """Check that all workers have restored the same step.

    Raises:
        MergeMismatchError: If they have not; names the steps.
    """
    workers = _workers_of(state)
    if workers is not None:
        async with workers.operation("CheckpointManager.restore", f"step {step}") as turn:
            await turn.exchange(b"", no_data)


def is_first(state: Any) -> bool:
    """Tell whether this worker is the one that writes."""
    workers = _workers_of(state)
    return workers is None or workers.rank == 0


async def write_nothing(_step: int, _cut: Cut) -> None:
    """Leave it to the first worker."""


def _workers_of(state: Any) -> Any:
    """Return the workers of the strategy whose variables are in a state, None if it has none."""
    for entry in read_state(state).entries.values():
        owner = entry.thing.strategy if isinstance(entry.thing, Variable) else None
        if owner is not None and owner.workers is not None:
            return owner.workers
    return None
