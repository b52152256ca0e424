"""Jobs of the training service when the machine lacks something, and when clients hurry."""

import asyncio
import errno
import json
import os
import re
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from aioreplica.checkpoint import LocalStorage, _preemption
from aioreplica.errors import CheckpointError
from examples.training_service import jobs as jobs_module
from examples.training_service import programs as programs_module
from examples.training_service.faults import RefusedError, describe, is_no_room, is_passing
from examples.training_service.jobs import MAX_ATTEMPTS, MAX_STARTS, Job, Jobs
from examples.training_service.programs import PROGRAMS, Program
from examples.training_service.store import Store, as_os_error
from examples.training_service.training import Training
from examples.training_service.web import follow, make_app

pytestmark = pytest.mark.slow

SETTINGS = {"epochs": 2, "points": 20, "batch_size": 16, "replicas": 1, "save_every": 2}
BODY = json.dumps({"program": "spirals", "settings": SETTINGS}).encode()


class Disk:
    """The functions of `os` for checkpoints; some fail while `failing` says so."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}  # error numbers, by function
        self.num_failures = 0
        self.limit = 10**9
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if name in self.failing and self.num_failures < self.limit:
                self.num_failures += 1
                raise OSError(self.failing[name], os.strerror(self.failing[name]))
        return getattr(os, name)


class WatchedStore:
    """A table that can be full, and that waits before it writes the end of a job."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_full = False
        self.is_writing = asyncio.Event()
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def add(self, program: str, settings: dict[str, Any]) -> dict[str, Any]:
        self._check()
        return await self._store.add(program, settings)

    async def update(self, job_id: int, **values: Any) -> None:
        self._check()
        if values.get("status") in {"done", "failed", "cancelled"}:
            self.is_writing.set()
            await self.may_write.wait()
        await self._store.update(job_id, **values)

    async def all(self) -> list[dict[str, Any]]:
        return await self._store.all()

    async def losses(self, job_id: int) -> bytes:
        return await self._store.losses(job_id)

    def _check(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")


class Service:
    """Jobs in this process, on a disk and with a table that do as they are told."""

    def __init__(
        self, folder: Path, store: Store, tasks: asyncio.TaskGroup, **options: Any
    ) -> None:
        self.disk = Disk()
        self.store = WatchedStore(store)
        self.jobs = Jobs(
            folder,
            self.store,  # type: ignore[arg-type]
            tasks,
            longest_pause_s=0,
            storage=lambda path: LocalStorage(path, calls=self.disk),
            **options,
        )

    async def status(self, job: Job) -> str:
        """Return what the table says."""
        return str(next(row["status"] for row in await self.store.all() if row["id"] == job.id))


@asynccontextmanager
async def service(folder: Path, **options: Any) -> AsyncIterator[Service]:
    async with Store(folder / "jobs.sqlite") as store, asyncio.TaskGroup() as tasks:
        found = Service(folder, store, tasks, **options)
        try:
            yield found
        finally:
            found.jobs.close()


async def until(job: Job, condition: Callable[[], bool]) -> None:
    while True:
        changed = job.changed
        if condition():
            return
        await changed.wait()


async def ended(job: Job) -> Job:
    await until(job, lambda: job.is_over)
    return job


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the job, if nothing happens."""

    async def train() -> str:
        async with service(tmp_path_factory.mktemp("quiet")) as quiet:
            return (await ended(await quiet.jobs.submit(BODY))).digest

    return asyncio.run(train())


# ---- a machine that lacks something ----------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["write", "fsync", "mkdir"])
async def test_a_full_disk_delays_a_job_and_new_ones_are_refused(
    tmp_path: Path, digest: str, call: str
) -> None:
    async with service(tmp_path) as full:
        full.disk.failing = {call: errno.ENOSPC}
        job = await full.jobs.submit(BODY)
        await until(job, lambda: job.trouble is not None and 0 < job.step == job.num_steps)

        with pytest.raises(RefusedError, match="No space left") as refused:
            await full.jobs.submit(BODY)
        warning = job.describe()["warning"]
        full.disk.failing = {}
        await ended(job)

        assert refused.value.status == 507
        assert "No space left" in warning
        assert (job.status, job.digest, job.describe()["warning"]) == ("done", digest, "")
        assert (await ended(await full.jobs.submit(BODY))).status == "done"


@pytest.mark.asyncio
async def test_a_full_table_is_written_when_there_is_room(tmp_path: Path, digest: str) -> None:
    async with service(tmp_path) as full:
        job = await full.jobs.submit(BODY)
        full.store.is_full = True
        await ended(job)
        curve = await full.jobs.losses(job)

        with pytest.raises(RefusedError, match="table cannot be written") as refused:
            await full.jobs.submit(BODY)
        full.store.is_full = False
        assert await full.jobs.write_out()

        assert refused.value.status == 507
        assert (job.status, job.digest) == ("done", digest)
        assert await full.status(job) == "done"
        assert len(curve) == job.num_steps
        assert (await full.jobs.losses(job)).tolist() == curve.tolist()
        assert (await ended(await full.jobs.submit(BODY))).status == "done"


@pytest.mark.asyncio
async def test_a_table_that_is_full_to_the_end_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with service(tmp_path) as full:
        job = await full.jobs.submit(BODY)
        full.store.is_full = True
        await ended(job)

    assert f"jobs [{job.id}] were not written down: [Errno 28]" in capsys.readouterr().err


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["listdir", "open"])
async def test_a_job_begins_again_when_files_were_lacking(
    tmp_path: Path, digest: str, call: str
) -> None:
    async with service(tmp_path) as busy:
        busy.disk.failing, busy.disk.limit = {call: errno.EMFILE}, 2

        job = await ended(await busy.jobs.submit(BODY))

        assert busy.disk.num_failures == 2
        assert (job.status, job.digest) == ("done", digest)


@pytest.mark.asyncio
async def test_a_job_is_begun_again_a_bounded_number_of_times(tmp_path: Path) -> None:
    async with service(tmp_path) as busy:
        busy.disk.failing = {"listdir": errno.EMFILE}
        (tmp_path / "jobs" / "1").mkdir(parents=True)

        job = await ended(await busy.jobs.submit(BODY))

        assert busy.disk.num_failures == MAX_ATTEMPTS
        assert job.status == "failed"
        assert "Too many open files" in job.error


@pytest.mark.asyncio
async def test_a_folder_that_was_removed_takes_no_jobs(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    async with service(folder) as orphan:
        shutil.rmtree(folder)

        with pytest.raises(RefusedError, match=r"jobs\.sqlite") as refused:
            await orphan.jobs.submit(BODY)

        assert refused.value.status == 503
        assert orphan.jobs.all() == []


# ---- jobs that hang --------------------------------------------------------------------------

HANGING = BODY.replace(b'"epochs": 2', b'"epochs": 2, "seed": 666')


class Hang:
    """A call that does not end until the test does."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> None:
        self.started.set()
        self.may_end.wait()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    """Make the loss of one kind of job hang, for good: no time would be enough."""
    found, loss = Hang(), Training.loss

    def hanging_loss(training: Training, *args: Any) -> Any:
        if training.settings.seed == 666:
            found()
        return loss(training, *args)

    monkeypatch.setattr(Training, "loss", hanging_loss)
    monkeypatch.setattr(_preemption, "UNWIND_S", 0.0)
    yield found
    found.may_end.set()


@pytest.mark.asyncio
async def test_a_job_that_hangs_is_cancelled_and_its_devices_go_to_others(
    tmp_path: Path, digest: str, hang: Hang
) -> None:
    async with service(tmp_path, grace_s=0.0) as steady:
        job = await steady.jobs.submit(HANGING)
        good = await steady.jobs.submit(BODY)
        await asyncio.to_thread(hang.started.wait)

        assert await steady.jobs.cancel(job)

        assert job.status == await steady.status(job) == "cancelled"
        assert "a step did not end within" in job.error
        assert "on cpu:0" in job.error
        await ended(good)
        assert (good.status, good.digest) == ("done", digest)


@pytest.mark.asyncio
async def test_a_step_that_takes_too_long_fails_its_job(tmp_path: Path, hang: Hang) -> None:
    async with service(tmp_path, grace_s=0.0, step_limit_s=0.0) as strict:
        job = await ended(await strict.jobs.submit(HANGING))

    assert job.status == "failed"
    assert "Step 1 took more than 0.0 s" in job.error
    assert "on cpu:0" in job.error


@pytest.mark.asyncio
async def test_a_job_whose_data_hang_is_left_behind(
    tmp_path: Path, digest: str, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    spirals = PROGRAMS["spirals"]

    def load(settings: Any) -> Any:
        if settings.seed == 666:
            hang()
        return spirals.load(settings)

    monkeypatch.setitem(PROGRAMS, "spirals", Program(spirals.settings, load, spirals.sizes))
    async with service(tmp_path, grace_s=0.0, num_running=1) as steady:
        job = await steady.jobs.submit(HANGING)
        await asyncio.to_thread(hang.started.wait)
        with monkeypatch.context() as patch:
            patch.setattr(jobs_module, "UNWIND_S", 0.0)
            assert await steady.jobs.cancel(job)
        good = await ended(await steady.jobs.submit(BODY))
        assert (job.status, "left behind" in job.error) == ("cancelled", True)
        with pytest.raises(RefusedError, match="was left behind, and what hangs in it") as refused:
            await steady.jobs.start_again(job)
        hang.may_end.set()
        assert job.work is not None
        await asyncio.wait([job.work])
        assert (job.status, "left behind" in job.error) == ("cancelled", True)
        assert await steady.jobs.start_again(job)
        await ended(job)

    assert refused.value.status == 503
    assert (good.status, good.digest) == ("done", digest)
    assert (job.status, job.error) == ("done", "")


@pytest.mark.asyncio
async def test_a_job_is_cancelled_as_soon_as_it_is_resumed(tmp_path: Path) -> None:
    async with service(tmp_path) as steady:
        job = await steady.jobs.submit(BODY)
        await steady.jobs.cancel(job)

        told = await asyncio.gather(steady.jobs.start_again(job), steady.jobs.cancel(job))

        assert told == [True, True]
        assert (job.status, job.error) == ("cancelled", "")
        assert await steady.status(job) == "cancelled"


def test_errors_are_told_apart_and_told_in_full() -> None:
    full, files = OSError(errno.ENOSPC, "No room"), OSError(errno.EMFILE, "No files")
    wrapped = CheckpointError("Step 3 was not saved.")
    wrapped.__cause__ = full
    both = ExceptionGroup("2 of 2 replicas failed", [files, OSError(errno.EMFILE, "No files")])
    mixed = ExceptionGroup("2 of 2 replicas failed", [full, ValueError("bad")])

    assert [is_passing(each) for each in (full, files, wrapped, both, mixed)] == [True] * 4 + [
        False
    ]
    assert [is_no_room(each) for each in (full, files, wrapped)] == [True, False, True]
    assert describe(both) == f"OSError: {files}"
    assert describe(mixed) == f"OSError: {full}; ValueError: bad"


def test_a_full_table_is_a_full_disk(tmp_path: Path) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("PRAGMA max_page_count = 2")
        connection.execute("CREATE TABLE t (x)")
        with pytest.raises(sqlite3.OperationalError) as caught:
            connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
        with pytest.raises(sqlite3.OperationalError) as other:
            connection.execute("INSERT INTO u VALUES (1)")

    assert as_os_error(caught.value, tmp_path).errno == errno.ENOSPC
    assert as_os_error(other.value, tmp_path).errno == errno.EIO


# ---- jobs that end the process, and that go on -------------------------------------------------


@pytest.mark.asyncio
async def test_a_job_that_ends_the_process_is_not_begun_a_third_time(
    tmp_path: Path, digest: str
) -> None:
    async with Store(tmp_path / "jobs.sqlite") as store:
        for starts in (MAX_STARTS - 1, MAX_STARTS):
            row = await store.add("spirals", json.loads(BODY)["settings"])
            await store.update(row["id"], status="running", starts=starts)

    async with service(tmp_path) as again:
        await again.jobs.resume()
        first, poison = again.jobs.all()
        await ended(first)

        assert (first.status, first.digest) == ("done", digest)
        assert poison.status == await again.status(poison) == "failed"
        assert f"ended {MAX_STARTS} times while it ran" in poison.error
        assert await again.jobs.start_again(poison)
        await ended(poison)
        assert (poison.status, poison.digest) == ("done", digest)


@pytest.mark.asyncio
async def test_beginnings_count_until_a_checkpoint_is_saved_or_the_service_ends(
    tmp_path: Path,
) -> None:
    async def starts() -> int:
        async with Store(tmp_path / "jobs.sqlite") as store:
            [row] = await store.all()
        return int(row["starts"])

    long = BODY.replace(b'"epochs": 2', b'"epochs": 1000')
    async with service(tmp_path) as first:
        job = await first.jobs.submit(long.replace(b'"save_every": 2', b'"save_every": 10000'))
        await until(job, lambda: job.step > 8)
        assert [row["starts"] for row in await first.store.all()] == [1]
        assert first.jobs.num_saved == 0
    assert await starts() == 0

    async with service(tmp_path / "other") as saving:
        job = await saving.jobs.submit(long)
        await until(job, lambda: job.step > 8)
        assert job.starts == 0
        assert saving.jobs.num_saved > 1


@pytest.mark.asyncio
async def test_a_failed_job_goes_on_at_its_last_checkpoint(tmp_path: Path) -> None:
    async with service(tmp_path) as broken:
        job = await broken.jobs.submit(BODY.replace(b'"epochs": 2', b'"epochs": 1000'))
        await until(job, lambda: broken.jobs.num_saved > 1)
        broken.disk.failing = {"fsync": errno.EIO}
        await ended(job)
        failed, error = await broken.status(job), job.error
        broken.disk.failing = {}

        answers = [broken.jobs.start_again(job), broken.jobs.start_again(job)]
        assert await asyncio.gather(*answers) == [True, False]
        await until(job, lambda: job.resumed_from is not None)

        assert failed == "failed"
        assert "Input/output error" in error
        assert job.resumed_from is not None
        assert job.resumed_from >= 2
        assert (job.status, job.error, await broken.status(job)) == ("running", "", "running")
        assert await broken.jobs.cancel(job)


@pytest.mark.asyncio
async def test_a_long_curve_has_means_and_the_same_job(
    tmp_path: Path, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service(tmp_path / "full") as full:
        job = await ended(await full.jobs.submit(BODY))
        losses = (await full.jobs.losses(job)).tolist()
    monkeypatch.setattr(programs_module, "MAX_POINTS", 3)

    async with service(tmp_path / "thin") as thin:
        job = await ended(await thin.jobs.submit(BODY))
        means = (await thin.jobs.losses(job)).tolist()
        events = "".join([text async for text in follow(thin.jobs, job, 0)])
        rest = "".join([text async for text in follow(thin.jobs, job, 3)])

    assert job.digest == digest
    assert job.step == len(losses) == 8
    assert means == pytest.approx([np.mean(losses[i : i + 3]) for i in (0, 3, 6)], rel=1e-12)
    assert re.findall(r"id: (\d+)", events) == ["3", "6", "8"]
    assert re.findall(r"id: (\d+)", rest) == ["6", "8"]


@pytest.mark.asyncio
async def test_health_is_told_over_http(tmp_path: Path) -> None:
    json_type = {"content-type": "application/json"}
    async with service(tmp_path) as small:
        app = httpx.ASGITransport(make_app(small.jobs, hosts=["service"]))
        async with httpx.AsyncClient(transport=app, base_url="http://service") as client:
            good = [await client.get(path) for path in ("/healthz", "/readyz")]
            small.disk.failing = {"write": errno.ENOSPC}
            job = await small.jobs.submit(BODY)
            await until(job, lambda: job.trouble is not None)
            bad = [await client.get(path) for path in ("/healthz", "/readyz", "/metrics")]
            again = [
                await client.post("/jobs/1/resume"),
                await client.post("/jobs/1/resume", headers=json_type),
            ]
            await small.jobs.cancel(job)
            small.disk.failing = {}
            again.append(await client.post("/jobs/1/resume", headers=json_type))
            await ended(job)
            text = (await client.get("/metrics")).text

    assert [answer.status_code for answer in good] == [200, 200]
    assert [answer.status_code for answer in bad] == [200, 503, 200]
    assert "No space left" in bad[1].json()["error"]
    assert "training_service_jobs_in_trouble 1\n" in bad[2].text
    assert [answer.status_code for answer in again] == [415, 409, 200]
    assert 'training_service_jobs{status="done"} 1\n' in text
    assert "training_service_checkpoint_failures_total 0" not in text
    assert not re.search("training_service_last_checkpoint_timestamp_seconds 0", text)


# ---- clients that hurry ----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_job_that_is_cancelled_while_its_end_is_written_is_done(tmp_path: Path) -> None:
    async with service(tmp_path) as slow:
        slow.store.may_write.clear()
        job = await slow.jobs.submit(BODY)
        await slow.store.is_writing.wait()

        answers = [asyncio.ensure_future(slow.jobs.cancel(job)) for _ in range(2)]
        await asyncio.sleep(0)
        slow.store.may_write.set()

        assert await asyncio.gather(*answers) == [False, False]
        assert job.status == await slow.status(job) == "done"


@pytest.mark.asyncio
async def test_a_job_is_cancelled_by_the_first_of_two_requests(tmp_path: Path) -> None:
    async with service(tmp_path, num_running=1) as slow:
        job = await slow.jobs.submit(BODY)
        slow.store.may_write.clear()
        first = asyncio.ensure_future(slow.jobs.cancel(job))
        await slow.store.is_writing.wait()
        second = asyncio.ensure_future(slow.jobs.cancel(job))
        await asyncio.sleep(0)
        slow.store.may_write.set()

        assert await asyncio.gather(first, second) == [True, True]
        assert job.status == await slow.status(job) == "cancelled"


@pytest.mark.asyncio
async def test_a_job_that_waits_is_cancelled(tmp_path: Path) -> None:
    async with service(tmp_path, num_running=1) as one:
        long = await one.jobs.submit(BODY.replace(b'"epochs": 2', b'"epochs": 1000'))
        job = await one.jobs.submit(BODY)

        assert await one.jobs.cancel(job)
        assert await one.jobs.cancel(long)
        assert (await one.status(job), await one.status(long)) == ("cancelled", "cancelled")


@pytest.mark.asyncio
async def test_a_job_that_cannot_be_saved_is_cancelled_and_says_so(tmp_path: Path) -> None:
    async with service(tmp_path) as full:
        full.disk.failing = {"write": errno.ENOSPC}
        job = await full.jobs.submit(BODY.replace(b'"epochs": 2', b'"epochs": 1000'))
        await until(job, lambda: job.trouble is not None)

        assert await full.jobs.cancel(job)
        assert job.status == await full.status(job) == "cancelled"
        assert "was not saved" in job.error


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_refusals_say_when_to_ask_again(tmp_path: Path) -> None:
    async with service(tmp_path, max_unfinished=1) as small:
        app = httpx.ASGITransport(make_app(small.jobs, hosts=["service"]))
        async with httpx.AsyncClient(transport=app, base_url="http://service") as client:
            small.disk.failing = {"write": errno.ENOSPC}
            answers = [
                await client.post(
                    "/jobs", content=BODY, headers={"content-type": "application/json"}
                )
                for _ in range(2)
            ]
            small.store.is_full, small.disk.failing = True, {}
            [job] = small.jobs.all()
            await ended(job)
            answers.append(
                await client.post(
                    "/jobs", content=BODY, headers={"content-type": "application/json"}
                )
            )

    assert [answer.status_code for answer in answers] == [201, 429, 507]
    assert all(int(answer.headers["retry-after"]) > 0 for answer in answers[1:])
    assert "1 jobs are not over" in answers[1].json()["error"]
