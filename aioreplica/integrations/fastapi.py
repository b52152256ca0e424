"""Online learning in FastAPI: a lifespan, and a router with the routes of an `OnlineService`.

Example:
    >>> from fastapi import FastAPI  # doctest: +SKIP
    >>> from aioreplica.integrations.asgi import OnlineService
    >>> from aioreplica.integrations.fastapi import lifespan, router
    >>> service = OnlineService(learner, predict, input_like=[0.0] * 9)  # doctest: +SKIP
    >>> app = FastAPI(lifespan=lifespan(service))  # doctest: +SKIP
    >>> app.include_router(router(service), prefix="/model")  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, final

import numpy as np
from starlette.responses import Response

from .asgi import OnlineService, Route

if TYPE_CHECKING:
    from fastapi import APIRouter

__all__ = ["lifespan", "router"]


def lifespan(*services: OnlineService) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """Return the `lifespan` of an application that runs the learners of some services.

    They restore, in the order given, before the application starts; at its end they learn what was
    taken, the last one first. If one cannot be opened, those before it are closed. An application
    with a lifespan of its own enters `service.lifespan()` there, of each.

    Raises:
        TypeError: If there is no service.
    """
    if not services:
        raise TypeError("lifespan needs at least one service.")

    @asynccontextmanager
    async def run(_app: object) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for service in services:
                await stack.enter_async_context(service.lifespan())
            yield

    return run


def router(service: OnlineService) -> APIRouter:
    """Return a router with all routes of a service, described for OpenAPI.

    Its handlers read bodies themselves, within the service's limits; dependencies given to
    `include_router` run before them.

    Raises:
        ImportError: If FastAPI is not installed.
    """
    try:
        from fastapi import APIRouter
    except ImportError as error:
        raise ImportError(
            'This router needs FastAPI, which is not installed. Run: pip install "aioreplica[web]"'
        ) from error
    found = APIRouter(tags=["online learning"])
    for route in service.routes:
        found.add_api_route(
            route.path,
            _endpoint(route),
            methods=[route.method],
            summary=route.summary,
            response_model=None,
            name=route.path.strip("/"),
            openapi_extra=_described(service, route),
        )
    return found


def _endpoint(route: Route) -> Callable[[], object]:
    @final
    class RouteResponse(Response):  # type: ignore[misc]  # Any, since FastAPI need not be installed
        """Lets the route's own application answer, with the request as the server gave it."""

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await route.app(scope, receive, send)

    async def endpoint() -> Response:
        return RouteResponse()

    return endpoint


def _described(service: OnlineService, route: Route) -> dict[str, Any] | None:
    """Return the body of a route as OpenAPI has it."""
    if route.path == "/label":
        label = _object({"id": {"type": "string"}, "target": _schema(service.target_like)})
        label["properties"]["spec_version"] = {"type": "integer", "minimum": 1}
        return _body(label)
    if route.path not in {"/predict", "/learn"}:
        return None
    one = {"input": _schema(service.input_like)}
    many = {"inputs": {"type": "array", "minItems": 1, "items": one["input"]}}
    if route.path == "/learn":
        one |= {} if service.target_like is None else {"target": _schema(service.target_like)}
        many = {"examples": {"type": "array", "minItems": 1, "items": _object(one)}}
    return _body({"oneOf": [_object(one), _object(many)]})


def _body(schema: Mapping[str, object]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def _schema(like: object) -> dict[str, Any]:
    """Return the JSON schema of what looks like arrays in dicts and lists."""
    if isinstance(like, dict):
        return _object({name: _schema(each) for name, each in like.items()})
    if isinstance(like, list | tuple):
        return {"type": "array", "prefixItems": [*map(_schema, like)], "minItems": len(like)}
    array = np.asarray(like)
    names = {"b": "boolean", "i": "integer", "u": "integer"}
    schema: dict[str, Any] = {"type": names.get(array.dtype.kind, "number")}
    for size in reversed(array.shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema
