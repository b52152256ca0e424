"""A training service whose disk is full for a while: its jobs wait, and end as if it had room."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from aioreplica.checkpoint import LocalStorage

from ._full_disk import small_disk, take_all_space

if TYPE_CHECKING:
    from examples.training_service.jobs import Job, Jobs

DISK_BYTES = 4 * 1024 * 1024
LIMIT_S = 300
SEEDS = (1, 2, 3)


@final
@dataclass(slots=True)
class FullService:
    """Jobs that trained while the disk was full.

    Attributes:
        num_jobs: How many there were.
        num_warned: How many said meanwhile that they could not be saved.
        num_refusals: How many new jobs were refused for want of room, of one each time.
        num_rounds: How often the disk was full.
        num_wrong: How many ended in other bits, or not as "done": must be 0.
        is_simulated: Whether writing failed in place of a disk, because none could be mounted.
        why_not: Why there were none, if there were none.
    """

    num_jobs: int = 0
    num_warned: int = 0
    num_refusals: int = 0
    num_rounds: int = 0
    num_wrong: int = 0
    is_simulated: bool = False
    why_not: str = ""

    @property
    def is_good(self) -> bool:
        """Whether each job waited and ended in the right bits, and new ones were refused."""
        is_whole = self.num_warned == self.num_jobs and self.num_refusals == self.num_rounds
        return bool(self.why_not) or (is_whole and not self.num_wrong)

    def __str__(self) -> str:
        if self.why_not:
            return f"no training service on a full disk: {self.why_not}"
        disk = "writes that find no space (no disk could be mounted)" if self.is_simulated else (
            "a disk that was full"
        )  # fmt: skip
        return (
            f"trained {self.num_jobs} jobs of the training service beside {disk}: "
            f"{self.num_warned} said so, {self.num_refusals} of {self.num_rounds} new ones were "
            f"refused, {self.num_wrong} ended otherwise than with room"
        )


class SimulatedDisk:
    """The functions of `os` for checkpoints; while it is full, no write finds space."""

    def __init__(self) -> None:
        self.is_full = False

    def __getattr__(self, name: str) -> Any:
        if self.is_full and name in {"write", "writev", "pwrite"}:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return getattr(os, name)


def train_beside_full_disk(num_rounds: int) -> FullService:
    """Train jobs that many times, each time on a disk that is full until all of them wait."""
    try:
        import examples.training_service.jobs  # noqa: F401
    except ImportError as error:
        return FullService(why_not=str(error))
    return asyncio.run(_train(num_rounds))


async def _train(num_rounds: int) -> FullService:
    found = FullService()
    with tempfile.TemporaryDirectory() as folder:
        async with _serving(Path(folder), LocalStorage) as jobs:
            expected = [job.digest for job in [await _ended(each) for each in await _submit(jobs)]]
    for _ in range(num_rounds):
        with tempfile.TemporaryDirectory() as folder:
            try:
                with small_disk(folder, DISK_BYTES) as disk:
                    ballast = disk / "ballast"
                    fill = partial(take_all_space, ballast, but=0)
                    await _train_once(found, expected, disk, LocalStorage, fill, ballast.unlink)
            except PermissionError:
                found.is_simulated = True
                await _train_on_simulated(found, expected, Path(folder))
    return found


async def _train_on_simulated(found: FullService, expected: list[str], folder: Path) -> None:
    disk = SimulatedDisk()
    storage = partial(LocalStorage, calls=disk)
    fill, free = partial(setattr, disk, "is_full", True), partial(setattr, disk, "is_full", False)
    await _train_once(found, expected, folder, storage, fill, free)


async def _train_once(
    found: FullService,
    expected: list[str],
    folder: Path,
    storage: Callable[[Path], LocalStorage],
    fill: Callable[[], None],
    free: Callable[[], None],
) -> None:
    from examples.training_service.faults import RefusedError

    async with asyncio.timeout(LIMIT_S), _serving(folder, storage) as jobs:
        trained = await _submit(jobs)
        await _until(trained[0], lambda job: job.step > 0)
        fill()
        for job in trained:
            await _until(job, lambda job: job.trouble is not None or job.is_over)
            found.num_warned += job.trouble is not None
        try:
            await jobs.submit(_body(0))
        except RefusedError as refusal:
            found.num_refusals += refusal.status == 507
        free()
        ended = [await _ended(job) for job in trained]
    found.num_jobs += len(trained)
    found.num_rounds += 1
    found.num_wrong += sum(
        (job.status, job.digest) != ("done", digest)
        for job, digest in zip(ended, expected, strict=True)
    )


@asynccontextmanager
async def _serving(folder: Path, storage: Callable[[Path], LocalStorage]) -> AsyncIterator[Jobs]:
    from examples.training_service.jobs import Jobs
    from examples.training_service.store import Store

    async with Store(folder / "jobs.sqlite") as store, asyncio.TaskGroup() as tasks:
        jobs = Jobs(folder, store, tasks, longest_pause_s=0.05, storage=storage)
        try:
            yield jobs
        finally:
            jobs.close()


async def _submit(jobs: Jobs) -> list[Job]:
    return [await jobs.submit(_body(seed)) for seed in SEEDS]


def _body(seed: int) -> bytes:
    settings = {"epochs": 40, "points": 50, "replicas": 1, "save_every": 5, "seed": seed}
    return json.dumps({"program": "spirals", "settings": settings}).encode()


async def _until(job: Job, condition: Callable[[Job], bool]) -> None:
    while True:
        changed = job.changed
        if condition(job):
            return
        await changed.wait()


async def _ended(job: Job) -> Job:
    await _until(job, lambda job: job.is_over)
    return job
