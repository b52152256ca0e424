"""Jobs: taken, trained some at a time, cancelled, resumed, and what becomes of them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import aioreplica as ar
from aioreplica.checkpoint import LocalStorage, Storage

from .faults import RefusedError, describe, is_no_room, is_passing, say
from .programs import MEMORY_MIB, MIB, PROGRAMS, read_submission, stride_of
from .sharing import DeviceSharing, Share
from .store import Store
from .training import Training, train

UNFINISHED = ("queued", "running")
MAX_ATTEMPTS = 5
"""So often a job is begun that ends because the machine lacks something for a while."""
MAX_STARTS = 2
"""So often a job is begun that ends the process before it has saved a checkpoint."""
UNWIND_S = 3.0
"""So long a job may take beyond its grace, until the service waits for it no more."""
MAX_LATE_S = 5.0
"""A timer that is later than this tells that the process was frozen, not that a step hangs."""


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
    starts: int = 0  # since it saved a checkpoint, or the service was told to end
    resumed_from: int | None = None  # the step that was restored, if one was
    training: Training | None = field(default=None, repr=False)  # while it trains
    trouble: BaseException | None = field(default=None, repr=False)  # what it could not do so far
    work: asyncio.Task[None] | None = field(default=None, repr=False)  # may be cancelled
    told: asyncio.Event = field(default_factory=asyncio.Event, repr=False)  # to end
    share: Share | None = field(default=None, repr=False)
    has_place: bool = False  # among those that train
    step_too_long: str = ""
    end: asyncio.Task[None] | None = field(default=None, repr=False)  # writes down what came of it
    is_cancelled: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def is_over(self) -> bool:
        return self.status not in UNFINISHED

    def stop(self) -> None:
        """Tell it to save what it has and to end."""
        self.told.set()
        if self.work is not None:
            self.work.cancel()

    def tell(self) -> None:
        """Wake who waits for news: each takes `changed` before it looks."""
        if self.training is not None:
            self.step = self.training.step_number
        event, self.changed = self.changed, asyncio.Event()
        event.set()

    def describe(self) -> dict[str, Any]:
        """Return what clients are told."""
        names = ("id", "program", "settings", "status", "submitted", "error", "digest")
        told = {name: getattr(self, name) for name in (*names, "step", "num_steps", "resumed_from")}
        return {**told, "warning": "" if self.trouble is None else describe(self.trouble)}


class Jobs:
    """Trains jobs, some at a time; the others wait in the order in which they came.

    Args:
        folder: Has the checkpoints of each job.
        store: The table of jobs.
        tasks: Runs them.
        num_running: How many train at a time.
        max_unfinished: How many may be waiting and training.
        grace_s: How long the step under way of a job may take when it is told to end.
        step_limit_s: How long a step may take; what takes longer hangs, and its job fails.
        job_memory_mib: How much memory a job may take, as far as that can be told before.
        longest_pause_s: What goes wrong for a while is tried again after pauses that double from
            one second to this.
        storage: Makes the storage of a folder of checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        tasks: asyncio.TaskGroup,
        *,
        num_running: int = 4,
        max_unfinished: int = 100,
        grace_s: float = 10.0,
        step_limit_s: float = 300.0,
        job_memory_mib: int = MEMORY_MIB,
        longest_pause_s: float = 30.0,
        storage: Callable[[Path], Storage] = LocalStorage,
    ) -> None:
        self._folder = folder
        self._store = store
        self._tasks = tasks
        self._places = asyncio.Semaphore(num_running)
        self._max_unfinished = max_unfinished
        self._grace_s = grace_s
        self._step_limit_s = step_limit_s
        self._max_bytes = job_memory_mib * MIB
        self._longest_pause_s = longest_pause_s
        self._storage = storage
        self._sharing = DeviceSharing([str(device) for device in ar.list_devices("cpu")])
        self._jobs: dict[int, Job] = {}
        self._num_submitting = 0  # that the table is being told of
        self._unwritten: dict[int, dict[str, Any]] = {}  # columns that the disk did not take
        self._why_unwritten = ""
        self._writing = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None
        self.closing = asyncio.Event()
        self.num_saved = self.num_not_saved = 0
        self.saved_at = 0.0  # by the clock on the wall; 0 before the first checkpoint

    async def resume(self) -> None:
        """Read the table, and go on with what was not over."""
        for row in await self._store.all():
            row["settings"] = json.loads(row["settings"])
            job = self._jobs[row["id"]] = Job(**row)
            if job.status == "running" and job.starts >= MAX_STARTS:
                job.status = "failed"
                job.error = (
                    f"The process of the service ended {job.starts} times while it ran, before it "
                    f"had saved a checkpoint. To try again, post to /jobs/{job.id}/resume."
                )
                await self._write(job, status="failed", error=job.error)
            elif not job.is_over:
                self._start(job)

    def close(self) -> None:
        """Have every job save what it has and end; the next service goes on from there."""
        self.closing.set()
        for job in self._jobs.values():
            job.tell()
            job.stop()

    # ---- what clients ask for --------------------------------------------------------------

    async def submit(self, body: bytes) -> Job:
        """Take a job.

        Raises:
            RejectedError: If it is not one; says why.
            RefusedError: If none is taken now.
        """
        name, settings = read_submission(
            body, num_devices=len(self._sharing.devices), max_bytes=self._max_bytes
        )
        if refusal := self.refusal():
            raise refusal
        self._num_submitting += 1
        try:
            row = await self._store.add(name, settings)
        except OSError as error:
            status = 507 if is_no_room(error) else 503
            raise RefusedError(status, f"The table cannot be written: {error}", 30) from error
        finally:
            self._num_submitting -= 1
        job = Job(row["id"], name, settings, row["status"], row["submitted"])
        self._jobs[job.id] = job
        self._start(job)
        return job

    def refusal(self) -> RefusedError | None:
        """Return why no job is taken now; None if one is."""
        if self.closing.is_set():
            return RefusedError(503, "The service ends.", 5)
        num_unfinished = sum(not job.is_over for job in self._jobs.values())
        if num_unfinished + self._num_submitting >= self._max_unfinished:
            many = f"{self._max_unfinished} jobs are not over. Wait for one, or cancel one."
            return RefusedError(429, many, 10)
        if self._why_unwritten:
            return RefusedError(507, f"The table cannot be written: {self._why_unwritten}", 30)
        for job in self._jobs.values():
            if job.trouble is not None and not job.is_over:
                status = 507 if is_no_room(job.trouble) else 503
                return RefusedError(status, f"Job {job.id} waits: {describe(job.trouble)}", 30)
        return None

    async def start_again(self, job: Job) -> bool:
        """Go on with a job that failed or was cancelled, at its last checkpoint; False if not.

        Raises:
            RefusedError: If none is taken now, or it was left behind and still hangs.
        """
        if job.status not in {"failed", "cancelled"}:
            return False
        if job.work is not None and not job.work.done():
            hangs = f"Job {job.id} was left behind, and what hangs in it has not ended yet."
            raise RefusedError(503, hangs, 5)
        if refusal := self.refusal():
            raise refusal
        job.status, job.error, job.step_too_long = "queued", "", ""
        job.is_cancelled, job.starts, job.told = False, 0, asyncio.Event()
        self._start(job)  # from now on it can be cancelled
        await self._write(job, status="queued", error="", starts=0)
        return True

    def all(self) -> list[Job]:
        return list(self._jobs.values())

    def get(self, job_id: int) -> Job | None:
        return self._jobs.get(job_id)

    async def cancel(self, job: Job) -> bool:
        """End a job and wait until it has; False if it was over. Its last state stays saved.

        A job that hangs is left behind after its grace.
        """
        if job.is_over or job.end is None:
            return False
        job.is_cancelled = True
        job.stop()
        await asyncio.wait([job.end])
        return job.status == "cancelled"

    def is_written(self, job: Job) -> bool:
        """Tell whether the table has taken all that is known of a job."""
        return job.id not in self._unwritten

    async def losses(self, job: Job, start: int = 0) -> np.ndarray:
        """Return the losses of a job so far, one per stride, without the first ones.

        Raises:
            OSError: If the table cannot be read.
        """
        if job.training is not None:
            stride, is_all = stride_of(job.num_steps), job.step == job.num_steps
            num_done = len(job.training.losses) if is_all else job.step // stride
            return job.training.losses[start:num_done].copy()
        saved = self._unwritten.get(job.id, {}).get("losses")
        if saved is None:
            saved = await self._store.losses(job.id) if job.is_over else b""
        return np.frombuffer(saved)[start:]

    # ---- what becomes of a job -------------------------------------------------------------

    def _start(self, job: Job) -> None:
        # Not a task of the group, which would wait for one that hangs.
        job.work = asyncio.get_running_loop().create_task(self._work(job), name=f"job {job.id}")
        job.end = self._tasks.create_task(self._end(job, job.work), name=f"end of job {job.id}")

    async def _work(self, job: Job) -> None:
        """Train a job; what goes wrong is its error, and ends nothing else."""
        try:
            await self._places.acquire()
            job.has_place = True
            job.status = "running"
            job.starts += 1
            await self._write(job, status="running", starts=job.starts)
            await self._train_again(job)
        except Exception as failure:  # noqa: BLE001 - whatever a program raises ends its job alone
            if not job.error:  # else it was left behind
                job.error = f"{job.step_too_long} {describe(failure)}".strip()
        finally:
            self._give_back(job)

    def _give_back(self, job: Job) -> None:
        """Let others have the place and the devices of a job."""
        share, job.share = job.share, None
        if share is not None:
            self._sharing.leave(share)
        if job.has_place:
            job.has_place = False
            self._places.release()

    async def _end(self, job: Job, work: asyncio.Task[None]) -> None:
        """Write down what came of a job, whenever it is cancelled, and although it hangs."""
        told = self._tasks.create_task(job.told.wait())
        await asyncio.wait([work, told], return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        limit_s = self._grace_s + UNWIND_S
        await asyncio.wait([work], timeout=limit_s)
        if not work.done():
            job.error = f"It did not end within {limit_s} s, so it was left behind."
            self._give_back(job)
        status = "failed" if job.error else "done"
        if job.is_cancelled and (work.cancelled() or job.error):
            status = "cancelled"  # with an error, if its last state could not be saved
        elif self.closing.is_set() and (work.cancelled() or job.error):
            if job.error:
                say(f"job {job.id} was not saved: {job.error}")
            await self._write(job, starts=0)  # not the job has ended the process
            return  # the table still says "running"
        elif work.cancelled():
            status = "failed"
            job.error = job.step_too_long or "It was cancelled, and not by a request."
        columns = {"status": status, "error": job.error, "digest": job.digest}
        if job.training is not None:  # else the table has what came of it before
            losses = await self.losses(job)
            columns |= {"num_steps": job.num_steps, "losses": losses.tobytes(), "step": job.step}
        await self._write(job, **columns)
        job.status, job.trouble, job.training = status, None, None
        job.tell()

    async def _train_again(self, job: Job) -> None:
        """Train a job; begin again at its last checkpoint if the machine lacked something."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            job.share = share = self._sharing.join(job.settings["replicas"])
            try:
                await self._train(job, share)
                return
            except Exception as failure:
                if job.told.is_set() or attempt == MAX_ATTEMPTS or not is_passing(failure):
                    raise
                job.trouble = failure
            job.share = None
            self._sharing.leave(share)
            job.tell()
            await self._pause(attempt)

    async def _train(self, job: Job, share: Share) -> None:
        """Train a job to its end, and remember what came of it."""

        def begin(training: Training, restored: int | None) -> None:
            job.training, job.num_steps, job.resumed_from = training, training.num_steps, restored
            training.report = job.tell
            job.trouble = None
            job.tell()

        async def not_saved(error: Exception, attempt: int) -> None:
            self.num_not_saved += 1
            job.trouble = error
            job.tell()
            if attempt:
                await self._pause(attempt)

        async def saved() -> None:
            self.num_saved, self.saved_at = self.num_saved + 1, time.time()
            job.trouble = None
            if job.starts:
                job.starts = 0
                await self._write(job, starts=0)

        program = PROGRAMS[job.program]
        training = await train(
            program,
            program.settings.model_validate(job.settings),
            self._storage(self._folder / "jobs" / str(job.id)),
            share.devices,
            turn=lambda: self._turn(job, share),
            grace_s=self._grace_s,
            begin=begin,
            saved=saved,
            not_saved=not_saved,
        )
        job.digest = training.digest()

    @asynccontextmanager
    async def _turn(self, job: Job, share: Share) -> AsyncIterator[None]:
        """Hold the devices of a job for a step, which is ended if it takes too long."""

        loop = asyncio.get_running_loop()

        def end() -> None:
            nonlocal watch
            if loop.time() - watch.when() > MAX_LATE_S:  # the step stood still, too
                watch = loop.call_later(self._step_limit_s, end)
                return
            job.step_too_long = (
                f"Step {job.step + 1} took more than {self._step_limit_s} s. What was saved before "
                "is unchanged."
            )
            job.stop()

        async with self._sharing.turn(share):
            watch = loop.call_later(self._step_limit_s, end)
            try:
                yield
            finally:
                watch.cancel()

    # ---- the table -------------------------------------------------------------------------

    async def _write(self, job: Job, **columns: Any) -> None:
        """Write columns of a job now; or later, if the disk does not take them."""
        self._unwritten.setdefault(job.id, {}).update(columns)
        if not await self.write_out() and (self._writer is None or self._writer.done()):
            self._writer = self._tasks.create_task(self._write_later(), name="table of jobs")

    async def write_out(self) -> bool:
        """Write what the disk has not taken so far; tell whether it has all of it now."""
        async with self._writing:
            while self._unwritten:
                job_id, columns = next(iter(self._unwritten.items()))
                written = dict(columns)
                try:
                    await self._store.update(job_id, **written)
                except OSError as error:
                    self._why_unwritten = str(error)
                    return False
                if self._unwritten.get(job_id) == written:
                    del self._unwritten[job_id]
            self._why_unwritten = ""
            return True

    async def _write_later(self) -> None:
        attempt = 0
        while not self.closing.is_set():
            attempt += 1
            await self._pause(attempt)
            if await self.write_out():
                return
        if not await self.write_out():
            say(f"jobs {[*self._unwritten]} were not written down: {self._why_unwritten}")

    async def _pause(self, attempt: int) -> None:
        """Wait before what went wrong is tried again, at most until the service ends."""
        with suppress(TimeoutError):
            pause_s = min(2.0 ** min(attempt - 1, 10), self._longest_pause_s)
            async with asyncio.timeout(pause_s):  # `wait_for` of 3.11 may hide a cancellation
                await self.closing.wait()
