"""A reader beside the manager that saves: steps are removed and replaced between any two reads."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.checkpoint import CheckpointManager
from aioreplica.errors import CheckpointError

from .simulated_files import SimulatedFiles, SimulatedStorage


def new_state(value: int) -> dict[str, Any]:
    return {"w": ar.Variable(np.full(3, float(value))), "value": value}


def changing_storage(
    disk: Callable[[int], SimulatedFiles], *, keeps_open: bool = True
) -> tuple[Any, list[str]]:
    """Return a storage to read from, and the calls that were made.

    Args:
        disk: Told the number of a call, returns the disk that it is made on.
        keeps_open: Whether a file that was opened stays, as in POSIX; in an object store it goes.
    """
    storage, calls = SimulatedStorage(disk(0)), []

    def now(name: str) -> SimulatedStorage:
        calls.append(name)
        return SimulatedStorage(disk(len(calls) - 1))

    def opened(path: str) -> Any:
        source: Any = now("open").open(path)
        if not keeps_open:
            source = SimpleNamespace(size=source.size, close=source.close)
            source.read_into = lambda *part: now("read").open(path).read_into(*part)
        return source

    storage.list = lambda folder: now("list").list(folder)
    storage.open = opened
    return storage, calls


async def disks_of_a_save(first: int, second: int) -> list[SimulatedFiles]:
    """Return the disk at every change while a save replaces the only step that is there."""
    files = SimulatedFiles()
    manager = CheckpointManager(SimulatedStorage(files), max_to_keep=1)
    await manager.save(first, new_state(1))
    begin = len(files.changes)
    await manager.save(second, new_state(2))
    changes = frozenset(files.changes)
    return [files.crash_after(count, changes) for count in range(begin, len(files.changes) + 1)]


async def read(disk: Callable[[int], SimulatedFiles], *, keeps_open: bool) -> int:
    """Restore, and ask for the latest step; return how many calls were made."""
    storage, calls = changing_storage(disk, keeps_open=keeps_open)
    manager, state = CheckpointManager(storage), new_state(-1)
    await manager.restore(state)
    assert {*state["w"].value} == {state["value"]}
    count = len(calls)
    calls.clear()
    assert manager.latest() is not None
    calls.clear()
    assert manager.steps() != ()
    return count


@pytest.mark.slow
@pytest.mark.parametrize("keeps_open", [True, False], ids=["posix", "object store"])
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (1, 1)])
def test_a_reader_finds_a_whole_step_whatever_is_replaced_meanwhile(
    first: int, second: int, keeps_open: bool
) -> None:
    async def main() -> int:
        disks = await disks_of_a_save(first, second)
        last, num_runs = len(disks) - 1, 0
        moves = [(0, to) for to in range(last + 1)] + [(at, last) for at in range(1, last)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is damaged
            for before, after in moves:
                at, num_calls = 0, 1
                while at < num_calls:
                    num_calls = await read(
                        lambda call: disks[before if call < at else after],  # noqa: B023
                        keeps_open=keeps_open,
                    )
                    at, num_runs = at + 1, num_runs + 1
        return num_runs

    assert art.run(main) > 50


def test_a_reader_that_is_always_too_late_raises() -> None:
    async def main() -> None:
        disks = [(await disks_of_a_save(1, 2))[0], (await disks_of_a_save(2, 1))[0]]
        storage, _ = changing_storage(lambda call: disks[call // 3 % 2])
        with pytest.raises(CheckpointError, match=r"removed or replaced while they were .* 20 tim"):
            await CheckpointManager(storage).restore(new_state(-1))

    art.run(main)
