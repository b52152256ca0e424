"""Requests over ASGI: who may ask, bodies within limits, JSON, answers and refusals.

Nothing here depends on a web framework: an ASGI server gives a scope, and a function to receive
with. A refusal is an exception with a status and reasons, raised before anything has changed.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ..tree import map_leaves

Scope = MutableMapping[str, Any]  # Any: what the ASGI specification puts there
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

DROPPED = 8  # times the limit of a body: so much is read of one that is refused
DROPPING_S = 1.0

HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class RefusedError(Exception):
    """A request that is answered with an error; nothing has changed.

    Attributes:
        status: The HTTP status.
        what: One sentence.
        reasons: Pairs: where in the body, and what is wrong there.
        headers: That go with the answer.
    """

    def __init__(
        self,
        status: int,
        what: str,
        *reasons: tuple[str, str],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(what)
        self.status = status
        self.what = what
        self.reasons = reasons
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return what the client is told."""
        listed = [{"where": where, "what": what} for where, what in self.reasons]
        return {"error": self.what, **({"reasons": listed} if listed else {})}


class GoneError(Exception):
    """The client has closed the connection before its request was whole."""


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what clients may ask for; the first that is passed is the answer, 4xx or 503.

    A body is checked while it is read, before any of it is parsed. A server has limits of its own
    on headers and connections; give it those too.

    Attributes:
        body_bytes: Of one request (413). It is parsed on the event loop, at some 30 MB/s.
        depth: Of brackets inside brackets (422).
        body_s: Seconds from the headers to the end of the body (408).
        examples: In one request (413).
        streams: Clients of `/events` at a time (503).
        send_s: Seconds that a client of `/events` may take to accept one event; then it is dropped.
    """

    body_bytes: int = 64 * 1024
    depth: int = 16
    body_s: float = 10.0
    examples: int = 256
    streams: int = 64
    send_s: float = 20.0


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?")


# ---- answers -------------------------------------------------------------------------------


def as_json(body: Any) -> str:  # Any: of what JSON has
    """Return JSON; numbers that are not finite, which JSON has not, become null."""
    try:
        return json.dumps(body, allow_nan=False)
    except ValueError:
        return json.dumps(map_leaves(_finite, body), allow_nan=False)


def _finite(leaf: Any) -> Any:
    return None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf


async def send_head(send: Send, status: int, more: Mapping[str, str]) -> None:
    """Begin an answer, with the headers that all answers have."""
    named = {**HEADERS, **more}
    headers = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def answer(
    send: Send, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> int:
    """Answer with JSON; return the status."""
    text = as_json(body).encode()
    head = {"content-type": "application/json", "content-length": str(len(text))}
    await send_head(send, status, {**head, **(headers or {})})
    await send({"type": "http.response.body", "body": text})
    return status


# ---- who asks ------------------------------------------------------------------------------


def header(scope: Scope, name: bytes) -> str | None:
    """Return a header, None if it is not there.

    Raises:
        RefusedError: If it is there more than once.
    """
    found = [value for key, value in scope["headers"] if key == name]
    if len(found) > 1:
        raise RefusedError(400, f"The header {name.decode()} is there {len(found)} times.")
    return found[0].decode("latin-1") if found else None


def check_host(scope: Scope, hosts: Sequence[str]) -> None:
    """Refuse a request to a name that is not ours: another site's name may lead to this address."""
    asked = header(scope, b"host") or ""
    named = _HOST.fullmatch(asked.lower())
    if "*" not in hosts and (named is None or (named[1] or named[2]) not in hosts):
        raise RefusedError(
            400, f"This service is not {asked[:80]!r}. Add the name to the hosts it is given."
        )


def check_token(scope: Scope, token: str | None) -> None:
    """Refuse a request without the bearer token; compares in constant time."""
    if token is None:
        return
    kind, _, given = (header(scope, b"authorization") or "").partition(" ")
    is_equal = hmac.compare_digest(given.strip().encode("latin-1"), token.encode())
    if kind.lower() != "bearer" or not is_equal:
        raise RefusedError(
            401,
            "A bearer token is needed: authorization: Bearer <token>.",
            headers={"www-authenticate": "Bearer"},
        )


def check_origin(scope: Scope) -> None:
    """Refuse what a page of another site sends through a browser."""
    site = header(scope, b"sec-fetch-site")
    origin = header(scope, b"origin")
    is_foreign = site is not None and site not in {"same-origin", "none"}
    if origin is not None and origin.partition("://")[2] != header(scope, b"host"):
        is_foreign = True
    if is_foreign:
        raise RefusedError(403, "Pages of other sites may not write here.")


# ---- bodies --------------------------------------------------------------------------------


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Read a JSON body within limits.

    Of a body that is refused some more is read and dropped, within bounds: a connection that is
    closed on unread data may be reset before its client has seen the answer.

    Raises:
        RefusedError: 415, 413, 422 or 408; the connection is to be closed after the last three.
        GoneError: If the client has gone.
    """
    kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedError(415, "Send JSON, and say so: content-type: application/json.")
    length = header(scope, b"content-length") or "0"
    announced = int(length[:20]) if length.isascii() and length.isdigit() else 0
    body = _Body(limits)
    if announced > DROPPED * limits.body_bytes:
        raise body.too_large()
    try:
        async with asyncio.timeout(limits.body_s) as deadline:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise GoneError
                was_good = body.refused is None
                body.add(message.get("body", b""))
                if body.refused is not None and was_good:
                    now = asyncio.get_running_loop().time()
                    deadline.reschedule(min(deadline.when() or now, now + DROPPING_S))
                if not message.get("more_body", False) or body.is_hopeless:
                    break
    except TimeoutError:
        what = f"The body was not there after {limits.body_s:g} s."
        late = RefusedError(408, what, headers={"connection": "close"})
        raise body.refused or late from None
    if body.refused is not None:
        raise body.refused
    return bytes(body.read)


@final
class _Body:
    """Received part of a body, and the reason for its refusal."""

    def __init__(self, limits: Limits) -> None:
        self.read = bytearray()
        self.refused: RefusedError | None = None
        self._limit = limits.body_bytes
        self._count = 0
        self._nesting = Nesting(limits.depth)

    @property
    def is_hopeless(self) -> bool:
        """True if so much of it came that no more is read."""
        return self._count > DROPPED * self._limit

    def add(self, piece: bytes) -> None:
        self._count += len(piece)
        if self.refused is not None:
            return
        try:
            if self._count > self._limit:
                raise self.too_large()
            self._nesting.read(piece)
            self.read += piece
        except RefusedError as error:
            self.refused = error
            self.read.clear()

    def too_large(self) -> RefusedError:
        what = f"A body has at most {self._limit} bytes. Send fewer examples at a time."
        return RefusedError(413, what, headers={"connection": "close"})


@final
class Nesting:
    """Counts brackets of JSON as it comes, in pieces cut anywhere."""

    _STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
    _REST = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # of a string, to its end or the piece's
    _OTHERS = bytes(set(range(256)) - set(b"[]{}"))

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._depth = 0
        self._in_string = False
        self._is_escaped = False  # the next byte of the string is not its end

    def read(self, piece: bytes) -> None:
        """Count a piece.

        Raises:
            RefusedError: 422, if brackets are nested deeper than the limit.
        """
        if self._in_string:
            piece = self._behind_string(piece, 0)
        piece = self._STRING.sub(b"", piece)
        start = piece.find(b'"')
        if start >= 0:
            self._in_string = True
            self._behind_string(piece, start + 1)
            piece = piece[:start]
        marks = np.frombuffer(piece.translate(None, self._OTHERS), np.uint8)
        if not marks.size:
            return
        depths = self._depth + np.cumsum(np.where((marks == 0x5B) | (marks == 0x7B), 1, -1))
        self._depth = int(depths[-1])
        if depths.max() > self._limit:
            raise RefusedError(
                422,
                f"The body is nested deeper than {self._limit} brackets.",
                headers={"connection": "close"},
            )

    def _behind_string(self, piece: bytes, at: int) -> bytes:
        """Return what comes after the string that is open at `at`: nothing, if it goes on."""
        if self._is_escaped and piece:
            at, self._is_escaped = at + 1, False
        rest = self._REST.match(piece, at)
        at = len(piece) if rest is None else rest.end()
        if at >= len(piece):
            return b""
        self._is_escaped = piece[at] == ord("\\")  # the last byte of this piece
        self._in_string = self._is_escaped
        return piece[at + 1 :]


def parse(body: bytes) -> Any:  # Any: JSON
    """Parse JSON; infinities and NaN, which JSON has not, are refused.

    Raises:
        RefusedError: 422, with the place.
    """
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise RefusedError(422, "The body is not JSON.", (where, error.msg)) from None
    except ValueError as error:  # not UTF-8, a constant, or a number of thousands of digits
        raise RefusedError(422, "The body is not JSON.", ("", str(error)[:200])) from None
    except RecursionError:
        raise RefusedError(422, "The body is nested too deeply.") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def fields(found: Any, names: Sequence[str], where: str = "") -> list[Any]:  # Any: JSON
    """Return the values of an object that has these fields and no other.

    Raises:
        RefusedError: 422, with every field that is missing or unknown.
    """
    wanted = ", ".join(names)
    if not isinstance(found, dict):
        what = f"an object with {wanted} is needed, got {_shown(found)}"
        raise RefusedError(422, "The body is not what is needed.", (where, what))
    inside = f"{where}." if where else ""
    missing = [(f"{inside}{name}", "is missing") for name in names if name not in found]
    unknown = [
        (f"{inside}{name[:50]}", f"is not known; there is {wanted}")
        for name in [*found][:20]
        if name not in names
    ]
    if missing or unknown:
        raise RefusedError(422, "The body is not what is needed.", *missing, *unknown)
    return [found[name] for name in names]


def _shown(found: Any) -> str:  # Any: JSON
    if isinstance(found, dict):
        return f"an object with {', '.join([*found][:8])[:100]}" if found else "an empty object"
    if isinstance(found, list):
        return f"a list of {len(found)}"
    return f"{found!r:.60}"
