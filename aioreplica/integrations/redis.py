"""Examples in a stream of Redis, read by the ids of its entries: a source of an `OnlineLearner`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from .._export import export_public

__all__ = ["RedisSource"]


@final
class RedisSource:
    """Reads the entries of a Redis stream, each once; a source.

    The offset is the id of an entry: XRANGE reads behind it, and no group of consumers is needed.
    What is trimmed before it was read is lost, so an offset whose entry is gone is an error, as
    nobody knows what went with it: trim with MINID at the offset in `statistics().sources`.

    Args:
        client: A `redis.asyncio.Redis`; closed by the caller.
        stream: The key of the stream. It may be made later.
        parse: Makes an example of the fields of an entry, whose names are text. If nothing is said,
            the field "example" is JSON.
        count: Most entries of one read.
        poll_s: Seconds between two looks when there is nothing new.
        allow_gaps: Whether to go on where the entry of the offset is gone.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        client: Any,  # Any: redis is no dependency
        stream: str,
        *,
        parse: Callable[[Mapping[str, Any]], object] | None = None,
        count: int = 1000,
        poll_s: float = 0.1,
        allow_gaps: bool = False,
    ) -> None:
        self._client = client
        self._stream = stream
        self._parse = _of_json if parse is None else parse
        if count < 1 or poll_s <= 0:
            raise ValueError(f"count and poll_s must be positive, got {count} and {poll_s}.")
        self._count = count
        self._poll_s = poll_s
        self._allow_gaps = allow_gaps

    async def read(self, *, after: str | None) -> Sequence[tuple[str, object]]:
        """Return entries behind an offset, each with its id; wait until there are some.

        Raises:
            LookupError: If the entry of the offset is gone, and gaps are not allowed.
            Exception: What the client raises.
        """
        while True:
            # The entry of the offset is read once more: it shows that nothing behind it is gone.
            begin = "-" if after is None else after
            entries = await self._client.xrange(self._stream, min=begin, count=self._count + 1)
            found = [(_text(name), fields) for name, fields in entries]
            if found and after is not None:
                if found[0][0] == after:
                    found = found[1:]
                elif not self._allow_gaps:
                    raise LookupError(
                        f"The stream {self._stream!r} begins at {found[0][0]}, and {after} was "
                        "read last: what was between may be lost. Trim with MINID at the offset "
                        "of `statistics().sources`; allow_gaps=True goes on."
                    )
            if found:
                return [(name, self._parsed(fields)) for name, fields in found[: self._count]]
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # clients may swallow it
                raise asyncio.CancelledError
            await asyncio.sleep(self._poll_s)

    def _parsed(self, fields: Mapping[Any, Any]) -> object:
        try:
            return self._parse({_text(name): value for name, value in fields.items()})
        except Exception as error:  # noqa: BLE001 - whatever it is, the entry is no example
            return error

    def __repr__(self) -> str:
        return f"<RedisSource {self._stream!r}>"


def _of_json(fields: Mapping[str, Any]) -> object:
    return json.loads(fields["example"])


def _text(name: bytes | str) -> str:
    return name if isinstance(name, str) else name.decode()


export_public(__name__, __all__, globals())
