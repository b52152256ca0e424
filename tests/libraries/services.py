"""Frameworks and clients of databases besides those of `web.py` and `databases.py`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import aiosmtplib
import databases
import fakeredis.aioredis
import graphql
import httpx
import litestar
import psycopg_pool
import quart
import sqlalchemy
import sqlalchemy.ext.asyncio
import strawberry
import tornado.httpclient
import tornado.httpserver
import tornado.web
import tortoise
from aiosmtpd.smtp import SMTP
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.routing import Route
from tortoise import fields
from tortoise.models import Model

from benchmarks.real_bugs.programs import memory_postgres


async def fakeredis_counter() -> None:
    async with fakeredis.aioredis.FakeRedis() as client:
        await asyncio.gather(*[client.incr("a") for _ in range(3)])
        assert await client.get("a") == b"3"


async def sqlalchemy_rows() -> None:
    metadata = sqlalchemy.MetaData()
    table = sqlalchemy.Table("rows", metadata, sqlalchemy.Column("x", sqlalchemy.Integer))
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite+aiosqlite:///{Path(folder) / 'database'}"
        engine = sqlalchemy.ext.asyncio.create_async_engine(url)
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)

        async def put(number: int) -> None:
            async with engine.begin() as connection:
                await connection.execute(table.insert().values(x=number))

        await put(1)
        await put(2)
        async with engine.connect() as connection:
            rows = await connection.execute(table.select().order_by(table.c.x))
            assert [row.x for row in rows] == [1, 2]
        await engine.dispose()


async def databases_rows() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with databases.Database(f"sqlite+aiosqlite:///{folder}/database") as database:
            await database.execute("create table t (x integer)")
            await database.execute_many("insert into t values (:x)", [{"x": 1}, {"x": 2}])
            assert [row.x for row in await database.fetch_all("select x from t")] == [1, 2]


class Row(Model):
    """A row of the table of `tortoise_rows`."""

    id = fields.IntField(primary_key=True)
    text = fields.CharField(max_length=10)


async def tortoise_rows() -> None:
    await tortoise.Tortoise.init(db_url="sqlite://:memory:", modules={"models": [__name__]})
    await tortoise.Tortoise.generate_schemas()
    await asyncio.gather(Row.create(text="a"), Row.create(text="b"))
    assert sorted(await Row.all().values_list("text", flat=True)) == ["a", "b"]
    await tortoise.Tortoise.close_connections()


async def psycopg_pool_of_two() -> None:
    pool: Any = psycopg_pool.AsyncConnectionPool(
        connection_class=memory_postgres.MemoryConnection,  # type: ignore[type-var]
        min_size=1,
        max_size=2,
        open=False,
    )
    served = 0

    async def request() -> None:
        nonlocal served
        async with pool.connection() as connection:
            await connection.execute("select 1")
            served += 1

    async with pool:
        await asyncio.gather(request(), request(), request())
    assert served == 3


class Inbox:
    """A handler of a mail server."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
        """Keep a mail; the name is aiosmtpd's."""
        self.texts.append(envelope.content.decode())
        return "250 OK"


async def aiosmtplib_to_aiosmtpd() -> None:
    inbox = Inbox()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: SMTP(inbox, loop=loop, hostname="localhost"), "127.0.0.1", 8025
    )
    async with server:
        mail = EmailMessage()
        mail["From"], mail["To"], mail["Subject"] = "a@localhost", "b@localhost", "news"
        mail.set_content("text")
        await aiosmtplib.send(
            mail, hostname="127.0.0.1", port=8025, local_hostname="localhost", start_tls=False
        )
    [text] = inbox.texts
    assert "Subject: news" in text


async def tornado_requests() -> None:
    class Greet(tornado.web.RequestHandler):
        async def get(self, name: str) -> None:
            await asyncio.sleep(0.01)
            self.write(f"hi {name}")

    server = tornado.httpserver.HTTPServer(tornado.web.Application([(r"/(\w+)", Greet)]))
    server.listen(8080, address="127.0.0.1")
    client = tornado.httpclient.AsyncHTTPClient(force_instance=True)
    answers = await asyncio.gather(
        *[client.fetch(f"http://127.0.0.1:8080/{name}") for name in ("you", "me")]
    )
    assert [answer.body for answer in answers] == [b"hi you", b"hi me"]
    client.close()
    server.stop()
    await server.close_all_connections()


async def quart_requests() -> None:
    app = quart.Quart(__name__)

    @app.get("/<name>")
    async def greet(name: str) -> str:
        await asyncio.sleep(0.01)
        return f"hi {name}"

    client = app.test_client()
    answers = await asyncio.gather(client.get("/you"), client.get("/me"))
    assert [await answer.get_data(as_text=True) for answer in answers] == ["hi you", "hi me"]


async def litestar_requests() -> None:
    @litestar.get("/{name:str}")
    async def greet(name: str) -> str:
        await asyncio.sleep(0.01)
        return f"hi {name}"

    app = litestar.Litestar([greet], logging_config=None)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answers = await asyncio.gather(client.get("/you"), client.get("/me"))
    assert [answer.text for answer in answers] == ["hi you", "hi me"]


async def sse_starlette_events() -> None:
    async def numbers() -> AsyncIterator[str]:
        for number in range(2):
            await asyncio.sleep(0.01)
            yield str(number)

    async def stream(request: Any) -> EventSourceResponse:
        return EventSourceResponse(numbers())

    transport = httpx.ASGITransport(app=Starlette(routes=[Route("/", stream)]))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/")).text.split() == ["data:", "0", "data:", "1"]


async def graphql_fields_at_once() -> None:
    async def resolve(*_: Any) -> int:
        await asyncio.sleep(0)
        return 1

    field = graphql.GraphQLField(graphql.GraphQLInt, resolve=resolve)
    schema = graphql.GraphQLSchema(graphql.GraphQLObjectType("Query", {"a": field, "b": field}))
    answer: Any = graphql.execute(schema, graphql.parse("{ a b }"))
    assert (await answer).data == {"a": 1, "b": 1}


@strawberry.type
class Query:
    """The root of `strawberry_fields_at_once`."""

    @strawberry.field
    async def number(self) -> int:
        """Return 1, after a moment."""
        await asyncio.sleep(0)
        return 1


async def strawberry_fields_at_once() -> None:
    answer = await strawberry.Schema(Query).execute("{ a: number b: number }")
    assert answer.data == {"a": 1, "b": 1}


PROGRAMS = [
    fakeredis_counter, sqlalchemy_rows, databases_rows, tortoise_rows, psycopg_pool_of_two,
    aiosmtplib_to_aiosmtpd, tornado_requests, quart_requests, litestar_requests,
    sse_starlette_events, graphql_fields_at_once, strawberry_fields_at_once,
]  # fmt: skip
LEAKS = {"sse_starlette_events": "_shutdown_watcher"}  # it keeps that as long as the process lives
