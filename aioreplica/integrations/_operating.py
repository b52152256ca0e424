"""Operations on a learner over HTTP, for those who have the operators' token.

    POST /pause, /resume      {} or, for /resume, {"set_aside": true}
    POST /checkpoint          {}
    POST /rollback            {"to": 1200, "skip": [1305]}
    POST /pin, /unpin         {} or, for /pin, {"version": 812}
    POST /retry, /discard     {"numbers": [7, 9]}, of dead letters
    POST /promote             {"model": "b"}: serve another one

    GET  /example             ?number=; whether it waits, is learned or a dead letter
    GET  /dead-letters        ?after=, ?before=, ?limit=; for clients, too

Of several models the one is meant that is served; each but `/example` takes `model` to say another.

The answer to a POST says what the learner is then; a refusal has changed nothing, unless it says
so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..errors import CheckpointError, ContextError, JournalError, PoisonedExampleError
from ..online import DeadLetter, OnlineLearner
from ..online._journal_format import MAIN, MAX_NUMBER
from ..online._labels import taken_again
from ..tree import map_leaves
from ._request import Limits, answer, only_numbers, read_json, refusal

MAX_NUMBERS = 1000
PROMOTE = "/promote"
MAX_LETTERS = 1000

Given = Mapping[str, Any]  # Any: JSON, checked by each operation
Operation = Callable[[OnlineLearner, Given], Awaitable[dict[str, Any]]]


async def _pause(learner: OnlineLearner, _given: Given) -> dict[str, object]:
    await learner.pause()
    return {}


async def _resume(learner: OnlineLearner, given: Given) -> dict[str, object]:
    set_aside = given.get("set_aside", False)
    if not isinstance(set_aside, bool):
        raise TypeError(f"set_aside must be true or false, got {set_aside!r}.")
    learner.resume(set_aside=set_aside)
    return {}


async def _checkpoint(learner: OnlineLearner, _given: Given) -> dict[str, object]:
    return {"number": await learner.checkpoint()}


async def _rollback(learner: OnlineLearner, given: Given) -> dict[str, object]:
    if "to" not in given:
        raise ValueError("to is missing: the number to go back to.")
    skip = given.get("skip", [])
    if not isinstance(skip, list) or len(skip) > MAX_NUMBERS:
        raise ValueError(f"skip must be a list of at most {MAX_NUMBERS} numbers.")
    return {"number": await learner.rollback(given["to"], skip)}


async def _pin(learner: OnlineLearner, given: Given) -> dict[str, object]:
    version = given.get("version")
    if version is not None and type(version) is not int:
        raise TypeError(f"version must be a number, got {version!r}.")
    await learner.pin(version)
    return {}


async def _unpin(learner: OnlineLearner, _given: Given) -> dict[str, object]:
    await learner.unpin()
    return {}


async def _retry(learner: OnlineLearner, given: Given) -> dict[str, object]:
    taken: dict[str, int | None] = {}

    async def retry(number: int) -> None:
        ticket = await taken_again(learner._open_engine(), number, waits=False)
        taken[str(number)] = (await ticket.saved()).number

    missing = await _each(_numbers(given), retry, "taken again", taken)
    return {"numbers": taken, "missing": missing}


async def _discard(learner: OnlineLearner, given: Given) -> dict[str, object]:
    done: dict[str, int | None] = {}

    async def discard(number: int) -> None:
        await learner.discard(number)
        done[str(number)] = None

    return {"missing": await _each(_numbers(given), discard, "discarded", done)}


async def _each(
    numbers: Sequence[int],
    do: Callable[[int], Awaitable[None]],
    what: str,
    done: Mapping[str, int | None],
) -> list[int]:
    """Do something with each dead letter; return those that are not there.

    A refusal says with which ones it was done, and with which ones not.
    """
    missing: list[int] = []
    for position, number in enumerate(numbers):
        try:
            await do(number)
        except KeyError:
            missing.append(number)
        except _REFUSED as error:
            left = ", ".join(map(str, numbers[position:]))
            was = ", ".join(done) or "none"
            raise _refusal_of(error, f" The letters {what}: {was}; not: {left}.") from error
    return missing


async def _promote(learner: OnlineLearner, given: Given) -> dict[str, object]:
    name = given.get("model")
    if not isinstance(name, str):
        raise ValueError("model is missing: the name of the one to serve.")
    first = await learner.promote(name)
    return {"champion": learner.champion, "first_version": first}


def _model(learner: OnlineLearner, name: object) -> OnlineLearner:
    """Return the learner of a model; that of the champion for None.

    Raises:
        ValueError: If there is none of that name.
        ContextError: If the learner was never opened.
    """
    chosen = learner.champion if name is None else name
    known = dict[object, object]([(MAIN, learner), *learner._settings.challengers.items()])
    found = known.get(chosen) if isinstance(chosen, str) else None
    if not isinstance(found, OnlineLearner) or found.state == "new":
        raise ValueError(f"No model {chosen!r} is open; there are {', '.join(map(repr, known))}.")
    return found


def _numbers(given: Given) -> list[int]:
    numbers = given.get("numbers")
    is_list = isinstance(numbers, list) and 0 < len(numbers) <= MAX_NUMBERS
    if not is_list or any(type(x) is not int or x > MAX_NUMBER for x in numbers or ()):
        raise ValueError(f"numbers must be a list of 1 to {MAX_NUMBERS} numbers of dead letters.")
    return list(numbers or ())


OPERATIONS: Mapping[str, tuple[Operation, tuple[str, ...], str]] = {
    "/pause": (_pause, (), "Begin no more steps."),
    "/resume": (_resume, ("set_aside",), "Go on after a pause or a failure."),
    "/checkpoint": (_checkpoint, (), "Save a checkpoint now."),
    "/rollback": (_rollback, ("to", "skip"), "Learn again from an earlier checkpoint."),
    "/pin": (_pin, ("version",), "Serve one version until /unpin."),
    "/unpin": (_unpin, (), "Serve the newest version again."),
    "/retry": (_retry, ("numbers",), "Take dead letters again."),
    "/discard": (_discard, ("numbers",), "Delete dead letters."),
    PROMOTE: (_promote, (), "Serve another model."),
}
"""By path: what is done, the fields of the body, and one sentence for documentation."""


_REFUSED = (
    ValueError, TypeError, anyio.WouldBlock, JournalError, CheckpointError, ContextError
)  # fmt: skip


def _refusal_of(error: Exception, more: str = "") -> HTTPException:
    """Return what answers an operation that failed."""
    if isinstance(error, anyio.WouldBlock):
        return refusal(429, f"The queue is full.{more}", retry_after="5")
    if isinstance(error, (JournalError, CheckpointError)):
        return refusal(503, f"{error}{more}", retry_after="5")
    return refusal(409 if isinstance(error, ContextError) else 422, f"{error}{more}")


async def operate(path: str, learner: OnlineLearner, limits: Limits, request: Request) -> Response:
    """Carry out one operation, and answer."""
    operation, fields, _ = OPERATIONS[path]
    given = await read_json(request, limits)
    if not isinstance(given, dict):
        raise refusal(422, f"The body is an object, got {given!r:.60}.")
    fields = (*fields, "model")
    unknown = [each[:50] for each in given if each not in fields]
    if unknown:
        known = ", ".join(fields)
        raise refusal(422, f"Fields are not known: {', '.join(unknown[:20])}; there are {known}.")
    try:
        asked = learner if path == PROMOTE else _model(learner, given.get("model"))
        done = await operation(asked, given)
    except _REFUSED as error:
        raise _refusal_of(error) from error
    now = (_model(learner, None) if path == PROMOTE else asked).statistics()
    about = {"model": now.model, "state": now.state, "generation": now.generation}
    return answer({**done, **about, "version": now.version, "newest_version": now.newest_version})


async def show_example(learner: OnlineLearner, request: Request) -> Response:
    """Answer with what became of one example."""
    asked = only_numbers(request, "number")
    if "number" not in asked:
        raise refusal(422, "Say which example: ?number=7.")
    number = asked["number"]
    found: dict[str, object] = {"number": number, "state": "waiting"}
    try:
        ticket = await learner.ticket(number)
        if ticket.is_done:
            found |= {"state": "learned", "version": await ticket}
    except KeyError:
        what = f"No example has the number {number}: the last one has "
        raise refusal(404, f"{what}{learner.statistics().last_number}.") from None
    except PoisonedExampleError as error:
        found |= {"state": "dead", "error": str(error)}
    except JournalError as error:
        raise refusal(503, str(error), retry_after="5") from error
    except ContextError as error:
        raise refusal(409, str(error)) from error
    return answer(found)


async def list_letters(learner: OnlineLearner, request: Request) -> Response:
    """Answer with dead letters, and the query of the next page."""
    asked = only_numbers(request, "after", "before", "limit", besides=("model",))
    limit = min(max(asked.get("limit", 100), 1), MAX_LETTERS)
    after, before = asked.get("after", 0), asked.get("before")
    try:
        chosen = _model(learner, request.query_params.get("model"))
        letters = await chosen.dead_letters(after=after, before=before, limit=limit)
    except ValueError as error:
        raise refusal(404, str(error)) from error
    except (ContextError, JournalError) as error:
        raise refusal(503, str(error), retry_after="5") from error
    is_more = len(letters) == limit
    edge = letters[-1 if before is None else 0].number if letters else 0
    following = f"{'after' if before is None else 'before'}={edge}&limit={limit}"
    if "model" in request.query_params:
        following += f"&model={chosen.statistics().model}"
    listed = [*map(_as_row, letters)]
    return answer({"dead_letters": listed, "next": following if is_more else None})


def _as_row(letter: DeadLetter) -> dict[str, object]:
    """Return a dead letter as JSON has it."""
    return {
        "number": letter.number,
        "error": letter.error,
        "time": letter.time,
        "example": map_leaves(lambda leaf: np.asarray(leaf).tolist(), letter.example),
    }
