"""Jobs: taken, trained some at a time, cancelled, resumed, and what becomes of them."""

import asyncio
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import aioreplica as ar

from .programs import PROGRAMS, RejectedError, read_submission
from .sharing import DeviceSharing, Share
from .store import Store
from .training import Training, train

UNFINISHED = ("queued", "running")


@dataclass(eq=False)
class Job:
    """A job as the service has it; the table has what lasts."""

    id: int
    program: str
    settings: dict[str, Any]
    status: str  # queued, running, done, failed or cancelled
    submitted: str
    error: str = ""
    digest: str = ""
    step: int = 0
    num_steps: int = 0
    resumed_from: int | None = None  # the step that was restored, if one was
    training: Training | None = field(default=None, repr=False)  # while it trains
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    is_cancelled: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def is_over(self) -> bool:
        return self.status not in UNFINISHED

    def tell(self) -> None:
        """Wake who waits for news: each takes `changed` before it looks."""
        if self.training is not None:
            self.step = self.training.step_number
        event, self.changed = self.changed, asyncio.Event()
        event.set()

    def describe(self) -> dict[str, Any]:
        """Return what clients are told."""
        names = ("id", "program", "settings", "status", "submitted", "error", "digest")
        return {name: getattr(self, name) for name in (*names, "step", "num_steps", "resumed_from")}


class Jobs:
    """Trains jobs, some at a time; the others wait in the order in which they came.

    Args:
        folder: Has the checkpoints of each job.
        store: The table of jobs.
        tasks: Runs them.
        num_running: How many train at a time.
        max_unfinished: How many may be waiting and training.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        tasks: asyncio.TaskGroup,
        *,
        num_running: int = 4,
        max_unfinished: int = 100,
    ) -> None:
        self._folder = folder
        self._store = store
        self._tasks = tasks
        self._places = asyncio.Semaphore(num_running)
        self._max_unfinished = max_unfinished
        self._sharing = DeviceSharing([str(device) for device in ar.list_devices("cpu")])
        self._jobs: dict[int, Job] = {}
        self.closing = asyncio.Event()

    async def resume(self) -> None:
        """Read the table, and go on with what was not over."""
        for row in await self._store.all():
            row["settings"] = json.loads(row["settings"])
            job = self._jobs[row["id"]] = Job(**row)
            if not job.is_over:
                self._start(job)

    def close(self) -> None:
        """Have every job save what it has and end; the next service goes on from there."""
        self.closing.set()
        for job in self._jobs.values():
            job.tell()
            if job.task is not None:
                job.task.cancel()

    # ---- what clients ask for --------------------------------------------------------------

    async def submit(self, body: bytes) -> Job:
        """Take a job.

        Raises:
            RejectedError: If it is not one; says why.
        """
        name, settings = read_submission(body, num_devices=len(self._sharing.devices))
        if sum(not job.is_over for job in self._jobs.values()) >= self._max_unfinished:
            raise RejectedError(("", f"{self._max_unfinished} jobs are not over; try later"))
        row = await self._store.add(name, settings)
        job = Job(row["id"], name, settings, row["status"], row["submitted"])
        self._jobs[job.id] = job
        self._start(job)
        return job

    def all(self) -> list[Job]:
        return list(self._jobs.values())

    def get(self, job_id: int) -> Job | None:
        return self._jobs.get(job_id)

    async def cancel(self, job: Job) -> bool:
        """End a job and wait until it has; False if it was over. Its last state stays saved."""
        if job.is_over or job.task is None:
            return False
        job.is_cancelled = True
        job.task.cancel()
        await asyncio.wait([job.task])
        return job.status == "cancelled"

    async def losses(self, job: Job, start: int = 0) -> np.ndarray:
        """Return the losses of a job so far, one per step, without the first ones."""
        if job.training is not None:
            return job.training.losses[start : job.step].copy()
        saved = await self._store.losses(job.id) if job.is_over else b""
        return np.frombuffer(saved)[start:]

    # ---- what becomes of a job -------------------------------------------------------------

    def _start(self, job: Job) -> None:
        job.task = self._tasks.create_task(self._run(job), name=f"job {job.id}")

    async def _run(self, job: Job) -> None:
        status, error = "done", ""
        try:
            async with self._places:
                job.status = "running"
                await self._store.update(job.id, status="running")
                share = self._sharing.join(job.settings["replicas"])
                try:
                    await self._train(job, share)
                finally:
                    self._sharing.leave(share)
        except asyncio.CancelledError:
            if not job.is_cancelled:
                raise  # the service ends; the table still says "running"
            status = "cancelled"
        except Exception as failure:  # noqa: BLE001 - whatever a program raises ends its job alone
            error = f"{type(failure).__name__}: {failure}"
            if self.closing.is_set():
                print(f"job {job.id} was not saved: {error}", file=sys.stderr)
                return
            status = "failed"
        losses = await self.losses(job) if job.training is not None else np.empty(0)
        await self._store.update(
            job.id, status=status, error=error, digest=job.digest, num_steps=job.num_steps,
            losses=losses.tobytes(),
        )  # fmt: skip
        job.status, job.error, job.training = status, error, None
        job.tell()

    async def _train(self, job: Job, share: Share) -> None:
        """Train a job to its end, and remember what came of it."""

        def begin(training: Training, restored: int | None) -> None:
            job.training, job.num_steps, job.resumed_from = training, training.num_steps, restored
            training.report = job.tell
            job.tell()

        program = PROGRAMS[job.program]
        training = await train(
            program,
            program.settings.model_validate(job.settings),
            self._folder / "jobs" / str(job.id),
            share.devices,
            turn=lambda: self._sharing.turn(share),
            begin=begin,
        )
        job.digest = training.digest()
