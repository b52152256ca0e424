"""Requests of an online service: who may ask, bodies within limits, JSON, refusals.

A refusal is an HTTP exception whose detail is the JSON of the answer; nothing has changed yet.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import anyio
import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..errors import ContextError, JournalError, KeyReusedError
from ..online import OnlineLearner, Ticket
from ..online._labels import replayed
from ..tree import map_leaves

DROPPED = 8  # times the limit of a body: so much is read of one that is refused
DROPPING_S = 1.0
NUM_REASONS = 20

HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)  # also one without an end
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what clients may ask for; the first that is passed is the answer, 4xx or 503.

    A server has limits of its own on headers and connections; give it those too.

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


# ---- answers -------------------------------------------------------------------------------


def as_json(body: object) -> str:  # Any: of what JSON has
    """Return JSON; numbers that are not finite, which JSON has not, become null."""
    try:
        return json.dumps(body, allow_nan=False)
    except ValueError:
        return json.dumps(map_leaves(_finite, body), allow_nan=False)


def _finite(leaf: object) -> object:
    return None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf


def answer(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer of JSON, with the headers that all answers have."""
    return Response(as_json(body), status, {**HEADERS, **(headers or {})}, "application/json")


def refusal(status: int, what: str, *reasons: tuple[str, str], **headers: str) -> HTTPException:
    """Return the exception that refuses a request; reasons say where in the body, and why."""
    body: dict[str, object] = {"error": what}
    if reasons:
        body["reasons"] = [{"where": where, "what": why} for where, why in reasons]
    return HTTPException(status, body, {k.replace("_", "-"): v for k, v in headers.items()})


@contextmanager
def taking(learner: OnlineLearner) -> Iterator[None]:
    """Refuse a request for the reasons for which the learner takes nothing in a block."""
    try:
        yield
    except anyio.WouldBlock:
        raise full(learner) from None
    except KeyReusedError as error:
        raise refusal(409, str(error)) from error
    except (JournalError, ContextError) as error:
        raise refusal(503, str(error), retry_after="5") from error
    except ValueError as error:
        raise refusal(422, str(error)) from error


async def take_examples(
    learner: OnlineLearner, given: object, key: str | None, checked: Callable[[], list[object]]
) -> tuple[Ticket, ...]:
    """Take what `checked` makes of examples, or refuse them.

    If they are refused, but an older program has taken their key, they are what that took.
    """
    with taking(learner):
        try:
            examples = checked()
        except HTTPException as error:
            if key is None or error.status_code != 422 or not isinstance(given, list):
                raise
            if known := await replayed(learner._open_engine(), key, len(given)):
                return known
            raise
        if len(examples) > learner.queue_size:
            raise refusal(413, f"The queue has room for {learner.queue_size} examples at most.")
        tickets = learner.submit_many_nowait(examples, key=key)
        for ticket in tickets:
            await ticket.saved()
    return tickets


def full(learner: OnlineLearner) -> HTTPException:
    """Return the exception that refuses a request as the queue is full, with the time to wait."""
    now = learner.statistics()
    wait_s = now.queue_depth * now.step_s / max(now.num_learned, 1)
    retry_after = str(math.ceil(min(max(wait_s, 1), 60)))
    what = f"The queue is full: {now.queue_depth} of {now.queue_size} examples wait."
    return refusal(429, what, retry_after=retry_after)


# ---- who asks ------------------------------------------------------------------------------


def header(request: Request, name: str) -> str | None:
    """Return a header, None if it is not there; refuse one that is there more than once."""
    found: list[str] = request.headers.getlist(name)
    if len(found) > 1:
        raise refusal(400, f"The header {name} is there {len(found)} times.")
    return found[0] if found else None


def check(request: Request, hosts: Sequence[str], token: str | None) -> None:
    """Refuse a request to another host, without the token, or from a page of another site."""
    host = header(request, "host") or ""
    named = _HOST.fullmatch(host.lower())
    if "*" not in hosts and (named is None or (named[1] or named[2]) not in hosts):
        # Another site's name may lead to this address.
        what = f"This service is not {host[:80]!r}. Add the name to the hosts it is given."
        raise refusal(400, what)
    if token is not None:
        kind, _, given = (header(request, "authorization") or "").partition(" ")
        is_equal = hmac.compare_digest(given.strip().encode("latin-1"), token.encode())
        if kind.lower() != "bearer" or not is_equal:
            what = "A bearer token is needed: authorization: Bearer <token>."
            raise refusal(401, what, www_authenticate="Bearer")
    if request.method not in {"GET", "HEAD"}:
        site, origin = header(request, "sec-fetch-site"), header(request, "origin")
        is_foreign = site not in {None, "same-origin", "none"}
        if is_foreign or (origin is not None and origin.partition("://")[2] != host):
            raise refusal(403, "Pages of other sites may not write here.")


# ---- bodies --------------------------------------------------------------------------------


async def read_json(request: Request, limits: Limits) -> object:
    """Read a body within limits, and parse it.

    Of a body that is refused some more is read and dropped, within bounds: a connection that is
    closed on unread data may be reset before its client has seen the answer.

    Raises:
        HTTPException: 415, 413, 422 or 408.
        ClientDisconnect: If the client has gone.
    """
    kind = (header(request, "content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise refusal(415, "Send JSON, and say so: content-type: application/json.")
    what = f"A body has at most {limits.body_bytes} bytes. Send fewer examples at a time."
    too_large = refusal(413, what, connection="close")
    length = header(request, "content-length") or "0"
    if length.isascii() and length.isdigit() and int(length[:20]) > DROPPED * limits.body_bytes:
        raise too_large
    body, num_read, num_checked = bytearray(), 0, 0
    refused: HTTPException | None = None
    try:
        async with asyncio.timeout(limits.body_s) as deadline:
            async for piece in request.stream():
                num_read += len(piece)
                if refused is None:
                    body += piece
                    if num_read > limits.body_bytes:
                        refused = too_large
                    elif num_read >= 2 * num_checked:  # linear, however the body is cut
                        refused, num_checked = _too_deep(body, limits), num_read
                    if refused is not None:
                        now = asyncio.get_running_loop().time()
                        deadline.reschedule(min(deadline.when() or now, now + DROPPING_S))
                if num_read > DROPPED * limits.body_bytes:
                    break
    except TimeoutError:
        what = f"The body was not there after {limits.body_s:g} s."
        raise refused or refusal(408, what, connection="close") from None
    if refused is None and num_checked < num_read:
        refused = _too_deep(body, limits)
    if refused is not None:
        raise refused
    return parse(body)


def _too_deep(body: bytearray, limits: Limits) -> HTTPException | None:
    if depth(body) <= limits.depth:
        return None
    what = f"The body is nested deeper than {limits.depth} brackets."
    return refusal(422, what, connection="close")


def depth(body: bytes | bytearray) -> int:
    """Return how deep brackets of JSON are nested; parsing them would recurse."""
    marks = np.frombuffer(_STRING.sub(b"", body).translate(None, _NO_BRACKETS), np.uint8)
    opens = (marks == 0x5B) | (marks == 0x7B)
    return int(np.where(opens, 1, -1).cumsum().max(initial=0))


def parse(body: bytes | bytearray) -> object:
    """Parse JSON; infinities and NaN, which JSON has not, are refused with the place."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise refusal(422, "The body is not JSON.", (where, error.msg)) from None
    except ValueError as error:  # not UTF-8, a constant, or a number of thousands of digits
        raise refusal(422, "The body is not JSON.", ("", str(error)[:200])) from None
    except RecursionError:
        raise refusal(422, "The body is nested too deeply.") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def only_field(found: Any, name: str) -> object:  # Any: JSON
    """Return the value of an object that has this field and no other; refuse anything else."""
    if isinstance(found, dict):
        reasons = [] if name in found else [(name, "is missing")]
        unknown = [each[:50] for each in [*found][:20] if each != name]
        reasons += [(each, f"is not known; there is {name}") for each in unknown]
    else:
        reasons = [("", f"an object with {name} is needed, got {found!r:.60}")]
    if reasons:
        raise refusal(422, "The body is not what is needed.", *reasons)
    return found[name]


def checked_examples(
    given: object, spec: Callable[[object], object], where: str, limits: Limits
) -> list[object]:
    """Return examples as arrays; refuse all of them if one is wrong."""
    if not isinstance(given, list) or not given:
        raise refusal(422, f"{where} must be a list of at least one.")
    if len(given) > limits.examples:
        raise refusal(413, f"A request has at most {limits.examples} examples, got {len(given)}.")
    checked, reasons = [], []
    for number, each in enumerate(given):
        try:
            checked.append(spec(each))
        except ValueError as error:
            place = f"{where}[{number}]" if where.endswith("s") else where
            reasons.append((place, str(error)[:300]))
    if reasons:
        what = f"{len(reasons)} of {len(given)} are not what is needed; nothing was taken."
        raise refusal(422, what, *reasons[:NUM_REASONS])
    return checked


def only_numbers(request: Request, *names: str, besides: tuple[str, ...] = ()) -> dict[str, int]:
    """Return the numbers of a query by their names; refuse what is unknown or no number."""
    found, reasons = dict[str, int](), list[tuple[str, str]]()
    for name, given in request.query_params.multi_items():
        if name in besides:
            continue
        if name not in names:
            reasons.append((name[:50], f"is not known; there are {', '.join(names)}"))
        elif name in found or not (given.isascii() and given.isdigit() and len(given) < 19):
            reasons.append((name, "must be one whole number, not negative"))
        else:
            found[name] = int(given)
    if reasons:
        raise refusal(422, "The query is not what is needed.", *reasons[:NUM_REASONS])
    return found
