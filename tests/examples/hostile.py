"""Attacks a training service for some minutes: `python -m tests.examples.hostile --seconds 600`.

Its disk is full now and then, ops of some jobs hang, others raise or end the process, and clients
send what is no request, leave in the middle and ask for too much. Good jobs beside all that have to
end in the same bits as before; memory, threads and descriptors of the service may not grow, every
answer has to be a documented one, and at SIGTERM the status is 75. Prints what was done, and exits
with 1 and the reasons if something was not so. `--seed S` attacks with the same random choices.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

from aioreplica.checkpoint import EXIT_CODE, LocalStorage
from benchmarks._full_disk import small_disk, take_all_space
from examples.training_service.jobs import Jobs
from examples.training_service.training import Training

ROOT = Path(__file__).resolve().parents[2]
DISK_BYTES = 64 * 1024 * 1024
HANGS, RAISES, KILLS = 666, 667, 668  # seeds of jobs whose loss does so
HANG_S = 8.0  # then the thread ends, so that what is left behind does not add up
SETTINGS = {"epochs": 15, "points": 30, "hidden": 8, "replicas": 1, "save_every": 5}
GOOD = tuple({**SETTINGS, "seed": seed, "replicas": 1 + seed % 2} for seed in (1, 2, 3))
MAX_GROWTH_MIB = 48
MAX_FILES = 20  # of two steps, with claims and a lock
DEADLINE_S = 240.0
JSON = {"content-type": "application/json"}
LATER = {429, 503, 507}


# ---- the service -----------------------------------------------------------------------------


class FlaggedDisk:
    """The functions of `os` for checkpoints; no write finds space while a file is there."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def __getattr__(self, name: str) -> Any:
        if name in {"write", "writev", "pwrite"} and self._flag.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return getattr(os, name)


def serve(data: Path) -> int:
    """Run the service with jobs that hang, raise or end the process."""
    from examples.training_service import __main__ as program  # ends a process without uvicorn

    good_loss = Training.loss

    def loss(training: Training, *args: Any) -> Any:
        seed = training.settings.seed
        if seed == HANGS:
            time.sleep(HANG_S)
        if seed == RAISES:
            raise ValueError("poison")
        if seed == KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        return good_loss(training, *args)

    setattr(Training, "loss", loss)  # noqa: B010 - mypy takes no other method
    disk = FlaggedDisk(flag_of(data))
    jobs = partial(Jobs, storage=partial(LocalStorage, calls=disk), longest_pause_s=0.5)
    vars(program)["Jobs"] = jobs
    options = ["--port", "0", "--devices", "2", "--grace", "1", "--step-limit", "8"]
    return program.main([*options, "--data", str(data)])


def flag_of(data: Path) -> Path:
    return data.with_name("full")


@contextmanager
def disk_of(folder: Path) -> Iterator[tuple[Path, Callable[[], None], Callable[[], None]]]:
    """Make a place for a service, with functions that take all space there and give it back."""
    mount = folder / "disk"
    mount.mkdir()
    try:
        disk = small_disk(str(mount), DISK_BYTES)
        place = disk.__enter__()
    except PermissionError:  # the storage of checkpoints does as if
        flag = flag_of(folder / "data")
        yield folder / "data", flag.touch, partial(flag.unlink, missing_ok=True)
        return
    try:
        ballast = place / "ballast"
        free = partial(ballast.unlink, missing_ok=True)
        yield place / "data", partial(take_all_space, ballast, but=0), free
    finally:
        disk.__exit__(None, None, None)


# ---- those who attack it ---------------------------------------------------------------------


@dataclass
class Seen:
    """What was done, and what should not have been."""

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    most_files: int = 0  # of a job, at the end
    sizes: list[dict[str, float]] = field(default_factory=list)  # of the process, second by second


class Attack:
    """A service, started again whenever it dies, and the clients that attack it."""

    def __init__(self, data: Path, errors: Path, seed: int) -> None:
        self.seen = Seen()
        self.rng = Random(seed)
        self.is_over = asyncio.Event()
        self.is_warm = asyncio.Event()  # a good job has ended since the last start
        self.expected: list[str] = []
        self._data = data
        self._errors = errors
        self._held: list[asyncio.StreamWriter] = []
        self.process: subprocess.Popen[str]
        self.client: httpx.AsyncClient
        self._port = 0

    # ---- the process ----

    async def start(self) -> None:
        """Start the service; again until it has room for its table."""
        command = [sys.executable, "-m", "tests.examples.hostile", "--serve", str(self._data)]
        for _ in range(100):
            self.process = await asyncio.to_thread(self._popen, command)
            assert self.process.stdout is not None
            line = await asyncio.to_thread(self.process.stdout.readline)
            if "http://" in line:
                url = line.partition(" at ")[2].partition(",")[0]
                self._port = int(url.rpartition(":")[2])
                self.client = httpx.AsyncClient(base_url=url, timeout=60)
                return
            self.process.wait()
            self.seen.done["starts that failed"] += 1
            await asyncio.sleep(0.2)
        raise RuntimeError(f"The service does not start: {self._errors.read_text()}")

    def _popen(self, command: list[str]) -> subprocess.Popen[str]:
        with self._errors.open("a") as errors:
            return subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
            )

    async def keep_alive(self) -> None:
        """Start the service again when a job has ended it."""
        while not self.is_over.is_set():
            if (status := self.process.poll()) is not None:
                if status != -signal.SIGKILL:
                    self.seen.wrong.append(f"the service ended with {status}")
                self.seen.done["restarts"] += 1
                self.is_warm.clear()
                self.seen.sizes.clear()
                await self.client.aclose()
                await self.start()
            await self.pause(0.1)

    async def measure(self) -> None:
        """Remember how large the process is, second by second, once it has all that it imports."""
        while not self.is_over.is_set():
            with suppress(OSError, KeyError):  # it has just died
                if self.is_warm.is_set():
                    self.seen.sizes.append(size_of(self.process.pid))
            await self.pause(1.0)

    async def pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.is_over.wait(), seconds)

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """Ask the service; None while it is not there."""
        begin = time.perf_counter()
        try:
            answer = await self.client.request(method, path, **options)
        except (httpx.HTTPError, RuntimeError):  # it died, and the client was closed
            await asyncio.sleep(0.1)
            return None
        self.seen.slowest_s = max(self.seen.slowest_s, time.perf_counter() - begin)
        if answer.status_code >= 500 and answer.status_code not in LATER:
            self.seen.wrong.append(f"{method} {path}: {answer.status_code} {answer.text[:200]}")
        return answer

    async def submit(self, settings: dict[str, Any]) -> int | None:
        """Submit a job, again while none is taken; None if the attack is over before."""
        while not self.is_over.is_set():
            job = {"program": "spirals", "settings": settings}
            answer = await self.ask("POST", "/jobs", json=job)
            if answer is not None and answer.status_code == 201:
                return int(answer.json()["id"])
            self.seen.done["refusals"] += answer is not None and answer.status_code == 507
            await asyncio.sleep(0.1)
        return None

    async def ended(self, job: int) -> dict[str, Any]:
        """Wait until a job is over; go on with one that failed because others ended the process."""
        while True:
            answer = await self.ask("GET", f"/jobs/{job}")
            told = {} if answer is None else answer.json()
            if "The process of the service ended" in told.get("error", ""):
                await self.ask("POST", f"/jobs/{job}/resume", headers=JSON)
            elif told.get("status") in {"done", "failed", "cancelled"}:
                return dict(told)
            await asyncio.sleep(0.1)

    async def trained(self, job: int) -> dict[str, Any]:
        """Wait until a good job is over; go on with one whose first step took too long.

        It compiles, which may take some seconds on a busy machine.
        """
        told = await self.ended(job)
        while f"Step {(told['resumed_from'] or 0) + 1} took more than" in told["error"]:
            answer = await self.ask("POST", f"/jobs/{job}/resume", headers=JSON)
            self.seen.done["first steps that took too long"] += (
                answer is not None and answer.is_success
            )
            await asyncio.sleep(0.1)
            told = await self.ended(job)
        return told

    # ---- the clients ----

    async def learn_digests(self) -> None:
        """Train the good jobs while nothing disturbs them."""
        for settings in GOOD:
            job = await self.submit(settings)
            assert job is not None
            self.expected.append((await self.trained(job))["digest"])

    async def train_good(self, number: int) -> None:
        while (job := await self.submit(GOOD[number])) is not None:
            told = await self.trained(job)
            self.is_warm.set()
            self.seen.done["good jobs"] += 1
            if (told["status"], told["digest"]) != ("done", self.expected[number]):
                self.seen.wrong.append(f"good job: {told}")

    async def hang(self) -> None:
        """Submit jobs that hang; cancel every other one, and leave the rest to the service."""
        is_cancelled = True
        while (job := await self.submit({**SETTINGS, "seed": HANGS})) is not None:
            if is_cancelled:
                await self.pause(1.0)
                await self.ask("DELETE", f"/jobs/{job}")
            told = await self.ended(job)
            self.seen.done[f"jobs that hung: {told['status']}"] += 1
            if told["status"] not in {"failed", "cancelled"}:
                self.seen.wrong.append(f"job that hangs: {told}")
            is_cancelled = not is_cancelled
            await self.pause(4.0)

    async def poison(self) -> None:
        while (job := await self.submit({**SETTINGS, "seed": RAISES})) is not None:
            told = await self.ended(job)
            self.seen.done["jobs that raised"] += 1
            if told["status"] != "failed" or "poison" not in told["error"]:
                self.seen.wrong.append(f"job that raises: {told}")
            await self.pause(0.5)

    async def kill(self) -> None:
        """Submit a job that ends the process, as often as the service begins it."""
        job = await self.submit({**SETTINGS, "seed": KILLS})
        told: dict[str, Any] = {}
        while told.get("status") != "failed":
            answer = await self.ask("GET", f"/jobs/{job}")
            told = {} if answer is None else answer.json()
            await asyncio.sleep(0.1)
        self.seen.done["jobs that ended the process"] += 1
        if "The process of the service ended 2 times" not in told["error"]:
            self.seen.wrong.append(f"job that ends the process: {told}")

    async def fill(self, take: Callable[[], None], free: Callable[[], None]) -> None:
        while not self.is_over.is_set():
            await self.pause(self.rng.uniform(1.0, 3.0))
            take()
            self.seen.done["times without space"] += 1
            await self.pause(self.rng.uniform(0.5, 2.0))
            free()

    async def be_hostile(self) -> None:
        greedy = {"points": 10_000, "arms": 10, "batch_size": 4096, "hidden": 1024}
        bad = (
            ({422}, partial(self.ask, "POST", "/jobs", content=b"{", headers=JSON)),
            ({422}, partial(self.ask, "POST", "/jobs", json={"program": "../x", "settings": {}})),
            ({422}, partial(self.ask, "POST", "/jobs", json=job_of({"epochs": 10**9}))),
            ({422}, partial(self.ask, "POST", "/jobs", json=job_of(greedy))),
            ({413}, partial(self.ask, "POST", "/jobs", content=b" " * 100_000, headers=JSON)),
            ({415}, partial(self.ask, "POST", "/jobs", content=b"{}")),
            ({400}, partial(self.ask, "GET", "/jobs", headers={"host": "example.com"})),
            ({404}, partial(self.ask, "DELETE", "/jobs/999999")),
            ({409}, partial(self.ask, "DELETE", "/jobs/1")),
            ({409}, partial(self.ask, "POST", "/jobs/1/resume", headers=JSON)),
            ({200}, partial(self.ask, "GET", "/healthz")),
            ({200, 503}, partial(self.ask, "GET", "/readyz")),
            ({200}, partial(self.ask, "GET", "/metrics")),
        )
        raw: tuple[Callable[[], Awaitable[None]], ...] = (
            partial(self.send, self.rng.randbytes(300)),
            partial(
                self.send, b"POST /jobs HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n{"
            ),
            partial(self.send, b"GET /jobs/1/events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"),
            partial(self.send, b"GET / HTTP/1.1\r\nhost: 127.", is_held=True),
        )
        while not self.is_over.is_set():
            if self.rng.random() < 0.3:
                await self.rng.choice(raw)()
            else:
                codes, request = self.rng.choice(bad)
                answer = await request()
                if answer is not None and answer.status_code not in codes:
                    where = f"{answer.request.method} {answer.request.url}"
                    self.seen.wrong.append(f"{where}: {answer.status_code}, not {codes}")
            self.seen.done["hostile requests"] += 1
            await self.pause(0.02)
        for each in self._held:
            each.close()

    async def send(self, data: bytes, *, is_held: bool = False) -> None:
        """Send bytes and leave; or stay, as one of the ten that stay."""
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(data)
            await writer.drain()
            self._held.append(writer)
            while len(self._held) > 10 * is_held:
                self._held.pop(0).close()


def job_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {"program": "spirals", "settings": settings}


def size_of(pid: int) -> dict[str, float]:
    """Return the resident MiB of a process, its threads and descriptors."""
    told = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "MiB": int(told["VmRSS"].split()[0]) / 1024,
        "threads": int(told["Threads"]),
        "descriptors": sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
    }


# ---- the attack ------------------------------------------------------------------------------


async def attack(seconds: float, seed: int, folder: Path) -> Seen:
    """Attack for so long; return what was seen."""
    errors = folder / "errors"
    with disk_of(folder) as (data, take, free):
        attack = Attack(data, errors, seed)
        await attack.start()
        try:
            async with asyncio.timeout(seconds + DEADLINE_S):
                await attack.learn_digests()
                async with asyncio.TaskGroup() as tasks:
                    for work in (
                        attack.keep_alive(), attack.measure(), attack.poison(),
                        attack.fill(take, free), attack.be_hostile(),
                        *map(attack.train_good, range(len(GOOD))),
                    ):  # fmt: skip
                        tasks.create_task(work)
                    await attack.kill()  # first: the last process is the one that may not grow
                    tasks.create_task(attack.hang())
                    await attack.is_warm.wait()
                    await asyncio.sleep(seconds)
                    attack.is_over.set()
            await attack.client.aclose()
            attack.process.send_signal(signal.SIGTERM)
            status = await asyncio.to_thread(attack.process.wait, DEADLINE_S)
            attack.seen.most_files = max(map(files_of, (data / "jobs").iterdir()))
        finally:
            attack.process.kill()
            attack.process.communicate()
    if status != EXIT_CODE:
        attack.seen.wrong.append(f"SIGTERM gave {status}")
    if "Traceback" in (text := errors.read_text()):
        attack.seen.wrong.append(f"the service printed {text[-2000:]}")
    if attack.seen.most_files > MAX_FILES:
        attack.seen.wrong.append(f"a job has {attack.seen.most_files} files")
    attack.seen.wrong += growth_of(attack.seen.sizes)
    return attack.seen


def files_of(job: Path) -> int:
    return sum(path.is_file() for path in job.rglob("*"))


def growth_of(sizes: list[dict[str, float]]) -> list[str]:
    """Compare the last third of the seconds with the one before; say what has grown."""
    third = len(sizes) // 3
    if not third:
        return [f"the service lived for {len(sizes)} s only after its last start"]
    limits = {"MiB": MAX_GROWTH_MIB, "threads": 8, "descriptors": 20}
    found = []
    for name, limit in limits.items():
        before = median(size[name] for size in sizes[third : 2 * third])
        after = median(size[name] for size in sizes[-third:])
        if after - before > limit:
            found.append(f"{name} grew from {before:.0f} to {after:.0f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.examples.hostile")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        sys.exit(serve(options.serve))
    with tempfile.TemporaryDirectory() as folder:
        seen = asyncio.run(attack(options.seconds, options.seed, Path(folder)))
    print(", ".join(f"{count} {name}" for name, count in sorted(seen.done.items())))
    print(f"slowest answer {seen.slowest_s:.1f} s; at most {seen.most_files} files of a job")
    for at in (1 / 3, 2 / 3, 1.0):
        print(f"after {at:.0%}:", seen.sizes[max(0, int(at * len(seen.sizes)) - 1) :][:1])
    if seen.wrong:
        sys.exit("\n".join(seen.wrong[:20]))


if __name__ == "__main__":
    main()
