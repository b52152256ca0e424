"""The HTTP side: submit, list, watch and cancel jobs."""

import asyncio
import io
import json
import math
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import aioreplica as ar

from .faults import RefusedError
from .jobs import Job, Jobs
from .programs import PROGRAMS, RejectedError, stride_of

MAX_BODY_BYTES = 64 * 1024
KEEP_ALIVE_S = 15.0
RETRY_MS, LATER_MS = 1000, 30_000  # when clients connect again
MAX_DIGITS = 18


def make_app(jobs: Jobs, *, hosts: list[str]) -> Starlette:
    """Return the application.

    Args:
        jobs: What it serves.
        hosts: The names under which it may be asked, so that no other site's name leads here.
    """
    app = Starlette(
        routes=[
            Route("/", page),
            Route("/programs", programs),
            Route("/jobs", list_jobs, methods=["GET"]),
            Route("/jobs", submit, methods=["POST"]),
            Route("/jobs/{id}", show, methods=["GET"]),
            Route("/jobs/{id}", cancel, methods=["DELETE"]),
            Route("/jobs/{id}/resume", resume, methods=["POST"]),
            Route("/jobs/{id}/events", events),
            Route("/jobs/{id}/loss.png", curve),
            Route("/healthz", healthy),
            Route("/readyz", ready),
            Route("/metrics", metrics),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
        exception_handlers={
            HTTPException: problem,
            RejectedError: rejected,
            RefusedError: refused,
            ClientDisconnect: gone,
            OSError: unreadable,
        },
    )
    app.state.jobs = jobs
    app.state.drawing = asyncio.Lock()  # matplotlib is not made for several threads
    return app


async def problem(_request: Request, error: Exception) -> Response:
    status, detail = getattr(error, "status_code", 500), getattr(error, "detail", "")
    return JSONResponse({"error": detail}, status, getattr(error, "headers", None))


async def rejected(_request: Request, error: Exception) -> Response:
    reasons = getattr(error, "reasons", ())
    listed = [{"where": where, "what": what} for where, what in reasons]
    return JSONResponse({"error": "The job was not taken.", "reasons": listed}, 422)


async def refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    again = {"retry-after": str(error.retry_after_s)}
    return JSONResponse({"error": f"No job is taken now. {error}"}, error.status, again)


async def unreadable(_request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"It cannot be read now: {error}"}, 503, {"retry-after": "30"})


async def gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # in the middle of what it sent: nobody is there to read this


async def page(_request: Request) -> Response:
    return FileResponse(Path(__file__).with_name("page.html"))


async def programs(_request: Request) -> Response:
    return JSONResponse(
        {
            name: {"summary": program.summary, "settings": program.settings.model_json_schema()}
            for name, program in PROGRAMS.items()
        }
    )


async def list_jobs(request: Request) -> Response:
    return JSONResponse([job.describe() for job in request.app.state.jobs.all()])


async def submit(request: Request) -> Response:
    """Take a job: 201 and where it is, 422 and the reasons why not; 429, 503, 507: later."""
    require_json(request)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"A job has at most {MAX_BODY_BYTES} bytes.")
    job = await request.app.state.jobs.submit(bytes(body))
    return JSONResponse(job.describe(), 201, {"location": f"/jobs/{job.id}"})


async def show(request: Request) -> Response:
    return JSONResponse(job_of(request).describe())


async def cancel(request: Request) -> Response:
    """End a job: 200 once it has, 202 if the table has not taken it, 409 if it was over."""
    job = job_of(request)
    if not await request.app.state.jobs.cancel(job):
        raise HTTPException(409, f"Job {job.id} is {job.status}.")
    return JSONResponse(job.describe(), status_of(request, job))


async def resume(request: Request) -> Response:
    """Go on with a job that failed or was cancelled: 200 or 202, or 409 if it is neither."""
    require_json(request)
    job = job_of(request)
    if not await request.app.state.jobs.start_again(job):
        raise HTTPException(409, f"Job {job.id} is {job.status}.")
    return JSONResponse(job.describe(), status_of(request, job))


def status_of(request: Request, job: Job) -> int:
    """Return the status for what was done with a job: 202 as long as a crash would undo it."""
    return 200 if request.app.state.jobs.is_written(job) else 202


def require_json(request: Request) -> None:
    """Refuse what a page of another site can send without being asked by the browser."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "Send JSON, and say so: content-type: application/json.")


async def healthy(_request: Request) -> Response:
    """Answer, which the event loop can do only if it is not held up."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Tell whether a job would be taken: 200, or 503 and why not."""
    refusal = request.app.state.jobs.refusal()
    if refusal is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "refusing jobs", "error": str(refusal)}, 503)


async def metrics(request: Request) -> Response:
    """Return counts in the text format of Prometheus."""
    jobs: Jobs = request.app.state.jobs
    statuses = Counter(job.status for job in jobs.all())
    lines = ["# TYPE training_service_jobs gauge"]
    lines += [
        f'training_service_jobs{{status="{status}"}} {statuses[status]}'
        for status in ("queued", "running", "done", "failed", "cancelled")
    ]
    waiting = sum(job.trouble is not None for job in jobs.all())
    for name, kind, value in (
        ("jobs_in_trouble", "gauge", waiting),
        ("checkpoints_total", "counter", jobs.num_saved),
        ("checkpoint_failures_total", "counter", jobs.num_not_saved),
        ("last_checkpoint_timestamp_seconds", "gauge", jobs.saved_at),
    ):
        lines += [f"# TYPE training_service_{name} {kind}", f"training_service_{name} {value}"]
    return Response("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")


async def events(request: Request) -> Response:
    """Follow a job: an event "step" for each step, numbered by it, and "end" at the end.

    Of a job with many steps an event has the mean loss of several and the number of the last.

    A client that comes back with the number of the last event it has seen, as EventSource does,
    goes on behind it, across restarts of the service, too.
    """
    job = job_of(request)
    last = request.headers.get("last-event-id", "0")
    if not last.isascii() or not last.isdigit() or len(last) > 9:
        raise HTTPException(400, f"last-event-id is the number of a step, got {last[:50]!r}.")
    stream = follow(request.app.state.jobs, job, int(last))
    return StreamingResponse(stream, 200, {"cache-control": "no-store"}, "text/event-stream")


async def follow(jobs: Jobs, job: Job, seen: int) -> AsyncIterator[str]:
    yield f"retry: {RETRY_MS}\n\n"
    while True:
        changed = job.changed  # taken first: what changes from here on sets it
        is_over = job.is_over
        stride = stride_of(job.num_steps)
        start = -(-seen // stride)
        try:
            losses = await jobs.losses(job, start)
        except OSError:  # the table cannot be read now
            yield f"retry: {LATER_MS}\n\n"
            return
        for number, loss in enumerate(losses.tolist(), start + 1):
            seen = min(number * stride, job.num_steps)
            news = {"step": seen, "num_steps": job.num_steps, "loss": as_json(loss)}
            yield f"id: {seen}\nevent: step\ndata: {json.dumps(news)}\n\n"
        if is_over:
            yield f"event: end\ndata: {json.dumps(job.describe())}\n\n"
            return
        if jobs.closing.is_set():
            return  # the client comes back when the service does
        try:
            await asyncio.wait_for(changed.wait(), KEEP_ALIVE_S)
        except TimeoutError:
            yield ": still there\n\n"


async def curve(request: Request) -> Response:
    """Draw the loss of each step so far."""
    job = job_of(request)
    losses = await request.app.state.jobs.losses(job)
    async with request.app.state.drawing:
        stride = stride_of(job.num_steps)
        image = await ar.run_on_host(draw, f"job {job.id}: {job.program}", losses, stride)
    return Response(image, media_type="image/png", headers={"cache-control": "no-store"})


def draw(title: str, losses: np.ndarray, stride: int) -> bytes:
    figure = Figure(figsize=(6, 4), layout="constrained")  # without pyplot, so drawn by Agg
    axes = figure.subplots()
    axes.plot(stride * np.arange(1, len(losses) + 1), losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="cross entropy", title=title)
    axes.grid(alpha=0.3)
    file = io.BytesIO()
    figure.savefig(file, dpi=100, format="png")
    return file.getvalue()


def job_of(request: Request) -> Any:
    text = request.path_params["id"]
    is_number = text.isdecimal() and len(text) <= MAX_DIGITS
    job = request.app.state.jobs.get(int(text)) if is_number else None
    if job is None:
        raise HTTPException(404, f"There is no job {text:.{MAX_DIGITS}}.")
    return job


def as_json(number: float) -> float | None:
    """JSON has no infinity, and nothing that is no number."""
    return number if math.isfinite(number) else None
