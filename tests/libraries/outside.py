"""Packages that wait for the world outside in their own way: refused, or told in the report."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import aiodns
import aiomysql
import asyncpg
import grpc.aio
import trio
import uvloop
import watchfiles
import zmq
import zmq.asyncio


async def asyncpg_of_another_machine() -> None:
    await asyncpg.connect("postgres://user@db.example.org/data")


async def aiomysql_of_another_machine() -> None:
    await aiomysql.connect(host="db.example.org")


async def grpc_channel() -> None:
    async with grpc.aio.insecure_channel("localhost:50051") as channel:
        await channel.channel_ready()


async def trio_loop() -> None:
    async def nothing() -> None:
        """Do nothing."""

    trio.run(nothing)


async def zmq_socket() -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind("inproc://here")
        await socket.recv()


async def aiodns_query() -> None:
    resolver = aiodns.DNSResolver(nameservers=["127.0.0.1"], timeout=0.1, tries=1)
    try:
        await resolver.query_dns("localhost", "A")
    finally:
        await resolver.close()


async def watchfiles_changes() -> None:
    stop = asyncio.Event()
    stop.set()
    with tempfile.TemporaryDirectory() as folder:
        async for _ in watchfiles.awatch(folder, stop_event=stop, force_polling=True):
            pass


async def uvloop_beside() -> None:
    loop: Any = uvloop.new_event_loop()
    loop.close()


REFUSED = [
    (asyncpg_of_another_machine, "A connection to db.example.org:5432"),
    (aiomysql_of_another_machine, "A connection to db.example.org:3306"),
    (grpc_channel, "It waits for its sockets in C"),
    (trio_loop, "Only asyncio is simulated"),
    (zmq_socket, "Watching a file descriptor"),
]
"""Programs, and what their `RealIOError` says."""
TOLD = [
    (aiodns_query, "called the event loop and is real"),
    (watchfiles_changes, "waits in C for what is real"),
    (uvloop_beside, "runs an event loop of uvloop"),
]
"""Programs, and what `report.warnings` says, whatever comes of them."""
