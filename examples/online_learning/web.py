"""The application: the service's routes, the page, and what the page shows beyond them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from aioreplica.integrations.asgi import OnlineService
from aioreplica.integrations.fastapi import router
from aioreplica.online import OnlineLearner

from .model import FEATURES
from .progress import Progress

FILES = {"/": "page.html", "/page.js": "page.js", "/page.css": "page.css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
)
MAX_REPORT_BYTES = 4096


def make_app(service: OnlineService, learner: OnlineLearner, progress: Progress) -> FastAPI:
    """Return the application."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with service.lifespan(), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch(learner, progress))
            yield
            watching.cancel()

    # Its own route for this would answer without the token.
    bare = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(title="Online learning", lifespan=lifespan, **bare)
    app.include_router(router(service))
    for path in FILES:  # the same for everybody, with or without a token
        app.add_route(path, show_file)
    own = Starlette(
        routes=[
            Route("/history", history),
            Route("/replay", replay, methods=["POST"]),
            Route("/openapi.json", openapi),
        ],
        exception_handlers={ClientDisconnect: gone},
    )
    own.state.progress, own.state.described = progress, app
    own.state.operates = any(route.path == "/rollback" for route in service.routes)
    app.mount("/", service.protect(own))
    return app


async def watch(learner: OnlineLearner, progress: Progress) -> None:
    async for record in learner.records():
        progress.add(record, learner.statistics().figures)


async def show_file(request: Request) -> Response:
    headers = {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    name = FILES[request.url.path]
    return FileResponse(Path(__file__).with_name(name), headers=headers)


async def gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # in the middle of what it sent: nobody is there to read this


async def history(request: Request) -> Response:
    """Return the features, the points of all curves so far, and whether there are operations."""
    found = request.app.state
    points, operates = [*found.progress.points], found.operates
    return JSONResponse({"features": FEATURES, "points": points, "operates": operates})


async def openapi(request: Request) -> Response:
    """Return the description of the routes."""
    return JSONResponse(request.app.state.described.openapi())


async def replay(request: Request) -> Response:
    """Keep what the replaying client says of itself and of river's model."""
    kind = request.headers.get("content-type", "").partition(";")[0]  # without a charset
    if kind.strip().lower() != "application/json":
        return JSONResponse({"error": "Send JSON."}, 415)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_REPORT_BYTES:
            return JSONResponse({"error": "That is no report."}, 413)
    try:
        found: Any = json.loads(body)
        names = ("accuracy", "accuracy_river", "river")
        report: dict[str, Any] = {name: round(float(found[name]), 5) for name in names}
        report |= {name: int(found[name]) for name in ("seen", "began_at_version")}
        json.dumps(report, allow_nan=False)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return JSONResponse({"error": "That is no report."}, 422)
    request.app.state.progress.replay = report
    return JSONResponse({})
