"""Online learning over HTTP: an ASGI application that predicts and learns in one process.

It is built on Starlette (the extra `web`). Mount it in any ASGI program, serve it as it is, or take
its routes into FastAPI (`aioreplica.integrations.fastapi`)::

    POST /predict        {"input": ...} or {"inputs": [...]}; the answer says the version it is from
    POST /learn          {"input": ..., "target": ...} or {"examples": [...]}; with a journal, the
                         answer comes when they are on disk; takes an Idempotency-Key
    POST /label          {"id": ..., "target": ...}, with the id of an answer of `/predict`, if the
                         journal keeps inputs for that; "spec_version" says in which form
    GET  /snapshot       which version is published, and how old it is
    GET  /dead-letters   examples that could not be learned, and why: ?after=, ?before=, ?limit=
    GET  /events         the statistics as server-sent events, whenever they have changed
    GET  /metrics        for Prometheus
    GET  /healthz        200 while the process answers
    GET  /readyz         200 while it predicts and learns, else 503 and why not
    POST /promote, ...   operations, for those with the `operator_token`
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

from .._export import export_public
from .._functions import is_async, require_no_yield
from ..devices import run_on_host
from ..online import ExampleSpec, OnlineLearner, SnapshotReader
from ..tree import map_leaves

try:
    import prometheus_client
    from starlette import routing
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.websockets import WebSocketClose

    from ._events import Events
    from ._online_metrics import ServiceMetrics
    from ._operating import OPERATIONS, list_letters, operate, show_example
    from ._predicting import NO_VERSION, NoVersionError, Predicting, ids, kept, take_label
    from ._request import (
        HEADERS,
        Limits,
        answer,
        check,
        checked_examples,
        header,
        only_field,
        read_json,
        refusal,
        take_examples,
    )
except ImportError as error:
    raise ImportError(
        f"A service of online learning needs {error.name}, which is not installed. "
        'Run: pip install "aioreplica[web]"'
    ) from error

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Limits", "OnlineService"]

LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
MAX_KEY_LENGTH = 200
LOGGER = logging.getLogger("aioreplica.integrations.asgi")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self.app(scope, receive, send)


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
            so it must be quick; an `async` one may use `ar.run_on_host`. Written with the keys of
            the learner's state, `snapshot["weights"]`, it is the same for learner and reader.
        input_like: What one input looks like: arrays and numbers, in dicts and lists if you like.
            Shapes and dtypes count, the values do not.
        target_like: The same of a target. An example is `{"input": ..., "target": ...}`, or
            `{"input": ...}` if this is None.
        validate: Called with each input, of a prediction and of an example, once its shapes are
            right; what it returns is used in its place. What it refuses with a ValueError is
            answered with 422 and that text.
        predict_batch: Most inputs of one call of `predict` that several requests share: for models
            that take about as long for many inputs as for one. A request is never cut. One call
            runs at a time, and what comes meanwhile waits for the next; if that fails, each of its
            requests is tried alone. 1 makes a call for each request, beside others.
        predict_delay_s: Seconds that a request may wait for others, if nothing runs.
        operator_token: If given, there are routes that pause, resume, save, roll back, pin, retry,
            discard and promote, for whoever brings it; see "A service of online learning".
        token: If given, every request but those of `/healthz` and `/readyz` must bring it, those
            of `/metrics` and `/events` too. It says who may ask, not who asks: one token for all.
            Without TLS it can be read on the way.
        hosts: Names under which the service may be asked, `"*"` for any.
        limits: Of what clients may ask for.
        registry: What `/metrics` shows; None makes one, `service.registry`. Export the metrics of
            your strategy there, too (`aioreplica.integrations.prometheus.export`).
        model: The label "model" of all metrics of the service; None for no label. Services in one
            registry need one each.
        report: What an application adds to each event, as JSON.
        event_interval_s: Seconds between two looks at the statistics, for `/events`.

    Raises:
        ValueError: If the token is empty, or not of ASCII; a number is out of range; or the
            registry shows the metrics of another service without a `model` of its own.
        TypeError: If `hosts` is one text, or a function is not a plain one that has to be.
    """

    def __init__(
        self,
        learner: OnlineLearner | SnapshotReader,
        predict: Callable[[Any, Any], object],  # Any: what the caller's function takes and gives
        *,
        input_like: object,
        target_like: object = None,
        validate: Callable[[Any], object] | None = None,
        predict_batch: int = 1,
        predict_delay_s: float = 0.0,
        token: str | None = None,
        operator_token: str | None = None,
        hosts: Sequence[str] = LOCAL_NAMES,
        limits: Limits | None = None,
        registry: CollectorRegistry | None = None,
        model: str | None = None,
        report: Callable[[], Mapping[str, object]] | None = None,
        event_interval_s: float = 0.5,
    ) -> None:
        for each in (token, operator_token):
            if each is not None and not (each and each.isascii() and each.isprintable()):
                raise ValueError("The token must be of printable ASCII characters, and not empty.")
        if operator_token is not None and operator_token == token:
            raise ValueError("operator_token is the token of clients. Give operators their own.")
        if isinstance(hosts, str):
            raise TypeError(f"hosts are several names, got one text: {hosts!r}. Write [{hosts!r}].")
        require_no_yield(predict, "OnlineService")
        for name, called in (("report", report), ("validate", validate)):
            require_no_yield(called, "OnlineService")
            if is_async(called):
                raise TypeError(f"{name} must be a plain function, got {called!r}.")
        self._learner = learner
        self._closing = asyncio.Event()
        self.input_like = input_like
        self.target_like = target_like
        self._input_spec = ExampleSpec(input_like)
        target = {} if target_like is None else {"target": target_like}
        self._example_spec = ExampleSpec({"input": input_like, **target})
        self._validate = validate
        self._token = token
        self._operator_token = operator_token
        self._hosts = tuple(host.lower() for host in hosts)
        self._limits = Limits() if limits is None else limits
        self._report = report
        self._read = learner.read if isinstance(learner, SnapshotReader) else learner.snapshot
        self._predicting = Predicting(predict, self._read, predict_batch, predict_delay_s)
        self._metrics = ServiceMetrics(learner, registry, model, self._predicting)
        self.registry = self._metrics.registry
        self._event_interval_s = event_interval_s
        self._streams: set[Events] = set()
        self.routes = tuple(self._make_routes())
        self._router = routing.Router(
            [routing.Route(route.path, route) for route in self.routes],
            redirect_slashes=False,
            default=_not_here,
            lifespan=self.lifespan,
        )

    def _make_routes(self) -> Sequence[Route]:
        routes = [
            self._route("/predict", "POST", "Predict from the newest version.", self._on_predict),
            self._route("/snapshot", "GET", "Which version is published.", self._on_snapshot),
            self._route("/events", "GET", "Follow the statistics.", self._on_events),
            self._route("/metrics", "GET", "Metrics for Prometheus.", self._on_metrics),
            self._route("/healthz", "GET", "Whether the process answers.", self._on_healthz),
            self._route("/readyz", "GET", "Whether it predicts and learns.", self._on_readyz),
        ]
        if isinstance(self._learner, OnlineLearner):
            letters = partial(list_letters, self._learner)
            routes += [
                self._route("/learn", "POST", "Learn from examples.", self._on_learn),
                self._route("/dead-letters", "GET", "What is not learned.", letters),
            ]
            if self._learner.keeps_inputs and self.target_like is not None:
                spec = ExampleSpec(self.target_like)
                handle = partial(take_label, self._learner, spec, self._limits)
                routes.append(self._route("/label", "POST", "Label a prediction.", handle))
            if self._operator_token is not None:
                show = partial(show_example, self._learner)
                summary = "What became of one example."
                routes.append(self._route("/example", "GET", summary, show, self._operator_token))
                for path, (_, _, summary) in OPERATIONS.items():
                    handle = partial(operate, path, self._learner, self._limits)
                    routes.append(self._route(path, "POST", summary, handle, self._operator_token))
        return routes

    # ---- as an application ---------------------------------------------------------------------

    @asynccontextmanager
    async def lifespan(self, _app: object = None) -> AsyncIterator[None]:
        """Run the learner while a block runs: the `lifespan` of an application."""
        async with AsyncExitStack() as stack:
            self._closing = asyncio.Event()  # it may have run before, on another loop
            stack.push_async_callback(self._predicting.aclose)  # last: the learner is saved
            if isinstance(self._learner, OnlineLearner):
                await stack.enter_async_context(self._learner)
            else:
                stack.enter_context(self._learner)
            stack.callback(self._predicting.cancel)
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
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/")}
        await self._router(scope, receive, send)

    def _route(
        self, path: str, method: str, summary: str, handle: _Handler, token: str | None = None
    ) -> Route:
        is_open = path in {"/healthz", "/readyz"}

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            request, start, status = Request(scope, receive), time.perf_counter(), 500
            has_begun = False

            async def send_noting(message: Message) -> None:
                nonlocal has_begun
                has_begun = True
                await send(message)

            try:
                if request.method != method:
                    raise refusal(405, f"Use {method} for {path}.", allow=method)
                if not is_open:
                    check(request, self._hosts, token or self._token)
                response = await handle(request)
                status = response.status_code
                await response(scope, receive, send_noting)
            except HTTPException as error:
                status = error.status_code
                await answer(error.detail, status, error.headers)(scope, receive, send)
            except ClientDisconnect:
                status = 499
            except Exception as error:
                if has_begun:
                    raise
                LOGGER.exception("%s %s failed.", method, path)
                what = f"{path} failed with {type(error).__name__}. The log of the service has it."
                await answer({"error": what}, status)(scope, receive, send)
            finally:
                self._metrics.requests.labels(*self._metrics.labels, path, str(status)).inc()
                if path == "/predict" and status == 200:
                    self._metrics.seconds.observe(time.perf_counter() - start)

        return Route(path, method, summary, app)

    def protect(self, app: ASGIApp) -> ASGIApp:
        """Return an application that answers only whom the service answers: host, token, origin.

        For pages and routes of your own beside the service's.
        """

        async def protected(scope: Scope, receive: Receive, send: Send) -> None:
            target = app
            try:
                if scope["type"] == "http":
                    check(Request(scope), self._hosts, self._token)
            except HTTPException as error:
                target = answer(error.detail, error.status_code, error.headers)
            await target(scope, receive, send)

        return protected

    # ---- predicting and learning ---------------------------------------------------------------

    async def predict(self, x: object) -> tuple[Any, int]:  # Any: in the structure of `predict`'s
        """Predict one input in this process, as `/predict` does: checked, and in its batches.

        It keeps no input for a label that comes later: that is `learner.expect`.

        Args:
            x: One input, in the structure of `input_like`.

        Returns:
            The prediction, as arrays and numbers without the axis of the batch; and the version
            that it is from.

        Raises:
            ValueError: If it is not like `input_like`, or `validate` refuses it.
            ContextError: If the learner was never opened, or the service is closed meanwhile.
            FileNotFoundError: If a reader finds nothing; CheckpointError if that is damaged.
            Exception: What the function `predict` raises.

        Cancellation:
            Stops waiting.
        """
        try:
            found = await self._predicting([self._valid_input(x)])
        except NoVersionError as error:
            raise error.cause from None
        return found.part(0), found.version

    async def _on_predict(self, request: Request) -> Response:
        found = await read_json(request, self._limits)
        is_single = isinstance(found, dict) and "inputs" not in found
        where = "input" if is_single else "inputs"
        given = only_field(found, where)
        inputs = self._checked([given] if is_single else given, self._valid_input, where)
        try:
            found = await self._predicting(inputs)
        except NoVersionError as error:
            raise _no_version(error.cause) from error
        name, picked = ("prediction", 0) if is_single else ("predictions", slice(None))
        lists = map_leaves(lambda leaf: leaf.tolist(), found.part(picked))
        learner, about = self._learner, dict[str, object](version=found.version)
        if isinstance(learner, OnlineLearner) and learner.keeps_inputs:
            about |= ids(kept(learner, inputs, found.rows), is_single=is_single)
        return answer({**about, name: lists})

    async def _on_learn(self, request: Request) -> Response:
        learner = self._learner
        assert isinstance(learner, OnlineLearner)  # there is no such route otherwise
        key = header(request, "idempotency-key")
        if key is not None and not (0 < len(key) <= MAX_KEY_LENGTH and key.isprintable()):
            what = f"An Idempotency-Key has 1 to {MAX_KEY_LENGTH} printable characters."
            raise refusal(422, what)
        found = await read_json(request, self._limits)
        is_single = isinstance(found, dict) and "examples" not in found
        given = [found] if is_single else only_field(found, "examples")
        where = "" if is_single else "examples"
        checked = partial(self._checked, given, self._valid_example, where)
        tickets = await take_examples(learner, given, key, checked)
        numbers = [ticket.number for ticket in tickets]
        taken = {"number": numbers[0]} if is_single else {"numbers": numbers}
        return answer({**taken, "is_duplicate": tickets[0].is_duplicate}, 202)

    def _newest(self) -> Any:  # Any: snapshots of a learner and of a reader have different keys
        try:
            return self._read()
        except NO_VERSION as error:
            raise _no_version(error) from error

    def _valid_input(self, given: object) -> object:
        found = self._input_spec(given)
        return found if self._validate is None else self._input_spec(self._validate(found))

    def _valid_example(self, given: object) -> object:
        found = self._example_spec(given)
        if self._validate is None:
            return found
        return {**found, "input": self._input_spec(self._validate(found["input"]))}

    def _checked(self, given: object, spec: Callable[[object], object], where: str) -> list[object]:
        return checked_examples(given, spec, where, self._limits)

    # ---- looking -------------------------------------------------------------------------------

    async def _on_snapshot(self, _request: Request) -> Response:
        snapshot = self._newest()
        found: dict[str, Any] = {"version": snapshot.version, "age_s": round(snapshot.age_s, 6)}
        if isinstance(self._learner, SnapshotReader):
            found |= _about(self._learner)
        return answer(found)

    async def _on_metrics(self, _request: Request) -> Response:
        # Written on a thread of the host: a registry may have much in it.
        text = await run_on_host(prometheus_client.generate_latest, self.registry)
        return Response(text, headers={**HEADERS, "content-type": CONTENT_TYPE})

    async def _on_events(self, _request: Request) -> Response:
        if len(self._streams) >= self._limits.streams:
            what = f"{len(self._streams)} clients follow already."
            raise refusal(503, what, retry_after="5")
        self._state()  # raises before the answer has begun, if there is no version yet
        records = self._learner.records if isinstance(self._learner, OnlineLearner) else None
        return Events(
            self._state,
            records,
            self._streams,
            self._closing,
            send_s=self._limits.send_s,
            interval_s=self._event_interval_s,
        )

    async def _on_healthz(self, _request: Request) -> Response:
        return answer({"status": "ok"})

    async def _on_readyz(self, _request: Request) -> Response:
        why = _why_unready(self)
        about = {} if isinstance(self._learner, OnlineLearner) else _about(self._learner)
        return answer({"status": why or "ok", **about}, 503 if why else 200)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"version": self._newest().version}
        if isinstance(self._learner, OnlineLearner):
            state["statistics"] = asdict(self._learner.statistics())
        if self._report is not None:
            state["report"] = self._report()
        return state


_Handler = Callable[[Request], Awaitable[Response]]


def _no_version(error: Exception) -> HTTPException:
    return refusal(503, f"There is no version to predict from: {error}", retry_after="1")


async def _not_here(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await WebSocketClose()(scope, receive, send)
    else:
        refused = answer({"error": f"There is no {scope['path'][:80]!r} here."}, 404)
        await refused(scope, receive, send)


def _why_unready(service: OnlineService) -> str:
    """Return why no requests should come here, "" if they should."""
    if service._closing.is_set():
        return "closing"
    if isinstance(service._learner, SnapshotReader):
        return _why_not_current(service._learner)
    if service._learner.is_ready:
        return ""
    if service._learner.state == "new":
        return "new: the application does not run the service's lifespan"
    now = service._learner.statistics()
    error, now = now.journal_error, now.challengers.get(now.champion, now)
    return ": ".join(filter(None, (now.state, now.failure, now.retry_error, error)))


def _why_not_current(reader: SnapshotReader) -> str:
    """Return why a reader's version should not be predicted from, "" if it may."""
    try:
        reader.read()
    except OSError as error:
        return f"nothing can be read: {error}"
    if reader.is_current:
        return ""
    return ": ".join(
        filter(None, (f"its publisher is silent for {reader.age_s:.0f} s", reader.error))
    )


def _about(reader: SnapshotReader) -> dict[str, Any]:
    """Return how old what a reader knows is, and why."""
    about: dict[str, Any] = {"error": reader.error} if reader.error else {}
    if math.isfinite(reader.age_s):
        about["publisher_age_s"] = round(reader.age_s, 3)
    return about


export_public(__name__, __all__, globals())
