"""Online learning over HTTP: an ASGI application that predicts and learns in one process.

It depends on no web framework. Mount it in Starlette or Litestar, serve it as it is, or take its
routes into FastAPI (`aioreplica.integrations.fastapi`)::

    POST /predict        {"input": ...} or {"inputs": [...]}; the answer says the version it is from
    POST /learn          {"input": ..., "target": ...} or {"examples": [...]}; with a journal, the
                         answer comes when they are on disk; takes an Idempotency-Key
    GET  /snapshot       which version is published, and how old it is
    GET  /dead-letters   examples that could not be learned, and why
    GET  /events         the statistics as server-sent events, whenever they have changed
    GET  /metrics        for Prometheus
    GET  /healthz        200 while the process answers
    GET  /readyz         200 while it predicts and learns, else 503 and why not
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, final

import anyio
import numpy as np

from .._export import export_public
from .._functions import is_async, require_finished, require_no_yield
from ..errors import CheckpointError, ContextError, JournalError, KeyReusedError
from ..online import ExampleSpec, OnlineLearner, SnapshotReader
from ..tree import flatten, map_leaves, unflatten
from ..values import Snapshot
from ._online_events import Closing, EventStreams
from ._online_metrics import CONTENT_TYPE, ServiceMetrics
from ._request import (
    GoneError,
    Limits,
    Receive,
    RefusedError,
    Scope,
    Send,
    answer,
    check_host,
    check_origin,
    check_token,
    fields,
    header,
    parse,
    read_body,
    send_head,
)

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["Limits", "OnlineService", "Route"]

App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
MAX_KEY_LENGTH = 200
NUM_REASONS = 20


@final
@dataclass(frozen=True, slots=True)
class Route:
    """One path of a service, with an ASGI application of its own.

    Attributes:
        path: Begins with a slash.
        method: "GET" or "POST".
        summary: One sentence, for documentation.
        app: Answers a request for it, whatever the path in its scope says.
    """

    path: str
    method: str
    summary: str
    app: App


@final
class OnlineService:
    """Serves a learner, or a reader of its snapshots in another process, over HTTP.

    An ASGI application. Where something else is the server's application, put `lifespan` into that
    one: frameworks do not tell a mounted application when they start and stop. A request ends by
    itself once its body is read, also if its client has gone: an acknowledged example stays one.

    Nothing that is sent is run or unpickled; bodies are JSON, checked against the examples given
    here. What writes is taken from pages of the same origin only, and from clients that are no
    browsers. Serve it on 127.0.0.1, or give a token and put TLS in front.

    Args:
        learner: Entered and closed by `lifespan`. With a `SnapshotReader` there is no `/learn`.
        predict: `predict(snapshot, inputs)` gets one published version and a batch of inputs, in
            the structure of `input_like` with one more axis in front, and returns arrays with that
            axis; what is not finite is null in the answer. A plain function runs on the event loop,
            so it must be quick; an `async` one may use `ar.run_on_host`.
        input_like: What one input looks like: arrays and numbers, in dicts and lists if you like.
            Shapes and dtypes count, the values do not.
        target_like: The same of a target. An example is `{"input": ..., "target": ...}`, or
            `{"input": ...}` if this is None.
        token: If given, every request but those of `/healthz` and `/readyz` must bring it, those
            of `/metrics` and `/events` too. It says who may ask, not who asks: one token for all.
            Without TLS it can be read on the way.
        hosts: Names under which the service may be asked, `"*"` for any.
        limits: Of what clients may ask for.
        registry: What `/metrics` shows; None makes one, `service.registry`. Export the metrics of
            your strategy there, too (`aioreplica.integrations.prometheus.export`).
        report: What an application adds to each event, as JSON.
        event_interval_s: Seconds between two looks at the statistics, for `/events`.

    Raises:
        ImportError: If prometheus-client is not installed.
        ValueError: If the token is empty, or not of ASCII.
        TypeError: If `hosts` is one text.
    """

    def __init__(
        self,
        learner: OnlineLearner | SnapshotReader,
        predict: Callable[[Any, Any], Any],  # Any: what the caller's function takes and gives
        *,
        input_like: Any,
        target_like: Any = None,
        token: str | None = None,
        hosts: Sequence[str] = LOCAL_NAMES,
        limits: Limits | None = None,
        registry: CollectorRegistry | None = None,
        report: Callable[[], Mapping[str, Any]] | None = None,
        event_interval_s: float = 0.5,
    ) -> None:
        if token is not None and not (token and token.isascii() and token.isprintable()):
            raise ValueError("The token must be of printable ASCII characters, and not empty.")
        if isinstance(hosts, str):
            raise TypeError(f"hosts are several names, got one text: {hosts!r}. Write [{hosts!r}].")
        require_no_yield(predict, "OnlineService")
        require_no_yield(report, "OnlineService")
        if is_async(report):
            raise TypeError(f"report must be a plain function, got {report!r}.")
        self._learner = learner
        self._predict = predict
        self._closing = Closing()
        self.input_like = input_like
        self.target_like = target_like
        self._input_spec = ExampleSpec(input_like)
        target = {} if target_like is None else {"target": target_like}
        self._example_spec = ExampleSpec({"input": input_like, **target})
        self._token = token
        self._hosts = tuple(host.lower() for host in hosts)
        self._limits = Limits() if limits is None else limits
        self._report = report
        self._read = learner.read if isinstance(learner, SnapshotReader) else learner.snapshot
        self._metrics = ServiceMetrics(learner, registry)
        self.registry = self._metrics.registry
        self._follow = EventStreams(
            learner, self._state, self._closing, self._limits, interval_s=event_interval_s
        ).follow
        self.routes = tuple(self._make_routes())
        self._routes = {route.path: route for route in self.routes}

    def _make_routes(self) -> Sequence[Route]:
        routes = [
            self._route("/predict", "POST", "Predict from the newest version.", self._on_predict),
            self._route("/snapshot", "GET", "Which version is published.", self._on_snapshot),
            self._route("/events", "GET", "Follow the statistics.", self._follow),
            self._route("/metrics", "GET", "Metrics for Prometheus.", self._on_metrics),
            self._route("/healthz", "GET", "Whether the process answers.", self._on_healthz),
            self._route("/readyz", "GET", "Whether it predicts and learns.", self._on_readyz),
        ]
        if isinstance(self._learner, OnlineLearner):
            routes += [
                self._route("/learn", "POST", "Learn from examples.", self._on_learn),
                self._route("/dead-letters", "GET", "What is not learned.", self._on_dead_letters),
            ]
        return routes

    # ---- as an application ---------------------------------------------------------------------

    @asynccontextmanager
    async def lifespan(self, _app: object = None) -> AsyncIterator[None]:
        """Run the learner while a block runs: the `lifespan` of an application."""
        async with AsyncExitStack() as stack:
            self._closing.clear()  # it may have run before, on another loop
            if isinstance(self._learner, OnlineLearner):
                await stack.enter_async_context(self._learner)
            else:
                stack.enter_context(self._learner)
            stack.callback(self.close)
            yield

    def close(self) -> None:
        """End all event streams and stop being ready; idempotent.

        Servers wait for open answers before they end a lifespan, and a stream of events has no end
        of its own. Call this when you are told to stop, or let the server cancel what is left:
        `uvicorn --timeout-graceful-shutdown 5`.
        """
        self._closing.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or run for as long as the server does."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")).rstrip("/")
            route = self._routes.get(path)
            if route is None:
                await answer(send, 404, {"error": f"There is no {path[:80]!r} here."})
            else:
                await route.app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            async with self.lifespan():
                await send({"type": "lifespan.startup.complete"})
                await receive()
        except Exception as error:
            kind = "shutdown" if self._closing.is_set() else "startup"
            await send({"type": f"lifespan.{kind}.failed", "message": str(error)})
            raise
        await send({"type": "lifespan.shutdown.complete"})

    def _route(self, path: str, method: str, summary: str, handle: _Handler) -> Route:
        is_open = path in {"/healthz", "/readyz"}

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            start, status = time.perf_counter(), 500
            try:
                if scope["method"] != method:
                    raise RefusedError(405, f"Use {method} for {path}.", headers={"allow": method})
                if not is_open:
                    self._check(scope)
                status = await handle(scope, receive, send)
            except RefusedError as error:
                status = error.status
                await answer(send, status, error.body(), error.headers)
            except GoneError:
                status = 499
            finally:
                self._metrics.answered(path, status, time.perf_counter() - start)

        return Route(path, method, summary, app)

    def protect(self, app: App) -> App:
        """Return an application that answers only whom the service answers: host, token, origin.

        For pages and routes of your own beside the service's.
        """

        async def protected(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                if scope["type"] == "http":
                    self._check(scope)
            except RefusedError as error:
                await answer(send, error.status, error.body(), error.headers)
            else:
                await app(scope, receive, send)

        return protected

    def _check(self, scope: Scope) -> None:
        check_host(scope, self._hosts)
        check_token(scope, self._token)
        if scope["method"] not in {"GET", "HEAD"}:
            check_origin(scope)

    # ---- predicting and learning ---------------------------------------------------------------

    async def _on_predict(self, scope: Scope, receive: Receive, send: Send) -> int:
        found = parse(await read_body(scope, receive, self._limits))
        is_single = isinstance(found, dict) and "inputs" not in found
        [given] = fields(found, ["input" if is_single else "inputs"])
        given = [given] if is_single else given
        inputs = self._checked(given, self._input_spec, "input" if is_single else "inputs")
        snapshot = self._newest()
        result = self._predict(snapshot, _stacked(inputs))
        if isawaitable(result):
            result = await result
        require_finished(result, self._predict, "OnlineService")
        name, picked = ("prediction", 0) if is_single else ("predictions", slice(None))
        lists = map_leaves(lambda leaf: np.asarray(leaf)[picked].tolist(), result)
        found = {"version": snapshot.version, name: lists}
        return await answer(send, 200, found)

    async def _on_learn(self, scope: Scope, receive: Receive, send: Send) -> int:
        learner = self._learner
        assert isinstance(learner, OnlineLearner)  # there is no such route otherwise
        key = header(scope, b"idempotency-key")
        if key is not None and not (0 < len(key) <= MAX_KEY_LENGTH and key.isprintable()):
            raise RefusedError(
                422, f"An Idempotency-Key has 1 to {MAX_KEY_LENGTH} printable characters."
            )
        found = parse(await read_body(scope, receive, self._limits))
        is_single = isinstance(found, dict) and "examples" not in found
        given = [found] if is_single else fields(found, ["examples"])[0]
        examples = self._checked(given, self._example_spec, "" if is_single else "examples")
        try:
            now = learner.statistics()
        except ContextError as error:  # no lifespan has opened it
            raise RefusedError(503, str(error), headers={"retry-after": "5"}) from error
        if len(examples) > now.queue_size:
            raise RefusedError(413, f"The queue has room for {now.queue_size} examples at most.")
        try:
            tickets = learner.submit_many_nowait(examples, key=key)
            for ticket in tickets:
                await ticket.saved()
        except anyio.WouldBlock:
            wait_s = now.queue_depth * now.step_s / max(now.num_learned, 1)
            retry = {"retry-after": str(math.ceil(min(max(wait_s, 1), 60)))}
            what = f"The queue is full: {now.queue_depth} of {now.queue_size} examples wait."
            raise RefusedError(429, what, headers=retry) from None
        except KeyReusedError as error:
            raise RefusedError(409, str(error)) from error
        except (JournalError, ContextError) as error:
            raise RefusedError(503, str(error), headers={"retry-after": "5"}) from error
        except ValueError as error:
            raise RefusedError(422, str(error)) from error
        numbers = [ticket.number for ticket in tickets]
        taken = {"number": numbers[0]} if is_single else {"numbers": numbers}
        return await answer(send, 202, {**taken, "is_duplicate": tickets[0].is_duplicate})

    def _newest(self) -> Any:  # Any: snapshots of a learner and of a reader have different keys
        try:
            return self._read()
        except (FileNotFoundError, CheckpointError, ContextError) as error:
            what = f"There is no version to predict from: {error}"
            raise RefusedError(503, what, headers={"retry-after": "1"}) from error

    def _checked(self, given: Any, spec: ExampleSpec, where: str) -> list[Any]:
        """Return examples as arrays; refuse all of them if one is wrong."""
        if not isinstance(given, list) or not given:
            raise RefusedError(422, f"{where} must be a list of at least one.")
        if len(given) > self._limits.examples:
            raise RefusedError(
                413, f"A request has at most {self._limits.examples} examples, got {len(given)}."
            )
        checked, reasons = [], []
        for number, each in enumerate(given):
            try:
                checked.append(spec(each))
            except ValueError as error:
                place = f"{where}[{number}]" if where.endswith("s") else where
                reasons.append((place, str(error)[:300]))
        if reasons:
            what = f"{len(reasons)} of {len(given)} are not what is needed; nothing was taken."
            raise RefusedError(422, what, *reasons[:NUM_REASONS])
        return checked

    # ---- looking -------------------------------------------------------------------------------

    async def _on_snapshot(self, _scope: Scope, _receive: Receive, send: Send) -> int:
        snapshot = self._newest()
        age = {"age_s": round(snapshot.age_s, 6)} if isinstance(snapshot, Snapshot) else {}
        return await answer(send, 200, {"version": snapshot.version, **age})

    async def _on_dead_letters(self, _scope: Scope, _receive: Receive, send: Send) -> int:
        assert isinstance(self._learner, OnlineLearner)
        try:
            letters = await self._learner.dead_letters(limit=100)
        except (ContextError, JournalError) as error:
            raise RefusedError(503, str(error), headers={"retry-after": "5"}) from error
        listed = [
            {
                "number": letter.number,
                "error": letter.error,
                "time": letter.time,
                "example": map_leaves(lambda leaf: np.asarray(leaf).tolist(), letter.example),
            }
            for letter in letters
        ]
        return await answer(send, 200, {"dead_letters": listed})

    async def _on_metrics(self, _scope: Scope, _receive: Receive, send: Send) -> int:
        text = await self._metrics.text()
        await send_head(send, 200, {"content-type": CONTENT_TYPE})
        await send({"type": "http.response.body", "body": text})
        return 200

    async def _on_healthz(self, _scope: Scope, _receive: Receive, send: Send) -> int:
        return await answer(send, 200, {"status": "ok"})

    async def _on_readyz(self, _scope: Scope, _receive: Receive, send: Send) -> int:
        why = self._unready()
        return await answer(send, 503 if why else 200, {"status": why or "ok"})

    def _unready(self) -> str:
        """Return why no requests should come here, "" if they should."""
        if self._closing.is_set():
            return "closing"
        if not isinstance(self._learner, OnlineLearner):
            return "" if self._learner.is_published else "nothing is published yet"
        if self._learner.is_ready:
            return ""
        if self._learner.state == "new":
            return "new: the application does not run the service's lifespan"
        now = self._learner.statistics()
        return ": ".join(filter(None, (now.state, now.failure, now.journal_error)))

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"version": self._newest().version}
        if isinstance(self._learner, OnlineLearner):
            state["statistics"] = asdict(self._learner.statistics())
        if self._report is not None:
            state["report"] = self._report()
        return state


_Handler = Callable[[Scope, Receive, Send], Awaitable[int]]


def _stacked(examples: Sequence[Any]) -> Any:  # Any: trees of arrays
    columns = zip(*(flatten(example)[0] for example in examples), strict=True)
    return unflatten(flatten(examples[0])[1], [np.stack(column) for column in columns])


export_public(__name__, __all__, globals())
