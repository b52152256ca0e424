"""Jobs of the training service at its edges: begun again, refused, not written, unreadable."""

import asyncio
import errno
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.training_service import jobs as jobs_module
from examples.training_service.faults import RefusedError, is_passing
from examples.training_service.jobs import Job
from examples.training_service.sharing import DeviceSharing
from examples.training_service.store import Store
from examples.training_service.web import make_app
from tests.examples.test_training_service_jobs import BODY, Service, ended, service, until
from tests.integrations.asking import ask

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

LONG = BODY.replace(b'"epochs": 2', b'"epochs": 1000')
JSON = {"content-type": "application/json"}


def client_of(given: Service) -> httpx.AsyncClient:
    app = httpx.ASGITransport(make_app(given.jobs, hosts=["service"]))
    return httpx.AsyncClient(transport=app, base_url="http://service")


async def cancelled(given: Service, job: Job) -> Job:
    await until(job, lambda: job.step > 4)
    assert await given.jobs.cancel(job)
    return job


async def test_a_client_that_goes_while_it_sends_is_no_error(tmp_path: Path) -> None:
    async with service(tmp_path) as one:
        app = make_app(one.jobs, hosts=["service"])
        answer = await ask(app, "POST", "/jobs", b"{", goes=True, host="service")
        assert (answer.status, one.jobs.all()) == (499, [])


async def test_a_job_that_is_cancelled_before_it_goes_on_keeps_its_curve(tmp_path: Path) -> None:
    async with service(tmp_path, num_running=1) as one:
        job = await cancelled(one, await one.jobs.submit(LONG))
        curve = await one.jobs.losses(job)
        first = await one.jobs.submit(LONG)  # has the only place
        assert await one.jobs.start_again(job)

        assert await one.jobs.cancel(job)

        assert len(curve) == job.step > 4
        assert (await one.jobs.losses(job)).tolist() == curve.tolist()
        assert await one.jobs.cancel(first)


async def test_no_more_jobs_are_taken_at_once_than_may_be_unfinished(tmp_path: Path) -> None:
    async with service(tmp_path, max_unfinished=2) as small:
        found = await asyncio.gather(
            *[small.jobs.submit(LONG) for _ in range(5)], return_exceptions=True
        )

        refused = [each for each in found if isinstance(each, RefusedError)]
        assert [each.status for each in refused] == [429] * 3
        assert len(small.jobs.all()) == 2


async def test_a_job_of_more_devices_than_there_are_now_says_so(tmp_path: Path) -> None:
    settings = {**json.loads(BODY)["settings"], "replicas": 64}
    async with Store(tmp_path / "jobs.sqlite") as store:
        await store.add("spirals", settings)

    async with service(tmp_path) as smaller:
        await smaller.jobs.resume()
        [job] = smaller.jobs.all()
        await ended(job)

    assert job.status == "failed"
    assert "It has 64 replicas, and the service has" in job.error
    with pytest.raises(ValueError, match=r"has 2 devices now\. Start it with --devices 3"):
        DeviceSharing(["cpu:0", "cpu:1"]).join(3)


async def test_an_end_of_the_service_is_not_counted_although_a_job_cannot_be_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with service(tmp_path) as full:
        full.disk.failing = {"write": errno.ENOSPC}
        job = await full.jobs.submit(LONG)
        await until(job, lambda: job.trouble is not None)
        assert [row["starts"] for row in await full.store.all()] == [1]

    async with Store(tmp_path / "jobs.sqlite") as store:
        [row] = await store.all()
    assert (row["status"], row["starts"]) == ("running", 0)
    assert f"job {job.id} was not saved" in capsys.readouterr().err


async def test_what_a_crash_would_undo_is_accepted_and_not_yet_done(tmp_path: Path) -> None:
    async with service(tmp_path) as full, client_of(full) as client:
        job = await full.jobs.submit(LONG)
        await until(job, lambda: job.step > 4)
        full.store.is_full = True
        answers = [await client.delete("/jobs/1")]
        assert await full.status(job) == "running"
        full.store.is_full = False
        assert await full.jobs.write_out()
        answers.append(await client.post("/jobs/1/resume", headers=JSON))
        answers.append(await client.delete("/jobs/1"))

    assert [each.status_code for each in answers] == [202, 200, 200]


async def test_a_limit_that_comes_late_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a freeze of the process: its timers are due before a step has gone on."""
    monkeypatch.setattr(jobs_module, "MAX_LATE_S", -1.0)
    async with service(tmp_path, step_limit_s=0.0) as frozen:
        job = await ended(await frozen.jobs.submit(BODY))

    assert (job.status, job.error) == ("done", "")


async def test_a_table_that_cannot_be_read_is_said_to_clients(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    async with service(folder) as orphan, client_of(orphan) as client:
        await ended(await orphan.jobs.submit(BODY))
        shutil.rmtree(folder)

        curve = await client.get("/jobs/1/loss.png")
        events = await client.get("/jobs/1/events")

    assert curve.status_code == 503
    assert "jobs.sqlite" in curve.json()["error"]
    assert events.text == "retry: 1000\n\nretry: 30000\n\n"


@pytest.mark.parametrize("name", ["9" * 5000, "\u0663", "-1", "1.0", "x"])
async def test_what_is_no_number_of_a_job_is_not_found(tmp_path: Path, name: str) -> None:
    async with service(tmp_path) as empty, client_of(empty) as client:
        answer = await client.get(f"/jobs/{name}")

    assert answer.status_code == 404
    assert answer.json()["error"].startswith("There is no job ")


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (sqlite3.DatabaseError("malformed"), errno.EIO),
        (sqlite3.OperationalError("locked"), errno.EIO),
        (MemoryError("short"), errno.ENOMEM),
    ],
    ids=repr,
)
async def test_every_failure_of_the_table_is_one_of_the_system(
    tmp_path: Path, error: Exception, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def execute(self, *_: Any) -> Any:
            raise error

    async with Store(tmp_path / "jobs.sqlite") as store:
        with monkeypatch.context() as patch:
            patch.setattr(store, "_connection", Broken())
            with pytest.raises(OSError, match=str(error)) as caught:
                await store.all()

    assert caught.value.errno == number


async def test_a_lack_of_memory_and_of_threads_may_pass() -> None:
    wrapped = OSError("step 3 was not saved")
    wrapped.__cause__ = MemoryError()

    assert is_passing(MemoryError())
    assert is_passing(wrapped)
    assert is_passing(RuntimeError("can't start new thread"))
    assert not is_passing(RuntimeError("generator raised StopIteration"))
