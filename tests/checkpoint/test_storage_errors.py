"""Errors of a storage at every call of a save and a restore: no error is taken for damage."""

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.checkpoint import CheckpointManager
from aioreplica.errors import (
    CheckpointError,
    CheckpointNotCommittedError,
    CheckpointUncertainError,
)

from .simulated_files import FaultyStorage, SimulatedFiles, SimulatedStorage

ERRNOS = ("ETIMEDOUT", "EACCES", "ENOMEM", "ESTALE", "EMFILE", "ENFILE", "ECONNRESET", "EIO")


def _error_of(number: int) -> Callable[[], Exception]:
    return lambda: OSError(number, os.strerror(number))


ERRORS: dict[str, Callable[[], Exception]] = {
    **{name: _error_of(getattr(errno, name)) for name in ERRNOS},
    "expired token": lambda: OSError("ClientError: ExpiredToken"),
    "memory": MemoryError,
}
SAVES = ("list", "make_folder", "create", "write", "finish", "open", "read", "close", "replace")
SAVES += ("put_new", "sync", "remove", "remove_folder", "lock")
MODES: dict[str, dict[str, bool]] = {
    "once": {},
    "late": {"is_late": True},
    "for good": {"is_for_good": True},
}
CASES = [(name, "once") for name in ERRORS] + [
    (name, mode) for name in ("ESTALE", "ETIMEDOUT", "memory") for mode in ("late", "for good")
]
# All of them in a save of another step, and one of each kind in one of the same step.
SAVED = [
    pytest.param(
        name, mode, step, id=f"{name}-{mode}-{'another step' if step == 3 else 'the same step'}",
        marks=[pytest.mark.xslow] * (
            name not in {"ESTALE", "memory"} or (step == 2 and (name, mode) != ("ESTALE", "once"))
        ),
    )
    for name, mode in CASES
    for step in (3, 2)
]  # fmt: skip


def new_state(value: int) -> dict[str, Any]:
    return {"w": ar.Variable(np.full(3, float(value))), "value": value}


async def values_of(files: SimulatedFiles) -> tuple[int | None, dict[int, int]]:
    """Return the newest step, and the value of each one; nothing may be damaged."""
    manager = CheckpointManager(SimulatedStorage(files))
    newest, found = manager.latest(), {}
    for step in manager.steps():
        await manager.verify(step)
        state = new_state(-1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert await manager.restore(state, None if step == newest else step) == step
        assert {*state["w"].value} == {state["value"]}, "A mixture of saves was restored."
        found[step] = state["value"]
    return newest, found


async def saved_disk() -> SimulatedFiles:
    files = SimulatedFiles()
    async with CheckpointManager(SimulatedStorage(files)) as manager:
        for step in (1, 2):
            await manager.save(step, new_state(step))
    return files


def sweep(once: Callable[[int], Any]) -> int:
    """Run `once` for each call until none is left; return how many there were."""

    async def run() -> int:
        at = 0
        while await once(at):
            at += 1
        return at

    return art.run(run)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode", "step"), SAVED)
def test_an_error_at_any_call_of_a_save_deletes_nothing_that_was_durable(
    name: str, mode: str, step: int
) -> None:
    reached: set[str] = set()

    async def once(at: int) -> bool:
        files = await saved_disk()
        storage = FaultyStorage(SimulatedStorage(files), ERRORS[name], at, **MODES[mode])
        manager = CheckpointManager(storage, max_to_keep=2)
        error = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # an old step was not removed
            try:
                await manager.save(step, new_state(3))
            except (CheckpointNotCommittedError, CheckpointUncertainError) as raised:
                error = raised
        reached.update(storage.calls[at : at + 1])

        found = await values_of(files)
        before, after = (2, {1: 1, 2: 2}), (step, {1: 1, 2: 2, step: 3})
        if error is None:
            assert found in (after, (step, {2: 2, step: 3}))  # step 1 went, or could not go
        elif isinstance(error, CheckpointNotCommittedError):
            assert found == before
        else:
            assert found in (before, after)

        was_met, storage.at = storage.was_met, None
        await manager.save(4, new_state(4))  # the next save of the manager is as good as ever
        newest, values = await values_of(files)
        assert (newest, values[4], len(values)) == (4, 4, 2)
        return was_met

    assert sweep(once) > 25
    assert reached == {*SAVES} - ({"remove_folder"} if step == 2 else set())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_an_error_at_any_call_of_a_restore_takes_no_older_step(name: str, mode: str) -> None:
    async def once(at: int) -> bool:
        files = await saved_disk()
        storage = FaultyStorage(SimulatedStorage(files), ERRORS[name], at, **MODES[mode])
        manager, state = CheckpointManager(storage), new_state(-1)
        error, said = ERRORS[name](), None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                assert await manager.restore(state) == 2
            except CheckpointError as raised:
                said = raised
        assert storage.was_met == (said is not None)
        if said is not None:
            assert state["value"] == -1
            assert (str(error) or "MemoryError") in str(said)
            assert isinstance(said.__cause__, type(error))
        was_met, storage.at = storage.was_met, None
        assert await manager.restore(state) == 2
        return was_met

    assert sweep(once) > 8


# ---- at the calls where it matters most ------------------------------------------------------


class WrongBytes:
    """A file of which one byte is read as another one."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.size, self.close = source.size, source.close

    def read_into(self, offset: int, buffer: memoryview) -> int:
        count: int = self._source.read_into(offset, buffer)
        buffer[count // 2] ^= 1
        return count


def refuse(*_args: Any, **_options: Any) -> Any:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def with_refused_reads(source: Any) -> Any:
    return SimpleNamespace(size=source.size, read_into=refuse, close=source.close)


@pytest.mark.parametrize("step", [2, 3], ids=["the same step", "another step"])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (refuse, "Stale file handle"),
        (with_refused_reads, "Stale file handle"),
        (WrongBytes, "manifest.json fails its checksum"),
    ],
)
def test_a_manifest_that_cannot_be_read_back_is_uncertain_and_nothing_is_removed(
    spoil: Callable[[Any], Any], said: str, step: int
) -> None:
    async def main() -> None:
        files = await saved_disk()
        storage = SimulatedStorage(files)
        put, opened = storage.replace, storage.open

        def replace(path: str, data: bytes) -> None:
            put(path, data)
            storage.open = lambda each: spoil(opened(each))

        storage.replace = replace
        manager = CheckpointManager(storage, max_to_keep=1)
        said_all = rf"Step {step} may have been saved .* cannot be read back: .*{said}.* Save again"
        with pytest.raises(CheckpointUncertainError, match=said_all):
            await manager.save(step, new_state(3))
        assert await values_of(files) == (step, {1: 1, 2: 2, step: 3})

    art.run(main)


def test_the_first_save_of_a_manager_is_refused_if_a_manifest_cannot_be_read() -> None:
    async def main() -> None:
        files = await saved_disk()
        storage = SimulatedStorage(files)
        opened, storage.open = storage.open, refuse
        manager, num_changes = CheckpointManager(storage, max_to_keep=1), len(files.changes)
        with pytest.raises(
            CheckpointNotCommittedError,
            match=r"Step 1 was not saved in .*: manifest\.json of step 2 in .* cannot be read: "
            rf"\[Errno {errno.ESTALE}\] Stale file handle\. The step may be whole.* is unchanged\.",
        ):
            await manager.save(1, new_state(3))
        assert len(files.changes) == num_changes  # nothing was written
        storage.open = opened
        await manager.save(1, new_state(3))
        assert await values_of(files) == (1, {1: 3})

    art.run(main)


def test_a_save_is_numbered_above_what_a_damaged_manifest_may_say() -> None:
    async def main() -> None:
        files = SimulatedFiles()
        async with CheckpointManager(SimulatedStorage(files)) as manager:
            for step in (1, 2, 2, 2):  # the sequence of step 2 is three above the other's
                await manager.save(step, new_state(2))
        data = files.root.names["step-0000000002"].names["manifest.json"].data
        assert data is not None
        data[20] ^= 1
        async with CheckpointManager(SimulatedStorage(files)) as manager:
            await manager.save(1, new_state(3))
        data[20] ^= 1  # it was read wrongly, and is whole after all
        assert await values_of(files) == (1, {1: 3, 2: 2})

    art.run(main)


def test_a_manifest_longer_than_a_reader_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        files = await saved_disk()
        monkeypatch.setattr("aioreplica.checkpoint._writing.MAX_MANIFEST_BYTES", 1000)
        manager = CheckpointManager(SimulatedStorage(files), max_to_keep=1)
        with pytest.raises(CheckpointNotCommittedError, match="put long lists of numbers into arr"):
            await manager.save(3, {"history": [0.5] * 1000})
        assert await values_of(files) == (2, {1: 1, 2: 2})
        steps = ("0000000001", "0000000002")
        assert {*files.root.names} == {
            *(f"step-{step}" for step in steps), *(f"claim-{step}-{step}" for step in steps)
        }  # fmt: skip

    art.run(main)


@pytest.mark.asyncio
async def test_errors_of_a_store_are_not_damage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import fsspec

    store, url = fsspec.get_filesystem_class("memory"), f"memory://{tmp_path.name}"
    async with ar.CheckpointManager(url) as manager:
        for step in (1, 2):
            await manager.save(step, new_state(step))

    class ClientError(Exception):
        """As botocore's: no OSError."""

    def refuse(*_args: Any, **_options: Any) -> None:
        raise ClientError("ExpiredToken")

    said = r"data-0001-000\.safetensors of step 2 in .* cannot be read: ClientError: ExpiredToken\."
    for call in ("open", "pipe_file", "ls", "cat_file", "size"):
        with monkeypatch.context() as patch:
            patch.setattr(store, call, refuse)
            state = new_state(-1)
            if call not in {"open", "pipe_file"}:
                with pytest.raises(CheckpointError, match="ClientError: ExpiredToken"):
                    await ar.CheckpointManager(url).restore(state)
                assert state["value"] == -1
            async with ar.CheckpointManager(url) as manager:
                with pytest.raises(CheckpointNotCommittedError, match="ClientError: ExpiredToken"):
                    await manager.save(3, state)
        assert ar.CheckpointManager(url).steps() == (1, 2)
    size = store.size
    with monkeypatch.context() as patch:
        patch.setattr(store, "size", lambda *a: (refuse if "data" in a[1] else size)(*a))
        with pytest.raises(CheckpointError, match=said):
            await ar.CheckpointManager(url).restore(new_state(-1))
        with pytest.raises(CheckpointError, match=said):
            await ar.CheckpointManager(url).verify(2)


def test_latest_is_the_newest_step_or_an_error() -> None:
    async def once(at: int) -> bool:
        storage = FaultyStorage(SimulatedStorage(files), ERRORS["ETIMEDOUT"], at)
        try:
            assert CheckpointManager(storage).latest() == 2
        except CheckpointError:
            return True
        return storage.was_met

    async def saved() -> SimulatedFiles:
        return await saved_disk()

    files = art.run(saved)
    assert sweep(once) == 4  # list the directory; open, read and close one manifest
