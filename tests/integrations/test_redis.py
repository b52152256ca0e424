"""A Redis stream as a source, with a client that stands for one; `tests/web` has a real server."""

import asyncio
from typing import Any

import pytest

from aioreplica import testing as art
from aioreplica.integrations.redis import RedisSource


class Client:
    """A stream of Redis as far as XRANGE sees it."""

    def __init__(self, *names: str, as_bytes: bool = False) -> None:
        self.names = list(names)
        self.as_bytes = as_bytes
        self.asked: list[str] = []

    async def xrange(self, name: str, *, min: str, count: int) -> list[Any]:  # noqa: A002
        self.asked.append(min)
        await asyncio.sleep(0.001)

        def key(each: str) -> tuple[int, ...]:
            return tuple(map(int, each.split("-")))

        found = [x for x in self.names if min == "-" or key(x) >= key(min)][:count]
        texts = [(x, {"example": f"[{key(x)[0]}]"}) for x in found]
        if not self.as_bytes:
            return texts
        return [(x.encode(), {b"example": y["example"].encode()}) for x, y in texts]


async def read(source: RedisSource, after: str | None) -> Any:
    async with asyncio.timeout(5.0):  # virtual
        return await source.read(after=after)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_entries_come_in_order_behind_the_offset(as_bytes: bool) -> None:
    client = Client("1-0", "2-0", "2-1", "10-0", as_bytes=as_bytes)

    async def main() -> None:
        source = RedisSource(client, "s", count=2)
        assert await read(source, None) == [("1-0", [1]), ("2-0", [2])]
        assert await read(source, "2-0") == [("2-1", [2]), ("10-0", [10])]
        with pytest.raises(TimeoutError):
            await read(source, "10-0")
        client.names.append("11-0")
        assert await read(source, "10-0") == [("11-0", [11])]
        assert await read(RedisSource(client, "s", parse=len), "10-0") == [("11-0", 1)]

    art.run(main)


def test_a_stream_that_is_not_there_yet_is_waited_for() -> None:
    client = Client()

    async def main() -> None:
        reading = asyncio.create_task(read(RedisSource(client, "s"), None))
        await asyncio.sleep(0.5)
        client.names.append("1-0")
        assert await reading == [("1-0", [1])]
        assert len(client.asked) > 3

    art.run(main)


def test_entries_that_may_be_lost_are_an_error() -> None:
    client = Client("5-0", "6-0")

    async def main() -> None:
        with pytest.raises(LookupError, match="begins at 5-0, and 4-0 was read last"):
            await read(RedisSource(client, "s"), "4-0")
        going_on = RedisSource(client, "s", allow_gaps=True)
        assert await read(going_on, "4-0") == [("5-0", [5]), ("6-0", [6])]

    art.run(main)


def test_what_cannot_be_parsed_is_told_in_its_place() -> None:
    def fails(fields: Any) -> Any:
        raise KeyError("target")

    async def main() -> None:
        [(name, error)] = await read(RedisSource(Client("5-0"), "s", parse=fails), None)
        assert name == "5-0"
        assert isinstance(error, KeyError)

    art.run(main)
    assert repr(RedisSource(None, "s")) == "<RedisSource 's'>"


def test_numbers_that_are_not_positive_are_refused() -> None:
    for options in ({"count": 0}, {"poll_s": 0.0}):
        with pytest.raises(ValueError, match="must be positive"):
            RedisSource(None, "s", **options)
