"""Connections of psycopg_pool that lead nowhere."""

import asyncio

import psycopg
from psycopg.pq import TransactionStatus


class Pgconn:
    transaction_status = TransactionStatus.IDLE


class MemoryConnection:
    """As much of a connection as a pool looks at."""

    opened = 0

    def __init__(self):
        self.pgconn = Pgconn()
        self.closed = False
        self._pool = None

    @classmethod
    async def connect(cls, conninfo="", **options):
        await asyncio.sleep(0)
        return cls()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exception):
        await asyncio.sleep(0)

    async def execute(self, query):
        await asyncio.sleep(0)

    async def set_autocommit(self, value):
        await asyncio.sleep(0)

    @property
    def autocommit(self):
        return True

    async def rollback(self):
        await asyncio.sleep(0)

    async def close(self):
        self.closed = True
        await asyncio.sleep(0)

    def fileno(self):
        raise psycopg.OperationalError("there is no socket")
