"""Labels over HTTP: predictions are kept under ids, and labels that come later are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..errors import ContextError
from ..online import ExampleSpec, OnlineLearner
from ..online._journal_keys import UnknownPredictionError
from ..tree import flatten, unflatten
from ._request import Limits, answer, full, read_json, refusal, taking


async def take_label(
    learner: OnlineLearner, spec: ExampleSpec, limits: Limits, request: Request
) -> Response:
    """Take the label of a prediction: `{"id": ..., "target": ...}`."""
    found = await read_json(request, limits)
    if not isinstance(found, dict) or found.keys() != {"id", "target"}:
        raise refusal(422, 'A label is {"id": ..., "target": ...}, and nothing else.')
    try:
        target = spec(found["target"])
    except ValueError as error:
        what = "The target is not what is needed; nothing was taken."
        raise refusal(422, what, ("target", str(error)[:300])) from error
    now = learner.statistics()
    if now.queue_depth >= now.queue_size:
        raise full(learner)
    with taking(learner):
        try:
            ticket = await learner.label(found["id"], target)
        except UnknownPredictionError:
            what = "No prediction of this id waits for a label: it was never made here, or not "
            raise refusal(404, f"{what}saved before a crash, or is too old.") from None
    return answer({"number": ticket.number, "is_duplicate": ticket.is_duplicate}, 202)


def kept(learner: OnlineLearner, inputs: Sequence[object], result: object) -> list[str | None]:
    """Keep inputs with what was predicted until labels come; return an id for each.

    None for one that cannot be kept: the journal takes nothing, or the learner is closing.
    """
    leaves, spec = flatten(result)
    columns = [np.asarray(leaf) for leaf in leaves]
    return [
        _id_of(learner, x, unflatten(spec, [column[i] for column in columns]))
        for i, x in enumerate(inputs)
    ]


def _id_of(learner: OnlineLearner, x: object, prediction: object) -> str | None:
    try:
        try:
            return learner.expect(x, prediction)
        except (TypeError, ValueError):  # a prediction of text, say: the input is enough
            return learner.expect(x)
    except (anyio.WouldBlock, ContextError):
        return None


def ids(made: Sequence[str | None], *, is_single: bool) -> Mapping[str, Any]:
    """Return the ids as the answer has them."""
    return {"id": made[0]} if is_single else {"ids": [*made]}
