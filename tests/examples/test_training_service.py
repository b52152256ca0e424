"""The training service: real processes, asked by a real client, stopped in the middle of jobs."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import aioreplica as ar
from aioreplica.checkpoint import EXIT_CODE
from tests.examples.training_service import Service, serving

pytestmark = pytest.mark.xslow

ROOT = Path(__file__).resolve().parents[2]
JOBS = (
    {"program": "digits", "settings": {"epochs": 12, "save_every": 10}},
    {"program": "spirals", "settings": {"epochs": 35, "save_every": 10, "seed": 1}},
    {"program": "spirals", "settings": {"epochs": 5, "replicas": 1, "points": 50}},
)
DEADLINE_S = 300.0


@dataclass
class Watch:
    """What a client has seen of a job."""

    losses: dict[int, float] = field(default_factory=dict)
    end: dict[str, Any] | None = None

    async def follow(self, client: httpx.AsyncClient, job: int, enough: int | None = None) -> None:
        """Read events behind the last one seen: to the end, to a number of steps, or to a crash."""
        last = str(max(self.losses, default=0))
        event = ""
        try:
            async with client.stream(
                "GET", f"/jobs/{job}/events", headers={"last-event-id": last}
            ) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                async for line in answer.aiter_lines():
                    name, _, text = line.partition(": ")
                    if name == "event":
                        event = text
                    elif name == "data" and event == "end":
                        self.end = json.loads(text)
                    elif name == "data":
                        news = json.loads(text)
                        assert news["step"] not in self.losses
                        self.losses[news["step"]] = news["loss"]
                        if news["step"] == enough:
                            return
        except httpx.TransportError:
            pass


async def submit(client: httpx.AsyncClient, job: Any) -> int:
    answer = await client.post("/jobs", json=job)
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"/jobs/{answer.json()['id']}"
    return int(answer.json()["id"])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service for every test that does not stop it."""
    with serving(tmp_path_factory.mktemp("service")) as service:
        yield service


@asynccontextmanager
async def asking(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with asyncio.timeout(DEADLINE_S), service.client() as client:
        yield client


@pytest.fixture(scope="module")
def uninterrupted(service: Service) -> list[Watch]:
    async def train() -> list[Watch]:
        watches = [Watch() for _ in JOBS]
        async with asking(service) as client:
            ids = [await submit(client, job) for job in JOBS]
            pairs = zip(watches, ids, strict=True)
            await asyncio.gather(*(watch.follow(client, each) for watch, each in pairs))
        return watches

    return asyncio.run(train())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_every_job_ends_as_if_nothing_had_happened(
    tmp_path: Path, uninterrupted: list[Watch], how: signal.Signals
) -> None:
    watches = {number: Watch() for number in (1, 2, 3)}

    async def begin(service: Service) -> None:
        """Stop it once both running jobs have gone past two saves; the third job waits."""
        async with asking(service) as client:
            assert [await submit(client, job) for job in JOBS] == [1, 2, 3]
            await asyncio.gather(*(watches[i].follow(client, i, enough=40) for i in (1, 2)))
            rest = [asyncio.create_task(watches[i].follow(client, i)) for i in (1, 2, 3)]
            service.process.send_signal(how)
            await asyncio.gather(*rest)

    async def finish(service: Service) -> None:
        async with asking(service) as client:
            assert [job["id"] for job in (await client.get("/jobs")).json()] == [1, 2, 3]
            await asyncio.gather(*(watches[i].follow(client, i) for i in (1, 2, 3)))

    with serving(tmp_path, "--num-running", "2") as service:
        asyncio.run(begin(service))
        code = service.process.wait(timeout=60)
    saved = [ar.CheckpointManager(tmp_path / "jobs" / str(i)).latest() or 0 for i in (1, 2)]
    seen = [len(watches[i].losses) for i in (1, 2)]
    assert all(watch.end is None for watch in watches.values())
    with serving(tmp_path, "--num-running", "2") as service:
        asyncio.run(finish(service))

    if how == signal.SIGTERM:
        assert code == EXIT_CODE
        assert all(step >= told for step, told in zip(saved, seen, strict=True))
    else:
        assert code == -signal.SIGKILL
        assert min(saved) >= 10
    for number, expected in enumerate(uninterrupted, start=1):
        watch = watches[number]
        assert expected.end is not None
        assert watch.end is not None
        assert watch.end["status"] == "done"
        assert watch.end["resumed_from"] == {1: saved[0], 2: saved[1]}.get(number)
        assert sorted(watch.losses) == list(range(1, watch.end["num_steps"] + 1))
        assert watch.losses == expected.losses
        assert watch.end["digest"] == expected.end["digest"]


def test_jobs_of_other_settings_become_other_models(uninterrupted: list[Watch]) -> None:
    digests = {watch.end["digest"] for watch in uninterrupted if watch.end is not None}

    assert len(digests) == len(JOBS)
    for watch in uninterrupted:
        assert watch.losses[max(watch.losses)] < watch.losses[1]


# ---- what a client may ask -----------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_job_is_cancelled_once_and_keeps_its_curve(service: Service) -> None:
    async with asking(service) as client:
        job = await submit(client, {"program": "spirals", "settings": {"epochs": 1000}})
        watch = Watch()
        await watch.follow(client, job, enough=5)

        answer = await client.delete(f"/jobs/{job}")
        again = await client.delete(f"/jobs/{job}")
        await watch.follow(client, job)
        curve = await client.get(f"/jobs/{job}/loss.png")

    assert answer.status_code == 200
    assert answer.json()["status"] == "cancelled"
    assert again.status_code == 409
    assert watch.end is not None
    assert watch.end["status"] == "cancelled"
    assert len(watch.losses) == watch.end["step"] < watch.end["num_steps"]
    assert curve.headers["content-type"] == "image/png"
    assert curve.content.startswith(b"\x89PNG")
    assert ar.CheckpointManager(service.data / "jobs" / str(job)).latest() == watch.end["step"]


@pytest.mark.asyncio
async def test_a_job_that_fails_says_why_and_hurts_no_other(service: Service) -> None:
    async with asking(service) as client:
        first = await submit(client, JOBS[2])
        (service.data / "jobs").mkdir(exist_ok=True)  # the first job may not have got so far
        (service.data / "jobs" / str(first + 1)).write_text("in the way of its checkpoints")
        failed, watch, other = await submit(client, JOBS[2]), Watch(), Watch()
        await asyncio.gather(watch.follow(client, failed), other.follow(client, first))

    assert failed == first + 1
    assert watch.end is not None
    assert watch.end["status"] == "failed"
    assert str(service.data / "jobs" / str(failed)) in watch.end["error"]
    assert other.end is not None
    assert other.end["status"] == "done"


@pytest.mark.asyncio
async def test_bad_requests_are_answered_and_change_nothing(service: Service) -> None:
    json_type = {"content-type": "application/json"}
    async with asking(service) as client:
        before = (await client.get("/jobs")).json()
        answers = [
            await client.get("/jobs/999"),
            await client.delete("/jobs/999"),
            await client.get("/jobs/999/events"),
            await client.get("/jobs/../../etc/passwd"),
            await client.put("/jobs"),
            await client.get("/jobs", headers={"host": "example.com"}),
            await client.post("/jobs", content=b'{"program": "digits"}'),
            await client.post("/jobs", content=b" " * 100_000, headers=json_type),
            await client.post("/jobs", content=b"{", headers=json_type),
        ]
        job = await submit(client, JOBS[2])
        answers += [
            await client.get(f"/jobs/{job}/events", headers={"last-event-id": "-1"}),
        ]
        after = (await client.get("/jobs")).json()

    codes = [404, 404, 404, 404, 405, 400, 415, 413, 422, 400]
    assert [answer.status_code for answer in answers] == codes
    assert [each["id"] for each in after] == [*(each["id"] for each in before), job]


@pytest.mark.asyncio
async def test_settings_are_answered_with_every_reason(service: Service) -> None:
    settings = {"epochs": 0, "learning_rate": "fast", "path": "/etc", "seed": 1.5}
    async with asking(service) as client:
        answer = await client.post("/jobs", json={"program": "digits", "settings": settings})
        too_many = await client.post(
            "/jobs", json={"program": "digits", "settings": {"replicas": 3}}
        )
        schema = (await client.get("/programs")).json()
        page = await client.get("/")

    assert answer.status_code == 422
    reasons = {each["where"]: each["what"] for each in answer.json()["reasons"]}
    assert set(reasons) == {f"settings.{name}" for name in settings}
    assert "got 0" in reasons["settings.epochs"]
    assert too_many.json()["reasons"] == [
        {"where": "settings.replicas", "what": "There are 2 devices, got 3"}
    ]
    assert schema["digits"]["settings"]["properties"]["epochs"]["maximum"] == 1000
    assert "EventSource" in page.text


def test_a_folder_belongs_to_one_service(service: Service) -> None:
    command = [sys.executable, "-m", "examples.training_service", "--port", "0"]

    done = subprocess.run(
        [*command, "--data", str(service.data)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=DEADLINE_S,
        check=False,
    )

    assert done.returncode == 1
    assert "Another service may have it" in done.stderr
    assert "Traceback" not in done.stderr
