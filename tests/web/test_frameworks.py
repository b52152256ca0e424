"""The service inside FastAPI, Starlette and Litestar: each its own, asked by the same client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException
from starlette.applications import Starlette

import examples.online_litestar
import examples.online_starlette
from aioreplica.errors import ContextError
from aioreplica.integrations.fastapi import lifespan, router
from examples.online_starlette import make_service


def fastapi_app() -> FastAPI:
    service = make_service()
    app = FastAPI(lifespan=lifespan(service))
    app.include_router(router(service), prefix="/model")
    return app


APPS = {
    "FastAPI": fastapi_app,
    "Starlette": examples.online_starlette.make_app,
    "Litestar": examples.online_litestar.make_app,
}


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Start and stop an application as a server does."""
    to_app: asyncio.Queue[Any] = asyncio.Queue()
    from_app: asyncio.Queue[Any] = asyncio.Queue()
    living = asyncio.create_task(app({"type": "lifespan"}, to_app.get, from_app.put))
    await to_app.put({"type": "lifespan.startup"})
    assert (await from_app.get())["type"] == "lifespan.startup.complete"
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    await to_app.put({"type": "lifespan.shutdown"})
    assert (await from_app.get())["type"] == "lifespan.shutdown.complete"
    await living


@pytest.mark.asyncio
@pytest.mark.parametrize("name", APPS)
async def test_a_line_is_learned_in_every_framework(name: str) -> None:
    async with running(APPS[name]()) as client:
        for i in range(60):
            first, second = i % 7 / 7, i % 5 / 5
            examples = [{"input": [first, second], "target": 2 * first - second}] * 8
            answer = await client.post("/model/learn", json={"examples": examples})
            assert answer.status_code == 202, answer.text
        async with asyncio.timeout(30):
            while (
                "aioreplica_online_learned_total 480.0"
                not in (await client.get("/model/metrics")).text
            ):
                await asyncio.sleep(0.01)
        found = (await client.post("/model/predict", json={"input": [1, 1]})).json()
        bad = await client.post("/model/predict", json={"input": [1]})
        huge = await client.post("/model/learn", content=b" " * 10**6, headers=JSON)
        foreign = await client.post("/model/learn", json={}, headers={"origin": "http://x.com"})
        stopped = await client.get("/model/readyz")

    assert found["prediction"] == pytest.approx(1.0, abs=0.3)
    assert found["version"] > 0
    assert [bad.status_code, huge.status_code, foreign.status_code] == [422, 413, 403]
    assert stopped.status_code == 200


@pytest.mark.asyncio
async def test_several_services_live_in_one_application() -> None:
    services = {"a": make_service(), "b": make_service()}
    app = FastAPI(lifespan=lifespan(*services.values()))
    for name, service in services.items():
        app.include_router(router(service), prefix=f"/{name}")
    async with running(app) as client:
        ready = [(await client.get(f"/{name}/readyz")).status_code for name in services]
        await client.post("/a/learn", json={"input": [1, 2], "target": 1.0})
        versions = await asyncio.gather(*(client.get(f"/{name}/snapshot") for name in services))
    assert ready == [200, 200]
    assert [each.status_code for each in versions] == [200, 200]
    for service in services.values():
        assert service._learner.state == "closed"
    with pytest.raises(TypeError, match="at least one service"):
        lifespan()


@pytest.mark.asyncio
async def test_if_one_cannot_be_opened_those_before_it_are_closed() -> None:
    first, second = make_service(), make_service()
    async with second.lifespan():  # so it is open already
        with pytest.raises(ContextError, match="open already"):
            async with lifespan(first, second)(None):
                pass
        assert first._learner.state == "closed"


JSON = {"content-type": "application/json"}


@pytest.mark.asyncio
async def test_openapi_describes_the_bodies_and_dependencies_come_first() -> None:
    def refuse() -> None:
        raise HTTPException(418)

    service = make_service()
    app = FastAPI(lifespan=lifespan(service))
    app.include_router(router(service))
    app.include_router(router(service), prefix="/closed", dependencies=[Depends(refuse)])
    async with running(app) as client:
        schema = (await client.get("/openapi.json")).json()
        closed = await client.post("/closed/predict", json={"input": [1, 2]})
        opened = await client.post("/predict", json={"input": [1, 2]})

    body = schema["paths"]["/learn"]["post"]["requestBody"]["content"]["application/json"]
    one, many = body["schema"]["oneOf"]
    assert one["required"] == ["input", "target"]
    assert one["properties"]["input"]["minItems"] == 2
    assert many["properties"]["examples"]["items"] == one
    assert (closed.status_code, opened.status_code) == (418, 200)


def test_nothing_here_depends_on_fastapi() -> None:
    assert isinstance(examples.online_starlette.make_app(), Starlette)
