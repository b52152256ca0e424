"""Each worker writes its part of divided variables: one step, or none; any number reads it."""

import asyncio
import json
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import LocalStorage, _chief
from aioreplica.checkpoint._format import CHUNK_BYTES
from aioreplica.devices import list_devices
from aioreplica.errors import (
    CheckpointError,
    CheckpointNotCommittedError,
    CheckpointUncertainError,
    ContextError,
    WorkerLostError,
)
from aioreplica.optimizers._merged_gradient import MEASURED
from aioreplica.values import DividedVariable
from tests.strategies.test_multi_worker_shrink import lose
from tests.strategies.workers import on_workers, outcomes, strategies

from .simulated_files import FaultyStorage, SimulatedFiles, SimulatedStorage

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]

ROWS = 11


def rank_of(strategy: ar.Strategy) -> int:
    workers = strategy._runtime.workers
    assert workers is not None
    return int(workers.rank)


class Training:
    """Variables of all kinds; gradients depend on the step only."""

    def __init__(
        self, strategy: ar.Strategy, *, num_large: int = 2 * MEASURED + 5, suffix: str = ""
    ) -> None:
        self.strategy = strategy
        first = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)
        with strategy.scope():
            self.table: Any = ar.Variable(
                lambda begin, end: first[begin:end],
                shape=first.shape, sharding=ar.Shard(), name=f"table{suffix}",
            )  # fmt: skip
            self.large = ar.Variable(np.ones(num_large, np.float32), name=f"large{suffix}")
            self.hits = ar.Variable(0, synchronization="on_read", aggregation="sum")
            self.adam = ar.optimizers.Adam(0.01, shard_state=True)
        self.model = {"table": self.table, "large": self.large}
        self.state = {"model": self.model, "hits": self.hits, "adam": self.adam, "epoch": 0}

    async def step(self, number: int) -> None:
        rng = np.random.default_rng(number)
        pairs = [(rng.standard_normal(v.shape).astype("float32"), v) for v in self.model.values()]
        await self.hits.assign_add(1 if ar.get_replica_context().replica_id_in_sync_group else 2)
        await self.adam.apply_gradients(pairs, aggregate=False)

    async def train(self, first: int, end: int) -> None:
        for number in range(first, end):
            await self.strategy.run(self.step, (number,))
            self.state["epoch"] = number

    async def bits(self) -> list[bytes]:
        found = []
        for variable in [*self.model.values(), *self.adam.variables]:
            is_divided = isinstance(variable, DividedVariable)
            found.append((await variable.read() if is_divided else variable.value).tobytes())
        return found


async def on_one(program: Callable[[ar.Strategy], Any], num_replicas: int = 2) -> Any:
    async with ar.MirroredStrategy(list_devices("cpu")[:num_replicas]) as strategy:
        return await program(strategy)


async def save_two_steps(strategy: ar.Strategy, directory: Any, **options: Any) -> list[bytes]:
    training = Training(strategy)
    await training.train(0, 2)
    async with ar.CheckpointManager(directory) as manager:
        await manager.save(2, training.state, **options)
        assert manager.statistics().num_saved == 1
    return await training.bits()


def names_of(folder: Path, step: int = 2) -> list[str]:
    """Return the names of files, without what the claim of their save has given to them."""
    found = (folder / f"step-{step:010d}").iterdir()
    return sorted(re.sub("-[0-9a-f]{8}(-[0-9]{3}[.])", r"\1", path.name) for path in found)


# ---- what is written, and who reads it -----------------------------------------------------------


@pytest.mark.parametrize("wait", [True, False])
async def test_each_worker_writes_its_part(tmp_path: Path, wait: bool) -> None:
    [bits, *_] = await on_workers(
        3, 1, lambda strategy: save_two_steps(strategy, tmp_path, wait=wait)
    )
    whole = np.frombuffer(bits[0], np.float32).reshape(ROWS, 3)

    assert names_of(tmp_path) == [
        *(f"data-0001-w00{rank}-000.safetensors" for rank in range(3)),
        "manifest.json",
    ]
    body = json.loads((tmp_path / "step-0000000002" / "manifest.json").read_bytes())["manifest"]
    assert body["version"] == 3
    entries = body["entries"]
    assert entries["model/table"]["parts"] == [[0, 12], [12, 24], [24, 33]]
    assert [tensor[0] for tensor in entries["model/table"]["tensors"]] == [0, 1, 2]
    assert entries["model/table"]["shape"] == [11, 3]
    small = entries["adam/slots/model/table/m"]
    assert small["parts"] == [[0, 12], [12, 24], [24, 33]]  # as its variable is divided
    assert "parts" not in entries["model/large"]
    assert "parts" not in entries["hits"]
    safetensors = pytest.importorskip("safetensors.numpy")
    [path] = tmp_path.glob("step-*/data-0001-w001-*-000.safetensors")
    found = safetensors.load_file(path)
    assert found["model/table#1"].tolist() == whole[4:8].tolist()


async def test_a_state_without_parts_is_one_that_earlier_releases_read(tmp_path: Path) -> None:
    async def program(strategy: ar.Strategy) -> None:
        training = Training(strategy, num_large=5)
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(2, {"large": training.large, "adam": training.adam})

    await on_workers(2, 1, program)
    assert names_of(tmp_path) == ["data-0001-000.safetensors", "manifest.json"]
    body = json.loads((tmp_path / "step-0000000002" / "manifest.json").read_bytes())["manifest"]
    assert body["version"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3, 4])
async def test_any_number_of_workers_goes_on_with_the_same_bits(
    tmp_path: Path, num_workers: int
) -> None:
    async def go_on(strategy: ar.Strategy) -> list[bytes]:
        training = Training(strategy)
        async with ar.CheckpointManager(tmp_path) as manager:
            assert await manager.restore(training.state) == 2
            assert training.state["epoch"] == 1
            await manager.restore(training.state)  # slots that wait to be made, once more
        await training.train(2, 4)
        return await training.bits()

    async def straight(strategy: ar.Strategy) -> list[bytes]:
        training = Training(strategy)
        await training.train(0, 4)
        return await training.bits()

    await on_workers(3, 1, lambda strategy: save_two_steps(strategy, tmp_path))
    expected = await on_one(straight)

    found = await (on_workers(num_workers, 1, go_on) if num_workers else on_one(go_on))
    for each in found if num_workers else [found]:
        assert each == expected


@pytest.mark.slow
async def test_slots_that_are_not_made_are_read_and_saved_in_parts(tmp_path: Path) -> None:
    read: dict[int, int] = {}

    def counting(rank: int) -> Any:
        class Counting(FaultyStorage):
            def open(self, path: str) -> Any:
                source = super().open(path)
                into = source.read_into

                def counted(at: int, part: memoryview) -> int:
                    read[rank] = read.get(rank, 0) + len(part)
                    return int(into(at, part))

                source.read_into = counted
                return source

        return Counting(LocalStorage(tmp_path), OSError, None)

    size = 4 * CHUNK_BYTES // 4

    async def save(strategy: ar.Strategy) -> list[bytes]:
        training = Training(strategy, num_large=size)
        await training.train(0, 1)
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(1, training.state)
        return await training.bits()

    async def restore(strategy: ar.Strategy) -> list[bytes]:
        training = Training(strategy, num_large=size)
        manager = ar.CheckpointManager(counting(rank_of(strategy)))
        await manager.restore(training.state)
        async with ar.CheckpointManager(tmp_path) as other:
            await other.save(2, training.state)  # before a step has made them
            again = Training(strategy, num_large=size, suffix="2")
            assert await other.restore(again.state) == 2
        await again.train(1, 2)
        return await again.bits()

    async def straight(strategy: ar.Strategy) -> list[bytes]:
        training = Training(strategy, num_large=size)
        await training.train(0, 2)
        return await training.bits()

    await on_workers(4, 1, save)
    found = await on_workers(2, 1, restore)

    assert found == [await on_one(straight)] * 2
    for count in read.values():  # the variable as a whole, and half of each slot
        assert 8 * CHUNK_BYTES <= count < 8.5 * CHUNK_BYTES
    body = json.loads((tmp_path / "step-0000000002" / "manifest.json").read_bytes())["manifest"]
    assert len(body["entries"]["adam/slots/model/large/v"]["parts"]) == 2


async def test_restored_parts_of_other_workers_are_not_used(tmp_path: Path) -> None:
    ready = asyncio.Barrier(3)

    async def program(strategy: Any) -> None:
        training = Training(strategy)
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.restore(training.state)
            await ready.wait()
            rank = rank_of(strategy)
            if rank == 0:
                lose(strategy)
                return
            with pytest.raises(WorkerLostError):
                await training.train(2, 3)
            await strategy.shrink()
            with pytest.raises((ContextError, WorkerLostError), match="now there are 2"):
                await training.train(2, 3)
            await manager.restore(training.state)
            await training.train(2, 3)

    await on_workers(3, 1, lambda strategy: save_two_steps(strategy, tmp_path))
    assert await outcomes(strategies(3, 1), [program] * 3) == [None] * 3


@pytest.mark.parametrize(
    "index", [None, np.s_[3:9], np.s_[-1], np.s_[::-3, 1], np.s_[3:5, ::2], np.s_[7:7]]
)
async def test_a_slice_is_read_across_parts(tmp_path: Path, index: Any) -> None:
    [bits, *_] = await on_workers(3, 1, lambda strategy: save_two_steps(strategy, tmp_path))
    table = np.frombuffer(bits[0], np.float32).reshape(ROWS, 3)

    found = await ar.CheckpointManager(tmp_path).read(2, "model/table", index)

    np.testing.assert_array_equal(found, table if index is None else table[index])


async def test_a_slice_opens_the_files_it_needs_only(tmp_path: Path) -> None:
    await on_workers(3, 1, lambda strategy: save_two_steps(strategy, tmp_path))
    for path in tmp_path.glob("step-*/data-0001-w00[02]*"):
        path.unlink()
    manager = ar.CheckpointManager(tmp_path)

    assert (await manager.read(2, "model/table", np.s_[4:8])).shape == (4, 3)
    with pytest.raises(CheckpointError, match=r"data-0001-w002-.*-000.*cannot be read"):
        await manager.read(2, "model/table", np.s_[4:9])


async def test_parts_are_described(tmp_path: Path) -> None:
    await on_workers(3, 1, lambda strategy: save_two_steps(strategy, tmp_path))
    manager = ar.CheckpointManager(tmp_path)
    await manager.verify(2)

    found = {entry.key: entry for entry in manager.describe(2).entries}
    table, hits = found["model/table"], found["hits"]
    assert (table.shape, table.num_components, table.num_parts) == ((11, 3), 1, 3)
    assert table.num_bytes == 11 * 3 * 4
    assert (hits.num_components, hits.num_parts) == (3, 1)


async def test_damage_of_one_part_is_named_and_passed_over_by_all(tmp_path: Path) -> None:
    async def program(strategy: ar.Strategy) -> Any:
        training = Training(strategy)
        async with ar.CheckpointManager(tmp_path) as manager:
            return await manager.restore(training.state)

    async def save(strategy: ar.Strategy) -> None:
        training = Training(strategy)
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(1, training.state)
            await manager.save(2, training.state)

    await on_workers(3, 1, save)
    [path] = tmp_path.glob("step-*2/data-*-w001-*")
    data = bytearray(path.read_bytes())
    data[data.index(np.arange(12, 24, dtype="<f4").tobytes()) + 5] ^= 1
    path.write_bytes(data)

    manager = ar.CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=r"'model/table#1' in data-0001-w001-.*-000"):
        await manager.verify(2)
    assert (await manager.read(2, "model/table", 1)).tolist() == [3.0, 4.0, 5.0]
    with pytest.warns(RuntimeWarning, match=r"step 2 \(.*model/table#1"):
        assert await on_workers(2, 1, program) == [1, 1]


# ---- saves that go wrong -------------------------------------------------------------------------


class Gated(FaultyStorage):
    """Waits on the thread that writes, at the first file, until it may go on."""

    def __init__(self, storage: Any) -> None:
        super().__init__(storage, OSError, None)
        self.came, self.may_go = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()

    def create(self, path: str) -> Any:
        self._loop.call_soon_threadsafe(self.came.set)
        assert self.may_go.wait(30)
        return super().create(path)


@pytest.mark.parametrize("how", ["fails", "is cancelled", "is lost"])
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_worker_that_ends_while_it_writes_leaves_no_step(
    tmp_path: Path, how: str, victim: int
) -> None:
    async def program(strategy: Any) -> Any:
        rank = rank_of(strategy)
        training = Training(strategy)
        storage: Any = LocalStorage(tmp_path)
        async with ar.CheckpointManager(storage) as manager:
            await manager.save(1, training.state)
            await training.train(0, 1)
        gate = Gated(storage) if rank == victim else None
        async with ar.CheckpointManager(storage if gate is None else gate) as manager:
            saving = asyncio.ensure_future(manager.save(2, training.state))
            if gate is not None:
                await gate.came.wait()
                if how == "fails":
                    gate.at, gate._is_for_good = len(gate.calls), True
                elif how == "is cancelled":
                    saving.cancel()
                else:
                    lose(strategy)
                gate.may_go.set()
            try:
                await saving
            except BaseException as error:
                ended: Any = error
            else:
                ended = None
            assert ar.CheckpointManager(tmp_path).steps() == (1,)
        if how != "is lost":
            async with ar.CheckpointManager(tmp_path) as manager:
                await manager.save(3, training.state)
        return ended

    ended = await outcomes(strategies(2, 1), [program] * 2)

    other = ended[1 - victim]
    if how == "fails":
        assert isinstance(ended[victim], CheckpointNotCommittedError)
        assert isinstance(other, CheckpointNotCommittedError)
        assert f"Worker {victim} could not save step 2: OSError" in str(other)
    else:
        assert isinstance(other, WorkerLostError)
    manager = ar.CheckpointManager(tmp_path)
    assert manager.steps() == ((1,) if how == "is lost" else (1, 3))
    left = [*tmp_path.glob("step-*2/*")]
    assert all(path.name.startswith("data-") for path in left)
    if how == "fails":
        assert not left


async def test_two_attempts_share_no_name_although_they_have_one_number(tmp_path: Path) -> None:
    async def program(strategy: ar.Strategy) -> None:
        training = Training(strategy)
        storage: Any = FaultyStorage(LocalStorage(tmp_path), OSError, None)
        listed = storage.list
        async with ar.CheckpointManager(storage) as manager:
            await manager.save(2, training.state)
            # As a store that lists late.
            storage.list = lambda folder: [] if folder.startswith("step-") else listed(folder)
            await manager.save(2, training.state)

    await on_workers(2, 1, program)

    assert len({path.name for path in tmp_path.glob("step-*/data-0001-*")}) == 4
    await ar.CheckpointManager(tmp_path).verify(2)


async def test_parts_that_do_not_fit_into_the_first_worker_are_not_saved_on_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(shape: Any, dtype: Any) -> Any:
        if shape == (ROWS, 3):
            raise MemoryError("Unable to allocate")
        return np.empty(shape, dtype)

    monkeypatch.setattr(_chief, "np", SimpleNamespace(empty=full, stack=np.stack))

    async def program(strategy: ar.Strategy) -> Any:
        training = Training(strategy)
        async with ar.CheckpointManager(tmp_path / f"{rank_of(strategy)}") as manager:
            with pytest.raises(CheckpointNotCommittedError) as raised:
                await manager.save(2, training.state)
            return str(raised.value)

    first, second = await outcomes(strategies(2, 1), [program] * 2)

    assert "Unable to allocate" in first
    assert second == "Worker 0 could not save step 2: MemoryError: Unable to allocate"


@pytest.mark.parametrize("how", ["is missing", "is cut short"])
async def test_parts_that_the_first_worker_does_not_see_are_not_committed(
    tmp_path: Path, how: str
) -> None:
    async def program(strategy: ar.Strategy) -> Any:
        training = Training(strategy)
        storage: Any = FaultyStorage(LocalStorage(tmp_path), OSError, None)
        async with ar.CheckpointManager(storage) as manager:
            await manager.save(1, training.state)
            if rank_of(strategy) == 1:
                storage.sync = lambda folder: lose_file(tmp_path / folder)
            with pytest.raises(CheckpointNotCommittedError) as raised:
                await manager.save(2, training.state)
        return str(raised.value)

    def lose_file(folder: Path) -> None:
        [path] = folder.glob("data-*-w001-*")
        if how == "is missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1])

    first, second = await on_workers(2, 1, program)

    assert "w001" in first
    assert second.startswith("Worker 0 could not save step 2: ")
    assert ar.CheckpointManager(tmp_path).steps() == (1,)


async def test_a_worker_lost_while_the_manifest_is_written_is_said_to_leave_it_open(
    tmp_path: Path,
) -> None:
    async def program(strategy: ar.Strategy) -> Any:
        training = Training(strategy)
        storage: Any = FaultyStorage(LocalStorage(tmp_path), OSError, None)
        loop, replace = asyncio.get_running_loop(), storage.replace

        def replace_and_lose(path: str, data: bytes) -> None:
            replace(path, data)
            loop.call_soon_threadsafe(lose, strategy)

        storage.replace = replace_and_lose
        async with ar.CheckpointManager(storage) as manager:
            with pytest.raises(WorkerLostError) as raised:
                await manager.save(2, training.state)
        return raised.value.__notes__

    for notes in await outcomes(strategies(2, 1), [program] * 2):
        assert any("Step 2 may have been saved in" in note for note in notes)
    assert ar.CheckpointManager(tmp_path).steps() == (2,)


@pytest.mark.parametrize("call", ["save", "save of parts", "restore"])
async def test_what_went_wrong_in_the_background_is_raised_on_all_workers(
    tmp_path: Path, call: str
) -> None:
    async def program(strategy: Any) -> Any:
        training = Training(strategy, num_large=5)
        whole = {"hits": training.hits, "epoch": 0}
        storage: Any = LocalStorage(tmp_path)
        if rank_of(strategy) == 0:
            storage = FaultyStorage(storage, lambda: OSError("no room"), None)
        async with ar.CheckpointManager(storage) as manager:
            await manager.save(1, whole)
            if rank_of(strategy) == 0:
                storage.at = len(storage.calls)
            await manager.save(2, whole, wait=False)
            state = training.state if call == "save of parts" else whole
            again = manager.restore(whole) if call == "restore" else manager.save(3, state)
            with pytest.raises(CheckpointNotCommittedError) as raised:
                await again
            storage.at = None
            assert await manager.restore(whole) == 1
            await manager.save(4, training.state)
        return str(raised.value)

    first, second = await outcomes(strategies(2, 1), [program] * 2)

    assert first.startswith("Step 2 was not saved")
    what = "restore" if call == "restore" else "save of step 3"
    assert second.startswith(f"Worker 0 could not begin a {what}: CheckpointNotCommittedError: ")
    assert "Step 2 was not saved" in second
    assert ar.CheckpointManager(tmp_path).steps() == (1, 4)


@pytest.mark.parametrize("retry", [None, 5.0], ids=["once", "again"])
async def test_a_worker_that_was_taken_for_lost_removes_no_file_of_a_later_save(
    tmp_path: Path, retry: float | None
) -> None:
    saved, num_saved = asyncio.Event(), 0

    async def program(strategy: Any) -> Any:
        nonlocal num_saved
        training = Training(strategy)
        storage: Any = LocalStorage(tmp_path)
        if rank_of(strategy) == 1:
            gate = Gated(storage)
            async with ar.CheckpointManager(gate, retry=retry) as manager:
                saving = asyncio.ensure_future(manager.save(2, training.state))
                await gate.came.wait()
                lose(strategy)
                await saved.wait()
                gate.may_go.set()
                with pytest.raises((CheckpointError, WorkerLostError)):
                    await saving
            return
        async with ar.CheckpointManager(storage) as manager:
            with pytest.raises(WorkerLostError):
                await manager.save(2, training.state)
        await strategy.shrink()
        async with ar.CheckpointManager(storage) as manager:
            await manager.save(2, Training(strategy, suffix="-2").state)
        num_saved += 1
        if num_saved == 2:
            saved.set()

    assert await outcomes(strategies(3, 1), [program] * 3) == [None] * 3

    assert len(names_of(tmp_path)) == 3
    await ar.CheckpointManager(tmp_path).verify(2)


@pytest.mark.xslow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("is_late", [False, True])
async def test_whatever_call_fails_all_workers_have_the_old_step_or_the_new_one(
    victim: int, is_late: bool
) -> None:
    async def once(at: int) -> bool:
        storage = SimulatedStorage(SimulatedFiles())
        faulty = FaultyStorage(storage, lambda: OSError("wrong"), at, is_late=is_late)

        async def program(strategy: ar.Strategy) -> Any:
            training = Training(strategy, num_large=5)
            async with ar.CheckpointManager(storage) as manager:
                await manager.save(1, training.state)
            own: Any = faulty if rank_of(strategy) == victim else storage
            error = None
            async with ar.CheckpointManager(own) as manager:
                try:
                    await manager.save(2, training.state)
                except (CheckpointNotCommittedError, CheckpointUncertainError) as raised:
                    error = raised
            async with ar.CheckpointManager(storage) as manager:
                latest = manager.latest()
                await manager.save(3, training.state)
                await manager.verify(3)
            return error, latest

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # an old step was not removed
            (first, latest), (second, same) = await on_workers(2, 1, program)
        assert latest == same
        assert type(first) is type(second)
        assert latest == (1 if isinstance(first, CheckpointNotCommittedError) else 2)
        return faulty.was_met

    at = 0
    while await once(at):
        at += 1
    assert at >= (12 if victim == 0 else 6)


async def test_a_directory_that_is_not_shared_is_written_by_the_first_worker(
    tmp_path: Path,
) -> None:
    async def save(strategy: ar.Strategy) -> None:
        training = Training(strategy)
        await training.train(0, 2)
        async with ar.CheckpointManager(tmp_path / str(rank_of(strategy))) as manager:
            await manager.save(2, training.state)

    async def go_on(strategy: ar.Strategy) -> list[bytes]:
        training = Training(strategy)
        await ar.CheckpointManager(tmp_path / "0").restore(training.state)
        return [(await training.table.read()).tobytes(), training.large.value.tobytes()]

    said = r"Worker 1, 2 does not see .* as worker 0 does, so worker 0 has written"
    with pytest.warns(RuntimeWarning, match=said) as warned:
        await on_workers(3, 1, save)

    assert len([each for each in warned if "does not see" in str(each.message)]) == 1
    assert names_of(tmp_path / "0") == ["data-0001-000.safetensors", "manifest.json"]
    assert not (tmp_path / "1").exists()
    [first, _] = await on_workers(2, 1, go_on)
    assert first == (await save_elsewhere(tmp_path))[:2]


async def save_elsewhere(tmp_path: Path) -> list[bytes]:
    return (await on_workers(3, 1, lambda strategy: save_two_steps(strategy, tmp_path / "x")))[0]


async def test_an_object_store(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}"

    async def go_on(strategy: ar.Strategy) -> list[bytes]:
        training = Training(strategy)
        await ar.CheckpointManager(url).restore(training.state)
        return [(await training.table.read()).tobytes(), training.large.value.tobytes()]

    bits = (await on_workers(3, 1, lambda strategy: save_two_steps(strategy, url)))[0]
    await ar.CheckpointManager(url).verify(2)

    assert len(ar.CheckpointManager(url).describe(2).files) == 3
    assert await on_workers(2, 1, go_on) == [bits[:2]] * 2


async def test_calls_are_made_again_on_every_worker(tmp_path: Path) -> None:
    async def program(strategy: ar.Strategy) -> int:
        training = Training(strategy)
        own: Any = LocalStorage(tmp_path)
        if rank_of(strategy) == 1:
            own = FaultyStorage(own, lambda: TimeoutError("slow"), 4)
        async with ar.CheckpointManager(own, retry=lambda *_: 0.0) as manager:
            await manager.save(1, training.state)
            await ar.CheckpointManager(tmp_path).verify(1)
            return manager.statistics().num_retried

    with pytest.warns(RuntimeWarning, match="1 failed calls of .* were made again in a save"):
        assert await on_workers(2, 1, program) == [0, 1]


# ---- manifests that cannot be --------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        [[0, 12], [12, 24]], [[0, 12], [12, 24], [24, 34]], [[0, 12], [13, 24], [24, 33]],
        [[1, 12], [12, 24], [24, 33]], [[0, 24], [24, 12], [12, 33]], [[0, 12], [12, 24], [24]],
        [[0, 33], [33, 33], [33, 33]], [[0, 12], [12, 20], [20, 33]], "x", [[0, 12], 5, [24, 33]],
    ],
)  # fmt: skip
async def test_parts_that_cannot_be_are_damage(tmp_path: Path, parts: Any) -> None:
    from tests.checkpoint.test_damage import forge

    await on_workers(3, 1, lambda strategy: save_two_steps(strategy, tmp_path))

    def change(body: Any) -> None:
        body["entries"]["model/table"]["parts"] = parts

    forge(tmp_path, change)
    with pytest.raises(CheckpointError, match="damaged"):
        await ar.CheckpointManager(tmp_path).read(2, "model/table")
