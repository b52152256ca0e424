"""Calls of a service's `predict`: one for each request, or one for several that wait together.

A learner that waits for labels keeps predictions under ids, and takes the labels that come later.

Invariants:
    * All inputs of a request are in one call, so its predictions are from one version.
    * One call at a time, if several requests share calls: those that come meanwhile wait for the
      next one. A request waits at most `delay_s` for others while nothing runs.
    * A call that fails for several requests is made again for each, so that one bad input has one
      bad answer.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from itertools import chain
from typing import Any, NamedTuple, final

import anyio
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from .._functions import require_finished
from ..devices import OwnedTask, require_loop
from ..errors import CheckpointError, ContextError
from ..online import ExampleSpec, OnlineLearner
from ..online._journal_keys import UnknownPredictionError
from ..online._labels import label, waiting
from ..tree import flatten, leaves, map_leaves, unflatten
from ._request import Limits, answer, full, read_json, refusal, taking

NO_VERSION = (FileNotFoundError, CheckpointError, ContextError)
"""What reading a version raises if there is none."""


class NoVersionError(Exception):
    """No version could be read, or the service is closed: none that `predict` itself has raised.

    Args:
        cause: Why.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Predicted(NamedTuple):
    """Predictions, as arrays with a row per input, and the version they are from."""

    rows: Any  # Any: a tree of arrays
    version: int

    def part(self, rows: int | slice) -> Any:
        """Return some of the rows, in the structure of all."""
        return map_leaves(lambda leaf: leaf[rows], self.rows)


@final
@dataclass(eq=False, slots=True)
class _Asked:
    """A request that waits for a call."""

    inputs: Sequence[object]
    came_s: float
    answer: asyncio.Future[Predicted]


@final
class Predicting:
    """Predicts inputs of requests.

    Args:
        predict: See `OnlineService`.
        read: Returns the snapshot to predict from.
        batch: Most inputs of a call that several requests share; 1 for a call per request.
        delay_s: How long a request may wait for others.

    Attributes:
        num_inputs: How many inputs were predicted.
        num_calls: In how many calls.

    Raises:
        ValueError: If a number is out of range, or there is a delay and nothing to wait for.
    """

    def __init__(
        self, predict: Callable[..., object], read: Callable[[], Any], batch: int, delay_s: float
    ) -> None:
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise ValueError(f"predict_batch must be an int of at least 1, got {batch!r}.")
        if not 0 <= delay_s < math.inf:
            raise ValueError(f"predict_delay_s must be seconds, not negative, got {delay_s!r}.")
        if delay_s and batch == 1:
            raise ValueError(
                f"predict_delay_s={delay_s:g} lets requests wait for others, and predict_batch=1 "
                "takes each alone. Give predict_batch as well."
            )
        self.num_inputs = self.num_calls = 0
        self._predict = predict
        self._read = read
        self._batch = batch
        self._delay_s = delay_s
        self._waiting: deque[_Asked] = deque()
        self._came = asyncio.Event()
        self._work: OwnedTask[None] | None = None  # while something waits or runs

    async def __call__(self, inputs: Sequence[object]) -> Predicted:
        """Predict the inputs of a request, from one version.

        Raises:
            NoVersionError: If the service is closed meanwhile, or there is no version to read.
            Exception: What `predict` raises.

        Cancellation:
            Stops waiting; a call for several requests goes on for the others.
        """
        if self._batch == 1:
            return await self._call(inputs)
        loop = asyncio.get_running_loop()
        if self._work is not None:
            require_loop(self._work.task.get_loop(), "A service that predicts in batches")
        asked = _Asked(inputs, loop.time(), loop.create_future())
        self._waiting.append(asked)
        self._came.set()
        if self._work is None:
            self._work = OwnedTask(self._answer_all(), "predictions of a service")
        return await asked.answer

    def cancel(self) -> None:
        """Ask the call under way to end, and begin no other."""
        if self._work is not None:
            self._work.cancel()

    async def aclose(self) -> None:
        """End the call under way; who waits gets a ContextError. Idempotent.

        Waits for one that runs on a thread: it cannot be interrupted.
        """
        work = self._work
        if work is not None:
            work.cancel()
            await work.ended()
            self._end([])  # also if it was cancelled before it had begun

    async def _answer_all(self) -> None:
        asked: list[_Asked] = []
        try:
            while self._waiting:
                await self._wait_for_others()
                asked = self._next()
                if asked:
                    await self._answer(asked)
        finally:
            self._end(asked)

    def _end(self, asked: Sequence[_Asked]) -> None:
        self._work = None
        closed = "The service was closed before it had predicted. Ask the next one."
        for each in (*asked, *self._waiting):
            if not each.answer.done():
                each.answer.set_exception(NoVersionError(ContextError(closed)))
                each.answer.exception()  # who has asked may be cancelled, and never look
        self._waiting.clear()

    async def _wait_for_others(self) -> None:
        """Wait until a batch is full, or the first request has waited long enough."""
        if not self._delay_s:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._waiting[0].came_s + self._delay_s):
                while not self._is_full():
                    self._came.clear()
                    await self._came.wait()

    def _is_full(self) -> bool:
        count = 0
        for asked in self._waiting:
            count += len(asked.inputs)
            if count >= self._batch:
                return True
        return False

    def _next(self) -> list[_Asked]:
        """Take the requests of the next call: whole ones, in the order they came."""
        taken, count = list[_Asked](), 0
        while self._waiting:
            asked = self._waiting[0]
            if asked.answer.done():  # who has asked waits no longer
                self._waiting.popleft()
                continue
            if taken and count + len(asked.inputs) > self._batch:
                break
            taken.append(self._waiting.popleft())
            count += len(asked.inputs)
        return taken

    async def _answer(self, asked: Sequence[_Asked]) -> None:
        try:
            found = await self._call([*chain.from_iterable(each.inputs for each in asked)])
        except Exception as error:  # noqa: BLE001 - who has asked gets it
            if len(asked) > 1:
                for each in asked:
                    await self._answer([each])
            elif not asked[0].answer.done():
                asked[0].answer.set_exception(error)
                asked[0].answer.exception()  # as in `_end`
            return
        first = 0
        for each in asked:
            part = found.part(slice(first, first := first + len(each.inputs)))
            if not each.answer.done():
                each.answer.set_result(Predicted(part, found.version))

    async def _call(self, inputs: Sequence[object]) -> Predicted:
        try:
            snapshot = self._read()
        except NO_VERSION as error:
            raise NoVersionError(error) from error
        self.num_calls += 1
        self.num_inputs += len(inputs)
        try:
            result = self._predict(snapshot, _stacked(inputs))
            if isawaitable(result):
                result = await result
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RuntimeError(
                "predict was ended by a CancelledError, and nobody has cancelled it: it awaited "
                "something that was. Make an error of that in predict."
            ) from error
        require_finished(result, self._predict, "OnlineService")
        rows = map_leaves(np.asarray, result)
        for leaf in leaves(rows):
            if not leaf.ndim or len(leaf) != len(inputs):
                raise ValueError(
                    f"predict has returned an array of shape {leaf.shape} for {len(inputs)} "
                    "inputs. Return one row per input."
                )
        return Predicted(rows, snapshot.version)


def _stacked(examples: Sequence[object]) -> object:
    columns = zip(*(flatten(example)[0] for example in examples), strict=True)
    return unflatten(flatten(examples[0])[1], [np.stack(column) for column in columns])


async def take_label(
    learner: OnlineLearner, spec: ExampleSpec, limits: Limits, request: Request
) -> Response:
    """Take the label of a prediction: `{"id": ..., "target": ...}`, perhaps of a `spec_version`."""
    found = await read_json(request, limits)
    if not isinstance(found, dict) or found.keys() - {"spec_version"} != {"id", "target"}:
        what = 'A label is {"id": ..., "target": ...}, perhaps with "spec_version", and nothing '
        raise refusal(422, f"{what}else.")
    version, newest = found.get("spec_version"), learner._settings.schema.version
    if version is not None and (type(version) is not int or not 1 <= version <= newest):
        raise refusal(422, f"spec_version is a number from 1 to {newest}, got {version!r:.60}.")
    try:
        target = spec(found["target"])
    except ValueError as error:
        if version is None:
            version = await _version_of(learner, found["id"])
        if version == newest:
            what = "The target is not what is needed; nothing was taken."
            raise refusal(422, what, ("target", str(error)[:300])) from error
        target = _as_arrays(found["target"])  # which an older program was sent
    now = learner.statistics()
    if now.queue_depth >= now.queue_size:
        raise full(learner)
    with taking(learner):
        try:
            asked = learner._open_engine(), found["id"], target
            ticket = await label(*asked, waits=False, spec_version=version)
        except TypeError as error:
            raise refusal(422, str(error)) from error
        except UnknownPredictionError:
            what = "No prediction of this id waits for a label: it was never made here, or not "
            raise refusal(404, f"{what}saved before a crash, or is too old.") from None
    return answer({"number": ticket.number, "is_duplicate": ticket.is_duplicate}, 202)


async def _version_of(learner: OnlineLearner, name: object) -> int:
    """Return the spec version in whose form an input waits; the oldest one if none waits."""
    newest = learner._settings.schema.version
    if newest == 1 or not isinstance(name, str):
        return newest
    with taking(learner):
        found = await waiting(learner._open_engine(), name)
    return 1 if found is None else found.spec_version


def _as_arrays(given: object) -> object:
    """Return JSON with arrays in place of lists of numbers; what is no number is refused later."""
    if isinstance(given, dict):
        return {name: _as_arrays(each) for name, each in given.items()}
    if not isinstance(given, list):
        return given
    try:
        found = np.asarray(given)
    except ValueError:  # its rows differ in length
        found = np.empty(0, object)
    return found if found.dtype.kind in "bif" else [_as_arrays(each) for each in given]


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


def ids(made: Sequence[str | None], *, is_single: bool) -> Mapping[str, object]:
    """Return the ids as the answer has them."""
    return {"id": made[0]} if is_single else {"ids": [*made]}
